"""Attention as operators of torch: what tracers, compiled graphs and exported programs contain.

    torch.ops.fa4.attention_forward(q, k, v, ...) -> (out, lse)
    torch.ops.fa4.attention_forward_out(out, q, k, v, ...) -> lse; writes out, for inference
    torch.ops.fa4.attention_backward(grad_out, grad_lse, q, k, v, out, lse, ...)
        -> (dq, dk, dv, dsink)

One operator takes dense and packed tensors, as `fa4.flash_attn_varlen_func` does; the arguments are
that function's, with the window as two integers (-1 is unbounded). The public functions turn into
these where torch traces them; called directly they do the same, except that autocast does not
change what they are given. When they run, they take the path of `fa4.attention`; on fake and meta
tensors they give shapes and compile nothing.

All results are new and contiguous. dsink has no elements where there is no sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4.attention import answer_operator, problem_of_operator
from fa4.autograd import SECOND_DERIVATIVES, BackwardOptions, gradients, without_autocast
from fa4.checked_mode import check_varlen, is_checked
from fa4.launch import Lengths

_LENGTHS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, " + (
    "Tensor? seqused_k=None"
)
_BOUNDS = "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
_OPTIONS = (
    "Tensor? sink=None, float? softmax_scale=None, bool causal=False, SymInt window_left=-1, "
    "SymInt window_right=-1, float softcap=0.0, bool deterministic=False, "
    'str backend="auto", str? arch=None'
)


# -- what runs -----------------------------------------------------------------------------------


@torch.library.custom_op(
    "fa4::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_BOUNDS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention; see the module for the arguments."""
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    _check(q, k, lengths, max_seqlen_q, max_seqlen_k)
    # The dtypes of results were promised when the graph was traced.
    with without_autocast(q.device):
        out, lse = answer_operator(q, k, v, lengths, None, *options)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op(
    "fa4::attention_forward_out",
    mutates_args=("out",),
    schema=(
        f"(Tensor(a!) out, Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_BOUNDS}, {_OPTIONS}) "
        "-> Tensor"
    ),
)
def attention_forward_out(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *options: Any,
) -> Tensor:
    """lse of attention, whose output goes to ``out``; has no gradient."""
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    _check(q, k, lengths, max_seqlen_q, max_seqlen_k)
    with without_autocast(q.device):
        _, lse = answer_operator(q, k, v, lengths, out, *options)
    return lse.contiguous()


@torch.library.custom_op(
    "fa4::attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, "
        f"Tensor lse, {_LENGTHS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and sink from those of out and lse; a gradient that is None is zero."""
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if grad_out is None and grad_lse is None:
        raise ValueError("grad_out and grad_lse are both None; backward needs one of them.")
    problem = problem_of_operator(
        *(q, k, v, lengths, sink),
        *(softmax_scale, causal, (window_left, window_right), softcap),
    )
    dq, dk, dv, dsink = gradients(
        *(problem, q, k, v, lengths, sink, out, lse, grad_out, grad_lse),
        BackwardOptions(deterministic, backend, arch),
    )
    return dq, dk, dv, _sink_gradient(q, sink) if dsink is None else dsink


def _check(
    q: Tensor, k: Tensor, lengths: Lengths, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> None:
    if is_checked() and any(t is not None for t in lengths):
        check_varlen(
            q=q,
            k=k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **lengths._asdict(),
        )


def _sink_gradient(q: Tensor, sink: Tensor | None) -> Tensor:
    return q.new_empty((0,)) if sink is None else torch.empty_like(sink)


# -- what tracers are told -----------------------------------------------------------------------


@attention_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, *others: Any
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse_like(q, cu_seqlens_q)


@attention_forward_out.register_fake
def _(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *others: Any,
) -> Tensor:
    return lse_like(q, cu_seqlens_q)


@attention_backward.register_fake
def _(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sink: Tensor | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, _sink_gradient(q, sink)


def lse_like(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """An LSE for the queries q, not filled in."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if cu_seqlens_q is not None:
        rows, heads, _ = q.shape
        return q.new_empty((heads, rows), dtype=dtype)
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, heads, rows), dtype=dtype)


# -- gradients -----------------------------------------------------------------------------------

_NUM_LENGTHS = len(Lengths._fields)
# Arguments of attention_forward, by place.
_LENGTHS_AT = slice(3, 3 + _NUM_LENGTHS)
_SINK_AT = 3 + _NUM_LENGTHS + 2


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    q, k, v = inputs[:3]
    ctx.save_for_backward(q, k, v, *output, *inputs[_LENGTHS_AT], inputs[_SINK_AT])
    ctx.fa4_options = inputs[_SINK_AT + 1 :]
    ctx.fa4_num_inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    found: list[Tensor | None] = [None] * ctx.fa4_num_inputs
    if grad_out is not None or grad_lse is not None:
        kept = ctx.saved_tensors  # checkpointing lets them be read once
        dq, dk, dv, dsink = torch.ops.fa4.attention_backward(
            grad_out, grad_lse, *kept, *ctx.fa4_options
        )
        found[:3] = dq, dk, dv
        if kept[-1] is not None:
            found[_SINK_AT] = dsink
    return tuple(found)


def _refuse_second(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(SECOND_DERIVATIVES)


attention_forward.register_autograd(_backward, setup_context=_keep)
attention_backward.register_autograd(_refuse_second)
