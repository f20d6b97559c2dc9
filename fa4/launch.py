"""Launching a chosen kernel: its run-time arguments, the output buffers, device and stream."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fa4.compiler import KernelSpec, get_kernel
from fa4.device_counters import device_counters
from fa4.problem import AttentionProblem

# Keys and values of the heads that run together should fit in this much of L2. An H200 has 60 MB,
# of which Q, O and the other sequences' leftovers take a share.
L2_FOR_KEYS_BYTES = 40_000_000


class Lengths(NamedTuple):
    """Lengths as in `fa4.flash_attn_varlen_func`; all None for plain dense batches."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


NO_LENGTHS = Lengths()


class ForwardLaunch:
    """Everything about a forward call but its tensors, worked out once for a problem and device.

    Calling it allocates the output (unless given) and, if wanted, the LSE, and launches on the
    current stream of the tensors' device. No synchronisation, no copy; safe under CUDA graph
    capture once the kernel has been loaded.
    """

    def __init__(self, problem: AttentionProblem, spec: KernelSpec, q: Tensor):
        self.kernel = get_kernel(spec)
        self.problem = problem
        self.device = q.device
        # Asking for the current device costs most of a microsecond.
        self.may_be_elsewhere = torch.cuda.device_count() > 1
        self.out_shape, self.lse_shape = result_shapes(problem)
        self.out_is_like_q = q.is_contiguous() and q.shape == self.out_shape
        self.unwanted_lse = _unwanted_lse(self.device, len(self.lse_shape))
        self.scalars = scalar_arguments(problem, multiprocessor_count(self.device))
        self.spec = spec

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Lengths | None,
        sink: Tensor | None,
        out: Tensor | None,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns (out, lse); lse is meaningless unless it was wanted."""
        # Padding in a caller's tensor is the caller's; in ours it is zero.
        fills_padding = 0
        if out is None:
            fills_padding = 1
            out = torch.empty_like(q) if self.out_is_like_q else q.new_empty(self.out_shape)
        lse, stores_lse = self.unwanted_lse, 0
        if wants_lse:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            stores_lse = 1
        arguments = (
            *(q, k, v, out, lse, *(lengths or NO_LENGTHS), sink),
            *(*self.scalars, fills_padding, stores_lse),
        )
        if self.may_be_elsewhere and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                self.kernel(*arguments, *tile_counter(self.spec, self.device))
        else:
            self.kernel(*arguments, *tile_counter(self.spec, self.device))
        return out, lse


def result_shapes(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output and of the LSE."""
    batch, rows, heads = problem.batch, problem.seqlen_q, problem.heads_q
    if problem.packed_q:
        return (rows, heads, problem.head_dim_v), (heads, rows)
    return (batch, rows, heads, problem.head_dim_v), (batch, heads, rows)


def scalar_arguments(problem: AttentionProblem, multiprocessors: int) -> tuple[int | float, ...]:
    """A forward kernel's arguments from softmax_scale to max_ctas; see its host entry."""
    return (
        problem.softmax_scale,
        problem.softcap,
        problem.window_left or 0,
        problem.window_right or 0,
        heads_in_group(problem),
        multiprocessors,
    )


def tile_counter(spec: KernelSpec, device: torch.device) -> tuple[Tensor, ...]:
    """The last argument of Hopper's kernel, where CTAs count the tiles they take.

    On Blackwell the hardware hands out tiles.
    """
    if spec.arch != "sm_90a":
        return ()
    return (device_counters(device, 1),)


@functools.cache
def _unwanted_lse(device: torch.device, modes: int) -> Tensor:
    """Stands for the LSE where the caller wants none; the kernel does not touch it.

    Kept for ever, because captured graphs hold its address.
    """
    return torch.empty((1,) * modes, dtype=torch.float32, device=device)


def heads_in_group(problem: AttentionProblem) -> int:
    """(query head, batch entry) pairs that go through their query tiles together.

    Causal, the longest tiles of several heads start first, so that the last wave is made of short
    ones; as many heads as keep their keys and values in L2 while they are at it. Of packed
    sequences one after the other is at work, whatever the mask, and with few heads at a time the
    tiles of a long one would be left to the end. Where all tiles are alike, one head goes after
    the other.
    """
    is_packed = problem.packed_q or problem.packed_k
    is_ragged = is_packed or problem.has_seqused_q or problem.has_seqused_k
    if problem.window_right is None and not is_ragged:
        return 1
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v)
    keys = problem.seqlen_k
    if problem.packed_k:
        keys = -(-keys // max(1, problem.batch))  # rows of all sequences
    kv_heads = max(1, L2_FOR_KEYS_BYTES // (max(1, keys) * row_bytes))
    # A power of two divides most head counts, so that groups come out even.
    kv_heads = 1 << (kv_heads.bit_length() - 1)
    pairs = problem.heads_q * (1 if problem.packed_q else problem.batch)
    return max(1, min(pairs, kv_heads * (problem.heads_q // problem.heads_kv)))


@functools.cache
def multiprocessor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
