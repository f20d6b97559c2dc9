"""Choosing and launching the kernels of attention over a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4.compiler import KernelSpec, get_kernel
from fa4.device_counters import device_counters
from fa4.dispatch import (
    ARCHITECTURE_NAMES,
    MAX_TILES,
    PLAIN_SCALE_MIN,
    _refusals,
    capability_of,
)
from fa4.kernels.features import AppendFeatures, CombineFeatures, DecodeFeatures, head_dim_class
from fa4.kvcache_problem import KVCacheProblem
from fa4.pipelines.sm90_decode import DecodeNumbers, DecodePlan, decode_plan, head_groups
from fa4.problem import MAX_COORDINATE

APPEND_ENTRY = "fa4.kernels.append_kv:compile_append"
COMBINE_ENTRY = "fa4.kernels.combine:compile_combine"
LSE_COLUMNS = 4  # floats behind each row of a partial output; see `HopperDecode.__call__`
COUNTERS_PLACE = 6  # of the counters among the arguments of an attention kernel


@dataclass(frozen=True)
class KVCacheDecision:
    """How a problem is answered; `str` of it is a text for people.

    problem     what was asked
    backend     "fa4" or "reference"
    kernel      the attention kernel, None for the reference
    append      the kernel that appends and rotates, None where there is nothing to
    num_splits  parts that every tile's keys are cut into; 0: equal shares of all CTAs
    reasons     why no kernel answers, in words a user can act on; empty for a kernel
    """

    problem: KVCacheProblem
    backend: str
    kernel: KernelSpec | None = None
    append: KernelSpec | None = None
    num_splits: int = 0
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}"]
        if self.kernel is None:
            lines.append("answer    reference (exact attention in PyTorch)")
            lines += [f"because   {reason}" for reason in self.reasons]
            return "\n".join(lines)
        if self.append is not None:
            lines.append(f"first     kernel {self.append.name} for {self.append.arch}")
        schedule: Any = self.kernel.schedule
        lines.append(f"answer    kernel {self.kernel.name}_{schedule.name} for {self.kernel.arch}")
        lines.append(f"schedule  {schedule.description}")
        if schedule.merges and not schedule.is_balanced:
            lines.append(f"splits    {self.num_splits}")
        return "\n".join(lines)


def decide_kvcache(
    problem: KVCacheProblem,
    arch: str | None,
    device: str = "this device",
    multiprocessors: int = 132,
) -> KVCacheDecision:
    """Choose the kernels for a problem on an architecture; pure, and the same on any machine.

    arch    target such as "sm_90a"; None where kernels cannot run at all
    device  words for the device, used in the reasons
    """
    if not problem.has_queries or not problem.has_keys:
        # Nothing to multiply, and TMA cannot describe an empty tensor.
        return KVCacheDecision(problem, "reference", reasons=("there are no queries or no cache",))
    capability = capability_of("kv cache", arch)
    if capability is None or arch is None:
        supported = ", ".join(ARCHITECTURE_NAMES.values())
        return KVCacheDecision(
            problem, "reference", reasons=(f"{device} has no kernels; they need {supported}",)
        )
    reasons = _refusals(problem, capability)
    if not reasons and capability.entry:
        tiles = num_tiles(problem, 64) * max(1, problem.num_splits)
        if tiles > MAX_TILES:
            reasons = (f"the problem has {tiles} tiles; one launch holds {MAX_TILES}",)
        packed_rows = problem.rows_q * problem.group
        if packed_rows > MAX_COORDINATE:
            reasons = (f"q has {packed_rows} rows a key head; the most is {MAX_COORDINATE}",)
    if reasons:
        return KVCacheDecision(problem, "reference", reasons=reasons)
    plan = plan_of(problem, multiprocessors)
    kernel = KernelSpec(capability.entry, arch, features_of(problem), plan.schedule)
    append = append_features_of(problem)
    return KVCacheDecision(
        problem,
        "fa4",
        kernel,
        None if append is None else KernelSpec(APPEND_ENTRY, arch, append, None),
        plan.num_splits,
    )


def features_of(problem: KVCacheProblem) -> DecodeFeatures:
    """The compile-time part of a problem, for the attention kernel."""
    if problem.softcap > 0.0:
        score = "softcap"
    else:
        score = "plain" if problem.softmax_scale >= PLAIN_SCALE_MIN else "scaled"
    # The only query of a sequence is aligned with its last key, so nothing lies to its right.
    right = problem.window_right if problem.seqlen_q > 1 else None
    return DecodeFeatures(
        dtype=problem.dtype,
        head_dim=head_dim_class(problem.head_dim),
        head_dim_v=head_dim_class(problem.head_dim_v),
        has_left_bound=problem.window_left is not None,
        has_right_bound=right is not None,
        score=score,
        sink_dtype=problem.sink_dtype,
        packed_q=problem.packed_q,
        packed_new=problem.packed_new,
        has_leftpad=problem.has_leftpad,
        addressing=problem.addressing,
        cache_align=problem.cache_align,
        q_align=_full_or_none(problem.q_align),
    )


def append_features_of(problem: KVCacheProblem) -> AppendFeatures | None:
    """The compile-time part for the append kernel; None where there is nothing to append."""
    if not problem.has_new and problem.rotary is None:
        return None
    advances = (problem.window_left, problem.window_right) != (None, None)
    return AppendFeatures(
        dtype=problem.dtype,
        rotary=problem.rotary,
        rotary_dtype=problem.rotary_dtype,
        q_advances=problem.rotary is not None and advances,
        packed_q=problem.rotary is not None and problem.packed_q,
        packed_new=problem.packed_new,
        addressing=problem.addressing,
        has_rotary_seqlens=problem.has_rotary_seqlens,
        cache_align=_full_or_none(problem.cache_align),
        new_align=_full_or_none(
            problem.new_align if problem.rotary is None else min(problem.new_align, problem.q_align)
        ),
    )


def _full_or_none(align: int) -> int:
    """Alignments that a kernel tells apart where speed is no concern: 16, or 2 for any."""
    return 16 if align == 16 else 2


def plan_of(problem: KVCacheProblem, multiprocessors: int) -> DecodePlan:
    """Schedule and splits, by the rule of `fa4.pipelines.sm90_decode`."""
    return decode_plan(
        features_of(problem),
        problem.group * problem.seqlen_q,
        problem.batch * problem.heads_kv,
        problem.page_size,
        problem.num_splits,
        multiprocessors,
        problem.capacity,
        problem.has_equal_lengths,
    )


def num_tiles(problem: KVCacheProblem, tile_m: int) -> int:
    """Tiles of a launch that is not balanced; for packed queries the slots of `KeySplits`."""
    if problem.packed_q:
        blocks = problem.rows_q * problem.group // tile_m + problem.batch
        return blocks * problem.heads_kv
    blocks = -(-problem.rows_q * problem.group // tile_m)
    return blocks * problem.heads_kv * problem.batch


class CacheLengths(NamedTuple):
    """Vectors of a call, as in `fa4.flash_attn_with_kvcache`; cache_seqlens is always there.

    table  page_table, or cache_batch_idx, or None
    """

    cache_seqlens: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    cache_leftpad: Tensor | None = None
    table: Tensor | None = None
    rotary_seqlens: Tensor | None = None


class KVCacheLaunch:
    """Everything about a call but its tensors, worked out once for a problem and device.

    Calling it allocates the output (unless given), the LSE if wanted, and the workspace, whose size
    follows from the shapes alone, and launches on the current stream of the tensors' device. No
    synchronisation; safe under CUDA graph capture once the kernels have been loaded.
    """

    def __init__(
        self,
        decision: KVCacheDecision,
        device: torch.device,
        multiprocessors: int,
        load: Callable[[KernelSpec], Callable[..., Any]] = get_kernel,
    ):
        """load  finds the callable of a kernel: `get_kernel`, or one that emulates it"""
        assert decision.kernel is not None
        problem = self.problem = decision.problem
        self.device = device
        self.kernel = load(decision.kernel)
        self.append = None if decision.append is None else load(decision.append)
        self.may_be_elsewhere = device.type == "cuda" and torch.cuda.device_count() > 1
        if problem.packed_q:
            self.out_shape: tuple[int, ...] = (problem.rows_q, problem.heads_q, problem.head_dim_v)
            self.lse_shape: tuple[int, ...] = (problem.heads_q, problem.rows_q)
        else:
            rows = (problem.batch, problem.rows_q)
            self.out_shape = (*rows, problem.heads_q, problem.head_dim_v)
            self.lse_shape = (problem.batch, problem.heads_q, problem.rows_q)
        self.unwanted_lse = _unwanted_lse(device, len(self.lse_shape))
        self.out_is_like_q = problem.head_dim_v == problem.head_dim

        schedule: Any = decision.kernel.schedule
        slot_rows = min(schedule.tile_m, problem.group * problem.seqlen_q)
        ctas = multiprocessors * schedule.ctas_per_sm
        self.partial_form = None
        if schedule.merges:
            tiles = num_tiles(problem, schedule.tile_m)
            slots = 2 * ctas if schedule.is_balanced else tiles * decision.num_splits
            shape = (slots, slot_rows, problem.head_dim_v + LSE_COLUMNS)
            # One element that has the shape: `empty_like` costs half of `empty`.
            self.partial_form = torch.empty((), dtype=torch.float32, device=device).expand(shape)
            self.num_counters = ctas if schedule.is_balanced else tiles
        self.numbers = DecodeNumbers(
            problem.softmax_scale,
            problem.softcap,
            problem.window_left or 0,
            problem.window_right or 0,
            0 if problem.packed_new else problem.new_rows,
            decision.num_splits,
            slot_rows,
            ctas,
            head_groups(problem.heads_kv, ctas),
        )

    def lengths_of(self, cache_seqlens: Tensor | int | None) -> Tensor | None:
        """cache_seqlens on the device; None for a number that should be looked at more closely."""
        if isinstance(cache_seqlens, Tensor):
            return cache_seqlens
        if cache_seqlens is not None and not 0 <= cache_seqlens <= self.problem.capacity:
            return None
        return lengths_on_device(cache_seqlens, self.problem, self.device)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        lengths: CacheLengths,
        sink: Tensor | None,
        out: Tensor | None,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns (out, lse); lse is meaningless unless it was wanted."""
        if self.may_be_elsewhere and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self._launch(
                    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, lengths, sink, out, wants_lse
                )
        return self._launch(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, lengths, sink, out, wants_lse
        )

    def _launch(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        lengths: CacheLengths,
        sink: Tensor | None,
        out: Tensor | None,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        cache_seqlens, cu_seqlens_q, cu_seqlens_new, leftpad, table, rotary_seqlens = lengths
        if self.append is not None:
            source = rotated = turned_cu = None
            if rotary_cos is not None:
                source, turned_cu = q, cu_seqlens_q
                rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
            self.append(
                source,
                rotated,
                k,
                v,
                k_cache,
                v_cache,
                rotary_cos,
                rotary_sin,
                turned_cu,
                cache_seqlens,
                cu_seqlens_new,
                rotary_seqlens,
                table,
            )
            if rotated is not None:
                q = rotated
        # Padding in a caller's tensor is the caller's; in ours it is zero.
        fills_padding = 0
        if out is None:
            fills_padding = 1
            if self.out_is_like_q:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
            else:
                out = q.new_empty(self.out_shape)
        lse, stores_lse = self.unwanted_lse, 0
        if wants_lse:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            stores_lse = 1
        partial = counters = None
        if self.partial_form is not None:
            partial = torch.empty_like(self.partial_form, memory_format=torch.contiguous_format)
            counters = device_counters(self.device, self.num_counters)
        self.kernel(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            partial,
            counters,
            cu_seqlens_q,
            cache_seqlens,
            cu_seqlens_new,
            leftpad,
            table,
            sink,
            self.numbers,
            fills_padding,
            stores_lse,
        )
        return out, lse


@functools.cache
def _unwanted_lse(device: torch.device, modes: int) -> Tensor:
    """Stands for the LSE where the caller wants none; the kernel does not touch it.

    Kept for ever, because captured graphs hold its address.
    """
    return torch.empty((1,) * modes, dtype=torch.float32, device=device)


def lengths_on_device(
    cache_seqlens: Tensor | int | None, problem: KVCacheProblem, device: torch.device
) -> Tensor:
    """cache_seqlens as a vector on the device, where it was one number or the whole cache."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        return whole_cache(device, problem.batch, problem.slot_rows)
    return torch.full((problem.batch,), cache_seqlens, dtype=torch.int32, device=device)


@functools.cache
def whole_cache(device: torch.device, batch: int, rows: int) -> Tensor:
    """cache_seqlens of a cache that is in use from end to end. Kept for ever, as above."""
    return torch.full((batch,), rows, dtype=torch.int32, device=device)


def combine_spec(arch: str, partial_dtype: str, out_dtype: str, head_dim_v: int) -> KernelSpec:
    """The kernel behind `fa4.combine`."""
    features = CombineFeatures(partial_dtype, out_dtype, head_dim_class(head_dim_v))
    return KernelSpec(COMBINE_ENTRY, arch, features, None)
