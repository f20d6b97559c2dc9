"""Hopper backward, gradients of keys and values: warp-specialised, no atomics, one CTA a key tile.

    dv[j, :] = sum_i p[i, j] do[i, :]              p[i, j]  = exp(y[i, j] - lse[i])
    dk[j, :] = scale * sum_i dx[i, j] q[i, :]      dx[i, j] = w[i, j] (<do[i], v[j]> - delta[i])

over the query rows i that see key j, of every query head that shares j's head. y are the scores as
in the forward pass; w = p, times the derivative of the softcap where there is one.

Where the schedule says so, two CTAs with neighbouring keys form a cluster: each fetches half of
every block of Q and dO, for both. They go through the same blocks, those that either needs.

Both sums are taken in registers, in the order of heads and rows: the same bits in every run. With
64 keys a CTA each fits one warpgroup at any head dim up to 256, so the two warpgroups share the
work by gradient, not by keys. Products are transposed (keys are rows), so that p and dx leave the
accumulators as A operands of the next products.

Roles (3 warpgroups)
  warpgroup 0  load         warp 0 issues every copy; its other warps only give up their registers
  warpgroup 1  sum_values   S^T = K Q^T, p, dV += p^T dO; hands w to warpgroup 2 in 16 bits
  warpgroup 2  sum_keys     dP^T = V dO^T, dx, dK += dx^T Q

Shared memory (`DkvSchedule.smem_bytes`)
  sK, sV           (64, head_dim), (64, head_dim_v)   later dV over K, dK over V
  sQ, sLse         (tile_m, head_dim, q_stages), (tile_m, q_stages)
  sGrad, sDelta    (tile_m, head_dim_v, grad_stages), (tile_m, grad_stages)
  sW               2 stages of w, in the order of the threads' registers

Hand-offs
  q, grad  `PipelineTmaAsync`, with the rows' statistics; given back by every warp of both
           warpgroups (of all CTAs of the cluster, to all of them) as soon as the product that
           reads them is done
  k, v     `PipelineTmaAsync` of one stage, filled once
  w        named barriers FILLED and, with more than two stages of Q, DRAINED, one each a stage

Method: FA2, algorithm 2, with keys outside; FA3 (roles). Row statistics: `backward_prepare`.
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
from fa4.kernels.blocks.matmul import matmul
from fa4.kernels.blocks.row_range import RowRange, row_range
from fa4.kernels.blocks.sequence_bounds import SequenceBounds, sequence_bounds
from fa4.kernels.blocks.tile_order import Tile, count_tiles, locate_tile
from fa4.kernels.blocks.tma_rings import Tma, load_block, stage_at, tma_copy, tma_ring
from fa4.kernels.features import BackwardFeatures
from fa4.kernels.sm90.backward_call import Call
from fa4.pipelines.registers import WARPGROUP
from fa4.pipelines.sm90_backward import ROWS, DkvSchedule

DTYPES = {"bf16": BFloat16, "fp16": Float16}
WEIGHT_STAGES = 2


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA's own. Each takes one id a stage, or a warpgroup, from here."""

    FILLED = 1
    DRAINED = 3
    EPILOGUE = 5


class Work(NamedTuple):
    """The keys of a CTA, and the rows that see them.

    tile       of the cluster: ``tile.m_block`` counts tiles of all its keys
    n_block    of the CTA: counts tiles of its own keys
    rows       that see any key of the cluster's tile
    num_steps  blocks of rows, of all query heads together
    """

    tile: Tile
    n_block: Int32
    q: SequenceBounds
    k: SequenceBounds
    rows: RowRange
    num_steps: Int32


class Rings(NamedTuple):
    """The buffers that load fills and the others drain."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    grad: pipeline.PipelineTmaAsync


class Shared(NamedTuple):
    """Tiles in shared memory. The transposed ones are the same bytes, read as N-major operands."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    q_transposed: cute.Tensor
    grad: cute.Tensor
    grad_transposed: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    weights: cute.Tensor
    dv: cute.Tensor
    dk: cute.Tensor


class HopperBackwardDkv:
    """One compiled kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: BackwardFeatures, schedule: DkvSchedule):
        self.features = features
        self.schedule = schedule
        self.dtype = DTYPES[features.dtype]
        self.q_is_ragged = features.packed_q or features.has_seqused_q
        self.k_is_ragged = features.packed_k or features.has_seqused_k
        # A stage of w is written when S of its block is done, whose Q may only have been loaded
        # after warpgroup 2 had given back the Q of q_stages blocks before, and read that block's w.
        self.must_drain = schedule.q_stages > WEIGHT_STAGES

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mGrad: cute.Tensor,
        mStatistics: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
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
        mStatistics        (2, batch or 1, heads_q, blocks * tile_m) fp32 of `backward_prepare`
        mdK, mdV           gradients, shaped and typed as mK and mV; every row is written
        mCuQ, mCuK         (batch + 1,) int32 where that side is packed
        mUsedQ, mUsedK     (batch,) int32 where lengths in use are given
        left, right        window bounds, read only by kernels that have them
        heads_in_group     see `tile_order.locate_tile`, with the heads of k
        """
        schedule = self.schedule
        tile_m, tile_n = schedule.tile_m, schedule.tile_n
        head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v
        q, k, v, grad, dk, dv = [global_view.rows_first(t) for t in (mQ, mK, mV, mGrad, mdK, mdV)]

        row_major = tensor_utils.LayoutEnum.ROW_MAJOR
        col_major = tensor_utils.LayoutEnum.COL_MAJOR
        a, b = sm90.make_smem_layout_a, sm90.make_smem_layout_b
        q_stages, grad_stages = schedule.q_stages, schedule.grad_stages
        k_layout = a(row_major, (ROWS, tile_m, head_dim), self.dtype, 1)
        v_layout = a(row_major, (ROWS, tile_m, head_dim_v), self.dtype, 1)
        q_layout = b(row_major, (ROWS, tile_m, head_dim), self.dtype, q_stages)
        qt_layout = b(col_major, (ROWS, head_dim, tile_m), self.dtype, q_stages)
        grad_layout = b(row_major, (ROWS, tile_m, head_dim_v), self.dtype, grad_stages)
        gradt_layout = b(col_major, (ROWS, head_dim_v, tile_m), self.dtype, grad_stages)
        dk_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (ROWS, head_dim), 1)
        dv_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (ROWS, head_dim_v), 1)

        load = cpasync.CopyBulkTensorTileG2SOp()
        shared_load = load
        if const_expr(schedule.cluster > 1):
            shared_load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        k_tma = tma_copy(load, k, self.k_is_ragged, k_layout, (tile_n, head_dim))
        v_tma = tma_copy(load, v, self.k_is_ragged, v_layout, (tile_n, head_dim_v))
        parts, q_is_ragged = schedule.cluster, self.q_is_ragged
        q_tma = tma_copy(shared_load, q, q_is_ragged, q_layout, (tile_m, head_dim), parts)
        grad_tile = (tile_m, head_dim_v)
        grad_tma = tma_copy(shared_load, grad, q_is_ragged, grad_layout, grad_tile, parts)
        dk_tma = tma_copy(store, dk, self.k_is_ragged, dk_layout, (tile_n, head_dim))
        dv_tma = tma_copy(store, dv, self.k_is_ragged, dv_layout, (tile_n, head_dim_v))

        # Scores and their gradients: 64 keys by tile_m rows. Sums: 64 keys by a head dim.
        mma_scores = self.mma(OperandMajorMode.K, tile_m, warpgroup.OperandSource.SMEM)
        mma_dk = self.mma(OperandMajorMode.MN, head_dim, warpgroup.OperandSource.RMEM)
        mma_dv = self.mma(OperandMajorMode.MN, head_dim_v, warpgroup.OperandSource.RMEM)

        @cute.struct
        class SharedStorage:
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * q_stages]
            grad_barriers: cute.struct.MemRange[cutlass.Int64, 2 * grad_stages]
            sLse: cute.struct.Align[cute.struct.MemRange[Float32, tile_m * q_stages], 16]
            sDelta: cute.struct.Align[cute.struct.MemRange[Float32, tile_m * grad_stages], 16]
            sW: cute.struct.Align[
                cute.struct.MemRange[Int32, WEIGHT_STAGES * tile_n * tile_m // 2], 16
            ]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, schedule.slab], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, schedule.slab], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            sGrad: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(grad_layout)], 1024
            ]

        self.shared_storage = SharedStorage

        num_tiles, num_batches = count_tiles(
            k, mCuK, schedule.cluster * tile_n, self.features.packed_k
        )
        heads_kv = k.shape[2]
        call = Call(
            mCuQ,
            mCuK,
            mUsedQ,
            mUsedK,
            q.shape[0],
            k.shape[0],
            q.shape[2],
            heads_kv,
            num_tiles,
            num_batches,
            heads_in_group,
            softmax_scale,
            softcap,
            left,
            right,
        )
        self.kernel.set_name_prefix(
            f"fa4_sm90_backward_dkv_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            k_tma,
            v_tma,
            q_tma,
            grad_tma,
            dk_tma,
            dv_tma,
            mStatistics,
            mma_scores,
            mma_dk,
            mma_dv,
            (k_layout, v_layout, q_layout, qt_layout, grad_layout, gradt_layout),
            (dk_layout, dv_layout),
            call,
        ).launch(
            grid=(num_tiles * heads_kv * num_batches * schedule.cluster, 1, 1),
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
        k_tma: Tma,
        v_tma: Tma,
        q_tma: Tma,
        grad_tma: Tma,
        dk_tma: Tma,
        dv_tma: Tma,
        mStatistics: cute.Tensor,
        mma_scores: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dv: cute.TiledMma,
        input_layouts,
        output_layouts,
        call: Call,
    ):
        schedule = self.schedule
        tile_m = schedule.tile_m
        k_layout, v_layout, q_layout, qt_layout, grad_layout, gradt_layout = input_layouts
        dk_layout, dv_layout = output_layouts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in (k_tma, v_tma, q_tma, grad_tma, dk_tma, dv_tma):
                cpasync.prefetch_descriptor(tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)

        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        weight_words = schedule.tile_n * tile_m // 2
        shared = Shared(
            k=tensor(storage.sK, k_layout),
            v=tensor(storage.sV, v_layout),
            q=tensor(storage.sQ, q_layout),
            q_transposed=tensor(storage.sQ, qt_layout),
            grad=tensor(storage.sGrad, grad_layout),
            grad_transposed=tensor(storage.sGrad, gradt_layout),
            lse=storage.sLse.get_tensor(cute.make_layout((tile_m, schedule.q_stages))),
            delta=storage.sDelta.get_tensor(cute.make_layout((tile_m, schedule.grad_stages))),
            weights=storage.sW.get_tensor(cute.make_layout((weight_words, WEIGHT_STAGES))),
            # The warpgroup that sums up dV is the only one that reads K; likewise dK and V.
            dv=tensor(storage.sK, dv_layout),
            dk=tensor(storage.sV, dk_layout),
        )
        row_bytes = tile_m * Float32.width // 8
        q_stages, grad_stages, ctas = schedule.q_stages, schedule.grad_stages, schedule.cluster
        rings = Rings(
            k=tma_ring(storage.k_barriers, 1, 4, shared.k),
            v=tma_ring(storage.v_barriers, 1, 4, shared.v),
            q=tma_ring(storage.q_barriers, q_stages, 8, shared.q, row_bytes, ctas),
            grad=tma_ring(storage.grad_barriers, grad_stages, 8, shared.grad, row_bytes, ctas),
        )
        pipeline.pipeline_init_arrive(cute.make_layout(ctas), is_relaxed=True)
        pipeline.pipeline_init_wait(cute.make_layout(ctas))

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(schedule.producer_registers)
            if warp_idx == 0:
                self.load(k_tma, v_tma, q_tma, grad_tma, mStatistics, shared, rings, call)
        elif warp_idx < 8:
            cute.arch.setmaxregister_increase(schedule.consumer_registers)
            self.sum_values(mma_scores, mma_dv, dv_tma, shared, rings, call)
        else:
            cute.arch.setmaxregister_increase(schedule.consumer_registers)
            self.sum_keys(mma_scores, mma_dk, dk_tma, shared, rings, call)
        if const_expr(schedule.cluster > 1):
            # Barriers of a CTA must outlive the other one's last release.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def tile_index(self):
        """Of this CTA's cluster; see `tile_order.locate_tile`."""
        return cute.arch.block_idx()[0] // self.schedule.cluster

    @cute.jit
    def locate(self, tile_idx: Int32, call: Call):
        """What a CTA does of a tile; a slot of no tile has no rows, and no keys to store."""
        schedule, features = self.schedule, self.features
        tile = locate_tile(
            tile_idx,
            call.num_tiles,
            call.heads_kv,
            call.num_batches,
            call.heads_in_group,
            call.rows_k,
            call.cu_seqlens_k,
            schedule.cluster * schedule.tile_n,
            # Under a causal mask the first keys are seen by most rows: they come first as it is.
            False,
        )
        q = sequence_bounds(tile.batch_idx, call.rows_q, call.cu_seqlens_q, call.seqused_q)
        k = sequence_bounds(tile.batch_idx, call.rows_k, call.cu_seqlens_k, call.seqused_k)
        rows = row_range(
            tile.m_block,
            q.length,
            k.length,
            call.left,
            call.right,
            features.has_left_bound,
            features.has_right_bound,
            schedule.tile_m,
            schedule.cluster * schedule.tile_n,
        )
        num_steps = (rows.end - rows.first) * (call.heads_q // call.heads_kv)
        n_block = tile.m_block
        if const_expr(schedule.cluster > 1):
            n_block = n_block * schedule.cluster + cute.arch.block_idx_in_cluster()
        return Work(tile, n_block, q, k, rows, num_steps)

    @cute.jit
    def load(
        self,
        k_tma: Tma,
        v_tma: Tma,
        q_tma: Tma,
        grad_tma: Tma,
        mStatistics: cute.Tensor,
        shared: Shared,
        rings: Rings,
        call: Call,
    ):
        """Warp 0: request K and V, then block by block Q and dO with their statistics.

        Waits for free stages of q and grad; the copies signal their full barriers.
        """
        schedule, features = self.schedule, self.features
        work = self.locate(self.tile_index(), call)
        tile, rows, parts = work.tile, work.rows, schedule.cluster
        once = stage_at(Int32(0), 1, True)
        batch_q = Int32(0) if const_expr(features.packed_q) else tile.batch_idx
        first_block = row_statistics.first_block(
            work.q.start, tile.batch_idx, schedule.tile_m, features.packed_q
        )
        head_idx = tile.head_idx * (call.heads_q // call.heads_kv)
        block = rows.first
        for i in cutlass.range(work.num_steps, unroll=1):
            q_state = stage_at(i, schedule.q_stages, True)
            grad_state = stage_at(i, schedule.grad_stages, True)
            gQ = self.row_blocks(q_tma, work, head_idx, batch_q, schedule.head_dim)
            gGrad = self.row_blocks(grad_tma, work, head_idx, batch_q, schedule.head_dim_v)
            if i == 0:
                gK = self.key_tiles(k_tma, work, work.k.length, schedule.head_dim)
                load_block(k_tma, gK, shared.k, rings.k, work.n_block, once)
            load_block(q_tma, gQ, shared.q, rings.q, block, q_state, parts)
            gLse = mStatistics[0, batch_q, head_idx, None]
            self.load_row(gLse, shared.lse, rings.q, first_block + block, q_state)
            if i == 0:
                gV = self.key_tiles(v_tma, work, work.k.length, schedule.head_dim_v)
                load_block(v_tma, gV, shared.v, rings.v, work.n_block, once)
            load_block(grad_tma, gGrad, shared.grad, rings.grad, block, grad_state, parts)
            gDelta = mStatistics[1, batch_q, head_idx, None]
            self.load_row(gDelta, shared.delta, rings.grad, first_block + block, grad_state)
            block = block + 1
            if block == rows.end:
                block = rows.first
                head_idx = head_idx + 1
        # No tail: barriers are this CTA's own, and its shared memory lives until its last warp.

    def row_blocks(self, tma: Tma, work: Work, head_idx: Int32, batch_q: Int32, dim: int):
        """Rows of q or dO that see a key, of one head, cut into (tile_m, dim, blocks)."""
        rows = global_view.one_sequence(
            tma.tensor,
            tma.units,
            work.q.start + work.rows.origin,
            work.rows.length,
            head_idx,
            batch_q,
        )
        return cute.local_tile(rows, (self.schedule.tile_m, dim), (None, 0))

    def key_tiles(self, tma: Tma, work: Work, length: Int32, dim: int):
        """``length`` rows of k, v, dk or dv of a tile's sequence and head, as (tile_n, dim, n)."""
        batch_k = Int32(0) if self.features.packed_k else work.tile.batch_idx
        rows = global_view.one_sequence(
            tma.tensor, tma.units, work.k.start, length, work.tile.head_idx, batch_k
        )
        return cute.local_tile(rows, (self.schedule.tile_n, dim), (None, 0))

    @cute.jit
    def load_row(
        self,
        gX: cute.Tensor,
        sX: cute.Tensor,
        ring: pipeline.PipelineAsync,
        block_idx: Int32,
        state: pipeline.PipelineState,
    ):
        """Copy one block of statistics gX (rows,) to a stage that `load_block` has acquired."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        block = cute.local_tile(gX, (self.schedule.tile_m,), (block_idx,))
        full = ring.producer_get_barrier(state)
        with cute.arch.elect_one():
            cute.copy(bulk, block, sX[None, state.index], mbar_ptr=full)

    @cute.jit
    def sum_values(
        self,
        mma_scores: cute.TiledMma,
        mma_dv: cute.TiledMma,
        dv_tma: Tma,
        shared: Shared,
        rings: Rings,
        call: Call,
    ):
        """Warpgroup 1: probabilities, dV, and the weights that dK is made of.

        Waits for k, full stages of q and grad, and drained ones of w; gives back q after S and
        grad after dV, and fills w. dV of a block is issued behind S of the next one, so that the
        tensor cores go on during the exponentials.
        """
        schedule = self.schedule
        work = self.locate(self.tile_index(), call)
        rows, num_steps = work.rows, work.num_steps
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        scores_slice, dv_slice = mma_scores.get_slice(0), mma_dv.get_slice(0)
        k_operand = mma_scores.make_fragment_A(scores_slice.partition_A(shared.k[None, None, 0]))
        q_operand = mma_scores.make_fragment_B(scores_slice.partition_B(shared.q))
        grad_operand = mma_dv.make_fragment_B(dv_slice.partition_B(shared.grad_transposed))
        shape = mma_scores.partition_shape_C((ROWS, schedule.tile_m))
        scores = cute.make_rmem_tensor(shape, Float32)
        # The derivatives of the softcap; without one, nothing is kept.
        slopes = cute.make_rmem_tensor(shape, Float32)
        rounded = cute.make_rmem_tensor_like(scores, self.dtype)
        acc = cute.make_rmem_tensor(mma_dv.partition_shape_C((ROWS, schedule.head_dim_v)), Float32)
        acc.fill(0.0)

        if num_steps > 0:
            rings.k.consumer_wait(stage_at(Int32(0), 1, False))
            q_state = stage_at(Int32(0), schedule.q_stages, False)
            rings.q.consumer_wait(q_state)
            q_block = q_operand[None, None, None, q_state.index]
            matmul(mma_scores, scores, k_operand, q_block, False)
            warpgroup.wait_group(0)
            block = rows.first
            self.weigh(scores, slopes, shared, q_state, block, thread, work, call)
            rings.q.consumer_release(q_state)
            accumulator.round_into(rounded, scores)
            self.hand_over(rounded, scores, slopes, shared, Int32(0), thread)

            for i in cutlass.range(1, num_steps, unroll=1):
                block = block + 1
                if block == rows.end:
                    block = rows.first
                q_state = stage_at(i, schedule.q_stages, False)
                grad_state = stage_at(i - 1, schedule.grad_stages, False)
                rings.q.consumer_wait(q_state)
                q_block = q_operand[None, None, None, q_state.index]
                matmul(mma_scores, scores, k_operand, q_block, False)
                rings.grad.consumer_wait(grad_state)
                p = accumulator.as_operand_a(rounded)
                grad_block = grad_operand[None, None, None, grad_state.index]
                matmul(mma_dv, acc, p, grad_block, True)
                warpgroup.wait_group(1)
                self.weigh(scores, slopes, shared, q_state, block, thread, work, call)
                rings.q.consumer_release(q_state)
                warpgroup.wait_group(0)
                rings.grad.consumer_release(grad_state)
                accumulator.round_into(rounded, scores)
                self.hand_over(rounded, scores, slopes, shared, i, thread)

            grad_state = stage_at(num_steps - 1, schedule.grad_stages, False)
            rings.grad.consumer_wait(grad_state)
            p = accumulator.as_operand_a(rounded)
            grad_block = grad_operand[None, None, None, grad_state.index]
            matmul(mma_dv, acc, p, grad_block, True)
            warpgroup.wait_group(0)
            rings.grad.consumer_release(grad_state)
        self.store(
            mma_dv, dv_tma, acc, shared.dv, Float32(1.0), 0, thread, call, schedule.head_dim_v
        )

    @cute.jit
    def weigh(
        self,
        scores: cute.Tensor,
        slopes: cute.Tensor,
        shared: Shared,
        q_state: pipeline.PipelineState,
        block: Int32,
        thread: Int32,
        work: Work,
        call: Call,
    ):
        """Turn the raw products of one block into probabilities, 0 where a row does not see."""
        features, tile_m = self.features, self.schedule.tile_m
        first_column = thread % 4 * 2
        lse = cute.make_rmem_tensor((4, tile_m // 16), Float32)
        cute.autovec_copy(
            row_statistics.of_columns(shared.lse[None, q_state.index], first_column), lse
        )
        tile = accumulator.by_row(scores)
        lse_columns = score_gradient.of_columns(lse)
        if const_expr(features.score == "softcap"):
            score_gradient.capped_probabilities(
                tile,
                accumulator.by_row(slopes),
                lse_columns,
                call.softmax_scale,
                call.softcap,
            )
        else:
            score_gradient.probabilities(tile, lse_columns, call.softmax_scale)
        if const_expr(features.has_left_bound or features.has_right_bound):
            if (block < work.rows.clear_first) | (block >= work.rows.clear_end):
                key = self.first_key(work, thread)
                # The row aligned with the thread's first key, from the thread's first column.
                aligned = key - work.rows.diagonal - (block * tile_m + first_column)
                for r in cutlass.range_constexpr(2):
                    score_gradient.hide_outside(
                        tile[r, None],
                        aligned + 8 * r - call.right,
                        aligned + 8 * r + call.left + 1,
                        features.has_right_bound,
                        features.has_left_bound,
                    )

    def first_key(self, work: Work, thread: Int32):
        """The key of a thread's first accumulator row, in its sequence; the other is 8 further."""
        tile_key = work.n_block * self.schedule.tile_n
        return tile_key + thread // 32 * 16 + thread % 32 // 4

    @cute.jit
    def hand_over(
        self,
        rounded: cute.Tensor,
        scores: cute.Tensor,
        slopes: cute.Tensor,
        shared: Shared,
        step: Int32,
        thread: Int32,
    ):
        """Give a block's weights to the thread of warpgroup 2 that holds the same elements."""
        stage = step % WEIGHT_STAGES
        if const_expr(self.must_drain):
            if step >= WEIGHT_STAGES:
                self.barrier(Barrier.DRAINED + stage).arrive_and_wait()
        place = self.weights_of(shared, stage, thread)
        if const_expr(self.features.score == "softcap"):
            weights = cute.make_rmem_tensor_like(slopes, Float32)
            weights.store(scores.load() * slopes.load())
            rounded_weights = cute.make_rmem_tensor_like(rounded)
            accumulator.round_into(rounded_weights, weights)
            words = cute.recast_tensor(rounded_weights, Int32)
        else:
            words = cute.recast_tensor(rounded, Int32)
        cute.autovec_copy(cute.make_tensor(words.iterator, cute.make_layout(place.shape)), place)
        self.barrier(Barrier.FILLED + stage).arrive()

    def barrier(self, barrier_id):
        """A named barrier of both consumer warpgroups."""
        return pipeline.NamedBarrier(barrier_id=barrier_id, num_threads=2 * WARPGROUP)

    def weights_of(self, shared: Shared, stage: Int32, thread: Int32):
        """Words (4, n) of one thread in a stage of w: 16 bytes of each thread, then the next."""
        first = (shared.weights[None, stage].iterator + 4 * thread).align(16)
        words = self.schedule.tile_m // 4
        return cute.make_tensor(first, cute.make_layout((4, words // 4), stride=(1, 4 * WARPGROUP)))

    @cute.jit
    def sum_keys(
        self,
        mma_scores: cute.TiledMma,
        mma_dk: cute.TiledMma,
        dk_tma: Tma,
        shared: Shared,
        rings: Rings,
        call: Call,
    ):
        """Warpgroup 2: gradients of the scores, and dK.

        Waits for v, full stages of grad and q, and filled ones of w; gives back grad after dP and
        q after dK, and drains w. With two stages of dO, dK of a block is issued behind dP of the
        next one; with a single stage in front of it, while the next dO is on its way.
        """
        schedule = self.schedule
        num_steps = self.locate(self.tile_index(), call).num_steps
        thread = cute.arch.thread_idx()[0] - 2 * WARPGROUP
        scores_slice, dk_slice = mma_scores.get_slice(0), mma_dk.get_slice(0)
        v_operand = mma_scores.make_fragment_A(scores_slice.partition_A(shared.v[None, None, 0]))
        grad_operand = mma_scores.make_fragment_B(scores_slice.partition_B(shared.grad))
        q_operand = mma_dk.make_fragment_B(dk_slice.partition_B(shared.q_transposed))
        dp = cute.make_rmem_tensor(mma_scores.partition_shape_C((ROWS, schedule.tile_m)), Float32)
        rounded = cute.make_rmem_tensor_like(dp, self.dtype)
        acc = cute.make_rmem_tensor(mma_dk.partition_shape_C((ROWS, schedule.head_dim)), Float32)
        acc.fill(0.0)

        if num_steps > 0:
            rings.v.consumer_wait(stage_at(Int32(0), 1, False))
            grad_state = stage_at(Int32(0), schedule.grad_stages, False)
            rings.grad.consumer_wait(grad_state)
            grad_block = grad_operand[None, None, None, grad_state.index]
            matmul(mma_scores, dp, v_operand, grad_block, False)
            warpgroup.wait_group(0)
            self.differentiate(dp, shared, grad_state, Int32(0), num_steps, thread)
            rings.grad.consumer_release(grad_state)
            accumulator.round_into(rounded, dp)

            for i in cutlass.range(1, num_steps, unroll=1):
                grad_state = stage_at(i, schedule.grad_stages, False)
                q_state = stage_at(i - 1, schedule.q_stages, False)
                ds = accumulator.as_operand_a(rounded)
                q_block = q_operand[None, None, None, q_state.index]
                grad_block = grad_operand[None, None, None, grad_state.index]
                if const_expr(schedule.grad_stages > 1):
                    rings.grad.consumer_wait(grad_state)
                    matmul(mma_scores, dp, v_operand, grad_block, False)
                    rings.q.consumer_wait(q_state)
                    matmul(mma_dk, acc, ds, q_block, True)
                    warpgroup.wait_group(1)
                    self.differentiate(dp, shared, grad_state, i, num_steps, thread)
                    rings.grad.consumer_release(grad_state)
                    warpgroup.wait_group(0)
                    rings.q.consumer_release(q_state)
                else:
                    rings.q.consumer_wait(q_state)
                    matmul(mma_dk, acc, ds, q_block, True)
                    rings.grad.consumer_wait(grad_state)
                    matmul(mma_scores, dp, v_operand, grad_block, False)
                    warpgroup.wait_group(1)
                    rings.q.consumer_release(q_state)
                    warpgroup.wait_group(0)
                    self.differentiate(dp, shared, grad_state, i, num_steps, thread)
                    rings.grad.consumer_release(grad_state)
                accumulator.round_into(rounded, dp)

            q_state = stage_at(num_steps - 1, schedule.q_stages, False)
            rings.q.consumer_wait(q_state)
            ds = accumulator.as_operand_a(rounded)
            q_block = q_operand[None, None, None, q_state.index]
            matmul(mma_dk, acc, ds, q_block, True)
            warpgroup.wait_group(0)
            rings.q.consumer_release(q_state)
        self.store(
            mma_dk,
            dk_tma,
            acc,
            shared.dk,
            call.softmax_scale,
            1,
            thread,
            call,
            schedule.head_dim,
        )

    @cute.jit
    def differentiate(
        self,
        dp: cute.Tensor,
        shared: Shared,
        grad_state: pipeline.PipelineState,
        step: Int32,
        num_steps: Int32,
        thread: Int32,
    ):
        """dp := w (dp - delta), with the weights of the same block from warpgroup 1."""
        tile_m = self.schedule.tile_m
        delta = cute.make_rmem_tensor((4, tile_m // 16), Float32)
        cute.autovec_copy(
            row_statistics.of_columns(shared.delta[None, grad_state.index], thread % 4 * 2), delta
        )
        delta_columns = score_gradient.of_columns(delta)
        stage = step % WEIGHT_STAGES
        self.barrier(Barrier.FILLED + stage).arrive_and_wait()
        place = self.weights_of(shared, stage, thread)
        words = cute.make_rmem_tensor(place.shape, Int32)
        cute.autovec_copy(place, words)
        if const_expr(self.must_drain):
            # For the last stages nobody waits any more.
            if step + WEIGHT_STAGES < num_steps:
                self.barrier(Barrier.DRAINED + stage).arrive()
        halves = cute.recast_tensor(words, self.dtype)
        weights = accumulator.by_row(cute.make_tensor(halves.iterator, dp.layout))
        tile = accumulator.by_row(dp)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(tile, mode=[1])):
                tile[r, c] = weights[r, c].to(Float32) * (tile[r, c] - delta_columns[r, c])

    @cute.jit
    def store(
        self,
        tiled_mma: cute.TiledMma,
        tma: Tma,
        acc: cute.Tensor,
        sX: cute.Tensor,
        scale: Float32,
        wg: cutlass.Constexpr[int],
        thread: Int32,
        call: Call,
        dim: cutlass.Constexpr[int],
    ):
        """Scaled sums -> stmatrix -> a slab of this warpgroup's own -> TMA store.

        Rows of padding and keys that no query sees are set to 0, whatever was read for them.
        """
        # Found again rather than kept, which would take registers from the sums. That it is the
        # same index must not be seen, or the compiler keeps what follows from it all the same.
        tile_idx = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[self.tile_index()]
        )
        work = self.locate(tile_idx, call)
        barrier = pipeline.NamedBarrier(barrier_id=Barrier.EPILOGUE + wg, num_threads=WARPGROUP)
        tile = accumulator.by_row(acc)
        first_seen = Int32(0)
        if const_expr(self.features.has_left_bound):
            first_seen = work.k.length - work.q.length - call.left
        for r in cutlass.range_constexpr(2):
            key = self.first_key(work, thread) + 8 * r
            is_seen = (key >= first_seen) & (key < work.k.length)
            for c in cutlass.range_constexpr(cute.size(tile, mode=[1])):
                tile[r, c] = tile[r, c] * scale if is_seen else Float32(0.0)

        # Every warp of this warpgroup is done with what the slab held.
        barrier.arrive_and_wait()
        slab = sX[None, None, 0]
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        r2s = cute.make_tiled_copy_C(stmatrix, tiled_mma)
        thr = r2s.get_slice(thread)
        rounded = cute.make_rmem_tensor_like(acc, self.dtype)
        accumulator.round_into(rounded, acc)
        cute.copy(r2s, thr.retile(rounded), thr.partition_D(slab))
        # Make these writes visible to the TMA engine before anyone starts it.
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        stores = cute.arch.make_warp_uniform(thread // 32) == 0
        # A slot of no tile has nothing to store.
        if stores & (work.n_block * self.schedule.tile_n < work.k.rows):
            gX = self.key_tiles(tma, work, work.k.rows, dim)
            tXsX, tXgX = cpasync.tma_partition(
                tma.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(slab, 0, 2),
                cute.group_modes(gX, 0, 2),
            )
            cute.copy(tma.atom, tXsX, tXgX[None, work.n_block])
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory has to outlive the copy that reads it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def compile_dkv(features: BackwardFeatures, schedule: DkvSchedule, arch: str, options: str = ""):
    """Compile for any batch, lengths, heads and strides; see `HopperBackwardDkv.__call__`.

    Strides of the tensors that TMA reads or writes are promised nothing here:
    `global_view.rows_first` relies on the caller's check that they are multiples of 16 bytes.
    """
    dtype = DTYPES[features.dtype]
    return cute.compile(
        HopperBackwardDkv(features, schedule),
        *fake_tensors.backward_inputs(features, dtype),
        fake_tensors.row_statistics(),
        fake_tensors.rows(dtype, features.packed_k),
        fake_tensors.rows(dtype, features.packed_k),
        *fake_tensors.backward_numbers(features),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
