"""Gradients by the Hopper kernels on a GPU, through autograd of the public functions.

Every call forbids the fallback (backend="fa4"). Each case goes the deterministic path (two kernels,
twice: equal bits), and where head dims allow it the one that sums dQ up in memory. Budgets:
tests/backward_oracle.py. Kernels are compiled once for each specialisation, so the random cases
draw many shapes from the bounded list `SPECIALISATIONS`.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fa4
from fa4.pipelines.sm90_backward import ONE_KERNEL_HEAD_DIM_MAX
from fa4.reference_backward import Gradients
from tests.backward_oracle import (
    Incoming,
    assert_gradients_match,
    exact_gradients,
    make_incoming,
)
from tests.gpu.test_forward import (
    HEAD_DIM_CLASSES,
    Specialisation,
    packed,
    packed_case,
    random_case,
)
from tests.oracle import NAN, Case, Inputs, bits, int32, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

DEVICE = "cuda"
BACKEND = "fa4"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def large_memory_goes_back():
    """Other workers of the suite share the device: what a large case took is not kept for reuse."""
    yield
    if torch.cuda.memory_reserved() > 8 << 30:
        torch.cuda.empty_cache()


SPECIALISATIONS = [
    *(Specialisation(BF16, d) for d in HEAD_DIM_CLASSES),
    *(Specialisation(FP16, d, right=True) for d in HEAD_DIM_CLASSES),
    # head_dim_v of another class.
    Specialisation(BF16, 64, 128),
    Specialisation(FP16, 128, 64, right=True),
    Specialisation(BF16, 192, 128, right=True),
    Specialisation(BF16, 64, 256, right=True),
    Specialisation(FP16, 256, 64),
    Specialisation(BF16, 96, 192),
    # Windows.
    Specialisation(BF16, 128, left=True, right=True),
    Specialisation(FP16, 64, left=True),
    Specialisation(BF16, 256, left=True, right=True),
    # Scores and sinks.
    Specialisation(BF16, 128, right=True, score="softcap"),
    Specialisation(FP16, 256, score="softcap"),
    Specialisation(BF16, 64, right=True, score="scaled"),
    Specialisation(BF16, 64, right=True, sink=BF16),
    Specialisation(FP16, 256, left=True, right=True, sink=FP32),
    # Lengths.
    packed(BF16, 64, right=True),
    packed(BF16, 128),
    packed(FP16, 256, right=True),
    Specialisation(BF16, 64, used_q=True, used_k=True, right=True),
    Specialisation(BF16, 128, packed_q=True, used_k=True),
    Specialisation(FP16, 64, packed_k=True, used_q=True),
    # Everything at once.
    packed(BF16, 128, left=True, right=True, score="softcap", sink=BF16, used_q=True, used_k=True),
    packed(FP16, 256, left=True, right=True, score="scaled", sink=FP32, used_q=True, used_k=True),
]
SHAPES_EACH = 4


def random_cases() -> list[Case]:
    """The same list in every run and worker; the values of the tensors are new each time."""
    rng = random.Random(20250301)
    return [random_case(spec, rng) for spec in SPECIALISATIONS for _ in range(SHAPES_EACH)]


# Running -----------------------------------------------------------------------------------------


def differentiate(
    inputs: Inputs, incoming: Incoming, **options
) -> tuple[Gradients, Tensor, Tensor]:
    """(gradients, out, lse) of one forward and backward pass."""
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    common = dict(inputs.options, return_lse=True, backend=BACKEND, **options)
    if inputs.sink is not None:
        common["sink"] = inputs.sink.detach().requires_grad_()
        leaves.append(common["sink"])
    if inputs.case.is_varlen:
        out, lse = fa4.flash_attn_varlen_func(*leaves[:3], **inputs.lengths, **common)
    else:
        out, lse = fa4.flash_attn_func(*leaves[:3], **common)
    poison_freed_memory(inputs)
    results, gradients = [out], [incoming.grad_out]
    if incoming.grad_lse is not None:
        results.append(lse)
        gradients.append(incoming.grad_lse)
    found = torch.autograd.grad(results, leaves, gradients)
    dsink = found[3] if inputs.sink is not None else None
    return Gradients(*found[:3], dsink), out.detach(), lse.detach()


def poison_freed_memory(inputs: Inputs) -> None:
    """Leave NaN in the blocks that the allocator hands out next for gradients and workspaces."""
    junk = [torch.full_like(t, NAN) for t in (inputs.q, inputs.k, inputs.v) for _ in range(2)]
    rows = inputs.q.shape[:-1].numel()
    junk += [torch.full((rows, width), NAN, device=DEVICE) for width in (2, inputs.q.shape[-1])]
    del junk


def check(inputs: Inputs, has_grad_lse: bool = False) -> None:
    """Everything that must hold of the gradients of every call.

    - they match the answer although the memory they were given holds NaN, on each path
    - the deterministic path gives equal bits twice
    - inputs are unchanged
    """
    incoming = make_incoming(inputs, has_grad_lse)
    before = [bits(t).clone() for t in inputs.tensors]
    first, out, _ = differentiate(inputs, incoming, deterministic=True)
    assert_gradients_match(first, inputs, incoming, out)
    again, _, _ = differentiate(inputs, incoming, deterministic=True)
    assert_equal_bits(first, again, inputs)
    if max(inputs.case.head_dim, inputs.case.dim_v) <= ONE_KERNEL_HEAD_DIM_MAX:
        summed, out, _ = differentiate(inputs, incoming)
        assert_gradients_match(summed, inputs, incoming, out)
    for tensor, old in zip(inputs.tensors, before, strict=True):
        assert torch.equal(bits(tensor), old), f"an input was changed\n  case {inputs.case}"


def assert_equal_bits(one: Gradients, other: Gradients, inputs: Inputs) -> None:
    for name in Gradients._fields:
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            assert torch.equal(bits(first), bits(second)), f"{name} differs\n  case {inputs.case}"


# Random shapes and options -----------------------------------------------------------------------


@pytest.mark.parametrize("case", random_cases(), ids=str)
def test_random_shapes_and_options_match_float64(case):
    check(make_inputs(case, DEVICE), has_grad_lse=len(case.seqlens_q) % 2 == 0)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_c46_c47_every_head_dim_matches_float64(head_dim):
    """One key past a tile, one query short of it, and three query heads for a key head."""
    case = Case((127,) * 2, (193,) * 2, 6, 2, head_dim, causal=True)
    check(make_inputs(case, DEVICE))


@pytest.mark.parametrize("head_dim", HEAD_DIM_CLASSES)
@pytest.mark.parametrize("head_dim_v", HEAD_DIM_CLASSES)
def test_every_pair_of_head_dim_classes_matches_float64(head_dim, head_dim_v):
    check(make_inputs(Case((200,), (150,), 4, 2, head_dim - 8, head_dim_v), DEVICE))


# Public cases that are one call and the usual checks, by number.
CASES: dict[str, Case] = {
    **{
        f"C05 stored (heads, rows), head dim {d}": Case(
            (2048,), (2048,), 4, 4, d, storage="heads_first"
        )
        for d in (64, 128, 192, 256)
    },
    **{
        f"C16 keys without queries, head dim {d}": packed_case(
            [0, 1208, 840, 0], [2538, 1742, 840, 3072], heads_q=4, heads_kv=1, head_dim=d
        )
        for d in (128, 256)
    },
    "C19 rows behind the last sequence": packed_case(
        [144, 288, 512], heads_q=16, heads_kv=16, tail_q=2, tail_k=2
    ),
    **{
        f"C20 dense with used lengths, causal {causal}": Case(
            (512,) * 3, (512,) * 3, 4, 4, used_q=(512, 300, 0), used_k=(512, 1, 77), causal=causal
        )
        for causal in (False, True)
    },
    "C24 padding inside packed rows": packed_case(
        [128, 128], used_q=(100, 77), used_k=(100, 77), causal=True
    ),
    **{
        f"C45 {rows} rows, head dim {d}": Case((rows,), (rows,), 2, 2, d, causal=True)
        for rows in (1, 17, 63, 65, 113, 127, 128, 129, 200, 255, 257)
        for d in (64, 128)
    },
    **{
        f"C48 head dims 192 and 128, causal {causal}": Case(
            (1024,), (1024,), 128, 128, 192, 128, causal=causal
        )
        for causal in (False, True)
    },
    "C52 head dim 8": Case((5,), (5,), 2, 2, 8, causal=True),
    **{
        f"C55 causal window, head dim {d}": Case(
            (2048,), (2048,), 4, 4, d, causal=True, window_size=(127, 0)
        )
        for d in (64, 256)
    },
    "C56 softcap of 10": Case((1024,) * 2, (1024,) * 2, 32, 32, 128, causal=True, softcap=10.0),
    **{
        f"C57 learnable sink in {dtype}": Case((300,), (300,), 8, 2, 64, causal=True, sink=dtype)
        for dtype in (BF16, FP32)
    },
    "scores far apart": Case((300,), (1000,), 2, 2, 128, spread=16.0),
    "scores far apart, head dim 256": Case((300,), (1000,), 2, 1, 256, causal=True, spread=16.0),
    "long rows": Case((300,), (20_000,), 2, 1, 64),
    "long rows, head dim 256": Case((300,), (20_000,), 2, 1, 256),
    "long columns, head dim 256": Case((20_000,), (300,), 2, 1, 256),
    "logits of 200 in a cap of 15": Case(
        (300,), (500,), 2, 2, 128, softcap=15.0, softmax_scale=1.0, spread=4.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_public_case(name):
    check(make_inputs(CASES[name], DEVICE))


@pytest.mark.parametrize("has_sink", [False, True])
def test_c58_gradient_through_the_lse(has_sink):
    sink = FP32 if has_sink else None
    check(make_inputs(Case((130,), (130,), 2, 2, 64, causal=True, sink=sink), DEVICE), True)


# What cannot be said as a case -------------------------------------------------------------------


def test_c06_sequences_beyond_2_31_elements():
    """Rows of the batch agree with runs of their own."""
    shape = (704, 24_000, 1, 128)
    k, v = (torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(2))
    q = torch.randn(704, 256, 1, 128, device=DEVICE, dtype=BF16)
    grad = torch.randn_like(q)
    for t in (q, k, v):
        t.requires_grad_()
    out = fa4.flash_attn_func(q, k, v, backend=BACKEND, deterministic=True)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for b in (0, 350, 703):
        parts = [t.detach()[b : b + 1].requires_grad_() for t in (q, k, v)]
        alone = fa4.flash_attn_func(*parts, backend=BACKEND, deterministic=True)
        expected = torch.autograd.grad(alone, parts, grad[b : b + 1])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[b : b + 1], other)


def test_c22_eighty_thousand_packed_sequences():
    lengths = [16] * 80_000
    inputs = make_inputs(packed_case(lengths, heads_q=1, heads_kv=1, dtype=FP16), DEVICE)
    dense = make_inputs(Case((16,) * 80_000, (16,) * 80_000, 1, 1, dtype=FP16), DEVICE)
    for name in ("q", "k", "v"):
        setattr(inputs, name, getattr(dense, name).flatten(0, 1))
    incoming = make_incoming(dense, False)
    exact = exact_gradients(dense, incoming)
    flat = Incoming(incoming.grad_out.flatten(0, 1), None)
    for deterministic in (False, True):
        found, _, _ = differentiate(inputs, flat, deterministic=deterministic)
        for name in ("dq", "dk", "dv"):
            one, other = getattr(found, name).double(), getattr(exact, name).flatten(0, 1)
            assert (one - other).abs().max() < 5e-3 * other.abs().max(), name


def test_c44_one_query_and_one_key_have_no_gradient_but_dv():
    gen = torch.Generator(DEVICE).manual_seed(0)
    shape = (1000, 1, 1, 16)
    q, k, v = (
        (3 * torch.randn(shape, generator=gen, device=DEVICE)).half().requires_grad_()
        for _ in range(3)
    )
    for deterministic in (False, True):
        out = fa4.flash_attn_func(q, k, v, backend=BACKEND, deterministic=deterministic)
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert dq.abs().max() <= 1e-3
        assert dk.abs().max() <= 1e-3
        assert torch.equal(dv, torch.ones_like(dv))


def test_c51_large_channels_stored_rows_first():
    gen = torch.Generator(DEVICE).manual_seed(1)

    def stored(heads: int) -> Tensor:
        x = torch.randn(512, 2, heads, 256, generator=gen, device=DEVICE)
        x[..., ::50] *= 30.0
        return x.to(BF16).transpose(0, 1).requires_grad_()

    q, k, v = stored(16), stored(2), stored(2)
    out = fa4.flash_attn_func(q, k, v, causal=True, backend=BACKEND)
    grad = torch.randn(out.shape, generator=gen, device=DEVICE).to(BF16)
    found = torch.autograd.grad(out, (q, k, v), grad)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(
        fa4.flash_attn_func(*wide, causal=True, backend="reference"), wide, grad.double()
    )
    for one, other in zip(found, exact, strict=True):
        cosine = torch.nn.functional.cosine_similarity(one.double().flatten(), other.flatten(), 0)
        assert cosine > 0.999


@pytest.mark.parametrize("deterministic", [False, True])
def test_c52_c53_grad_out_of_any_strides_gives_the_gradients_of_a_contiguous_one(deterministic):
    """Bit for bit where sums have an order; else dQ's may differ by a rounding."""

    def assert_same(one: Tensor, other: Tensor, name: str) -> None:
        if deterministic:
            assert torch.equal(one, other), name
        assert (one - other).abs().max() <= 2**-7 * other.abs().max(), name

    q, k, v = (
        torch.randn(2, 200, 4, 96, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3)
    )
    out = fa4.flash_attn_func(q, k, v, backend=BACKEND, deterministic=deterministic)
    values = torch.randn_like(out)
    views = {
        "transposed": values.transpose(1, 2).contiguous().transpose(1, 2),
        "rows of a wider buffer": torch.cat([values.flatten(2)] * 2, dim=-1)[..., 384:].view_as(
            values
        ),
        "an odd distance": torch.cat([values, values[..., :1]], dim=-1)[..., :96],
    }
    expected = torch.autograd.grad(out, (q, k, v), values, retain_graph=True)
    for name, view in views.items():
        found = torch.autograd.grad(out, (q, k, v), view, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, name)
    # The gradient of a sum is one element shown everywhere.
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    for one, other in zip(torch.autograd.grad(out.sum(), (q, k, v)), ones, strict=True):
        assert_same(one, other, "ones")


@pytest.mark.parametrize("heads_kv", [16, 4])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_c54_equal_bits_in_every_run_beside_other_work(heads_kv, head_dim):
    inputs = make_inputs(
        Case((2048,) * 2, (2048,) * 2, 16, heads_kv, head_dim, causal=True), DEVICE
    )
    incoming = make_incoming(inputs, False)
    first, _, _ = differentiate(inputs, incoming, deterministic=True)
    other_work = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(30):
        other_work = other_work @ other_work / 50.0
        again, _, _ = differentiate(inputs, incoming, deterministic=True)
        assert_equal_bits(first, again, inputs)


def test_torchs_deterministic_algorithms_give_equal_bits():
    inputs = make_inputs(Case((1024,) * 2, (1024,) * 2, 8, 8, 64), DEVICE)
    incoming = make_incoming(inputs, False)
    asked, _, _ = differentiate(inputs, incoming, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        found, _, _ = differentiate(inputs, incoming)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal_bits(asked, found, inputs)


@pytest.mark.parametrize(
    ("rows", "keys", "batch"), [(0, 7, 1), (7, 0, 1), (7, 7, 0)], ids=["no q", "no k", "no batch"]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_c59_nothing_to_attend_to_gives_zeros(rows, keys, batch, is_packed):
    q = torch.randn(batch, rows, 2, 64, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(batch, keys, 2, 64, device=DEVICE, dtype=BF16) for _ in range(2))
    lengths = {}
    if is_packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        for name, length in (("cu_seqlens_q", rows), ("cu_seqlens_k", keys)):
            lengths[name] = int32([length * b for b in range(batch + 1)], DEVICE)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    function = fa4.flash_attn_varlen_func if is_packed else fa4.flash_attn_func
    out = function(*leaves, **lengths)
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


def test_c79_a_first_backward_beside_a_first_forward():
    """Gradients run on autograd's own thread, which may compile while another does."""
    cases = [Case((65,), (65,), 2, 2, d, causal=True, softcap=7.0) for d in (64, 128, 192, 256)]

    def run(case: Case) -> None:
        inputs = make_inputs(case, DEVICE)
        incoming = make_incoming(inputs, False)
        found, out, _ = differentiate(inputs, incoming)
        assert_gradients_match(found, inputs, incoming, out)

    with ThreadPoolExecutor(len(cases)) as pool:
        for finished in [pool.submit(run, case) for case in cases]:
            finished.result()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_c85_work_queued_before_and_after_on_a_side_stream_is_ordered(head_dim):
    inputs = make_inputs(Case((300,), (400,), 4, 2, head_dim, causal=True), DEVICE)
    incoming = make_incoming(inputs, False)
    expected, _, _ = differentiate(inputs, incoming, deterministic=True)
    source = inputs.q.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        inputs.q.zero_()
        torch.cuda._sleep(20_000_000)
        inputs.q.copy_(source)
        found, _, _ = differentiate(inputs, incoming, deterministic=True)
        copies = Gradients(*(t if t is None else t.clone() for t in found))
    stream.synchronize()
    assert_equal_bits(copies, expected, inputs)


@pytest.mark.parametrize(
    ("head_dim", "deterministic"), [(128, True), (256, True), (128, False), (64, False)]
)
def test_backward_replays_in_a_captured_graph(head_dim, deterministic):
    # More key tiles than a device has multiprocessors.
    inputs = make_inputs(Case((300,) * 8, (400,) * 8, 16, 8, head_dim, causal=True), DEVICE)
    incoming = make_incoming(inputs, False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            differentiate(inputs, incoming, deterministic=deterministic)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured, _, _ = differentiate(inputs, incoming, deterministic=deterministic)
    for _ in range(2):
        other = make_inputs(inputs.case, DEVICE)
        for name in ("q", "k", "v"):
            getattr(inputs, name).copy_(getattr(other, name))
        graph.replay()
        torch.cuda.synchronize()
        expected, _, _ = differentiate(inputs, incoming, deterministic=deterministic)
        assert_same(captured, expected, inputs, deterministic)


def test_backward_passes_on_streams_at_the_same_time_do_not_meet():
    """Each stream has its own counter of tiles."""
    cases = [Case((600,) * 8, (700,) * 8, 16, 16, head_dim, causal=True) for head_dim in (64, 128)]
    everything = [make_inputs(case, DEVICE) for case in cases]
    incoming = [make_incoming(inputs, False) for inputs in everything]
    expected = [differentiate(*pair)[0] for pair in zip(everything, incoming, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[Gradients]] = [[] for _ in cases]
    for _ in range(5):
        for stream, *pair, results in zip(streams, everything, incoming, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(differentiate(*pair)[0])
    torch.cuda.synchronize()
    for inputs, one, others in zip(everything, expected, found, strict=True):
        for other in others:
            assert_same(one, other, inputs, deterministic=False)


def assert_same(one: Gradients, other: Gradients, inputs: Inputs, deterministic: bool) -> None:
    """Equal bits, but for a dQ that was summed up in another order."""
    if not deterministic:
        atol = 2**-7 * one.dq.abs().max().item()
        torch.testing.assert_close(one.dq, other.dq, rtol=2**-7, atol=atol)
        one = one._replace(dq=other.dq)
    assert_equal_bits(one, other, inputs)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_more_tiles_than_multiprocessors(head_dim):
    """CTAs take one tile after the other, some of which no row sees."""
    rng = random.Random(head_dim)
    lengths = [[rng.choice((0, 1, 70, 128, 300, 500)) for _ in range(40)] for _ in "qk"]
    every = {"head_dim": head_dim, "heads_q": 4, "heads_kv": 2}
    for case in (
        replace(packed_case(lengths[0], lengths[1], tail_q=70, tail_k=300), causal=True, **every),
        replace(packed_case(lengths[0], lengths[1]), window_size=(40, 20), **every),
        Case((900,) * 4, (1100,) * 4, 8, 8, head_dim, causal=True),
        Case((200,) * 8, (1100,) * 8, 4, 4, head_dim),
    ):
        check(make_inputs(case, DEVICE))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sums_of_many_heads_are_zeroed_while_others_are_added_to(head_dim):
    """More heads than have zeros beforehand, and than run at the same time."""
    lengths = [300, 0, 130, 700, 1]
    for case in (
        Case((300,) * 40, (300,) * 40, 16, 16, head_dim, causal=True),
        Case((260,) * 30, (150,) * 30, 32, 8, head_dim),
        replace(packed_case(lengths, heads_q=48, heads_kv=48, head_dim=head_dim), causal=True),
        Case((100,) * 20, (150,) * 20, 4, 2, head_dim, packed_k=True),
        Case((100,) * 20, (150,) * 20, 4, 2, head_dim, packed_q=True, causal=True),
    ):
        inputs = make_inputs(case, DEVICE)
        incoming = make_incoming(inputs, False)
        for _ in range(3):
            found, out, _ = differentiate(inputs, incoming)
            assert_gradients_match(found, inputs, incoming, out)


def test_peak_memory_is_linear_in_the_sequence():
    """Nothing of size rows x keys, and no more than the fp32 dQ beside the gradients."""

    def peak(rows: int) -> int:
        q, k, v = (
            torch.randn(1, rows, 8, 128, device=DEVICE, dtype=BF16, requires_grad=True)
            for _ in range(3)
        )
        out = fa4.flash_attn_func(q, k, v, backend=BACKEND)
        grad = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, (q, k, v), grad)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for rows in (4096, 16_384):
        tensor = rows * 8 * 128 * 2  # bytes of each of q, k, v
        # Three gradients, dQ in fp32, 40 bytes of statistics a row and head, rounding.
        assert peak(rows) <= 3 * tensor + 2 * tensor + rows * 8 * 40 + (64 << 10)


def test_padding_of_every_gradient_is_zero_whatever_memory_held():
    """C19, C20 with tails and leading gaps of every kind together."""
    for lengths, used in itertools.product(([7, 0, 200], [0, 0, 1]), ((5, 0, 150), None)):
        clipped = None
        if used is not None:
            clipped = tuple(min(pair) for pair in zip(used, lengths, strict=True))
        case = packed_case(lengths, used_q=clipped, used_k=clipped, tail_q=70, tail_k=131)
        for head_dim in (64, 256):
            check(make_inputs(replace(case, head_dim=head_dim, causal=True), DEVICE))
