"""Attention by tiles with a running softmax: the arithmetic of the kernels, readable and slow.

A softmax over keys that arrive in blocks needs three things per query row: the largest score so far
(m), the sum of exp(score - m) so far (l), and the sum of exp(score - m) * v so far (acc). Two such
states over disjoint sets of keys merge into the state over their union,

    m = max(m1, m2),   l = exp(m1 - m) l1 + exp(m2 - m) l2,   acc likewise,

an associative and commutative operation whose identity is (-inf, 0, 0). The order of blocks, their
grouping and the number of workers that share a row are therefore free.

    scores [1, 2] then [3], values [10, 20] then [30]
    after the first block   m = 2, l = 1.3679, acc = 23.679
    after the second        m = 3, l = 1.5032, acc = 38.711,  out = acc / l = 25.7521

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", for (m, l) and
its merge; Dao 2023, "FlashAttention-2", for the loop order (query blocks outside, key blocks
inside) and the division that waits until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa4.reference import first_visible_row, mask_bounds, visible_keys


class SoftmaxState(NamedTuple):
    """What is known of some query rows after some of their keys.

    row_max  (..., rows) largest score; -inf for a row that has seen no key
    row_sum  (..., rows) sum of exp(score - row_max); 0 for a row that has seen no key
    acc      (..., rows, head_dim_v) sum of exp(score - row_max) * value; 0 likewise
    """

    row_max: Tensor
    row_sum: Tensor
    acc: Tensor


def empty_state(like: SoftmaxState) -> SoftmaxState:
    """The identity of `merge`: no key seen, with the shapes of `like`."""
    return SoftmaxState(
        torch.full_like(like.row_max, -math.inf),
        torch.zeros_like(like.row_sum),
        torch.zeros_like(like.acc),
    )


def block_state(scores: Tensor, values: Tensor) -> SoftmaxState:
    """The state after one block of keys.

    scores  (..., rows, keys), -inf where a row does not see a key; a block may be hidden entirely
    values  (..., keys, head_dim_v), finite

    keys may be 0.
    """
    if scores.shape[-1] == 0:
        row_max = scores.new_full(scores.shape[:-1], -math.inf)
    else:
        row_max = scores.amax(dim=-1)
    p = torch.exp(scores - _finite_or_zero(row_max)[..., None])
    return SoftmaxState(row_max, p.sum(dim=-1), p @ values)


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state over the keys of both; a and b must not share a key."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = _finite_or_zero(row_max)
    factor_a = torch.exp(a.row_max - shift)
    factor_b = torch.exp(b.row_max - shift)
    return SoftmaxState(
        row_max,
        factor_a * a.row_sum + factor_b * b.row_sum,
        factor_a[..., None] * a.acc + factor_b[..., None] * b.acc,
    )


def with_sink(state: SoftmaxState, sink: Tensor) -> SoftmaxState:
    """Add a logit that takes probability and has no value; sink broadcasts against the rows.

    A row that has seen no key stays as it is: it is an empty row, whatever its sink.
    """
    sink = sink.expand_as(state.row_max)
    sink_state = SoftmaxState(sink, torch.ones_like(state.row_sum), torch.zeros_like(state.acc))
    merged = merge(state, sink_state)
    is_empty = torch.isneginf(state.row_max)
    return SoftmaxState(
        torch.where(is_empty, state.row_max, merged.row_max),
        torch.where(is_empty, state.row_sum, merged.row_sum),
        torch.where(is_empty[..., None], state.acc, merged.acc),
    )


def finalise(state: SoftmaxState) -> tuple[Tensor, Tensor]:
    """(out, lse): acc / l and m + log(l); a row that has seen no key gives (0, -inf)."""
    is_empty = torch.isneginf(state.row_max)
    row_sum = torch.where(is_empty, torch.ones_like(state.row_sum), state.row_sum)
    return state.acc / row_sum[..., None], state.row_max + torch.log(row_sum)


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tile_m: int,
    tile_n: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over dense tensors in tiles of tile_m query rows by tile_n keys.

    q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v), sink (heads_q,). Same options, results and edges as
    `fa4.reference.attention_reference`, from which it differs by rounding only; no gradient.

    Key blocks are aligned to multiples of tile_n. Blocks that no row of the query block sees are
    skipped, and a block that some rows see is cut to the keys that they see between them.
    """
    if tile_m < 1 or tile_n < 1:
        raise ValueError(f"tile_m and tile_n must be at least 1; got {tile_m} and {tile_n}.")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    left, right = mask_bounds(causal, window_size)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_kv, head_dim_v = v.shape[1:]
    group = heads_q // heads_kv
    out = q.new_zeros((batch, seqlen_q, heads_q, head_dim_v))
    lse = q.new_full((batch, heads_q, seqlen_q), -math.inf, dtype=dtype)

    # (batch, heads_kv, group, seqlen, dim): a key head broadcasts over its group of query heads.
    q_heads = q.unflatten(2, (heads_kv, group)).permute(0, 2, 3, 1, 4)
    k_heads = k.permute(0, 2, 1, 3)[:, :, None]
    v_heads = v.permute(0, 2, 1, 3)[:, :, None]

    first_row = first_visible_row(seqlen_q, seqlen_k, right)
    for row_start in range(first_row, seqlen_q, tile_m):
        row_end = min(seqlen_q, row_start + tile_m)
        key_start, key_end = visible_keys(row_start, row_end, seqlen_q, seqlen_k, left, right)
        q_tile = q_heads[..., row_start:row_end, :].to(dtype)
        rows = torch.arange(row_start, row_end, device=q.device)[:, None]
        diagonal = rows + (seqlen_k - seqlen_q)
        state: SoftmaxState | None = None
        for block_start in range(key_start // tile_n * tile_n, key_end, tile_n):
            keys = slice(max(key_start, block_start), min(key_end, block_start + tile_n))
            scores = scale * (q_tile @ k_heads[..., keys, :].to(dtype).transpose(-1, -2))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            key_idx = torch.arange(keys.start, keys.stop, device=q.device)
            hidden = torch.zeros_like(diagonal + key_idx, dtype=torch.bool)
            if right is not None:
                hidden |= key_idx > diagonal + right
            if left is not None:
                hidden |= key_idx < diagonal - left
            block = block_state(
                scores.masked_fill(hidden, -math.inf), v_heads[..., keys, :].to(dtype)
            )
            state = block if state is None else merge(state, block)
        assert state is not None, "every row from first_visible_row on sees a key"
        if sink is not None:
            state = with_sink(state, sink.to(dtype).reshape(heads_kv, group, 1))
        out_tile, lse_tile = finalise(state)
        out[:, row_start:row_end] = out_tile.flatten(1, 2).transpose(1, 2).to(q.dtype)
        lse[:, :, row_start:row_end] = lse_tile.flatten(1, 2)
    return out, lse


def _finite_or_zero(row_max: Tensor) -> Tensor:
    """A shift for exp: 0 in place of the -inf of rows without keys, as -inf - -inf is NaN."""
    return torch.where(torch.isneginf(row_max), torch.zeros_like(row_max), row_max)
