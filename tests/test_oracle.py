"""The judge is judged: right answers pass, and each way of being wrong is found.

The GPU suite runs the same code with a kernel behind it; here the reference stands in for it, and
the wrong answers are made on purpose.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fa4
from fa4 import online_softmax
from fa4.online_softmax import SoftmaxState, tiled_attention
from fa4.reference import attention_reference
from tests.gpu import test_forward
from tests.oracle import (
    NAN,
    Case,
    assert_matches,
    attend,
    check,
    check_which_keys,
    exact_answer,
    make_inputs,
    num_visible_keys,
    one_sequence,
    padding_rows,
    peer_answer,
    readable_rows,
    row_budgets,
    row_max,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

CASES = [
    Case((65,), (65,), causal=True),
    Case((33,) * 2, (70,) * 2, 6, 2, 40, 24, FP16, window_size=(9, 3), sink=FP32, spread=4.0),
    Case((70,), (33,), 4, 1, 8, causal=True, softcap=5.0, storage="heads_first"),
    Case((20,) * 3, (20,) * 3, 4, 4, 16, used_q=(20, 7, 0), used_k=(20, 1, 9), sink=BF16),
    Case((20,), (50,), 4, 2, 16, dtype=FP32, softmax_scale=-0.5, storage="shared_head"),
    Case((20,), (50,), 4, 2, 16, dtype=FP64, softmax_scale=0.0, storage="fused"),
    Case((1, 0, 17, 40), (9, 3, 0, 41), packed_q=True, packed_k=True, causal=True, tail_q=3),
    Case(
        (5, 30),
        (40, 40),
        4,
        2,
        packed_q=True,
        used_q=(5, 12),
        used_k=(40, 13),
        storage="heads_first",
    ),
    Case((12,) * 2, (5, 30), packed_k=True, tail_k=7, storage="fused", window_size=(2, 2)),
    Case((), (), packed_q=True, packed_k=True, tail_q=2, tail_k=2),
    Case((7,), (0,)),
    Case((0,), (7,)),
]


# Right answers pass --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_backend_passes_every_check(case):
    check(make_inputs(case), "reference")


MASKS = [
    Case((33,) * 2, (70,) * 2, causal=True),
    Case((70,), (33,), causal=True, dtype=FP16),
    Case((40,), (40,), window_size=(5, 3)),
    Case((40,), (40,), window_size=(-1, 0)),
    Case((40,), (60,), window_size=(0, -1)),
    Case((1, 0, 17, 40), (9, 3, 0, 41), packed_q=True, packed_k=True, causal=True),
    Case((20,) * 3, (20,) * 3, used_q=(20, 7, 0), used_k=(20, 1, 9)),
]


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_the_reference_backend_sees_exactly_the_right_keys(case):
    check_which_keys(case, "cpu", "reference")


def test_the_arithmetic_of_a_kernel_stays_well_inside_the_budget(monkeypatch):
    """Tiles, unnormalised probabilities rounded to the input dtype: many small random problems,
    where maxima over few elements vary most. Near 1 the budget would fail right answers by chance;
    near 0 it would let wrong ones pass.
    """

    def rounding_block_state(scores: Tensor, values: Tensor) -> SoftmaxState:
        row_max = scores.amax(dim=-1)
        p = torch.exp(scores - online_softmax._finite_or_zero(row_max)[..., None])
        return SoftmaxState(row_max, p.sum(dim=-1), p.to(dtype).to(p.dtype) @ values)

    monkeypatch.setattr(online_softmax, "block_state", rounding_block_state)
    rng = random.Random(5)
    worst = 0.0
    for n in range(60):
        dtype = rng.choice([BF16, FP16])
        heads_kv = rng.choice([1, 2])
        case = Case(
            (rng.choice([1, 2, 3, 5, 17, 64]),),
            (rng.choice([1, 2, 3, 5, 9, 33, 130, 600]),),
            heads_kv * rng.choice([1, 3]),
            heads_kv,
            rng.choice([8, 64]),
            dtype=dtype,
            causal=rng.random() < 0.5,
            window_size=rng.choice([(-1, -1), (5, 3), (40, -1)]),
            softcap=rng.choice([0.0, 5.0]),
            sink=rng.choice([None, FP32]),
            spread=rng.choice([0.5, 1.0, 4.0]),
        )
        inputs = make_inputs(case, seed=n)
        q, k, v = (t.nan_to_num(0) for t in (inputs.q, inputs.k, inputs.v))
        out, lse = tiled_attention(q, k, v, tile_m=64, tile_n=64, **inputs.options)
        assert_matches(out, lse, inputs)
        exact_out, _ = exact_answer(inputs)
        budget = row_budgets(inputs, exact_out, num_visible_keys(case))
        error = row_max((out.double() - exact_out).abs())
        worst = max(worst, (error / budget.clamp(min=1e-300)).max().item())
    assert 0.3 < worst < 0.8


# Wrong answers are found ---------------------------------------------------------------------


LONG = Case((600,), (600,), 4, 2, causal=True)
RAGGED = Case((40, 0, 60), (40, 9, 60), 4, 2, packed_q=True, packed_k=True, causal=True, tail_q=5)


def with_options(**changes):
    """The answer to the same tensors under other options."""

    def wrong(inputs):
        case = replace(inputs.case, **changes)
        sink = inputs.sink if case.sink is not None else None
        out, lse = exact_answer(replace(inputs, case=case, sink=sink))
        return out.to(inputs.q.dtype), lse.float()

    return wrong


def with_tensors(change):
    """The answer to other tensors: change(inputs) edits a clone of them in place."""

    def wrong(inputs):
        clone = replace(inputs, q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
        change(clone)
        out, lse = exact_answer(clone)
        return out.to(inputs.q.dtype), lse.float()

    return wrong


def with_result(change):
    """The right answer, then edited in place by change(out, lse)."""

    def wrong(inputs):
        out, lse = exact_answer(inputs)
        out, lse = out.to(inputs.q.dtype), lse.float()
        change(out, lse)
        return out, lse

    return wrong


def swap_value_heads(inputs):
    inputs.v.copy_(inputs.v.flip(-2))


def zero_last_value(inputs):
    inputs.v[:, -1] = 0


def shift_values(inputs):
    inputs.v.copy_(inputs.v.roll(1, dims=1))


def put(target: str, index, value):
    """An edit of out or lse at one index."""

    def change(out, lse):
        (out if target == "out" else lse)[index] = value

    return change


def coarse_rows(out, lse):
    """Late rows rounded to five bits, as a narrower type for the probabilities would make them."""
    late = out[:, 300:].float()
    out[:, 300:] = (late + 2**-4 * late.abs().max() * torch.sign(late)).to(out.dtype)


WRONG = {
    "one key too many to the right": (LONG, with_options(causal=False, window_size=(-1, 1))),
    "one key too few to the left": (
        replace(LONG, window_size=(300, -1)),
        with_options(window_size=(299, -1)),
    ),
    "no mask": (LONG, with_options(causal=False)),
    "scale off by one per cent": (LONG, with_options(softmax_scale=0.99 / 8)),
    "no softcap": (replace(LONG, softcap=5.0, spread=4.0), with_options(softcap=0.0)),
    "no sink": (replace(LONG, sink=FP32), with_options(sink=None)),
    "key heads in the wrong order": (LONG, with_tensors(swap_value_heads)),
    "values one row off": (LONG, with_tensors(shift_values)),
    "last value lost, of 600": (LONG, with_tensors(zero_last_value)),
    "late rows too coarse": (LONG, with_result(coarse_rows)),
    "one NaN": (LONG, with_result(put("out", (0, 300, 1, 5), NAN))),
    "one infinity": (LONG, with_result(put("out", (0, 300, 1, 5), float("inf")))),
    "one element zero": (LONG, with_result(put("out", (0, 0, 0), 0.0))),
    "lse two thousandths off": (LONG, with_result(lambda out, lse: lse.add_(2e-3))),
    "lse in base two": (LONG, with_result(lambda out, lse: lse.mul_(1.4427))),
    "padding not zero": (RAGGED, with_result(put("out", 102, 1.0))),
    "lse of padding zero": (RAGGED, with_result(put("lse", (0, 102), 0.0))),
    "empty row not zero": (
        Case((60,), (40,), causal=True),
        with_result(put("out", (0, 3), 1e-3)),
    ),
    "sequences in the wrong order": (
        RAGGED,
        with_result(lambda out, lse: out[:100].copy_(out[:100].flip(0))),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_found(name):
    case, wrong = WRONG[name]
    inputs = make_inputs(case, seed=0)
    right_out, right_lse = exact_answer(inputs)
    assert_matches(right_out.to(case.dtype), right_lse.float(), inputs)
    with pytest.raises(AssertionError):
        assert_matches(*wrong(inputs), inputs)


def test_the_message_says_where_the_worst_element_is_and_how_to_repeat_it():
    inputs = make_inputs(RAGGED, seed=77)
    out, lse = exact_answer(inputs)
    out, lse = out.to(BF16), lse.float()
    out[70, 3, 9] += 3.0
    with pytest.raises(AssertionError) as failure:
        assert_matches(out, lse, inputs)
    message = str(failure.value)
    assert "1 of 105 rows" in message
    assert "row 70, head 3, dim 9 (row 30 of sequence 2), which sees 31 keys" in message
    assert f"case {RAGGED}" in message
    assert "seed 77" in message
    out[70, 3, 9] = NAN
    with pytest.raises(AssertionError, match=r"out: NaN.* 1 of .*row 70, head 3, dim 9.*nan"):
        assert_matches(out, lse, inputs)
    lse[2, 100] = 0.0
    with pytest.raises(AssertionError, match=r"lse: .*head 2, row 100 \(tail\)"):
        assert_matches(exact_answer(inputs)[0].to(BF16), lse, inputs)


def test_a_seed_repeats_the_values_and_no_seed_makes_new_ones(monkeypatch):
    monkeypatch.delenv("FA4_TEST_SEED", raising=False)
    first, second = make_inputs(LONG), make_inputs(LONG)
    assert not torch.equal(first.q, second.q)
    assert torch.equal(make_inputs(LONG, seed=first.seed).q, first.q)
    monkeypatch.setenv("FA4_TEST_SEED", str(first.seed))
    assert torch.equal(make_inputs(LONG).q, first.q)


class Misbehaving:
    """Stands in for a public function: the reference, then something that a kernel must not do."""

    def __init__(self, function, deed: str):
        self.function, self.deed, self.calls = function, deed, 0

    def __call__(self, q, k, v, *args, out=None, **keywords):
        self.calls += 1
        result, lse = self.function(q, k, v, *args, out=out, **keywords)
        if self.deed == "differs in a later call" and self.calls == 2:
            result[0] += 0.25
        elif self.deed == "writes behind out" and out is not None:
            result.as_strided((1,), (1,), result.storage_offset() + result.numel())[0] = 0
        elif self.deed == "writes before out" and out is not None:
            result.as_strided((1,), (1,), result.storage_offset() - 1)[0] = 0
        elif self.deed == "writes padding of out" and out is not None:
            result[-1] = 0
        elif self.deed == "returns another tensor than out" and out is not None:
            result = result.clone()
        elif self.deed == "changes q":
            q[0] *= 1.5
        elif self.deed == "changes lengths" and self.calls == 2:
            keywords["cu_seqlens_q"][1] += 1
        return result, lse


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("differs in a later call", "second call differs"),
        ("writes behind out", "1 elements behind out= were written"),
        ("writes before out", "1 elements before out= were written"),
        ("writes padding of out", r"padding rows of out= were written, first \(104,\)"),
        ("returns another tensor than out", "another tensor than out="),
        ("changes q", "is wrong|are off|second call differs|an input was changed"),
        ("changes lengths", "second call differs|an input was changed"),
    ],
)
def test_a_call_that_misbehaves_is_found(monkeypatch, deed, message):
    function = Misbehaving(fa4.flash_attn_varlen_func, deed)
    monkeypatch.setattr(fa4, "flash_attn_varlen_func", function)
    with pytest.raises(AssertionError, match=message):
        check(make_inputs(RAGGED), "reference")


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (Case((40,), (60,), causal=True), {"causal": False, "window_size": (-1, 1)}),
        (Case((40,), (60,), window_size=(9, 3)), {"window_size": (8, 3)}),
        (Case((40,), (60,), window_size=(9, 3)), {"window_size": (8, 4)}),
        (Case((40,), (60,), window_size=(9, -1)), {"window_size": (10, -1)}),
    ],
    ids=["right", "left", "shifted", "left too far"],
)
def test_a_mask_that_is_off_by_one_key_is_found(monkeypatch, case, wrong):
    function = fa4.flash_attn_func
    monkeypatch.setattr(
        fa4, "flash_attn_func", lambda *args, **keywords: function(*args, **{**keywords, **wrong})
    )
    with pytest.raises(AssertionError, match="keys than they should"):
        check_which_keys(case, "cpu", "reference")


# The tools themselves ------------------------------------------------------------------------


def test_the_peer_is_a_low_precision_computation_of_the_same_thing():
    inputs = make_inputs(replace(LONG, sink=FP32, softcap=20.0))
    exact, _ = exact_answer(inputs)
    error = (peer_answer(inputs).double() - exact).abs().max().item()
    one_rounding = exact.abs().max().item() * torch.finfo(BF16).eps / 2
    assert 0.1 * one_rounding < error < 3 * one_rounding


def test_what_must_not_be_read_holds_nan_and_everything_else_does_not():
    for case in CASES:
        inputs = make_inputs(case)
        live, seen = readable_rows(case)
        for tensor, readable in ((inputs.q, live), (inputs.k, seen), (inputs.v, seen)):
            expected = ~readable[..., None, None].expand_as(tensor)
            if case.storage == "shared_head" and tensor is not inputs.q:
                expected = expected[..., :1, :].expand_as(tensor)
            assert torch.equal(tensor.isnan(), expected), case
        assert torch.equal(num_visible_keys(case) > 0, live), case
        assert not (padding_rows(case) & live).any(), case


@pytest.mark.parametrize("storage", ["heads_first", "fused", "shared_head"])
def test_a_storage_changes_strides_and_nothing_else(storage):
    case = Case((9,) * 2, (11,) * 2, 4, 2, head_dim=16, head_dim_v=8)
    plain = make_inputs(case, seed=3)
    stored = make_inputs(replace(case, storage=storage), seed=3)
    assert not all(t.is_contiguous() for t in (stored.q, stored.k, stored.v))
    assert torch.equal(stored.q, plain.q)
    for a, b in ((stored.k, plain.k), (stored.v, plain.v)):
        assert torch.equal(a, b[..., :1, :].expand_as(b) if storage == "shared_head" else b)


def test_one_sequence_of_a_packed_call_is_a_dense_problem():
    inputs = make_inputs(RAGGED)
    out, lse = attend(inputs, "reference")
    out_2, lse_2, sub = one_sequence(inputs, out, lse, 2)
    assert sub.q.shape == (1, 60, 4, 64)
    expected = attention_reference(sub.q, sub.k, sub.v, causal=True)
    torch.testing.assert_close((out_2, lse_2), expected)


# The GPU suite -------------------------------------------------------------------------------


def needed_kernels(cases) -> set[str]:
    """Names of the kernels that these cases run on an H100; each must have one."""
    names = set()
    for case in cases:
        # Shapes and options decide, not contents: small tensors stand for the large.
        inputs = make_inputs(case)
        sizes = (inputs.q.numel(), inputs.k.numel())
        decision = fa4.explain(
            inputs.q, inputs.k, inputs.v, arch="sm_90a", **inputs.options, **inputs.lengths
        )
        if 0 in sizes:
            continue
        assert decision.kernel is not None, f"{case}: {decision}"
        names.add(decision.kernel_name)
    return names


def test_the_gpu_suite_needs_a_bounded_number_of_kernels():
    """Each costs some seconds of compilation; the whole suite has six minutes."""
    random_kernels = needed_kernels(test_forward.random_cases())
    assert len(random_kernels) == len(test_forward.SPECIALISATIONS)
    assert len(random_kernels) <= 70
    # The public cases and the masks add none.
    small = [c for c in test_forward.CASES.values() if sum(c.seqlens_q) <= 2048]
    masks = [Case((9,), (9,), head_dim=128, **mask) for mask in test_forward.MASKS]
    assert needed_kernels([*small, *masks, *test_forward.STREAM_CASES]) <= random_kernels


def test_the_gpu_suite_draws_what_it_says():
    cases = test_forward.random_cases()
    assert cases == test_forward.random_cases()
    assert {c.storage for c in cases} == {"contiguous", "heads_first", "fused", "shared_head"}
    lengths = {n for c in cases for n in (*c.seqlens_q, *c.seqlens_k)}
    assert {0, 1, 127, 128, 129} <= lengths
    assert any(c.used_q is not None and 0 in c.used_q for c in cases)
    assert {c.heads_q // c.heads_kv for c in cases} >= {1, 3, 5, 7, 8}
    assert any(c.head_dim_v not in (None, c.head_dim) for c in cases)
