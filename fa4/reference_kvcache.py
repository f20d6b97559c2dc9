"""Attention over a key/value cache in plain PyTorch: appending, rotary, pages, then attention.

What `fa4.flash_attn_with_kvcache` is measured against, and the fallback for it. One sequence after
the other: its new keys are rotated and written to the cache, its keys are gathered into one
tensor, and `fa4.reference` attends to them. Lengths are read to the host, which waits for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa4.reference import attention_reference


class CacheAddressing(NamedTuple):
    """How positions of a sequence become rows of a cache (slots, rows, heads, dim).

    page_table   (batch, pages) slot of each page of a sequence; None: a sequence has one slot
    batch_idx    (batch,) slot of each sequence; None: its own index
    """

    page_table: Tensor | None = None
    batch_idx: Tensor | None = None

    def slot_and_row(self, sequence: int, positions: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Slot and row in it of each position (int64); ``rows`` a slot."""
        if self.page_table is not None:
            pages = self.page_table[sequence].long()
            return pages[positions // rows], positions % rows
        slot = sequence if self.batch_idx is None else int(self.batch_idx[sequence])
        return torch.full_like(positions, slot), positions


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the first 2 * cos.shape[-1] dims of x (rows, heads, dim), in float32.

    cos, sin     (rows, rotary_dim / 2)
    interleaved  pair i is the dims 2i and 2i + 1 (GPT-J); otherwise i and i + rotary_dim / 2 (NeoX)

    (a, b) becomes (a cos - b sin, a sin + b cos), rounded once to x's dtype. float64 stays float64.
    Method: Su et al. 2021 (RoFormer).
    """
    pairs = cos.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos[:, None].to(wide), sin[:, None].to(wide)
    turned = x[..., : 2 * pairs].to(wide)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
    first, second = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        turned = torch.stack([first, second], dim=-1).flatten(-2)
    else:
        turned = torch.cat([first, second], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], dim=-1)


def kvcache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sink: Tensor | None = None,
    rotary_interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """Append, rotate and attend; arguments as in `fa4.flash_attn_with_kvcache`, taken as validated.

    Writes the new keys and values to the cache in place. Returns (out, lse): out in q's layout
    with 0 in rows of padding, lse (batch, heads_q, seqlen_q) or packed (heads_q, total_q) with -inf
    there. Cache entries that no query of their sequence sees are not read.
    """
    addressing = CacheAddressing(page_table, cache_batch_idx)
    starts = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    batch = q.shape[0] if starts is None else len(starts) - 1
    new_starts = None if cu_seqlens_k_new is None else cu_seqlens_k_new.tolist()
    lengths = cache_seqlens.tolist()
    pads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    turned = lengths if rotary_seqlens is None else rotary_seqlens.tolist()
    rows = k_cache.shape[1]
    moves = causal or any(bound not in (None, -1) for bound in window_size)

    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    lse = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)  # heads last
    for b in range(batch):
        q_b = q[b] if starts is None else q[starts[b] : starts[b + 1]]
        if rotary_cos is not None and rotary_sin is not None:
            at = turned[b] + torch.arange(len(q_b), device=q.device) * int(moves)
            q_b = rotate(q_b, rotary_cos[at], rotary_sin[at], rotary_interleaved)
        end = lengths[b]
        if k is not None and v is not None:
            own = b if new_starts is None else slice(new_starts[b], new_starts[b + 1])
            k_b, v_b = k[own], v[own]
            step = torch.arange(len(k_b), device=q.device)
            if rotary_cos is not None and rotary_sin is not None:
                at = turned[b] + step
                k_b = rotate(k_b, rotary_cos[at], rotary_sin[at], rotary_interleaved)
            where = addressing.slot_and_row(b, end + step, rows)
            k_cache[where] = k_b
            v_cache[where] = v_b
            end += len(k_b)
        where = addressing.slot_and_row(b, torch.arange(pads[b], end, device=q.device), rows)
        out_b, lse_b = attention_reference(
            q_b[None],
            k_cache[where][None],
            v_cache[where][None],
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sink=sink,
        )
        mine = (b,) if starts is None else (slice(starts[b], starts[b + 1]),)
        out[mine] = out_b[0]
        lse[mine] = lse_b[0].T
    return out, lse.movedim(-1, -2).contiguous()


def combine_reference(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each set.

    out_partial  (num_splits, batch, seqlen_q, heads_q, head_dim_v) or packed (num_splits, total_q,
                 heads_q, head_dim_v); what a split without keys holds is not used
    lse_partial  (num_splits, batch, heads_q, seqlen_q) or packed (num_splits, heads_q, total_q)

        lse = log sum_s exp(lse_s),   out = sum_s exp(lse_s - lse) out_s

    Returns (out, lse) in float32 (float64 for float64 partial outputs). A row that no split saw a
    key of has output 0 and LSE -inf.
    """
    wide = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    lse_partial = lse_partial.to(wide)
    lse = torch.logsumexp(lse_partial, dim=0)
    weight = torch.exp(lse_partial - lse.masked_fill(lse == -math.inf, 0.0))
    weight = weight.movedim(-1, -2)[..., None]  # (num_splits, .., seqlen_q, heads_q, 1)
    out = torch.where(weight == 0, 0.0, out_partial.to(wide) * weight).sum(dim=0)
    return out, lse
