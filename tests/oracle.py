"""The right answer and how far from it an answer may be: shared by the CPU and the GPU tests.

`Case` is one call as a record, `make_inputs` its tensors; `check` runs it through the public API
and judges everything about it. Values are new in every run; a failure names the seed that repeats
it (`FA4_TEST_SEED=... pytest ...`).

How good is good enough
    The answer is float64 attention of the very inputs. The best peer is PyTorch math in the same
    dtype with a float32 softmax: scores, maximum and sum in float32, probabilities rounded to the
    input dtype for the product with v, that product summed in float32, its result rounded once.
    An output may err by

        1.5 x the peer's largest error  +  one rounding (eps / 2) of the largest exact value.

    The second term is there for small outputs, where the peer may happen to be exact. Both maxima
    are taken over rows that see about as many keys (within a factor of two), not over the whole
    output: the first row of a causal mask has values of order 1 and the 10,000th of order 0.01, so
    that one budget for both would let the latter be wrong altogether.
    The LSE may err by 1e-3 plus 1e-5 of its magnitude.
    Where NaN and infinities stand is compared first, and rows without keys must be exactly 0.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import fa4
from fa4.reference import attention_reference, first_visible_row, mask_bounds, visible_keys

NAN = float("nan")
INF = float("inf")

PEER_FACTOR = 1.5
LSE_ABSOLUTE, LSE_RELATIVE = 1e-3, 1e-5

# Quiet NaNs that no computation produces, as integers of the element's size: what fills memory that
# a call must not touch.
SENTINELS = {2: 0x7FE5, 4: 0x7FE5E5E5, 8: 0x7FFCE5E5E5E5E5E5}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 1024  # elements before and behind an output

STORAGES = ("contiguous", "heads_first", "fused", "shared_head")
DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Case:
    """One call.

    seqlens_q, seqlens_k  rows of each sequence; where dense, all equal
    used_q, used_k        rows in use of each sequence (seqused_*), None for all
    packed_q, packed_k    packed with cu_seqlens_*, else dense
    tail_q, tail_k        rows behind the last packed sequence
    head_dim_v            None: head_dim
    sink                  dtype of the sink logits, None for no sink
    storage               where elements lie, see `place`
    spread                factor on q: how far apart the scores are
    """

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window_size: tuple[int | None, int | None] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: torch.dtype | None = None
    packed_q: bool = False
    packed_k: bool = False
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    tail_q: int = 0
    tail_k: int = 0
    storage: str = "contiguous"
    spread: float = 1.0

    def __post_init__(self) -> None:
        assert len(self.seqlens_q) == len(self.seqlens_k)
        assert self.packed_q or len(set(self.seqlens_q)) <= 1, "dense: equal lengths"
        assert self.packed_k or len(set(self.seqlens_k)) <= 1, "dense: equal lengths"
        assert self.heads_q % self.heads_kv == 0
        assert self.storage in STORAGES

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @property
    def is_varlen(self) -> bool:
        return self.packed_q or self.packed_k or (self.used_q, self.used_k) != (None, None)

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def __str__(self) -> str:
        def side(lengths, packed, used, tail):
            text = str(lengths[0]) if lengths else "none"
            if packed:
                text = "+".join(map(str, lengths[:4])) + ("+.." if len(lengths) > 4 else "")
            if used is not None:
                text += " used " + "+".join(map(str, used[:4])) + ("+.." if len(used) > 4 else "")
            return text + (f" tail {tail}" if tail else "")

        dims = f"d{self.head_dim}" + (f"/{self.dim_v}" if self.dim_v != self.head_dim else "")
        parts = [
            DTYPE_NAMES[self.dtype],
            f"b{self.batch}",
            "q " + side(self.seqlens_q, self.packed_q, self.used_q, self.tail_q),
            "k " + side(self.seqlens_k, self.packed_k, self.used_k, self.tail_k),
            f"h{self.heads_q}/{self.heads_kv}",
            dims,
        ]
        if self.causal:
            parts.append("causal")
        if set(self.window_size) - {None, -1}:
            parts.append("window {}..{}".format(*self.window_size))
        if self.softmax_scale is not None:
            parts.append(f"scale {self.softmax_scale:g}")
        if self.softcap:
            parts.append(f"cap {self.softcap:g}")
        if self.sink is not None:
            parts.append(f"sink {DTYPE_NAMES[self.sink]}")
        if self.storage != "contiguous":
            parts.append(self.storage)
        return " ".join(parts).replace(" ", "_")


@dataclass
class Inputs:
    """The tensors of a case. Tests may overwrite values; the answer is worked out from them."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    lengths: dict[str, Tensor] = field(default_factory=dict)
    seed: int | None = None

    @property
    def options(self) -> dict:
        """Keywords that the public functions and the reference share."""
        case = self.case
        return {
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
            "window_size": case.window_size,
            "softcap": case.softcap,
            "sink": self.sink,
        }

    @property
    def tensors(self) -> list[Tensor]:
        sink = [] if self.sink is None else [self.sink]
        return [self.q, self.k, self.v, *sink, *self.lengths.values()]


# Inputs --------------------------------------------------------------------------------------


def fresh_seed() -> int:
    """FA4_TEST_SEED where it is set, else a new one."""
    given = os.environ.get("FA4_TEST_SEED")
    return int.from_bytes(os.urandom(4), "little") if given is None else int(given)


def make_inputs(case: Case, device: str | torch.device = "cpu", seed: int | None = None) -> Inputs:
    """Normal random tensors, with NaN in every row that a call must not read."""
    seed = fresh_seed() if seed is None else seed
    gen = torch.Generator(device).manual_seed(seed)

    def values(shape: tuple[int, ...], factor: float, readable: Tensor) -> Tensor:
        x = torch.randn(shape, generator=gen, dtype=torch.float32, device=device)
        return x.mul_(factor).to(case.dtype).masked_fill_(~readable[..., None, None], NAN)

    rows_q, rows_k = row_shapes(case)
    live, seen = readable_rows(case, device)
    q = values((*rows_q, case.heads_q, case.head_dim), case.spread, live)
    k = values((*rows_k, case.heads_kv, case.head_dim), 1.0, seen)
    v = values((*rows_k, case.heads_kv, case.dim_v), 1.0, seen)
    sink = None
    if case.sink is not None:
        sink = torch.randn(case.heads_q, generator=gen, device=device).mul_(2).to(case.sink)

    lengths = {}
    for name, is_packed, seqlens, used in (
        ("q", case.packed_q, case.seqlens_q, case.used_q),
        ("k", case.packed_k, case.seqlens_k, case.used_k),
    ):
        if is_packed:
            cu_seqlens = list(itertools.accumulate(seqlens, initial=0))
            lengths[f"cu_seqlens_{name}"] = int32(cu_seqlens, device)
        if used is not None:
            lengths[f"seqused_{name}"] = int32(used, device)
    return Inputs(case, *place(case, q, k, v), sink, lengths, seed)


def int32(values, device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def row_shapes(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading shape of q and of k: (batch, seqlen) or (total,)."""

    def shape(seqlens, packed, tail):
        if packed:
            return (sum(seqlens) + tail,)
        return (len(seqlens), seqlens[0] if seqlens else 0)

    return (
        shape(case.seqlens_q, case.packed_q, case.tail_q),
        shape(case.seqlens_k, case.packed_k, case.tail_k),
    )


def sequences(case: Case) -> Iterator[tuple[tuple, tuple, int, int]]:
    """For each sequence, an index of its used rows in q and in k, and the two lengths."""
    starts_q = list(itertools.accumulate(case.seqlens_q, initial=0))
    starts_k = list(itertools.accumulate(case.seqlens_k, initial=0))

    def index(b, packed, start, length):
        return (slice(start, start + length),) if packed else (b, slice(0, length))

    for b in range(case.batch):
        seqlen_q = case.seqlens_q[b] if case.used_q is None else case.used_q[b]
        seqlen_k = case.seqlens_k[b] if case.used_k is None else case.used_k[b]
        yield (
            index(b, case.packed_q, starts_q[b], seqlen_q),
            index(b, case.packed_k, starts_k[b], seqlen_k),
            seqlen_q,
            seqlen_k,
        )


def readable_rows(case: Case, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Masks over the rows of q and of k: a query that sees a key, a key that a query sees."""
    rows_q, rows_k = row_shapes(case)
    live = torch.zeros(rows_q, dtype=torch.bool)
    seen = torch.zeros(rows_k, dtype=torch.bool)
    left, right = mask_bounds(case.causal, case.window_size)
    if not case.is_varlen and case.batch:
        first = first_visible_row(rows_q[1], rows_k[1], right)
        live[:, first:] = True
        if first < rows_q[1]:
            start, end = visible_keys(first, rows_q[1], rows_q[1], rows_k[1], left, right)
            seen[:, start:end] = True
    else:
        for iq, ik, seqlen_q, seqlen_k in sequences(case):
            first = first_visible_row(seqlen_q, seqlen_k, right)
            live[iq][first:] = True
            if first < seqlen_q:
                start, end = visible_keys(first, seqlen_q, seqlen_q, seqlen_k, left, right)
                seen[ik][start:end] = True
    return live.to(device), seen.to(device)


def padding_rows(case: Case, device: str | torch.device = "cpu") -> Tensor:
    """Mask over the rows of q: those of no sequence, or behind the used part of one."""
    padding = torch.ones(row_shapes(case)[0], dtype=torch.bool)
    if not case.is_varlen:
        padding[:] = False
    else:
        for iq, *_ in sequences(case):
            padding[iq] = False
    return padding.to(device)


def num_visible_keys(case: Case, device: str | torch.device = "cpu") -> Tensor:
    """Over the rows of q, how many keys each sees."""
    left, right = mask_bounds(case.causal, case.window_size)

    def count(seqlen_q: int, seqlen_k: int) -> Tensor:
        diagonal = torch.arange(seqlen_q) + (seqlen_k - seqlen_q)
        start = torch.zeros_like(diagonal) if left is None else (diagonal - left).clamp(min=0)
        end = torch.full_like(diagonal, seqlen_k)
        if right is not None:
            end = (diagonal + right + 1).clamp(max=seqlen_k)
        return (end - start).clamp(min=0)

    rows_q, rows_k = row_shapes(case)
    counts = torch.zeros(rows_q, dtype=torch.long)
    if not case.is_varlen and case.batch:
        counts[:] = count(rows_q[1], rows_k[1])
    else:
        for iq, _, seqlen_q, seqlen_k in sequences(case):
            counts[iq] = count(seqlen_q, seqlen_k)
    return counts.to(device)


def place(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same values in another storage, with NaN in the gaps.

    contiguous   as they are
    heads_first  (.., heads, rows, dim) in memory
    fused        q is the first heads of a buffer with room for k's and v's heads behind them, k and
                 v are halves of one buffer along the head dim
    shared_head  k and v have one head in memory that all heads share, stride 0; q is heads_first
    """
    if case.storage == "contiguous":
        return q, k, v
    if case.storage == "fused":
        heads = case.heads_q + 2 * case.heads_kv
        qkv = q.new_full((*q.shape[:-2], heads, q.shape[-1]), NAN)
        qkv[..., : case.heads_q, :] = q
        kv = torch.cat([k, v], dim=-1)
        return qkv[..., : case.heads_q, :], *kv.split([k.shape[-1], v.shape[-1]], dim=-1)
    q = q.transpose(-3, -2).contiguous().transpose(-3, -2)
    if case.storage == "shared_head":
        return q, k[..., :1, :].contiguous().expand_as(k), v[..., :1, :].contiguous().expand_as(v)
    k, v = (x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (k, v))
    return q, k, v


def one_sequence(inputs: Inputs, out: Tensor, lse: Tensor, b: int) -> tuple[Tensor, Tensor, Inputs]:
    """Sequence b by itself, as the dense problem it is: its part of out and lse, and its inputs.

    In the order of arguments of `assert_matches`.
    """
    iq, ik, seqlen_q, seqlen_k = next(itertools.islice(sequences(inputs.case), b, None))
    case = replace(
        inputs.case,
        seqlens_q=(seqlen_q,),
        seqlens_k=(seqlen_k,),
        packed_q=False,
        packed_k=False,
        used_q=None,
        used_k=None,
        tail_q=0,
        tail_k=0,
    )
    q, k, v = inputs.q[iq][None], inputs.k[ik][None], inputs.v[ik][None]
    lse = lse[:, iq[0]][None] if inputs.case.packed_q else lse[b, :, iq[1]][None]
    return out[iq][None], lse, Inputs(case, q, k, v, inputs.sink, {}, inputs.seed)


# Answers -------------------------------------------------------------------------------------


def exact_answer(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    options = inputs.options
    if options["sink"] is not None:
        options["sink"] = options["sink"].double()
    q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
    return attention_reference(q, k, v, **options, **inputs.lengths)


def peer_answer(inputs: Inputs) -> Tensor:
    """The output of PyTorch math in the inputs' dtype, as described at the top."""
    case = inputs.case
    q, k, v = inputs.q, inputs.k, inputs.v
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if not case.is_varlen:
        _peer(out, q, k, v, inputs)
    else:
        for iq, ik, *_ in sequences(case):
            _peer(out[iq][None], q[iq][None], k[ik][None], v[ik][None], inputs)
    return out


def _peer(out: Tensor, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> None:
    """Write the peer's answer for dense q, k, v, a few query rows at a time."""
    case, dtype = inputs.case, q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    left, right = mask_bounds(case.causal, case.window_size)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    group = heads_q // heads_kv
    first = first_visible_row(seqlen_q, seqlen_k, right)
    rows = max(1, (1 << 26) // max(1, batch * heads_q * seqlen_k))
    for start in range(first, seqlen_q, rows):
        end = min(seqlen_q, start + rows)
        keys = slice(*visible_keys(start, end, seqlen_q, seqlen_k, left, right))
        q_rows = q[:, start:end].to(wide).transpose(1, 2)
        q_rows = q_rows.reshape(batch, heads_kv, group * (end - start), head_dim)
        x = q_rows @ k[:, keys].to(wide).permute(0, 2, 3, 1) * scale
        if case.softcap:
            x = torch.tanh(x / case.softcap) * case.softcap
        x = x.view(batch, heads_kv, group, end - start, -1)
        diagonal = torch.arange(start, end, device=q.device)[:, None] + (seqlen_k - seqlen_q)
        j = torch.arange(keys.start, keys.stop, device=q.device)
        if right is not None:
            x.masked_fill_(j > diagonal + right, -INF)
        if left is not None:
            x.masked_fill_(j < diagonal - left, -INF)
        lse = torch.logsumexp(x, dim=-1, keepdim=True)
        if inputs.sink is not None:
            lse = torch.logaddexp(lse, inputs.sink.to(wide).reshape(heads_kv, group, 1, 1))
        p = torch.exp(x - lse).to(dtype).to(wide)
        p = p.view(batch, heads_kv, group * (end - start), -1)
        result = (p @ v[:, keys].to(wide).transpose(1, 2)).to(dtype)
        result = result.view(batch, heads_q, end - start, v.shape[-1])
        out[:, start:end] = result.transpose(1, 2)


# Judgement -----------------------------------------------------------------------------------


def assert_matches(out: Tensor, lse: Tensor, inputs: Inputs) -> None:
    """Fail, saying where and by how much, unless out and lse answer the inputs."""
    case = inputs.case
    context = f"\n  case {case}\n  seed {inputs.seed}"
    exact_out, exact_lse = exact_answer(inputs)
    assert out.dtype == inputs.q.dtype, f"out has dtype {out.dtype}{context}"
    assert lse.dtype == exact_lse.dtype or lse.dtype == torch.float32, f"lse: {lse.dtype}{context}"
    assert out.shape == exact_out.shape, f"out {out.shape}, not {exact_out.shape}{context}"
    assert lse.shape == exact_lse.shape, f"lse {lse.shape}, not {exact_lse.shape}{context}"

    for name, actual, exact in (("out", out, exact_out), ("lse", lse, exact_lse)):
        for kind, test in (
            ("NaN", torch.isnan),
            ("+inf", torch.isposinf),
            ("-inf", torch.isneginf),
        ):
            wrong = test(actual) != test(exact)
            if wrong.any():
                at = first_index(wrong)
                raise AssertionError(
                    f"{name}: {kind} or not is wrong in {int(wrong.sum())} of {wrong.numel()} "
                    f"elements, first at {where(name, at, case)}: {actual[at].item()}, "
                    f"expected {exact[at].item():.6g}{context}"
                )

    visible = num_visible_keys(case, out.device)
    stray = (visible == 0)[..., None, None] & (out != 0)
    if stray.any():
        at = first_index(stray)
        raise AssertionError(
            f"out: {int(stray.sum())} elements of rows that see no key are not 0, first at "
            f"{where('out', at, case)}: {out[at].item()}{context}"
        )

    lse_error = error_of(lse, exact_lse)
    over = lse_error > LSE_ABSOLUTE + LSE_RELATIVE * exact_lse.abs().nan_to_num(0, 0, 0)
    if over.any():
        at = index_of_largest(lse_error)
        raise AssertionError(
            f"lse: {int(over.sum())} of {over.numel()} elements are off, worst at "
            f"{where('lse', at, case)}: {lse[at].item():.7g}, expected {exact_lse[at].item():.7g}, "
            f"error {lse_error[at].item():.2e}{context}"
        )

    error = error_of(out, exact_out)
    budget = row_budgets(inputs, exact_out, visible)
    row_error = row_max(error)
    over = row_error > budget
    if over.any():
        row = index_of_largest(row_error / budget.clamp(min=1e-300) * over)
        at = (*row, *index_of_largest(error[row]))
        raise AssertionError(
            f"out: {int(over.sum())} of {over.numel()} rows are off, worst at "
            f"{where('out', at, case)}, which sees {int(visible[row])} keys: {out[at].item():.6g}, "
            f"expected {exact_out[at].item():.6g}, error {error[at].item():.2e}, allowed "
            f"{budget[row].item():.2e}{context}"
        )


def row_budgets(inputs: Inputs, exact_out: Tensor, visible: Tensor) -> Tensor:
    """The error each query row may have; rows that see about as many keys share one budget."""
    peer_error = row_max(error_of(peer_answer(inputs), exact_out))
    magnitude = row_max(exact_out.abs().nan_to_num(0, 0, 0))
    # Group 0: rows without keys. Group n: 2^(n-1) to 2^n - 1 keys.
    group = torch.where(visible > 0, visible.double().clamp(min=1).log2().floor() + 1, 0).long()
    one_rounding = torch.finfo(inputs.q.dtype).eps / 2
    budget = PEER_FACTOR * group_max(peer_error, group) + one_rounding * group_max(magnitude, group)
    return budget[group]


def group_max(per_row: Tensor, group: Tensor) -> Tensor:
    """The largest value of each group, by group number."""
    largest = torch.zeros(64, dtype=per_row.dtype, device=per_row.device)
    return largest.scatter_reduce(0, group.flatten(), per_row.flatten(), "amax")


def row_max(x: Tensor) -> Tensor:
    """Over heads and head dim, of (.., rows, heads, dim)."""
    return x.flatten(-2).amax(dim=-1)


def error_of(actual: Tensor, exact: Tensor) -> Tensor:
    """Absolute error; 0 where the exact value is not finite, which is judged by position."""
    return torch.where(exact.isfinite(), (actual.double() - exact).abs(), 0.0)


def first_index(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def index_of_largest(x: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def where(name: str, at: tuple[int, ...], case: Case) -> str:
    """An index in words."""
    rows = ("row",) if case.packed_q else ("batch", "row")
    if name == "out":
        axes: tuple[str, ...] = (*rows, "head", "dim")
    else:
        axes = ("head", "row") if case.packed_q else ("batch", "head", "row")
    text = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=True))
    if case.packed_q:
        row = at[axes.index("row")]
        starts = list(itertools.accumulate(case.seqlens_q, initial=0))
        owner = [b for b in range(case.batch) if starts[b] <= row < starts[b + 1]]
        text += f" (row {row - starts[owner[0]]} of sequence {owner[0]})" if owner else " (tail)"
    return text


# Running -------------------------------------------------------------------------------------


def attend(inputs: Inputs, backend: str, **keywords) -> tuple[Tensor, Tensor]:
    """(out, lse) by the public function that fits the case."""
    common = dict(inputs.options, backend=backend, return_lse=True, **keywords)
    if inputs.case.is_varlen:
        result = fa4.flash_attn_varlen_func(
            inputs.q, inputs.k, inputs.v, **inputs.lengths, **common
        )
    else:
        result = fa4.flash_attn_func(inputs.q, inputs.k, inputs.v, **common)
    out, lse = result
    return out, lse


def check(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """Everything that must hold of every call; returns its (out, lse).

    - out and lse match the answer although the memory they were given holds NaN
    - a second call has the same bits, written into a caller's `out` with guards around it: rows of
      padding and the guards keep theirs
    - inputs are unchanged
    """
    before = [bits(t).clone() for t in inputs.tensors]
    poison_freed_memory(inputs)
    out, lse = attend(inputs, backend)
    assert_matches(out, lse, inputs)
    assert_second_call_is_equal(out, lse, inputs, backend)
    for tensor, old in zip(inputs.tensors, before, strict=True):
        assert torch.equal(bits(tensor), old), f"an input was changed\n  case {inputs.case}"
    return out, lse


def assert_second_call_is_equal(out: Tensor, lse: Tensor, inputs: Inputs, backend: str) -> None:
    """Run again into a guarded `out`, stored as q is, and compare bit for bit."""
    context = f"\n  case {inputs.case}\n  seed {inputs.seed}"
    buffer, given = guarded(out, heads_first=inputs.case.storage in ("heads_first", "shared_head"))
    returned, lse_again = attend(inputs, backend, out=given)
    assert returned.data_ptr() == given.data_ptr(), f"another tensor than out= came back{context}"
    assert returned.stride() == given.stride(), f"another tensor than out= came back{context}"

    sentinel = SENTINELS[out.element_size()]
    assert_guards_hold(buffer, context)
    padding = padding_rows(inputs.case, out.device)
    touched = padding & (bits(given) != sentinel).flatten(-2).any(dim=-1)
    assert not touched.any(), (
        f"padding rows of out= were written, first {first_index(touched)}{context}"
    )
    differs = ~padding & (bits(given) != bits(out)).flatten(-2).any(dim=-1)
    assert not differs.any(), (
        f"the second call differs in {int(differs.sum())} rows, first {first_index(differs)}"
        f"{context}"
    )
    assert torch.equal(bits(lse_again), bits(lse)), f"the second call's lse differs{context}"


def guarded(like: Tensor, heads_first: bool = False) -> tuple[Tensor, Tensor]:
    """(buffer, out): `out` has the shape of `like` and lies inside a flat buffer of sentinels."""
    sentinel = SENTINELS[like.element_size()]
    buffer = torch.full(
        (like.numel() + 2 * GUARD,),
        sentinel,
        dtype=INTEGERS[like.element_size()],
        device=like.device,
    ).view(like.dtype)
    inside = buffer[GUARD:-GUARD]
    if not heads_first:
        return buffer, inside.view(like.shape)
    *lead, rows, heads, dim = like.shape
    return buffer, inside.view(*lead, heads, rows, dim).transpose(-3, -2)


def assert_guards_hold(buffer: Tensor, context: str = "") -> None:
    """The sentinels of a `guarded` buffer before and behind its output are still there."""
    for name, end in (("before", buffer[:GUARD]), ("behind", buffer[-GUARD:])):
        changed = int((bits(end) != SENTINELS[buffer.element_size()]).sum())
        assert not changed, f"{changed} elements {name} out= were written{context}"


def poison_freed_memory(inputs: Inputs) -> None:
    """Leave NaN in the blocks that the allocator hands out next for an output and an LSE."""
    q, v = inputs.q, inputs.v
    if q.device.type != "cuda":
        return
    for _ in range(2):
        out = q.new_full((*q.shape[:-1], v.shape[-1]), NAN)
        lse = torch.full(q.shape[:-1], NAN, device=q.device)
        del out, lse


def bits(x: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals itself and 0 differs from -0."""
    return x if x.dtype == torch.int32 else x.view(INTEGERS[x.element_size()])


def check_which_keys(case: Case, device: str | torch.device, backend: str) -> None:
    """Every row sees exactly the keys it should: none left out, none added.

    With q = 0 all visible keys weigh the same; with v[j] one-hot at j modulo head_dim_v, the output
    times the number of visible keys counts them by residue. Counts stay below 2^7, so that rounding
    the output to half precision cannot hide a miss.
    """
    assert case.softcap == 0
    assert case.sink is None
    inputs = make_inputs(case, device)
    live, seen = readable_rows(case, device)
    inputs.q.masked_fill_(live[..., None, None], 0.0)
    dim_v = case.dim_v
    for _, ik, _, seqlen_k in sequences(case):
        residue = torch.arange(seqlen_k, device=device) % dim_v
        one_hot = torch.nn.functional.one_hot(residue, dim_v).to(case.dtype)[:, None]
        inputs.v[ik] = torch.where(seen[ik][:, None, None], one_hot, NAN)
    out, lse = attend(inputs, backend)
    visible = num_visible_keys(case, device)
    context = f"\n  case {case}"

    counted = torch.exp(lse.double())  # exp(-inf) = 0 for a row without keys
    by_row = counted.transpose(-1, -2) if not case.packed_q else counted.T
    wrong = (by_row - visible[..., None]).abs() > 0.25
    assert not wrong.any(), (
        f"rows see another number of keys than they should, first (.., row, head) "
        f"{first_index(wrong)}: {by_row[first_index(wrong)].item():.2f}{context}"
    )
    left, right = mask_bounds(case.causal, case.window_size)
    for iq, _, seqlen_q, seqlen_k in sequences(case):
        diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
        j = torch.arange(seqlen_k, device=device)
        sees = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        if right is not None:
            sees &= j <= diagonal + right
        if left is not None:
            sees &= j >= diagonal - left
        one_hot = torch.nn.functional.one_hot(j % dim_v, dim_v).double()
        expected = sees.double() @ one_hot
        assert expected.numel() == 0 or expected.max() < 128, "sizes too large for this check"
        counts = (out[iq].double() * visible[iq][:, None, None]).round()
        wrong = (counts != expected[:, None]).any(dim=-1).any(dim=-1)
        assert not wrong.any(), (
            f"{int(wrong.sum())} rows see other keys than they should, first row "
            f"{first_index(wrong)[0]} of a sequence {seqlen_q} x {seqlen_k}{context}"
        )
