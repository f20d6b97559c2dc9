"""fa4.scaled_dot_product_attention: torch's semantics, and who answers which call.

No kernel runs here: either torch answers, or the CPU passes for a Hopper
(tests/pretended_hopper.py). With kernels: tests/gpu/test_sdpa.py.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fa4
from fa4 import attention, sdpa
from tests.pretended_hopper import Hopper, hopper, training_hopper

__all__ = ["hopper", "training_hopper"]  # fixtures

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_launches", {})
    monkeypatch.setattr(sdpa, "_left_to_torch", set())
    monkeypatch.setattr(sdpa, "_plans", {})
    torch._dynamo.reset()


def inputs(
    seqlen_q: int = 7,
    seqlen_k: int = 9,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = FP16,
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch 3, heads, seqlen, head_dim)."""
    (heads_q, heads_kv), (head_dim, head_dim_v) = heads, dims
    q = torch.randn(3, heads_q, seqlen_q, head_dim).to(dtype)
    k = torch.randn(3, heads_kv, seqlen_k, head_dim).to(dtype)
    v = torch.randn(3, heads_kv, seqlen_k, head_dim_v).to(dtype)
    return q, k, v


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The definition in torch's documentation, in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    x = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        x = x.masked_fill(~attn_mask, -torch.inf)
    return x.softmax(dim=-1) @ v


def test_the_signature_is_torchs() -> None:
    parameters = inspect.signature(fa4.scaled_dot_product_attention).parameters
    assert [(p.name, p.default) for p in parameters.values()] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == [
        "scale",
        "enable_gqa",
    ]
    q, k, v = inputs(heads=(2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5)
    assert torch.equal(
        fa4.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5), expected
    )


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("lengths", [(7, 9), (9, 7), (8, 8), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"is_causal": True, "scale": -0.3},
        {"attn_mask": "upper left"},
        {"attn_mask": "lower right"},
    ],
    ids=str,
)
def test_a_kernel_is_asked_for_torchs_semantics_no_kernel_ran(
    hopper: Hopper, options: dict[str, Any], lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    q, k, v = inputs(*lengths, dtype=dtype)
    bias = options.get("attn_mask")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Lower right causal bias will produce NaNs")
        if bias is not None:
            make = causal_upper_left if bias == "upper left" else causal_lower_right
            options = {"attn_mask": make(*lengths)}
        first = fa4.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        out = fa4.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    if bias == "lower right" and lengths[0] > lengths[1]:
        # Rows without keys: torch's NaN, not our zeros.
        assert hopper.calls == []
        return
    if bias is not None:
        options = {"attn_mask": torch.ones(lengths, dtype=torch.bool)}
        offset = 0 if bias == "upper left" else lengths[1] - lengths[0]
        options["attn_mask"] = options["attn_mask"].tril(offset)
    expected = exact(q, k, v, enable_gqa=True, **options)
    assert len(hopper.calls) == 2
    assert torch.equal(out, first)
    assert (out.shape, out.dtype) == (expected.shape, dtype)
    assert (out - expected).abs().max() < torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("storage", ["contiguous", "rows first", "fused", "one head for all"])
def test_strides_of_every_kind_need_no_copy_no_kernel_ran(hopper: Hopper, storage: str) -> None:
    q, k, v = inputs(heads=(4, 4), dims=(16, 8))
    if storage == "rows first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif storage == "fused":
        k, v = torch.cat([k, v], dim=-1).split([16, 8], dim=-1)
    elif storage == "one head for all":
        k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    out = fa4.scaled_dot_product_attention(q, k, v)
    arguments = hopper.arguments
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert arguments[name].data_ptr() == tensor.data_ptr()
    assert out.transpose(1, 2).is_contiguous()
    assert (out - exact(q, k, v)).abs().max() < 3e-3


def mask_of(shape: tuple[int, ...], dtype: torch.dtype = torch.bool) -> Tensor:
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    return mask if dtype == torch.bool else torch.zeros(shape, dtype=dtype).masked_fill(~mask, -9.0)


Call = Callable[[], tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]

# Calls that no kernel answers, and words of the reason.
LEFT_TO_TORCH: dict[str, tuple[Call, str]] = {
    "boolean mask": (
        lambda: (inputs(heads=(2, 2)), {"attn_mask": mask_of((3, 2, 7, 9))}),
        "attn_mask is given",
    ),
    "additive mask": (
        lambda: (inputs(heads=(2, 2)), {"attn_mask": mask_of((7, 9), FP16)}),
        "attn_mask is given",
    ),
    "float32": (lambda: (inputs(heads=(2, 2), dtype=FP32), {}), "dtype fp32 is not one of"),
    "float64": (lambda: (inputs(heads=(2, 2), dtype=FP64), {}), "dtype fp64 is not one of"),
    "three dimensions": (
        lambda: (tuple(t[0] for t in inputs(heads=(2, 2))), {}),
        "query has 3 dimensions; kernels take 4",
    ),
    "five dimensions": (
        lambda: (tuple(t[None] for t in inputs(heads=(2, 2))), {}),
        "query has 5 dimensions; kernels take 4",
    ),
    "broadcast batch": (
        lambda: ((inputs()[0][:, :2], *(t[:1] for t in inputs()[1:])), {}),
        "broadcasting is left to torch",
    ),
    "odd head dim": (
        lambda: (inputs(heads=(2, 2), dims=(12, 12)), {}),
        "head_dim=12 is not a multiple of 8",
    ),
    "wide heads": (
        lambda: (inputs(heads=(2, 2), dims=(264, 264)), {}),
        "head_dim=264 is not a multiple of 8 up to 256",
    ),
    "unaligned": (
        lambda: (tuple(t[..., 1:17] for t in inputs(heads=(2, 2), dims=(24, 24))), {}),
        "starts at an address that is not a multiple of 16 bytes",
    ),
    "no queries": (lambda: (inputs(seqlen_q=0, heads=(2, 2)), {}), "a tensor is empty"),
}

TORCH_REFUSES: dict[str, tuple[Call, str]] = {
    "heads": (lambda: (inputs(), {}), "and enable_gqa is False"),
    "heads that do not divide": (
        lambda: (inputs(heads=(4, 3)), {"enable_gqa": True}),
        "4 query heads are not a multiple of 3",
    ),
    "dtypes": (
        lambda: ((inputs()[0][:, :2], inputs()[1].to(BF16), inputs()[2]), {}),
        "the dtypes are torch.float16, torch.bfloat16 and torch.float16",
    ),
    "head dims": (
        lambda: ((inputs()[0][:, :2, :, :8], *inputs()[1:]), {}),
        "broadcasting is left to torch",
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_no_kernel_answers_is_torchs_answer_and_explained_no_kernel_ran(
    hopper: Hopper, name: str
) -> None:
    call, words = LEFT_TO_TORCH[name]
    tensors, options = call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch is no fallback to be warned of
        for _ in range(2):
            out = fa4.scaled_dot_product_attention(*tensors, **options)
            assert torch.equal(out, F.scaled_dot_product_attention(*tensors, **options))
    assert hopper.calls == []
    decision = fa4.explain(fa4.scaled_dot_product_attention, *tensors, **options)
    assert isinstance(decision, fa4.SdpaDecision)
    assert (decision.backend, decision.kernel_name) == ("torch", None)
    assert any(words in reason for reason in decision.reasons)
    assert f"because   {decision.reasons[0]}" in str(decision)


@pytest.mark.parametrize("name", TORCH_REFUSES)
def test_what_torch_refuses_gets_torchs_error_no_kernel_ran(hopper: Hopper, name: str) -> None:
    call, words = TORCH_REFUSES[name]
    tensors, options = call()
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        F.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises(type(torchs.value)) as ours:
        fa4.scaled_dot_product_attention(*tensors, **options)
    assert str(ours.value) == str(torchs.value)
    assert hopper.calls == []
    decision = fa4.explain(fa4.scaled_dot_product_attention, *tensors, **options)
    assert words in decision.reasons[0]


def test_a_mask_together_with_is_causal_is_torchs_to_answer_or_refuse_no_kernel_ran(
    hopper: Hopper,
) -> None:
    """torch 2.13 answers on a CPU what 2.14 refuses."""
    q, k, v = inputs(heads=(2, 2))
    options: dict[str, Any] = {"attn_mask": mask_of((7, 9)), "is_causal": True}
    results = []
    for function in (F.scaled_dot_product_attention, fa4.scaled_dot_product_attention):
        try:
            results.append(function(q, k, v, **options).tolist())
        except RuntimeError as refusal:
            results.append(str(refusal))
    assert results[0] == results[1]
    assert hopper.calls == []
    decision = fa4.explain(fa4.scaled_dot_product_attention, q, k, v, **options)
    assert decision.reasons == ("both attn_mask and is_causal are given",)


def test_dropout_is_torchs_no_kernel_ran(hopper: Hopper) -> None:
    q, k, v = inputs(heads=(2, 2))
    torch.manual_seed(3)
    out = fa4.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert hopper.calls == []
    decision = fa4.explain(fa4.scaled_dot_product_attention, q, k, v, dropout_p=0.5)
    assert decision.reasons == ("dropout_p is 0.5; kernels have no dropout",)


def test_a_machine_without_kernels_gives_torchs_answer_no_kernel_ran() -> None:
    q, k, v = inputs(dtype=FP32)
    for options in ({}, {"is_causal": True}, {"scale": 2.0}):
        assert torch.equal(
            fa4.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options),
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options),
        )
    decision = fa4.explain(fa4.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    assert "a cpu device has no kernels" in str(decision)


def test_explain_names_the_kernel_of_a_call_without_running_it_no_kernel_ran() -> None:
    q, k, v = inputs()
    decision = fa4.explain(
        fa4.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True, arch="sm_90a"
    )
    same = fa4.explain(
        fa4.flash_attn_func,
        *(t[:, :, :7].transpose(1, 2) for t in (q, k, v)),
        causal=True,
        arch="sm_90a",
    )
    assert isinstance(same, fa4.Decision)
    assert decision.kernel_name == same.kernel_name
    assert decision.kernel_name in str(decision)
    assert (decision.backend, decision.reasons) == ("fa4", ())
    with pytest.raises(ValueError, match="explain knows calls of flash_attn_func"):
        fa4.explain(F.scaled_dot_product_attention, q, k, v)


def test_a_call_that_was_left_to_torch_is_not_weighed_again_no_kernel_ran(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(heads=(2, 2), dims=(12, 12))
    for _ in range(3):
        fa4.scaled_dot_product_attention(q, k, v)
    assert hopper.walks == 1
    # Another call is.
    fa4.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert hopper.walks == 2
    q, k, v = inputs(heads=(2, 2))
    for _ in range(3):
        fa4.scaled_dot_product_attention(q, k, v)
    assert len(hopper.calls) == 3
    monkeypatch.setattr(sdpa, "MAX_LEFT_TO_TORCH", 3)
    for seqlen in range(1, 9):
        q, k, v = inputs(seqlen_q=seqlen, heads=(2, 2), dims=(12, 12))
        fa4.scaled_dot_product_attention(q, k, v)
        assert len(sdpa._left_to_torch) <= 3


def test_what_was_answered_by_a_kernel_once_is_looked_at_again_no_kernel_ran(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that differ from an answered one in what matters."""
    q, k, v = inputs(heads=(2, 2))
    answered = fa4.scaled_dot_product_attention(q, k, v)
    others: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"attn_mask": mask_of((7, 9))}),
        ((q, k[:, :, :8], v[:, :, :8]), {}),
        ((q.float(), k.float(), v.float()), {}),
        (tuple(torch.cat([t, t], -1)[..., 1:17] for t in (q, k, v)), {}),  # unaligned
    ]
    for tensors, options in others:
        out = fa4.scaled_dot_product_attention(*tensors, **options)
        expected = exact(*tensors, **options)
        assert (out - expected).abs().max() < 2e-3 * expected.abs().max()
    with torch.autocast("cpu", dtype=BF16):
        assert fa4.scaled_dot_product_attention(q, k, v).dtype == BF16
    with pytest.raises(RuntimeError, match="same dtype"):
        fa4.scaled_dot_product_attention(q, k.to(BF16), v)
    assert torch.equal(fa4.scaled_dot_product_attention(q, k, v), answered)
    monkeypatch.setattr(sdpa, "MAX_PLANS", 3)
    for seqlen in range(1, 9):
        fa4.scaled_dot_product_attention(*inputs(seqlen_q=seqlen, heads=(2, 2)))
        assert len(sdpa._plans) <= 3


def test_gradients_flow_through_the_kernel_path_no_kernel_ran(training_hopper: Hopper) -> None:
    q, k, v = (t.requires_grad_() for t in inputs())
    out = fa4.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert len(training_hopper.calls) == 1
    incoming = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), incoming)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected_out = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(expected_out, wide, incoming.double())
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.dtype == FP16
        assert (gradient - wanted).abs().max() < 3e-3 * wanted.abs().max()


@pytest.mark.parametrize("cast_to", [FP16, BF16])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_autocast_casts_as_torch_does_no_kernel_ran(
    hopper: Hopper, dtype: torch.dtype, cast_to: torch.dtype
) -> None:
    q, k, v = inputs(heads=(2, 2), dtype=dtype)
    with torch.autocast("cpu", dtype=cast_to):
        out = fa4.scaled_dot_product_attention(q, k, v)
        expected = F.scaled_dot_product_attention(q, k, v)
    assert len(hopper.calls) == 1
    assert out.dtype == expected.dtype == cast_to
    assert (out - expected).abs().max() < 2 * torch.finfo(cast_to).eps * expected.abs().max()
    with torch.autocast("cpu", dtype=cast_to):
        wide = fa4.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert wide.dtype == FP64


@pytest.mark.parametrize("lengths", [(7, 9), (9, 7), (8, 8)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_calls_hold_the_operator_where_there_is_a_kernel_no_kernel_ran(
    hopper: Hopper, is_causal: bool, lengths: tuple[int, int]
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa4.scaled_dot_product_attention(2 * q, k, v, is_causal=is_causal, enable_gqa=True)

    q, k, v = inputs(*lengths)
    expected = exact(2 * q, k, v, is_causal=is_causal, enable_gqa=True)
    assert (attend(q, k, v) - expected).abs().max() < 2e-3 * expected.abs().max()
    assert len(hopper.calls) == 1
    assert "torch.ops.fa4.attention_forward" in graphs[-1].code
    # Other dtypes have no kernel.
    attend(*(t.float() for t in (q, k, v)))
    assert len(hopper.calls) == 1
    assert "scaled_dot_product_attention" in graphs[-1].code


def test_fake_tensors_get_torchs_shapes_no_kernel_ran(hopper: Hopper) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for dtype in (FP16, FP32):
            q, k, v = inputs(dtype=dtype)
            out = fa4.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            assert (out.shape, out.dtype) == (q.shape, dtype)
    assert hopper.calls == []
