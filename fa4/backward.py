"""The backward pass: gradients from a forward call's inputs, output and LSE.

AttentionProblem -> BackwardDecision (fa4.dispatch) -> kernels, or fa4.reference_backward
"""

from __future__ import annotations

from torch import Tensor

from fa4.launch import Lengths
from fa4.problem import AttentionProblem
from fa4.reference_backward import Gradients, attention_backward_reference

__all__ = ["Gradients", "attention_backward"]


def attention_backward(
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
    *,
    deterministic: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> Gradients:
    """(dq, dk, dv, dsink) of the forward call that ``problem`` describes; dsink None without sink.

    q, k, v, lengths, sink  what the forward call was given
    out, lse                what it returned; the normalisation is not computed again
    grad_out, grad_lse      gradients of those, any strides (a broadcast gradient is copied once);
                            None for grad_lse is zero
    deterministic           equal bits in every run; so do torch's deterministic algorithms
    backend, arch           as in `fa4.flash_attn_func`

    The gradients are new contiguous tensors of their inputs' shapes and dtypes. Queries that see
    no key, keys that no query sees and rows of padding get exactly 0.
    """
    return attention_backward_reference(
        problem, q, k, v, lengths, sink, out, lse, grad_out, grad_lse
    )
