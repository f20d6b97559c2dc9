"""Exact attention in plain PyTorch: what kernels are measured against, and the fallback for them.

For query i and key j of one sequence with seqlen_q queries and seqlen_k keys

    x[i, j] = softmax_scale * <q[i], k[j]>,  then softcap * tanh(x / softcap) where a cap is given
    lse[i]  = log(sum over visible j of exp(x[i, j])  +  exp(sink))
    out[i]  = sum over visible j of exp(x[i, j] - lse[i]) * v[j]

Key j is visible to query i when  i + offset - left <= j <= i + offset + right  with
offset = seqlen_k - seqlen_q, so that the last query always meets the last key.

Everything is ordinary autograd code. No N x N matrix is kept: query rows go in chunks whose scores
fit SCORE_CHUNK_BYTES, and when a gradient is wanted and the scores do not fit one chunk, backward
computes each chunk again instead of storing it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# About four arrays of this size live at once inside a chunk (scores, probabilities, mask, a
# temporary): 256 MB together. One query row of one batch entry is the least a chunk can hold.
SCORE_CHUNK_BYTES = 64 << 20


def mask_bounds(causal: bool, window_size: Sequence[int | None]) -> tuple[int | None, int | None]:
    """How far left and right of its diagonal a query sees, both ends inclusive; None is unbounded.

    -1 and None both mean unbounded. Causal and window apply together: causal caps the right at 0.
    """
    left, right = (None if bound is None or bound == -1 else bound for bound in window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def first_visible_row(seqlen_q: int, seqlen_k: int, right: int | None) -> int:
    """The first query row that sees a key; seqlen_q where none does.

    Every later row sees one too: the last query meets the last key, and both bounds reach the
    diagonal.
    """
    if seqlen_k == 0:
        return seqlen_q
    return 0 if right is None else min(seqlen_q, max(0, seqlen_q - seqlen_k - right))


def visible_keys(
    first_row: int, end_row: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None
) -> tuple[int, int]:
    """The half-open range of keys that rows first_row .. end_row - 1 see between them.

    It has no holes: neighbouring rows see neighbouring ranges. Rows that see nothing add nothing.
    """
    offset = seqlen_k - seqlen_q
    start = 0 if left is None else max(0, first_row + offset - left)
    end = seqlen_k if right is None else min(seqlen_k, end_row + offset + right)
    return start, max(start, end)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention with every option, on any device, differentiable in q, k, v and sink.

    q     (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q
    k     (batch, seqlen_k, heads_kv, head_dim), or (total_k, heads_kv, head_dim) with cu_seqlens_k
    v     as k, with head_dim_v in place of head_dim
    sink  (heads_q,) logits that join the softmax denominator and the LSE; not scaled, not capped
    softmax_scale  any finite number; None is 1/sqrt(head_dim)
    softcap        0 or None is off
    cu_seqlens_*   (batch + 1,) first row of each sequence and the end of the last
    seqused_*      (batch,) rows in use at the start of each sequence

    Returns (out, lse). out has q's dtype and shape with head_dim_v; lse is the natural logarithm,
    (batch, heads_q, seqlen_q), packed (heads_q, total_q), and can be differentiated too. float64
    inputs are computed in float64, all others in float32, which is also the dtype of lse.

    Edges. A row that sees no key has output 0 and LSE -inf, with a sink as well, and exact zeros as
    gradients; so have rows of padding. Neither those rows of q (and of the incoming gradient) nor
    keys and values that no query of their sequence sees are read: NaN there reaches nothing. NaN in
    a key that some query sees may also reach other queries of its sequence.

    The arguments are taken as validated. Lengths on a device are copied to the host, which waits
    for it; ValueError where they do not fit the tensors, naming the first entry that does not.
    """
    left, right = mask_bounds(causal, window_size)
    rule = _Rule(
        softmax_scale=1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale,
        softcap=softcap or 0.0,
        left=left,
        right=right,
        compute_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    differentiated = [t for t in (q, k, v, sink) if t is not None and t.requires_grad]
    wants_grad = torch.is_grad_enabled() and bool(differentiated)
    device_type = q.device.type
    no_autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if torch.amp.is_autocast_available(device_type):
        # Autocast would turn the matrix products back into half precision.
        no_autocast = torch.autocast(device_type, enabled=False)

    with no_autocast:
        if cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None:
            lengths = [(q.shape[1], k.shape[1])] * q.shape[0]
            rule = rule._replace(recompute=wants_grad and _exceeds_chunk(q, lengths, rule))
            out, lse = _attend_batch(q, k, v, sink, rule)
        else:
            rows_q = _Rows.of(q, cu_seqlens_q, seqused_q, "q")
            rows_k = _Rows.of(k, cu_seqlens_k, seqused_k, "k")
            lengths = list(zip(rows_q.used, rows_k.used, strict=True))
            rule = rule._replace(recompute=wants_grad and _exceeds_chunk(q, lengths, rule))
            out, lse = _attend_ragged(q, k, v, sink, rows_q, rows_k, rule)

    if wants_grad and not any(first_visible_row(sq, sk, right) < sq for sq, sk in lengths):
        # No row sees a key, so nothing above depends on the inputs. An empty slice reads nothing
        # and sums to 0, and gives each input the gradient it is due: zeros, rather than none.
        nothing = torch.zeros((), dtype=rule.compute_dtype, device=q.device)
        for t in differentiated:
            nothing = nothing + t[:0].sum()
        out, lse = out + nothing.to(out.dtype), lse + nothing
    return out, lse


class _Rule(NamedTuple):
    """How scores become probabilities, and in which arithmetic."""

    softmax_scale: float
    softcap: float
    left: int | None
    right: int | None
    compute_dtype: torch.dtype
    recompute: bool = False  # backward computes scores again instead of keeping them


class _Rows(NamedTuple):
    """Where the sequences of one tensor lie: used and padding rows, in storage order.

    For a packed tensor `lead` padding rows come first, and padding[-1] runs to the tensor's end.
    """

    packed: bool
    lead: int
    used: list[int]
    padding: list[int]

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, name: str) -> _Rows:
        """Read the lengths to the host. name is "q" or "k", for messages."""
        if cu_seqlens is None:
            starts = [0] * x.shape[0]
            room = [x.shape[1]] * x.shape[0]
        else:
            starts = cu_seqlens.tolist()
            total = x.shape[0]
            for i, (start, end) in enumerate(itertools.pairwise([*starts, total])):
                if start < 0 or end < start:
                    limit = f"{name} has {end} rows" if i + 1 == len(starts) else f"the next {end}"
                    raise ValueError(
                        f"cu_seqlens_{name} must not fall, start below 0 or pass the last row: "
                        f"entry {i} is {start}, and {limit}."
                    )
            room = [end - start for start, end in itertools.pairwise(starts)]
        used = list(room) if seqused is None else seqused.tolist()
        for i, (length, rows) in enumerate(zip(used, room, strict=True)):
            if not 0 <= length <= rows:
                raise ValueError(
                    f"seqused_{name}[{i}] is {length}; sequence {i} has 0 to {rows} rows to use."
                )
        padding = [rows - length for rows, length in zip(room, used, strict=True)]
        if cu_seqlens is None:
            return cls(False, 0, used, padding)
        if not used:
            return cls(True, x.shape[0], used, padding)
        padding[-1] += x.shape[0] - starts[-1]
        return cls(True, starts[0], used, padding)

    def split(self, x: Tensor) -> list[Tensor]:
        """The used rows of each sequence, as views (length, heads, dim).

        One split for all, not one slice each: the backward of a slice writes a whole tensor of
        zeros, which for many sequences is quadratic work.
        """
        if not self.packed:
            return [row[:length] for row, length in zip(x.unbind(0), self.used, strict=True)]
        sizes = [self.lead]
        for length, padding in zip(self.used, self.padding, strict=True):
            sizes += [length, padding]
        return list(x.split(sizes)[1::2])

    def join(self, pieces: Sequence[Tensor], fill: float, empty: Tensor) -> Tensor:
        """Put results (length, ...) of the sequences in storage order, with `fill` in the padding.

        empty  a (0, ...) tensor that says dtype, device and trailing shape
        """
        parts = [_filled(empty, self.lead, fill)]
        for piece, padding in zip(pieces, self.padding, strict=True):
            parts += [piece, _filled(empty, padding, fill)]
        return torch.cat([part for part in parts if part.shape[0]] or [empty])


def _filled(like: Tensor, rows: int, fill: float) -> Tensor:
    return like.new_full((rows, *like.shape[1:]), fill)


def _exceeds_chunk(q: Tensor, lengths: list[tuple[int, int]], rule: _Rule) -> bool:
    """Whether the scores of the whole problem are more than one chunk holds."""
    scores = q.shape[-2] * sum(seqlen_q * seqlen_k for seqlen_q, seqlen_k in lengths)
    return scores * rule.compute_dtype.itemsize > SCORE_CHUNK_BYTES


def _attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    rows_q: _Rows,
    rows_k: _Rows,
    rule: _Rule,
) -> tuple[Tensor, Tensor]:
    """Each sequence on its own, then the results laid out as q is."""
    outs, lses = [], []
    pieces = (rows_q.split(q), rows_k.split(k), rows_k.split(v))
    for q_i, k_i, v_i in zip(*pieces, strict=True):
        out_i, lse_i = _attend(q_i[None], k_i[None], v_i[None], sink, rule)
        outs.append(out_i[0])
        lses.append(lse_i[0].T)
    heads_q, head_dim_v = q.shape[-2], v.shape[-1]
    out = rows_q.join(outs, 0.0, q.new_empty((0, heads_q, head_dim_v)))
    lse = rows_q.join(lses, -math.inf, q.new_empty((0, heads_q), dtype=rule.compute_dtype))
    if rows_q.packed:
        return out, lse.T.contiguous()
    batch, seqlen_q = q.shape[:2]
    lse = lse.view(batch, seqlen_q, heads_q).transpose(1, 2).contiguous()
    return out.view(batch, seqlen_q, heads_q, head_dim_v), lse


def _attend_batch(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, rule: _Rule
) -> tuple[Tensor, Tensor]:
    """Sequences of one length, (batch, seqlen, heads, dim), as many at a time as a chunk holds."""
    scores = q.shape[2] * q.shape[1] * k.shape[1] * rule.compute_dtype.itemsize
    batch_chunk = max(1, SCORE_CHUNK_BYTES // max(1, scores))
    if q.shape[0] <= batch_chunk:
        return _attend(q, k, v, sink, rule)
    chunks = zip(q.split(batch_chunk), k.split(batch_chunk), v.split(batch_chunk), strict=True)
    outs, lses = zip(*(_attend(*chunk, sink, rule) for chunk in chunks), strict=True)
    return torch.cat(outs), torch.cat(lses)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, rule: _Rule
) -> tuple[Tensor, Tensor]:
    """Sequences of one length, query rows in chunks.

    q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...).
    Returns out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q).
    """
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k = k.shape[1]
    left, right = rule.left, rule.right
    first_row = first_visible_row(seqlen_q, seqlen_k, right)
    outs = [q.new_zeros((batch, first_row, heads_q, v.shape[-1]))]
    lses = [q.new_full((batch, heads_q, first_row), -math.inf, dtype=rule.compute_dtype)]
    if first_row < seqlen_q:
        # Only what some row sees is touched from here on.
        first_key, end_key = visible_keys(first_row, seqlen_q, seqlen_q, seqlen_k, left, right)
        k = k[:, first_key:end_key].to(rule.compute_dtype)
        v = v[:, first_key:end_key].to(rule.compute_dtype)
        rows = _rows_per_chunk(max(1, batch * heads_q), seqlen_k, rule)
        for start in range(first_row, seqlen_q, rows):
            end = min(seqlen_q, start + rows)
            key_start, key_end = visible_keys(start, end, seqlen_q, seqlen_k, left, right)
            keys = slice(key_start - first_key, key_end - first_key)
            diagonal = start + seqlen_k - seqlen_q - key_start
            chunk = (q[:, start:end], k[:, keys], v[:, keys], sink, diagonal, rule)
            if rule.recompute:
                out, lse = checkpoint(
                    _attend_chunk, *chunk, use_reentrant=False, preserve_rng_state=False
                )
            else:
                out, lse = _attend_chunk(*chunk)
            outs.append(out)
            lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def _rows_per_chunk(heads: int, seqlen_k: int, rule: _Rule) -> int:
    """Query rows whose scores fit a chunk; heads counts those of every batch entry."""
    scores = SCORE_CHUNK_BYTES // (heads * rule.compute_dtype.itemsize)
    rows = scores // seqlen_k
    if rule.left is not None and rule.right is not None:
        # r rows of a band w wide meet r + w - 1 keys: the largest r with r * (r + w) <= scores.
        width = rule.left + rule.right + 1
        rows = max(rows, (math.isqrt(width * width + 4 * scores) - width) // 2)
    return max(1, rows)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, diagonal: int, rule: _Rule
) -> tuple[Tensor, Tensor]:
    """Some query rows against the keys they see between them; every row sees at least one.

    q (batch, rows, heads_q, head_dim); k, v (batch, keys, heads_kv, ...) in the compute dtype.
    diagonal  the key, counted within k, that lies on row 0's diagonal
    """
    batch, rows, heads_q, head_dim = q.shape
    out_dtype = q.dtype
    keys, heads_kv = k.shape[1], k.shape[2]
    group = heads_q // heads_kv  # query heads that share a key head: stacked as more rows
    q = q.to(rule.compute_dtype).transpose(1, 2) * rule.softmax_scale
    q = q.reshape(batch, heads_kv, group * rows, head_dim)
    x = (q @ k.permute(0, 2, 3, 1)).view(batch, heads_kv, group, rows, keys)
    if rule.softcap:
        x = torch.tanh(x / rule.softcap) * rule.softcap
    hidden = _hidden(rows, keys, diagonal, rule, q.device)
    if hidden is not None:
        x = x.masked_fill(hidden, -math.inf)

    # The maximum only shifts numerator and denominator alike, so it carries no gradient.
    row_max = x.detach().amax(dim=-1, keepdim=True)
    if sink is None:
        p = torch.exp(x - row_max)
        row_sum = p.sum(dim=-1, keepdim=True)
    else:
        sink = sink.to(rule.compute_dtype).reshape(heads_kv, group, 1, 1)
        row_max = torch.maximum(row_max, sink.detach())
        p = torch.exp(x - row_max)
        row_sum = p.sum(dim=-1, keepdim=True) + torch.exp(sink - row_max)
    out = (p.view(batch, heads_kv, group * rows, keys) @ v.transpose(1, 2)).view(
        batch, heads_kv, group, rows, v.shape[-1]
    )
    out = (out / row_sum).view(batch, heads_q, rows, v.shape[-1]).transpose(1, 2)
    lse = (row_max + torch.log(row_sum)).view(batch, heads_q, rows)
    return out.to(out_dtype), lse


def _hidden(
    rows: int, keys: int, diagonal: int, rule: _Rule, device: torch.device
) -> Tensor | None:
    """(rows, keys), True where the row does not see the key; None where every row sees all."""
    left, right = rule.left, rule.right
    if right is not None and diagonal + right >= keys - 1:
        right = None  # row 0 already sees the last key
    if left is not None and rows - 1 + diagonal - left <= 0:
        left = None  # the last row still sees key 0
    if left is None and right is None:
        return None
    key_idx = torch.arange(keys, dtype=torch.int32, device=device)
    row_idx = torch.arange(rows, dtype=torch.int32, device=device)
    distance = key_idx - (row_idx[:, None] + diagonal)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right is not None:
        hidden |= distance > right
    if left is not None:
        hidden |= distance < -left
    return hidden
