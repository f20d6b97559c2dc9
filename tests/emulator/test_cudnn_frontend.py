"""CuTe-DSL kernels of NVIDIA's cuDNN frontend give the float64 answer, and race nowhere.

Needs nvidia-cudnn-frontend (the extra "peers").
"""

import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("cudnn") is None
        or importlib.util.find_spec("cudnn.block_sparse_attention") is None,
        reason="nvidia-cudnn-frontend is not installed",
    ),
]


@pytest.mark.parametrize(
    ("arch", "block"), [("sm_90a", 64), ("sm_90a", 128), ("sm_100a", 128)], ids=str
)
def test_block_sparse_attention_and_its_gradients(arch: str, block: int) -> None:
    run(arch, "block_sparse", block, "backward")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_block_sparse_attention_is_free_of_races(arch: str) -> None:
    """Of its Hopper kernel for blocks of 64 the race detector reports that nothing makes mbarriers
    visible to TMA after they are initialised (version 1.32.0)."""
    run(arch, "block_sparse", 128, "forward", "races")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_block_sparse_attention_of_e4m3(arch: str) -> None:
    run(arch, "block_sparse_fp8")


def test_attention_to_compressed_keys() -> None:
    run("sm_100a", "compressed", "races")


@pytest.mark.parametrize(
    ("heads", "head_dim", "ctas"), [(64, 512, 1), (64, 576, 1), (128, 512, 2)], ids=str
)
def test_attention_to_indexed_keys(heads: int, head_dim: int, ctas: int) -> None:
    """Weight-stationary products, rows gathered by TMA; with 128 heads on pairs of CTAs."""
    output = run("sm_100a", "indexed", heads, head_dim, "races")
    assert f"cluster ({ctas}, 1, 1)" in output


def run(*arguments: object) -> str:
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [sys.executable, "-m", "tests.emulator.cudnn_frontend", *map(str, arguments)],
            env={**os.environ, "CUTE_DSL_DUMP_DIR": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "matches" in finished.stdout
    return finished.stdout
