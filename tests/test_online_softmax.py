"""The running softmax: blocks merge in any order and grouping, and tiles give the exact answer."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.online_softmax import (
    SoftmaxState,
    block_state,
    empty_state,
    finalise,
    merge,
    tiled_attention,
    with_sink,
)
from fa4.reference import attention_reference

INF = float("inf")
PROPERTY = settings(max_examples=150, deadline=None)


def whole_row(scores, values):
    """(out, lse) by the textbook, all keys at once; a row that sees no key is (0, -inf)."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)
    weights[lse == -INF] = 0
    return weights @ values, lse


def assert_same_state(a: SoftmaxState, b: SoftmaxState):
    torch.testing.assert_close(tuple(a), tuple(b), rtol=1e-12, atol=1e-12)


# The worked example --------------------------------------------------------------------------


def example_blocks() -> list[SoftmaxState]:
    blocks = [([1.0, 2.0], [10.0, 20.0]), ([3.0], [30.0])]
    return [
        block_state(
            torch.tensor([scores], dtype=torch.float64),
            torch.tensor(values, dtype=torch.float64)[:, None],
        )
        for scores, values in blocks
    ]


def test_worked_example_after_the_first_block():
    state = example_blocks()[0]
    assert state.row_max.item() == 2
    assert state.row_sum.item() == pytest.approx(math.exp(-1) + 1)  # 1.3679
    assert state.acc.item() == pytest.approx(10 * math.exp(-1) + 20)  # 23.679


def test_worked_example_scores_1_2_then_3_and_values_10_20_then_30_give_25_75():
    state = merge(*example_blocks())
    assert state.row_max.item() == 3
    assert state.row_sum.item() == pytest.approx(math.exp(-2) + math.exp(-1) + 1)  # 1.5032
    out, lse = finalise(state)
    assert out.item() == pytest.approx(25.7521, abs=5e-5)
    assert round(out.item(), 2) == 25.75
    assert lse.item() == pytest.approx(math.log(math.exp(1) + math.exp(2) + math.exp(3)))


# The merge -----------------------------------------------------------------------------------


@st.composite
def keys_in_blocks(draw):
    """Scores (rows, keys) with hidden ones, values (keys, dv), and a partition of keys in blocks.

    Scores reach +-1000, where an exp without the shift would overflow.
    """
    rows, num_keys, dv = draw(st.integers(1, 4)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([1.0, 30.0, 1000.0]))
    scores = size * torch.randn(rows, num_keys, dtype=torch.float64, generator=gen)
    hidden_share = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    hidden = torch.rand(rows, num_keys, generator=gen) < hidden_share
    scores = scores.masked_fill(hidden, -INF)
    values = torch.randn(num_keys, dv, dtype=torch.float64, generator=gen)
    num_blocks = draw(st.integers(1, 5))
    owner = torch.randint(num_blocks, (num_keys,), generator=gen)
    blocks = [(owner == b).nonzero().flatten() for b in range(num_blocks)]
    return scores, values, [block_state(scores[:, b], values[b]) for b in blocks]


def merge_in_random_tree(states, rng):
    """Merge two states chosen at random until one is left: any order and any grouping."""
    states = list(states)
    while len(states) > 1:
        a = states.pop(rng.randrange(len(states)))
        b = states.pop(rng.randrange(len(states)))
        states.append(merge(a, b))
    return states[0]


@PROPERTY
@given(keys_in_blocks(), st.randoms(use_true_random=False))
def test_blocks_merged_in_any_order_and_grouping_give_the_whole_row(case, rng):
    scores, values, states = case
    expected = whole_row(scores, values)
    in_order = functools.reduce(merge, states)
    shuffled = merge_in_random_tree(states, rng)
    assert_same_state(in_order, shuffled)
    for state in (in_order, shuffled):
        torch.testing.assert_close(finalise(state), expected, rtol=1e-10, atol=1e-12)


@PROPERTY
@given(keys_in_blocks())
def test_merge_is_associative_and_commutative(case):
    a, b, c = (list(case[2]) * 3)[:3]
    assert_same_state(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same_state(merge(a, b), merge(b, a))


@PROPERTY
@given(keys_in_blocks())
def test_the_empty_state_is_the_identity_exactly(case):
    for state in case[2]:
        for merged in (merge(state, empty_state(state)), merge(empty_state(state), state)):
            for actual, expected in zip(merged, state, strict=True):
                assert torch.equal(actual, expected)


def test_a_block_without_keys_and_a_block_with_every_key_hidden_are_the_empty_state():
    no_keys = block_state(torch.empty(2, 0), torch.empty(0, 3))
    all_hidden = block_state(torch.full((2, 5), -INF), torch.randn(5, 3))
    for state in (no_keys, all_hidden):
        for actual, expected in zip(state, empty_state(state), strict=True):
            assert torch.equal(actual, expected)


def test_a_row_that_has_seen_no_key_gives_output_zero_and_lse_minus_inf():
    out, lse = finalise(block_state(torch.full((2, 5), -INF), torch.randn(5, 3)))
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_a_sink_joins_the_denominator_only_and_leaves_empty_rows_empty():
    scores = torch.tensor([[0.0, 1.0], [-INF, -INF]], dtype=torch.float64)
    values = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    sink = torch.tensor([5.0, 5.0], dtype=torch.float64)
    out, lse = finalise(with_sink(block_state(scores, values), sink))
    denominator = 1 + math.e + math.exp(5)
    assert out[0].item() == pytest.approx((1 + 2 * math.e) / denominator)
    assert lse[0].item() == pytest.approx(math.log(denominator))
    assert out[1].item() == 0
    assert lse[1].item() == -INF


@pytest.mark.parametrize("top", [-1e4, 300.0, 1e4])
def test_large_scores_neither_overflow_nor_vanish(top):
    scores = torch.tensor([[top - 1, top]])
    out, lse = finalise(
        merge(
            block_state(scores[:, :1], torch.tensor([[1.0]])),
            block_state(scores[:, 1:], torch.tensor([[2.0]])),
        )
    )
    assert out.item() == pytest.approx((1 + 2 * math.e) / (1 + math.e), rel=1e-6)
    assert lse.item() == pytest.approx(top + math.log1p(math.exp(-1)), rel=1e-6)


# Attention by tiles --------------------------------------------------------------------------


BOUND = st.one_of(st.none(), st.just(-1), st.integers(0, 10))


@PROPERTY
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 2),
    seqlens=st.tuples(st.integers(0, 13), st.integers(0, 13)),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    tiles=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    options=st.fixed_dictionaries(
        {
            "causal": st.booleans(),
            "window_size": st.tuples(BOUND, BOUND),
            "softmax_scale": st.sampled_from([None, 1.3, -0.7, 0.0]),
            "softcap": st.sampled_from([0.0, None, 2.0]),
        }
    ),
    has_sink=st.booleans(),
)
def test_tiles_of_any_size_match_the_whole_row_under_every_option(
    seed, batch, seqlens, heads, tiles, options, has_sink
):
    gen = torch.Generator().manual_seed(seed)
    heads_kv, group = heads
    q, k, v = (
        torch.randn(batch, seqlen, num_heads, dim, dtype=torch.float64, generator=gen)
        for seqlen, num_heads, dim in (
            (seqlens[0], heads_kv * group, 3),
            (seqlens[1], heads_kv, 3),
            (seqlens[1], heads_kv, 2),
        )
    )
    if has_sink:
        options["sink"] = torch.randn(heads_kv * group, dtype=torch.float64, generator=gen)
    tiled = tiled_attention(q, k, v, tile_m=tiles[0], tile_n=tiles[1], **options)
    exact = attention_reference(q, k, v, **options)
    torch.testing.assert_close(tiled, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_differ_from_the_whole_row_by_rounding_only(dtype):
    torch.manual_seed(0)
    q = torch.randn(2, 130, 6, 32).to(dtype)
    k, v = torch.randn(2, 2, 257, 2, 32).to(dtype).unbind(0)
    out, lse = tiled_attention(q, k, v, tile_m=64, tile_n=48, causal=True)
    expected, expected_lse = attention_reference(q, k, v, causal=True)
    assert out.dtype == dtype
    # One unit in the last place, where the two fall on different sides of a rounding boundary.
    one_ulp = expected.double().abs() * torch.finfo(dtype).eps
    assert ((out.double() - expected.double()).abs() <= one_ulp + 1e-6).all()
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)


def test_keys_that_no_query_sees_are_never_read():
    """Window (2, 0), and queries at the last 4 of 12 positions: keys 0 .. 5 are in no window."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 12, 2, 8), torch.randn(1, 12, 2, 8)
    clean = tiled_attention(q, k, v, tile_m=4, tile_n=4, window_size=(2, 0))
    k[:, :6] = v[:, :6] = float("nan")
    poisoned = tiled_attention(q, k, v, tile_m=4, tile_n=4, window_size=(2, 0))
    for actual, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("tiles", [(0, 4), (4, 0), (-1, 4)])
def test_tiles_without_rows_or_keys_are_refused(tiles):
    q = torch.randn(1, 4, 1, 4)
    with pytest.raises(ValueError, match=f"tile_m and tile_n.*{tiles[0]} and {tiles[1]}"):
        tiled_attention(q, q, q, tile_m=tiles[0], tile_n=tiles[1])
