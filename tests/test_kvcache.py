"""Attention over a cache without a GPU: the reference model, the arguments, and the choice made.

The model is judged by plain attention on keys that were put together by hand, so that paging,
padding, appending and rotary are each shown to mean what the documentation says.
"""

import dataclasses
import math
import warnings

import pytest
import torch
from torch import Tensor

import fa4
from fa4.kernels.features import DecodeFeatures
from fa4.kvcache_launch import decide_kvcache, features_of, plan_of
from fa4.kvcache_problem import KVCacheProblem
from fa4.pipelines.sm90_decode import (
    DecodeSchedule,
    automatic_splits,
    copy_rows,
    decode_plan,
    even_splits,
    head_groups,
)
from fa4.reference_kvcache import combine_reference, rotate
from tests.kvcache_cases import CacheCase, attend, check_cache_call, make_cache_inputs

# -- the model -------------------------------------------------------------------------------------

CASES = [
    CacheCase((30, 0, 7)),
    CacheCase((30, 7), page_size=1),
    CacheCase((30, 7), page_size=16, heads_first=True),
    CacheCase((30, 7), seqlens_q=(9, 9), causal=True, page_size=5),
    CacheCase((30, 7), window_size=(4, 0), sink=torch.float32, softcap=3.0),
    CacheCase((30, 7), leftpad=(11, 7)),
    CacheCase((30, 7), shuffled=True, num_splits=4),
    CacheCase((30, 0, 7), seqlens_q=(2, 0, 5), packed_q=True, tail_q=3, causal=True),
    CacheCase((30, 7), new=(2, 2), rotary="interleaved", causal=True, page_size=4),
    CacheCase((30, 7), new=(0, 5), packed_new=True, rotary="half", rotary_base=(2, 50)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_meets_its_own_checks(case: CacheCase) -> None:
    check_cache_call(make_cache_inputs(case), "reference")


def cache(batch: int = 2, rows: int = 24, heads: int = 2, dim: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, rows, heads, dim), torch.randn(batch, rows, heads, dim)


def test_a_whole_cache_is_plain_attention() -> None:
    q, (k, v) = torch.randn(2, 3, 4, 32), cache()
    out = fa4.flash_attn_with_kvcache(q, k, v, causal=True, backend="reference")
    exact = fa4.flash_attn_func(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(out, exact)


def test_one_length_for_all_is_the_vector_of_it() -> None:
    q, (k, v) = torch.randn(2, 3, 4, 32), cache()
    out = fa4.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, backend="reference")
    exact = fa4.flash_attn_func(q, k[:, :9], v[:, :9], backend="reference")
    torch.testing.assert_close(out, exact)


def test_pages_hold_positions_in_order_of_the_table() -> None:
    q, (k, v) = torch.randn(1, 1, 4, 32), cache(1, 24)
    pages = [t.view(6, 4, 2, 32) for t in (k, v)]
    table = torch.tensor([[4, 0, 3]], dtype=torch.int32)
    lengths = torch.tensor([11], dtype=torch.int32)
    out = fa4.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, page_table=table, backend="reference"
    )
    rows = [*range(16, 20), *range(4), *range(12, 15)]
    exact = fa4.flash_attn_func(q, k[:, rows], v[:, rows], backend="reference")
    torch.testing.assert_close(out, exact)


def test_leftpad_counts_as_positions_but_not_as_keys() -> None:
    q, (k, v) = torch.randn(1, 2, 4, 32), cache(1)
    pad = torch.tensor([5], dtype=torch.int32)
    lengths = torch.tensor([13], dtype=torch.int32)
    out = fa4.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, cache_leftpad=pad, causal=True, backend="reference"
    )
    exact = fa4.flash_attn_func(q, k[:, 5:13], v[:, 5:13], causal=True, backend="reference")
    torch.testing.assert_close(out, exact)


def test_new_keys_go_behind_the_positions_in_use_and_are_seen() -> None:
    q, (k, v) = torch.randn(2, 2, 4, 32), cache()
    new_k, new_v = cache(2, 2)
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    expected = k.clone(), v.clone()
    for b, length in enumerate((3, 20)):
        expected[0][b, length : length + 2] = new_k[b]
        expected[1][b, length : length + 2] = new_v[b]
    out = fa4.flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cache_seqlens=lengths, causal=True, backend="reference"
    )
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])
    for b, length in enumerate((3, 20)):
        keys = k[b : b + 1, : length + 2], v[b : b + 1, : length + 2]
        exact = fa4.flash_attn_func(q[b : b + 1], *keys, causal=True, backend="reference")
        torch.testing.assert_close(out[b : b + 1], exact)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_multiplication_by_a_complex_number(interleaved: bool) -> None:
    x = torch.randn(5, 2, 24, dtype=torch.float64)
    angle = torch.randn(5, 8, dtype=torch.float64)
    turned = rotate(x, angle.cos(), angle.sin(), interleaved)
    if interleaved:
        pairs = torch.complex(x[..., 0:16:2], x[..., 1:16:2])
        result = torch.complex(turned[..., 0:16:2], turned[..., 1:16:2])
    else:
        pairs = torch.complex(x[..., :8], x[..., 8:16])
        result = torch.complex(turned[..., :8], turned[..., 8:16])
    unit = torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(result, pairs * unit[:, None])
    assert torch.equal(turned[..., 16:], x[..., 16:])


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, (0, 0, 0)), ({"causal": True}, (0, 1, 2)), ({"window_size": (50, 50)}, (0, 1, 2))],
    ids=["full", "causal", "window"],
)
def test_queries_turn_by_their_own_position_only_under_a_mask(options, steps) -> None:
    q, (k, v) = torch.randn(1, 3, 2, 32), cache(1)
    new_k, new_v = cache(1, 3)
    angle = torch.randn(40, 16)
    out = fa4.flash_attn_with_kvcache(
        q,
        k,
        v,
        new_k,
        new_v,
        angle.cos(),
        angle.sin(),
        cache_seqlens=torch.tensor([9], dtype=torch.int32),
        backend="reference",
        **options,
    )
    at = 9 + torch.tensor(steps)
    turned = rotate(q[0], angle[at].cos(), angle[at].sin(), True)[None]
    exact = fa4.flash_attn_func(turned, k[:, :12], v[:, :12], backend="reference", **options)
    torch.testing.assert_close(out, exact)


def test_combining_two_halves_gives_the_whole() -> None:
    q, (k, v) = torch.randn(2, 3, 4, 32), cache()
    parts = [
        fa4.flash_attn_func(q, k[:, half], v[:, half], return_lse=True, backend="reference")
        for half in (slice(0, 9), slice(9, 24))
    ]
    out, lse = fa4.combine(
        torch.stack([part[0] for part in parts]),
        torch.stack([part[1] for part in parts]),
        backend="reference",
    )
    exact, exact_lse = fa4.flash_attn_func(q, k, v, return_lse=True, backend="reference")
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


def test_combining_nothing_is_nothing_whatever_the_outputs_hold() -> None:
    out_partial = torch.full((3, 2, 5, 4, 16), float("nan"))
    out, lse = combine_reference(out_partial, torch.full((3, 2, 4, 5), -math.inf))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


# -- arguments -------------------------------------------------------------------------------------

INT = {"dtype": torch.int32}


def call(**changes):
    """A small right call with some arguments replaced."""
    k, v = cache(2, 24, 2, 32)
    new = {
        "q": torch.randn(2, 2, 4, 32),
        "k_cache": k,
        "v_cache": v,
        "cache_seqlens": torch.tensor([3, 9], **INT),
        "backend": "reference",
    }
    return fa4.flash_attn_with_kvcache(**(new | changes))


NEW = {"k": torch.randn(2, 2, 2, 32), "v": torch.randn(2, 2, 2, 32)}
ANGLES = {"rotary_cos": torch.randn(40, 16), "rotary_sin": torch.randn(40, 16)}
TABLE = torch.zeros(2, 3, **INT)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": 3}, TypeError, r"q must be a torch\.Tensor, got int"),
        ({"q": torch.randn(2, 4, 32)}, ValueError, r"q has shape \(2, 4, 32\); without cu_seqlens"),
        ({"q": torch.randn(2, 2, 4, 32).half()}, TypeError, "float16"),
        ({"q": torch.randn(2, 2, 4, 64)}, ValueError, "head_dim of q is 64 and of k_cache 32"),
        ({"q": torch.randn(2, 2, 3, 32)}, ValueError, "heads_q=3 is not a multiple of heads_kv=2"),
        ({"q": torch.randn(3, 2, 4, 32)}, ValueError, "2 entries for a batch of 3"),
        ({"k_cache": torch.randn(24, 2, 32)}, ValueError, r"must be \(batch, rows, heads"),
        ({"v_cache": torch.randn(2, 23, 2, 32)}, ValueError, "all but the head dim must be equal"),
        ({"k": NEW["k"]}, ValueError, "k is given and v is not"),
        ({"v": NEW["v"]}, ValueError, "v is given and k is not"),
        ({**NEW, "k": NEW["k"].half()}, TypeError, "k has dtype torch.float16"),
        ({**NEW, "v": torch.randn(2, 2, 2, 16)}, ValueError, "heads and head dim must be equal"),
        ({**NEW, "v": torch.randn(2, 3, 2, 32)}, ValueError, "all but the head dim"),
        ({**NEW, "cache_seqlens": None}, ValueError, "cache_seqlens must be given: k is appended"),
        ({"cu_seqlens_k_new": torch.zeros(3, **INT)}, ValueError, "without k and v"),
        ({"cache_seqlens": torch.tensor([3, 9])}, TypeError, "cache_seqlens has dtype torch.int64"),
        ({"cache_seqlens": torch.tensor([3], **INT)}, ValueError, r"\(batch,\) = \(2,\)"),
        ({"cache_seqlens": 25}, ValueError, "cache_seqlens=25 is above the 24 rows"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens=-1 is not between 0"),
        ({"cache_seqlens": "9"}, TypeError, "cache_seqlens must be an int, got str"),
        ({"cache_leftpad": torch.zeros(3, **INT)}, ValueError, "cache_leftpad has shape"),
        ({"cache_batch_idx": torch.zeros(2)}, TypeError, "cache_batch_idx has dtype torch.float32"),
        (
            {"cache_batch_idx": torch.zeros(2, **INT), "page_table": TABLE},
            ValueError,
            "cache_batch_idx names entries of a cache without pages",
        ),
        ({"page_table": TABLE.long()}, TypeError, "page_table has dtype torch.int64"),
        ({"page_table": TABLE[:1]}, ValueError, r"it must be \(batch, pages\) with batch 2"),
        ({"page_table": TABLE.T.contiguous().T}, ValueError, "page_table has stride 2 in its last"),
        ({"page_table": TABLE.expand(2, 3)[:, :1].expand(2, 2**26)}, ValueError, "has stride 0"),
        ({"page_table": TABLE, "cache_seqlens": None}, ValueError, "cache_seqlens must be given"),
        (ANGLES, ValueError, "rotary_cos is given without k and v"),
        ({**NEW, "rotary_cos": ANGLES["rotary_cos"]}, ValueError, "rotary_sin is missing"),
        ({**NEW, "rotary_seqlens": torch.zeros(2, **INT)}, ValueError, "without rotary_cos"),
        (
            {**NEW, **{name: table[:, :4] for name, table in ANGLES.items()}},
            ValueError,
            "rotary_dim=8, twice the columns of rotary_cos, must be a multiple of 16",
        ),
        (
            {**NEW, **{name: torch.randn(40, 24) for name in ANGLES}},
            ValueError,
            "from 16 to head_dim=32",
        ),
        ({**NEW, **ANGLES, "rotary_sin": torch.randn(39, 16)}, ValueError, "rotary_sin has shape"),
        ({**NEW, **ANGLES, "rotary_sin": ANGLES["rotary_sin"].half()}, TypeError, "rotary_sin has"),
        ({"num_splits": -1}, ValueError, "num_splits=-1 is not between 0 and 256"),
        ({"num_splits": 257}, ValueError, "num_splits=257 is not between"),
        ({"num_splits": 1.5}, TypeError, "num_splits must be an int, got float"),
        ({"max_seqlen_q": 1}, ValueError, "max_seqlen_q=1 is below the 2 rows of q"),
        ({"max_seqlen_q": torch.tensor(2)}, TypeError, "reading it would wait for the GPU"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0 is negative"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale=nan"),
        ({"window_size": (3,)}, TypeError, "window_size"),
        ({"sink": torch.zeros(3)}, ValueError, "sink has shape"),
        ({"out": torch.zeros(2, 2, 4, 16)}, ValueError, "out is"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' is not one of"),
        ({"arch": "sm_90a"}, ValueError, 'is for backend="emulator"'),
        ({"q": torch.randn(2, 2, 4, 32, requires_grad=True)}, NotImplementedError, "q requires"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_argument_is_named(changes, error, words) -> None:
    with pytest.raises(error, match=words):
        call(**changes)


def test_tensors_that_require_grad_are_fine_without_autograd() -> None:
    q = torch.randn(2, 2, 4, 32, requires_grad=True)
    with torch.no_grad():
        assert not call(q=q).requires_grad


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"out_partial": 3}, TypeError, "out_partial must be a torch"),
        ({"out_partial": torch.randn(3, 4, 16)}, ValueError, "out_partial has shape"),
        ({"lse_partial": torch.randn(3, 2, 5, 4)}, ValueError, r"it must be \(3, 2, 4, 5\)"),
        ({"lse_partial": torch.randn(3, 2, 4, 5).double()}, TypeError, "it must be torch.float32"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32"),
        (
            {"out_partial": torch.randn(0, 2, 5, 4, 16), "lse_partial": torch.randn(0, 2, 4, 5)},
            ValueError,
            "0 splits",
        ),
        ({"backend": "gpu"}, ValueError, "backend='gpu'"),
    ],
)
def test_combine_names_a_wrong_argument(changes, error, words) -> None:
    right = {"out_partial": torch.randn(3, 2, 5, 4, 16), "lse_partial": torch.randn(3, 2, 4, 5)}
    with pytest.raises(error, match=words):
        fa4.combine(**(right | changes))


# -- checked mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_seqlens": torch.tensor([3, 25], **INT)}, r"cache_seqlens\[1\] is 25"),
        ({**NEW, "cache_seqlens": torch.tensor([23, 3], **INT)}, r"with 2 rows to append"),
        ({"cache_leftpad": torch.tensor([0, 10], **INT)}, r"cache_leftpad\[1\] is 10"),
        ({"cache_batch_idx": torch.tensor([0, 2], **INT)}, r"cache_batch_idx\[1\] is 2"),
        ({**NEW, "cache_batch_idx": torch.tensor([1, 1], **INT)}, "names one entry twice"),
        ({"page_table": torch.tensor([[2], [0]], **INT)}, r"page_table\[0, 0\] is 2"),
        (
            {**NEW, **ANGLES, "rotary_seqlens": torch.tensor([0, 39], **INT)},
            "sequence 1 is rotated to the positions 39 to 40; rotary_cos has 40",
        ),
    ],
)
def test_checked_mode_names_contents_that_do_not_fit(changes, words) -> None:
    with fa4.checked(), pytest.raises(ValueError, match=words):
        call(**changes)


# -- what is chosen --------------------------------------------------------------------------------

DECODE = KVCacheProblem(
    dtype="bf16",
    batch=32,
    seqlen_q=1,
    rows_q=1,
    heads_q=32,
    heads_kv=8,
    head_dim=128,
    head_dim_v=128,
    slots=32,
    slot_rows=8192,
    new_rows=0,
    softmax_scale=0.1,
)


def chosen(**changes) -> DecodeSchedule:
    decision = decide_kvcache(dataclasses.replace(DECODE, **changes), "sm_90a")
    assert decision.kernel is not None, decision.reasons
    schedule = decision.kernel.schedule
    assert isinstance(schedule, DecodeSchedule)
    return schedule


def test_a_decode_step_of_unknown_lengths_is_shared_equally_by_all_ctas() -> None:
    schedule = chosen()
    assert schedule.is_balanced
    assert schedule.tile_m == 64
    assert chosen(seqlen_q=17, rows_q=17).tile_m == 128


@pytest.mark.parametrize(
    ("tiles", "blocks", "splits"),
    [
        (256, 64, 1),  # 1.94 of 2 waves
        (1024, 32, 1),  # 7.76 of 8
        (132, 64, 1),
        (133, 64, 0),  # 1.01 of 2
        (8, 512, 16),  # 0.97 of one
        (8, 15, 0),  # parts without keys
        (24, 64, 0),  # 5 parts: 0.91
        (66, 64, 2),
        (67, 64, 0),
    ],
)
def test_equal_tiles_have_equal_parts_where_those_fill_the_waves(tiles, blocks, splits) -> None:
    assert even_splits(tiles, blocks, ctas=132) == splits


def test_a_batch_known_to_be_of_one_length_is_not_cut_where_whole_tiles_fill_the_waves() -> None:
    schedule = chosen(has_equal_lengths=True)
    assert (schedule.merges, schedule.ctas_per_sm, schedule.tile_n) == (False, 1, 128)
    assert chosen(has_equal_lengths=True, batch=17).is_balanced  # 1.03 of 2 waves
    one = dataclasses.replace(DECODE, has_equal_lengths=True, batch=1, slots=1, slot_rows=65536)
    decision = decide_kvcache(one, "sm_90a")
    assert decision.num_splits == 16
    assert "keys in a stated number of splits" in str(decision)


LONG = dataclasses.replace(DECODE, has_equal_lengths=True, batch=1, slots=1, slot_rows=65536)


@pytest.mark.parametrize(
    ("changes", "ctas_per_sm", "splits"),
    [
        ({}, 2, 16),  # one part an SM, though an SM has room for two
        ({"slot_rows": 131072}, 2, 16),
        ({"batch": 2, "slots": 2, "slot_rows": 32768}, 2, 8),
        ({"slot_rows": 65535}, 1, 16),  # shorter parts than were measured
        ({"batch": 2, "slots": 2, "slot_rows": 32767}, 1, 8),
        ({"batch": 16, "slots": 16}, 1, 1),  # 128 whole tiles
        ({"has_equal_lengths": False, "batch": 2, "slots": 2}, 1, 0),
        ({"heads_kv": 5, "heads_q": 20}, 1, 26),
        ({"heads_kv": 5, "heads_q": 20, "slot_rows": 106496}, 2, 26),
        ({"heads_kv": 30, "heads_q": 30}, 1, 0),  # 4 parts each leave 9 % idle
        ({"addressing": "page_table", "slot_rows": 64, "table_pages": 1024}, 1, 16),
        ({"addressing": "page_table", "slot_rows": 16, "table_pages": 4096}, 1, 16),
        ({"cache_align": 8}, 1, 16),
        ({"head_dim": 64, "head_dim_v": 64}, 1, 16),
        ({"num_splits": 16}, 1, 16),
    ],
)
def test_few_long_tiles_are_cut_for_one_small_cta_an_sm(changes, ctas_per_sm, splits) -> None:
    decision = decide_kvcache(dataclasses.replace(LONG, **changes), "sm_90a")
    assert decision.kernel is not None
    schedule = decision.kernel.schedule
    assert isinstance(schedule, DecodeSchedule)
    assert (schedule.ctas_per_sm, decision.num_splits) == (ctas_per_sm, splits)


@pytest.mark.parametrize(
    ("changes", "ctas_per_sm"),
    [
        ({}, 2),  # lengths may differ
        ({"slot_rows": 4096}, 2),
        ({"has_equal_lengths": True}, 1),
        ({"addressing": "page_table", "slot_rows": 64, "table_pages": 64}, 2),
        ({"addressing": "page_table", "slot_rows": 16, "table_pages": 64}, 2),
        ({"addressing": "page_table", "slot_rows": 1, "table_pages": 64}, 2),
        ({"batch": 16}, 1),  # fewer tiles than multiprocessors
        ({"num_splits": 3}, 1),
        ({"head_dim": 64, "head_dim_v": 64}, 1),
        ({"seqlen_q": 17, "rows_q": 17}, 1),
    ],
)
def test_two_ctas_share_an_sm_where_that_was_measured_to_be_faster(changes, ctas_per_sm) -> None:
    assert chosen(**changes).ctas_per_sm == ctas_per_sm


def test_equal_lengths_in_short_pages_are_left_whole_by_two_ctas_an_sm() -> None:
    pages = {"addressing": "page_table", "table_pages": 64, "has_equal_lengths": True}
    schedules = [chosen(slot_rows=rows, **pages) for rows in (64, 16)]
    assert [(s.ctas_per_sm, s.merges) for s in schedules] == [(1, False), (2, False)]


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 3, 16, 33])
def test_stated_splits_have_one_schedule_whatever_the_batch(
    page_size: int | None, num_splits: int
) -> None:
    features = DecodeFeatures("bf16", 128, 128)
    plans = {
        decode_plan(features, 4, tiles, page_size, num_splits, 132, capacity, has_equal_lengths)
        for tiles in (8, 256, 4096)
        for capacity in (100, 8192, 65536)
        for has_equal_lengths in (False, True)
    }
    assert len(plans) == 1


def test_lengths_are_known_to_be_equal_only_from_what_the_host_is_told() -> None:
    q, (k, v) = torch.randn(2, 1, 4, 32).bfloat16(), (t.bfloat16() for t in cache())

    def known(q=q, k=k, v=v, **arguments) -> bool:
        return fa4.explain_kvcache(q, k, v, **arguments).problem.has_equal_lengths

    lengths = torch.tensor([3, 3], dtype=torch.int32)
    assert known()
    assert known(cache_seqlens=5)
    assert not known(cache_seqlens=lengths)
    assert not known(cache_seqlens=5, cache_leftpad=lengths)
    assert known(q[:1], k[:1], v[:1], cache_seqlens=lengths[:1])
    cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert not known(q.flatten(0, 1), cu_seqlens_q=cu_seqlens)


@pytest.mark.parametrize(
    ("heads_kv", "ctas", "groups"),
    [(8, 264, 8), (8, 132, 8), (5, 132, 5), (25, 132, 5), (40, 132, 10), (1, 132, 1), (2, 1, 1)],
)
def test_key_heads_are_shared_apart_where_few_ctas_are_left_over(heads_kv, ctas, groups) -> None:
    assert head_groups(heads_kv, ctas) == groups


def test_stated_splits_are_used_as_stated() -> None:
    problem = dataclasses.replace(DECODE, num_splits=7)
    decision = decide_kvcache(problem, "sm_90a")
    assert decision.num_splits == 7
    assert not chosen(num_splits=7).is_balanced
    assert chosen(num_splits=7).merges
    assert not chosen(num_splits=1).merges


def test_long_queries_are_split_only_when_there_are_too_few_tiles() -> None:
    assert automatic_splits(packed_rows=4096, tiles=256, warpgroups=2, ctas=132) == 1
    assert automatic_splits(packed_rows=512, tiles=8, warpgroups=2, ctas=132) == 132 // 32
    assert automatic_splits(packed_rows=256, tiles=1, warpgroups=2, ctas=132) == 66


@pytest.mark.parametrize(
    ("page_size", "rows"),
    [
        (None, 128),
        (1, 0),
        (4, 0),
        (8, 8),
        (16, 16),
        (24, 8),
        (48, 16),
        (64, 64),
        (100, 0),
        (256, 128),
    ],
)
def test_a_tma_copy_never_leaves_a_page(page_size: int | None, rows: int) -> None:
    assert copy_rows(page_size, 128) == rows
    assert copy_rows(page_size, 128, cache_align=8) == 0
    if page_size is not None and rows:
        assert page_size % rows == 0


def test_a_bound_that_hides_nothing_from_a_single_query_costs_nothing() -> None:
    causal = dataclasses.replace(DECODE, window_right=0)
    assert features_of(causal) == features_of(DECODE)
    assert features_of(dataclasses.replace(causal, seqlen_q=2)).has_right_bound


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("head_dim_v", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("packed_rows", [4, 100, 5000])
def test_every_problem_has_a_schedule_within_budget(
    head_dim: int, head_dim_v: int, page_size: int | None, packed_rows: int
) -> None:
    features = DecodeFeatures("bf16", head_dim, head_dim_v)
    for num_splits in (0, 1, 5):
        plan = decode_plan(features, packed_rows, 64, page_size, num_splits, 132, 8192, False)
        schedule = plan.schedule  # whose construction checks the budgets
        assert schedule.tile_m >= min(packed_rows, 128) or schedule.tile_m == 128
        assert schedule.is_balanced == (num_splits == 0 and packed_rows <= 128)
        # Registers at launch are the same for every thread, and a multiple of 8.
        at_launch = 65_536 // (schedule.threads * schedule.ctas_per_sm) // 8 * 8 * schedule.threads
        consumers = schedule.warpgroups * schedule.consumer_registers
        assert 128 * (schedule.producer_registers + consumers) <= at_launch


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_n": 48}, "tile_n=48 is not 32, 64 or 128"),
        ({"stages": 1}, "stages=1 is below 2"),
        ({"copy_rows": 4}, "copy_rows=4 is neither 0"),
        ({"merges": False}, "a balanced schedule has partial results"),
        ({"stages": 4}, "shared memory"),
        ({"warpgroups": 3}, "warpgroups=3"),
        ({"consumer_registers": 100}, "100 is not a multiple of 8"),
        ({"consumer_registers": 240}, "the roles' registers, 40960, exceed the CTA's 32768"),
    ],
)
def test_a_schedule_that_would_hang_or_spill_cannot_be_made(changes, words) -> None:
    schedule = chosen()
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(schedule, **changes)


def test_registers_that_fill_the_file_but_not_the_launch_would_hang() -> None:
    """65,536 divided among 384 threads, in units of 8, are 1,024 fewer."""
    schedule = chosen(seqlen_q=20)
    assert schedule.warpgroups == 2
    with pytest.raises(ValueError, match="the roles' registers, 65536, exceed the CTA's 64512"):
        dataclasses.replace(schedule, consumer_registers=224, producer_registers=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp32"}, "dtype fp32"),
        ({"head_dim": 100}, "head_dim=100"),
        ({"head_dim_v": 264}, "head_dim_v=264"),
        ({"softcap": 1e9}, "softcap"),
        ({"layout_fault": "k_cache is odd"}, "k_cache is odd"),
        ({"rows_q": 2**29}, "rows a key head; the most is"),
        ({"rows_q": 2**25, "num_splits": 256}, "tiles; one launch holds"),
    ],
)
def test_each_reason_for_the_reference_is_given(changes, words) -> None:
    decision = decide_kvcache(dataclasses.replace(DECODE, **changes), "sm_90a")
    assert decision.kernel is None
    assert words in str(decision)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "out"])
def test_a_last_stride_that_is_not_1_is_a_reason_for_the_reference(name: str) -> None:
    given = {"q": torch.zeros(2, 1, 4, 32), "k": torch.zeros(2, 1, 2, 32)}
    given |= {"out": given["q"].clone(), "v": given["k"].clone()}
    given |= dict(zip(("k_cache", "v_cache"), cache(), strict=True))
    given = {key: tensor.bfloat16() for key, tensor in given.items()}
    wide = given[name]
    given[name] = torch.cat([wide, wide], dim=-1)[..., ::2]
    decision = fa4.explain_kvcache(**given, cache_seqlens=1, arch="sm_90a")
    assert decision.kernel is None
    assert f"{name} has stride 2 in its last dimension; it must be 1" in str(decision)


@pytest.mark.parametrize("align", [16, 8, 4, 2])
def test_caches_that_tma_cannot_read_are_gathered(align: int) -> None:
    problem = dataclasses.replace(DECODE, cache_align=align)
    decision = decide_kvcache(problem, "sm_90a")
    assert (decision.kernel.schedule.copy_rows == 0) == (align < 16)
    assert decision.kernel.features.cache_align == align
    assert ("caches aligned to" in str(decision)) == (align < 16)


def test_decisions_are_explained() -> None:
    problem = dataclasses.replace(DECODE, new_rows=1, rotary="half", rotary_dim=64)
    problem = dataclasses.replace(problem, rotary_dtype="bf16")
    text = str(decide_kvcache(problem, "sm_90a"))
    assert "fa4_append_kv_bf16_halfbf16" in text
    assert "fa4_sm90_decode_bf16_d128" in text
    assert "equal shares" in text
    q, (k, v) = torch.randn(2, 1, 4, 32).bfloat16(), (t.bfloat16() for t in cache())
    assert "tma128" in str(fa4.explain_kvcache(q, k, v, arch="sm_90a"))
    assert "a cpu device has no kernels" in str(fa4.explain_kvcache(q, k, v))


def test_the_fallback_warns_once_and_can_be_forbidden() -> None:
    from fa4 import kvcache

    kvcache._warned.clear()
    with pytest.warns(fa4.FallbackWarning, match="a cpu device") as caught:
        call(backend="auto")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(backend="auto")
    with pytest.raises(fa4.UnsupportedProblemError, match="a cpu device"):
        call(backend="fa4")


def test_an_empty_batch_or_no_queries_give_empty_results() -> None:
    inputs = make_cache_inputs(CacheCase((5, 9)))
    arguments = inputs.arguments | {"q": inputs.arguments["q"][:, :0]}
    out, lse = fa4.flash_attn_with_kvcache(**arguments, return_lse=True)
    assert out.shape == (2, 0, 4, 64)
    assert lse.shape == (2, 4, 0)


def test_plan_is_the_same_for_equal_problems() -> None:
    assert plan_of(DECODE, 132) == plan_of(dataclasses.replace(DECODE), 132)
    inputs = make_cache_inputs(CacheCase((5, 9)))
    assert torch.equal(attend(inputs, "reference")[0], attend(inputs, "reference")[0])
