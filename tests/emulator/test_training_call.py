"""A training call whose kernels are executed by the emulator, forward and backward, end to end."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import fa4
from fa4.reference import attention_reference


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_eager_and_compiled_training_by_emulated_kernels(deterministic: bool) -> None:
    torch._dynamo.reset()
    q, k, v = (
        torch.randn(1, rows, heads, 64).bfloat16().requires_grad_()
        for rows, heads in ((40, 2), (56, 1), (56, 1))
    )
    sink = torch.randn(2).requires_grad_()
    leaves = (q, k, v, sink)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return fa4.flash_attn_func(
            *(q, k, v),
            causal=True,
            sink=sink,
            deterministic=deterministic,
            return_lse=True,
            backend="emulator",
        )

    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = attention_reference(*wide[:3], sink=wide[3], causal=True)
    incoming = [torch.randn_like(t) for t in exact]
    wanted = torch.autograd.grad(exact, wide, incoming)
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out, lse = function(*leaves)
        assert (out - exact[0]).abs().max() < 1e-2 * exact[0].abs().max()
        assert (lse - exact[1]).abs().max() < 1e-3
        gradients = torch.autograd.grad(
            (out, lse), leaves, (incoming[0].bfloat16(), incoming[1].float())
        )
        for gradient, expected, leaf in zip(gradients, wanted, leaves, strict=True):
            assert gradient.dtype == leaf.dtype
            assert (gradient - expected).abs().max() < 2e-2 * expected.abs().max()
        results.append(gradients)
    if deterministic:
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
