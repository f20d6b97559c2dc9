"""The last step of the one-kernel backward pass: dQ out of its fp32 workspace.

    dq[i, :] = softmax_scale * sum[i, :]        0 for rows that see no key and rows of padding

The workspace holds sums in the order of wgmma accumulators (`fa4.kernels.sm90.backward`): 64
contiguous bytes are eight columns of a row and of the row 8 further. A thread reads such a piece
and writes both rows; neighbouring threads take neighbouring columns. No shared memory.
"""

from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from fa4.kernels.blocks import accumulator, fake_tensors, global_view
from fa4.kernels.blocks.row_blocks import Lengths, locate_block
from fa4.kernels.features import FinishFeatures
from fa4.pipelines.sm90_backward import FinishSchedule

DTYPES = {"bf16": BFloat16, "fp16": Float16}
PIECE = 16  # fp32 elements of a thread's read


class BackwardFinish:
    """One compiled kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: FinishFeatures, schedule: FinishSchedule):
        self.features = features
        self.schedule = schedule
        self.dtype = DTYPES[features.dtype]

    @cute.jit
    def __call__(
        self,
        mSums: cute.Tensor,
        mdQ: cute.Tensor,
        mCuQ: Optional[cute.Tensor],
        mCuK: Optional[cute.Tensor],
        mUsedQ: Optional[cute.Tensor],
        mUsedK: Optional[cute.Tensor],
        rows_k: Int32,
        right: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mSums     (batch or 1, heads_q, blocks, tile_m * head_dim) fp32, contiguous
        mdQ       (batch, rows, heads, dim) or packed (total, heads, dim), unit last stride,
                  16-byte aligned; written whole
        mCuQ ...  as in `fa4.kernels.sm90.backward`
        rows_k    extent of the row mode of k
        right     right bound, read only by kernels that have one
        """
        dq = global_view.rows_first(mdQ)
        lengths = Lengths(mCuQ, mCuK, mUsedQ, mUsedK, dq.shape[0], rows_k, right)
        self.kernel.set_name_prefix(
            f"fa4_backward_finish_{self.features.name}_{self.schedule.name}",
            keep_mangled_name=False,
        )
        self.kernel(mSums, dq, lengths, softmax_scale).launch(
            grid=(mSums.shape[2] * mSums.shape[1] * mSums.shape[0], 1, 1),
            block=(self.schedule.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mSums: cute.Tensor, mdQ: cute.Tensor, lengths: Lengths, softmax_scale: Float32
    ):
        """A CTA: a block of tile_m rows of one head of one sequence.

        The ``m``-th one of a sequence converts the workspace's block m, whose rows are counted
        from the first that sees a key, and zeroes what nobody sees of rows [m tile_m, ...).
        """
        features, schedule = self.features, self.schedule
        tile_m, octets = schedule.tile_m, schedule.head_dim // 8
        heads, num_blocks = mSums.shape[1], mSums.shape[2]
        # From the last block to the first: the last sums are the ones that L2 still has.
        index = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        entry, head_idx, block, m_block, q, origin = locate_block(
            index, heads, num_blocks, lengths, tile_m, features
        )

        if const_expr(features.packed_q):
            dq = mdQ[None, None, head_idx]
        else:
            dq = mdQ[None, None, head_idx, entry]
        # Launched before the kernel in front has ended.
        cute.arch.griddepcontrol_wait()
        sums = mSums[entry, head_idx, block, None]
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        piece = cute.make_rmem_tensor(PIECE, Float32)
        # Columns of one of the two rows: a pair of each lane of a quad.
        rows = cute.make_tensor(piece.iterator, cute.make_layout((2, (2, 4)), stride=(2, (1, 4))))
        pieces = tile_m // 2 * octets
        for step in cutlass.range_constexpr((pieces + schedule.threads - 1) // schedule.threads):
            i = step * schedule.threads + cute.arch.thread_idx()[0]
            # Pieces of 64 rows: 4 warps of 8 quads, for each 8 columns.
            octet, quad = i % octets, i // octets
            chunk, quad = quad // 32, quad % 32
            row = m_block * tile_m + chunk * 64 + quad // 8 * 16 + quad % 8
            is_mine = octet * 8 < mdQ.shape[1]
            if const_expr(pieces % schedule.threads != 0):
                is_mine = is_mine & (i < pieces)
            if is_mine:
                if origin + row < q.length:
                    place = ((chunk * octets + octet) * 32 + quad) * PIECE
                    source = (sums.iterator + place).align(16)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PIECE)), piece)
                    for r in cutlass.range_constexpr(2):
                        if origin + row + 8 * r < q.length:
                            values = cute.make_rmem_tensor(8, Float32)
                            values.store(rows[r, None].load() * softmax_scale)
                            rounded = cute.make_rmem_tensor(8, self.dtype)
                            accumulator.round_into(rounded, values)
                            self.store(rounded, dq, q.start + origin + row + 8 * r, octet)
                for r in cutlass.range_constexpr(2):
                    other = row + 8 * r
                    if other < q.rows:
                        if (other < origin) | (other >= q.length):
                            self.store(zeros, dq, q.start + other, octet)

    def store(self, values: cute.Tensor, dq: cute.Tensor, row: Int32, octet: Int32):
        """Eight columns of one row, 16 bytes."""
        target = cute.local_tile(dq[row, None], (8,), (octet,))
        cute.autovec_copy(values, target)


def compile_finish(
    features: FinishFeatures, schedule: FinishSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `BackwardFinish.__call__`."""
    return cute.compile(
        BackwardFinish(features, schedule),
        fake_tensors.strided(Float32, 4, align=16),
        fake_tensors.rows(DTYPES[features.dtype], features.packed_q),
        *fake_tensors.lengths(features),
        Int32(1),
        Int32(0),
        Float32(1.0),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
