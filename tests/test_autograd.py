"""Gradients of eager calls: what becomes of a call between the forward launch and backward.

No kernel runs here. The CPU passes for a Hopper (tests/pretended_hopper.py), so that calls take the
path of launches; gradients are the reference's. Gradients of kernels: tests/emulator and tests/gpu.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fa4
import fa4.backward
from fa4 import attention
from fa4.autograd import BackwardOptions, gradients
from fa4.launch import Lengths
from fa4.reference import attention_reference
from fa4.reference_backward import attention_backward_reference
from tests import oracle
from tests.oracle import Case, Inputs
from tests.pretended_hopper import Hopper, hopper, training_hopper

__all__ = ["hopper", "training_hopper"]  # fixtures

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def no_known_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_launches", {})


def leaves(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """2 sequences of 6 queries and 9 keys, 4 and 2 heads, head dims 16 and 8."""
    q, k, v = (
        torch.randn(2, rows, heads, dim).to(dtype).requires_grad_()
        for rows, heads, dim in ((6, 4, 16), (9, 2, 16), (9, 2, 8))
    )
    return q, k, v


def trained(case: Case) -> tuple[Inputs, list[Tensor]]:
    """Inputs of a case, all of which want gradients."""
    inputs = oracle.make_inputs(case)
    differentiated = [inputs.q, inputs.k, inputs.v]
    if inputs.sink is not None:
        differentiated.append(inputs.sink)
    for tensor in differentiated:
        tensor.requires_grad_()
    return inputs, differentiated


CASES = [
    Case((33, 33), (40, 40), 4, 2, causal=True),
    Case((9,), (9,), 3, 3, head_dim=40, head_dim_v=24, dtype=FP16),
    Case((50,), (30,), 4, 1, causal=True, sink=FP32),  # rows without keys
    Case((20, 20), (50, 50), 4, 2, window_size=(5, 3), sink=BF16),
    Case((20,), (50,), 2, 2, causal=True, softcap=5.0, spread=4.0),
    Case((20,), (20,), 2, 2, softmax_scale=-0.3, causal=True),
    Case((3, 0, 40), (9, 4, 40), 4, 2, packed_q=True, packed_k=True, causal=True, tail_q=5),
    Case((16, 16), (24, 24), 4, 2, used_q=(16, 3), used_k=(0, 20), causal=True, sink=FP16),
    Case((5, 7), (24, 24), 4, 2, packed_q=True, used_k=(24, 3)),
    Case((12, 12), (5, 7), 4, 2, packed_k=True, tail_k=4, window_size=(2, -1)),
    Case((33,), (40,), 4, 2, storage="heads_first"),
    Case((33,), (40,), 4, 2, storage="fused", causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_has_all_that_the_gradients_depend_on_no_kernel_ran(
    training_hopper: Hopper, case: Case
) -> None:
    """Bit for bit what the reference makes of the same inputs, results and incoming gradients."""
    inputs, differentiated = trained(case)
    out, lse = oracle.attend(inputs, "auto")
    assert len(training_hopper.calls) == 1
    live, _ = oracle.readable_rows(case)
    grad_out = torch.randn_like(out).masked_fill(~live[..., None, None], oracle.NAN)
    grad_lse = torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), differentiated, (grad_out, grad_lse))
    problem = fa4.explain(inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options).problem
    with torch.no_grad():
        expected = attention_backward_reference(
            *(problem, inputs.q, inputs.k, inputs.v, Lengths(**inputs.lengths), inputs.sink),
            *(out, lse, grad_out, grad_lse),
        )
    for name, gradient, wanted in zip(("dq", "dk", "dv", "dsink"), found, expected, strict=False):
        assert torch.equal(gradient, wanted), name
        assert gradient.isfinite().all(), name
        assert gradient.abs().sum() > 0, name


def test_gradients_are_those_of_the_exact_answer_no_kernel_ran(training_hopper: Hopper) -> None:
    q, k, v = leaves(FP16)
    sink = torch.randn(4).requires_grad_()
    options: dict[str, Any] = {"causal": True, "window_size": (4, -1), "softcap": 3.0}
    out, lse = fa4.flash_attn_func(q, k, v, sink=sink, return_lse=True, **options)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v, sink), (grad_out, grad_lse))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, sink)]
    exact_out, exact_lse = attention_reference(*exact[:3], sink=exact[3], **options)
    wanted = torch.autograd.grad((exact_out, exact_lse), exact, (grad_out.double(), grad_lse))
    assert len(training_hopper.calls) == 1
    for gradient, expected, leaf in zip(found, wanted, (q, k, v, sink), strict=True):
        assert gradient.dtype == leaf.dtype
        # out is rounded to fp16 before it meets its gradient.
        assert (gradient - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.parametrize(("used", "returns_lse"), [("out", False), ("out", True), ("lse", True)])
def test_either_result_may_go_unused_no_kernel_ran(
    training_hopper: Hopper, used: str, returns_lse: bool
) -> None:
    q, k, v = leaves()
    result = fa4.flash_attn_func(q, k, v, return_lse=returns_lse)
    out, lse = result if returns_lse else (result, None)
    loss = out.float().square().sum() if used == "out" else lse.square().sum()
    found = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    both = fa4.flash_attn_func(q, k, v, return_lse=True)
    zero = 0 * (both[1].sum() if used == "out" else both[0].float().sum())
    loss = both[0].float().square().sum() if used == "out" else both[1].square().sum()
    for gradient, expected in zip(found, torch.autograd.grad(loss + zero, (q, k, v)), strict=True):
        assert torch.equal(gradient, expected)
    if used == "lse":
        assert (found[2] == 0).all()  # the values do not enter the LSE


@pytest.mark.parametrize("leaf", range(4), ids=["q", "k", "v", "sink"])
def test_only_what_wants_a_gradient_gets_one_no_kernel_ran(
    training_hopper: Hopper, leaf: int
) -> None:
    tensors = [*(t.detach() for t in leaves()), torch.randn(4)]
    tensors[leaf].requires_grad_()
    fa4.flash_attn_func(*tensors[:3], sink=tensors[3]).float().square().sum().backward()
    assert [t.grad is not None for t in tensors] == [i == leaf for i in range(4)]
    assert tensors[leaf].grad.abs().sum() > 0


def test_c52_incoming_gradients_may_have_any_strides_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    q, k, v = leaves()
    out = fa4.flash_attn_func(q, k, v, causal=True)
    for grad_out in (
        torch.ones((), dtype=BF16).expand_as(out),
        torch.randn(2, 4, 6, 8).to(BF16).transpose(1, 2),
        torch.randn(2, 6, 4, 16).to(BF16)[..., ::2],
    ):
        found = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), grad_out.contiguous(), retain_graph=True)
        for gradient, wanted in zip(found, expected, strict=True):
            assert torch.equal(gradient, wanted)
            assert gradient.is_contiguous()


def test_what_is_kept_for_backward_is_linear_in_the_tokens_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    q, k, v = (torch.randn(1, 300, 2, 8, dtype=BF16).requires_grad_() for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    assert sorted(t.numel() for t in kept) == [lse.numel(), *[q.numel()] * 4]
    out.float().sum().backward()
    assert q.grad is not None


def test_results_and_what_they_hold_go_with_their_last_user_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    q, k, v = leaves()
    out = fa4.flash_attn_func(q, k, v)
    node, held = weakref.ref(out.grad_fn), weakref.ref(out)
    out.float().sum().backward()
    training_hopper.calls.clear()
    del out
    assert node() is None
    assert held() is None


def test_second_derivatives_are_refused_no_kernel_ran(training_hopper: Hopper) -> None:
    q, k, v = leaves()
    out = fa4.flash_attn_func(q, k, v)
    # A graph of the gradients alone is no second derivative.
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v), create_graph=True)
    plain = torch.autograd.grad(fa4.flash_attn_func(q, k, v).float().square().sum(), (q, k, v))
    for gradient, expected in zip(found, plain, strict=True):
        assert torch.equal(gradient, expected)
    for leaf in (q, k, v):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            torch.autograd.grad(found[0].float().sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("backend", ["auto", "reference", "fa4"])
def test_out_is_refused_where_gradients_are_wanted_no_kernel_ran(
    training_hopper: Hopper, backend: str
) -> None:
    q, k, v = leaves()
    out = torch.full((2, 6, 4, 8), 7.0, dtype=BF16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out is given, and gradients are asked for"):
            fa4.flash_attn_func(q, k, v, out=out, backend=backend)
        assert (out == 7).all()
        with torch.no_grad():
            assert fa4.flash_attn_func(q, k, v, out=out.clone(), backend=backend).isfinite().all()
    sink = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"^out is given, and gradients are asked for"):
        fa4.flash_attn_func(q.detach(), k.detach(), v.detach(), sink=sink, out=out)


def test_options_reach_the_backward_pass_no_kernel_ran(
    training_hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def backward(problem: fa4.AttentionProblem, *tensors: Any, **options: Any) -> Any:
        seen.append(options)
        return attention_backward_reference(problem, *tensors)

    monkeypatch.setattr(fa4.backward, "attention_backward", backward)
    q, k, v = leaves()
    for deterministic in (False, True):
        for backend in ("auto", "fa4"):
            for _ in range(2):  # by the walk, then by the known launch
                fa4.flash_attn_func(
                    q, k, v, deterministic=deterministic, backend=backend
                ).float().sum().backward()
                assert seen[-1] == {
                    "deterministic": deterministic,
                    "backend": backend,
                    "arch": None,
                }
    assert len(seen) == 8
    assert training_hopper.walks == 2


def test_neither_gradient_runs_nothing_no_kernel_ran(
    training_hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("backward ran")

    monkeypatch.setattr(fa4.backward, "attention_backward", backward)
    q, k, v = leaves()
    out = fa4.flash_attn_func(q, k, v)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    Nothing.apply(out).float().sum().backward()
    assert q.grad is None


def test_autocast_leaves_get_gradients_of_their_own_dtype_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    q, k, v = leaves(FP32)
    with torch.autocast("cpu", dtype=BF16):
        out = fa4.flash_attn_func(q, k, v, causal=True)
        assert out.dtype == BF16
        # Inside autocast, where matrix products of float32 would otherwise be rounded.
        inside = torch.autograd.grad(out.float().sum(), (q, k, v), retain_graph=True)
    outside = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert len(training_hopper.calls) == 1
    for gradient, expected in zip(inside, outside, strict=True):
        assert gradient.dtype == FP32
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing_no_kernel_ran(
    training_hopper: Hopper, use_reentrant: bool
) -> None:
    q, k, v = leaves()

    def attend(*tensors: Tensor) -> Tensor:
        out = fa4.flash_attn_func(*tensors, causal=True)
        assert isinstance(out, Tensor)
        return out.float().square().sum()

    plain = torch.autograd.grad(attend(q, k, v), (q, k, v))
    assert len(training_hopper.calls) == 1
    checkpoint(attend, q, k, v, use_reentrant=use_reentrant).backward()
    assert len(training_hopper.calls) == 3
    for leaf, expected in zip((q, k, v), plain, strict=True):
        assert torch.equal(leaf.grad, expected)


def test_inputs_changed_in_place_before_backward_are_noticed_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    q, k, v = leaves()
    keys = k * 1
    out = fa4.flash_attn_func(q, keys, v)
    keys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_inference_mode_records_nothing_no_kernel_ran(training_hopper: Hopper) -> None:
    q, k, v = leaves()
    contexts: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode]
    for context in contexts:
        with context():
            assert not fa4.flash_attn_func(q, k, v).requires_grad
            assert training_hopper.arguments["stores_lse"] == 0
    assert fa4.flash_attn_func(q, k, v).requires_grad
    assert training_hopper.arguments["stores_lse"] == 1


def test_a_known_launch_is_trained_without_walking_again_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    lengths = {name: torch.tensor([0, 2, 6], dtype=torch.int32) for name in ("q", "k")}
    for _ in range(3):
        q, k, v = (torch.randn(6, heads, 16).to(BF16).requires_grad_() for heads in (4, 2, 2))
        out = fa4.flash_attn_varlen_func(
            q, k, v, lengths["q"].clone(), lengths["k"].clone(), causal=True
        )
        found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        exact, _ = attention_reference(
            *wide, cu_seqlens_q=lengths["q"], cu_seqlens_k=lengths["k"], causal=True
        )
        wanted = torch.autograd.grad(exact.square().sum(), wide)
        for gradient, expected in zip(found, wanted, strict=True):
            assert (gradient - expected).abs().max() < 3e-2 * expected.abs().max()
    assert training_hopper.walks == 1


def test_a_missing_gradient_of_out_is_zero() -> None:
    q, k, v = (t.detach() for t in leaves(torch.float64))
    out, lse = attention_reference(q, k, v)
    problem = fa4.explain(q, k, v).problem
    common = (problem, q, k, v, Lengths(), None, out, lse)
    grad_lse = torch.randn_like(lse)
    options = BackwardOptions(backend="reference")
    found = gradients(*common, None, grad_lse, options)
    expected = gradients(*common, torch.zeros_like(out), grad_lse, options)
    for gradient, wanted in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(gradient, wanted)
