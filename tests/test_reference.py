"""What attention is: `fa4.reference` against explicit loops, finite differences and PyTorch.

The oracle here is written with Python numbers and one loop for each index, straight from the rules,
so that it shares nothing with what it judges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import fa4.reference
from fa4.reference import attention_reference

NAN = float("nan")
INF = float("inf")


# The slow oracle -----------------------------------------------------------------------------


def is_visible(i, j, seqlen_q, seqlen_k, causal, window_size) -> bool:
    """The mask rule as the documentation states it."""
    left, right = window_size
    diagonal = i + seqlen_k - seqlen_q
    if causal and j > diagonal:
        return False
    if right not in (None, -1) and j > diagonal + right:
        return False
    return left in (None, -1) or j >= diagonal - left


def loop_attention(
    q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, sink=None
):
    """One sequence: q (seqlen_q, heads_q, d), k (seqlen_k, heads_kv, d), v (.., dv), any dtype.

    Returns out (seqlen_q, heads_q, dv) and lse (heads_q, seqlen_q), float64.
    """
    seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv, head_dim_v = v.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q_list, k_list, v_list = q.tolist(), k.tolist(), v.tolist()
    sinks = None if sink is None else sink.tolist()
    out = torch.zeros(seqlen_q, heads_q, head_dim_v, dtype=torch.float64)
    lse = torch.full((heads_q, seqlen_q), -INF, dtype=torch.float64)
    for h in range(heads_q):
        hk = h // (heads_q // heads_kv)
        for i in range(seqlen_q):
            scores = {}
            for j in range(seqlen_k):
                if is_visible(i, j, seqlen_q, seqlen_k, causal, window_size):
                    x = scale * sum(a * b for a, b in zip(q_list[i][h], k_list[j][hk], strict=True))
                    scores[j] = softcap * math.tanh(x / softcap) if softcap else x
            if not scores:
                continue
            top = max(scores.values()) if sinks is None else max(*scores.values(), sinks[h])
            denominator = sum(math.exp(x - top) for x in scores.values())
            if sinks is not None:
                denominator += math.exp(sinks[h] - top)
            lse[h, i] = top + math.log(denominator)
            for c in range(head_dim_v):
                total = sum(math.exp(x - top) * v_list[j][hk][c] for j, x in scores.items())
                out[i, h, c] = total / denominator
    return out, lse


# Problems ------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Arguments of one call, and where its sequences lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows_q: list  # for each sequence, an index of its used rows in q
    rows_k: list
    mask: dict  # causal, window_size
    score: dict  # softmax_scale, softcap
    sink: Tensor | None = None
    lengths: dict = field(default_factory=dict)  # cu_seqlens_*, seqused_*

    def run(self, q=None, k=None, v=None, sink=None):
        return attention_reference(
            self.q if q is None else q,
            self.k if k is None else k,
            self.v if v is None else v,
            sink=self.sink if sink is None else sink,
            **self.mask,
            **self.score,
            **self.lengths,
        )

    def loops(self):
        """(out, lse) by loops, in the layout of q."""
        out = torch.zeros(*self.q.shape[:-1], self.v.shape[-1], dtype=torch.float64)
        lse_rows = torch.full(self.q.shape[:-1], -INF, dtype=torch.float64)  # (.., rows, heads)
        for iq, ik in zip(self.rows_q, self.rows_k, strict=True):
            out[iq], lse_i = loop_attention(
                self.q[iq], self.k[ik], self.v[ik], sink=self.sink, **self.mask, **self.score
            )
            lse_rows[iq] = lse_i.T
        return out, lse_rows.transpose(-1, -2)

    def is_row_live(self) -> Tensor:
        """(.., rows): True for a query row that sees a key."""
        live = torch.zeros(self.q.shape[:-2], dtype=torch.bool)
        for iq, sees in self._seen():
            live[iq] = sees.any(dim=1)
        return live

    def is_key_seen(self) -> Tensor:
        """(.., rows): True for a key that some query row sees."""
        seen = torch.zeros(self.k.shape[:-2], dtype=torch.bool)
        for (_, sees), ik in zip(self._seen(), self.rows_k, strict=True):
            seen[ik] = sees.any(dim=0)
        return seen

    def _seen(self):
        for iq, ik in zip(self.rows_q, self.rows_k, strict=True):
            seqlen_q, seqlen_k = len(self.q[iq]), len(self.k[ik])
            sees = torch.tensor(
                [
                    [is_visible(i, j, seqlen_q, seqlen_k, **self.mask) for j in range(seqlen_k)]
                    for i in range(seqlen_q)
                ],
                dtype=torch.bool,
            )
            yield iq, sees.view(seqlen_q, seqlen_k)

    def poisoned(self) -> Problem:
        """The same problem with NaN in every row that must not be read."""
        live, seen = self.is_row_live()[..., None, None], self.is_key_seen()[..., None, None]
        return Problem(
            self.q.masked_fill(~live, NAN),
            self.k.masked_fill(~seen, NAN),
            self.v.masked_fill(~seen, NAN),
            self.rows_q,
            self.rows_k,
            self.mask,
            self.score,
            self.sink,
            self.lengths,
        )


def cumulative(lengths) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def int32(values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


SMALL = st.integers(0, 9)
BOUND = st.one_of(st.none(), st.just(-1), st.integers(0, 10))


@st.composite
def problems(draw) -> Problem:
    """Any mixture of layouts and options, small enough for loops."""
    batch = draw(st.integers(0, 3))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim, head_dim_v = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths: dict = {}

    def side(name: str):
        """Shape without heads, and the used rows of each sequence."""
        packed, has_used = draw(st.booleans()), draw(st.booleans())
        if packed:
            room = draw(st.lists(SMALL, min_size=batch, max_size=batch))
            tail = draw(st.integers(0, 2))
            lengths[f"cu_seqlens_{name}"] = cumulative(room)
            shape: tuple = (sum(room) + tail,)
            starts = cumulative(room).tolist()
        else:
            seqlen = draw(SMALL)
            room, shape, starts = [seqlen] * batch, (batch, seqlen), []
        used = room
        if has_used:
            used = [draw(st.integers(0, rows)) for rows in room]
            lengths[f"seqused_{name}"] = int32(used)
        index: list = [
            slice(starts[b], starts[b] + used[b]) if packed else (b, slice(0, used[b]))
            for b in range(batch)
        ]
        return shape, index

    shape_q, rows_q = side("q")
    shape_k, rows_k = side("k")

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=gen)

    return Problem(
        randn(*shape_q, heads_kv * group, head_dim),
        randn(*shape_k, heads_kv, head_dim),
        randn(*shape_k, heads_kv, head_dim_v),
        rows_q,
        rows_k,
        mask={"causal": draw(st.booleans()), "window_size": (draw(BOUND), draw(BOUND))},
        score={
            "softmax_scale": draw(st.sampled_from([None, 1.3, -0.7, 0.0])),
            "softcap": draw(st.sampled_from([0.0, None, 0.5, 20.0])),
        },
        sink=randn(heads_kv * group) if draw(st.booleans()) else None,
        lengths=lengths,
    )


PROPERTY = settings(max_examples=300, deadline=None)


@PROPERTY
@given(problems())
def test_every_option_matches_loops_and_unread_rows_may_hold_nan(problem):
    out, lse = problem.poisoned().run()
    expected_out, expected_lse = problem.loops()
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-12)


@PROPERTY
@given(problems(), st.integers(0, 2**31))
def test_gradients_match_finite_differences_and_are_zero_for_unread_rows(problem, seed):
    """Directional derivative of a random function of out and lse, in every differentiable input
    (the sink as in C57, through the LSE as in C58).

    What must not be read holds NaN: rows of q, k, v, and the incoming gradients of those rows.
    """
    gen = torch.Generator().manual_seed(seed)
    live, seen = problem.is_row_live(), problem.is_key_seen()
    problem = problem.poisoned()
    names = ["q", "k", "v"] + (["sink"] if problem.sink is not None else [])
    inputs = {n: getattr(problem, n).detach().clone().requires_grad_() for n in names}
    out, lse = problem.run(**inputs)
    live_out = live[..., None, None].expand_as(out)
    live_lse = live[..., None, :].expand_as(lse)
    out_weight = torch.randn(out.shape, dtype=out.dtype, generator=gen)
    lse_weight = torch.randn(lse.shape, dtype=lse.dtype, generator=gen)

    grads = torch.autograd.grad(
        [out, lse],
        list(inputs.values()),
        [out_weight.masked_fill(~live_out, NAN), lse_weight.masked_fill(~live_lse, NAN)],
    )

    def loss(step):
        moved = {n: inputs[n].detach() + step * directions[n] for n in names}
        out, lse = problem.run(**moved)
        return ((out * out_weight)[live_out].sum() + (lse * lse_weight)[live_lse].sum()).item()

    directions = {n: torch.randn(inputs[n].shape, dtype=out.dtype, generator=gen) for n in names}
    step = 1e-5
    numeric = (loss(step) - loss(-step)) / (2 * step)
    analytic = 0.0
    for name, grad in zip(names, grads, strict=True):
        if name != "sink":
            unread = ~(live if name == "q" else seen)
            assert torch.equal(grad[unread], torch.zeros_like(grad[unread])), name
        assert not grad.isnan().any(), name
        analytic += (grad * directions[name]).sum().item()
    assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-7)


@PROPERTY
@given(problems())
def test_the_size_of_chunks_changes_neither_results_nor_gradients(problem):
    """One query row and one batch entry at a time, everything recomputed, against all at once."""
    results = []
    for chunk_bytes in (fa4.reference.SCORE_CHUNK_BYTES, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fa4.reference, "SCORE_CHUNK_BYTES", chunk_bytes)
            inputs = [t.clone().requires_grad_() for t in (problem.q, problem.k, problem.v)]
            out, lse = problem.run(*inputs)
            live = problem.is_row_live()[..., None, :].expand_as(lse)
            loss = out.square().sum() + lse[live].square().sum()
            results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-10, atol=1e-12)


# Derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (1, 2), "softcap": 2.0},
        {"causal": True, "softmax_scale": -0.7, "with_sink": True},
    ],
    ids=str,
)
def test_gradcheck_accepts_out_and_lse(options):
    options = dict(options)
    torch.manual_seed(0)
    q = torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with_sink = options.pop("with_sink", False)

    def attention(q, k, v, sink):
        return attention_reference(q, k, v, sink=sink if with_sink else None, **options)

    inputs = (q, k, v, sink if with_sink else None)
    assert torch.autograd.gradcheck(attention, inputs)


def test_second_derivatives_work_also_where_backward_computes_scores_again(monkeypatch):
    monkeypatch.setattr(fa4.reference, "SCORE_CHUNK_BYTES", 1)
    torch.manual_seed(0)
    inputs = [torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: attention_reference(q, k, v, causal=True), inputs
    )


def test_without_gradients_nothing_is_recorded():
    q = torch.randn(1, 3, 1, 2, requires_grad=True)
    with torch.no_grad():
        out, lse = attention_reference(q, q, q)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_a_sink_alone_can_be_trained():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 2, 3).unbind(0)
    sink = torch.zeros(2, requires_grad=True)
    out, _ = attention_reference(q, k, v, sink=sink)
    out.square().sum().backward()
    assert (sink.grad < 0).all()  # a larger sink takes weight from the values: less output


# Memory --------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor):
                self.nbytes = max(self.nbytes, t.nbytes)
        return result


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "window_size"),
    [
        (1, 1, 2048, (-1, -1)),  # query rows in chunks
        (300, 4, 32, (-1, -1)),  # batch entries in chunks
        (1, 1, 8192, (16, 0)),  # a narrow band: many rows in a chunk
    ],
)
def test_forward_and_backward_never_hold_more_scores_than_a_chunk(
    monkeypatch, batch, heads, seqlen, window_size
):
    chunk = 1 << 18
    monkeypatch.setattr(fa4.reference, "SCORE_CHUNK_BYTES", chunk)
    q, k, v = (torch.randn(batch, seqlen, heads, 1, requires_grad=True) for _ in range(3))
    input_bytes = q.nbytes
    score_bytes = batch * heads * seqlen * seqlen * 4
    assert max(chunk, input_bytes) < score_bytes / 4
    saved = 0

    def count(t):
        nonlocal saved
        saved += t.nbytes
        return t

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            out, _ = attention_reference(q, k, v, window_size=window_size)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert largest.nbytes <= max(chunk, input_bytes)
    # Slices of q, k and v are saved once for each chunk, and share the storage of the inputs.
    chunks = math.ceil(score_bytes / chunk)
    assert saved <= 3 * input_bytes * (chunks + 1)


def test_a_narrow_window_on_a_long_sequence_takes_few_chunks(monkeypatch):
    calls = []
    attend_chunk = fa4.reference._attend_chunk
    monkeypatch.setattr(
        fa4.reference, "_attend_chunk", lambda *args: calls.append(1) or attend_chunk(*args)
    )
    monkeypatch.setattr(fa4.reference, "SCORE_CHUNK_BYTES", 1 << 18)
    q = torch.randn(1, 8192, 1, 1)
    attention_reference(q, q, q, window_size=(16, 0))
    assert len(calls) <= 8192 // 240  # rows * (rows + 17) <= 65536 scores


# Agreement with PyTorch ----------------------------------------------------------------------


def sdpa(q, k, v, **options):
    """PyTorch's math backend in our layout."""
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True, **options
        )
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_square_problems_agree_with_sdpa_and_so_do_their_gradients(dtype, causal):
    torch.manual_seed(0)
    q = torch.randn(2, 37, 6, 16, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 37, 2, 16, dtype=dtype, requires_grad=True)
    v = torch.randn(2, 37, 2, 24, dtype=dtype, requires_grad=True)
    grad_out = torch.randn(2, 37, 6, 24, dtype=dtype)
    out, _ = attention_reference(q, k, v, causal=causal)
    expected = sdpa(q, k, v, is_causal=causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), grad_out),
        torch.autograd.grad(expected, (q, k, v), grad_out),
    )


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 9), (2, 5), (40, 64)])
def test_a_causal_mask_is_aligned_to_the_last_key(seqlen_q, seqlen_k):
    torch.manual_seed(0)
    q = torch.randn(1, seqlen_q, 2, 8)
    k, v = torch.randn(2, 1, seqlen_k, 2, 8).unbind(0)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    out, _ = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=visible))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32_and_rounded_once(dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 65, 2, 32).to(dtype).unbind(0)
    out, lse = attention_reference(q, k, v, causal=True)
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), causal=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # Half a unit in the last place of each value, and nothing more than float32 noise.
    half_ulp = exact.abs() * torch.finfo(dtype).eps / 2
    assert ((out.double() - exact).abs() <= half_ulp + 1e-6).all()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)


def test_autocast_does_not_lower_the_precision():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 20, 2, 8).unbind(0)
    expected = attention_reference(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = attention_reference(q, k, v)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("sink_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sink_may_have_any_float_type_and_its_gradient_has_it_too(sink_dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 7, 2, 8).bfloat16().unbind(0)
    sink = torch.tensor([0.5, -1.0], dtype=sink_dtype, requires_grad=True)
    out, lse = attention_reference(q, k, v, sink=sink)
    expected, expected_lse = attention_reference(q, k, v, sink=sink.detach().float())
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    lse.sum().backward()
    assert sink.grad.dtype == sink_dtype


def test_the_result_is_contiguous_whatever_the_strides_of_the_inputs():
    torch.manual_seed(0)
    storage = torch.randn(3, 2, 4, 9, 8)  # (q or k or v, batch, heads, seqlen, head_dim)
    q, k, v = (t.transpose(1, 2) for t in storage.unbind(0))
    out, lse = attention_reference(q, k, v, causal=True)
    expected = attention_reference(*(t.contiguous() for t in (q, k, v)), causal=True)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close((out, lse), expected)


# Lengths that do not fit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"cu_seqlens_q": [0, 5, 3]}, r"cu_seqlens_q.*entry 1 is 5, and the next 3"),
        ({"cu_seqlens_q": [0, 3, 9]}, r"cu_seqlens_q.*entry 2 is 9, and q has 8 rows"),
        ({"cu_seqlens_q": [-1, 3, 8]}, r"cu_seqlens_q.*entry 0 is -1"),
        ({"cu_seqlens_q": [0, 4, 8], "seqused_q": [4, 5]}, r"seqused_q\[1\] is 5.*0 to 4"),
        ({"cu_seqlens_q": [0, 4, 8], "seqused_q": [-1, 4]}, r"seqused_q\[0\] is -1"),
    ],
    ids=str,
)
def test_lengths_that_do_not_fit_are_refused_by_the_first_entry(lengths, message):
    q = torch.randn(8, 1, 4)
    with pytest.raises(ValueError, match=message):
        attention_reference(
            q,
            q,
            q,
            cu_seqlens_k=int32([0, 4, 8]),
            **{name: int32(values) for name, values in lengths.items()},
        )


# Public cases (numbers as in the list of inputs that must work) ------------------------------


def packed_equals_dense(q, k, v, cu_q, cu_k, **options):
    """Run packed, and compare every sequence with its own dense run, gradients included."""
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out, lse = attention_reference(
        *inputs, cu_seqlens_q=int32(cu_q), cu_seqlens_k=int32(cu_k), **options
    )
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad_out)
    for b in range(len(cu_q) - 1):
        sq, sk = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = [t[None].detach().clone().requires_grad_() for t in (inputs[0][sq], k[sk], v[sk])]
        out_b, lse_b = attention_reference(*alone, **options)
        torch.testing.assert_close(out[sq], out_b[0])
        torch.testing.assert_close(lse[:, sq], lse_b[0])
        grads_b = torch.autograd.grad(out_b, alone, grad_out[sq][None])
        for grad, rows, grad_b in zip(grads, (sq, sk, sk), grads_b, strict=True):
            torch.testing.assert_close(grad[rows], grad_b[0], rtol=1e-4, atol=1e-5)
    return out, lse, grads


def test_c02_nan_in_one_sequence_stays_in_that_sequence():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 16, 4, 64).unbind(0)
    for t in (q, k, v):
        t[3:8] = NAN
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    cu = cumulative([3, 5, 8])
    out, lse = attention_reference(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu)
    out.sum().backward()
    middle = torch.zeros(16, dtype=torch.bool)
    middle[3:8] = True
    for t in (out, lse.T, *(x.grad for x in inputs)):
        is_nan = t.isnan().flatten(1)
        assert torch.equal(is_nan.any(dim=1), middle)


def test_c07_a_scale_of_zero_gives_the_mean_and_a_negative_scale_is_taken_literally():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 160, 2, 64).half().unbind(0)
    out, lse = attention_reference(q, k, v, causal=True, softmax_scale=0.0)
    count = torch.arange(1, 161)
    mean = v.float().cumsum(1) / count[:, None, None]
    torch.testing.assert_close(out.float(), mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, count.float().log().expand(1, 2, 160))
    negative = attention_reference(q, k, v, causal=True, softmax_scale=-0.125)
    torch.testing.assert_close(
        negative, attention_reference(-q, k, v, causal=True, softmax_scale=0.125)
    )


def test_c08_rows_above_the_first_key_are_empty_when_queries_outnumber_keys():
    torch.manual_seed(0)
    q = torch.randn(1, 2048, 1, 64)
    k, v = torch.randn(2, 1, 1024, 1, 64).unbind(0)
    out, lse = attention_reference(q, k, v, causal=True)
    assert (out[:, :1024] == 0).all()
    assert (lse[:, :, :1024] == -INF).all()
    square = attention_reference(q[:, 1024:], k, v, causal=True)
    torch.testing.assert_close((out[:, 1024:], lse[:, :, 1024:]), square)


def test_c09_rows_without_keys_merge_by_the_usual_rule():
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 2, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    cu_q = cumulative([4, 4])
    out, lse = attention_reference(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cumulative([0, 9]))
    assert (out[:4] == 0).all()
    assert (lse[:, :4] == -INF).all()
    other, other_lse = attention_reference(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cumulative([4, 5])
    )
    merged_lse = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - merged_lse).exp().T[..., None] for x in (lse, other_lse))
    merged = weight * out + other_weight * other
    torch.testing.assert_close(merged[:4], other[:4])
    assert torch.equal(merged_lse[:, :4], other_lse[:, :4])


@pytest.mark.parametrize("window_size", [(-1, 0), (None, 0), (300, 0), (299, 0), (None, None)])
def test_c10_c11_windows_that_cut_nothing_equal_plain_causal(window_size):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 300, 2, 16).unbind(0)
    causal = window_size == (None, None)
    actual = attention_reference(q, k, v, causal=causal, window_size=window_size)
    expected = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(actual, expected)
    both = attention_reference(q, k, v, causal=True, window_size=window_size)
    torch.testing.assert_close(both, expected)


def test_c12_a_window_sees_both_of_its_ends():
    """Values are one-hot, so the output spells out which keys each row saw."""
    q = torch.zeros(1, 10, 1, 4)
    v = torch.eye(10)[None, :, None]
    out, _ = attention_reference(q, torch.zeros(1, 10, 1, 4), v, window_size=(2, 1))
    for i in range(10):
        seen = [j for j in range(10) if out[0, i, 0, j] > 0]
        assert seen == [j for j in range(10) if i - 2 <= j <= i + 1]


def test_c13_gradients_are_finite_and_zero_where_a_row_sees_no_key():
    torch.manual_seed(0)
    q = (3 * torch.randn(256, 1, 32)).half()
    k, v = (3 * torch.randn(2, 3, 1, 32)).half().unbind(0)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    cu_q = [0, 76, 110, 256]
    out, _ = attention_reference(
        *inputs, causal=True, cu_seqlens_q=int32(cu_q), cu_seqlens_k=int32([0, 1, 2, 3])
    )
    out.backward(torch.ones_like(out))
    dq, dk, dv = (t.grad for t in inputs)
    # One key and bottom-right alignment: only the last row of a sequence sees it, with weight 1.
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv == 1).all()
    last = torch.tensor(cu_q[1:]) - 1
    assert torch.equal(out[last], v)
    assert torch.equal(out.flatten(1).count_nonzero(dim=1) > 0, torch.isin(torch.arange(256), last))


def test_c14_sequences_without_queries_are_skipped():
    torch.manual_seed(0)
    packed_equals_dense(
        torch.randn(2, 9, 64),
        torch.randn(8, 3, 64),
        torch.randn(8, 3, 64),
        [0, 0, 1, 1, 2],
        [0, 0, 3, 3, 8],
        causal=True,
        softmax_scale=1.0,
    )


def test_c15_one_query_and_one_key_return_the_value():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 21, 120), torch.randn(1, 7, 120), torch.randn(1, 7, 120)
    cu = int32([0, 0, 0, 0, 1])
    out, _ = attention_reference(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert torch.equal(out, v.repeat_interleave(3, dim=1))


def test_c16_keys_of_sequences_without_queries_get_zero_gradients():
    torch.manual_seed(0)
    cu_q, cu_k = [0, 0, 120, 204, 204], [0, 253, 428, 512, 819]  # a tenth of the reported size
    _, _, (_, dk, dv) = packed_equals_dense(
        torch.randn(204, 4, 64), torch.randn(819, 1, 64), torch.randn(819, 1, 64), cu_q, cu_k
    )
    for grad in (dk, dv):
        assert (grad[:253] == 0).all()
        assert (grad[512:] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_c17_c18_c21_packed_equals_each_sequence_alone(causal):
    torch.manual_seed(0)
    for lengths_q, lengths_k in (
        ([0, 0, 103], [0, 1, 205]),
        ([1, 127, 128, 129, 30, 64], [1, 127, 128, 129, 30, 64]),
        ([1, 200, 3, 129], [1, 200, 3, 129]),
    ):
        cu_q, cu_k = cumulative(lengths_q).tolist(), cumulative(lengths_k).tolist()
        packed_equals_dense(
            torch.randn(cu_q[-1], 6, 16),
            torch.randn(cu_k[-1], 2, 16),
            torch.randn(cu_k[-1], 2, 16),
            cu_q,
            cu_k,
            causal=causal,
        )


def test_c19_rows_after_the_last_sequence_are_zero_and_get_zero_gradients():
    torch.manual_seed(0)
    inputs = [torch.randn(946, 2, 8) for _ in range(3)]
    for t in inputs:
        t[944:] = NAN
        t.requires_grad_()
    cu = int32([0, 144, 432, 944])
    out, lse = attention_reference(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu)
    grad_out = torch.ones_like(out)
    grad_out[944:] = NAN
    out.backward(grad_out)
    for t in (out, *(t.grad for t in inputs)):
        assert (t[944:] == 0).all()
        assert t.isfinite().all()
    assert (lse[:, 944:] == -INF).all()


@pytest.mark.parametrize("causal", [False, True])
def test_c20_unused_rows_of_a_dense_batch_are_padding(causal):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 64, 4, 16, requires_grad=True) for _ in range(3)]
    used_q, used_k = [64, 38, 0], [64, 1, 10]
    out, lse = attention_reference(
        *inputs, causal=causal, seqused_q=int32(used_q), seqused_k=int32(used_k)
    )
    grads = torch.autograd.grad(out.sum(), inputs)
    for b, (sq, sk) in enumerate(zip(used_q, used_k, strict=True)):
        q, k, v = inputs
        alone = (q[b : b + 1, :sq], k[b : b + 1, :sk], v[b : b + 1, :sk])
        out_b, lse_b = attention_reference(*alone, causal=causal)
        torch.testing.assert_close(out[b, :sq], out_b[0])
        torch.testing.assert_close(lse[b, :, :sq], lse_b[0])
        assert (out[b, sq:] == 0).all()
        assert (lse[b, :, sq:] == -INF).all()
        for grad, used in zip(grads, (sq, sk, sk), strict=True):
            assert (grad[b, used:] == 0).all()


def test_c24_padding_inside_packed_rows_is_never_read():
    torch.manual_seed(0)
    inputs = [torch.randn(256, 2, 16) for _ in range(3)]
    padding = torch.ones(256, dtype=torch.bool)
    padding[:100] = padding[128 : 128 + 77] = False
    for t in inputs:
        t[padding] = NAN
        t.requires_grad_()
    cu, used = int32([0, 128, 256]), int32([100, 77])
    out, _ = attention_reference(
        *inputs, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used, seqused_k=used
    )
    grads = torch.autograd.grad(out.sum(), inputs)
    for t in (out, *grads):
        assert (t[padding] == 0).all()
        assert t.isfinite().all()
    alone, _ = attention_reference(*(t[None, 128:205] for t in inputs), causal=True)
    torch.testing.assert_close(out[128:205], alone[0])


def test_c44_one_query_and_one_key_have_no_score_gradient():
    torch.manual_seed(0)
    q, k, v = ((3 * torch.randn(1000, 1, 1, 16)).half().requires_grad_() for _ in range(3))
    out, _ = attention_reference(q, k, v)
    out.backward(torch.ones_like(out))
    assert (q.grad == 0).all()
    assert (k.grad == 0).all()
    assert (v.grad == 1).all()


def test_c52_incoming_gradients_may_have_any_strides():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 8).bfloat16().requires_grad_() for _ in range(3))
    out, _ = attention_reference(q, k, v, causal=True)
    values = torch.randn(1, 2, 5, 16).bfloat16()
    for grad_out in (values[..., :8].transpose(1, 2), torch.ones(()).bfloat16().expand_as(out)):
        grads = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), grad_out.contiguous(), retain_graph=True)
        for a, e in zip(grads, expected, strict=True):
            assert torch.equal(a, e)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(1, 0, 7), (1, 7, 0), (0, 7, 7)])
def test_c59_empty_problems_give_empty_or_zero_results_and_gradients(
    packed, batch, seqlen_q, seqlen_k
):
    q = torch.randn(batch, seqlen_q, 2, 64, requires_grad=True)
    k = torch.randn(batch, seqlen_k, 2, 64, requires_grad=True)
    v = torch.randn(batch, seqlen_k, 2, 32, requires_grad=True)
    sink = torch.randn(2, requires_grad=True)
    if packed:
        out, lse = attention_reference(
            *(t.flatten(0, 1) for t in (q, k, v)),
            sink=sink,
            cu_seqlens_q=cumulative([seqlen_q] * batch),
            cu_seqlens_k=cumulative([seqlen_k] * batch),
        )
        assert out.shape == (batch * seqlen_q, 2, 32)
        assert lse.shape == (2, batch * seqlen_q)
    else:
        out, lse = attention_reference(q, k, v, sink=sink)
        assert out.shape == (batch, seqlen_q, 2, 32)
        assert lse.shape == (batch, 2, seqlen_q)
    assert (out == 0).all()
    assert (lse == -INF).all()
    for grad in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sink)):
        assert (grad == 0).all()


def test_c67_the_default_scale_is_one_over_the_root_of_the_head_dim():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 4, 8).half().unbind(0)
    assert torch.equal(
        attention_reference(q, k, v)[0],
        attention_reference(q, k, v, softmax_scale=8**-0.5)[0],
    )


@pytest.mark.parametrize("causal", [False, True])
def test_c101_parts_of_the_keys_merge_into_the_whole(causal):
    """A part that ends before the last key is a window with that much room on its right."""
    torch.manual_seed(0)
    seqlen_q, seqlen_k = 24, 64
    q = torch.randn(1, seqlen_q, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, seqlen_k, 2, 8, dtype=torch.float64).unbind(0)
    whole, whole_lse = attention_reference(q, k, v, causal=causal)
    outs, lses = [], []
    for start in range(0, seqlen_k, 16):
        end = start + 16
        right = seqlen_k - end if causal else -1
        part = (k[:, start:end], v[:, start:end])
        out, lse = attention_reference(q, *part, window_size=(-1, right))
        outs.append(out)
        lses.append(lse)
    merged_lse = torch.stack(lses).logsumexp(0)
    weights = [(lse - merged_lse).exp().transpose(1, 2)[..., None] for lse in lses]
    merged = sum(w * out for w, out in zip(weights, outs, strict=True))
    torch.testing.assert_close(merged_lse, whole_lse)
    torch.testing.assert_close(merged, whole)
