"""flash-attn-4's own functions on CPU tensors: its kernels are compiled as they are and emulated.

    python -m tests.emulator.flash_attn_4 ARCH forward|backward CASE [races]

CASE is a number in `CASES`; with "races" the race detector is on. Exits with an error unless the
output, or the gradients, match the exact answer.

A process of its own; gpu_stand_in.py says why, and what is replaced.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from fa4.reference import mask_bounds
from tests.emulator.gpu_stand_in import MULTIPROCESSORS, OnGpu, replace_compiler
from tests.oracle import Case, Inputs, assert_matches, make_inputs

CASES = [
    Case((200,), (300,), 2, 2, head_dim=128),
    Case((250,), (250,), 4, 1, head_dim=64, causal=True),
    Case((300,), (300,), 1, 1, head_dim=64, window_size=(100, 20)),
    Case((130,), (200,), 1, 1, head_dim=256),
    Case((70, 70), (140, 140), 2, 1, head_dim=96, dtype=torch.float16),
    Case((300,), (200,), 1, 1, head_dim=128),  # for a pair of CTAs on sm_100a
    Case((300,), (300,), 2, 1, head_dim=128, causal=True),
]


def replace_compilers(arch: str, check_races: bool) -> None:
    """From here on compiled functions of flash-attn-4 run in the emulator."""
    from flash_attn.cute import cute_dsl_utils

    replace_compiler(arch, check_races)
    import cutlass.cute.runtime

    cute_dsl_utils.from_dlpack = cutlass.cute.runtime.from_dlpack


def mask_options(case: Case) -> dict[str, Any]:
    left, right = (None if bound in (None, -1) else bound for bound in case.window_size)
    return {"causal": case.causal, "window_size_left": left, "window_size_right": right}


def forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); raises AssertionError unless they are right."""
    from flash_attn.cute import interface

    with OnGpu():
        out, lse, *_ = interface._flash_attn_fwd(
            inputs.q, inputs.k, inputs.v, return_lse=True, **mask_options(inputs.case)
        )
    assert_matches(out, lse, inputs)
    return out, lse


def backward(inputs: Inputs) -> None:
    """Raises AssertionError unless the gradients of q, k and v are right.

    They may err by twice what PyTorch errs by in the same dtype, and one rounding of the largest.
    """
    from flash_attn.cute import interface

    out, lse = forward(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    grad_out = torch.randn_like(out)
    with OnGpu():
        found = interface._flash_attn_bwd(
            q, k, v, out, grad_out, lse, q.shape[-1] ** -0.5, **mask_options(inputs.case)
        )
    exact = gradients(inputs, grad_out, torch.float64)
    peer = gradients(inputs, grad_out, q.dtype)
    for name, mine, theirs, right in zip("qkv", found, peer, exact, strict=False):
        error, allowed = (mine - right).abs().max(), 2 * (theirs - right).abs().max()
        allowed += torch.finfo(q.dtype).eps * right.abs().max()
        assert error <= allowed, f"d{name} errs by {error:.2e}, {allowed:.2e} is allowed"


def gradients(
    inputs: Inputs, grad_out: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v by PyTorch's plain attention computed in a dtype."""
    case = inputs.case
    leaves = [t.detach().to(dtype).requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    group = case.heads_q // case.heads_kv
    q, k, v = (t.transpose(1, 2) for t in leaves)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).to(torch.promote_types(dtype, torch.float32))
    rows, columns = (torch.arange(length) for length in scores.shape[-2:])
    distance = columns - (rows[:, None] + len(columns) - len(rows))  # from the diagonal
    left, right = mask_bounds(case.causal, case.window_size)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(dtype)
    return torch.autograd.grad((probabilities @ v).transpose(1, 2), leaves, grad_out.to(dtype))


def main() -> None:
    arch, direction, number, *options = sys.argv[1:]
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(MULTIPROCESSORS)
    replace_compilers(arch, "races" in options)
    inputs = make_inputs(CASES[int(number)])
    {"forward": forward, "backward": backward}[direction](inputs)
    print("matches")


if __name__ == "__main__":
    main()
