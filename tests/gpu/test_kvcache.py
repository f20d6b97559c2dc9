"""Attention over a cache on a GPU, through the public functions, against the model and float64.

Every call forbids the fallback (backend="fa4"). A kernel is compiled for each specialisation, at
some seconds each; the cases here draw many lengths, heads and tables from a bounded list of them.
What is asserted of a call: `tests.kvcache_cases.check_cache_call`.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import fa4
from fa4 import device_counters
from tests.kvcache_cases import CacheCase, attend, check_cache_call, make_cache_inputs
from tests.oracle import bits, fresh_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# What kernels are compiled for. `draw` fills in lengths, batch and heads.
SPECIALISATIONS = [
    CacheCase((), head_dim=128),
    CacheCase((), head_dim=128, page_size=16),
    CacheCase((), head_dim=128, page_size=1),
    CacheCase((), head_dim=128, page_size=64, heads_first=True, num_splits=3),
    CacheCase((), head_dim=128, page_size=256, num_splits=1),
    CacheCase((), head_dim=64, page_size=48, dtype=FP16, leftpad=()),
    CacheCase((), head_dim=128, page_size=16, causal=True, window_size=(700, -1), sink=BF16),
    CacheCase((), head_dim=128, shuffled=True, softcap=20.0),
    CacheCase((), head_dim=96, head_dim_v=64, page_size=3, dtype=FP16, num_splits=2),
    CacheCase((), head_dim=256, page_size=32, causal=True),
    CacheCase((), head_dim=192, head_dim_v=128, causal=True, packed_q=True, sink=FP32),
    CacheCase((), head_dim=128, page_size=16, causal=True, rotary="half", rotary_dim=128, new=()),
    CacheCase((), head_dim=64, causal=True, rotary="interleaved", rotary_dtype=FP32, new=()),
    CacheCase(
        (),
        head_dim=128,
        page_size=16,
        causal=True,
        packed_q=True,
        packed_new=True,
        rotary="half",
        rotary_dim=64,
        new=(),
    ),
    CacheCase((), head_dim=128, apart=4),
    CacheCase((), head_dim=128, page_size=64, heads_first=True, apart=2, dtype=FP16),
    CacheCase((), head_dim=128, page_size=16, apart=1, apart_new=1, new=(), rotary="half"),
]


# Query rows of a sequence: from, to. With at most 8 heads a key head, speculative rows fit one
# tile of 64 packed rows and those of a chunk need several of 128, which bounds the kernels.
ROWS = {"decode": (1, 1), "speculative": (2, 8), "chunk": (130, 300)}
MORE_THAN_ONE_ROW = [0, 1, 2, 3, 4, 6, 9, 10, 11, 13]


def draw(kind: CacheCase, rng: random.Random, rows_range: tuple[int, int]) -> CacheCase:
    """A random call of a specialisation."""
    batch = rng.choice([1, 2, 3, 5, 40])
    top = rng.choice([40, 300, 2500]) if batch == 40 else rng.choice([40, 3000, 20000])
    edges = [0, 1, 127, 128, 129, 255, 256, 640]
    lengths = tuple(
        rng.choice(edges) if rng.random() < 0.3 else rng.randint(0, top) for _ in range(batch)
    )
    fewest, most = rows_range
    rows = (rng.randint(fewest, most),) * batch
    if kind.packed_q:
        rows = (most, *(rng.randint(0, most) for _ in range(batch - 1)))
    heads_kv = rng.choice([1, 2, 8])
    changes: dict = {
        "lengths": lengths,
        "seqlens_q": rows,
        "heads_kv": heads_kv,
        "heads_q": heads_kv * rng.choice([1, 3, 4, 8]),
        "max_seqlen_q": kind.packed_q,
    }
    if kind.packed_q:
        changes["tail_q"] = rng.choice([0, 5])
    if kind.new is not None:
        changes["new"] = rows if kind.packed_new else (rng.choice([1, rows[0]]),) * batch
    if kind.leftpad is not None:
        changes["leftpad"] = tuple(rng.randint(0, length) for length in lengths)
    return replace(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (kind, length)
        for i, kind in enumerate(SPECIALISATIONS)
        for length in ROWS
        if length == "decode" or i in MORE_THAN_ONE_ROW
    ],
    ids=str,
)
def test_random_calls_match_the_model(kind: CacheCase, length: str) -> None:
    seed = fresh_seed()
    rng = random.Random(seed)
    for _ in range(4):
        case = draw(kind, rng, ROWS[length])
        check_cache_call(make_cache_inputs(case, DEVICE, rng.getrandbits(32)), "fa4")
        torch.cuda.empty_cache()


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 7, 8, 16, 24, 100, 128, 512, 1000])
def test_any_page_size(page_size: int) -> None:
    case = CacheCase((1500, 0, 77, 640), heads_q=8, page_size=page_size)
    check_cache_call(make_cache_inputs(case, DEVICE), "fa4")


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
@pytest.mark.parametrize("page_size", [None, 16])
def test_with_fixed_splits_a_sequence_has_the_bits_it_has_alone(num_splits, page_size) -> None:
    rng = random.Random(fresh_seed())
    lengths = tuple(rng.randint(0, 9000) for _ in range(11))
    case = CacheCase(
        lengths, heads_q=8, head_dim=128, page_size=page_size, num_splits=num_splits, causal=True
    )
    inputs = make_cache_inputs(case, DEVICE)
    out, lse = attend(inputs, "fa4")
    for b in (0, 4, 10):
        arguments = dict(inputs.arguments)
        mine = ["q", "cache_seqlens", *(["page_table"] if page_size else ["k_cache", "v_cache"])]
        arguments |= {name: arguments[name][b : b + 1] for name in mine}
        out_b, lse_b = fa4.flash_attn_with_kvcache(
            **arguments, **inputs.options, backend="fa4", return_lse=True
        )
        assert torch.equal(bits(out_b[0]), bits(out[b])), f"sequence {b}, lengths {lengths}"
        assert torch.equal(bits(lse_b[0]), bits(lse[b])), f"sequence {b}, lengths {lengths}"


def test_equal_calls_have_equal_bits() -> None:
    case = CacheCase(tuple(range(13, 9000, 301)), heads_q=8, head_dim=128, page_size=16)
    inputs = make_cache_inputs(case, DEVICE)
    first = attend(inputs, "fa4")
    for _ in range(20):
        again = attend(inputs, "fa4")
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("num_splits", [0, 3])
def test_a_captured_graph_replays_with_changed_lengths_pages_and_tokens(num_splits: int) -> None:
    longest = (2000, 2000, 2000, 2000)
    small = CacheCase(
        (5, 0, 1999, 300),
        new=(1, 1, 1, 1),
        heads_q=8,
        head_dim=128,
        page_size=16,
        causal=True,
        rotary="half",
        num_splits=num_splits,
    )
    shape = make_cache_inputs(replace(small, lengths=longest), DEVICE)
    attend(shape.clone(), "fa4")  # loads the kernels
    stable = shape.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(stable, "fa4")
    for case in (small, replace(small, lengths=(1000, 1, 40, 1999))):
        # Values from a case of its own, pages and sizes from the captured one.
        inputs = make_cache_inputs(replace(case, lengths=longest), DEVICE)
        inputs.arguments["cache_seqlens"].copy_(torch.tensor(case.lengths))
        for name, tensor in stable.arguments.items():
            if name not in ("k_cache", "v_cache"):
                tensor.copy_(inputs.arguments[name])
        stable.storage.copy_(inputs.storage)
        graph.replay()
        exact, exact_lse = attend(inputs, "fa4")
        assert torch.equal(bits(out), bits(exact))
        assert torch.equal(bits(lse), bits(exact_lse))
        assert torch.equal(bits(stable.storage), bits(inputs.storage))


@pytest.mark.parametrize("has_pool", [True, False])
@pytest.mark.parametrize("num_splits", [0, 5])
def test_streams_and_graphs_at_work_at_the_same_time_keep_their_parts_apart(
    num_splits: int, has_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them count the parts of split tiles, and one that counted another's would be wrong."""
    rng = random.Random(fresh_seed())
    calls = []
    for _ in range(4):
        lengths = tuple(rng.randint(1, 3000) for _ in range(3))
        case = CacheCase(lengths, heads_q=8, head_dim=128, page_size=16, num_splits=num_splits)
        calls.append(make_cache_inputs(case, DEVICE))
    expected = [attend(inputs, "fa4") for inputs in calls]
    if not has_pool:
        # As if captured before any other call: a node of each graph sets its counters to 0.
        monkeypatch.setattr(device_counters, "_pools", {})
    graphs, captured = [], []
    for inputs in calls[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(attend(inputs, "fa4"))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in calls]
    for _ in range(30):
        for i, (stream, inputs) in enumerate(zip(streams, calls, strict=True)):
            with torch.cuda.stream(stream):
                if i < 2:
                    graphs[i].replay()
                    results[i].append(tuple(t.clone() for t in captured[i]))
                else:
                    results[i].append(attend(inputs, "fa4"))
    torch.cuda.synchronize()
    for given, exact in zip(results, expected, strict=True):
        for result in given:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(result, exact, strict=True))


def test_a_call_never_waits_for_the_device() -> None:
    case = CacheCase(
        (300, 20), new=(1, 1), head_dim=128, page_size=16, causal=True, rotary="half", num_splits=2
    )
    inputs = make_cache_inputs(case, DEVICE)
    attend(inputs.clone(), "fa4")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            attend(inputs, "fa4")
        with torch.cuda.stream(torch.cuda.Stream()):  # which has no counters yet
            attend(inputs, "fa4")
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_pages_far_behind_the_first_are_addressed_in_64_bits() -> None:
    pages, page_size = 70_000, 128  # x 2 heads x 128 dims: 2.3e9 elements
    caches = [torch.empty(pages, page_size, 2, 128, dtype=BF16, device=DEVICE) for _ in range(2)]
    table = torch.tensor([[pages - 1, 3, pages - 2]], dtype=torch.int32, device=DEVICE)
    for cache in caches:
        for page in table[0].tolist():
            cache[page].normal_()
    new = [torch.randn(1, 1, 2, 128, device=DEVICE).to(BF16) for _ in range(2)]
    q = torch.randn(1, 1, 8, 128, device=DEVICE).to(BF16)
    lengths = torch.tensor([300], dtype=torch.int32, device=DEVICE)
    common = {"cache_seqlens": lengths, "page_table": table, "causal": True, "return_lse": True}
    out, lse = fa4.flash_attn_with_kvcache(q, *caches, *new, **common, backend="fa4")
    common["cache_seqlens"] = lengths + 1
    exact, exact_lse = fa4.flash_attn_with_kvcache(q, *caches, **common, backend="reference")
    assert torch.equal(caches[0][pages - 2, 300 - 256], new[0][0, 0])
    assert torch.equal(caches[1][pages - 2, 300 - 256], new[1][0, 0])
    assert (out.float() - exact.float()).abs().max() < 0.01
    assert (lse - exact_lse).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("splits", [1, 3, 70])
def test_combine_matches_the_model(dtype: torch.dtype, splits: int) -> None:
    out_partial = torch.randn(splits, 3, 50, 6, 128, device=DEVICE).to(dtype)
    lse_partial = torch.randn(splits, 3, 6, 50, device=DEVICE) * 4
    lse_partial[torch.rand_like(lse_partial) < 0.3] = -float("inf")
    out_partial[lse_partial.isneginf().movedim(-1, -2)] = float("nan")
    out, lse = fa4.combine(out_partial, lse_partial, backend="fa4")
    exact, exact_lse = fa4.combine(
        out_partial.double(), lse_partial.double(), out_dtype=torch.float64, backend="reference"
    )
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    error = (out.double() - exact).abs().max()
    assert error < 2 * torch.finfo(dtype).eps * exact.abs().max() + 1e-5
    assert torch.where(exact_lse.isfinite(), lse - exact_lse, 0.0).abs().max() < 1e-5
