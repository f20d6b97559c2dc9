"""Gradients of exact attention in plain PyTorch, from the forward pass's output and LSE.

With x, p and delta as below, for every query i and key j that i sees

    x[i, j]  = softmax_scale * <q[i], k[j]>,  y = softcap * tanh(x / softcap) or x
    p[i, j]  = exp(y[i, j] - lse[i])
    delta[i] = <grad_out[i], out[i]> - grad_lse[i]
    dy[i, j] = p[i, j] * (<grad_out[i], v[j]> - delta[i])
    dx[i, j] = dy[i, j] * (1 - (y / softcap)^2) or dy[i, j]

    dq[i] = softmax_scale * sum_j dx[i, j] k[j]        dv[j] = sum_i p[i, j] grad_out[i]
    dk[j] = softmax_scale * sum_i dx[i, j] q[i]        dsink = -sum_i exp(sink - lse[i]) delta[i]

The same arithmetic as the kernels': nothing is normalised again, and no N x N matrix is kept.
Method: Dao et al. 2022 (FlashAttention), algorithm 4; the LSE's gradient enters through delta.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa4.launch import Lengths
from fa4.problem import AttentionProblem
from fa4.reference import (
    _hidden,
    _Rows,
    _rows_per_chunk,
    _Rule,
    first_visible_row,
    visible_keys,
)


class Gradients(NamedTuple):
    """Of the inputs, each with its input's shape and dtype; dsink is None without a sink."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def attention_backward_reference(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> Gradients:
    """Gradients of `fa4.reference.attention_reference`, on any device.

    q, k, v, lengths, sink  the forward pass's inputs, in its shapes; options are in ``problem``
    out, lse                its results
    grad_out, grad_lse      gradients of those, in their shapes; grad_lse None is zero

    float64 inputs are computed in float64, all others in float32. Rows of padding, queries that
    see no key and keys that no query sees get exactly 0, and none of their rows are read: NaN
    there reaches nothing.
    """
    rule = _Rule(
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        left=problem.window_left,
        right=problem.window_right,
        compute_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    dq, dk, dv = (
        torch.zeros(t.shape, dtype=rule.compute_dtype, device=t.device) for t in (q, k, v)
    )
    dsink = None
    if sink is not None:
        dsink = torch.zeros(sink.shape, dtype=rule.compute_dtype, device=sink.device)
    # From here on (heads, rows) follow the batch or nothing, as rows and heads of q do.
    lse_rows = lse.transpose(-1, -2)
    grad_lse_rows = None if grad_lse is None else grad_lse.transpose(-1, -2)
    if lengths == Lengths():
        operands = (q, k, v, sink, out, lse_rows, grad_out, grad_lse_rows)
        _accumulate(*operands, dq, dk, dv, dsink, rule)
    else:
        rows_q = _Rows.of(q, lengths.cu_seqlens_q, lengths.seqused_q, "q")
        rows_k = _Rows.of(k, lengths.cu_seqlens_k, lengths.seqused_k, "k")
        none = [None] * len(rows_q.used)
        sides_q = [rows_q.split(t) for t in (q, out, lse_rows, grad_out, dq)]
        sides_k = [rows_k.split(t) for t in (k, v, dk, dv)]
        grad_lses = none if grad_lse_rows is None else rows_q.split(grad_lse_rows)
        for i in range(len(rows_q.used)):
            q_i, out_i, lse_i, grad_out_i, dq_i = (side[i][None] for side in sides_q)
            k_i, v_i, dk_i, dv_i = (side[i][None] for side in sides_k)
            grad_lse_i = None if (given := grad_lses[i]) is None else given[None]
            operands = (q_i, k_i, v_i, sink, out_i, lse_i, grad_out_i, grad_lse_i)
            _accumulate(*operands, dq_i, dk_i, dv_i, dsink, rule)
    return Gradients(
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dsink is None or sink is None else dsink.to(sink.dtype),
    )


def _accumulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsink: Tensor | None,
    rule: _Rule,
) -> None:
    """Write dq, and add to dk, dv and dsink, for sequences of one length.

    All (batch, rows, heads, dim), lse and grad_lse (batch, rows, heads). Query rows go in chunks
    whose scores fit `fa4.reference.SCORE_CHUNK_BYTES`.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    group = heads_q // heads_kv if heads_kv else 0
    left, right, wide = rule.left, rule.right, rule.compute_dtype
    first_row = first_visible_row(seqlen_q, seqlen_k, right)
    if first_row == seqlen_q or not batch * heads_q:
        return

    def stacked(x: Tensor) -> Tensor:
        """(batch, rows, heads_q, ...) to (batch, heads_kv, group * rows, ...), widened."""
        x = x.to(wide).transpose(1, 2)
        return x.reshape(batch, heads_kv, group * x.shape[2], *x.shape[3:])

    rows = _rows_per_chunk(batch * heads_q, seqlen_k, rule)
    for start in range(first_row, seqlen_q, rows):
        end = min(seqlen_q, start + rows)
        key_start, key_end = visible_keys(start, end, seqlen_q, seqlen_k, left, right)
        num_keys = key_end - key_start
        # (batch, heads_kv, keys, dim)
        k_chunk = k[:, key_start:key_end].to(wide).transpose(1, 2)
        v_chunk = v[:, key_start:key_end].to(wide).transpose(1, 2)
        q_chunk = stacked(q[:, start:end])
        grad_chunk = stacked(grad_out[:, start:end])
        delta = (grad_chunk * stacked(out[:, start:end])).sum(dim=-1)
        if grad_lse is not None:
            delta = delta - stacked(grad_lse[:, start:end])
        lse_chunk = stacked(lse[:, start:end])

        y = (q_chunk @ k_chunk.transpose(-1, -2)) * rule.softmax_scale
        if rule.softcap:
            y = torch.tanh(y / rule.softcap) * rule.softcap
        p = torch.exp(y - lse_chunk[..., None])
        hidden = _hidden(
            end - start, num_keys, start + seqlen_k - seqlen_q - key_start, rule, q.device
        )
        if hidden is not None:
            shape = p.shape
            by_head = p.view(batch, heads_kv, group, end - start, num_keys)
            p = by_head.masked_fill(hidden, 0.0).view(shape)
        dx = p * (grad_chunk @ v_chunk.transpose(-1, -2) - delta[..., None])
        if rule.softcap:
            dx = dx * (1.0 - (y / rule.softcap) ** 2)
        if hidden is not None:
            # Neither the NaN nor the infinity of a hidden pair counts.
            shape = dx.shape
            by_head = dx.view(batch, heads_kv, group, end - start, num_keys)
            dx = by_head.masked_fill(hidden, 0.0).view(shape)

        dq_chunk = (dx @ k_chunk) * rule.softmax_scale
        dq_chunk = dq_chunk.view(batch, heads_q, end - start, head_dim)
        dq[:, start:end] = dq_chunk.transpose(1, 2)
        dk_chunk = (dx.transpose(-1, -2) @ q_chunk) * rule.softmax_scale
        dk[:, key_start:key_end] += dk_chunk.transpose(1, 2)
        dv[:, key_start:key_end] += (p.transpose(-1, -2) @ grad_chunk).transpose(1, 2)
        if sink is not None and dsink is not None:
            weight = torch.exp(
                sink.to(wide).view(heads_kv, group, 1)
                - lse_chunk.view(batch, heads_kv, group, end - start)
            )
            drawn = weight * delta.view(weight.shape)
            dsink -= drawn.sum(dim=(0, 3)).view(heads_q)
