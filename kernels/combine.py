"""Merging partial attention: results over disjoint sets of keys become that over their union.

    lse = log(sum_s exp(lse_s) + exp(sink)),   out = sum_s exp(lse_s - lse) out_s

`sm90.decode` uses the pieces below for tiles that were split; `Combine` is the public operation on
whole tensors. Both add up parts in a fixed order, so that a result has the same bits in every run.
A part without keys has LSE -inf; what its output holds is not used.
Method: Flash-Decoding (Dao et al. 2023), FA2 section 3.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fa4.kernels.blocks.gqa_packing import divide
from fa4.kernels.blocks.online_softmax import LN_2, LOG2_E
from fa4.kernels.features import CombineFeatures

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
WARPS = 4
THREADS = 32 * WARPS
VECTOR = 4  # neighbouring columns of a lane
UNROLL = 8  # parts whose loads are in flight together


class PartPlaces(NamedTuple):
    """Where the parts of one row lie, in elements: part 0, part 1, and how far apart the others.

    out_*  of the partial outputs; lse_* of their LSE
    """

    out_first: Int64
    out_second: Int64
    out_step: Int64
    lse_first: Int64
    lse_second: Int64
    lse_step: Int64


@cute.jit
def count_part(counters: cute.Tensor, index: Int32, count: Int32):
    """Count a part of ``count`` in, and return how many there were before it.

    The counter is 0 again after the last one. What the caller's CTA wrote before its last barrier
    is visible to whoever counts later; what those before wrote is visible behind the next one.
    """
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int64((counters.iterator + index).toint()), count - 1],
    )


@cute.jit
def part_offset(s: Int32, first: Int64, second: Int64, step: Int64):
    return Int64(cutlass.select_(s == 0, first, second + Int64(s - 1) * step))


@cute.jit
def part_lse(lse_partial: cute.Pointer, parts: PartPlaces, s: Int32):
    """The LSE of part ``s``."""
    at = part_offset(s, parts.lse_first, parts.lse_second, parts.lse_step)
    return (lse_partial + at).load()


@cute.jit
def combined_lse(lse_partial: cute.Pointer, parts: PartPlaces, count: Int32, sink_log2: Float32):
    """(reference, total): log2 of the softmax denominator is reference + log2(total).

    sink_log2  the sink logit times log2(e), -inf for none; it does not count where no part saw a
               key: total is 0 then

    Lane l reads the parts l, l + 32, ...; all lanes of a warp get the same answer.
    """
    lane = cute.arch.lane_idx()
    highest = -Float32.inf
    for s in cutlass.range(lane, count, 32, unroll=1):
        highest = cute.arch.fmax(highest, part_lse(lse_partial, parts, s))
    for i in cutlass.range_constexpr(5):
        highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=1 << i))
    saw_keys = highest != -Float32.inf
    reference = highest * LOG2_E
    if saw_keys:
        reference = cute.arch.fmax(reference, sink_log2)
    else:
        reference = Float32(0.0)
    total = Float32(0.0)
    for s in cutlass.range(lane, count, 32, unroll=1):
        lse = part_lse(lse_partial, parts, s)
        total = total + cute.math.exp2(lse * LOG2_E - reference, fastmath=True)
    for i in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    if saw_keys:
        total = total + cute.math.exp2(sink_log2 - reference, fastmath=True)
    return reference, total


@cute.jit
def weighted_sum(
    acc: cute.Tensor,
    out_partial: cute.Pointer,
    lse_partial: cute.Pointer,
    parts: PartPlaces,
    count: Int32,
    reference: Float32,
    column: Int32,
    dim: Int32,
    first: Int32,
    step: cutlass.Constexpr[int],
):
    """acc[:] := sum of exp2(lse_s log2(e) - reference) out_s[column + :] over the parts s = first,
    first + step, ... below count, in that order."""
    acc.fill(0.0)
    # Where there is nothing to load, something is: without branches all loads are in flight
    # together.
    column = cutlass.min(column, dim - VECTOR)
    for s0 in cutlass.range(first, count, step * UNROLL, unroll=1):
        values = cute.make_rmem_tensor((VECTOR, UNROLL), out_partial.value_type)
        weights = cute.make_rmem_tensor(UNROLL, Float32)
        for u in cutlass.range_constexpr(UNROLL):
            s = cutlass.min(s0 + step * u, count - 1)
            weights[u] = part_lse(lse_partial, parts, s)
            at = part_offset(s, parts.out_first, parts.out_second, parts.out_step)
            source = (out_partial + (at + column)).align(VECTOR * out_partial.value_type.width // 8)
            values[None, u].store(cute.make_tensor(source, cute.make_layout(VECTOR)).load())
        for u in cutlass.range_constexpr(UNROLL):
            weight = cute.math.exp2(weights[u] * LOG2_E - reference, fastmath=True)
            # A part of no weight may hold NaN.
            counts = (s0 + step * u < count) & (weight != 0.0)
            for i in cutlass.range_constexpr(VECTOR):
                term = weight * values[i, u].to(Float32)
                acc[i] = acc[i] + (term if counts else Float32(0.0))


@cute.jit
def add_warps(acc: cute.Tensor, shared: cute.Tensor):
    """Sum acc over the warps of the CTA, in order; the sum is warp 0's to use."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    cute.arch.barrier()  # the buffer has been read
    for i in cutlass.range_constexpr(VECTOR):
        shared[i, lane, warp] = acc[i]
    cute.arch.barrier()
    for w in cutlass.range_constexpr(1, WARPS):
        for i in cutlass.range_constexpr(VECTOR):
            acc[i] = acc[i] + shared[i, lane, w]


@cute.jit
def log_of(reference: Float32, total: Float32):
    """Natural logarithm of 2^reference * total; -inf where nothing was summed."""
    lse = -Float32.inf
    if total != 0.0:
        lse = (reference + cute.math.log2(total, fastmath=True)) * LN_2
    return lse


class Combine:
    """`fa4.combine`: one CTA for each row and head."""

    def __init__(self, features: CombineFeatures):
        self.features = features

    @cute.jit
    def __call__(
        self,
        mOPartial: cute.Tensor,
        mLSEPartial: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mOPartial    (num_splits, batch, rows, heads, dim), unit last stride, others multiples of 16
                     bytes, 16-byte aligned
        mLSEPartial  (num_splits, batch, heads, rows) fp32
        mO           (batch, rows, heads, dim)
        mLSE         (batch, heads, rows) fp32
        """
        self.kernel.set_name_prefix(f"fa4_combine_{self.features.name}", keep_mangled_name=False)
        batch, rows, heads = mO.shape[0], mO.shape[1], mO.shape[2]
        # Rows are the long mode: only the first of a grid may be.
        self.kernel(mOPartial, mLSEPartial, mO, mLSE).launch(
            grid=(batch * rows * heads, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mOPartial: cute.Tensor, mLSEPartial: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor
    ):
        shared = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((VECTOR, 32, WARPS)), byte_alignment=16
        )
        index = cute.arch.block_idx()[0]
        rest = divide(index, mO.shape[2])
        head_idx = index - rest * mO.shape[2]
        batch_idx = divide(rest, mO.shape[1])
        row = rest - batch_idx * mO.shape[1]
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        count = Int32(mOPartial.shape[0])
        dim = mO.shape[3]
        lse_row = (
            Int64(batch_idx) * Int64(mLSEPartial.stride[1])
            + Int64(head_idx) * Int64(mLSEPartial.stride[2])
            + Int64(row) * Int64(mLSEPartial.stride[3])
        )
        out_row = (
            Int64(batch_idx) * Int64(mOPartial.stride[1])
            + Int64(row) * Int64(mOPartial.stride[2])
            + Int64(head_idx) * Int64(mOPartial.stride[3])
        )
        lse_partial = mLSEPartial.iterator + lse_row
        out_partial = mOPartial.iterator + out_row
        lse_step = Int64(mLSEPartial.stride[0])
        out_step = Int64(mOPartial.stride[0])
        parts = PartPlaces(Int64(0), out_step, out_step, Int64(0), lse_step, lse_step)
        reference, total = combined_lse(lse_partial, parts, count, -Float32.inf)
        scale = Float32(0.0)
        if total != 0.0:
            scale = 1.0 / total
        acc = cute.make_rmem_tensor(VECTOR, Float32)
        for first in cutlass.range_constexpr(0, self.features.head_dim_v, 32 * VECTOR):
            column = first + lane * VECTOR
            weighted_sum(
                acc, out_partial, lse_partial, parts, count, reference, column, dim, warp, WARPS
            )
            add_warps(acc, shared)
            if (cute.arch.warp_idx() == 0) & (column < dim):
                for i in cutlass.range_constexpr(VECTOR):
                    value = acc[i] * scale
                    mO[batch_idx, row, head_idx, column + i] = value.to(mO.element_type)
        if cute.arch.thread_idx()[0] == 0:
            mLSE[batch_idx, head_idx, row] = log_of(reference, total)


def compile_combine(features: CombineFeatures, schedule: None, arch: str, options: str = ""):
    """Compile for any number of splits, batch, rows and heads; see `Combine.__call__`."""

    def strided(element, modes: int, align: int | None = None):
        shape = tuple(cute.sym_int() for _ in range(modes))
        stride = (*(cute.sym_int64() for _ in range(modes - 1)), 1)
        return cute.runtime.make_fake_tensor(element, shape, stride, assumed_align=align)

    lse_partial = cute.runtime.make_fake_tensor(
        Float32,
        tuple(cute.sym_int() for _ in range(4)),
        tuple(cute.sym_int64() for _ in range(4)),
    )
    return cute.compile(
        Combine(features),
        strided(DTYPES[features.partial_dtype], 5, align=16),
        lse_partial,
        strided(DTYPES[features.out_dtype], 4),
        strided(Float32, 3),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip(),
    )
