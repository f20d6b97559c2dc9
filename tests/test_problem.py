"""What is asked is checked before anything runs: each refusal names the argument, what came, and
what is allowed, and what is accepted is reduced to the right problem.

Tensors here have no storage ("meta") unless their addresses matter: the checks read no contents.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa4.problem import (
    DTYPE_NAMES,
    MAX_ROWS,
    AttentionProblem,
    check_window,
    describe_problem,
    layout_fault,
    widest_access,
)

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def ints(*shape: int, dtype: torch.dtype = torch.int32, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def dense(**changes: Any) -> dict[str, Any]:
    """Arguments of a dense problem: 2 sequences of 5 queries and 7 keys, 4 and 2 heads, 64 dims."""
    arguments: dict[str, Any] = {
        "q": empty(2, 5, 4, 64),
        "k": empty(2, 7, 2, 64),
        "v": empty(2, 7, 2, 32),
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "sink": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "seqused_q": None,
        "seqused_k": None,
        "out": None,
        "needs_grad": False,
    }
    return {**arguments, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """The same heads and dims, packed: 3 sequences in 11 query rows and 13 key rows."""
    arguments: dict[str, Any] = {
        "q": empty(11, 4, 64),
        "k": empty(13, 2, 64),
        "v": empty(13, 2, 32),
        "cu_seqlens_q": ints(4),
        "cu_seqlens_k": ints(4),
    }
    return dense(**{**arguments, **changes})


def describe(**changes: Any) -> AttentionProblem:
    return describe_problem(**dense(**changes))


# -- what is accepted ----------------------------------------------------------------------------


def test_a_dense_problem_is_described_by_its_tensors() -> None:
    assert describe() == AttentionProblem(
        dtype="bf16",
        batch=2,
        seqlen_q=5,
        seqlen_k=7,
        heads_q=4,
        heads_kv=2,
        head_dim=64,
        head_dim_v=32,
        softmax_scale=0.125,
    )


def test_every_option_is_in_the_problem() -> None:
    problem = describe_problem(
        **packed(
            softmax_scale=-2,
            window_size=(3, 4),
            softcap=15,
            sink=empty(4, dtype=torch.float32),
            seqused_q=ints(3),
            seqused_k=ints(3),
            out=empty(11, 4, 32),
            needs_grad=True,
        )
    )
    assert problem == AttentionProblem(
        dtype="bf16",
        batch=3,
        seqlen_q=11,
        seqlen_k=13,
        heads_q=4,
        heads_kv=2,
        head_dim=64,
        head_dim_v=32,
        softmax_scale=-2.0,
        softcap=15.0,
        window_left=3,
        window_right=4,
        sink_dtype="fp32",
        packed_q=True,
        packed_k=True,
        has_seqused_q=True,
        has_seqused_k=True,
        needs_grad=True,
    )
    assert type(problem.softmax_scale) is type(problem.softcap) is float


def test_each_side_is_packed_or_dense_on_its_own() -> None:
    mixed = describe_problem(
        **packed(k=empty(3, 7, 2, 64), v=empty(3, 7, 2, 32), cu_seqlens_k=None)
    )
    assert (mixed.packed_q, mixed.packed_k, mixed.batch) == (True, False, 3)
    assert (mixed.seqlen_q, mixed.seqlen_k) == (11, 7)
    other = describe_problem(**packed(q=empty(3, 5, 4, 64), cu_seqlens_q=None))
    assert (other.packed_q, other.packed_k, other.batch) == (False, True, 3)
    assert (other.seqlen_q, other.seqlen_k) == (5, 13)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_float_type_is_a_problem(dtype: torch.dtype) -> None:
    problem = describe(
        **{name: tensor.to(dtype) for name, tensor in dense().items() if isinstance(tensor, Tensor)}
    )
    assert problem.dtype == DTYPE_NAMES[dtype]


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (0, 5, 4, 64), "k": (0, 7, 2, 64), "v": (0, 7, 2, 32)},
        {"q": (2, 0, 4, 64)},
        {"k": (2, 0, 2, 64), "v": (2, 0, 2, 32)},
        {"q": (2, 5, 0, 64)},
        {"q": (2, 5, 0, 64), "k": (2, 7, 0, 64), "v": (2, 7, 0, 32)},
    ],
    ids=["batch", "queries", "keys", "query heads", "heads"],
)
def test_extents_of_zero_are_problems_without_work(shapes: dict[str, tuple[int, ...]]) -> None:
    problem = describe(**{name: empty(*shape) for name, shape in shapes.items()})
    assert not (problem.has_queries and problem.has_keys)


def test_work_is_counted_over_all_sequences() -> None:
    assert describe().num_query_rows == 10
    assert describe_problem(**packed()).num_query_rows == 11
    # No sequence, but rows of padding to be set to zero.
    padding = describe_problem(**packed(cu_seqlens_q=ints(1), cu_seqlens_k=ints(1)))
    assert padding.batch == 0
    assert padding.has_queries
    assert padding.has_keys


@pytest.mark.parametrize("heads", [(96, 8), (6, 2), (10, 2), (14, 2), (9, 3), (71, 1), (5, 5)])
def test_c69_any_whole_ratio_of_heads_is_a_problem(heads: tuple[int, int]) -> None:
    heads_q, heads_kv = heads
    problem = describe(
        q=empty(2, 5, heads_q, 64), k=empty(2, 7, heads_kv, 64), v=empty(2, 7, heads_kv, 32)
    )
    assert (problem.heads_q, problem.heads_kv) == heads


def test_a_problem_is_a_frozen_value() -> None:
    problem = describe()
    assert problem == describe()
    assert hash(problem) == hash(describe())
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 3  # type: ignore[misc]


def test_text_of_a_problem_says_what_is_asked() -> None:
    assert str(describe(causal=True)) == (
        "bf16, batch 2; q: 5 rows, 4 heads, dim 64; k: 7 rows, 2 heads, dim 64; v: dim 32; "
        "scale 0.125, causal"
    )
    text = str(
        describe_problem(
            **packed(
                window_size=(3, None),
                softcap=15,
                sink=empty(4),
                seqused_q=ints(3),
                needs_grad=True,
            )
        )
    )
    for part in (
        "q: 11 packed rows",
        "window left 3, right unbounded",
        "softcap 15",
        "sink bf16",
        "seqused_q",
        "gradients",
    ):
        assert part in text


# -- scale and softcap ---------------------------------------------------------------------------


def test_c67_the_default_scale_is_one_over_the_root_of_the_head_dim() -> None:
    q, k = empty(2, 5, 4, 8), empty(2, 5, 4, 8)
    assert describe(q=q, k=k, v=k).softmax_scale == 1 / math.sqrt(8)
    assert describe(q=q, k=k, v=k, softmax_scale=1 / math.sqrt(8)) == describe(q=q, k=k, v=k)


@pytest.mark.parametrize("scale", [0, 0.0, -0.125, 3, 1e-30, 1e30, np.float32(0.5), np.int64(2)])
def test_any_finite_real_is_a_scale(scale: Any) -> None:
    problem = describe(softmax_scale=scale)
    assert type(problem.softmax_scale) is float
    assert problem.softmax_scale == scale


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, True, "0.5", 1j, [1.0], torch.tensor(1.0)],
    ids=repr,
)
def test_a_scale_or_cap_that_is_no_finite_real_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}={re.escape(repr(value))} must be a finite real"
    ):
        describe(**{name: value})


@pytest.mark.parametrize("softcap", [None, 0, 0.0, -0.0])
def test_no_softcap_is_zero(softcap: Any) -> None:
    assert describe(softcap=softcap) == describe()


def test_a_negative_softcap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^softcap=-1\.5 is negative; use 0 for none or a pos"):
        describe(softcap=-1.5)


# -- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "window_size", "expected"),
    [
        (False, (-1, -1), (None, None)),
        (False, (None, None), (None, None)),
        (False, (None, -1), (None, None)),
        (False, (3, 4), (3, 4)),
        (False, (0, 0), (0, 0)),
        (False, (3, -1), (3, None)),
        (False, (None, 4), (None, 4)),
        # Causal and window both apply.
        (True, (-1, -1), (None, 0)),
        (True, (None, 0), (None, 0)),
        (True, (-1, 5), (None, 0)),
        (True, (3, 4), (3, 0)),
        (True, (3, None), (3, 0)),
        (True, (0, 0), (0, 0)),
    ],
)
def test_c11_windows_and_causal_become_one_pair_of_bounds(
    causal: bool,
    window_size: tuple[int | None, int | None],
    expected: tuple[int | None, int | None],
) -> None:
    problem = describe(causal=causal, window_size=window_size)
    assert (problem.window_left, problem.window_right) == expected


def test_a_window_may_be_a_list_and_its_bounds_any_integers() -> None:
    expected = describe(window_size=(3, 4))
    assert describe(window_size=[3, 4]) == expected
    assert describe(window_size=(np.int32(3), np.int64(4))) == expected
    problem = describe(window_size=(np.int32(3), np.int64(4)))
    assert type(problem.window_left) is type(problem.window_right) is int


def test_a_bound_beyond_every_sequence_is_cut_to_what_32_bits_can_add() -> None:
    problem = describe(window_size=(2**40, 2**31 - 1))
    assert (problem.window_left, problem.window_right) == (MAX_ROWS, MAX_ROWS)
    # The farthest sums that a kernel makes: a row, its diagonal, a bound and a tile.
    assert MAX_ROWS + MAX_ROWS + MAX_ROWS + 1024 < 2**31


@pytest.mark.parametrize(
    ("window_size", "error", "message"),
    [
        (5, TypeError, r"^window_size=5 must be a pair \(left, right\)"),
        (None, TypeError, r"^window_size=None must be a pair \(left, right\)"),
        ((1,), TypeError, r"^window_size=\(1,\) must be a pair \(left, right\)"),
        ((1, 2, 3), TypeError, r"^window_size=\(1, 2, 3\) must be a pair \(left, right\)"),
        ("ab", TypeError, r"^window_size='ab' must be a pair \(left, right\)"),
        ((1.5, 0), TypeError, "^window_size: the left bound 1.5 must be an int or None"),
        ((0, "1"), TypeError, "^window_size: the right bound '1' must be an int or None"),
        (
            (-2, 0),
            ValueError,
            r"^window_size: the left bound is -2; allowed are -1 or None \(unbounded\), 0 and pos",
        ),
        ((0, -7), ValueError, "^window_size: the right bound is -7; allowed are -1 or None"),
    ],
)
def test_what_is_no_window_is_refused(
    window_size: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        describe(window_size=window_size)


@settings(max_examples=200, deadline=None)
@given(
    st.none() | st.integers(-1, 2**40),
    st.none() | st.integers(-1, 2**40),
)
def test_checking_a_window_twice_changes_nothing(left: int | None, right: int | None) -> None:
    once = check_window((left, right))
    assert check_window(once) == once
    for given_bound, bound in zip((left, right), once, strict=True):
        assert bound == (given_bound if given_bound is None else min(given_bound, MAX_ROWS))


# -- tensors that are refused --------------------------------------------------------------------

# Arguments of `dense`, the error, and its whole message or the beginning of it.
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q is no tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list."),
    "k is no tensor": ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType."),
    # C94: flash_attn_func(q, k, 0.0): a dropout in v's place
    "v is no tensor": ({"v": 0.0}, TypeError, "v must be a torch.Tensor, got float."),
    # C95: the three dtypes and the allowed ones
    "dtypes differ": (
        {
            "q": empty(2, 5, 4, 64, dtype=torch.float32),
            "k": empty(2, 7, 2, 64, dtype=torch.float32),
        },
        TypeError,
        "q, k and v have dtypes torch.float32, torch.float32 and torch.bfloat16; they must be "
        "equal, and one of torch.bfloat16, torch.float16, torch.float32, torch.float64.",
    ),
    # C106
    "complex": (
        {
            "q": empty(2, 5, 4, 64, dtype=torch.complex64),
            "k": empty(2, 7, 2, 64, dtype=torch.complex64),
            "v": empty(2, 7, 2, 32, dtype=torch.complex64),
        },
        TypeError,
        "q, k and v have dtypes torch.complex64, torch.complex64 and torch.complex64; they must be "
        "equal, and one of torch.bfloat16, ",
    ),
    "q rank": (
        {"q": empty(5, 4, 64)},
        ValueError,
        "q has shape (5, 4, 64); without cu_seqlens_q it must be (batch, seqlen, heads, head_dim).",
    ),
    "k rank": (
        {"k": empty(7, 2, 64), "v": empty(7, 2, 32)},
        ValueError,
        "k has shape (7, 2, 64); without cu_seqlens_k it must be (batch, seqlen, heads, head_dim).",
    ),
    "v rank": ({"v": empty(7, 2, 32)}, ValueError, "v has shape (7, 2, 32); without cu_seqlens_k "),
    "k device": (
        {"k": empty(2, 7, 2, 64, device="cpu")},
        ValueError,
        "k is on cpu, q on meta; they must be on one.",
    ),
    "v device": (
        {"v": empty(2, 7, 2, 32, device="cpu")},
        ValueError,
        "v is on cpu, q on meta; they must be on one.",
    ),
    "v rows": (
        {"v": empty(2, 8, 2, 32)},
        ValueError,
        "v has shape (2, 8, 2, 32) and k (2, 7, 2, 64); all but the head dim must be equal.",
    ),
    "v heads": ({"v": empty(2, 7, 1, 32)}, ValueError, "v has shape (2, 7, 1, 32) and k "),
    "head dims": (
        {"k": empty(2, 7, 2, 32)},
        ValueError,
        "head_dim of q is 64 and of k 32; they must be equal.",
    ),
    "head dim of zero": (
        {"q": empty(2, 5, 4, 0), "k": empty(2, 7, 2, 0)},
        ValueError,
        "head_dim=0 and head_dim_v=32 must be at least 1.",
    ),
    "head dim of v of zero": (
        {"v": empty(2, 7, 2, 0)},
        ValueError,
        "head_dim=64 and head_dim_v=0 must be at least 1.",
    ),
    "batch": (
        {"k": empty(3, 7, 2, 64), "v": empty(3, 7, 2, 32)},
        ValueError,
        "the batch sizes differ: q.shape[0] is 2 and k.shape[0] is 3.",
    ),
    "seqused type": (
        {"seqused_q": [5, 5]},
        TypeError,
        "seqused_q must be an int32 tensor, got list.",
    ),
    # C34: a length where a tensor of lengths is meant
    "seqused number": ({"seqused_k": 7}, TypeError, "seqused_k must be an int32 tensor, got int."),
    "seqused length": (
        {"seqused_k": ints(3)},
        ValueError,
        "seqused_k has shape (3,); it must be (batch,) = (2,).",
    ),
    "seqused rank": (
        {"seqused_q": ints(2, 1)},
        ValueError,
        "seqused_q has shape (2, 1); it must be (batch,) = (2,).",
    ),
    "seqused dtype": (
        {"seqused_q": ints(2, dtype=torch.int64)},
        TypeError,
        "seqused_q has dtype torch.int64; it must be torch.int32.",
    ),
    "seqused device": (
        {"seqused_q": ints(2, device="cpu")},
        ValueError,
        "seqused_q is on cpu, q on meta; they must be on one.",
    ),
    "seqused stride": (
        {"seqused_q": ints(4)[::2]},
        ValueError,
        "seqused_q has stride 2; it must be contiguous.",
    ),
    "sink type": ({"sink": 1.0}, TypeError, "sink must be a tensor, got float."),
    "sink dtype": (
        {"sink": ints(4)},
        TypeError,
        "sink has dtype torch.int32; allowed are torch.bfloat16, torch.float16, ",
    ),
    "sink shape": (
        {"sink": empty(2)},
        ValueError,
        "sink has shape (2,); it must be (heads_q,) = (4,).",
    ),
    "sink rank": (
        {"sink": empty(4, 1)},
        ValueError,
        "sink has shape (4, 1); it must be (heads_q,) = (4,).",
    ),
    "sink device": (
        {"sink": empty(4, device="cpu")},
        ValueError,
        "sink is on cpu, q on meta; they must be on one.",
    ),
    "sink stride": (
        {"sink": empty(8)[::2]},
        ValueError,
        "sink has stride 2; it must be contiguous.",
    ),
    "out type": ({"out": True}, TypeError, "out must be a tensor, got bool."),
    "out shape": (
        {"out": empty(2, 5, 4, 64)},
        ValueError,
        "out is torch.bfloat16 (2, 5, 4, 64) on meta; it must be torch.bfloat16 (2, 5, 4, 32) on "
        "meta.",
    ),
    "out dtype": (
        {"out": empty(2, 5, 4, 32, dtype=torch.float32)},
        ValueError,
        "out is torch.float32 (2, 5, 4, 32) on meta; it must be torch.bfloat16 ",
    ),
    "out device": (
        {"out": empty(2, 5, 4, 32, device="cpu")},
        ValueError,
        "out is torch.bfloat16 (2, 5, 4, 32) on cpu; it must be torch.bfloat16 ",
    ),
    "out shares memory": (
        {"out": empty(1, 5, 4, 32).expand(2, 5, 4, 32)},
        ValueError,
        "out has strides (0, 128, 32, 1): some of its elements share memory",
    ),
    "out requires grad": (
        {"out": empty(2, 5, 4, 32).requires_grad_()},
        ValueError,
        "out requires grad; an output written in place must not.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    changes, error, message = REFUSED[name]
    with pytest.raises(error) as refusal:
        describe(**changes)
    assert str(refusal.value).startswith(message)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (2, 4), (8, 0)])
def test_c68_head_counts_that_do_not_divide_are_refused_with_both_numbers(
    heads: tuple[int, int],
) -> None:
    heads_q, heads_kv = heads
    with pytest.raises(ValueError) as refusal:
        describe(
            q=empty(2, 5, heads_q, 64), k=empty(2, 7, heads_kv, 64), v=empty(2, 7, heads_kv, 32)
        )
    assert f"heads_q={heads_q} is not a multiple of heads_kv={heads_kv}" in str(refusal.value)


def test_out_that_requires_grad_is_taken_where_no_gradient_is_recorded() -> None:
    with torch.no_grad():
        assert describe(out=empty(2, 5, 4, 32).requires_grad_()) == describe()


# C108: what cu_seqlens may be instead of (batch + 1,) int32 on q's device. Contents, such as values
# that fall or do not start at 0, are for checked mode: tests/test_checked_mode.py.
BAD_CU_SEQLENS: dict[str, tuple[Callable[[], Any], str]] = {
    "batch entries": (lambda: ints(3), "the batch sizes differ: len({name}) - 1 is 2 and "),
    "int64": (
        lambda: ints(4, dtype=torch.int64),
        "{name} has dtype torch.int64; it must be torch.int32.",
    ),
    "float": (
        lambda: ints(4, dtype=torch.float32),
        "{name} has dtype torch.float32; it must be torch.int32.",
    ),
    "two dimensions": (
        lambda: ints(4, 1),
        "{name} must be an int32 tensor of shape (batch + 1,), got torch.Size([4, 1]).",
    ),
    "no entry": (
        lambda: ints(0),
        "{name} must be an int32 tensor of shape (batch + 1,), got torch.Size([0]).",
    ),
    "a number": (
        lambda: ints()[...],
        "{name} must be an int32 tensor of shape (batch + 1,), got torch.Size([]).",
    ),
    "on another device": (
        lambda: ints(4, device="cpu"),
        "{name} is on cpu, q on meta; they must be on one.",
    ),
    "not contiguous": (lambda: ints(8)[::2], "{name} has stride 2; it must be contiguous."),
    "a list": (
        lambda: [0, 1, 2, 3],
        "{name} must be an int32 tensor of shape (batch + 1,), got list.",
    ),
}


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("fault", BAD_CU_SEQLENS)
def test_c108_cu_seqlens_of_a_wrong_form_are_refused(side: str, fault: str) -> None:
    make, message = BAD_CU_SEQLENS[fault]
    name = f"cu_seqlens_{side}"
    expected = message.format(name=name)
    with pytest.raises((TypeError, ValueError)) as refusal:
        describe_problem(**packed(**{name: make()}))
    text = str(refusal.value)
    if fault == "batch entries":
        assert text.startswith("the batch sizes differ: ")
        assert f"len({name}) - 1 is 2" in text
        assert " is 3" in text
    else:
        assert text == expected


@pytest.mark.parametrize("side", ["q", "k"])
def test_c108_a_wrong_type_of_lengths_is_a_type_error(side: str) -> None:
    """As it is for seqused, and as the docstring of `describe_problem` says."""
    with pytest.raises(TypeError, match=f"cu_seqlens_{side} must be an int32 tensor"):
        describe_problem(**packed(**{f"cu_seqlens_{side}": [0, 1, 2, 3]}))


def test_packed_tensors_need_the_packed_rank() -> None:
    with pytest.raises(ValueError) as refusal:
        describe_problem(**packed(q=empty(1, 11, 4, 64)))
    assert str(refusal.value) == (
        "q has shape (1, 11, 4, 64); with cu_seqlens_q it must be (total, heads, head_dim)."
    )


def test_packed_and_dense_batches_must_be_one() -> None:
    with pytest.raises(ValueError) as refusal:
        describe_problem(**packed(k=empty(2, 7, 2, 64), v=empty(2, 7, 2, 32), cu_seqlens_k=None))
    assert str(refusal.value) == (
        "the batch sizes differ: len(cu_seqlens_q) - 1 is 3 and k.shape[0] is 2."
    )


@pytest.mark.parametrize("name", ["q", "k"])
def test_more_rows_than_32_bits_can_add_up_are_refused(name: str) -> None:
    rows = {"q": (1, 5, 1, 8), "k": (1, 5, 1, 8)}
    for number in (MAX_ROWS, MAX_ROWS + 1):
        rows[name] = (1, number, 1, 8)
        arguments = {"q": empty(*rows["q"]), "k": empty(*rows["k"]), "v": empty(*rows["k"])}
        if number == MAX_ROWS:
            assert getattr(describe(**arguments), f"seqlen_{name}") == MAX_ROWS
        else:
            with pytest.raises(ValueError, match=f"^{name} has 536870913 rows; the most is 53687"):
                describe(**arguments)


def test_no_tensor_is_read() -> None:
    """Tensors on "meta" have nothing to read; every check above passed or failed without it."""
    problem = describe_problem(
        **packed(sink=empty(4), seqused_q=ints(3), seqused_k=ints(3), out=empty(11, 4, 32))
    )
    assert problem.batch == 3


# -- layouts that TMA can address ----------------------------------------------------------------


def strided(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Tensor:
    """A bf16 view with these strides of memory that begins at a multiple of 64 bytes."""
    needed = 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    return torch.zeros(offset + needed, dtype=BF16).as_strided(shape, stride, offset)


def test_contiguous_tensors_have_no_fault() -> None:
    for shape in ((2, 5, 4, 64), (11, 4, 64), (2, 5, 4, 8)):
        assert layout_fault("q", torch.zeros(shape, dtype=BF16)) is None


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((2, 5, 4, 64), (5 * 4 * 64, 64, 5 * 64, 1)),  # heads outside of rows
        ((2, 5, 4, 64), (4 * 64, 2 * 4 * 64, 64, 1)),  # rows outside of the batch
        ((2, 5, 4, 64), (5 * 12 * 64, 12 * 64, 64, 1)),  # heads of a fused projection
        ((2, 5, 4, 64), (0, 256, 64, 1)),  # one sequence for all
        ((2, 5, 4, 64), (320, 64, 0, 1)),  # one head for all
        ((2, 5, 4, 64), (5 * 4 * 72, 4 * 72, 72, 1)),  # padded head dim
    ],
)
def test_strides_of_16_bytes_have_no_fault(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert layout_fault("k", strided(shape, stride)) is None


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("stride", [0, 1, 3, 1_000_003])
def test_c33_strides_of_extents_of_one_do_not_matter(mode: int, stride: int) -> None:
    shape = [2, 5, 4, 64]
    shape[mode] = 1
    strides = [5 * 4 * 64, 4 * 64, 64, 1]
    strides[mode] = stride
    assert layout_fault("k", strided(tuple(shape), tuple(strides))) is None


@pytest.mark.parametrize(
    ("shape", "stride", "fault"),
    [
        ((2, 5, 4, 64), (2560, 512, 128, 2), "k has stride 2 in its last dimension; it must be 1"),
        ((2, 5, 4, 64), (0, 0, 0, 0), "k has stride 0 in its last dimension; it must be 1"),
        (
            (2, 5, 4, 64),
            (1280, 256, 68, 1),
            "k has a stride of 68 elements in dimension 2; it must be a multiple of 8 (16 bytes)",
        ),
        (
            (2, 5, 4, 64),
            (1280, 260, 64, 1),
            "k has a stride of 260 elements in dimension 1; it must be a multiple of 8 (16 bytes)",
        ),
        (
            (2, 5, 4, 64),
            (1284, 256, 64, 1),
            "k has a stride of 1284 elements in dimension 0; it must be a multiple of 8 (16 bytes)",
        ),
        # a head dim that is no multiple of 8, contiguous
        (
            (11, 4, 60),
            (240, 60, 1),
            "k has a stride of 60 elements in dimension 1; it must be a multiple of 8 (16 bytes)",
        ),
    ],
)
def test_strides_that_tma_cannot_step_are_named(
    shape: tuple[int, ...], stride: tuple[int, ...], fault: str
) -> None:
    assert layout_fault("k", strided(shape, stride)) == fault


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_addresses_that_tma_cannot_start_at_are_named(offset: int) -> None:
    shape, stride = (2, 5, 4, 64), (1280, 256, 64, 1)
    assert layout_fault("v", strided(shape, stride, offset)) == (
        "v starts at an address that is not a multiple of 16 bytes"
    )
    assert layout_fault("v", strided(shape, stride, 8)) is None


def test_stride_rule_is_in_bytes() -> None:
    single = torch.zeros(2 * 20, dtype=torch.float32)
    assert layout_fault("q", single.as_strided((2, 4), (12, 1))) is None  # 48 bytes
    assert layout_fault("q", single.as_strided((2, 4), (10, 1))) == (
        "q has a stride of 10 elements in dimension 0; it must be a multiple of 4 (16 bytes)"
    )


def test_empty_tensors_have_no_fault() -> None:
    assert layout_fault("k", torch.zeros(3, dtype=BF16)[1:1].as_strided((0, 3), (5, 7))) is None


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "nbytes"),
    [
        ((2, 4, 2, 64), (512, 128, 64, 1), 0, 16),
        ((2, 4, 2, 64), (528, 132, 66, 1), 0, 4),
        ((2, 4, 2, 64), (528, 132, 68, 1), 0, 8),
        ((2, 4, 2, 64), (520, 130, 65, 1), 0, 2),
        ((2, 4, 1, 64), (512, 128, 65, 1), 0, 16),  # a stride that is not used
        ((2, 4, 2, 64), (512, 128, 64, 1), 4, 8),
        ((2, 4, 2, 64), (512, 128, 64, 1), 1, 2),
    ],
)
def test_the_widest_access_divides_addresses_and_strides(shape, stride, offset, nbytes) -> None:
    tensor = strided(shape, stride, offset)
    assert widest_access(tensor) == nbytes
    assert widest_access(strided(shape, shape[::-1], 8)[:0], tensor) == nbytes  # nothing is read
    assert widest_access() == 16


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_fault_is_in_the_problem_and_names_its_tensor(name: str) -> None:
    def tensors() -> dict[str, Tensor]:
        real = {"q": (2, 5, 4, 64), "k": (2, 7, 2, 64), "v": (2, 7, 2, 32), "out": (2, 5, 4, 32)}
        return {key: torch.zeros(shape, dtype=BF16) for key, shape in real.items()}

    assert describe(**tensors()).layout_fault is None
    given_tensors = tensors()
    padded = torch.zeros(*given_tensors[name].shape[:-1], 68, dtype=BF16)
    given_tensors[name] = padded[..., : given_tensors[name].shape[-1]]
    fault = describe(**given_tensors).layout_fault
    assert fault is not None
    assert fault.startswith(f"{name} has a stride of 68 elements in dimension 2")


def test_c70_transposed_storage_is_no_fault() -> None:
    for heads, dim in ((24, 256), (4, 128)):
        q = torch.zeros(1, heads, 256, dim, dtype=BF16).transpose(1, 2)
        assert describe(q=q, k=q, v=q).layout_fault is None
