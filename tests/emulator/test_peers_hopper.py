"""flash-attn-4's Hopper forward with lengths and pages gives the exact answer in the emulator.

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

SMALL_PAGE = 16


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{case}_pages_{page_size}")
        for number, (case, page_size) in enumerate(CASES)
    ],
)
def test_forward_with_lengths_is_right(number: int) -> None:
    _, page_size = CASES[number]
    finished = run(number, *(["races"] * (page_size != SMALL_PAGE)))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "matches" in finished.stdout


def test_missing_fence_between_cp_async_and_wgmma_is_reported() -> None:
    """Small pages are gathered by cp.async, which is no operation of the async proxy, and the
    kernel has no fence.proxy.async between these copies and the wgmmas that read them (version
    4.0.0b36). The PTX ISA asks for one; the results are right all the same."""
    (number,) = (n for n, (_, page_size) in enumerate(CASES) if page_size == SMALL_PAGE)
    finished = run(number, "races")
    assert finished.returncode != 0
    assert re.search(r"MissingProxyFence: a wgmma .* after a cp\.async", finished.stderr)


def run(number: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.emulator.flash_attn_4_lengths", "sm_90a", str(number)]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [*command, *options],
            env={**os.environ, "CUTE_DSL_DUMP_DIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
