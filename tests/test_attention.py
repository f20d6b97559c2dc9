"""The public functions: what their options do, and what a call does on its way to a kernel.

The second half pretends that the CPU is a Hopper GPU (tests/pretended_hopper.py): these tests judge
everything between the call and the launch.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fa4
from fa4 import attention, dispatch, launch
from fa4.kernels.features import ForwardFeatures
from fa4.problem import AttentionProblem
from fa4.reference import attention_reference
from tests import oracle
from tests.oracle import Case
from tests.pretended_hopper import KERNEL_ARGUMENTS, FakeKernel, Hopper, hopper, training_hopper

__all__ = ["hopper", "training_hopper"]  # fixtures

BF16, FP16 = torch.bfloat16, torch.float16
REPOSITORY = Path(__file__).resolve().parent.parent


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """2 sequences of 6 queries and 9 keys, 4 and 2 heads, head dims 16 and 8."""
    shapes = ((2, 6, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))
    q, k, v = (randn(*shape, dtype=dtype) for shape in shapes)
    return q, k, v


def packed_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """10 query rows and 12 key rows, heads and dims as in `dense_inputs`."""
    shapes = ((10, 4, 16), (12, 2, 16), (12, 2, 8))
    q, k, v = (randn(*shape, dtype=dtype) for shape in shapes)
    return q, k, v


# Sequences of 3, 0 and 5 queries, with 2 rows of padding behind; of 4, 2 and 6 keys.
PACKED = {"cu_seqlens_q": ints(0, 3, 3, 8), "cu_seqlens_k": ints(0, 4, 6, 12)}


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch is known and no warning was given yet."""
    monkeypatch.setattr(attention, "_launches", {})
    monkeypatch.setattr(dispatch, "_warned", set())


@contextlib.contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 0.3},
        {"softmax_scale": 0},
        {"softmax_scale": -0.7},
        {"causal": True},
        {"window_size": (2, 1)},
        {"window_size": (None, 0)},
        {"causal": True, "window_size": (1, 5)},
        {"softcap": 1.5},
        {"sink": torch.tensor([0.0, 1.0, -2.0, 3.0])},
        {"softmax_scale": 0.9, "causal": True, "window_size": (4, -1), "softcap": 2.0},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_every_option_reaches_the_reference(options: dict[str, Any], is_packed: bool) -> None:
    q, k, v = packed_inputs() if is_packed else dense_inputs()
    lengths = PACKED if is_packed else {}
    function: Callable[..., Any] = fa4.flash_attn_varlen_func if is_packed else fa4.flash_attn_func
    out, lse = function(q, k, v, **lengths, **options, return_lse=True, backend="reference")
    expected_out, expected_lse = attention_reference(q, k, v, **lengths, **options)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    plain_out, plain_lse = attention_reference(q, k, v, **lengths)
    assert not torch.equal(lse, plain_lse)
    assert not torch.equal(out, plain_out)


def test_options_that_mean_nothing_change_nothing() -> None:
    q, k, v = dense_inputs()
    plain = fa4.flash_attn_func(q, k, v, backend="reference")
    for options in (
        {"softmax_scale": None},
        {"window_size": (-1, -1)},
        {"window_size": (None, None)},
        {"window_size": [-1, None]},
        {"softcap": None},
        {"softcap": 0},
        {"deterministic": True},
        # C107: flash-attn's names of what is missing, at their defaults
        {"dropout_p": 0.0, "alibi_slopes": None, "return_attn_probs": False},
    ):
        assert torch.equal(fa4.flash_attn_func(q, k, v, backend="reference", **options), plain)


def test_c11_causal_holds_together_with_every_window() -> None:
    q, k, v = dense_inputs()
    causal = fa4.flash_attn_func(q, k, v, causal=True, backend="reference")
    for window_size in ((-1, -1), (-1, 0), (None, None), (None, 0), [None, 7]):
        result = fa4.flash_attn_func(
            q, k, v, causal=True, window_size=window_size, backend="reference"
        )
        assert torch.equal(result, causal)


def test_a_window_may_be_a_list() -> None:
    q, k, v = dense_inputs()
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        as_list = function(q, k, v, window_size=[2, 1], backend="reference")
        as_tuple = function(q, k, v, window_size=(2, 1), backend="reference")
        assert torch.equal(as_list, as_tuple)
        assert str(fa4.explain(q, k, v, window_size=[2, 1])) == str(
            fa4.explain(q, k, v, window_size=(2, 1))
        )


def test_c67_the_default_scale() -> None:
    q = randn(2, 5, 4, 8, dtype=FP16)
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        default = function(q, q, q, backend="reference")
        assert torch.equal(
            default, function(q, q, q, softmax_scale=1 / 8**0.5, backend="reference")
        )
    assert fa4.explain(q, q, q).problem.softmax_scale == 1 / 8**0.5


def test_lengths_reach_the_reference_in_every_combination() -> None:
    q, k, v = dense_inputs()
    packed_q, packed_k, packed_v = packed_inputs()
    used_q, used_k = ints(6, 2), ints(0, 5)
    for lengths, tensors in (
        ({"seqused_q": used_q}, (q, k, v)),
        ({"seqused_k": used_k}, (q, k, v)),
        ({"seqused_q": used_q, "seqused_k": used_k}, (q, k, v)),
        ({"cu_seqlens_q": ints(0, 4, 9)}, (packed_q, k, v)),
        ({"cu_seqlens_k": ints(0, 4, 9), "seqused_q": used_q}, (q, packed_k, packed_v)),
        ({**PACKED, "seqused_k": ints(3, 0, 6)}, (packed_q, packed_k, packed_v)),
    ):
        out, lse = fa4.flash_attn_varlen_func(
            *tensors, **lengths, causal=True, return_lse=True, backend="reference"
        )
        expected = attention_reference(*tensors, **lengths, causal=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_lengths_of_the_packed_function_may_be_positional() -> None:
    q, k, v = packed_inputs()
    by_name = fa4.flash_attn_varlen_func(q, k, v, **PACKED, backend="reference")
    by_place = fa4.flash_attn_varlen_func(
        q, k, v, PACKED["cu_seqlens_q"], PACKED["cu_seqlens_k"], 5, 6, backend="reference"
    )
    assert torch.equal(by_name, by_place)


def test_the_packed_function_of_dense_tensors_is_the_dense_one() -> None:
    q, k, v = dense_inputs()
    assert torch.equal(
        fa4.flash_attn_varlen_func(q, k, v, causal=True, backend="reference"),
        fa4.flash_attn_func(q, k, v, causal=True, backend="reference"),
    )


# -- what is returned ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64], ids=str)
def test_lse_comes_only_when_asked_for_in_float32(dtype: torch.dtype) -> None:
    q, k, v = dense_inputs(dtype)
    out = fa4.flash_attn_func(q, k, v, backend="reference")
    assert isinstance(out, Tensor)
    assert (out.shape, out.dtype) == ((2, 6, 4, 8), dtype)
    pair = fa4.flash_attn_func(q, k, v, return_lse=True, backend="reference")
    assert isinstance(pair, tuple)
    assert torch.equal(pair[0], out)
    assert pair[1].shape == (2, 4, 6)
    assert pair[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    packed_q, packed_k, packed_v = packed_inputs(dtype)
    packed = fa4.flash_attn_varlen_func(
        packed_q, packed_k, packed_v, **PACKED, return_lse=True, backend="reference"
    )
    assert packed[0].shape == (10, 4, 8)
    assert packed[1].shape == (4, 10)


def test_gradients_flow_through_the_public_functions() -> None:
    q, k, v = dense_inputs(torch.float64)
    sink = torch.zeros(4, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, lse = fa4.flash_attn_func(
        *leaves[:3], sink=leaves[3], causal=True, return_lse=True, backend="reference"
    )
    (out.sum() + lse.sum()).backward()
    expected = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, lse = attention_reference(*expected[:3], sink=expected[3], causal=True)
    (out.sum() + lse.sum()).backward()
    for leaf, other in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0
        assert torch.equal(leaf.grad, other.grad)


def test_out_is_written_and_returned() -> None:
    q, k, v = dense_inputs()
    expected = fa4.flash_attn_func(q, k, v, backend="reference")
    out = torch.full((2, 6, 4, 8), 7.0)
    assert fa4.flash_attn_func(q, k, v, out=out, backend="reference") is out
    assert torch.equal(out, expected)
    # Any strides: here the heads are outside of the rows.
    transposed = torch.full((2, 4, 6, 8), 7.0).transpose(1, 2)
    pair = fa4.flash_attn_func(q, k, v, out=transposed, return_lse=True, backend="reference")
    assert pair[0] is transposed
    assert torch.equal(transposed, expected)


PADDED: dict[str, tuple[Callable[[], tuple[Tensor, ...]], dict[str, Tensor], list[Any]]] = {
    # inputs, lengths, and an index for the rows in use of each sequence
    "dense seqused": (
        dense_inputs,
        {"seqused_q": ints(4, 0)},
        [(0, slice(0, 4))],
    ),
    "packed with a tail": (packed_inputs, PACKED, [slice(0, 3), slice(3, 8)]),
    "packed seqused": (
        packed_inputs,
        {**PACKED, "seqused_q": ints(1, 0, 4)},
        [slice(0, 1), slice(3, 7)],
    ),
    "packed, starting late": (
        packed_inputs,
        {"cu_seqlens_q": ints(2, 2, 7), "cu_seqlens_k": ints(0, 6, 12)},
        [slice(2, 7)],
    ),
    "packed without sequences": (
        packed_inputs,
        {"cu_seqlens_q": ints(0), "cu_seqlens_k": ints(0)},
        [],
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_rows_of_padding_are_zero_in_a_new_output_and_untouched_in_a_given_one(name: str) -> None:
    make, lengths, used = PADDED[name]
    q, k, v = make()
    in_use = torch.zeros(q.shape[:-2], dtype=torch.bool)
    for index in used:
        in_use[index] = True
    q[~in_use] = float("nan")  # and never read
    options: dict[str, Any] = {**lengths, "return_lse": True, "backend": "reference"}
    fresh, lse = fa4.flash_attn_varlen_func(q, k, v, **options)
    assert fresh.isfinite().all()
    assert (fresh[~in_use] == 0).all()
    by_row = lse.transpose(-1, -2)  # (.., rows, heads)
    assert (by_row[~in_use] == -torch.inf).all()
    assert by_row[in_use].isfinite().all()

    out = torch.full_like(fresh, 7.0)
    returned, again = fa4.flash_attn_varlen_func(q, k, v, **options, out=out)
    assert returned is out
    assert (out[~in_use] == 7.0).all()
    assert torch.equal(out[in_use], fresh[in_use])
    assert torch.equal(again, lse)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", ["auto", "fa4", "reference"])
def test_c23_no_keys_give_zeros_and_minus_infinity_without_reading_lengths(
    is_packed: bool, backend: str
) -> None:
    """On "meta" there are no lengths to read; nothing warns, because nothing is missing."""
    shape = (10,) if is_packed else (2, 6)
    q = torch.empty(*shape, 4, 16, dtype=BF16, device="meta")
    k = torch.empty(*((0,) if is_packed else (2, 0)), 2, 16, dtype=BF16, device="meta")
    lengths = {}
    if is_packed:
        lengths = {
            name: torch.empty(3, dtype=torch.int32, device="meta")
            for name in ("cu_seqlens_q", "cu_seqlens_k")
        }
    with no_warning():
        out, lse = fa4.flash_attn_varlen_func(q, k, k, **lengths, return_lse=True, backend=backend)
    assert out.shape == q.shape
    assert lse.shape == ((4, 10) if is_packed else (2, 4, 6))
    # The same on the CPU, where there is something to look at.
    q, k = torch.ones(q.shape, dtype=BF16), torch.ones(k.shape, dtype=BF16)
    lengths = {name: ints(0, 4, 8) if "_q" in name else ints(0, 0, 0) for name in lengths}
    out, lse = fa4.flash_attn_varlen_func(q, k, k, **lengths, return_lse=True, backend=backend)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_no_keys_leave_padding_in_a_given_output_alone() -> None:
    q, _, _ = packed_inputs()
    k = randn(0, 2, 16)
    out = torch.full((10, 4, 16), 7.0)
    fa4.flash_attn_varlen_func(
        q, k, k, cu_seqlens_q=ints(0, 3, 8), cu_seqlens_k=ints(0, 0, 0), out=out, backend="fa4"
    )
    assert (out[:8] == 0).all()
    assert (out[8:] == 7.0).all()


def test_no_keys_give_zero_gradients() -> None:
    q = randn(2, 6, 4, 16).requires_grad_()
    k = randn(2, 0, 2, 16).requires_grad_()
    fa4.flash_attn_func(q, k, k, backend="reference").sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize("shape", [(0, 6, 4, 16), (2, 0, 4, 16), (2, 6, 0, 16)])
def test_c23_no_queries_give_an_empty_output(shape: tuple[int, ...]) -> None:
    q = randn(*shape)
    k = randn(shape[0], 9, 2 if shape[2] else 0, 16)
    with no_warning():
        out, lse = fa4.flash_attn_func(q, k, k, return_lse=True, backend="fa4")
    assert out.shape == shape
    assert lse.shape == (shape[0], shape[2], shape[1])


# -- autocast ------------------------------------------------------------------------------------


def test_c95_autocast_casts_and_its_absence_refuses() -> None:
    q, k, v = dense_inputs()
    v = v.to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        inside = fa4.flash_attn_func(q, k, v, backend="reference")
        packed = fa4.flash_attn_varlen_func(q, k, v, backend="reference")
    expected = attention_reference(q.to(BF16), k.to(BF16), v)[0]
    assert inside.dtype == BF16
    assert torch.equal(inside, expected)
    assert torch.equal(packed, expected)
    with pytest.raises(TypeError) as refusal:
        fa4.flash_attn_func(q, k, v, backend="reference")
    assert str(refusal.value) == (
        "q, k and v have dtypes torch.float32, torch.float32 and torch.bfloat16; they must be "
        "equal, and one of torch.bfloat16, torch.float16, torch.float32, torch.float64."
    )
    assert fa4.flash_attn_func(q, k, v.float(), backend="reference").dtype == torch.float32


def test_autocast_leaves_inputs_and_other_types_alone() -> None:
    q, k, v = dense_inputs()
    with torch.autocast("cpu", dtype=BF16):
        fa4.flash_attn_func(q, k, v, backend="reference")
        with pytest.raises(TypeError, match=r"torch\.int32, torch\.int32 and torch\.int32"):
            fa4.flash_attn_func(q.int(), k.int(), v.int(), backend="reference")
    assert q.dtype == torch.float32


def test_explain_inside_autocast_is_about_what_the_call_would_do() -> None:
    q, k, v = dense_inputs()
    with torch.autocast("cpu", dtype=BF16):
        decision = fa4.explain(q, k, v.to(BF16), arch="sm_90a")
    assert decision.problem.dtype == "bf16"
    assert decision.kernel is not None


def test_gradients_reach_the_tensors_that_autocast_cast() -> None:
    q, k, v = (x.requires_grad_() for x in dense_inputs())
    with torch.autocast("cpu", dtype=BF16):
        fa4.flash_attn_func(q, k, v, backend="reference").float().sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32


# -- what is refused -----------------------------------------------------------------------------


def test_c94_arguments_after_the_tensors_are_keyword_only() -> None:
    q, k, v = dense_inputs()
    with pytest.raises(TypeError, match="positional argument"):
        fa4.flash_attn_func(q, k, v, 0.0, 0.25, True)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional argument"):
        fa4.flash_attn_varlen_func(q, k, v, None, None, 6, 9, 0.0, 0.25, True)  # type: ignore[misc]


def test_c94_a_number_in_place_of_a_tensor_is_named() -> None:
    q, k, v = dense_inputs()
    with pytest.raises(TypeError, match=r"^v must be a torch\.Tensor, got float"):
        fa4.flash_attn_func(q, k, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^q must be a torch\.Tensor, got list"):
        fa4.flash_attn_func([1.0], k, v)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^k must be a torch\.Tensor, got NoneType"):
        fa4.explain(q, None, v)  # type: ignore[arg-type]
    # A maximal length in the place of cu_seqlens.
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor"):
        fa4.flash_attn_varlen_func(*packed_inputs(), 6, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [fa4.flash_attn_func, fa4.flash_attn_varlen_func, fa4.explain])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        # C107
        ({"dropout_p": 0.1}, NotImplementedError, r"^dropout_p\b.*0\.1\b.* not supported"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "^alibi_slopes .* not supported"),
        ({"return_attn_probs": True}, NotImplementedError, "^return_attn_probs .*return_lse"),
        ({"attn_bias": torch.ones(4)}, TypeError, "attn_bias"),
        ({"scale": 1.0}, TypeError, "scale"),
        ({"backend": "cudnn"}, ValueError, "backend='cudnn' is not one of 'auto', 'fa4',"),
        ({"backend": None}, ValueError, "backend=None is not one of 'auto', 'fa4', 'reference'"),
        ({"window_size": 5}, TypeError, r"window_size=5 must be a pair \(left, right\)"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: the left bound is -2; allowed are -1"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0 is negative"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale=nan must be a finite real"),
        ({"sink": 1.0}, TypeError, "sink must be a tensor, got float"),
        ({"sink": torch.ones(2)}, ValueError, r"sink has shape \(2,\); it must be \(heads_q,\)"),
        ({"out": torch.ones(2)}, ValueError, r"out is torch\.float32 \(2,\) on cpu; it must be"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_c107_options_that_are_not_supported_are_refused_by_name(
    function: Callable[..., Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = dense_inputs()
    with pytest.raises(error, match=message):
        function(q, k, v, **options)


@pytest.mark.parametrize("function", [fa4.flash_attn_varlen_func, fa4.explain])
def test_paged_keys_are_refused(function: Callable[..., Any]) -> None:
    q, k, v = dense_inputs()
    with pytest.raises(NotImplementedError, match=r"^block_table .* not built yet"):
        function(q, k, v, block_table=ints(0, 1))
    function(q, k, v, block_table=None, backend="reference")


def test_c68_heads_that_do_not_divide_are_refused_on_every_backend() -> None:
    q = randn(1, 4, 33, 16)
    k = randn(1, 4, 2, 16)
    for backend in ("auto", "fa4", "reference"):
        with pytest.raises(ValueError, match="heads_q=33 is not a multiple of heads_kv=2"):
            fa4.flash_attn_func(q, k, k, backend=backend)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_c71_maximal_lengths_are_integers_of_any_kind_and_never_tensors(name: str) -> None:
    q, k, v = dense_inputs()
    plain = fa4.flash_attn_varlen_func(q, k, v, backend="reference")
    for bound in (9, np.int64(9), np.int32(9), 0, 10**12, None):
        given_bound: dict[str, Any] = {name: bound}
        result = fa4.flash_attn_varlen_func(q, k, v, **given_bound, backend="reference")
        assert torch.equal(result, plain)
    for bound, error, message in (
        (torch.tensor(9), TypeError, f"^{name} must be an int, got a tensor; reading it would"),
        (9.0, TypeError, f"^{name} must be an int, got float"),
        ("9", TypeError, f"^{name} must be an int, got str"),
        (-1, ValueError, f"^{name}=-1 is negative"),
        (np.int64(-1), ValueError, f"^{name}=-1 is negative"),
    ):
        with pytest.raises(error, match=message):
            fa4.flash_attn_varlen_func(q, k, v, **{name: bound}, backend="reference")


# -- falling back --------------------------------------------------------------------------------


def test_a_fallback_warns_once_and_points_at_the_call() -> None:
    q, k, v = dense_inputs()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fa4.flash_attn_func(q, k, v)
        fa4.flash_attn_func(q[:1], k[:1], v[:1], causal=True)
        fa4.flash_attn_varlen_func(q, k, v)
    assert [item.category for item in record] == [fa4.FallbackWarning]
    assert "computed by the PyTorch reference: a cpu device has no kernels" in str(
        record[0].message
    )
    assert os.path.samefile(record[0].filename, __file__)
    dispatch._warned.clear()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fa4.flash_attn_varlen_func(q, k, v)
    assert os.path.samefile(record[0].filename, __file__)


def test_asking_for_the_reference_is_silent() -> None:
    q, k, v = dense_inputs()
    with no_warning():
        fa4.flash_attn_func(q, k, v, backend="reference")
        fa4.explain(q, k, v)


def test_asking_for_a_kernel_where_there_is_none_gives_every_reason() -> None:
    q, k, v = dense_inputs()
    with pytest.raises(fa4.UnsupportedProblemError) as refusal:
        fa4.flash_attn_func(q, k, v, backend="fa4")
    assert isinstance(refusal.value, NotImplementedError)
    decision = fa4.explain(q, k, v, backend="fa4")
    assert decision.reasons
    for reason in decision.reasons:
        assert reason in str(refusal.value)
    assert str(decision.problem) in str(refusal.value)


# -- explain -------------------------------------------------------------------------------------


def test_explain_takes_the_arguments_of_both_functions_and_runs_nothing() -> None:
    names = set(inspect.signature(fa4.flash_attn_func).parameters) | set(
        inspect.signature(fa4.flash_attn_varlen_func).parameters
    )
    meta = {"q": (10, 4, 16), "k": (12, 2, 16), "v": (12, 2, 8), "out": (10, 4, 8), "sink": (4,)}
    arguments: dict[str, Any] = {
        name: torch.empty(shape, dtype=BF16, device="meta") for name, shape in meta.items()
    }
    for name, entries in (("cu_seqlens", 4), ("seqused", 3)):
        for side in "qk":
            arguments[f"{name}_{side}"] = torch.empty(entries, dtype=torch.int32, device="meta")
    arguments |= {
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (3, 3),
        "softcap": 15.0,
        "dropout_p": 0.0,
        "deterministic": True,
        "return_lse": True,
        "backend": "fa4",
        "arch": "sm_90a",
        "alibi_slopes": None,
        "return_attn_probs": False,
        "block_table": None,
    }
    assert set(arguments) == names
    decision = fa4.explain(**arguments)
    assert decision.kernel is not None
    assert decision.kernel.features == ForwardFeatures(
        dtype="bf16",
        head_dim=64,
        head_dim_v=64,
        has_left_bound=True,
        has_right_bound=True,
        score="softcap",
        sink_dtype="bf16",
        packed_q=True,
        packed_k=True,
        has_seqused_q=True,
        has_seqused_k=True,
    )


def test_explain_asks_the_tensors_device_or_a_given_architecture() -> None:
    q, k, v = dense_inputs(BF16)
    here = fa4.explain(q, k, v)
    assert here.backend == "reference"
    assert "a cpu device" in here.reasons[0]
    assert fa4.explain(q, k, v, arch="sm_90a").backend == "fa4"
    assert fa4.explain(q, k, v, arch="sm_100a").backend == "fa4"
    assert "sm_80" in fa4.explain(q, k, v, arch="sm_80").reasons[0]
    asked = fa4.explain(q, k, v, arch="sm_90a", backend="reference")
    assert asked.reasons == ('backend="reference" was asked for',)


def test_explain_checks_arguments_as_a_call_does() -> None:
    q, k, v = dense_inputs()
    with pytest.raises(ValueError, match="head_dim of q is 16 and of k 8"):
        fa4.explain(q, k[..., :8], v)
    with pytest.raises(TypeError, match=r"unexpected .*attn_bias"):
        fa4.explain(q, k, v, attn_bias=None)  # type: ignore[call-arg]


# -- a machine with a pretended Hopper -----------------------------------------------------------

# What the kernel calls its tensors.
TENSOR_NAMES = {
    "mQ": "q",
    "mK": "k",
    "mV": "v",
    "mO": "out",
    "mLSE": "lse",
    "mSink": "sink",
    "mCounter": "counter",
    "mCuQ": "cu_seqlens_q",
    "mCuK": "cu_seqlens_k",
    "mUsedQ": "seqused_q",
    "mUsedK": "seqused_k",
}


def test_arguments_of_a_launch_are_those_of_the_kernel_in_its_order() -> None:
    """Read from the source: importing it would import the DSL."""
    source = (REPOSITORY / "kernels" / "sm90" / "forward.py").read_text(encoding="utf-8")
    (kernel,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "HopperForward"
    )
    (call,) = (
        node
        for node in kernel.body
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    )
    names = [argument.arg for argument in call.args.args]
    assert names[0] == "self"
    # TVM-FFI takes the stream from torch.
    assert names[-1] == "stream"
    assert tuple(TENSOR_NAMES.get(name, name) for name in names[1:-1]) == KERNEL_ARGUMENTS


def test_a_dense_call_launches_with_exactly_its_arguments(hopper: Hopper) -> None:
    q, k, v = dense_inputs(BF16)
    sink = randn(4)
    with no_warning():
        out, lse = fa4.flash_attn_func(
            q, k, v, causal=True, window_size=(3, 7), sink=sink, return_lse=True, backend="fa4"
        )
    assert len(hopper.calls) == 1
    arguments = hopper.arguments
    for name, tensor in {"q": q, "k": k, "v": v, "out": out, "lse": lse, "sink": sink}.items():
        assert arguments[name] is tensor, name
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        assert arguments[name] is None
    assert arguments["softmax_scale"] == 0.25
    assert arguments["softcap"] == 0.0
    assert (arguments["left"], arguments["right"]) == (3, 0)
    assert arguments["max_ctas"] == 132
    assert (arguments["fills_padding"], arguments["stores_lse"]) == (1, 1)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == ((2, 6, 4, 8), BF16)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)


def test_a_packed_call_launches_with_exactly_its_arguments(hopper: Hopper) -> None:
    q, k, v = packed_inputs(FP16)
    lengths = {**PACKED, "seqused_q": ints(2, 0, 5), "seqused_k": ints(4, 2, 1)}
    out = torch.zeros(10, 4, 8, dtype=FP16)
    returned, lse = fa4.flash_attn_varlen_func(
        *(q, k, v),
        **lengths,
        softmax_scale=-2,
        softcap=15,
        return_lse=True,
        out=out,
        backend="fa4",
    )
    assert returned is out
    arguments = hopper.arguments
    for name, tensor in {**lengths, "q": q, "k": k, "v": v, "out": out, "lse": lse}.items():
        assert arguments[name] is tensor, name
    assert arguments["sink"] is None
    assert (arguments["softmax_scale"], arguments["softcap"]) == (-2.0, 15.0)
    assert (arguments["left"], arguments["right"]) == (0, 0)
    assert (arguments["fills_padding"], arguments["stores_lse"]) == (0, 1)
    assert lse.shape == (4, 10)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_an_lse_that_nobody_wants_is_neither_stored_nor_allocated(
    hopper: Hopper, is_packed: bool
) -> None:
    q, k, v = packed_inputs(BF16) if is_packed else dense_inputs(BF16)
    lengths = PACKED if is_packed else {}
    for _ in range(2):
        out = fa4.flash_attn_varlen_func(q, k, v, **lengths, backend="fa4")
        assert isinstance(out, Tensor)
        assert hopper.arguments["stores_lse"] == 0
        assert hopper.arguments["lse"].numel() == 1
    assert hopper.calls[0][1]["lse"] is hopper.calls[1][1]["lse"]


def test_each_call_has_an_output_of_its_own(hopper: Hopper) -> None:
    q, k, v = dense_inputs(BF16)
    first, first_lse = fa4.flash_attn_func(q, k, v, return_lse=True, backend="fa4")
    kept = first.clone(), first_lse.clone()
    second, second_lse = fa4.flash_attn_func(2 * q, k, v, return_lse=True, backend="fa4")
    assert hopper.walks == 1
    assert first.data_ptr() != second.data_ptr()
    assert first_lse.data_ptr() != second_lse.data_ptr()
    assert torch.equal(first, kept[0])
    assert torch.equal(first_lse, kept[1])


def test_a_new_output_is_contiguous_whatever_the_strides_of_q(hopper: Hopper) -> None:
    k, v = randn(2, 9, 2, 16, dtype=BF16), randn(2, 9, 2, 16, dtype=BF16)
    for q in (
        randn(2, 4, 6, 16, dtype=BF16).transpose(1, 2),
        randn(2, 6, 4, 32, dtype=BF16)[..., :16],
        randn(1, 6, 4, 16, dtype=BF16).expand(2, 6, 4, 16),
    ):
        out = fa4.flash_attn_func(q, k, v, backend="fa4")
        assert out.is_contiguous()
        assert torch.equal(out, attention_reference(q, k, v)[0])


LAUNCHED = [
    Case((33, 33), (40, 40), 4, 2),
    Case((9,), (9,), 3, 3, head_dim=40, head_dim_v=24, dtype=FP16),
    Case((50,), (30,), 4, 1, causal=True),  # rows without keys
    Case((20, 20), (50, 50), 4, 2, window_size=(5, 3), sink=torch.float32),
    Case((20,), (50,), 2, 2, causal=True, window_size=(None, 4), softcap=5.0, spread=4.0),
    Case((20,), (20,), 2, 2, softmax_scale=-0.3, causal=True, sink=BF16),
    Case((20,), (20,), 2, 2, softmax_scale=0.0, sink=FP16),
    Case((3, 0, 40), (9, 4, 40), 4, 2, packed_q=True, packed_k=True, causal=True, tail_q=5),
    Case((3, 8, 40), (9, 4, 40), 4, 2, packed_q=True, packed_k=True, used_q=(2, 0, 40)),
    Case((16, 16), (24, 24), 4, 2, used_q=(16, 3), used_k=(0, 20), causal=True),
    Case((5, 7), (24, 24), 4, 2, packed_q=True, used_k=(24, 3)),
    Case((12, 12), (5, 7), 4, 2, packed_k=True, tail_k=4, window_size=(2, -1)),
    Case((33,), (40,), 4, 2, storage="heads_first"),
    Case((33,), (40,), 4, 2, storage="fused", causal=True),
    Case((33,), (40,), 4, 2, storage="shared_head"),
]


@pytest.mark.parametrize("case", LAUNCHED, ids=str)
def test_a_launch_has_all_that_the_answer_depends_on(hopper: Hopper, case: Case) -> None:
    """The fake kernel knows only its arguments; `oracle.check` knows the call.

    That includes rows of padding, which a new output has as zeros and a caller's output as before.
    """
    with no_warning():
        oracle.check(oracle.make_inputs(case), "fa4")
    assert len(hopper.calls) == 2


# -- walking once --------------------------------------------------------------------------------


def test_a_second_call_of_the_same_shapes_does_not_walk_again(hopper: Hopper) -> None:
    lengths = {**PACKED, "seqused_k": ints(4, 0, 6)}
    options: dict[str, Any] = {"causal": True, "window_size": (3, 3), "softcap": 5.0}
    for attempt in range(3):
        q, k, v = packed_inputs(BF16)
        moved = {name: tensor.clone() for name, tensor in lengths.items()}
        out = fa4.flash_attn_varlen_func(q, k, v, **moved, **options, sink=randn(4), backend="fa4")
        assert hopper.walks == 1
        assert len(hopper.calls) == attempt + 1
        arguments = hopper.arguments
        expected, _ = attention_reference(q, k, v, **moved, **options, sink=arguments["sink"])
        assert torch.equal(out, expected)
    # Maximal lengths and whether the LSE is wanted are no reasons to walk either.
    fa4.flash_attn_varlen_func(
        *packed_inputs(BF16),
        **lengths,
        **options,
        max_seqlen_q=99,
        sink=randn(4),
        return_lse=True,
        backend="fa4",
    )
    assert hopper.walks == 1


def test_every_difference_that_matters_walks_again(hopper: Hopper) -> None:
    """C75 and C70: alternate between calls, and each has its own launch."""
    q, k, v = dense_inputs(BF16)
    wide = randn(2, 9, 2, 32, dtype=BF16)
    variants: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, v), {}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"window_size": (3, 3)}),
        ((q, k, v), {"window_size": (3, 4)}),
        ((q, k, v), {"softmax_scale": 0.5}),
        ((q, k, v), {"softcap": 15.0}),
        ((q, k, v), {"softcap": 50.0}),
        ((q, k, v), {"sink": torch.zeros(4)}),
        ((q, k, v), {"sink": torch.zeros(4, dtype=BF16)}),
        ((q, k, v), {"out": torch.zeros(2, 6, 4, 8, dtype=BF16)}),
        ((q, k, v), {"out": torch.zeros(2, 4, 6, 8, dtype=BF16).transpose(1, 2)}),
        ((q[:1], k[:1], v[:1]), {}),
        ((q[:, :5], k, v), {}),
        ((q, k[:, :8], v[:, :8]), {}),
        ((q[:, :, :2], k, v), {}),
        ((q, k, wide[..., :16]), {}),
        ((q, k, wide[..., :8]), {}),
        ((q, wide[..., :16], v), {}),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        ((q.to(FP16), k.to(FP16), v.to(FP16)), {}),
    ]
    for repeat in range(2):
        for number, (tensors, options) in enumerate(variants):
            out = fa4.flash_attn_func(*tensors, **options, backend="fa4")
            assert hopper.walks == (number + 1 if repeat == 0 else len(variants)), options
            expected, _ = attention_reference(
                *tensors, **{name: value for name, value in options.items() if name != "out"}
            )
            assert torch.equal(out, expected), options


def test_sizes_and_strides_change_no_kernel(hopper: Hopper) -> None:
    """C72: one kernel for any batch, lengths, head counts, head dims of a class, strides."""
    for batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim in (
        (1, 1, 1, 1, 1, 8),
        (2, 30, 17, 6, 2, 40),
        (5, 64, 129, 4, 4, 64),
        (1, 130, 3, 8, 1, 64),
    ):
        shapes = [
            (batch, seqlen_q, heads_q, head_dim),
            *[(batch, seqlen_k, heads_kv, head_dim)] * 2,
        ]
        tensors = [randn(*shape, dtype=BF16) for shape in shapes]
        other = [randn(*shape[:-1], head_dim + 8, dtype=BF16)[..., :head_dim] for shape in shapes]
        for left in (1, 20):
            fa4.flash_attn_func(*tensors, window_size=(left, 0), backend="fa4")
            fa4.flash_attn_func(*other, window_size=(left, 0), backend="fa4")
    assert len(hopper.calls) == 16
    assert len(set(hopper.specs)) == 1


def test_packed_lengths_and_batches_change_no_kernel(hopper: Hopper) -> None:
    for lengths in ((3, 5), (1,), (0, 0, 7, 2), ()):
        cu_seqlens = ints(*itertools.accumulate(lengths, initial=0))
        q = randn(12, 4, 16, dtype=BF16)
        fa4.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, backend="fa4")
    assert len(set(hopper.specs)) == 1
    assert hopper.walks == 4  # shapes of cu_seqlens differ


def test_the_table_of_launches_is_bounded(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_LAUNCHES", 4)
    for seqlen in [*range(1, 12), *range(1, 12)]:
        q = randn(1, seqlen, 2, 8, dtype=BF16)
        out = fa4.flash_attn_func(q, q, q, backend="fa4")
        assert torch.equal(out, attention_reference(q, q, q)[0])
        assert 1 <= len(attention._launches) <= 4


def test_a_reference_answer_leaves_nothing_in_the_table(hopper: Hopper) -> None:
    q, k, v = dense_inputs()
    fa4.flash_attn_func(q, k, v, backend="reference")
    with pytest.raises(fa4.UnsupportedProblemError, match="dtype fp32"):
        fa4.flash_attn_func(q, k, v, backend="fa4")
    with pytest.warns(fa4.FallbackWarning, match="dtype fp32"):
        fa4.flash_attn_func(q, k, v)
    assert attention._launches == {}
    assert hopper.calls == []


# -- what the table cannot know ------------------------------------------------------------------

# Calls that look as an earlier one by everything in the table's key: how the second differs from
# the first, and what must come of it.
UNSEEN: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "dtype of k": (
        lambda call: {"k": call["k"].to(FP16)},
        TypeError,
        "^q, k and v have dtypes torch.bfloat16, torch.float16 and torch.bfloat16",
    ),
    "dtype of v": (
        lambda call: {"v": call["v"].to(FP16)},
        TypeError,
        "^q, k and v have dtypes torch.bfloat16, torch.bfloat16 and torch.float16",
    ),
    "dtype of cu_seqlens": (
        lambda call: {"cu_seqlens_k": call["cu_seqlens_k"].long()},
        TypeError,
        "^cu_seqlens_k has dtype torch.int64; it must be torch.int32",
    ),
    "stride of cu_seqlens": (
        lambda call: {"cu_seqlens_q": ints(0, 9, 3, 9, 3, 9, 8, 9)[::2]},
        ValueError,
        "^cu_seqlens_q has stride 2; it must be contiguous",
    ),
    "stride of the sink": (
        lambda call: {"sink": randn(8)[::2]},
        ValueError,
        "^sink has stride 2; it must be contiguous",
    ),
    "dtype of out": (
        lambda call: {"out": call["out"].to(FP16)},
        ValueError,
        "^out is torch.float16 ",
    ),
    "alignment": (
        lambda call: {"k": misaligned(call["k"])},
        fa4.UnsupportedProblemError,
        "k starts at an address that is not a multiple of 16 bytes",
    ),
    "alignment of out": (
        lambda call: {"out": misaligned(call["out"])},
        fa4.UnsupportedProblemError,
        "out starts at an address that is not a multiple of 16 bytes",
    ),
    "out that requires grad": (
        lambda call: {"out": call["out"].clone().requires_grad_()},
        ValueError,
        "^out requires grad",
    ),
}


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, one element further in memory."""
    shifted = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return shifted.copy_(tensor)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_known_launch_refuses_gets_the_message_of_a_first_call(
    hopper: Hopper, name: str
) -> None:
    change, error, message = UNSEEN[name]
    q, k, v = packed_inputs(BF16)
    call: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "sink": randn(4),
        "backend": "fa4",
        **PACKED,
        "out": torch.zeros(10, 4, 8, dtype=BF16),
    }
    fa4.flash_attn_varlen_func(**call)
    launched = len(hopper.calls)
    with pytest.raises(error, match=message):
        fa4.flash_attn_varlen_func(**{**call, **change(call)})
    assert len(hopper.calls) == launched
    # The launch itself is still good.
    fa4.flash_attn_varlen_func(**call)
    assert len(hopper.calls) == launched + 1


def test_a_tensor_that_moved_to_a_bad_address_is_answered_by_the_reference(hopper: Hopper) -> None:
    q, k, v = dense_inputs(BF16)
    expected = fa4.flash_attn_func(q, k, v)
    with pytest.warns(fa4.FallbackWarning, match="q starts at an address"):
        result = fa4.flash_attn_func(misaligned(q), k, v)
    assert torch.equal(result, expected)
    assert len(hopper.calls) == 1


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError])
def test_an_error_that_nothing_explains_stands(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    q, k, v = dense_inputs(BF16)
    fa4.flash_attn_func(q, k, v, backend="fa4")

    def fail(self: FakeKernel, *arguments: Any) -> None:
        raise error("the driver is unhappy")

    monkeypatch.setattr(FakeKernel, "__call__", fail)
    for _ in range(2):
        with pytest.raises(error, match="the driver is unhappy"):
            fa4.flash_attn_func(q, k, v)


@pytest.mark.parametrize("leaf", ["q", "k", "v", "sink"])
def test_a_gradient_that_is_asked_for_later_is_not_lost(training_hopper: Hopper, leaf: str) -> None:
    """Evaluation first, then training with the same tensors."""
    q, k, v = dense_inputs(BF16)
    tensors = {"q": q, "k": k, "v": v, "sink": randn(4)}
    tensors[leaf].requires_grad_()
    for attempt in range(2):
        with torch.no_grad():
            assert not fa4.flash_attn_func(**tensors).requires_grad
        out = fa4.flash_attn_func(**tensors)
        tensors[leaf].grad = None
        out.float().sum().backward()
        gradient = tensors[leaf].grad
        assert gradient is not None
        assert gradient.abs().sum() > 0
        assert len(training_hopper.calls) == 2 * attempt + 2
    assert training_hopper.walks == 2


def test_a_gradient_without_a_kernel_for_it_is_the_references(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(problem: AttentionProblem, *machine: str) -> fa4.Decision:
        if problem.needs_grad:
            return fa4.Decision(problem, "reference", reasons=("gradients are asked for",))
        return dispatch.decide(problem, *machine)

    monkeypatch.setattr(attention, "decide", decide)
    q, k, v = dense_inputs(BF16)
    fa4.flash_attn_func(q, k, v)
    q.requires_grad_()
    with pytest.warns(fa4.FallbackWarning, match="gradients are asked for"):
        out = fa4.flash_attn_func(q, k, v)
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0
    with pytest.raises(fa4.UnsupportedProblemError, match="gradients are asked for"):
        fa4.flash_attn_func(q, k, v, backend="fa4")
    assert len(hopper.calls) == 1


def test_c95_a_launch_is_not_taken_for_the_copies_that_autocast_makes(hopper: Hopper) -> None:
    """Inputs of one half precision stay as they are; all others take the autocast dtype."""
    q, k, v = dense_inputs(BF16)
    assert fa4.flash_attn_func(q, k, v, backend="fa4").dtype == BF16
    for dtype in (BF16, FP16, BF16, FP16):
        with torch.autocast("cpu", dtype=dtype):
            for tensors in ((q.float(), k, v), (q, k, v.to(FP16)), (q.float(), k, v.to(FP16))):
                out = fa4.flash_attn_func(*tensors, backend="fa4")
                assert out.dtype == dtype
                cast = [tensor.to(dtype) for tensor in tensors]
                assert torch.equal(out, attention_reference(*cast)[0])
            assert fa4.flash_attn_func(q, k, v, backend="fa4").dtype == BF16
        assert fa4.flash_attn_func(q, k, v, backend="fa4").dtype == BF16
    for tensors in ((q.float(), k, v), (q, k, v.to(FP16))):
        with pytest.raises(TypeError, match="q, k and v have dtypes"):
            fa4.flash_attn_func(*tensors, backend="fa4")


# -- where and how a launch goes -----------------------------------------------------------------


def test_a_launch_happens_on_the_device_of_its_tensors(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several devices, another one may be current; the caller's stays current afterwards."""
    entered: list[Any] = []
    inside = [False]

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        entered.append(wanted)
        inside[0] = True
        yield
        inside[0] = False

    seen: list[bool] = []
    original = FakeKernel.__call__

    def call(self: FakeKernel, *arguments: Any) -> None:
        seen.append(inside[0])
        original(self, *arguments)

    monkeypatch.setattr(FakeKernel, "__call__", call)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    q, k, v = dense_inputs(BF16)
    fa4.flash_attn_func(q, k, v, backend="fa4")
    fa4.flash_attn_func(q, k, v, backend="fa4")
    assert seen == [True, True]
    assert entered == [q.device, q.device]
    assert not inside[0]


PROBLEM = AttentionProblem(
    dtype="bf16",
    batch=4,
    seqlen_q=1024,
    seqlen_k=1024,
    heads_q=16,
    heads_kv=4,
    head_dim=128,
    head_dim_v=128,
    softmax_scale=0.1,
    window_right=0,
)


def test_heads_that_run_together_share_l2() -> None:
    """2 x 256 bytes a key: 1024 keys of a head take 0.5 MiB, of 64 heads 32 MiB."""
    assert launch.heads_in_group(PROBLEM) == 64  # all pairs of 16 heads and 4 sequences
    many = dataclasses.replace(PROBLEM, batch=64)
    assert launch.heads_in_group(many) == 64 * 4  # 4 query heads each
    assert launch.heads_in_group(dataclasses.replace(many, seqlen_k=2048)) == 32 * 4
    assert launch.heads_in_group(dataclasses.replace(many, head_dim_v=384)) == 32 * 4
    # A head larger than L2 runs alone, with the query heads that share it.
    assert launch.heads_in_group(dataclasses.replace(many, seqlen_k=10**6)) == 4


def test_tiles_of_equal_length_go_head_by_head() -> None:
    assert launch.heads_in_group(dataclasses.replace(PROBLEM, window_right=None)) == 1


def test_packed_sequences_go_through_their_tiles_with_many_heads_at_once() -> None:
    """Whatever the mask, and by the rows of a sequence, not of all of them."""
    packed = dataclasses.replace(PROBLEM, packed_q=True, packed_k=True, seqlen_k=10**6, batch=1000)
    for window_right in (0, None):
        problem = dataclasses.replace(packed, window_right=window_right)
        assert launch.heads_in_group(problem) == 16
    for ragged in ({"has_seqused_k": True}, {"packed_k": True, "seqlen_k": 4 * 1024}):
        problem = dataclasses.replace(PROBLEM, window_right=None, **ragged)
        assert launch.heads_in_group(problem) == 64


@settings(max_examples=200, deadline=None)
@given(
    seqlen_k=st.integers(1, 2**29),
    heads_kv=st.integers(1, 200),
    ratio=st.integers(1, 16),
    batch=st.integers(0, 1000),
    head_dim=st.integers(1, 256),
    packed_q=st.booleans(),
    packed_k=st.booleans(),
)
def test_a_group_is_at_least_one_and_at_most_all_heads(
    seqlen_k: int,
    heads_kv: int,
    ratio: int,
    batch: int,
    head_dim: int,
    packed_q: bool,
    packed_k: bool,
) -> None:
    problem = dataclasses.replace(
        PROBLEM,
        seqlen_k=seqlen_k,
        heads_kv=heads_kv,
        heads_q=heads_kv * ratio,
        batch=batch,
        head_dim=head_dim,
        packed_q=packed_q,
        packed_k=packed_k,
    )
    pairs = heads_kv * ratio * (1 if packed_q else batch)
    assert 1 <= launch.heads_in_group(problem) <= max(1, pairs)


# -- the emulated device -------------------------------------------------------------------------


def test_arch_is_refused_with_another_backend_than_the_emulator() -> None:
    q = torch.randn(1, 4, 1, 16, dtype=BF16)
    for backend in ("auto", "fa4", "reference"):
        with pytest.raises(ValueError, match=f"arch='sm_90a' is for .*, not '{backend}'"):
            fa4.flash_attn_func(q, q, q, backend=backend, arch="sm_90a")


def test_the_emulator_refuses_what_the_emulated_architecture_has_no_kernel_for() -> None:
    q = torch.randn(1, 4, 1, 16, dtype=BF16)
    with pytest.raises(fa4.UnsupportedProblemError, match="dtype fp32 is not one of"):
        fa4.flash_attn_func(q.float(), q.float(), q.float(), backend="emulator", arch="sm_100a")
    with pytest.raises(fa4.UnsupportedProblemError, match="dtype fp32 is not one of"):
        fa4.flash_attn_func(q.float(), q.float(), q.float(), backend="emulator")


def test_the_emulator_takes_cpu_tensors_only() -> None:
    q = torch.empty(1, 4, 1, 16, dtype=BF16, device="meta")
    with pytest.raises(ValueError, match=r"q is on meta; .* takes CPU tensors"):
        fa4.flash_attn_func(q, q, q, backend="emulator")
