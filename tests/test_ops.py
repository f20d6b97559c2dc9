"""The operators of torch.ops.fa4: what torch demands of them, and what tracers make of calls.

No kernel runs here: tensors are on the CPU, where the reference answers behind the same operators,
or the CPU passes for a Hopper (tests/pretended_hopper.py). With kernels: tests/gpu/test_ops.py.
"""

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fa4
from fa4 import attention, launch
from fa4.launch import Lengths
from fa4.reference import attention_reference
from tests import oracle
from tests.oracle import Case
from tests.pretended_hopper import Hopper, hopper, training_hopper

__all__ = ["hopper", "training_hopper"]  # fixtures

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.filterwarnings("ignore::fa4.FallbackWarning")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_launches", {})
    torch._dynamo.reset()


# Every layout and option an operator has, at sizes that tracers do not take for each other.
CASES = [
    Case((7, 7, 7), (11, 11, 11), 4, 2, head_dim=24, head_dim_v=16, dtype=FP32),
    Case((7,), (5,), 6, 2, dtype=BF16, causal=True, sink=FP32),
    Case((9, 9), (9, 9), 4, 4, dtype=FP16, window_size=(3, 2), softcap=5.0, softmax_scale=0.3),
    Case((5, 0, 8), (7, 3, 6), 4, 2, packed_q=True, packed_k=True, causal=True, tail_q=2),
    Case((5, 3), (7, 6), 4, 2, packed_q=True, packed_k=True, used_q=(4, 3), used_k=(0, 6)),
    Case((6, 6), (9, 9), 4, 2, used_k=(9, 4), dtype=BF16, sink=BF16),
    Case((5, 7), (8, 8), 4, 2, packed_q=True, dtype=torch.float64),
    Case((6,), (9,), 4, 2, storage="heads_first", dtype=FP16),
    Case((6, 6), (9, 9), 4, 2, storage="fused", dtype=FP16),
]


def arguments(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v, and the keywords of an operator. No NaN: torch compares with its own means."""
    inputs = oracle.make_inputs(case)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.nan_to_num_(0.5)
    left, right = (-1 if bound is None else bound for bound in case.window_size)
    keywords = {
        **inputs.lengths,
        "sink": inputs.sink,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_left": left,
        "window_right": right,
        "softcap": case.softcap,
    }
    return [inputs.q, inputs.k, inputs.v], keywords


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_forward_no_kernel_ran(case: Case, needs_grad: bool) -> None:
    tensors, keywords = arguments(case)
    for tensor in tensors:
        tensor.requires_grad_(needs_grad)
    if keywords["sink"] is not None:
        keywords["sink"].requires_grad_(needs_grad)
    opcheck(torch.ops.fa4.attention_forward.default, tuple(tensors), keywords)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_forward_into_out_no_kernel_ran(case: Case) -> None:
    tensors, keywords = arguments(case)
    q, _, v = tensors
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    opcheck(torch.ops.fa4.attention_forward_out.default, (out, *tensors), keywords)


@pytest.mark.parametrize("given", ["out", "lse", "both"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_backward_no_kernel_ran(case: Case, given: str) -> None:
    tensors, keywords = arguments(case)
    out, lse = torch.ops.fa4.attention_forward(*tensors, **keywords)
    grad_out = None if given == "lse" else torch.randn_like(out)
    grad_lse = None if given == "out" else torch.randn_like(lse)
    opcheck(
        torch.ops.fa4.attention_backward.default,
        (grad_out, grad_lse, *tensors, out, lse),
        keywords,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fake_results_have_the_shapes_dtypes_and_strides_of_real_ones_no_kernel_ran(
    case: Case,
) -> None:
    tensors, keywords = arguments(case)
    out, lse = torch.ops.fa4.attention_forward(*tensors, **keywords)
    incoming = (torch.ones((), dtype=out.dtype).expand_as(out), torch.randn_like(lse))
    gradients = torch.ops.fa4.attention_backward(*incoming, *tensors, out, lse, **keywords)
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        fakes = [fake(tensor) for tensor in tensors]
        keywords = {name: fake(value) for name, value in keywords.items()}
        fake_out, fake_lse = torch.ops.fa4.attention_forward(*fakes, **keywords)
        fake_gradients = torch.ops.fa4.attention_backward(
            *map(fake, incoming), *fakes, fake_out, fake_lse, **keywords
        )
    real = (out, lse, *gradients)
    for one, other in zip(real, (fake_out, fake_lse, *fake_gradients), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert one.is_contiguous()
    for one, other in itertools.combinations([*real, *tensors], 2):
        assert one.numel() == 0 or one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_and_functions_give_the_same_no_kernel_ran(case: Case) -> None:
    tensors, keywords = arguments(case)
    expected = attention_reference(
        *tensors,
        **{k: v for k, v in keywords.items() if not k.startswith("window")},
        window_size=case.window_size,
    )
    assert all(
        torch.equal(*pair)
        for pair in zip(
            torch.ops.fa4.attention_forward(*tensors, **keywords), expected, strict=True
        )
    )
    out = torch.full_like(expected[0], 7.0)
    lse = torch.ops.fa4.attention_forward_out(out, *tensors, **keywords)
    padding = oracle.padding_rows(case)
    assert torch.equal(lse, expected[1])
    assert torch.equal(out[~padding], expected[0][~padding])
    assert (out[padding] == 7).all()


def test_an_operator_launches_what_its_function_launches_no_kernel_ran(
    training_hopper: Hopper,
) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16, dtype=BF16) for heads in (4, 2, 2))
    fa4.flash_attn_func(q, k, v, causal=True, window_size=(4, -1), backend="fa4")
    out = torch.zeros_like(q)
    operators = torch.ops.fa4
    options = {"causal": True, "window_left": 4, "backend": "fa4"}
    operators.attention_forward(q, k, v, **options)
    operators.attention_forward_out(out, q, k, v, **options)
    (function_kernel, function_call), (kernel, call), (out_kernel, out_call) = training_hopper.calls
    assert function_kernel.spec == kernel.spec == out_kernel.spec
    assert out_call["out"] is out
    for name in ("softmax_scale", "softcap", "left", "right", "heads_in_group", "max_ctas"):
        assert function_call[name] == call[name] == out_call[name]


def test_nothing_is_compiled_or_launched_for_fake_tensors_no_kernel_ran(
    training_hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_kernel(spec: Any) -> Any:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(launch, "get_kernel", get_kernel)
    with FakeTensorMode():
        # Fake CUDA tensors need a torch built with CUDA as soon as autograd meets them.
        for device, wants_grad in (("cpu", False), ("cpu", True), ("cuda", False)):
            q, k, v = (
                torch.empty(2, 9, heads, 16, dtype=BF16, device=device, requires_grad=wants_grad)
                for heads in (4, 2, 2)
            )
            out, lse = fa4.flash_attn_func(q, k, v, causal=True, return_lse=True)
            assert (out.shape, out.dtype, out.device.type) == (q.shape, BF16, device)
            assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 9), FP32, device)
            if wants_grad:
                (out.float().sum() + lse.sum()).backward()
                assert q.grad is not None
                assert q.grad.shape == q.shape
    with pytest.raises(AssertionError, match="a kernel was asked for"):
        fa4.flash_attn_func(*(torch.randn(1, 4, 2, 16, dtype=BF16) for _ in range(3)))


def test_second_derivatives_are_refused_no_kernel_ran() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    out, _ = torch.ops.fa4.attention_forward(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(dq.sum(), q)


def test_an_output_given_to_an_operator_has_no_gradient_no_kernel_ran() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    out = torch.empty(1, 5, 2, 8)
    lse = torch.ops.fa4.attention_forward_out(out, q, k, v)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        lse.sum().backward()


def test_backward_without_any_gradient_is_refused_no_kernel_ran() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    out, lse = torch.ops.fa4.attention_forward(q, k, v)
    with pytest.raises(ValueError, match="grad_out and grad_lse are both None"):
        torch.ops.fa4.attention_backward(None, None, q, k, v, out, lse)


def test_what_a_function_refuses_its_operator_refuses_no_kernel_ran() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    operator = torch.ops.fa4.attention_forward
    with pytest.raises(ValueError, match="left bound is -2"):
        operator(q, k, v, window_left=-2)
    with pytest.raises(ValueError, match="backend='fast' is not one of"):
        operator(q, k, v, backend="fast")
    with pytest.raises(ValueError, match="arch='sm_90a' is for"):
        operator(q, k, v, arch="sm_90a")
    with pytest.raises(fa4.UnsupportedProblemError, match="a cpu device has no kernels"):
        operator(q, k, v, backend="fa4")


def test_checked_mode_reads_lengths_when_an_operator_runs_no_kernel_ran() -> None:
    q, k, v = (torch.randn(10, heads, 16) for heads in (4, 2, 2))
    good, bad = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 10], [0, 4, 11]))

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(*lengths: Any) -> Any:
        return fa4.flash_attn_varlen_func(q, k, v, *lengths)

    with fa4.checked():
        attend(good, good, 6, 6)
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] is 11"):
            attend(bad, good, 6, 6)
        with pytest.raises(ValueError, match="max_seqlen_k is 5"):
            attend(good, good, 6, 5)


def test_autocast_does_not_reach_into_an_operator_no_kernel_ran() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    plain, _ = torch.ops.fa4.attention_forward(q, k, v)
    with torch.autocast("cpu", dtype=BF16):
        inside, _ = torch.ops.fa4.attention_forward(q, k, v)
    assert inside.dtype == FP32
    assert torch.equal(inside, plain)


# -- torch.compile -------------------------------------------------------------------------------


def dense(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = fa4.flash_attn_func(
        2 * q, k, v, causal=True, window_size=(5, None), softcap=3.0, sink=sink, return_lse=True
    )
    return 1.5 * out, lse + 1


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    out = fa4.flash_attn_varlen_func(
        2 * q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
    )
    return 1.5 * out


def num_graphs(counter: CompileCounterWithBackend) -> int:
    """Graphs that hold an operation; tracers also make empty ones."""
    return sum(any(n.op == "call_function" for n in graph.graph.nodes) for graph in counter.graphs)


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_dense_attention_is_one_graph_for_all_sizes_no_kernel_ran(
    dynamic: bool | None,
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dense, fullgraph=True, dynamic=dynamic, backend=counter)
    for batch, seqlen in ((3, 6), (5, 9), (7, 17), (11, 33)):
        shapes = ((batch, seqlen, 4, 16), (batch, seqlen + 3, 2, 16), (batch, seqlen + 3, 2, 8))
        leaves = [torch.randn(shape, requires_grad=True) for shape in (*shapes, (4,))]
        results, expected = compiled(*leaves), dense(*leaves)
        incoming = [torch.randn_like(t) for t in results]
        gradients = torch.autograd.grad(results, leaves, incoming)
        expected_gradients = torch.autograd.grad(expected, leaves, incoming)
        for one, other in zip(
            (*results, *gradients), (*expected, *expected_gradients), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
    # Sizes become symbols with the second call unless they are from the start.
    assert num_graphs(counter) == (1 if dynamic else 2)


def test_compiled_packed_attention_is_one_graph_for_all_lengths_no_kernel_ran() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([3, 4], [5, 6, 7], [2, 9, 0, 11, 3], [13]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        q, k, v = (torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (6, 2, 2))
        results = [f(q, k, v, cu_seqlens, max(lengths)) for f in (compiled, packed)]
        incoming = torch.randn_like(results[0])
        gradients = [torch.autograd.grad(out, (q, k, v), incoming) for out in results]
        for one, other in zip(
            (results[0], *gradients[0]), (results[1], *gradients[1]), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
    assert num_graphs(counter) == 1


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_compiled_call_launches_as_an_eager_one_no_kernel_ran(
    training_hopper: Hopper, wants_grad: bool
) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16).to(BF16) for heads in (4, 2, 2))
    q.requires_grad_(wants_grad)

    def attend(q: Tensor) -> Tensor:
        out = fa4.flash_attn_func(q, k, v, causal=True, backend="auto")
        assert isinstance(out, Tensor)
        return out

    expected = attend(q)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(q)
    assert torch.equal(out, expected)
    assert len(training_hopper.calls) == 2
    assert training_hopper.calls[0][0].spec == training_hopper.calls[1][0].spec
    assert out.requires_grad == wants_grad
    if wants_grad:
        gradients = [torch.autograd.grad(x.float().square().sum(), q) for x in (out, expected)]
        assert torch.equal(gradients[0][0], gradients[1][0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_eager_answer_no_kernel_ran() -> None:
    compiled = torch.compile(dense, fullgraph=True, dynamic=True)
    shapes = ((3, 6, 4, 16), (3, 9, 2, 16), (3, 9, 2, 8), (4,))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results, expected = compiled(*leaves), dense(*leaves)
    incoming = [torch.randn_like(t) for t in results]
    gradients = torch.autograd.grad(results, leaves, incoming)
    expected_gradients = torch.autograd.grad(expected, leaves, incoming)
    for one, other in zip((*results, *gradients), (*expected, *expected_gradients), strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


def test_compiled_calls_write_into_out_no_kernel_ran() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        result = fa4.flash_attn_func(q, k, v, causal=True, out=out)
        assert isinstance(result, Tensor)
        return result, out + 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = (torch.randn(3, 7, heads, 16) for heads in (4, 2, 2))
    out = torch.full((3, 7, 4, 16), 7.0)
    returned, more = compiled(q, k, v, out)
    assert torch.equal(out, fa4.flash_attn_func(q, k, v, causal=True))
    assert torch.equal(returned, out)
    assert torch.equal(more, out + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients are asked for"):
        compiled(q.clone().requires_grad_(), k, v, out)


def test_autocast_inside_and_around_a_compiled_call_casts_no_kernel_ran() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa4.flash_attn_func(q, k, v)

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return fa4.flash_attn_func(q, k, v)

    q, k, v = (torch.randn(3, 7, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    expected = inside(q, k, v)
    within = torch.compile(inside, fullgraph=True, backend="aot_eager")(q, k, v)
    with torch.autocast("cpu", dtype=BF16):
        around = torch.compile(plain, fullgraph=True, backend="aot_eager")(q, k, v)
    for out in (within, around):
        assert out.dtype == BF16
        assert torch.equal(out, expected)
    (dq,) = torch.autograd.grad(within.float().sum(), q)
    assert dq.dtype == FP32


def test_options_that_are_refused_are_refused_while_compiling_no_kernel_ran() -> None:
    q, k, v = (torch.randn(3, 7, heads, 16) for heads in (4, 2, 2))
    for options, words in (
        ({"dropout_p": 0.1}, "dropout is not supported"),
        ({"alibi_slopes": torch.ones(4)}, "ALiBi is not supported"),
    ):

        def attend(q: Tensor, options: dict[str, Any] = options) -> Any:
            return fa4.flash_attn_func(q, k, v, **options)

        with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
            torch.compile(attend, fullgraph=True, backend="aot_eager")(q)


# -- other tracers -------------------------------------------------------------------------------


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa4.flash_attn_func(q, k, v, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_the_operator_no_kernel_ran(strict: bool) -> None:
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    tensors = [torch.randn(3, 7, heads, 16) for heads in (4, 2, 2)]
    sizes = {0: batch, 1: length}
    program = torch.export.export(
        Module(), tuple(tensors), dynamic_shapes=(sizes, sizes, sizes), strict=strict
    )
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.fa4.attention_forward.default in targets
    others = [torch.randn(5, 11, heads, 16) for heads in (4, 2, 2)]
    assert torch.equal(program.module()(*others), Module()(*others))


def test_selective_checkpointing_can_keep_attention_no_kernel_ran(training_hopper: Hopper) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16).to(BF16).requires_grad_() for heads in (4, 2, 2))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fa4.flash_attn_func(2 * q, k, v)
        assert isinstance(out, Tensor)
        return out.float().square().sum()

    def keep(ctx: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if operator == torch.ops.fa4.attention_forward.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    plain = torch.autograd.grad(attend(q, k, v), (q, k, v))
    launches = len(training_hopper.calls)
    contexts: Callable[[], Any] = lambda: create_selective_checkpoint_contexts(keep)  # noqa: E731
    checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts).backward()
    assert len(training_hopper.calls) == launches + 1  # backward computed no attention again
    for leaf, expected in zip((q, k, v), plain, strict=True):
        assert torch.equal(leaf.grad, expected)


def test_lengths_have_the_places_that_the_operators_know() -> None:
    """fa4/ops.py finds lengths and sink among an operator's arguments by place."""
    names = [
        argument.name for argument in torch.ops.fa4.attention_forward.default._schema.arguments
    ]
    assert tuple(names[3:7]) == Lengths._fields
    assert names[9] == "sink"
    backward = torch.ops.fa4.attention_backward.default._schema.arguments
    assert [a.name for a in backward][7:12] == [*Lengths._fields, "sink"]
    assert [a.name for a in backward][12:] == names[10:]
