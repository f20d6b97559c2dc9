"""Operators, autograd and torch.compile with Hopper kernels behind them.

Every call forbids the fallback (backend="fa4"). Numerics of kernels are judged by test_forward.py
and test_backward.py; here it is that every way to call one gives the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.library import opcheck

import fa4
from tests.gpu.kernel_names import assert_ours, kernels_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

DEVICE = "cuda"
BACKEND = "fa4"
BF16 = torch.bfloat16
CAUSAL = {"causal": True, "backend": BACKEND}


def dense(batch: int = 2, rows: int = 200, keys: int = 260, dim: int = 64) -> list[Tensor]:
    sizes = ((rows, 4), (keys, 2), (keys, 2))
    return [
        torch.randn(batch, n, heads, dim, device=DEVICE).to(BF16).requires_grad_()
        for n, heads in sizes
    ]


def packed(lengths: list[int]) -> tuple[list[Tensor], Tensor]:
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    tensors = [
        torch.randn(sum(lengths), heads, 64, device=DEVICE).to(BF16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    return tensors, cu_seqlens


def test_opcheck_passes_with_kernels() -> None:
    # One key head: torch draws from the inputs' own memory.
    q, k, v = dense(1, 70, 90)
    opcheck(torch.ops.fa4.attention_forward.default, (q, k, v), CAUSAL)
    q, k, v = (t.detach() for t in (q, k, v))
    opcheck(torch.ops.fa4.attention_forward_out.default, (torch.empty_like(q), q, k, v), CAUSAL)
    out, lse = torch.ops.fa4.attention_forward(q, k, v, **CAUSAL)
    incoming = torch.randn_like(out)
    opcheck(
        torch.ops.fa4.attention_backward.default,
        (incoming, None, q, k, v, out, lse),
        {**CAUSAL, "deterministic": True},  # it is run twice and compared
    )


def test_a_training_call_runs_our_kernels_and_no_other_attention() -> None:
    leaves = dense()

    def step() -> None:
        fa4.flash_attn_func(*leaves, **CAUSAL).backward(torch.ones_like(leaves[0]))

    names = kernels_of(step)
    assert_ours(names, "forward", "backward")


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_eager_compiled_and_operator_calls_agree(deterministic: bool) -> None:
    leaves = dense()
    incoming = torch.randn_like(leaves[0])
    lse_weight = torch.randn(2, 4, 200, device=DEVICE)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa4.flash_attn_func(q, k, v, return_lse=True, deterministic=deterministic, **CAUSAL)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.fa4.attention_forward(q, k, v, deterministic=deterministic, **CAUSAL)

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, dynamic=True)
    results = []
    for function in (eager, operator, compiled):
        out, lse = function(*leaves)
        gradients = torch.autograd.grad((out, lse), leaves, (incoming, lse_weight))
        results.append((out, lse, *gradients))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out, lse = fa4.flash_attn_func(*exact, causal=True, return_lse=True, backend="reference")
    wanted = torch.autograd.grad((out, lse), exact, (incoming.double(), lse_weight.double()))
    for other in results[1:]:
        for one, same in zip(results[0][:2], other[:2], strict=True):
            assert torch.equal(one, same)
        for one, same, right in zip(results[0][2:], other[2:], wanted, strict=True):
            if deterministic:
                assert torch.equal(one, same)
            assert (same - right).abs().max() < 2e-2 * right.abs().max()


def test_one_compiled_graph_serves_every_batch_and_length() -> None:
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, examples: Any) -> Any:
        nonlocal graphs
        graphs += any(node.op == "call_function" for node in graph.graph.nodes)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Any:
        return fa4.flash_attn_varlen_func(
            2 * q, k, v, cu_seqlens, cu_seqlens, longest, longest, **CAUSAL
        )

    for lengths in ([100, 3], [57, 0, 300], [1, 2, 3, 400, 5], [128]):
        leaves, cu_seqlens = packed(lengths)
        out = attend(*leaves, cu_seqlens, max(lengths))
        exact = [t.detach().double() for t in leaves]
        right = fa4.flash_attn_varlen_func(
            2 * exact[0], *exact[1:], cu_seqlens, cu_seqlens, causal=True, backend="reference"
        )
        assert (out - right).abs().max() < 2e-2 * right.abs().max()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), leaves))
    assert graphs == 1


def test_a_captured_call_with_an_output_replays_with_new_inputs_and_lengths() -> None:
    leaves, cu_seqlens = packed([100, 40, 60])
    q, k, v = (t.detach() for t in leaves)
    out = torch.empty_like(q)
    operator = torch.ops.fa4.attention_forward_out

    def attend() -> Tensor:
        return operator(out, q, k, v, cu_seqlens, cu_seqlens, **CAUSAL)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = attend()
    for lengths in ([100, 40, 60], [10, 0, 190], [70, 70, 60]):
        q.normal_()
        v.normal_()
        cu_seqlens.copy_(torch.tensor([0, *lengths], device=DEVICE).cumsum(0))
        out.fill_(torch.nan)
        graph.replay()
        right, right_lse = fa4.flash_attn_varlen_func(
            *(t.double() for t in (q, k, v)),
            *(cu_seqlens, cu_seqlens),
            causal=True,
            return_lse=True,
            backend="reference",
        )
        assert (out - right).abs().max() < 2e-2 * right.abs().max()
        assert (lse - right_lse).abs().max() < 1e-3


def test_a_captured_training_step_replays() -> None:
    leaves = dense()
    incoming = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        out = fa4.flash_attn_func(*leaves, deterministic=True, **CAUSAL)
        return torch.autograd.grad(out, leaves, incoming)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        for gradient in captured:
            gradient.fill_(torch.nan)
        graph.replay()
        found = [gradient.clone() for gradient in captured]
        for gradient, again in zip(found, step(), strict=True):
            assert torch.equal(gradient, again)


def test_torchs_deterministic_algorithms_are_honoured() -> None:
    leaves = dense(4, 1024, 1024)
    incoming = torch.randn_like(leaves[0])
    out = fa4.flash_attn_func(*leaves, backend=BACKEND)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(out, leaves, incoming, retain_graph=True) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            assert torch.equal(one, other)


def test_a_training_call_keeps_and_needs_memory_linear_in_the_tokens() -> None:
    """16,384 tokens: one N x N matrix of 4 heads in bf16 would be 2 GiB."""
    leaves = dense(1, 16384, 16384)
    fa4.flash_attn_func(*leaves, **CAUSAL).float().sum().backward()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fa4.flash_attn_func(*leaves, **CAUSAL).float().sum().backward()
    tokens = 16384 * (4 + 2 + 2) * 64 * 2  # bytes of q, k and v
    assert torch.cuda.max_memory_allocated() - before < 12 * tokens
