"""flash-attn-4's forward with lengths and pages gives the exact answer in the emulator.

The dense cases are in test_flash_attn_4.py, which says what these need.
"""

import os
import re
import subprocess
import sys
import tempfile

import pytest

from tests.emulator.flash_attn_4_lengths import CASES
from tests.emulator.test_flash_attn_4 import pytestmark  # noqa: F401  slow, skipped without it

ARCHS = ("sm_90a", "sm_100a")
SMALL_PAGE = 16


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{case}_pages_{page_size}")
        for number, (case, page_size) in enumerate(CASES)
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_forward_with_lengths_is_right(arch: str, number: int) -> None:
    _, page_size = CASES[number]
    finished = run(arch, number, *(["races"] * (page_size != SMALL_PAGE)))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "matches" in finished.stdout


@pytest.mark.parametrize("arch", ARCHS)
def test_missing_fence_between_cp_async_and_matmul_is_reported(arch: str) -> None:
    """Small pages are gathered by cp.async, which is no operation of the async proxy, and the
    kernels have no fence.proxy.async between these copies and the matmuls that read them (version
    4.0.0b36). The PTX ISA asks for one; the results are right all the same."""
    (number,) = (n for n, (_, page_size) in enumerate(CASES) if page_size == SMALL_PAGE)
    finished = run(arch, number, "races")
    assert finished.returncode != 0
    report = r"MissingProxyFence: a (wgmma|tcgen05\.mma) .* after a cp\.async"
    assert re.search(report, finished.stderr)


def run(arch: str, number: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.emulator.flash_attn_4_lengths", arch, str(number)]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [*command, *options],
            env={**os.environ, "CUTE_DSL_DUMP_DIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
