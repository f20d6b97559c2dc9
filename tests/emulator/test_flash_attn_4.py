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


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_forward_is_right_and_without_races(arch: str, number: int) -> None:
    output = run(arch, "forward", number, "races")
    if (arch, CASES[number].head_dim) == ("sm_100a", 256):
        assert "cluster (2, 1, 1)" in output, "no kernel of two CTAs was among them"


@pytest.mark.parametrize("number", [0, 1], ids=[str(case) for case in CASES[:2]])
def test_hopper_backward_is_right_and_without_races(number: int) -> None:
    run("sm_90a", "backward", number, "races")


@pytest.mark.parametrize("number", [0, 1], ids=[str(case) for case in CASES[:2]])
def test_blackwell_backward_is_right(number: int) -> None:
    """Its copies of dK and dV to global memory are in no bulk group and nobody waits for them
    before the CTA ends, which the race detector reports (version 4.0.0b36)."""
    run("sm_100a", "backward", number)


def run(*arguments: object) -> str:
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [sys.executable, "-m", "tests.emulator.flash_attn_4", *map(str, arguments)],
            env={**os.environ, "CUTE_DSL_DUMP_DIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "matches" in finished.stdout
    return finished.stdout
