"""Merging partial attention: results over disjoint sets of keys become that over their union.

    lse = log(sum_s exp(lse_s) + exp(sink)),   out = sum_s exp(lse_s - lse) out_s

`sm90.decode` merges the rows of tiles that were split with `merged_row`, a warp each; `Combine` is
the public operation on whole tensors. Both add up parts in a fixed order, so that a result has the
same bits in every run.
A part without keys has LSE -inf; what its output holds is not used.
Method: Flash-Decoding (Dao et al. 2023), FA2 section 3.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fa4.kernels.blocks import fake_tensors
from fa4.kernels.blocks.gqa_packing import divide
from fa4.kernels.blocks.online_softmax import LN_2, LOG2_E
from fa4.kernels.features import CombineFeatures

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
WARPS = 4
THREADS = 32 * WARPS
VECTOR = 4  # neighbouring columns of a lane
UNROLL = 8  # parts whose loads are in flight together in `weighted_sum`
# Vectors that a lane of `merged_row` has in flight together, along with its LSE. Measured on the
# H200 with batch 1 of 65536 keys in 16 parts: 3.93 TB/s, and 3.88 with the LSEs read in front of
# the outputs, 8 at a time.
HELD = 16


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
def lane_lse(lse_partial: cute.Pointer, parts: PartPlaces, first: Int32, count: Int32):
    """The LSE of part first + lane, -inf behind the last one."""
    s = first + cute.arch.lane_idx()
    # Where there is nothing to load, something is: without branches all loads are in flight
    # together.
    lse = part_lse(lse_partial, parts, cutlass.min(s, count - 1))
    return Float32(cutlass.select_(s < count, lse, -Float32.inf))


@cute.jit
def combined_lse(
    lse_partial: cute.Pointer,
    parts: PartPlaces,
    count: Int32,
    lane_lses: Float32,
    sink_log2: Float32,
):
    """(reference, total): log2 of the softmax denominator is reference + log2(total).

    lane_lses  `lane_lse` of the first 32 parts
    sink_log2  the sink logit times log2(e), -inf for none; it does not count where no part saw a
               key: total is 0 then

    Lane l reads the parts l + 32, l + 64, ...; all lanes of a warp get the same answer.
    """
    lane = cute.arch.lane_idx()
    highest = lane_lses
    for s in cutlass.range(lane + 32, count, 32, unroll=1):
        highest = cute.arch.fmax(highest, part_lse(lse_partial, parts, s))
    for i in cutlass.range_constexpr(5):
        highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=1 << i))
    saw_keys = highest != -Float32.inf
    reference = highest * LOG2_E
    if saw_keys:
        reference = cute.arch.fmax(reference, sink_log2)
    else:
        reference = Float32(0.0)
    total = weight_of(lane_lses, reference)
    for s in cutlass.range(lane + 32, count, 32, unroll=1):
        total = total + weight_of(part_lse(lse_partial, parts, s), reference)
    for i in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    if saw_keys:
        total = total + cute.math.exp2(sink_log2 - reference, fastmath=True)
    return reference, total


@cute.jit
def weight_of(lse: Float32, reference: Float32):
    """What a part of this LSE counts; see `combined_lse`."""
    return cute.math.exp2(lse * LOG2_E - reference, fastmath=True)


@cute.jit
def read_part(
    values: cute.Tensor, out_partial: cute.Pointer, parts: PartPlaces, s: Int32, column: Int32
):
    """values[:] := the columns of part ``s`` from ``column`` on."""
    at = part_offset(s, parts.out_first, parts.out_second, parts.out_step)
    source = (out_partial + (at + column)).align(VECTOR * out_partial.value_type.width // 8)
    values.store(cute.make_tensor(source, cute.make_layout(VECTOR)).load())


@cute.jit
def add_part(acc: cute.Tensor, values: cute.Tensor, weight: Float32):
    """acc[:] += weight * values[:]; a part of weight 0 may hold NaN."""
    for i in cutlass.range_constexpr(VECTOR):
        term = weight * values[i].to(Float32)
        acc[i] = acc[i] + (term if weight != 0.0 else Float32(0.0))


@cute.jit
def merged_row(
    acc: cute.Tensor,
    out_partial: cute.Pointer,
    lse_partial: cute.Pointer,
    parts: PartPlaces,
    count: Int32,
    sink_log2: Float32,
    dim: Int32,
):
    """acc := the sum of exp2(lse_s log2(e) - reference) out_s over all parts s in order; returns
    `combined_lse`.

    acc  (VECTOR, chunks) fp32; lane l gets the columns VECTOR (32 c + l) + [0, VECTOR) of the row
         as acc[:, c]. Chunks are as many as a row of the kernel's head dim has

    By one warp. The first parts are requested before it is known how much they count.
    """
    chunks = cute.size(acc, mode=[1])
    held = HELD // chunks  # parts; a divisor of 32
    values = cute.make_rmem_tensor((VECTOR, chunks, held), out_partial.value_type)
    lses = lane_lse(lse_partial, parts, Int32(0), count)
    read_parts(values, out_partial, parts, Int32(0), count, dim)
    reference, total = combined_lse(lse_partial, parts, count, lses, sink_log2)
    weights = weight_of(lses, reference)
    acc.fill(0.0)
    for s0 in cutlass.range(0, count, held, unroll=1):
        if s0 > 0:
            read_parts(values, out_partial, parts, s0, count, dim)
            if s0 % 32 == 0:
                weights = weight_of(lane_lse(lse_partial, parts, s0, count), reference)
        for u in cutlass.range_constexpr(held):
            weight = cute.arch.shuffle_sync(weights, offset=(s0 + u) % 32)
            for c in cutlass.range_constexpr(chunks):
                add_part(acc[None, c], values[None, c, u], weight)
    return reference, total


@cute.jit
def read_parts(
    values: cute.Tensor,
    out_partial: cute.Pointer,
    parts: PartPlaces,
    first: Int32,
    count: Int32,
    dim: Int32,
):
    """values[:, c, u] := this lane's columns of chunk c of part first + u, see `merged_row`; where
    there are none, others."""
    lane = cute.arch.lane_idx()
    for u in cutlass.range_constexpr(cute.size(values, mode=[2])):
        s = cutlass.min(first + u, count - 1)
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            column = cutlass.min((32 * c + lane) * VECTOR, dim - VECTOR)
            read_part(values[None, c, u], out_partial, parts, s, column)


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
    # As in `lane_lse`, something is loaded where there is nothing to load.
    column = cutlass.min(column, dim - VECTOR)
    for s0 in cutlass.range(first, count, step * UNROLL, unroll=1):
        values = cute.make_rmem_tensor((VECTOR, UNROLL), out_partial.value_type)
        lses = cute.make_rmem_tensor(UNROLL, Float32)
        for u in cutlass.range_constexpr(UNROLL):
            s = cutlass.min(s0 + step * u, count - 1)
            lses[u] = part_lse(lse_partial, parts, s)
            read_part(values[None, u], out_partial, parts, s, column)
        for u in cutlass.range_constexpr(UNROLL):
            weight = weight_of(lses[u], reference)
            if s0 + step * u >= count:
                weight = Float32(0.0)
            add_part(acc, values[None, u], weight)


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
        lses = lane_lse(lse_partial, parts, Int32(0), count)
        reference, total = combined_lse(lse_partial, parts, count, lses, -Float32.inf)
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
    lse_partial = cute.runtime.make_fake_tensor(
        Float32,
        tuple(cute.sym_int() for _ in range(4)),
        tuple(cute.sym_int64() for _ in range(4)),
    )
    return cute.compile(
        Combine(features),
        fake_tensors.strided(DTYPES[features.partial_dtype], 5, align=16),
        lse_partial,
        fake_tensors.strided(DTYPES[features.out_dtype], 4),
        fake_tensors.strided(Float32, 3),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
