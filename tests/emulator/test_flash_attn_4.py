"""Kernels that were not written here, and are known to be right on hardware, are right here too.

Needs flash-attn-4 (the extra "peers"); what it needs beside it, such as triton, too.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest

from tests.emulator.flash_attn_4 import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is None
        or importlib.util.find_spec("flash_attn.cute") is None
        or importlib.util.find_spec("triton") is None,
        reason="flash-attn-4 is not installed",
    ),
]


# With head dim 96 the kernel puts P into shared memory, each warp its own 16 rows, and lets no warp
# wait for another before the wgmma that reads them; the emulator reads all 64 rows for the first.
P_IN_SHARED_MEMORY = pytest.mark.xfail(reason="wgmma reads A when the first warp gets there")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=str(case), marks=[P_IN_SHARED_MEMORY] * (case.head_dim == 96))
        for number, case in enumerate(CASES)
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_forward_matches_the_exact_answer(arch: str, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [sys.executable, "-m", "tests.emulator.flash_attn_4", arch, str(number)],
            env={**os.environ, "CUTE_DSL_DUMP_DIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "matches" in finished.stdout
