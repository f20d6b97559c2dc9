"""Launching a chosen kernel: its run-time arguments, the output buffers, device and stream."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa4.compiler import KernelSpec, get_kernel
from fa4.problem import AttentionProblem

# Keys and values of the heads that run together should fit in this much of L2. An H200 has 60 MB,
# of which Q, O and the other sequences' leftovers take a share.
L2_FOR_KEYS_BYTES = 40_000_000


class ForwardLaunch:
    """Everything about a forward call but its tensors, worked out once for a problem and device.

    Calling it allocates the output (unless given) and the LSE, and launches on the current stream
    of the tensors' device. No synchronisation, no copy; safe under CUDA graph capture once the
    kernel has been loaded.
    """

    def __init__(self, problem: AttentionProblem, spec: KernelSpec, device: torch.device):
        self.kernel = get_kernel(spec)
        self.device = device
        lengths = (problem.seqlen_q,) if problem.packed_q else (problem.batch, problem.seqlen_q)
        self.out_shape = (*lengths, problem.heads_q, problem.head_dim_v)
        if problem.packed_q:
            self.lse_shape: tuple[int, ...] = (problem.heads_q, problem.seqlen_q)
        else:
            self.lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
        self.scalars = (
            problem.softmax_scale,
            problem.softcap,
            problem.window_left or 0,
            problem.window_right or 0,
            heads_in_group(problem),
            multiprocessor_count(device),
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink)
        # Padding in a caller's tensor is the caller's; in ours it is zero.
        fills_padding = 0
        if out is None:
            out = q.new_empty(self.out_shape)
            fills_padding = 1
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        self.kernel(
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            sink,
            *self.scalars,
            fills_padding,
        )
        return out, lse


def heads_in_group(problem: AttentionProblem) -> int:
    """(query head, batch entry) pairs whose query tiles a causal launch takes in turn.

    The longest tiles of several heads start first, so that the last wave is made of short ones;
    as many heads as keep their keys and values in L2 while they are at it. Without a right bound
    all tiles of a head are alike, and go one head after the other.
    """
    if problem.window_right is None:
        return 1
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v)
    kv_heads = max(1, L2_FOR_KEYS_BYTES // (problem.seqlen_k * row_bytes))
    # A power of two divides most head counts, so that groups come out even.
    kv_heads = 1 << (kv_heads.bit_length() - 1)
    pairs = problem.heads_q * (1 if problem.packed_q else problem.batch)
    return max(1, min(pairs, kv_heads * (problem.heads_q // problem.heads_kv)))


@functools.lru_cache(maxsize=None)
def multiprocessor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
