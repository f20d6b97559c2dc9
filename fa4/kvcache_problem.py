"""What is asked of attention over a cache: arguments checked, and reduced to a record."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4.problem import (
    DTYPE_NAMES,
    MAX_ROWS,
    _check_dtypes,
    _check_lengths,
    _check_out,
    _check_sink,
    _real,
    check_window,
    last_stride_fault,
    widest_access,
)
from fa4.reference import mask_bounds

MAX_SPLITS = 256
ROTARY_MULTIPLE = 16


@dataclass(frozen=True)
class KVCacheProblem:
    """What is asked, without the tensors. Frozen and hashable; dispatch decides on nothing else.

    dtype           of q, k, v and the caches: "bf16", "fp16", "fp32" or "fp64"
    batch           sequences
    seqlen_q        query rows of a sequence; where packed, the most that the caller promises
    rows_q          rows of q: of each sequence when dense, of all together when packed
    heads_q         query heads, a multiple of heads_kv
    head_dim        of q and k
    head_dim_v      of v and the output
    slots           pages, or entries, of the caches
    slot_rows       page size, or capacity of an entry
    table_pages     pages of a sequence in the page table, 0 without
    has_equal_lengths  whether the host knows that all sequences have equally many queries and keys
    new_rows        rows of k and v: of each sequence when dense, of all when packed, 0 without
    softmax_scale   finite real
    softcap         0.0 is off
    window_left     how far left of its diagonal a query sees, inclusive; None is unbounded
    window_right    how far right, causal masking already included; None is unbounded
    sink_dtype      dtype of the sink logits, None without a sink
    packed_q        q is (total_q, heads, head_dim) with cu_seqlens_q
    packed_new      k and v are packed with cu_seqlens_k_new
    has_leftpad     cache_leftpad is given
    addressing      "own", "batch_idx" or "page_table", see `fa4.kernels.features`
    rotary_dim      0 without rotary
    rotary          "interleaved" or "half", None without
    rotary_dtype    of cos and sin, None without
    has_rotary_seqlens  rotary_seqlens is given
    num_splits      0 is automatic
    layout_fault    why a kernel cannot address one of the tensors, None if it can
    cache_align     bytes, up to 16, that the caches' addresses and strides are multiples of
    q_align         likewise of q and the output
    new_align       likewise of k, v and the rotary tables
    """

    dtype: str
    batch: int
    seqlen_q: int
    rows_q: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    slots: int
    slot_rows: int
    new_rows: int
    softmax_scale: float
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    sink_dtype: str | None = None
    packed_q: bool = False
    packed_new: bool = False
    has_leftpad: bool = False
    addressing: str = "own"
    rotary_dim: int = 0
    rotary: str | None = None
    rotary_dtype: str | None = None
    has_rotary_seqlens: bool = False
    num_splits: int = 0
    table_pages: int = 0
    has_equal_lengths: bool = False
    layout_fault: str | None = None
    cache_align: int = 16
    q_align: int = 16
    new_align: int = 16

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads_q // self.heads_kv

    @property
    def has_queries(self) -> bool:
        """Whether there is any output element."""
        return self.rows_q * self.heads_q * (1 if self.packed_q else self.batch) > 0

    @property
    def has_keys(self) -> bool:
        return self.batch * self.slots * self.slot_rows > 0

    @property
    def needs_grad(self) -> bool:
        """Never: `describe_kvcache` refuses it."""
        return False

    @property
    def page_size(self) -> int | None:
        return self.slot_rows if self.addressing == "page_table" else None

    @property
    def capacity(self) -> int:
        """Positions that a sequence may have in use at most."""
        return self.slot_rows * (self.table_pages if self.addressing == "page_table" else 1)

    @property
    def has_new(self) -> bool:
        """Whether there may be a row to append."""
        return self.new_rows * (1 if self.packed_new else self.batch) * self.heads_kv > 0

    def __str__(self) -> str:
        extent = f"{self.rows_q} packed rows" if self.packed_q else f"{self.rows_q} rows"
        if self.addressing == "page_table":
            cache = f"{self.slots} pages of {self.slot_rows}"
        else:
            cache = f"{self.slots} entries of {self.slot_rows}"
        options = [f"scale {self.softmax_scale:.6g}"]
        if (self.window_left, self.window_right) != (None, None):
            left, right = (
                "unbounded" if bound is None else bound
                for bound in (self.window_left, self.window_right)
            )
            options.append(f"window left {left}, right {right}")
        for present, words in (
            (self.softcap, f"softcap {self.softcap:g}"),
            (self.sink_dtype, f"sink {self.sink_dtype}"),
            (self.has_leftpad, "leftpad"),
            (self.has_new, f"{self.new_rows} {'packed ' if self.packed_new else ''}rows appended"),
            (self.rotary, f"{self.rotary} rotary of {self.rotary_dim} dims"),
            (self.num_splits, f"{self.num_splits} splits"),
            (self.cache_align < 16, f"caches aligned to {self.cache_align} bytes"),
            (self.q_align < 16, f"q or out aligned to {self.q_align} bytes"),
            (self.new_align < 16, f"k, v or rotary tables aligned to {self.new_align} bytes"),
        ):
            if present:
                options.append(words)
        return (
            f"{self.dtype}, batch {self.batch}; q: {extent}, {self.heads_q} heads, "
            f"dim {self.head_dim}; cache: {cache}, {self.heads_kv} heads, "
            f"dims {self.head_dim} and {self.head_dim_v}; {', '.join(options)}"
        )


def describe_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    *,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    max_seqlen_q: int | None,
    rotary_seqlens: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float | None,
    sink: Tensor | None,
    rotary_interleaved: bool,
    num_splits: int,
    out: Tensor | None,
) -> KVCacheProblem:
    """Check shapes, dtypes, devices and options, and return the problem they pose.

    Reads no tensor contents, so it never synchronises. Raises TypeError for a wrong type or dtype
    and ValueError for a wrong value or shape; the message names the argument, what came and what is
    allowed.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
    _check_dtypes(q, k_cache, v_cache)
    packed_q, packed_new = cu_seqlens_q is not None, cu_seqlens_k_new is not None
    _check_modes("q", q, packed_q, "cu_seqlens_q", "(total_q, heads, head_dim)")
    paged = page_table is not None
    layout = "(pages, page_size, heads, head_dim)" if paged else "(batch, rows, heads, head_dim)"
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {layout}.")
        _check_device(name, tensor, q)
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)} and k_cache {tuple(k_cache.shape)}; "
            "all but the head dim must be equal."
        )
    heads_q, head_dim = q.shape[-2:]
    slots, slot_rows, heads_kv, head_dim_v = v_cache.shape
    if k_cache.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim of q is {head_dim} and of k_cache {k_cache.shape[-1]}; they must be equal."
        )
    if head_dim < 1 or head_dim_v < 1:
        raise ValueError(f"head_dim={head_dim} and head_dim_v={head_dim_v} must be at least 1.")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(
            f"heads_q={heads_q} is not a multiple of heads_kv={heads_kv}; each key head serves "
            "the same number of query heads."
        )
    if slot_rows > MAX_ROWS:
        raise ValueError(f"k_cache has {slot_rows} rows an entry; the most is {MAX_ROWS}.")
    if paged and slot_rows == 0:
        raise ValueError("k_cache has pages of 0 rows; the page size must be at least 1.")
    batch = _batch_of(q, cu_seqlens_q)
    _check_addressing(k_cache, cache_batch_idx, page_table, batch, q)
    _check_new(q, k_cache, v_cache, k, v, cu_seqlens_k_new, batch)
    _check_cache_seqlens(cache_seqlens, k, paged, slot_rows, cache_leftpad)
    rotary_dim = _check_rotary(q, k, rotary_cos, rotary_sin, rotary_seqlens)
    for name, vector, entries, meaning in (
        ("cu_seqlens_q", cu_seqlens_q, batch + 1, "batch + 1"),
        ("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, "batch + 1"),
        ("cache_seqlens", cache_seqlens, batch, "batch"),
        ("cache_leftpad", cache_leftpad, batch, "batch"),
        ("rotary_seqlens", rotary_seqlens, batch, "batch"),
    ):
        if vector is not None and not isinstance(vector, int):
            _check_lengths(name, vector, entries, meaning, q.device)
    if sink is not None:
        _check_sink(sink, heads_q, q.device)
    if out is not None:
        _check_out(out, (*q.shape[:-1], head_dim_v), q)
    given = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v))
    if torch.is_grad_enabled():
        for name, candidate in (*given, ("sink", sink)):
            if candidate is not None and candidate.requires_grad:
                raise NotImplementedError(
                    f"{name} requires grad, and attention over a cache has no gradients: it "
                    "changes the cache in place. Call it under torch.no_grad()."
                )
    seqlen_q = q.shape[-3]
    if max_seqlen_q is not None:
        bound = _integer("max_seqlen_q", max_seqlen_q, 0, MAX_ROWS)
        if packed_q:
            seqlen_q = min(seqlen_q, bound)
        elif bound < seqlen_q:
            raise ValueError(f"max_seqlen_q={bound} is below the {seqlen_q} rows of q.")

    scale = _real("softmax_scale", softmax_scale, default=1.0 / math.sqrt(head_dim))
    cap = _real("softcap", softcap, default=0.0)
    if cap < 0.0:
        raise ValueError(f"softcap={softcap} is negative; use 0 for none or a positive cap.")
    left, right = mask_bounds(bool(causal), check_window(window_size))
    rotary = None
    if rotary_dim:
        rotary = "interleaved" if rotary_interleaved else "half"
    tables = (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin))
    named = (*given, ("out", out), *tables)
    faults = [last_stride_fault(name, t) for name, t in named if t is not None]
    return KVCacheProblem(
        dtype=DTYPE_NAMES[q.dtype],
        batch=batch,
        seqlen_q=seqlen_q,
        rows_q=q.shape[-3],
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        slots=slots,
        slot_rows=slot_rows,
        new_rows=0 if k is None else k.shape[-3],
        softmax_scale=scale,
        softcap=cap,
        window_left=left,
        window_right=right,
        sink_dtype=None if sink is None else DTYPE_NAMES[sink.dtype],
        packed_q=packed_q,
        packed_new=packed_new,
        has_leftpad=cache_leftpad is not None,
        addressing="page_table" if paged else "own" if cache_batch_idx is None else "batch_idx",
        rotary_dim=rotary_dim,
        rotary=rotary,
        rotary_dtype=None if rotary_cos is None else DTYPE_NAMES[rotary_cos.dtype],
        has_rotary_seqlens=rotary_seqlens is not None,
        num_splits=_integer("num_splits", num_splits, 0, MAX_SPLITS),
        table_pages=0 if page_table is None else page_table.shape[1],
        has_equal_lengths=not packed_q
        and (
            batch == 1
            or not (isinstance(cache_seqlens, Tensor) or packed_new or cache_leftpad is not None)
        ),
        layout_fault=next(filter(None, faults), None),
        cache_align=widest_access(k_cache, v_cache),
        q_align=widest_access(*(t for t in (q, out) if t is not None)),
        new_align=widest_access(*(t for t in (k, v, rotary_cos, rotary_sin) if t is not None)),
    )


def _check_modes(name: str, tensor: Tensor, packed: bool, vector: str, packed_form: str) -> None:
    if tensor.dim() != (3 if packed else 4):
        wanted = packed_form if packed else "(batch, seqlen, heads, head_dim)"
        given = "with" if packed else "without"
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; {given} {vector} it must be {wanted}."
        )
    if tensor.shape[-3] > MAX_ROWS:
        raise ValueError(f"{name} has {tensor.shape[-3]} rows; the most is {MAX_ROWS}.")


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; they must be on one.")


def _batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    if cu_seqlens_q is None:
        return q.shape[0]
    if not isinstance(cu_seqlens_q, Tensor):
        raise TypeError(f"cu_seqlens_q must be an int32 tensor, got {type(cu_seqlens_q).__name__}.")
    if cu_seqlens_q.dim() != 1 or not len(cu_seqlens_q):
        raise ValueError(
            f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}; it must be (batch + 1,)."
        )
    return len(cu_seqlens_q) - 1


def _check_addressing(
    k_cache: Tensor,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    batch: int,
    q: Tensor,
) -> None:
    if page_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx names entries of a cache without pages; with page_table, choose "
                "the table's rows instead."
            )
        if not isinstance(page_table, Tensor):
            raise TypeError(f"page_table must be an int32 tensor, got {type(page_table).__name__}.")
        if page_table.dtype != torch.int32:
            raise TypeError(f"page_table has dtype {page_table.dtype}; it must be torch.int32.")
        if page_table.dim() != 2 or page_table.shape[0] != batch:
            raise ValueError(
                f"page_table has shape {tuple(page_table.shape)}; it must be (batch, pages) with "
                f"batch {batch}."
            )
        if page_table.shape[1] > 1 and page_table.stride(1) != 1:
            raise ValueError(
                f"page_table has stride {page_table.stride(1)} in its last dimension; it must be 1."
            )
        _check_device("page_table", page_table, q)
        if page_table.shape[1] * k_cache.shape[1] > MAX_ROWS:
            raise ValueError(
                f"page_table names {page_table.shape[1]} pages of {k_cache.shape[1]} rows a "
                f"sequence; the most is {MAX_ROWS} rows."
            )
    elif cache_batch_idx is not None:
        _check_lengths("cache_batch_idx", cache_batch_idx, batch, "batch", q.device)
    elif k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} entries for a batch of {batch}; they must be equal "
            "unless cache_batch_idx or page_table says which belong to a sequence."
        )


def _check_new(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    batch: int,
) -> None:
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{given} is given and {missing} is not; keys come with their values.")
    if k is None or v is None:
        if cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new is given without k and v, whose lengths it tells.")
        return
    packed = cu_seqlens_k_new is not None
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}, q {q.dtype}; they must be equal.")
        _check_modes(name, tensor, packed, "cu_seqlens_k_new", "(total_k_new, heads, head_dim)")
        _check_device(name, tensor, q)
        if tensor.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and {name}_cache {tuple(cache.shape)}; "
                "heads and head dim must be equal."
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}; all but the head dim must be "
            "equal."
        )
    if not packed and k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]}, q {batch}; they must be equal.")


def _check_cache_seqlens(
    cache_seqlens: Any,
    k: Tensor | None,
    paged: bool,
    slot_rows: int,
    cache_leftpad: Tensor | None,
) -> None:
    if cache_seqlens is None:
        for given, reason in (
            (k is not None, "k is appended behind the positions in use"),
            (paged, "a page table may name more pages than are in use"),
            (cache_leftpad is not None, "cache_leftpad is a part of the positions in use"),
        ):
            if given:
                raise ValueError(f"cache_seqlens must be given: {reason}.")
    elif not isinstance(cache_seqlens, Tensor):
        length = _integer("cache_seqlens", cache_seqlens, 0, MAX_ROWS)
        if not paged and length > slot_rows:
            raise ValueError(f"cache_seqlens={length} is above the {slot_rows} rows of k_cache.")


def _check_rotary(
    q: Tensor,
    k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_seqlens: Tensor | None,
) -> int:
    """rotary_dim, 0 without rotary."""
    if rotary_cos is None or rotary_sin is None:
        if rotary_cos is not None or rotary_sin is not None:
            missing = "rotary_sin" if rotary_sin is None else "rotary_cos"
            raise ValueError(f"{missing} is missing; rotary_cos and rotary_sin come together.")
        if rotary_seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos and rotary_sin.")
        return 0
    if k is None:
        raise ValueError(
            "rotary_cos is given without k and v: rotary embedding is applied to appended keys and "
            "the queries with them. Without new keys, rotate q before the call."
        )
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if not isinstance(table, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(table).__name__}.")
        if table.dtype not in (q.dtype, torch.float32) or table.dtype != rotary_cos.dtype:
            raise TypeError(
                f"{name} has dtype {table.dtype}; both tables must have q's, {q.dtype}, or both "
                "torch.float32."
            )
        if table.dim() != 2 or table.shape != rotary_cos.shape:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; both tables must be "
                "(positions, rotary_dim / 2)."
            )
        _check_device(name, table, q)
    rotary_dim = 2 * rotary_cos.shape[1]
    if rotary_dim == 0 or rotary_dim % ROTARY_MULTIPLE or rotary_dim > q.shape[-1]:
        raise ValueError(
            f"rotary_dim={rotary_dim}, twice the columns of rotary_cos, must be a multiple of "
            f"{ROTARY_MULTIPLE} from {ROTARY_MULTIPLE} to head_dim={q.shape[-1]}."
        )
    return rotary_dim


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be an int, got a tensor; reading it would wait for the GPU.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}.") from None
    if not least <= number <= most:
        raise ValueError(f"{name}={number} is not between {least} and {most}.")
    return number


def check_cache_contents(
    q: Tensor,
    k_cache: Tensor,
    k: Tensor | None,
    rotary_cos: Tensor | None,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    max_seqlen_q: int | None,
    rotary_seqlens: Tensor | None,
    advances: bool,
) -> None:
    """Read and validate what the normal mode trusts; for arguments that `describe_kvcache` passed.

    advances  query i is rotated to its own position, so that it needs that row of the tables

    Raises ValueError naming the first entry that does not fit, the bound, and the sequence.
    """
    batch = len(cache_seqlens)
    lengths = cache_seqlens.tolist()
    new = _row_counts("cu_seqlens_k_new", cu_seqlens_k_new, k, batch)
    queries = _row_counts("cu_seqlens_q", cu_seqlens_q, q, batch)
    pads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    turned = lengths if rotary_seqlens is None else rotary_seqlens.tolist()
    rows = k_cache.shape[1]
    capacity = rows if page_table is None else rows * page_table.shape[1]
    tables = None if page_table is None else page_table.tolist()
    slots = None if cache_batch_idx is None else cache_batch_idx.tolist()
    for b in range(batch):
        end = lengths[b] + new[b]
        if lengths[b] < 0 or end > capacity:
            raise ValueError(
                f"cache_seqlens[{b}] is {lengths[b]}, with {new[b]} rows to append; sequence {b} "
                f"has room for 0 to {capacity}."
            )
        if not 0 <= pads[b] <= lengths[b]:
            raise ValueError(
                f"cache_leftpad[{b}] is {pads[b]}; it must be from 0 to cache_seqlens[{b}], "
                f"{lengths[b]}."
            )
        if max_seqlen_q is not None and queries[b] > max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q is {max_seqlen_q}, but sequence {b} has {queries[b]} query rows."
            )
        if slots is not None and not 0 <= slots[b] < k_cache.shape[0]:
            raise ValueError(
                f"cache_batch_idx[{b}] is {slots[b]}; k_cache has {k_cache.shape[0]} entries."
            )
        if tables is not None:
            for column in range(pads[b] // rows, -(-end // rows)):
                if not 0 <= tables[b][column] < k_cache.shape[0]:
                    raise ValueError(
                        f"page_table[{b}, {column}] is {tables[b][column]}; k_cache has "
                        f"{k_cache.shape[0]} pages."
                    )
        if rotary_cos is not None:
            last = turned[b] + max(new[b], queries[b] if advances else min(queries[b], 1))
            if turned[b] < 0 or last > len(rotary_cos):
                raise ValueError(
                    f"sequence {b} is rotated to the positions {turned[b]} to {last - 1}; "
                    f"rotary_cos has {len(rotary_cos)}."
                )
    if slots is not None and k is not None and len(set(slots)) < batch:
        raise ValueError("cache_batch_idx names one entry twice, and both append to it.")


def _row_counts(name: str, cu_seqlens: Tensor | None, tensor: Tensor | None, batch: int) -> list:
    """Rows of each sequence."""
    if tensor is None:
        return [0] * batch
    if cu_seqlens is None:
        return [tensor.shape[1]] * batch
    starts = cu_seqlens.tolist()
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], tensor.shape[0]], strict=True)):
        if start < 0 or end < start or (i == 0 and start != 0):
            raise ValueError(
                f"{name} must begin with 0, never fall and not pass row {tensor.shape[0]}: entry "
                f"{i} is {start}."
            )
    return [end - start for start, end in itertools.pairwise(starts)]
