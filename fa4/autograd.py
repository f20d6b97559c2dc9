"""Attention as a node of autograd's graph, for eager calls that want gradients.

Graph tracers meet the operators of `fa4.ops` instead; both end in `gradients`.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fa4.launch import Lengths
from fa4.problem import AttentionProblem

SECOND_DERIVATIVES = (
    "fa4 computes first derivatives only: this gradient was itself to be differentiated. "
    'Eager calls with backend="reference" can be differentiated as often as wanted.'
)


class Forward(Protocol):
    """A forward pass that is ready to run: a launch, or the emulator."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Lengths | None,
        sink: Tensor | None,
        out: Tensor | None,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor]: ...


class BackwardOptions(NamedTuple):
    """What backward must know beside the problem."""

    deterministic: bool = False
    backend: str = "auto"
    arch: str | None = None


def differentiable(
    forward: Forward,
    problem: AttentionProblem,
    options: BackwardOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with gradients to q, k, v and sink; either result may go unused.

    Kept for backward: q, k, v, sink, out, lse and the lengths, nothing of size seqlen_q x seqlen_k.
    """
    return _Attention.apply(q, k, v, sink, lengths or Lengths(), forward, problem, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        lengths: Lengths,
        forward: Forward,
        problem: AttentionProblem,
        options: BackwardOptions,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, lengths, sink, None, True)
        ctx.save_for_backward(q, k, v, sink, out, lse, *lengths)
        ctx.problem, ctx.options = problem, options
        # An unused result then costs nothing: its gradient arrives as None, not as zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sink, out, lse, *lengths = ctx.saved_tensors
        found: tuple[Tensor | None, ...] = (None,) * 4
        if grad_out is not None or grad_lse is not None:
            found = gradients(
                *(ctx.problem, q, k, v, Lengths(*lengths), sink, out, lse, grad_out, grad_lse),
                ctx.options,
            )
            if torch.is_grad_enabled():  # create_graph=True
                found = _FirstDerivatives.apply(
                    *found, *(t for t in (q, k, v, sink, grad_out, grad_lse) if t is not None)
                )
        # lengths, forward, problem and options have no gradient.
        return (*found, None, None, None, None)


class _FirstDerivatives(torch.autograd.Function):
    """Passes gradients on, tied to what they depend on, and refuses to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dsink: Tensor | None, *depends_on: Tensor
    ) -> tuple[Tensor | None, ...]:
        return tuple(t if t is None else t.view_as(t) for t in (dq, dk, dv, dsink))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(SECOND_DERIVATIVES)


def gradients(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    options: BackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sink from those of out and lse, not both of which may be None."""
    # Loaded with the first backward pass: inference does without it.
    from fa4.backward import attention_backward

    if grad_out is None:
        grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand_as(out)
    # Autocast would round the products of a backward pass in float32.
    with torch.no_grad(), without_autocast(q.device):
        return attention_backward(
            *(problem, q, k, v, lengths, sink, out, lse, grad_out, grad_lse),
            deterministic=options.deterministic,
            backend=options.backend,
            arch=options.arch,
        )


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which tensors on a device keep their dtypes."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
