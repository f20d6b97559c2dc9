"""flash-attn-4's Blackwell forward on pairs of CTAs, and with cluster launch control, is right.

Its other cases are in test_flash_attn_4.py, which says what these need.
"""

import os
import re
import subprocess
import sys
import tempfile

import pytest

from tests.emulator.flash_attn_4 import CASES
from tests.emulator.test_flash_attn_4 import pytestmark  # noqa: F401  slow, skipped without it

PAIRS = [number for number, case in enumerate(CASES) if case.head_dim == 256]
PAIRS += [n for n, case in enumerate(CASES) if case.head_dim == 128 and case.seqlens_q == (300,)]
CAUSAL = [n for n, case in enumerate(CASES) if case.head_dim == 128 and case.causal]


@pytest.mark.parametrize("number", [n for n in PAIRS if n not in CAUSAL], ids=str)
def test_forward_on_pairs_of_ctas(number: int) -> None:
    assert re.search(r"launch: grid .* cluster \(2, 1, 1\)", run(number))


@pytest.mark.parametrize("number", CAUSAL, ids=str)
def test_forward_with_clusters_that_take_the_work_of_others(number: int) -> None:
    """One CTA a tile, of which the first does the work of all."""
    assert re.search(r"launch: grid \([2-9], 1, 1\), cluster \(1, 1, 1\)", run(number, FA_CLC="1"))


def run(number: int, **environment: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.emulator.flash_attn_4",
                "sm_100a",
                "forward",
                str(number),
            ],
            env={**os.environ, "CUTE_DSL_DUMP_DIR": folder, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "matches" in finished.stdout
    return finished.stdout
