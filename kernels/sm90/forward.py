"""Hopper forward attention: warp-specialised, TMA loads and stores, wgmma, P in registers.

    o[i, :] = sum_j p[i, j] v[j, :] / l[i],   p[i, j] = exp(x[i, j] - m[i]),   x = scale * q k^T
    lse[i] = m[i] + ln l[i]

over the keys j that row i sees, with softcap, window and sink as `fa4.attention` defines them.
Method: FA2 (query tile outer, key blocks inner, online softmax), FA3 sections 3.1 and 3.2 (roles,
turns between warpgroups, softmax of one block under the matmuls of its neighbours).

Roles (1 + W warpgroups; W = tile_m / 64)
  warpgroup 0       load      warp 0 issues every TMA load; its three other warps only give up
                              their registers
  warpgroups 1..W   attend    each owns 64 query rows from the first score to the stored output

Shared memory (sizes in elements of q's type; `ForwardSchedule.smem_bytes`)
  sQ   (64, head_dim, W)               one slab a warpgroup
  sK   (tile_n, head_dim, stages)
  sV   (tile_n, head_dim_v, stages)    read transposed, as the N-major B operand of P V
  sO   (64, head_dim_v, W)             one slab a warpgroup; Q's own slab if o_shares_q

Hand-offs (all `PipelineTmaAsync`)
  q    stage = warpgroup. Filled by load; released by the warpgroup after its last score, or after
       its output has left shared memory when O shares the slab
  k,v  filled by load in the order K(n), then K(n-1), V(n), K(n-2), V(n-1) ...; released by every
       warp of every warpgroup as soon as the matmul that reads it is done

Blocks are visited from the last to the first, so that the masked ones (sequence end, diagonal)
come first and the loop over whole blocks carries no mask code.
"""

from enum import IntEnum
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from fa4.kernels.blocks import accumulator, global_view
from fa4.kernels.blocks.key_range import KeyRange, key_range
from fa4.kernels.blocks.online_softmax import (
    LOG2_E,
    finish_row,
    mask_scores,
    online_softmax_step,
    scale_rows,
    scale_scores,
    soft_cap,
)
from fa4.kernels.blocks.sequence_bounds import sequence_bounds
from fa4.kernels.blocks.tile_order import Tile, locate_tile, num_slots
from fa4.kernels.features import ForwardFeatures
from fa4.pipelines.sm90 import WARPGROUP, ForwardSchedule

ROWS = 64  # query rows of a warpgroup: M of one wgmma
DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA's own. TURN and EPILOGUE take one id a warpgroup from here."""

    TURN = 1
    EPILOGUE = 4


class HopperForward:
    """One compiled forward kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: ForwardFeatures, schedule: ForwardSchedule):
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
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mCuQ: Optional[cute.Tensor],
        mCuK: Optional[cute.Tensor],
        mUsedQ: Optional[cute.Tensor],
        mUsedK: Optional[cute.Tensor],
        mSink: Optional[cute.Tensor],
        softmax_scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        heads_in_group: Int32,
        max_ctas: Int32,
        fills_padding: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mQ, mK, mV, mO  (batch, rows, heads, dim) or packed (total, heads, dim), unit last stride,
                        16-byte aligned
        mLSE            (batch, heads, rows) or packed (heads, total), fp32
        mCuQ, mCuK      (batch + 1,) int32 where that side is packed
        mUsedQ, mUsedK  (batch,) int32 where lengths in use are given
        mSink           (heads_q,)
        left, right     window bounds, read only by kernels that have them
        heads_in_group  see `tile_order.locate_tile`
        max_ctas        CTAs of a persistent kernel
        fills_padding   1: query rows of padding get output 0; 0: they are left alone
        """
        schedule = self.schedule
        tile_n, head_dim, head_dim_v = schedule.tile_n, schedule.head_dim, schedule.head_dim_v
        q, k, v, o = [global_view.rows_first(t) for t in (mQ, mK, mV, mO)]

        row_major = tensor_utils.LayoutEnum.ROW_MAJOR
        col_major = tensor_utils.LayoutEnum.COL_MAJOR
        sQ_layout = sm90.make_smem_layout_a(
            row_major, (ROWS, tile_n, head_dim), self.dtype, schedule.consumer_warpgroups
        )
        sK_layout = sm90.make_smem_layout_b(
            row_major, (ROWS, tile_n, head_dim), self.dtype, schedule.stages
        )
        # The same bytes twice: keys by dims as TMA writes them, dims by keys as P V reads them.
        sV_layout = sm90.make_smem_layout_b(
            row_major, (ROWS, tile_n, head_dim_v), self.dtype, schedule.stages
        )
        sVt_layout = sm90.make_smem_layout_b(
            col_major, (ROWS, head_dim_v, tile_n), self.dtype, schedule.stages
        )
        sO_layout = sm90.make_smem_layout_epi(
            self.dtype, row_major, (ROWS, head_dim_v), schedule.consumer_warpgroups
        )

        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        one_stage = (None, None, 0)
        tma_q, tQ = cpasync.make_tiled_tma_atom(
            load,
            self.clippable(q, self.q_is_ragged),
            cute.slice_(sQ_layout, one_stage),
            (ROWS, head_dim),
        )
        tma_k, tK = cpasync.make_tiled_tma_atom(
            load,
            self.clippable(k, self.k_is_ragged),
            cute.slice_(sK_layout, one_stage),
            (tile_n, head_dim),
        )
        tma_v, tV = cpasync.make_tiled_tma_atom(
            load,
            self.clippable(v, self.k_is_ragged),
            cute.slice_(sV_layout, one_stage),
            (tile_n, head_dim_v),
        )
        tma_o, tO = cpasync.make_tiled_tma_atom(
            store,
            self.clippable(o, self.q_is_ragged),
            cute.slice_(sO_layout, one_stage),
            (ROWS, head_dim_v),
        )

        # One warpgroup's share: 64 rows of scores, then 64 rows of output.
        mma_qk = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(ROWS, tile_n),
        )
        mma_pv = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(ROWS, head_dim_v),
            a_source=warpgroup.OperandSource.RMEM,
        )

        warpgroups = schedule.consumer_warpgroups
        o_elements = warpgroups * ROWS * head_dim_v
        if const_expr(schedule.o_shares_q):
            o_elements = 0

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * warpgroups]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * schedule.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * schedule.stages]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, warpgroups * schedule.q_slab], 1024]
            sO: cute.struct.Align[cute.struct.MemRange[self.dtype, o_elements], 1024]
            sK: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sK_layout)], 1024
            ]
            sV: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(sV_layout)], 1024
            ]

        self.shared_storage = SharedStorage

        heads_q = q.shape[2]
        if const_expr(self.features.packed_q):
            num_batches = Int32(1)
            num_m_blocks = num_slots(q.shape[0], mCuQ.shape[0] - 1, schedule.tile_m)
            lse = cute.make_tensor(
                mLSE.iterator,
                cute.make_layout(
                    (mLSE.shape[1], mLSE.shape[0]), stride=(mLSE.stride[1], mLSE.stride[0])
                ),
            )
        else:
            num_batches = q.shape[3]
            num_m_blocks = cute.ceil_div(q.shape[0], schedule.tile_m)
            lse = cute.make_tensor(
                mLSE.iterator,
                cute.make_layout(
                    (mLSE.shape[2], mLSE.shape[1], mLSE.shape[0]),
                    stride=(mLSE.stride[2], mLSE.stride[1], mLSE.stride[0]),
                ),
            )
        num_tiles = num_m_blocks * heads_q * num_batches
        grid = num_tiles
        if const_expr(schedule.is_persistent):
            grid = cutlass.min(num_tiles, max_ctas)
        self.kernel.set_name_prefix(
            f"fa4_sm90_forward_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            (tma_q, tQ),
            (tma_k, tK),
            (tma_v, tV),
            (tma_o, tO),
            lse,
            mCuQ,
            mCuK,
            mUsedQ,
            mUsedK,
            mSink,
            mma_qk,
            mma_pv,
            (sQ_layout, sK_layout, sV_layout, sVt_layout, sO_layout),
            (q.shape[0], k.shape[0]),
            (softmax_scale, softcap),
            (left, right),
            (num_tiles, num_m_blocks, heads_q, k.shape[2], num_batches, heads_in_group),
            fills_padding,
        ).launch(grid=(grid, 1, 1), block=(schedule.threads, 1, 1), stream=stream)

    def clippable(self, tensor: cute.Tensor, is_ragged: bool):
        return global_view.ragged(tensor) if is_ragged else tensor

    # -------------------------------------------------------------- device side
    @cute.kernel
    def kernel(
        self,
        q_tma,
        k_tma,
        v_tma,
        o_tma,
        mLSE: cute.Tensor,
        mCuQ: Optional[cute.Tensor],
        mCuK: Optional[cute.Tensor],
        mUsedQ: Optional[cute.Tensor],
        mUsedK: Optional[cute.Tensor],
        mSink: Optional[cute.Tensor],
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layouts,
        extents,
        scales,
        window,
        tiles,
        fills_padding: Int32,
    ):
        schedule = self.schedule
        sQ_layout, sK_layout, sV_layout, sVt_layout, sO_layout = layouts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in (q_tma, k_tma, v_tma, o_tma):
                cpasync.prefetch_descriptor(tma[0])

        storage = SmemAllocator().allocate(self.shared_storage)
        sQ = storage.sQ.get_tensor(
            self.with_slabs(sQ_layout.outer, schedule.q_slab), swizzle=sQ_layout.inner
        )
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        sVt = storage.sV.get_tensor(sVt_layout.outer, swizzle=sVt_layout.inner)
        if const_expr(schedule.o_shares_q):
            # Each warpgroup's O lies over its own Q, and nobody else's.
            sO = storage.sQ.get_tensor(
                self.with_slabs(sO_layout.outer, schedule.q_slab), swizzle=sO_layout.inner
            )
        else:
            sO = storage.sO.get_tensor(sO_layout.outer, swizzle=sO_layout.inner)

        warps = 4 * schedule.consumer_warpgroups
        q_pipeline = self.tma_pipeline(
            storage.q_barriers.data_ptr(),
            schedule.consumer_warpgroups,
            # With O in Q's slab, the warp that stored O gives the slab back, alone.
            1 if schedule.o_shares_q else 4,
            sQ,
        )
        k_pipeline = self.tma_pipeline(storage.k_barriers.data_ptr(), schedule.stages, warps, sK)
        v_pipeline = self.tma_pipeline(storage.v_barriers.data_ptr(), schedule.stages, warps, sV)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()

        sequences = (extents, mCuQ, mCuK, mUsedQ, mUsedK)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(schedule.producer_registers)
            if warp_idx == 0:
                self.load(
                    q_tma, k_tma, v_tma, sQ, sK, sV, q_pipeline, k_pipeline, v_pipeline,
                    sequences, window, tiles,
                )
        else:
            cute.arch.setmaxregister_increase(schedule.consumer_registers)
            self.attend(
                mma_qk, mma_pv, o_tma, mLSE, mSink, sQ, sK, sVt, sO,
                q_pipeline, k_pipeline, v_pipeline,
                sequences, scales, window, tiles, fills_padding,
            )

    def with_slabs(self, layout: cute.Layout, slab: int):
        """(rows, dim, warpgroups) with the warpgroups' slabs ``slab`` elements apart."""
        return cute.make_layout(
            layout.shape, stride=(layout.stride[0], layout.stride[1], (0, slab))
        )

    @cute.jit
    def tma_pipeline(
        self,
        barriers: cute.Pointer,
        stages: cutlass.Constexpr[int],
        releases: cutlass.Constexpr[int],
        buffer: cute.Tensor,
    ):
        """A TMA-to-threads pipeline whose stages are given back by ``releases`` warps."""
        return pipeline.PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
            tx_count=cute.size_in_bytes(buffer.element_type, buffer[None, None, 0].layout),
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    @cute.jit
    def stage_at(self, count: Int32, stages: cutlass.Constexpr[int], is_producer: cutlass.Constexpr[bool]):
        """Pipeline state of the ``count``-th use of a ring of buffers.

        One running count a role replaces an index and a phase a pipeline; the producer's phase
        is the opposite one, because an empty barrier starts free.
        """
        turns = count // stages
        phase = turns & 1
        if const_expr(is_producer):
            phase = phase ^ 1
        return pipeline.PipelineState(stages, count, count - turns * stages, phase)

    @cute.jit
    def locate(self, tile_idx: Int32, sequences, window, tiles):
        """Everything about a tile: (tile, bounds of q, bounds of k, key range, is it a tile)."""
        (rows_q, rows_k), mCuQ, mCuK, mUsedQ, mUsedK = sequences
        _, num_m_blocks, heads_q, _, num_batches, heads_in_group = tiles
        schedule, features = self.schedule, self.features
        tile = locate_tile(
            tile_idx,
            num_m_blocks,
            heads_q,
            num_batches,
            heads_in_group,
            rows_q,
            mCuQ,
            schedule.tile_m,
            features.has_right_bound,
        )
        bounds_q = sequence_bounds(tile.batch_idx, rows_q, mCuQ, mUsedQ)
        bounds_k = sequence_bounds(tile.batch_idx, rows_k, mCuK, mUsedK)
        keys = key_range(
            tile.m_block,
            bounds_q.length,
            bounds_k.length,
            window[0],
            window[1],
            features.has_left_bound,
            features.has_right_bound,
            schedule.tile_m,
            schedule.tile_n,
        )
        return tile, bounds_q, bounds_k, keys

    @cute.jit
    def load(
        self,
        q_tma,
        k_tma,
        v_tma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        q_pipeline: pipeline.PipelineAsync,
        k_pipeline: pipeline.PipelineAsync,
        v_pipeline: pipeline.PipelineAsync,
        sequences,
        window,
        tiles,
    ):
        """Warp 0: request Q, and K and V block by block, as far ahead as buffers are free."""
        schedule, features = self.schedule, self.features
        num_tiles, _, heads_q, heads_kv, _, _ = tiles
        warpgroups, stages = schedule.consumer_warpgroups, schedule.stages
        block = (schedule.tile_n, schedule.head_dim)
        block_v = (schedule.tile_n, schedule.head_dim_v)
        blocks_loaded = Int32(0)
        tiles_loaded = Int32(0)
        tile_idx = cute.arch.block_idx()[0]
        while tile_idx < num_tiles:
            tile, bounds_q, bounds_k, keys = self.locate(tile_idx, sequences, window, tiles)
            if tile.m_block * schedule.tile_m < bounds_q.rows:
                gQ = cute.local_tile(
                    self.rows_of(q_tma[1], bounds_q.start, bounds_q.length, tile, tile.head_idx,
                                 self.q_is_ragged, features.packed_q),
                    (ROWS, schedule.head_dim),
                    (None, 0),
                )
                head_kv = tile.head_idx // (heads_q // heads_kv)
                first_key = bounds_k.start + keys.origin
                gK = cute.local_tile(
                    self.rows_of(k_tma[1], first_key, keys.length, tile, head_kv,
                                 self.k_is_ragged, features.packed_k),
                    block,
                    (None, 0),
                )
                gV = cute.local_tile(
                    self.rows_of(v_tma[1], first_key, keys.length, tile, head_kv,
                                 self.k_is_ragged, features.packed_k),
                    block_v,
                    (None, 0),
                )
                num_blocks = keys.end - keys.first
                if num_blocks > 0:
                    self.load_block(k_tma[0], gK, sK, k_pipeline, keys.end - 1,
                                    self.stage_at(blocks_loaded, stages, True))
                for w in cutlass.range_constexpr(warpgroups):
                    self.load_block(q_tma[0], gQ, sQ, q_pipeline, tile.m_block * warpgroups + w,
                                    self.stage_at(tiles_loaded * warpgroups + w, warpgroups, True))
                for i in cutlass.range(1, num_blocks, unroll=1):
                    n_block = keys.end - 1 - i
                    self.load_block(k_tma[0], gK, sK, k_pipeline, n_block,
                                    self.stage_at(blocks_loaded + i, stages, True))
                    self.load_block(v_tma[0], gV, sV, v_pipeline, n_block + 1,
                                    self.stage_at(blocks_loaded + i - 1, stages, True))
                if num_blocks > 0:
                    self.load_block(v_tma[0], gV, sV, v_pipeline, keys.first,
                                    self.stage_at(blocks_loaded + num_blocks - 1, stages, True))
                blocks_loaded = blocks_loaded + num_blocks
                tiles_loaded = tiles_loaded + 1
            tile_idx = tile_idx + cute.arch.grid_dim()[0]
        # No tail: barriers are this CTA's own, and its shared memory lives until its last warp.

    @cute.jit
    def rows_of(
        self,
        mX: cute.Tensor,
        start: Int32,
        length: Int32,
        tile: Tile,
        head_idx: Int32,
        is_ragged: cutlass.Constexpr[bool],
        is_packed: cutlass.Constexpr[bool],
    ):
        return global_view.one_sequence(
            mX, start, length, head_idx, tile.batch_idx, is_ragged, is_packed
        )

    @cute.jit
    def load_block(
        self,
        atom: cute.CopyAtom,
        gX: cute.Tensor,
        sX: cute.Tensor,
        ring: pipeline.PipelineAsync,
        block_idx: Int32,
        state: pipeline.PipelineState,
    ):
        """Copy block ``block_idx`` of gX (rows, dim, blocks) to the stage of sX, once it is free."""
        tXsX, tXgX = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        ring.producer_acquire(state)
        cute.copy(
            atom,
            tXgX[None, block_idx],
            tXsX[None, state.index],
            tma_bar_ptr=ring.producer_get_barrier(state),
        )

    @cute.jit
    def attend(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        o_tma,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sVt: cute.Tensor,
        sO: cute.Tensor,
        q_pipeline: pipeline.PipelineAsync,
        k_pipeline: pipeline.PipelineAsync,
        v_pipeline: pipeline.PipelineAsync,
        sequences,
        scales,
        window,
        tiles,
        fills_padding: Int32,
    ):
        """Consumer warpgroups: scores, softmax, P V and output of 64 query rows each."""
        schedule, features = self.schedule, self.features
        warpgroups = schedule.consumer_warpgroups
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP

        # Descriptors are a warpgroup's, not a thread's.
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        tSrQ = mma_qk.make_fragment_A(qk.partition_A(sQ[None, None, wg]))  # (MMA, M, K)
        tSrK = mma_qk.make_fragment_B(qk.partition_B(sK))  # (MMA, N, K, stages)
        tOrV = mma_pv.make_fragment_B(pv.partition_B(sVt))  # (MMA, N, K, stages)
        scores = cute.make_rmem_tensor(
            mma_qk.partition_shape_C((ROWS, schedule.tile_n)), Float32
        )
        out = cute.make_rmem_tensor(
            mma_pv.partition_shape_C((ROWS, schedule.head_dim_v)), Float32
        )
        probabilities = cute.make_rmem_tensor_like(scores, self.dtype)
        fragments = (tSrQ, tSrK, tOrV, scores, out, probabilities)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        rescale = cute.make_rmem_tensor(2, Float32)
        rows = (row_max, row_sum, rescale)

        if const_expr(schedule.takes_turns):
            if wg == warpgroups - 1:
                # The turn that nobody passes on: the first one of warpgroup 0.
                self.turn(0).arrive()

        blocks_read = Int32(0)
        tiles_read = Int32(0)
        tile_idx = cute.arch.block_idx()[0]
        while tile_idx < tiles[0]:
            tile, bounds_q, _, keys = self.locate(tile_idx, sequences, window, tiles)
            if tile.m_block * schedule.tile_m < bounds_q.rows:
                # Query row of this thread's first accumulator row; the other is 8 further.
                row = (
                    tile.m_block * schedule.tile_m
                    + wg * ROWS
                    + thread // 32 * 16
                    + thread % 32 // 4
                )
                q_state = pipeline.PipelineState(warpgroups, tiles_read, wg, tiles_read & 1)
                q_pipeline.consumer_wait(q_state)
                out.fill(0.0)
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                if keys.first < keys.end:
                    blocks_read = self.attend_keys(
                        mma_qk, mma_pv, fragments, rows, k_pipeline, v_pipeline,
                        wg, row, thread % 4 * 2, keys, scales, window, blocks_read,
                    )
                if const_expr(not schedule.o_shares_q):
                    q_pipeline.consumer_release(q_state)
                self.normalise(mLSE, mSink, out, rows, tile, bounds_q, row, thread, scales)
                self.store_output(
                    mma_pv, o_tma, out, sO, q_pipeline, q_state, tile, bounds_q, wg, thread,
                    fills_padding,
                )
                tiles_read = tiles_read + 1
            tile_idx = tile_idx + cute.arch.grid_dim()[0]
        # Shared memory has to outlive the copies that read it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def turn(self, wg):
        """Barrier at which warpgroup ``wg`` waits for its turn to issue matmuls."""
        return pipeline.NamedBarrier(barrier_id=Barrier.TURN + wg, num_threads=2 * WARPGROUP)

    @cute.jit
    def attend_keys(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        fragments,
        rows,
        k_pipeline: pipeline.PipelineAsync,
        v_pipeline: pipeline.PipelineAsync,
        wg: Int32,
        row: Int32,
        column: Int32,
        keys: KeyRange,
        scales,
        window,
        blocks_read: Int32,
    ):
        """All key blocks of one query tile, last to first; returns the new count of blocks read.

        P V of a block is issued behind Q K of the next one, and runs while that one's softmax is
        computed. Leaves the unnormalised output and the row statistics in registers.
        """
        schedule, features = self.schedule, self.features
        tSrQ, tSrK, tOrV, scores, out, probabilities = fragments
        where = (wg, row, column, keys, scales, window)

        # The first block has nothing to overlap with.
        k_state = self.stage_at(blocks_read, schedule.stages, False)
        k_pipeline.consumer_wait(k_state)
        self.matmul(mma_qk, scores, tSrQ, tSrK[None, None, None, k_state.index], False)
        warpgroup.wait_group(0)
        k_pipeline.consumer_release(k_state)
        self.softmax(scores, rows, where, keys.end - 1, is_first=True, is_masked=True)
        accumulator.round_into(probabilities, scores)

        rest = keys.end - 1
        clear_end = cutlass.min(keys.clear_end, rest)
        clear_first = cutlass.min(keys.clear_first, clear_end)
        if const_expr(features.has_right_bound):
            for i in cutlass.range(rest - clear_end, unroll=1):
                self.block_step(mma_qk, mma_pv, fragments, rows, k_pipeline, v_pipeline, where,
                                rest - 1 - i, blocks_read + i, is_masked=True)
            blocks_read = blocks_read + (rest - clear_end)
            rest = clear_end
        for i in cutlass.range(rest - clear_first, unroll=1):
            self.block_step(mma_qk, mma_pv, fragments, rows, k_pipeline, v_pipeline, where,
                            rest - 1 - i, blocks_read + i, is_masked=False)
        blocks_read = blocks_read + (rest - clear_first)
        if const_expr(features.has_left_bound):
            for i in cutlass.range(clear_first - keys.first, unroll=1):
                self.block_step(mma_qk, mma_pv, fragments, rows, k_pipeline, v_pipeline, where,
                                clear_first - 1 - i, blocks_read + i, is_masked=True)
            blocks_read = blocks_read + (clear_first - keys.first)

        v_state = self.stage_at(blocks_read, schedule.stages, False)
        v_pipeline.consumer_wait(v_state)
        self.matmul(mma_pv, out, accumulator.as_operand_a(probabilities),
                    tOrV[None, None, None, v_state.index], True)
        warpgroup.wait_group(0)
        v_pipeline.consumer_release(v_state)
        return blocks_read + 1

    @cute.jit
    def block_step(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        fragments,
        rows,
        k_pipeline: pipeline.PipelineAsync,
        v_pipeline: pipeline.PipelineAsync,
        where,
        n_block: Int32,
        blocks_read: Int32,
        is_masked: cutlass.Constexpr[bool],
    ):
        """Scores and softmax of block ``n_block``, with P V of the block before it underneath.

        blocks_read  ring position of the block before; its probabilities are in registers
        """
        schedule = self.schedule
        tSrQ, tSrK, tOrV, scores, out, probabilities = fragments
        wg = where[0]
        k_state = self.stage_at(blocks_read + 1, schedule.stages, False)
        v_state = self.stage_at(blocks_read, schedule.stages, False)
        k_pipeline.consumer_wait(k_state)
        if const_expr(schedule.takes_turns):
            self.turn(wg).arrive_and_wait()
        self.matmul(mma_qk, scores, tSrQ, tSrK[None, None, None, k_state.index], False)
        v_pipeline.consumer_wait(v_state)
        self.matmul(mma_pv, out, accumulator.as_operand_a(probabilities),
                    tOrV[None, None, None, v_state.index], True)
        if const_expr(schedule.takes_turns):
            following = (wg + 1) % schedule.consumer_warpgroups
            self.turn(following).arrive()
        warpgroup.wait_group(1)
        self.softmax(scores, rows, where, n_block, is_first=False, is_masked=is_masked)
        k_pipeline.consumer_release(self.known_after(k_state, rows[1]))
        warpgroup.wait_group(0)
        v_pipeline.consumer_release(v_state)
        scale_rows(accumulator.by_row(out), rows[2])
        accumulator.round_into(probabilities, scores)

    @cute.jit
    def known_after(self, state: pipeline.PipelineState, row_sum: cute.Tensor):
        """The same state, made to depend on the row sums, so that it is known only after them.

        ptxas sees no reason to compute the exponentials before it waits for P V, and moves the
        wait ahead of them: softmax and matmul then take turns instead of overlapping (seen in
        SASS; d128 full lost 13 %). It does keep the wait behind the release of K, and the release
        behind what its address is made of. A sum of exponentials is never negative (nor is a NaN
        less than zero), which the compiler cannot know.
        """
        never = Int32(1) if row_sum[0] + row_sum[1] < 0.0 else Int32(0)
        return pipeline.PipelineState(
            self.schedule.stages, state.count, state.index + never, state.phase
        )

    @cute.jit
    def matmul(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        accumulates: cutlass.Constexpr[bool],
    ):
        """Issue acc (+)= a b as one wgmma group; the caller waits for it."""
        # An atom of our own: the accumulate flag is state, which must not leave this region.
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulates)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def softmax(
        self,
        scores: cute.Tensor,
        rows,
        where,
        n_block: Int32,
        is_first: cutlass.Constexpr[bool],
        is_masked: cutlass.Constexpr[bool],
    ):
        """Turn the raw products of one block into probabilities, updating the row statistics."""
        features = self.features
        _, row, column, keys, (softmax_scale, softcap), (left, right) = where
        row_max, row_sum, rescale = rows
        scale_log2 = Float32(LOG2_E)
        if const_expr(features.score == "softcap"):
            soft_cap(scores, softmax_scale, softcap)
        elif const_expr(features.score == "scaled"):
            scale_scores(scores, softmax_scale)
        else:
            scale_log2 = softmax_scale * LOG2_E
        by_row = accumulator.by_row(scores)
        if const_expr(is_masked):
            mask_scores(
                by_row,
                n_block * self.schedule.tile_n + column,
                row,
                keys.length,
                keys.diagonal,
                left,
                right,
                features.has_left_bound,
                features.has_right_bound,
            )
        online_softmax_step(
            by_row, row_max, row_sum, rescale, scale_log2, is_first, may_hide_all=is_masked
        )

    @cute.jit
    def normalise(
        self,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        out: cute.Tensor,
        rows,
        tile: Tile,
        bounds_q,
        row: Int32,
        thread: Int32,
        scales,
    ):
        """Divide the output by its row sums and store the LSE."""
        features = self.features
        row_max, row_sum, factors = rows
        scale_log2 = Float32(LOG2_E)
        if const_expr(features.score == "plain"):
            scale_log2 = scales[0] * LOG2_E
        sink_log2 = Float32(0.0)
        if const_expr(features.sink_dtype is not None):
            sink_log2 = mSink[tile.head_idx].to(Float32) * LOG2_E
        for r in cutlass.range_constexpr(2):
            factor, lse = finish_row(
                row_max[r], row_sum[r], scale_log2, sink_log2, features.sink_dtype is not None
            )
            this_row = row + 8 * r
            if this_row >= bounds_q.length:
                # Padding: what was computed for it came from zeros.
                factor = Float32(0.0)
                lse = -Float32.inf
            factors[r] = factor
            if thread % 4 == 0:
                if this_row < bounds_q.rows:
                    if const_expr(features.packed_q):
                        mLSE[bounds_q.start + this_row, tile.head_idx] = lse
                    else:
                        mLSE[this_row, tile.head_idx, tile.batch_idx] = lse
        scale_rows(accumulator.by_row(out), factors)

    @cute.jit
    def store_output(
        self,
        mma_pv: cute.TiledMma,
        o_tma,
        out: cute.Tensor,
        sO: cute.Tensor,
        q_pipeline: pipeline.PipelineAsync,
        q_state: pipeline.PipelineState,
        tile: Tile,
        bounds_q,
        wg: Int32,
        thread: Int32,
        fills_padding: Int32,
    ):
        """Registers -> stmatrix -> this warpgroup's slab -> TMA store, clipped to the sequence."""
        schedule, features = self.schedule, self.features
        barrier = pipeline.NamedBarrier(
            barrier_id=Barrier.EPILOGUE + wg, num_threads=WARPGROUP
        )
        stores = cute.arch.make_warp_uniform(thread // 32) == 0
        slab = sO[None, None, wg]

        # The slab is free once the previous tile's copy has read it (own buffer), and once every
        # warp of the warpgroup is done with Q (shared buffer).
        if stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        barrier.arrive_and_wait()
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        r2s = cute.make_tiled_copy_C(stmatrix, mma_pv)
        thr = r2s.get_slice(thread)
        rounded = cute.make_rmem_tensor_like(out, self.dtype)
        accumulator.round_into(rounded, out)
        cute.copy(r2s, thr.retile(rounded), thr.partition_D(slab))
        # Make these writes visible to the TMA engine before anyone starts it.
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        if stores:
            stored_rows = bounds_q.rows
            if const_expr(self.q_is_ragged):
                stored_rows = bounds_q.rows if fills_padding != 0 else bounds_q.length
            gO = cute.local_tile(
                self.rows_of(o_tma[1], bounds_q.start, stored_rows, tile, tile.head_idx,
                             self.q_is_ragged, features.packed_q),
                (ROWS, schedule.head_dim_v),
                (tile.m_block * schedule.consumer_warpgroups + wg, 0),
            )
            tOsO, tOgO = cpasync.tma_partition(
                o_tma[0], 0, cute.make_layout(1), cute.group_modes(slab, 0, 2),
                cute.group_modes(gO, 0, 2),
            )
            cute.copy(o_tma[0], tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(schedule.o_shares_q):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                q_pipeline.consumer_release(q_state)


def compile_forward(
    features: ForwardFeatures, schedule: ForwardSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `HopperForward.__call__`.

    Strides of q, k, v and o are promised nothing here: `global_view.rows_first` relies on the
    caller's check that every stride in use is a multiple of 16 bytes.
    """
    dtype = DTYPES[features.dtype]
    fake = cute.runtime.make_fake_tensor

    def rows_tensor(is_packed: bool):
        modes = 3 if is_packed else 4
        shape = tuple(cute.sym_int() for _ in range(modes))
        stride = (*(cute.sym_int64() for _ in range(modes - 1)), 1)
        return fake(dtype, shape, stride, assumed_align=global_view.TMA_ALIGNMENT)

    def vector(element, present: bool):
        return fake(element, (cute.sym_int(),), (1,)) if present else None

    lse_modes = 2 if features.packed_q else 3
    mLSE = fake(
        Float32,
        tuple(cute.sym_int() for _ in range(lse_modes)),
        (*(cute.sym_int64() for _ in range(lse_modes - 1)), 1),
    )
    return cute.compile(
        HopperForward(features, schedule),
        rows_tensor(features.packed_q),
        rows_tensor(features.packed_k),
        rows_tensor(features.packed_k),
        rows_tensor(features.packed_q),
        mLSE,
        vector(Int32, features.packed_q),
        vector(Int32, features.packed_k),
        vector(Int32, features.has_seqused_q),
        vector(Int32, features.has_seqused_k),
        vector(DTYPES.get(features.sink_dtype), features.sink_dtype is not None),
        Float32(1.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(1),
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip(),
    )
