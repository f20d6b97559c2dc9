"""Our compiled Hopper kernels of attention over a cache, run by their own host code on the CPU.

The cases are the smallest that reach each part: shares and splits that cut tiles, several blocks
and ring wraps, pages by TMA and by gathering, masks at both ends, packed rows that fill one and two
warpgroups, appending and rotary.
"""

import functools
from dataclasses import replace

import pytest
import torch

import fa4
from fa4.kvcache import EMULATED_MULTIPROCESSORS, _emulated
from fa4.kvcache_launch import CacheLengths, KVCacheLaunch
from tests.kvcache_cases import (
    CacheCase,
    attend,
    check_cache_call,
    make_cache_inputs,
)
from tests.oracle import bits

CASES = [
    CacheCase((300, 0, 17)),
    CacheCase((700, 0), heads_kv=1),  # one tile shared by all CTAs
    CacheCase((700,), heads_kv=1),  # one sequence: a part for each CTA
    CacheCase((300, 140), page_size=16),
    CacheCase((300, 140), page_size=1),
    CacheCase((300, 2, 140), head_dim=128),  # two CTAs an SM, here and in the next two
    CacheCase((300, 140), page_size=16, head_dim=128),
    CacheCase((300, 140), page_size=1, head_dim=128),
    CacheCase((300, 140), page_size=48, heads_first=True),
    CacheCase((150, 20), page_size=256, heads_q=2),
    CacheCase((300, 1, 65), num_splits=3),
    # More parts than are merged at once, than a warp has lanes, and rows longer than it reads.
    CacheCase((2200, 40), heads_q=2, heads_kv=1, num_splits=20),
    CacheCase((4300, 9), heads_q=2, heads_kv=1, num_splits=37, sink=torch.float32),
    CacheCase(
        (1200, 9), head_dim=256, head_dim_v=192, heads_q=2, heads_kv=1, num_splits=11, apart_new=1
    ),
    CacheCase((600, 9), head_dim=192, head_dim_v=136, heads_q=2, heads_kv=1, num_splits=3),
    CacheCase((8187,), heads_q=2, head_dim=128),  # long parts by small CTAs
    CacheCase((300, 40), seqlens_q=(5, 5), causal=True),
    CacheCase((300, 90), seqlens_q=(40, 40), causal=True, page_size=64),  # two tiles, not split
    CacheCase((200, 30), seqlens_q=(24, 24), causal=True, heads_q=8, num_splits=2, page_size=3),
    CacheCase((300, 200), window_size=(100, 0), page_size=16),
    CacheCase((300, 200), seqlens_q=(3, 3), window_size=(140, 1), page_size=5),
    CacheCase((300, 20), leftpad=(150, 20)),
    CacheCase((300, 60), leftpad=(7, 30), page_size=32, sink=torch.float32),
    CacheCase((150, 20), softcap=4.0, sink=torch.bfloat16, num_splits=2),
    CacheCase((150, 20), softmax_scale=-0.3, dtype=torch.float16, shuffled=True),
    CacheCase((150, 20), head_dim=72, head_dim_v=40, heads_first=True),
    CacheCase((150, 20), head_dim=96, page_size=2),
    CacheCase((300, 20), head_dim=192, head_dim_v=128, heads_q=8, heads_kv=1),
    CacheCase((140,), head_dim=256, heads_q=16, heads_kv=1),
    CacheCase((200, 9, 0), seqlens_q=(1, 3, 1), packed_q=True, causal=True, max_seqlen_q=True),
    CacheCase((90, 9, 0), seqlens_q=(30, 0, 60), packed_q=True, causal=True, tail_q=4),
    CacheCase((126, 0, 20), new=(4, 4, 4)),
    CacheCase((126, 31, 0), new=(2, 2, 2), page_size=16, rotary="interleaved", causal=True),
    CacheCase(
        (60, 31, 4),
        new=(5, 0, 130),
        seqlens_q=(5, 1, 130),
        packed_q=True,
        packed_new=True,
        tail_q=3,
        page_size=7,
        rotary="half",
        rotary_base=(3, 90, 0),
        rotary_dtype=torch.float32,
        causal=True,
    ),
    CacheCase((60, 31), new=(3, 3), seqlens_q=(2, 2), shuffled=True, rotary="half", rotary_dim=64),
    # Strides and addresses that are multiples of 8, 4 and 2 bytes only.
    CacheCase((300, 140), apart=4),
    CacheCase((300, 140), apart=2, page_size=16, heads_first=True),
    CacheCase((300, 0, 140), apart=1),
    CacheCase((300, 140), apart=1, page_size=48, dtype=torch.float16, num_splits=2),
    CacheCase((300, 2, 140), apart=3, page_size=1, head_dim=128),
    CacheCase((150, 20), apart=1, head_dim=72, head_dim_v=40, shuffled=True, leftpad=(30, 20)),
    CacheCase((140,), apart=5, head_dim=256, heads_q=16, heads_kv=1, dtype=torch.float16),
    CacheCase((300, 90), seqlens_q=(40, 40), causal=True, apart=2, page_size=64),
    CacheCase((150, 20), apart_new=1, num_splits=2),
    CacheCase(
        (60, 31, 4),
        new=(5, 0, 130),
        seqlens_q=(5, 1, 130),
        packed_q=True,
        packed_new=True,
        tail_q=3,
        page_size=7,
        rotary="half",
        rotary_dtype=torch.float32,
        causal=True,
        apart=1,
        apart_new=3,
    ),
    CacheCase((126, 31), new=(2, 2), apart=3, rotary="interleaved", dtype=torch.float16),
    CacheCase((126, 31), new=(2, 2), page_size=16, apart_new=1, rotary="half", causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_kernels_give_the_exact_answer(case: CacheCase) -> None:
    check_cache_call(make_cache_inputs(case), "emulator")


@pytest.mark.parametrize(
    "case",
    [
        CacheCase((300, 140), page_size=16),
        CacheCase((300, 140), page_size=1),
        CacheCase((300, 90), seqlens_q=(40, 40), causal=True, leftpad=(3, 0), page_size=64),
        CacheCase((300, 90), seqlens_q=(40, 40), causal=True, page_size=3),
        CacheCase((600,), num_splits=2, new=(2,), rotary="half"),
        CacheCase((2200, 40), heads_q=2, heads_kv=1, num_splits=20),
        CacheCase((1200, 9), head_dim=256, heads_q=2, heads_kv=1, num_splits=11),
        CacheCase((8187,), heads_q=2, head_dim=128),
        CacheCase((300, 140), apart=1),
        CacheCase((300, 140), apart=2, page_size=16),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_no_race_is_found_and_turns_do_not_matter(case: CacheCase, schedule: str) -> None:
    inputs = make_cache_inputs(case)
    out, lse = attend(inputs.clone(), "emulator")
    other, other_lse = emulate(inputs, schedule=schedule, seed=3, check_races=True)
    assert torch.equal(bits(other), bits(out))
    assert torch.equal(bits(other_lse), bits(lse))


def emulate(inputs, multiprocessors: int = EMULATED_MULTIPROCESSORS, **options):
    """(out, lse) as by backend="emulator", run otherwise."""
    arguments = dict(inputs.arguments)
    decision = fa4.explain_kvcache(**arguments, **inputs.options, backend="emulator", arch="sm_90a")

    def load(spec):
        return functools.partial(_emulated(spec, multiprocessors), **options)

    launch = KVCacheLaunch(decision, torch.device("cpu"), multiprocessors, load)
    lengths = CacheLengths(
        arguments["cache_seqlens"],
        arguments.get("cu_seqlens_q"),
        arguments.get("cu_seqlens_k_new"),
        arguments.get("cache_leftpad"),
        arguments.get("page_table", arguments.get("cache_batch_idx")),
        arguments.get("rotary_seqlens"),
    )
    names = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")
    tensors = [arguments.get(name) for name in names]
    return launch(*tensors, lengths, arguments.get("sink"), None, True)


@pytest.mark.parametrize("page_size", [None, 16, 1])
@pytest.mark.parametrize("num_splits", [1, 3, 20])
def test_with_fixed_splits_a_sequence_has_the_bits_it_has_alone(page_size, num_splits) -> None:
    case = CacheCase((300, 17, 140), page_size=page_size, num_splits=num_splits)
    inputs = make_cache_inputs(case)
    out, lse = attend(inputs, "emulator")
    for b in range(case.batch):
        names = ["cache_seqlens", *(["page_table"] if page_size else [])]
        alone = {name: inputs.arguments[name][b : b + 1] for name in names}
        caches = {
            name: inputs.arguments[name] if page_size else inputs.arguments[name][b : b + 1]
            for name in ("k_cache", "v_cache")
        }
        out_b, lse_b = fa4.flash_attn_with_kvcache(
            inputs.arguments["q"][b : b + 1],
            **caches,
            **alone,
            **inputs.options,
            backend="emulator",
            return_lse=True,
        )
        assert torch.equal(bits(out_b[0]), bits(out[b]))
        assert torch.equal(bits(lse_b[0]), bits(lse[b]))


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 33])
def test_any_number_of_ctas_shares_the_keys_without_loss(multiprocessors: int) -> None:
    inputs = make_cache_inputs(CacheCase((300, 0, 700, 5, 64), page_size=16, sink=torch.float32))
    exact, exact_lse = attend(inputs.clone(), "reference")
    out, lse = emulate(inputs, multiprocessors)
    assert (out.float() - exact.float()).abs().max() < 0.02
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert (lse - exact_lse).nan_to_num(0).abs().max() < 1e-3


@pytest.mark.parametrize(("multiprocessors", "are_whole"), [(3, True), (4, False), (6, True)])
def test_tiles_that_are_equally_long_stay_whole_where_they_fill_the_ctas(
    multiprocessors: int, are_whole: bool
) -> None:
    inputs = make_cache_inputs(CacheCase((300, 260, 384), page_size=16))  # 6 tiles of 3 blocks
    out, lse = emulate(inputs.clone(), multiprocessors)
    inputs.case = replace(inputs.case, num_splits=1)
    whole, whole_lse = attend(inputs, "emulator")
    assert (lse - whole_lse).abs().max() < 1e-5
    assert (out.float() - whole.float()).abs().max() < 0.02
    assert (torch.equal(out, whole) and torch.equal(lse, whole_lse)) == are_whole


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_skips_splits_without_keys_and_their_nan(packed: bool, dtype: torch.dtype) -> None:
    outer = (21,) if packed else (3, 7)
    out_partial = torch.randn(37, *outer, 2, 72).to(dtype)
    lse_partial = torch.randn(37, *outer[:-1], 2, outer[-1]) * 3
    lse_partial[5] = -float("inf")
    lse_partial[:, ..., 1, 2] = -float("inf")
    dead = lse_partial.isneginf().movedim(-1, -2)
    out_partial[dead] = float("nan")
    out, lse = fa4.combine(out_partial, lse_partial, backend="emulator")
    exact, exact_lse = fa4.combine(
        out_partial.double(), lse_partial.double(), out_dtype=torch.float64, backend="reference"
    )
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert (out[lse.movedim(-1, -2).isneginf()] == 0).all()
    eps = torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() < 4 * eps * exact.abs().max() + 1e-6
    assert torch.where(exact_lse.isfinite(), lse - exact_lse, 0.0).abs().max() < 1e-5
