"""Hopper backward, gradient of the queries: warp-specialised, no atomics, one CTA a query tile.

    dq[i, :] = scale * sum_j dx[i, j] k[j, :]      dx[i, j] = w[i, j] (<do[i], v[j]> - delta[i])
                                                   w[i, j]  = exp(y[i, j] - lse[i])

over the keys j that row i sees; y are the scores as in the forward pass, and w has the derivative
of the softcap as a factor where there is one. Where the schedule says so, two CTAs with
neighbouring rows form a cluster: each fetches half of every block of K and V, for both.
 The sum is taken in registers, in the order of the
keys: the same bits in every run, no zero fill and no second pass over dq.

Roles (3 warpgroups)
  warpgroup 0    load           warp 0 issues every copy; its other warps only give up registers
  warpgroups 1-2 differentiate  each owns 64 query rows from the first score to the stored gradient

Shared memory (`DqSchedule.smem_bytes`)
  sQ, sGrad  (64, head_dim, 2), (64, head_dim_v, 2)    one slab a warpgroup; later dQ over Q
  sK         (tile_n, head_dim, k_stages)              read as it is for S, transposed for dQ
  sV         (tile_n, head_dim_v, v_stages)

Hand-offs (all `PipelineTmaAsync`)
  q, grad  stage = warpgroup, filled once
  k, v     given back by every warp of both warpgroups (of all CTAs of the cluster, to all of
           them): v after dP, k after the dQ of its block

Method: FA2, algorithm 2, with queries outside; FA3 section 3.1 (roles, turns). Row statistics:
`backward_prepare`, read from global memory, since a thread needs those of two rows only.
"""

from enum import IntEnum
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from fa4.kernels.blocks import (
    accumulator,
    fake_tensors,
    global_view,
    row_statistics,
    score_gradient,
)
from fa4.kernels.blocks.key_range import KeyRange, key_range
from fa4.kernels.blocks.matmul import matmul
from fa4.kernels.blocks.row_range import first_row_with_keys
from fa4.kernels.blocks.sequence_bounds import SequenceBounds, sequence_bounds
from fa4.kernels.blocks.tile_order import Tile, count_tiles, locate_tile
from fa4.kernels.blocks.tma_rings import Tma, load_block, stage_at, tma_copy, tma_ring
from fa4.kernels.features import BackwardFeatures
from fa4.kernels.sm90.backward_call import Call
from fa4.pipelines.registers import WARPGROUP
from fa4.pipelines.sm90_backward import ROWS, DqSchedule

DTYPES = {"bf16": BFloat16, "fp16": Float16}
WARPGROUPS = 2  # consumers


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA's own. Each takes one id a warpgroup from here."""

    TURN = 1
    EPILOGUE = 3


class Work(NamedTuple):
    """The query rows of a CTA, and the keys they see.

    tile     of the cluster: ``tile.m_block`` counts tiles of all its rows
    m_block  of the CTA: counts tiles of its own rows
    keys     that any row of the cluster's tile sees
    """

    tile: Tile
    m_block: Int32
    q: SequenceBounds
    k: SequenceBounds
    keys: KeyRange


class Rings(NamedTuple):
    """The buffers that load fills and differentiate drains."""

    q: pipeline.PipelineTmaAsync
    grad: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Shared(NamedTuple):
    """Tiles in shared memory. ``k_transposed`` is k's bytes, ``dq`` lies over q."""

    q: cute.Tensor
    grad: cute.Tensor
    k: cute.Tensor
    k_transposed: cute.Tensor
    v: cute.Tensor
    dq: cute.Tensor


class Fragments(NamedTuple):
    """What a consumer warpgroup multiplies and keeps in registers.

    q, grad, k, k_transposed, v  shared-memory operands: (MMA, M or N, K[, stages])
    scores, dp, dq               fp32 accumulators of q k^T, dO v^T and dx k
    rounded                      dx in 16 bits, the A operand of dx k
    lse_log2, delta              (2,) statistics of this thread's two rows
    """

    q: cute.Tensor
    grad: cute.Tensor
    k: cute.Tensor
    k_transposed: cute.Tensor
    v: cute.Tensor
    scores: cute.Tensor
    dp: cute.Tensor
    dq: cute.Tensor
    rounded: cute.Tensor
    lse_log2: cute.Tensor
    delta: cute.Tensor


class Place(NamedTuple):
    """Where a consumer thread is: warpgroup, thread in it, and its first accumulator element."""

    warpgroup: Int32
    thread: Int32
    row: Int32  # query row in the sequence; the thread's other row is 8 further
    column: Int32  # key in the block
    first_live: Int32  # the first row of the sequence that sees a key


class HopperBackwardDq:
    """One compiled kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: BackwardFeatures, schedule: DqSchedule):
        self.features = features
        self.schedule = schedule
        self.dtype = DTYPES[features.dtype]
        self.q_is_ragged = features.packed_q or features.has_seqused_q
        self.k_is_ragged = features.packed_k or features.has_seqused_k

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mGrad: cute.Tensor,
        mStatistics: cute.Tensor,
        mdQ: cute.Tensor,
        mCuQ: Optional[cute.Tensor],
        mCuK: Optional[cute.Tensor],
        mUsedQ: Optional[cute.Tensor],
        mUsedK: Optional[cute.Tensor],
        softmax_scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        heads_in_group: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mQ, mK, mV, mGrad  (batch, rows, heads, dim) or packed (total, heads, dim), unit last
                           stride, 16-byte aligned; mGrad is the output's gradient
        mStatistics        (2, batch or 1, heads_q, blocks * statistics_tile) fp32 of
                           `backward_prepare`
        mdQ                gradient, shaped and typed as mQ; every row is written
        mCuQ, mCuK         (batch + 1,) int32 where that side is packed
        mUsedQ, mUsedK     (batch,) int32 where lengths in use are given
        left, right        window bounds, read only by kernels that have them
        heads_in_group     see `tile_order.locate_tile`
        """
        schedule = self.schedule
        tile_n = schedule.tile_n
        head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v
        q, k, v, grad, dq = [global_view.rows_first(t) for t in (mQ, mK, mV, mGrad, mdQ)]

        row_major = tensor_utils.LayoutEnum.ROW_MAJOR
        col_major = tensor_utils.LayoutEnum.COL_MAJOR
        a, b = sm90.make_smem_layout_a, sm90.make_smem_layout_b
        k_stages, v_stages = schedule.k_stages, schedule.v_stages
        q_layout = a(row_major, (ROWS, tile_n, head_dim), self.dtype, WARPGROUPS)
        grad_layout = a(row_major, (ROWS, tile_n, head_dim_v), self.dtype, WARPGROUPS)
        k_layout = b(row_major, (ROWS, tile_n, head_dim), self.dtype, k_stages)
        kt_layout = b(col_major, (ROWS, head_dim, tile_n), self.dtype, k_stages)
        v_layout = b(row_major, (ROWS, tile_n, head_dim_v), self.dtype, v_stages)
        dq_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (ROWS, head_dim), WARPGROUPS)

        load = cpasync.CopyBulkTensorTileG2SOp()
        shared_load = load
        if const_expr(schedule.cluster > 1):
            shared_load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_tma = tma_copy(load, q, self.q_is_ragged, q_layout, (ROWS, head_dim))
        grad_tma = tma_copy(load, grad, self.q_is_ragged, grad_layout, (ROWS, head_dim_v))
        parts, k_is_ragged = schedule.cluster, self.k_is_ragged
        k_tma = tma_copy(shared_load, k, k_is_ragged, k_layout, (tile_n, head_dim), parts)
        v_tma = tma_copy(shared_load, v, k_is_ragged, v_layout, (tile_n, head_dim_v), parts)
        dq_tma = tma_copy(store, dq, self.q_is_ragged, dq_layout, (ROWS, head_dim))

        # One warpgroup's share: 64 rows of scores and their gradients, then 64 rows of dQ.
        mma_scores = self.mma(OperandMajorMode.K, tile_n, warpgroup.OperandSource.SMEM)
        mma_dq = self.mma(OperandMajorMode.MN, head_dim, warpgroup.OperandSource.RMEM)

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * WARPGROUPS]
            grad_barriers: cute.struct.MemRange[cutlass.Int64, 2 * WARPGROUPS]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * k_stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * v_stages]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            sGrad: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(grad_layout)], 1024
            ]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        self.shared_storage = SharedStorage

        heads_q = q.shape[2]
        num_tiles, num_batches = count_tiles(
            q, mCuQ, schedule.cluster * schedule.tile_m, self.features.packed_q
        )
        call = Call(
            mCuQ,
            mCuK,
            mUsedQ,
            mUsedK,
            q.shape[0],
            k.shape[0],
            heads_q,
            k.shape[2],
            num_tiles,
            num_batches,
            heads_in_group,
            softmax_scale,
            softcap,
            left,
            right,
        )
        self.kernel.set_name_prefix(
            f"fa4_sm90_backward_dq_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            q_tma,
            grad_tma,
            k_tma,
            v_tma,
            dq_tma,
            mStatistics,
            mma_scores,
            mma_dq,
            (q_layout, grad_layout, k_layout, kt_layout, v_layout, dq_layout),
            call,
        ).launch(
            grid=(num_tiles * heads_q * num_batches * schedule.cluster, 1, 1),
            block=(schedule.threads, 1, 1),
            cluster=(schedule.cluster, 1, 1),
            stream=stream,
        )

    def mma(self, b_major, columns: int, a_source):
        """64 rows by ``columns`` of one warpgroup, with fp32 accumulators."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            b_major,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(ROWS, columns),
            a_source=a_source,
        )

    # -------------------------------------------------------------- device side
    @cute.kernel
    def kernel(
        self,
        q_tma: Tma,
        grad_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        dq_tma: Tma,
        mStatistics: cute.Tensor,
        mma_scores: cute.TiledMma,
        mma_dq: cute.TiledMma,
        layouts,
        call: Call,
    ):
        schedule = self.schedule
        q_layout, grad_layout, k_layout, kt_layout, v_layout, dq_layout = layouts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in (q_tma, grad_tma, k_tma, v_tma, dq_tma):
                cpasync.prefetch_descriptor(tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)

        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        shared = Shared(
            q=tensor(storage.sQ, q_layout),
            grad=tensor(storage.sGrad, grad_layout),
            k=tensor(storage.sK, k_layout),
            k_transposed=tensor(storage.sK, kt_layout),
            v=tensor(storage.sV, v_layout),
            # Each warpgroup's dQ lies over its own Q, and nobody else's.
            dq=tensor(storage.sQ, dq_layout),
        )
        warps, ctas = 4 * WARPGROUPS, schedule.cluster
        rings = Rings(
            q=tma_ring(storage.q_barriers, WARPGROUPS, 4, shared.q),
            grad=tma_ring(storage.grad_barriers, WARPGROUPS, 4, shared.grad),
            k=tma_ring(storage.k_barriers, schedule.k_stages, warps, shared.k, ctas=ctas),
            v=tma_ring(storage.v_barriers, schedule.v_stages, warps, shared.v, ctas=ctas),
        )
        pipeline.pipeline_init_arrive(cute.make_layout(ctas), is_relaxed=True)
        pipeline.pipeline_init_wait(cute.make_layout(ctas))

        work = self.locate(call)
        # A slot of no tile has nothing to do.
        if work.tile.m_block * schedule.cluster * schedule.tile_m < work.q.rows:
            if warp_idx < 4:
                cute.arch.setmaxregister_decrease(schedule.producer_registers)
                if warp_idx == 0:
                    self.load(q_tma, grad_tma, k_tma, v_tma, shared, rings, work, call)
            else:
                cute.arch.setmaxregister_increase(schedule.consumer_registers)
                self.differentiate(
                    mma_scores, mma_dq, dq_tma, mStatistics, shared, rings, work, call
                )
        if const_expr(schedule.cluster > 1):
            # Barriers of a CTA must outlive the other one's last release.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def locate(self, call: Call):
        """The work of this CTA; a slot of no tile has m_block past its rows."""
        schedule, features = self.schedule, self.features
        tile = locate_tile(
            cute.arch.block_idx()[0] // schedule.cluster,
            call.num_tiles,
            call.heads_q,
            call.num_batches,
            call.heads_in_group,
            call.rows_q,
            call.cu_seqlens_q,
            schedule.cluster * schedule.tile_m,
            features.has_right_bound,
        )
        q = sequence_bounds(tile.batch_idx, call.rows_q, call.cu_seqlens_q, call.seqused_q)
        k = sequence_bounds(tile.batch_idx, call.rows_k, call.cu_seqlens_k, call.seqused_k)
        keys = key_range(
            tile.m_block * (schedule.cluster * schedule.tile_m),
            q.length,
            k.length,
            call.left,
            call.right,
            features.has_left_bound,
            features.has_right_bound,
            schedule.cluster * schedule.tile_m,
            schedule.tile_n,
        )
        m_block = tile.m_block
        if const_expr(schedule.cluster > 1):
            m_block = m_block * schedule.cluster + cute.arch.block_idx_in_cluster()
        return Work(tile, m_block, q, k, keys)

    @cute.jit
    def load(
        self,
        q_tma: Tma,
        grad_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        shared: Shared,
        rings: Rings,
        work: Work,
        call: Call,
    ):
        """Warp 0: request Q and dO, and K and V block by block, as far ahead as buffers are free.

        Waits for free stages of k and v; the copies signal their full barriers.
        """
        schedule = self.schedule
        keys, parts = work.keys, schedule.cluster
        gQ = self.query_tiles(q_tma, work, work.q.length, schedule.head_dim)
        gGrad = self.query_tiles(grad_tma, work, work.q.length, schedule.head_dim_v)
        gK = self.key_blocks(k_tma, work, call, schedule.head_dim)
        gV = self.key_blocks(v_tma, work, call, schedule.head_dim_v)
        num_blocks = keys.end - keys.first
        for i in cutlass.range(num_blocks, unroll=1):
            block = keys.first + i
            k_state = stage_at(i, schedule.k_stages, True)
            v_state = stage_at(i, schedule.v_stages, True)
            load_block(k_tma, gK, shared.k, rings.k, block, k_state, parts)
            if i == 0:
                for w in cutlass.range_constexpr(WARPGROUPS):
                    state = stage_at(Int32(w), WARPGROUPS, True)
                    m_idx = work.m_block * WARPGROUPS + w
                    load_block(q_tma, gQ, shared.q, rings.q, m_idx, state)
            load_block(v_tma, gV, shared.v, rings.v, block, v_state, parts)
            if i == 0:
                for w in cutlass.range_constexpr(WARPGROUPS):
                    state = stage_at(Int32(w), WARPGROUPS, True)
                    m_idx = work.m_block * WARPGROUPS + w
                    load_block(grad_tma, gGrad, shared.grad, rings.grad, m_idx, state)
        # No tail: barriers are this CTA's own, and its shared memory lives until its last warp.

    def query_tiles(self, tma: Tma, work: Work, length: Int32, dim: int):
        """``length`` rows of q, dO or dq of a tile's sequence and head, as (ROWS, dim, tiles)."""
        # Packed sequences are told apart by their rows, not by a batch mode.
        batch_idx = Int32(0) if self.features.packed_q else work.tile.batch_idx
        rows = global_view.one_sequence(
            tma.tensor, tma.units, work.q.start, length, work.tile.head_idx, batch_idx
        )
        return cute.local_tile(rows, (ROWS, dim), (None, 0))

    def key_blocks(self, tma: Tma, work: Work, call: Call, dim: int):
        """Rows of k or v that a tile's sequence sees, of its head, as (tile_n, dim, blocks)."""
        tile, keys = work.tile, work.keys
        head_kv = tile.head_idx // (call.heads_q // call.heads_kv)
        batch_idx = Int32(0) if self.features.packed_k else tile.batch_idx
        rows = global_view.one_sequence(
            tma.tensor, tma.units, work.k.start + keys.origin, keys.length, head_kv, batch_idx
        )
        return cute.local_tile(rows, (self.schedule.tile_n, dim), (None, 0))

    @cute.jit
    def differentiate(
        self,
        mma_scores: cute.TiledMma,
        mma_dq: cute.TiledMma,
        dq_tma: Tma,
        mStatistics: cute.Tensor,
        shared: Shared,
        rings: Rings,
        work: Work,
        call: Call,
    ):
        """Consumer warpgroups: scores, their gradients and dQ of 64 query rows each.

        Waits for q and grad, and full stages of k and v, and gives the latter back.
        """
        schedule, keys = self.schedule, work.keys
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP
        tile_row = work.m_block * schedule.tile_m
        first_live = first_row_with_keys(
            work.q.length, work.k.length, call.right, self.features.has_right_bound
        )
        row = tile_row + wg * ROWS + thread // 32 * 16 + thread % 32 // 4
        place = Place(wg, thread, row, thread % 4 * 2, first_live)

        # Descriptors are a warpgroup's, not a thread's.
        scores_slice, dq_slice = mma_scores.get_slice(0), mma_dq.get_slice(0)
        shape = mma_scores.partition_shape_C((ROWS, schedule.tile_n))
        scores = cute.make_rmem_tensor(shape, Float32)
        regs = Fragments(
            q=mma_scores.make_fragment_A(scores_slice.partition_A(shared.q[None, None, wg])),
            grad=mma_scores.make_fragment_A(scores_slice.partition_A(shared.grad[None, None, wg])),
            k=mma_scores.make_fragment_B(scores_slice.partition_B(shared.k)),
            k_transposed=mma_dq.make_fragment_B(dq_slice.partition_B(shared.k_transposed)),
            v=mma_scores.make_fragment_B(scores_slice.partition_B(shared.v)),
            scores=scores,
            dp=cute.make_rmem_tensor(shape, Float32),
            dq=cute.make_rmem_tensor(mma_dq.partition_shape_C((ROWS, schedule.head_dim)), Float32),
            rounded=cute.make_rmem_tensor_like(scores, self.dtype),
            lse_log2=cute.make_rmem_tensor(2, Float32),
            delta=cute.make_rmem_tensor(2, Float32),
        )
        regs.dq.fill(0.0)
        num_blocks = keys.end - keys.first
        if num_blocks > 0:
            self.read_statistics(mStatistics, regs, place, work)
            own = stage_at(wg, WARPGROUPS, False)
            rings.q.consumer_wait(own)
            rings.grad.consumer_wait(own)
            self.differentiate_keys(mma_scores, mma_dq, regs, rings, place, work, call, num_blocks)
        self.store(mma_dq, dq_tma, regs.dq, shared.dq, place, work, call)

    @cute.jit
    def read_statistics(self, mStatistics: cute.Tensor, regs: Fragments, place: Place, work: Work):
        """LSE and delta of this thread's rows; those that see no key weigh nothing."""
        features, tile = self.features, work.tile
        first_block = row_statistics.first_block(
            work.q.start, tile.batch_idx, self.schedule.statistics_tile, features.packed_q
        )
        entry = Int32(0) if const_expr(features.packed_q) else tile.batch_idx
        for r in cutlass.range_constexpr(2):
            row = place.row + 8 * r
            lse_log2, delta = Float32.inf, Float32(0.0)
            if (row >= place.first_live) & (row < work.q.length):
                index = first_block * self.schedule.statistics_tile
                index = index + row_statistics.place_of(row - place.first_live)
                lse_log2 = mStatistics[0, entry, tile.head_idx, index]
                delta = mStatistics[1, entry, tile.head_idx, index]
            regs.lse_log2[r] = lse_log2
            regs.delta[r] = delta

    def turn(self, wg):
        """Barrier at which warpgroup ``wg`` waits for its turn to issue matmuls."""
        return pipeline.NamedBarrier(barrier_id=Barrier.TURN + wg, num_threads=2 * WARPGROUP)

    @cute.jit
    def differentiate_keys(
        self,
        mma_scores: cute.TiledMma,
        mma_dq: cute.TiledMma,
        regs: Fragments,
        rings: Rings,
        place: Place,
        work: Work,
        call: Call,
        num_blocks: Int32,
    ):
        """All key blocks of one query tile, first to last; leaves the unscaled dQ in registers.

        dQ of a block is issued in front of S and dP of the next one, so that K's stage is free
        again early; the other warpgroup's matmuls run beside the arithmetic on scores.
        """
        schedule = self.schedule
        k_state = stage_at(Int32(0), schedule.k_stages, False)
        v_state = stage_at(Int32(0), schedule.v_stages, False)
        if const_expr(schedule.takes_turns):
            if place.warpgroup == 1:
                # The turn that nobody passes on: the first one of warpgroup 0.
                self.turn(0).arrive()
            self.turn(place.warpgroup).arrive_and_wait()
        rings.k.consumer_wait(k_state)
        k = regs.k[None, None, None, k_state.index]
        matmul(mma_scores, regs.scores, regs.q, k, False)
        rings.v.consumer_wait(v_state)
        v = regs.v[None, None, None, v_state.index]
        matmul(mma_scores, regs.dp, regs.grad, v, False)
        if const_expr(schedule.takes_turns):
            self.turn(1 - place.warpgroup).arrive()
        warpgroup.wait_group(1)
        self.weigh(regs, place, work, call, work.keys.first)
        warpgroup.wait_group(0)
        rings.v.consumer_release(v_state)
        self.differentiate_scores(regs)
        accumulator.round_into(regs.rounded, regs.dp)

        for i in cutlass.range(1, num_blocks, unroll=1):
            before = stage_at(i - 1, schedule.k_stages, False)
            k_state = stage_at(i, schedule.k_stages, False)
            v_state = stage_at(i, schedule.v_stages, False)
            if const_expr(schedule.takes_turns):
                self.turn(place.warpgroup).arrive_and_wait()
            dx = accumulator.as_operand_a(regs.rounded)
            k_before = regs.k_transposed[None, None, None, before.index]
            matmul(mma_dq, regs.dq, dx, k_before, True)
            rings.k.consumer_wait(k_state)
            k = regs.k[None, None, None, k_state.index]
            matmul(mma_scores, regs.scores, regs.q, k, False)
            rings.v.consumer_wait(v_state)
            v = regs.v[None, None, None, v_state.index]
            matmul(mma_scores, regs.dp, regs.grad, v, False)
            if const_expr(schedule.takes_turns):
                self.turn(1 - place.warpgroup).arrive()
            warpgroup.wait_group(2)
            rings.k.consumer_release(before)
            warpgroup.wait_group(1)
            self.weigh(regs, place, work, call, work.keys.first + i)
            warpgroup.wait_group(0)
            rings.v.consumer_release(v_state)
            self.differentiate_scores(regs)
            accumulator.round_into(regs.rounded, regs.dp)

        if const_expr(schedule.takes_turns):
            if place.warpgroup == 0:
                # Takes the last turn that warpgroup 1 passed on, so that none is left over.
                self.turn(0).arrive_and_wait()
        k_state = stage_at(num_blocks - 1, schedule.k_stages, False)
        dx = accumulator.as_operand_a(regs.rounded)
        k = regs.k_transposed[None, None, None, k_state.index]
        matmul(mma_dq, regs.dq, dx, k, True)
        warpgroup.wait_group(0)

    @cute.jit
    def weigh(self, regs: Fragments, place: Place, work: Work, call: Call, n_block: Int32):
        """scores := w for one block, from the raw products; 0 where a row does not see."""
        features, keys = self.features, work.keys
        weights = accumulator.by_row(regs.scores)
        columns = cute.size(weights, mode=[1])
        lse_log2 = score_gradient.of_rows(regs.lse_log2, columns)
        if const_expr(features.score == "softcap"):
            slopes = cute.make_rmem_tensor_like(regs.scores)
            slopes_by_row = accumulator.by_row(slopes)
            score_gradient.capped_probabilities(
                weights, slopes_by_row, lse_log2, call.softmax_scale, call.softcap
            )
            regs.scores.store(regs.scores.load() * slopes.load())
        else:
            score_gradient.probabilities(weights, lse_log2, call.softmax_scale)
        # A sequence's end is a bound too: keys behind it are zeros, whose weight may be infinite.
        if (n_block < keys.clear_first) | (n_block >= keys.clear_end):
            first_key = n_block * self.schedule.tile_n + place.column
            for r in cutlass.range_constexpr(2):
                aligned = place.row + 8 * r + keys.diagonal - first_key
                end = keys.length - first_key
                if const_expr(features.has_right_bound):
                    end = cutlass.min(end, aligned + call.right + 1)
                score_gradient.hide_outside(
                    weights[r, None], aligned - call.left, end, features.has_left_bound, True
                )

    @cute.jit
    def differentiate_scores(self, regs: Fragments):
        """dp := w (dp - delta)."""
        weights, dp = accumulator.by_row(regs.scores), accumulator.by_row(regs.dp)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(dp, mode=[1])):
                dp[r, c] = weights[r, c] * (dp[r, c] - regs.delta[r])

    @cute.jit
    def store(
        self,
        mma_dq: cute.TiledMma,
        dq_tma: Tma,
        dq: cute.Tensor,
        sdQ: cute.Tensor,
        place: Place,
        work: Work,
        call: Call,
    ):
        """Scaled dQ -> stmatrix -> this warpgroup's slab -> TMA store, padding included.

        Rows of padding and rows that see no key are set to 0, whatever was read for them.
        """
        schedule, wg = self.schedule, place.warpgroup
        barrier = pipeline.NamedBarrier(barrier_id=Barrier.EPILOGUE + wg, num_threads=WARPGROUP)
        tile = accumulator.by_row(dq)
        for r in cutlass.range_constexpr(2):
            row = place.row + 8 * r
            is_live = (row >= place.first_live) & (row < work.q.length)
            for c in cutlass.range_constexpr(cute.size(tile, mode=[1])):
                tile[r, c] = tile[r, c] * call.softmax_scale if is_live else Float32(0.0)

        # Every warp of this warpgroup is done with Q.
        barrier.arrive_and_wait()
        slab = sdQ[None, None, wg]
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        r2s = cute.make_tiled_copy_C(stmatrix, mma_dq)
        thr = r2s.get_slice(place.thread)
        rounded = cute.make_rmem_tensor_like(dq, self.dtype)
        accumulator.round_into(rounded, dq)
        cute.copy(r2s, thr.retile(rounded), thr.partition_D(slab))
        # Make these writes visible to the TMA engine before anyone starts it.
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        if cute.arch.make_warp_uniform(place.thread // 32) == 0:
            gdQ = self.query_tiles(dq_tma, work, work.q.rows, schedule.head_dim)
            tXsX, tXgX = cpasync.tma_partition(
                dq_tma.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(slab, 0, 2),
                cute.group_modes(gdQ, 0, 2),
            )
            m_idx = work.m_block * WARPGROUPS + wg
            cute.copy(dq_tma.atom, tXsX, tXgX[None, m_idx])
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory has to outlive the copy that reads it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def compile_dq(features: BackwardFeatures, schedule: DqSchedule, arch: str, options: str = ""):
    """Compile for any batch, lengths, heads and strides; see `HopperBackwardDq.__call__`.

    Strides of the tensors that TMA reads or writes are promised nothing here:
    `global_view.rows_first` relies on the caller's check that they are multiples of 16 bytes.
    """
    dtype = DTYPES[features.dtype]
    return cute.compile(
        HopperBackwardDq(features, schedule),
        *fake_tensors.backward_inputs(features, dtype),
        fake_tensors.row_statistics(),
        fake_tensors.rows(dtype, features.packed_q),
        *fake_tensors.backward_numbers(features),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
