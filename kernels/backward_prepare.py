"""What the backward kernels need of each query row, worked out before them.

    lse_log2[i] = lse[i] * log2(e)          delta[i] = <grad_out[i], out[i]> - grad_lse[i]

A warp takes a few rows at a time: a row's output and gradient are spread over as many lanes as
hold them at 16 bytes a lane. No shared memory. The layouts of the result, their filling and why
they have them: `kernels.blocks.row_statistics`. Rows that see no key and rows of padding are not
read. Where dQ is summed up in memory the CTAs of the first heads also write the zeros that their
sums begin with; `kernels.sm90.dq_zeros` has those of the others.

Method: FA2, algorithm 2, line 4 (delta); its LSE term: d lse / d score is the probability.
"""

from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from fa4.kernels.blocks import fake_tensors, global_view, row_statistics
from fa4.kernels.blocks.online_softmax import LOG2_E
from fa4.kernels.blocks.row_blocks import Lengths, locate_block
from fa4.kernels.blocks.tile_order import count_tiles
from fa4.kernels.features import PrepareFeatures
from fa4.pipelines.sm90_backward import STATISTIC_TERMS, PrepareSchedule

DTYPES = {"bf16": BFloat16, "fp16": Float16}


class BackwardPrepare:
    """One compiled kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: PrepareFeatures, schedule: PrepareSchedule):
        self.features = features
        self.schedule = schedule
        self.dtype = DTYPES[features.dtype]

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: Optional[cute.Tensor],
        mStatistics: cute.Tensor,
        mTerms: Optional[cute.Tensor],
        mSums: Optional[cute.Tensor],
        mZeroed: Optional[cute.Tensor],
        mCuQ: Optional[cute.Tensor],
        mCuK: Optional[cute.Tensor],
        mUsedQ: Optional[cute.Tensor],
        mUsedK: Optional[cute.Tensor],
        rows_k: Int32,
        right: Int32,
        heads_to_zero: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mO, mdO      (batch, rows, heads, dim) or packed (total, heads, dim), unit last stride,
                     16-byte aligned
        mLSE, mdLSE  (batch, heads, rows) or packed (heads, total), fp32, any strides
        mStatistics  (2, batch or 1, heads, blocks * tile_m), fp32, contiguous; written whole
        mTerms       (2, batch or 1, heads, blocks * tile_m * 8), bf16, likewise, with a schedule
                     for sums
        mSums        (batch or 1, heads, blocks, elements of a block), fp32, likewise: the first
                     heads_to_zero of all (batch or 1) * heads are zeroed
        mZeroed      (lots,) int32: zeroed
        mCuQ ...     as in `fa4.kernels.sm90.forward`
        rows_k       extent of the row mode of k
        right        right bound, read only by kernels that have one
        softmax_scale  that the LSE terms are divided by
        """
        out, grad_out = global_view.rows_first(mO), global_view.rows_first(mdO)
        lse = global_view.modes_reversed(mLSE)
        grad_lse = None
        if const_expr(mdLSE is not None):
            grad_lse = global_view.modes_reversed(mdLSE)
        tile_m = self.schedule.tile_m
        num_blocks, num_batches = count_tiles(out, mCuQ, tile_m, self.features.packed_q)
        lengths = Lengths(mCuQ, mCuK, mUsedQ, mUsedK, out.shape[0], rows_k, right)
        self.kernel.set_name_prefix(
            f"fa4_backward_prepare_{self.features.name}_{self.schedule.name}",
            keep_mangled_name=False,
        )
        self.kernel(
            out,
            grad_out,
            lse,
            grad_lse,
            mStatistics,
            mTerms,
            mSums,
            mZeroed,
            lengths,
            softmax_scale,
            heads_to_zero,
        ).launch(
            grid=(num_blocks * out.shape[2] * num_batches, 1, 1),
            block=(self.schedule.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: Optional[cute.Tensor],
        mStatistics: cute.Tensor,
        mTerms: Optional[cute.Tensor],
        mSums: Optional[cute.Tensor],
        mZeroed: Optional[cute.Tensor],
        lengths: Lengths,
        softmax_scale: Float32,
        heads_to_zero: Int32,
    ):
        """A CTA: tile_m rows of one head of one sequence."""
        features, schedule = self.features, self.schedule
        # The kernel behind may be launched; it waits for the end of this one.
        cute.arch.griddepcontrol_launch_dependents()
        tile_m = schedule.tile_m
        heads = mO.shape[2]
        num_blocks = mStatistics.shape[3] // tile_m
        # From the last block to the first: the next kernel begins with what L2 then still has.
        index = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        entry, head_idx, block, m_block, q, origin = locate_block(
            index, heads, num_blocks, lengths, tile_m, features
        )

        lanes, rows_at_once, steps = schedule.lanes_a_row, schedule.rows_at_once, schedule.steps
        lane = cute.arch.thread_idx()[0] % lanes
        first_row = cute.arch.thread_idx()[0] // lanes
        # All that a thread reads is asked for before any of it is used.
        out_vectors, grad_vectors = [cute.make_rmem_tensor((8, steps), self.dtype) for _ in "og"]
        for step in cutlass.range_constexpr(steps):
            inside = first_row + step * rows_at_once
            row = origin + m_block * tile_m + inside
            if (row < q.length) & (inside < tile_m) & (lane * 8 < mO.shape[1]):
                for tensor, vectors in ((mO, out_vectors), (mdO, grad_vectors)):
                    source = self.row_of(tensor, q.start + row, head_idx, entry)
                    cute.autovec_copy(cute.local_tile(source, (8,), (lane,)), vectors[None, step])
        # The row that a thread ends up with.
        my_row = first_row + lane * rows_at_once
        has_row = (lane < steps) & (my_row < tile_m)
        is_live = has_row & (origin + m_block * tile_m + my_row < q.length)
        lse_log2, grad_lse = Float32.inf, Float32(0.0)
        if is_live:
            position = q.start + origin + m_block * tile_m + my_row
            lse_log2 = self.row_value(mLSE, position, head_idx, entry) * LOG2_E
            if const_expr(features.has_grad_lse):
                grad_lse = self.row_value(mdLSE, position, head_idx, entry)
        if const_expr(schedule.for_sums):
            if entry * heads + head_idx < heads_to_zero:
                self.zero(mSums[entry, head_idx, block, None])
            counter = index * schedule.threads + cute.arch.thread_idx()[0]
            if counter < cute.size(mZeroed):
                mZeroed[counter] = Int32(0)

        # Of each step's row one lane keeps the sum: the one with the step's number.
        delta = Float32(0.0)
        for step in cutlass.range_constexpr(steps):
            inside = first_row + step * rows_at_once
            row = origin + m_block * tile_m + inside
            product = Float32(0.0)
            if (row < q.length) & (inside < tile_m) & (lane * 8 < mO.shape[1]):
                for i in cutlass.range_constexpr(8):
                    o, do = [x[i, step].to(Float32) for x in (out_vectors, grad_vectors)]
                    product = product + o * do
            product = cute.arch.warp_reduction_sum(product, threads_in_group=lanes)
            if lane == step:
                delta = product
        if has_row:
            delta = delta - grad_lse
            place = block * tile_m + row_statistics.place_of(my_row)
            mStatistics[0, entry, head_idx, place] = lse_log2
            mStatistics[1, entry, head_idx, place] = delta
            if const_expr(schedule.for_sums):
                to_score = -1.0 / row_statistics.exponent_scale(softmax_scale)
                for kind, value in enumerate((lse_log2 * to_score, -delta)):
                    terms = row_statistics.as_terms(value)
                    first = mTerms[kind, entry, head_idx, None].iterator
                    first = (first + (block * tile_m + my_row) * STATISTIC_TERMS).align(16)
                    cute.autovec_copy(terms, cute.make_tensor(first, terms.layout))

    @cute.jit
    def zero(self, sums: cute.Tensor):
        """All threads of the CTA: sums := 0."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        quads = cute.make_layout((4, cute.size(sums) // 4))
        quads = cute.make_tensor(sums.iterator.align(16), quads)
        for i in cutlass.range(
            cute.arch.thread_idx()[0], quads.shape[1], self.schedule.threads, unroll=4
        ):
            cute.autovec_copy(zeros, quads[None, i])

    def row_of(self, tensor: cute.Tensor, row: Int32, head_idx: Int32, batch_idx: Int32):
        """(dim,) of a (rows, dim, heads[, batch]) tensor."""
        if self.features.packed_q:
            return tensor[row, None, head_idx]
        return tensor[row, None, head_idx, batch_idx]

    def row_value(self, tensor: cute.Tensor, row: Int32, head_idx: Int32, batch_idx: Int32):
        """Element of a (rows, heads[, batch]) tensor."""
        if self.features.packed_q:
            return tensor[row, head_idx]
        return tensor[row, head_idx, batch_idx]


def compile_prepare(
    features: PrepareFeatures, schedule: PrepareSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `BackwardPrepare.__call__`."""
    dtype = DTYPES[features.dtype]
    fake = cute.runtime.make_fake_tensor

    def row_values():
        modes = 2 if features.packed_q else 3
        shape = tuple(cute.sym_int() for _ in range(modes))
        return fake(Float32, shape, tuple(cute.sym_int64() for _ in range(modes)))

    workspace = fake(
        Float32,
        (2, *(cute.sym_int() for _ in range(3))),
        (*(cute.sym_int64() for _ in range(3)), 1),
        assumed_align=16,
    )
    return cute.compile(
        BackwardPrepare(features, schedule),
        fake_tensors.rows(dtype, features.packed_q),
        fake_tensors.rows(dtype, features.packed_q),
        row_values(),
        row_values() if features.has_grad_lse else None,
        workspace,
        fake_tensors.strided(BFloat16, 4, schedule.for_sums, align=16),
        fake_tensors.strided(Float32, 4, schedule.for_sums, align=16),
        fake_tensors.vector(schedule.for_sums),
        *fake_tensors.lengths(features),
        Int32(1),
        Int32(0),
        Int32(0),
        Float32(1.0),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
