"""Calls of attention over a cache as records, their tensors, and everything that must hold of one.

Shared by the CPU, emulator and GPU tests. Positions out of use, pages that belong to nobody and
table entries past the used part hold what a call must not touch: NaN, and page numbers far outside.
Errors are budgeted by `tests.oracle`, sequence by sequence.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fa4
from fa4.reference_kvcache import CacheAddressing, kvcache_reference, rotate
from tests.oracle import (
    NAN,
    SENTINELS,
    Case,
    Inputs,
    assert_guards_hold,
    assert_matches,
    bits,
    fresh_seed,
    guarded,
    int32,
)

WILD_PAGE = -123_456_789


@dataclass(frozen=True)
class CacheCase:
    """One call.

    lengths        positions in use of each sequence before appending
    seqlens_q      query rows of each; where dense, all equal
    new            rows appended to each, None for no k and v; where dense, all equal
    page_size      None: no pages
    leftpad        positions out of use in front of each, None for none
    rotary         "interleaved" or "half", None without; over rotary_dim dims
    rotary_base    rotary_seqlens, None for cache_seqlens
    packed_q, packed_new  packed with cu_seqlens
    tail_q         rows of q behind the last packed sequence
    shuffled       the cache has more entries than sequences, and cache_batch_idx names theirs
    heads_first    caches are (slots, heads, rows, dim) in memory, K and V in one buffer
    apart          elements between neighbouring heads of a cache, and in front of the first
    apart_new      likewise of q, k, v and the rotary tables' rows, and of a caller's output
    max_seqlen_q   passed on; "true" is the longest
    num_splits     passed on
    """

    lengths: tuple[int, ...]
    seqlens_q: tuple[int, ...] = ()
    new: tuple[int, ...] | None = None
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    page_size: int | None = None
    leftpad: tuple[int, ...] | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: torch.dtype | None = None
    rotary: str | None = None
    rotary_dim: int = 32
    rotary_dtype: torch.dtype | None = None
    rotary_base: tuple[int, ...] | None = None
    packed_q: bool = False
    packed_new: bool = False
    tail_q: int = 0
    shuffled: bool = False
    heads_first: bool = False
    apart: int = 0
    apart_new: int = 0
    max_seqlen_q: bool = False
    num_splits: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def rows_q(self) -> tuple[int, ...]:
        return self.seqlens_q or (1,) * self.batch

    @property
    def rows_new(self) -> tuple[int, ...]:
        return self.new or (0,) * self.batch

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def __str__(self) -> str:
        def few(numbers):
            return "+".join(map(str, numbers[:4])) + ("+.." if len(numbers) > 4 else "")

        parts = [
            str(self.dtype).removeprefix("torch."),
            f"q{few(self.rows_q)}",
            f"len{few(self.lengths)}",
            f"h{self.heads_q}-{self.heads_kv}",
            f"d{self.head_dim}" + (f"-{self.dim_v}" if self.dim_v != self.head_dim else ""),
        ]
        for name in (
            *("new", "page_size", "leftpad", "softcap", "softmax_scale", "rotary"),
            *("apart", "apart_new"),
        ):
            value = getattr(self, name)
            if value:
                parts.append(name + (few(value) if isinstance(value, tuple) else str(value)))
        for name in ("causal", "packed_q", "packed_new", "shuffled", "heads_first"):
            if getattr(self, name):
                parts.append(name)
        if self.window_size != (-1, -1):
            parts.append("window{}..{}".format(*self.window_size))
        if self.sink is not None:
            parts.append("sink")
        if self.num_splits:
            parts.append(f"splits{self.num_splits}")
        return "_".join(parts)


@dataclass
class CacheInputs:
    """The tensors of a case: everything but options, by argument name."""

    case: CacheCase
    arguments: dict[str, Tensor]
    storage: Tensor  # what the caches lie in
    seed: int

    @property
    def options(self) -> dict:
        case = self.case
        options = {
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
            "window_size": case.window_size,
            "softcap": case.softcap,
            "rotary_interleaved": case.rotary != "half",
            "num_splits": case.num_splits,
        }
        if case.max_seqlen_q:
            options["max_seqlen_q"] = max(case.rows_q)
        return options

    def clone(self) -> CacheInputs:
        """The same with caches of their own."""
        storage = self.storage.clone()
        arguments = dict(self.arguments)
        for name in ("k_cache", "v_cache"):
            old = arguments[name]
            arguments[name] = storage.as_strided(old.shape, old.stride(), old.storage_offset())
        return replace(self, arguments=arguments, storage=storage)


def make_cache_inputs(
    case: CacheCase, device: str | torch.device = "cpu", seed: int | None = None
) -> CacheInputs:
    """Normal random tensors, with NaN in every position that a call must not read."""
    seed = fresh_seed() if seed is None else seed
    gen = torch.Generator(device).manual_seed(seed)

    def values(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=gen, dtype=torch.float32, device=device)
        return x.to(case.dtype)

    batch, heads_kv = case.batch, case.heads_kv
    ends = [length + new for length, new in zip(case.lengths, case.rows_new, strict=True)]
    longest = max([*ends, 1])
    arguments: dict[str, Tensor] = {"cache_seqlens": int32(case.lengths, device)}

    # Which slot holds what: every sequence has room for the longest and a bit.
    if case.page_size is not None:
        rows = case.page_size
        columns = -(-longest // rows) + 1
        slots = batch * columns + 3
        owned = torch.randperm(slots, generator=gen, device=device)[: batch * columns]
        table = owned.view(batch, columns).int()
        used = torch.tensor([-(-end // rows) for end in ends], device=device)
        outside = torch.arange(columns, device=device) >= used[:, None]
        arguments["page_table"] = torch.where(outside, WILD_PAGE, table)
    else:
        rows = longest + 5
        slots = batch
        if case.shuffled:
            slots = batch + 2
            order = torch.randperm(slots, generator=gen, device=device)[:batch]
            arguments["cache_batch_idx"] = order.int()

    # Caches: NaN everywhere but in the positions in use.
    dims = (case.head_dim, case.dim_v)
    apart = case.apart
    wide = [dim + apart for dim in dims]
    storage = torch.full((apart + slots * rows * heads_kv * sum(wide),), NAN, device=device)
    storage = storage.to(case.dtype)
    if case.heads_first:
        both = storage[apart:].view(slots, heads_kv, rows, sum(wide)).transpose(1, 2)
        k_cache, v_cache = both.split(wide, dim=-1)
    else:
        k_cache, v_cache = storage[apart:].split([slots * rows * heads_kv * dim for dim in wide])
        k_cache = k_cache.view(slots, rows, heads_kv, wide[0])
        v_cache = v_cache.view(slots, rows, heads_kv, wide[1])
    k_cache, v_cache = k_cache[..., : dims[0]], v_cache[..., : dims[1]]
    addressing = CacheAddressing(arguments.get("page_table"), arguments.get("cache_batch_idx"))
    for b, (begin, end) in enumerate(live_positions(case)):
        position = torch.arange(begin, min(end, case.lengths[b]), device=device)
        where = addressing.slot_and_row(b, position, rows)
        k_cache[where] = values(len(position), heads_kv, dims[0])
        v_cache[where] = values(len(position), heads_kv, dims[1])
    arguments |= {"k_cache": k_cache, "v_cache": v_cache}

    def rows_of(counts: tuple[int, ...], packed: bool, tail: int) -> tuple[int, ...]:
        return (sum(counts) + tail,) if packed else (batch, counts[0] if counts else 0)

    q = values(*rows_of(case.rows_q, case.packed_q, case.tail_q), case.heads_q, case.head_dim)
    if case.packed_q:
        starts = list(itertools.accumulate(case.rows_q, initial=0))
        arguments["cu_seqlens_q"] = int32(starts, device)
        q[starts[-1] :] = NAN
    arguments["q"] = q
    if case.new is not None:
        shape = rows_of(case.new, case.packed_new, 0)
        arguments["k"] = values(*shape, heads_kv, dims[0])
        arguments["v"] = values(*shape, heads_kv, dims[1])
        if case.packed_new:
            starts = list(itertools.accumulate(case.new, initial=0))
            arguments["cu_seqlens_k_new"] = int32(starts, device)
    if case.leftpad is not None:
        arguments["cache_leftpad"] = int32(case.leftpad, device)
    if case.rotary is not None:
        base = case.rotary_base or case.lengths
        positions = max(base) + max([*case.rows_new, *case.rows_q])
        angle = torch.rand((positions, case.rotary_dim // 2), generator=gen, device=device) * 7
        dtype = case.rotary_dtype or case.dtype
        arguments |= {"rotary_cos": angle.cos().to(dtype), "rotary_sin": angle.sin().to(dtype)}
        if case.rotary_base is not None:
            arguments["rotary_seqlens"] = int32(case.rotary_base, device)
    if case.sink is not None:
        sink = torch.randn(case.heads_q, generator=gen, device=device).mul_(2)
        arguments["sink"] = sink.to(case.sink)
    for name in ("q", "k", "v", "rotary_cos", "rotary_sin"):
        if name in arguments:
            arguments[name] = moved_apart(arguments[name], case.apart_new)
    return CacheInputs(case, arguments, storage, seed)


def moved_apart(tensor: Tensor, apart: int) -> Tensor:
    """The same values, ``apart`` elements of NaN in front of the first row and behind each."""
    *lead, dim = tensor.shape
    buffer = torch.full((apart + tensor.numel() // dim * (dim + apart),), NAN, device=tensor.device)
    wide = buffer.to(tensor.dtype)[apart:].view(*lead, dim + apart)
    wide[..., :dim] = tensor
    return wide[..., :dim]


def live_positions(case: CacheCase) -> list[tuple[int, int]]:
    """For each sequence, the positions [begin, end) that some query sees, new ones included."""
    pads = case.leftpad or (0,) * case.batch
    live = []
    for b, (length, new, rows) in enumerate(
        zip(case.lengths, case.rows_new, case.rows_q, strict=True)
    ):
        begin, end = pads[b], length + new
        if case.window_size[0] != -1:
            begin = max(begin, end - rows - case.window_size[0])
        right = 0 if case.causal else case.window_size[1]
        if right != -1 and rows == 0:
            end = begin
        live.append((min(begin, length), end))
    return live


def attend(inputs: CacheInputs, backend: str, **keywords) -> tuple[Tensor, Tensor]:
    """(out, lse) of the public function."""
    return fa4.flash_attn_with_kvcache(
        **inputs.arguments, **inputs.options, backend=backend, return_lse=True, **keywords
    )


def check_cache_call(inputs: CacheInputs, backend: str) -> tuple[Tensor, Tensor]:
    """Everything that must hold of every call; returns its (out, lse).

    - the cache holds the new keys, rotated, and the new values, and is otherwise unchanged
    - out and lse match float64 attention over what the cache then holds, sequence by sequence
    - a second call, into a caller's `out` between guards, has the same bits; padding keeps its own
    - no other argument is changed
    """
    case = inputs.case
    context = f"\n  case {case}\n  seed {inputs.seed}"
    fresh, expected = inputs.clone(), inputs.clone()
    others = {n: t for n, t in inputs.arguments.items() if n not in ("k_cache", "v_cache")}
    before = {name: bits(tensor).clone() for name, tensor in others.items()}
    out, lse = attend(inputs, backend)

    kvcache_reference(
        **{name: t for name, t in expected.arguments.items() if name != "sink"},
        causal=case.causal,
        window_size=case.window_size,
        rotary_interleaved=case.rotary != "half",
    )
    assert_cache_matches(inputs, expected, context)
    assert_output_matches(out, lse, inputs)

    buffer, given = guarded(out)
    if case.apart_new:
        # Rows of the buffer one behind the other, each with a guard of its own.
        *lead, dim = out.shape
        buffer, given = guarded(out.new_empty(*lead, dim + case.apart_new))
        given, behind = given[..., :dim], given[..., dim:]
    returned, lse_again = attend(fresh, backend, out=given)
    assert returned.data_ptr() == given.data_ptr(), f"another tensor than out= came back{context}"
    assert_guards_hold(buffer, context)
    if case.apart_new:
        same = bits(behind) == SENTINELS[out.element_size()]
        assert same.all(), f"{int((~same).sum())} elements between rows of out= changed{context}"
    rows = sum(case.rows_q)
    if case.packed_q:
        padding = bits(given[rows:])
        assert (padding == SENTINELS[out.element_size()]).all(), f"padding was written{context}"
        assert (out[rows:] == 0).all(), f"padding of our own output is not 0{context}"
        assert (lse[:, rows:] == -float("inf")).all(), f"padding has an LSE{context}"
        given, out_used = given[:rows], out[:rows]
    else:
        out_used = out
    assert torch.equal(bits(given), bits(out_used)), f"the second call differs{context}"
    assert torch.equal(bits(lse_again), bits(lse)), f"the second call's lse differs{context}"
    assert torch.equal(bits(fresh.storage), bits(inputs.storage)), f"caches differ{context}"
    for name, old in before.items():
        assert torch.equal(bits(others[name]), old), f"{name} was changed{context}"
    return out, lse


def assert_cache_matches(inputs: CacheInputs, expected: CacheInputs, context: str) -> None:
    """Bit for bit, but for one rounding of rotated keys."""
    ours, theirs = inputs.arguments, expected.arguments
    v_differs = bits(ours["v_cache"]) != bits(theirs["v_cache"])
    assert not v_differs.any(), f"v_cache is wrong in {int(v_differs.sum())} elements{context}"
    k, exact = ours["k_cache"], theirs["k_cache"]
    differs = bits(k) != bits(exact)
    if inputs.case.rotary is not None:
        one_rounding = torch.finfo(k.dtype).eps * exact.abs().double() + 1e-7
        differs &= ~((k.double() - exact.double()).abs() <= one_rounding)
    assert not differs.any(), f"k_cache is wrong in {int(differs.sum())} elements{context}"


def assert_output_matches(out: Tensor, lse: Tensor, inputs: CacheInputs) -> None:
    """Each sequence against float64 attention over what the cache holds for it."""
    case, arguments = inputs.case, inputs.arguments
    q, k_cache, v_cache = (arguments[name] for name in ("q", "k_cache", "v_cache"))
    addressing = CacheAddressing(arguments.get("page_table"), arguments.get("cache_batch_idx"))
    starts = list(itertools.accumulate(case.rows_q, initial=0))
    pads = case.leftpad or (0,) * case.batch
    advances = case.causal or case.window_size != (-1, -1)
    for b, rows in enumerate(case.rows_q):
        mine = (slice(starts[b], starts[b + 1]),) if case.packed_q else (b,)
        q_b = q[mine]
        if case.rotary is not None:
            base = (case.rotary_base or case.lengths)[b]
            at = base + torch.arange(rows, device=q.device) * int(advances)
            cos, sin = arguments["rotary_cos"][at], arguments["rotary_sin"][at]
            q_b = rotate(q_b, cos, sin, case.rotary == "interleaved")
        end = case.lengths[b] + case.rows_new[b]
        position = torch.arange(pads[b], end, device=q.device)
        where = addressing.slot_and_row(b, position, k_cache.shape[1])
        one = Case(
            seqlens_q=(rows,),
            seqlens_k=(len(position),),
            heads_q=case.heads_q,
            heads_kv=case.heads_kv,
            head_dim=case.head_dim,
            head_dim_v=case.dim_v,
            dtype=case.dtype,
            causal=case.causal,
            window_size=case.window_size,
            softcap=case.softcap,
            softmax_scale=case.softmax_scale,
            sink=case.sink,
        )
        part = Inputs(
            one,
            q_b[None],
            k_cache[where][None],
            v_cache[where][None],
            arguments.get("sink"),
            {},
            inputs.seed,
        )
        lse_b = lse[:, mine[0]] if case.packed_q else lse[b]
        if rows:
            assert_matches(out[mine][None], lse_b[None], part)
