"""CuTe-DSL kernels of nvidia-cudnn-frontend on CPU tensors: compiled as they are and emulated.

    python -m tests.emulator.cudnn_frontend ARCH NAME [ARGUMENT ...] [races]

NAME is a function in `RUNS`; with "races" the race detector is on. Exits with an error unless the
output, and what else it computes, is near the float64 answer.

A process of its own; gpu_stand_in.py says why, and what is replaced.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from tests.emulator.gpu_stand_in import (
    MULTIPROCESSORS,
    AlignedOnGpu,
    aligned,
    replace_compiler,
    replace_device,
)

HEADS, SEQLEN, HEAD_DIM = 2, 384, 128
BLOCKS_SEEN = 2  # of keys, by each block of queries
# Of the largest value: an output rounded to bf16, of probabilities rounded to it; gradients go
# through more roundings. e4m3 keeps four bits of what is multiplied.
BF16_ERROR, GRADIENT_ERROR, E4M3_ERROR = 2.0**-7, 2.0**-6, 2.0**-3


def imported(name: str) -> ModuleType:
    """A module of the package, whose `from_dlpack` is the replaced one."""
    import cutlass.cute.runtime

    module = importlib.import_module(f"cudnn.{name}")
    if hasattr(module, "from_dlpack"):
        module.from_dlpack = cutlass.cute.runtime.from_dlpack
    return module


def require_near(name: str, found: torch.Tensor, right: torch.Tensor, allowed: float) -> None:
    error, largest = (found.double() - right).abs().max(), right.abs().max()
    assert error <= allowed * largest, f"{name} errs by {error:.2e}, its largest is {largest:.2e}"


def random(*shape: int, factor: float = 1.0) -> torch.Tensor:
    return aligned((factor * torch.randn(*shape)).bfloat16())


# -- block-sparse attention ------------------------------------------------------------------------


def seen_blocks(block: int) -> torch.Tensor:
    """(1, heads, blocks of queries, BLOCKS_SEEN) int32, ascending."""
    blocks = SEQLEN // block
    rows = [torch.randperm(blocks)[:BLOCKS_SEEN].sort().values for _ in range(HEADS * blocks)]
    return aligned(torch.stack(rows).reshape(1, HEADS, blocks, BLOCKS_SEEN).int())


def attend_to_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of (1, heads, seqlen, dim), in the precision of q, k and v."""
    blocks = seen.shape[2]
    visible = torch.zeros(1, HEADS, blocks, blocks, dtype=torch.bool).scatter(3, seen.long(), True)
    for dim in (2, 3):
        visible = visible.repeat_interleave(SEQLEN // blocks, dim)
    scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def block_sparse(block: str, direction: str = "forward") -> None:
    """Dense blocks of `block` queries and keys, and the gradients if the direction is backward."""
    interface = imported("block_sparse_attention._interface")
    q, k, v = (random(1, HEADS, SEQLEN, HEAD_DIM) for _ in range(3))
    seen = seen_blocks(int(block))
    size = {"sparse_block_size": int(block)}
    with AlignedOnGpu():
        out, lse = interface.bsa_attn_fwd(q, k, v, seen, BLOCKS_SEEN, return_lse=True, **size)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    right, right_lse = attend_to_blocks(*leaves, seen)
    require_near("out", out, right.detach(), BF16_ERROR)
    assert (lse - right_lse).abs().max() < 1e-4
    if direction == "backward":
        grad_out = random(*out.shape)
        with AlignedOnGpu():
            found = interface.bsa_attn_bwd(grad_out, q, k, v, out, lse, seen, BLOCKS_SEEN, **size)
        exact = torch.autograd.grad(right, leaves, grad_out.double())
        for name, mine, gradient in zip("qkv", found, exact, strict=False):
            require_near(f"d{name}", mine, gradient, GRADIENT_ERROR)


def block_sparse_fp8() -> None:
    """Blocks of 128, quantised to e4m3 by a kernel of the package."""
    interface = imported("block_sparse_attention._interface")
    q, k, v = (random(1, HEADS, SEQLEN, HEAD_DIM) for _ in range(3))
    seen = seen_blocks(128)
    with AlignedOnGpu():
        out = interface.bsa_fp8_blk128_fwd(q, k, v, seen, BLOCKS_SEEN)
    right, _ = attend_to_blocks(q.double(), k.double(), v.double(), seen)
    require_near("out", out, right, E4M3_ERROR)


# -- attention to compressed keys ------------------------------------------------------------------


def compressed() -> None:
    """Native sparse attention's compression branch: a query sees its share of the keys so far."""
    api = imported("native_sparse_attention.compression.api")
    seqlen_q, seqlen_k = 200, 60
    q = random(1, HEADS, seqlen_q, HEAD_DIM)
    k, v = (random(1, 1, seqlen_k, HEAD_DIM) for _ in range(2))
    with AlignedOnGpu():
        out, lse = torch.zeros_like(q), torch.zeros(1, HEADS, seqlen_q)
        attention = api.CompressionAttention(q, k, v, out, lse)
        attention.check_support()
        attention.compile()
        attention.execute(q, k, v, out, lse)
    seen = (torch.arange(seqlen_q) + 1) // (seqlen_q // seqlen_k)
    visible = torch.arange(seqlen_k) < seen[:, None]
    scores = (q.double() @ k.double().mT * HEAD_DIM**-0.5).masked_fill(~visible, -torch.inf)
    empty = seen == 0
    right = scores.softmax(-1).masked_fill(empty[:, None], 0.0) @ v.double()
    require_near("out", out, right, BF16_ERROR)
    assert (lse - scores.logsumexp(-1))[..., ~empty].abs().max() < 1e-4


# -- attention to keys by index --------------------------------------------------------------------


def indexed(heads: str, head_dim: str) -> None:
    """DeepSeek's sparse attention: rows of keys and values gathered by index, one for all heads."""
    interface = imported("deepseek_sparse_attention.sparse_attention_forward._interface_sm100")
    imported("deepseek_sparse_attention.utils.tensor_conversion")
    from cuda.bindings import driver
    from cutlass import Float32

    seqlen_q, seqlen_k, count, head_dim_v = 3, 300, 128, 512
    shape = seqlen_q, int(heads), int(head_dim)
    q, kv = random(*shape, factor=1 / 3), random(seqlen_k, shape[2])
    rows = [torch.randperm(seqlen_k)[:count] for _ in range(seqlen_q)]
    indices = aligned(torch.stack(rows).int())
    out = aligned(torch.zeros(*shape[:2], head_dim_v).bfloat16())
    largest, lse = (aligned(torch.zeros(*shape[:2])) for _ in range(2))
    scale, stream = shape[2] ** -0.5, driver.CUstream(0)
    # The package's entry insists on tensors of a CUDA device, which these cannot pretend to be.
    interface._compile_options = lambda device: "--enable-tvm-ffi"
    kernel = interface._make_kernel(interface._kernel_variant(*shape[1:]), shape[2], 0)
    tensors = (q, kv, indices, out, largest, lse, None, None, None)
    with AlignedOnGpu():
        compiled = interface._compile_kernel(kernel, *tensors, scale, stream, torch.device("cpu"))
    compiled(*tensors, Float32(scale), stream)
    gathered = kv.double()[indices.long()]
    scores = torch.einsum("qhd,qkd->qhk", q.double(), gathered) * scale
    right = torch.einsum("qhk,qkd->qhd", scores.softmax(-1), gathered[..., :head_dim_v])
    require_near("out", out, right, BF16_ERROR)
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-4


RUNS: dict[str, Callable[..., None]] = {
    "block_sparse": block_sparse,
    "block_sparse_fp8": block_sparse_fp8,
    "compressed": compressed,
    "indexed": indexed,
}


def main() -> None:
    arch, name, *arguments = sys.argv[1:]
    os.environ["CUTE_DSL_ARCH"] = arch
    check_races = arguments[-1:] == ["races"]
    replace_compiler(arch, check_races)
    replace_device(arch)
    torch.manual_seed(0)
    RUNS[name](*(arguments[:-1] if check_races else arguments))
    print(f"matches, on {MULTIPROCESSORS} multiprocessors")


if __name__ == "__main__":
    main()
