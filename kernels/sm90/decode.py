"""Hopper attention over a key/value cache: packed query heads, split keys, pages of any size.

    out[i, :] = sum_j p[i, j] v[j, :] / l[i],   p[i, j] = exp(x[i, j] - m[i]),   x = scale * q k^T
    lse[i] = m[i] + ln l[i]

over the positions j of the cache that query i sees. The query heads that share a key head are
packed into the rows of one tile (`blocks.gqa_packing`), so that each key is read once; the keys of
a tile are divided among CTAs (`blocks.key_splits`). Of those the last to finish merges the partial
results of all (`kernels.combine`).
Method: FA2 and Flash-Decoding (split keys), FA3 section 3.1 (roles), stream-K (equal shares).

Roles (1 + W warpgroups; W = tile_m / 64)
  warpgroup 0       load      copies K and V block by block. With TMA its warp 0 requests K and its
                              warp 1 V; rows in pages too small for TMA, or not 16-byte aligned,
                              are gathered by all four warps with cp.async
  warpgroups 1..W   attend    each owns 64 packed rows from the loading of Q to the stored output

Shared memory (sizes in elements of q's type; `DecodeSchedule.smem_bytes`)
  sQ   (64, head_dim, W)               one slab a warpgroup, written by that warpgroup
  sK   (tile_n, head_dim, stages)
  sV   (tile_n, head_dim_v, stages)    read transposed, as the N-major B operand of P V

Hand-offs
  k,v  filled by load from the last block to the first; `PipelineTmaAsync`, or `PipelineCpAsync`
       where rows are gathered (`PipelineAsync` where that is by ordinary loads, because rows are
       only 2-byte aligned); released by all warps of attend

Positions out of use may hold NaN. Scores of such keys are masked, and their values must not meet a
probability of 0: what is copied with them is overwritten with zeros (`clear_dead_values`).
"""

from enum import IntEnum
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fa4.kernels import combine
from fa4.kernels.blocks import accumulator, fake_tensors, global_view
from fa4.kernels.blocks.gqa_packing import (
    PackedRange,
    divide,
    mask_packed,
    row_limits,
)
from fa4.kernels.blocks.key_splits import (
    NOTHING,
    WHOLE,
    Call,
    Cursor,
    Entry,
    KeySplits,
    Parts,
    Segment,
    Shares,
)
from fa4.kernels.blocks.matmul import matmul
from fa4.kernels.blocks.online_softmax import (
    LOG2_E,
    finish_row,
    online_softmax_step,
    scale_rows,
    scale_scores,
    soft_cap,
)
from fa4.kernels.blocks.paging import (
    ASYNC_BYTES,
    CHUNK,
    CHUNK_BYTES,
    Addressing,
    gather_rows,
    locate_position,
    row_address,
    swizzled,
    vector_at,
)
from fa4.kernels.blocks.tma_rings import stage_at
from fa4.kernels.features import DecodeFeatures
from fa4.pipelines.registers import WARPGROUP
from fa4.pipelines.sm90_decode import DecodeNumbers, DecodeSchedule

ROWS = 64  # packed query rows of a warpgroup: M of one wgmma
WARPS = 4  # of a warpgroup
DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA's own. QUERIES takes one id a warpgroup from here."""

    VALUES = 1
    PARTS = 2
    QUERIES = 3


class Tma(NamedTuple):
    """A TMA copy of one slab of columns, and the tensor of coordinates that it takes."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Caches(NamedTuple):
    """K and V, (slots, rows, heads, dim); their TMA copies, if any; where positions lie."""

    k_tma: Optional[Tma]
    v_tma: Optional[Tma]
    k: cute.Tensor
    v: cute.Tensor
    addressing: Addressing


class Results(NamedTuple):
    """Where results go. partial and counters are None where no tile is split; see
    `HopperDecode.__call__`."""

    out: cute.Tensor
    lse: cute.Tensor
    partial: Optional[cute.Tensor]
    counters: Optional[cute.Tensor]
    sink: Optional[cute.Tensor]


class RowPlace(NamedTuple):
    """`paging.row_address` of a lane's row of K and of V, and which lanes' rows are live."""

    k_high: Int32
    k_low: Int32
    v_high: Int32
    v_low: Int32
    live: Int32


class Rings(NamedTuple):
    """The buffers that load fills and attend drains."""

    k: pipeline.PipelineAsync
    v: pipeline.PipelineAsync


class Fragments(NamedTuple):
    """What a consumer warpgroup multiplies and keeps in registers.

    q, k, v                      shared-memory operands: (MMA, M or N, K[, stages])
    scores, out                  fp32 accumulators of q k^T and P V
    probabilities                scores in 16 bits, the A operand of P V
    row_max, row_sum, rescale    (2,) statistics of this thread's two rows
    begin, end                   (2,) positions that they see
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    scores: cute.Tensor
    out: cute.Tensor
    probabilities: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    rescale: cute.Tensor
    begin: cute.Tensor
    end: cute.Tensor


class Place(NamedTuple):
    """Where a consumer thread is: warpgroup, thread in it, and its first accumulator element."""

    warpgroup: Int32
    thread: Int32
    row: Int32  # in the tile; the thread's other row is 8 further
    column: Int32  # key in the block


class HopperDecode:
    """One compiled decode kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: DecodeFeatures, schedule: DecodeSchedule):
        self.features = features
        self.schedule = schedule
        self.splits = KeySplits(features, schedule)
        self.dtype = DTYPES[features.dtype]
        self.gathers = schedule.copy_rows == 0
        if not self.gathers and features.cache_align < CHUNK_BYTES:
            raise ValueError(
                f"copy_rows={schedule.copy_rows}: TMA cannot read a cache that is aligned to "
                f"{features.cache_align} bytes"
            )
        self.has_front = features.has_left_bound or features.has_leftpad

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mPartial: Optional[cute.Tensor],
        mCounters: Optional[cute.Tensor],
        mCuQ: Optional[cute.Tensor],
        mLengths: cute.Tensor,
        mCuNew: Optional[cute.Tensor],
        mLeftpad: Optional[cute.Tensor],
        mTable: Optional[cute.Tensor],
        mSink: Optional[cute.Tensor],
        numbers: DecodeNumbers,
        fills_padding: Int32,
        stores_lse: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mQ, mO       (batch, rows, heads_q, dim) or packed (total, heads_q, dim)
        mK, mV       (slots, rows, heads_kv, dim); all four with a unit last stride, addresses and
                     strides as the features' q_align and cache_align say
        mLSE         (batch, heads_q, rows) or packed (heads_q, total), fp32
        mPartial     (slots, slot_rows, head_dim_v + 4) fp32, contiguous: partial outputs, each row
                     with its LSE behind it; 4 keep rows 16-byte aligned
        mCounters    int32, one for each CTA (balanced) or tile: parts that are there. 0 before a
                     launch, and again after it
        mCuQ         (batch + 1,) int32 where queries are packed
        mLengths     (batch,) int32: positions in use before new keys
        mCuNew       (batch + 1,) int32 where new keys are packed
        mLeftpad     (batch,) int32
        mTable       (batch, pages) or (batch,) int32, see `blocks.paging`
        mSink        (heads_q,)
        fills_padding, stores_lse  see `key_splits.Call`
        """
        schedule = self.schedule
        tile_n, warpgroups = schedule.tile_n, schedule.warpgroups
        head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v

        row_major = tensor_utils.LayoutEnum.ROW_MAJOR
        col_major = tensor_utils.LayoutEnum.COL_MAJOR
        sQ_layout = sm90.make_smem_layout_a(
            row_major, (ROWS, tile_n, head_dim), self.dtype, warpgroups
        )
        sK_layout = sm90.make_smem_layout_b(
            row_major, (ROWS, tile_n, head_dim), self.dtype, schedule.stages
        )
        # The same bytes twice: keys by dims as they are copied, dims by keys as P V reads them.
        sV_layout = sm90.make_smem_layout_b(
            row_major, (ROWS, tile_n, head_dim_v), self.dtype, schedule.stages
        )
        sVt_layout = sm90.make_smem_layout_b(
            col_major, (ROWS, head_dim_v, tile_n), self.dtype, schedule.stages
        )
        k_tma = v_tma = None
        if const_expr(not self.gathers):
            k_tma = self.tma(mK, sK_layout, head_dim)
            v_tma = self.tma(mV, sV_layout, head_dim_v)
        addressing = Addressing(mTable, mK.shape[1], mK.shape[0])
        caches = Caches(k_tma, v_tma, mK, mV, addressing)

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

        @cute.struct
        class SharedStorage:
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * schedule.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * schedule.stages]
            parts_before: cute.struct.MemRange[Int32, 1]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sQ_layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sK_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sV_layout)], 1024]

        self.shared_storage = SharedStorage

        heads_q = mQ.shape[cute.rank(mQ) - 2]
        heads_kv = mK.shape[2]
        group = heads_q // heads_kv
        batch = mLengths.shape[0]
        if const_expr(self.features.packed_q):
            rows_q = mQ.shape[0]
            # Slots that hold any packing; see `KeySplits.find_slot`.
            num_m_blocks = rows_q * group // schedule.tile_m + batch
            num_tiles = num_m_blocks * heads_kv
        else:
            rows_q = mQ.shape[1]
            num_m_blocks = cute.ceil_div(rows_q * group, schedule.tile_m)
            num_tiles = num_m_blocks * heads_kv * batch
        num_items = num_tiles
        if const_expr(schedule.merges):
            num_items = num_tiles * numbers.num_splits
        sharers = numbers.max_ctas // numbers.head_groups
        ctas = cutlass.min(num_items, numbers.max_ctas)
        if const_expr(schedule.is_balanced):
            ctas = sharers * numbers.head_groups
        call = Call(
            mCuQ,
            mLengths,
            mCuNew,
            mLeftpad,
            batch,
            rows_q,
            numbers.new_rows,
            heads_kv,
            group,
            num_m_blocks,
            num_tiles,
            numbers.num_splits,
            sharers,
            numbers.head_groups,
            numbers.slot_rows,
            numbers.softmax_scale,
            numbers.softcap,
            numbers.left,
            numbers.right,
            fills_padding,
            stores_lse,
        )
        results = Results(mO, mLSE, mPartial, mCounters, mSink)
        self.kernel.set_name_prefix(
            f"fa4_sm90_decode_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            mQ, caches, results, mma_qk, mma_pv, (sQ_layout, sK_layout, sV_layout, sVt_layout), call
        ).launch(
            grid=(ctas, 1, 1),
            block=(schedule.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            **self.residency(),
        )

    def residency(self):
        """Launch options that give a CTA its share of the registers where several share an SM."""
        if self.schedule.ctas_per_sm == 1:
            return {}
        # Without the second one the DSL would ask a driver, which a compiling machine may lack.
        return {"min_blocks_per_mp": self.schedule.ctas_per_sm, "preferred_smem_carveout": 100}

    def tma(self, cache: cute.Tensor, staged_layout, dim: int):
        """A copy of ``copy_rows`` rows of one slab of columns (`paging.swizzled`) of a cache."""
        slab = 64 if dim % 64 == 0 else 32
        tile = (self.schedule.copy_rows, slab)
        one_stage = cute.slice_(staged_layout, (None, None, 0))
        slab_layout = cute.make_composed_layout(
            one_stage.inner, 0, cute.make_layout(tile, stride=(slab, 1))
        )
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), global_view.rows_first(cache), slab_layout, tile
        )
        return Tma(atom, coordinates)

    # -------------------------------------------------------------- device side
    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        caches: Caches,
        results: Results,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layouts,
        call: Call,
    ):
        schedule = self.schedule
        sQ_layout, sK_layout, sV_layout, sVt_layout = layouts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if const_expr(not self.gathers):
            if warp_idx == 0:
                cpasync.prefetch_descriptor(caches.k_tma.atom)
                cpasync.prefetch_descriptor(caches.v_tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        sVt = storage.sV.get_tensor(sVt_layout.outer, swizzle=sVt_layout.inner)
        rings = Rings(self.ring(storage.k_barriers, sK), self.ring(storage.v_barriers, sV))
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        # Launched before the kernel in front has ended, which may write what is read from here on;
        # and the one behind may be launched, which waits likewise.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if warp_idx < WARPS:
            if const_expr(schedule.moves_registers):
                cute.arch.setmaxregister_decrease(schedule.producer_registers)
            if const_expr(self.gathers):
                self.gather(storage.sK.data_ptr(), storage.sV.data_ptr(), caches, rings, call)
            elif warp_idx == 0:
                self.load(caches.k_tma, sK, rings.k, caches.addressing, call)
            elif warp_idx == 1:
                self.load(caches.v_tma, sV, rings.v, caches.addressing, call)
        else:
            if const_expr(schedule.moves_registers):
                cute.arch.setmaxregister_increase(schedule.consumer_registers)
            self.attend(
                mQ,
                results,
                mma_qk,
                mma_pv,
                sQ,
                sK,
                sVt,
                storage.sQ.data_ptr(),
                storage.sV.data_ptr(),
                storage.parts_before.data_ptr(),
                rings,
                call,
            )

    def ring(self, barriers, buffer: cute.Tensor):
        """A pipeline whose stages load fills and all warps of attend give back."""
        schedule = self.schedule
        group = lambda count: pipeline.CooperativeGroup(pipeline.Agent.Thread, count)  # noqa: E731
        if self.gathers:
            by_cp_async = self.features.cache_align >= ASYNC_BYTES
            kind = pipeline.PipelineCpAsync if by_cp_async else pipeline.PipelineAsync
            return kind.create(
                num_stages=schedule.stages,
                producer_group=group(WARPGROUP),
                consumer_group=group(WARPGROUP * schedule.warpgroups),
                barrier_storage=barriers.data_ptr(),
                defer_sync=True,
            )
        return pipeline.PipelineTmaAsync.create(
            num_stages=schedule.stages,
            producer_group=group(1),
            consumer_group=group(WARPS * schedule.warpgroups),
            tx_count=cute.size_in_bytes(buffer.element_type, buffer[None, None, 0].layout),
            barrier_storage=barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    # Every role walks the same list of segments:
    #     cursor, shares = self.first_place(call)
    #     while cursor.at < cursor.stop:
    #         segment, cursor = self.next_place(cursor, shares, call)
    @cute.jit
    def first_place(self, call: Call):
        """(cursor in front of this CTA's first segment, how keys are shared)."""
        cta = Int32(cute.arch.block_idx()[0])
        if const_expr(self.schedule.is_balanced):
            shares = self.splits.shares(call)
            return self.splits.first_place(cta, shares, call), shares
        stop = Int32(call.num_tiles)
        if const_expr(self.schedule.merges):
            stop = call.num_tiles * call.num_splits
        none = Int32(0)
        return Cursor(cta, stop, Entry(none, none, none)), Shares(none, none, none, none)

    @cute.jit
    def next_place(self, cursor: Cursor, shares: Shares, call: Call):
        """(segment at the cursor, cursor behind it)."""
        if const_expr(self.schedule.is_balanced):
            cta = Int32(cute.arch.block_idx()[0])
            return self.splits.next_place(cursor, cta, shares, call)
        segment = self.splits.fixed_segment(cursor.at, call)
        return segment, Cursor(cursor.at + cute.arch.grid_dim()[0], cursor.stop, cursor.entry)

    # -- load --------------------------------------------------------------------
    @cute.jit
    def load(
        self,
        tma: Tma,
        sX: cute.Tensor,
        ring: pipeline.PipelineAsync,
        addressing: Addressing,
        call: Call,
    ):
        """Warp 0 for K, warp 1 for V: request block by block, as far ahead as buffers are free.

        A block is tile_n / copy_rows copies, each inside one page. Lane c looks up the page of copy
        c, one block ahead; a copy without a live key asks for a slot outside of the cache, which
        TMA answers with zeros.
        """
        blocks_loaded = Int32(0)
        cursor, shares = self.first_place(call)
        while cursor.at < cursor.stop:
            segment, cursor = self.next_place(cursor, shares, call)
            keys = self.splits.keys(segment.tile.m_block, segment.sequence, call)
            num_blocks = segment.end - segment.first
            slot = Int32(0)
            row = Int32(0)
            if num_blocks > 0:
                slot, row = self.look_up(addressing, segment, keys, segment.end - 1)
            for i in cutlass.range(num_blocks, unroll=1):
                slot_now = slot
                row_now = row
                if i + 1 < num_blocks:
                    slot, row = self.look_up(addressing, segment, keys, segment.end - 2 - i)
                state = stage_at(blocks_loaded + i, self.schedule.stages, True)
                head_kv = segment.tile.head_kv
                self.load_block(tma, sX, ring, state, slot_now, row_now, head_kv)
            blocks_loaded = blocks_loaded + num_blocks
        # No tail: barriers are this CTA's own, and its shared memory lives until its last warp.

    @cute.jit
    def look_up(self, addressing: Addressing, segment: Segment, keys: PackedRange, n_block: Int32):
        """(slot, row) of this lane's copy of a block."""
        rows = self.schedule.copy_rows
        copies = self.schedule.tile_n // rows
        key = n_block * self.schedule.tile_n + cute.arch.lane_idx() % copies * rows
        is_live = (key + rows > keys.lo) & (key < keys.hi)
        return locate_position(addressing, segment.tile.batch_idx, key, is_live)

    @cute.jit
    def load_block(
        self,
        tma: Tma,
        sX: cute.Tensor,
        ring: pipeline.PipelineAsync,
        state: pipeline.PipelineState,
        slot: Int32,
        row: Int32,
        head_kv: Int32,
    ):
        """Copy one block to a stage of sX, once that is free; lane c knows the place of copy c."""
        rows = self.schedule.copy_rows
        dim = cute.size(sX, mode=[1])
        slab = 64 if dim % 64 == 0 else 32
        whole = cute.make_layout(1)
        ring.producer_acquire(state)
        full = ring.producer_get_barrier(state)
        for c in cutlass.range_constexpr(self.schedule.tile_n // rows):
            slot_c = cute.arch.shuffle_sync(slot, offset=c)
            row_c = cute.arch.shuffle_sync(row, offset=c)
            part = tma.tensor[None, None, head_kv, slot_c]
            gX = cute.local_tile(part, (rows, slab), (divide(row_c, rows), None))
            for j in cutlass.range_constexpr(dim // slab):
                target = cute.local_tile(sX[None, None, state.index], (rows, slab), (c, j))
                tXsX, tXgX = cpasync.tma_partition(
                    tma.atom,
                    0,
                    whole,
                    cute.group_modes(target, 0, 2),
                    cute.group_modes(gX[None, None, j], 0, 2),
                )
                cute.copy(tma.atom, tXgX, tXsX, tma_bar_ptr=full)

    @cute.jit
    def gather(self, sK: cute.Pointer, sV: cute.Pointer, caches: Caches, rings: Rings, call: Call):
        """Warps 0 to 3: copy K and V row by row. A lane looks up the place of one row of a block.

        A stage's barrier completes by itself when all of its copies have: nobody waits for them
        here, so that as many blocks are in flight as there are stages.
        """
        schedule = self.schedule
        k_stage = schedule.tile_n * schedule.head_dim
        v_stage = schedule.tile_n * schedule.head_dim_v
        k_chunks, v_chunks = caches.k.shape[3] // CHUNK, caches.v.shape[3] // CHUNK
        # Two warpgroups of consumers leave this one no registers for more.
        how = (WARPS, self.features.cache_align, 4 if schedule.warpgroups == 1 else 2)
        blocks_loaded = Int32(0)
        cursor, shares = self.first_place(call)
        while cursor.at < cursor.stop:
            segment, cursor = self.next_place(cursor, shares, call)
            keys = self.splits.keys(segment.tile.m_block, segment.sequence, call)
            num_blocks = segment.end - segment.first
            row = RowPlace(*[Int32(0) for _ in range(5)])
            if num_blocks > 0:
                row = self.look_up_row(caches, segment, keys, segment.end - 1)
            for i in cutlass.range(num_blocks, unroll=1):
                now = row
                if i + 1 < num_blocks:
                    row = self.look_up_row(caches, segment, keys, segment.end - 2 - i)
                state = stage_at(blocks_loaded + i, self.schedule.stages, True)
                rings.k.producer_acquire(state)
                tile = sK + state.index * k_stage
                source = (now.k_high, now.k_low, now.live, k_chunks)
                gather_rows(tile, *source, schedule.tile_n, schedule.head_dim, *how)
                rings.k.producer_commit(state)
                rings.v.producer_acquire(state)
                tile = sV + state.index * v_stage
                source = (now.v_high, now.v_low, now.live, v_chunks)
                gather_rows(tile, *source, schedule.tile_n, schedule.head_dim_v, *how)
                rings.v.producer_commit(state)
            blocks_loaded = blocks_loaded + num_blocks
        # Shared memory must outlive the copies into it: attend waits for all of them.

    @cute.jit
    def look_up_row(self, caches: Caches, segment: Segment, keys: PackedRange, n_block: Int32):
        """Where this lane's row of a block lies; see `gather_rows`."""
        per_warp = self.schedule.tile_n // WARPS
        own = cute.arch.warp_idx() * per_warp + cute.arch.lane_idx() % per_warp
        key = n_block * self.schedule.tile_n + own
        is_live = (key >= keys.lo) & (key < keys.hi)
        slot, row = locate_position(caches.addressing, segment.tile.batch_idx, key, is_live)
        # Where there is nothing to load, any address will do.
        slot = Int32(cutlass.select_(is_live, slot, Int32(0)))
        k_high, k_low = row_address(caches.k, slot, row, segment.tile.head_kv)
        v_high, v_low = row_address(caches.v, slot, row, segment.tile.head_kv)
        live = cute.arch.vote_ballot_sync(is_live)
        return RowPlace(k_high, k_low, v_high, v_low, Int32(live))

    # -- attend ------------------------------------------------------------------
    @cute.jit
    def attend(
        self,
        mQ: cute.Tensor,
        results: Results,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sVt: cute.Tensor,
        q_bytes: cute.Pointer,
        v_bytes: cute.Pointer,
        parts_before: cute.Pointer,
        rings: Rings,
        call: Call,
    ):
        """Consumer warpgroups: Q, scores, softmax, P V and output of 64 packed rows each.

        Waits for full stages of k and v, and gives them back.
        """
        schedule = self.schedule
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP
        place = Place(wg, thread, wg * ROWS + thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2)

        # Descriptors are a warpgroup's, not a thread's.
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        scores = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, schedule.tile_n)), Float32)
        out = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, schedule.head_dim_v)), Float32)
        regs = Fragments(
            mma_qk.make_fragment_A(qk.partition_A(sQ[None, None, wg])),
            mma_qk.make_fragment_B(qk.partition_B(sK)),
            mma_pv.make_fragment_B(pv.partition_B(sVt)),
            scores,
            out,
            cute.make_rmem_tensor_like(scores, self.dtype),
            *[cute.make_rmem_tensor(2, Float32) for _ in range(3)],
            *[cute.make_rmem_tensor(2, Int32) for _ in range(2)],
        )
        blocks_read = Int32(0)
        cursor, shares = self.first_place(call)
        while cursor.at < cursor.stop:
            segment, cursor = self.next_place(cursor, shares, call)
            first_row = segment.tile.m_block * schedule.tile_m
            if first_row < segment.sequence.q_rows * call.group:
                keys = self.splits.keys(segment.tile.m_block, segment.sequence, call)
                # In front of the output, whose registers it needs.
                if segment.first < segment.end:
                    self.load_queries(mQ, q_bytes, segment, place, call)
                regs.out.fill(0.0)
                regs.row_max.fill(-Float32.inf)
                regs.row_sum.fill(0.0)
                if segment.first < segment.end:
                    for r in cutlass.range_constexpr(2):
                        regs.begin[r], regs.end[r] = row_limits(
                            first_row + place.row + 8 * r,
                            call.group,
                            segment.sequence,
                            call.left,
                            call.right,
                            self.features.has_left_bound,
                            self.features.has_right_bound,
                        )
                    blocks_read = self.attend_keys(
                        mma_qk,
                        mma_pv,
                        regs,
                        rings,
                        v_bytes,
                        place,
                        keys,
                        segment,
                        call,
                        blocks_read,
                    )
                if segment.slot != NOTHING:
                    self.store(results, regs, segment, place, call)
                if const_expr(schedule.merges):
                    if segment.slot >= 0:
                        cta = Int32(cute.arch.block_idx()[0])
                        parts = self.splits.parts(segment, cursor, cta, shares, call)
                        self.merge(results, parts, parts_before, segment, place, call)
        self.fill_padding(results, tidx, call)

    @cute.jit
    def load_queries(
        self, mQ: cute.Tensor, q_bytes: cute.Pointer, segment: Segment, place: Place, call: Call
    ):
        """Copy this warpgroup's 64 packed rows of Q to its slab; rows of nothing become zeros."""
        schedule = self.schedule
        chunks = schedule.head_dim // CHUNK
        heads = cute.rank(mQ) - 2
        barrier = pipeline.NamedBarrier(
            barrier_id=Barrier.QUERIES + place.warpgroup, num_threads=WARPGROUP
        )
        base = self.query_offset(mQ, segment, call)
        first = segment.tile.m_block * schedule.tile_m + place.warpgroup * ROWS
        rows = segment.sequence.q_rows * call.group - first
        slab = q_bytes + place.warpgroup * (ROWS * schedule.head_dim)
        count = ROWS * chunks // WARPGROUP
        values = cute.make_rmem_tensor((CHUNK, count), self.dtype)
        zero = self.dtype(0.0)
        for i in cutlass.range_constexpr(count):
            row, chunk = self.query_chunk(place.thread, i)
            is_live = (row < rows) & (chunk < mQ.shape[heads + 1] // CHUNK)
            values[None, i].fill(zero)
            if is_live:
                position = divide(first + row, call.group)
                head = first + row - position * call.group
                offset = base + Int64(position) * Int64(mQ.stride[heads - 1])
                offset = offset + Int64(head) * Int64(mQ.stride[heads])
                offset = offset + Int64(chunk * CHUNK)
                source = vector_at(mQ.iterator + offset, CHUNK, self.features.q_align)
                values[None, i].store(source.load())
        # Every warp must be done with the matmuls that read the queries before these.
        barrier.arrive_and_wait()
        for i in cutlass.range_constexpr(count):
            row, chunk = self.query_chunk(place.thread, i)
            target = slab + swizzled(row, chunk, ROWS, schedule.head_dim)
            vector_at(target, CHUNK, CHUNK_BYTES).store(values[None, i].load())
        # Make these writes visible to the matmuls, which read through another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()

    @cute.jit
    def query_chunk(self, thread: Int32, i: cutlass.Constexpr[int]):
        """(row of a slab, chunk) of the i-th 16 bytes that a thread copies."""
        chunks = self.schedule.head_dim // CHUNK
        if const_expr(WARPGROUP % chunks == 0):
            # In this form addresses of one thread are seen to differ by constants.
            row = divide(thread, chunks)
            return row + WARPGROUP // chunks * i, thread - row * chunks
        row = divide(thread + WARPGROUP * i, chunks)
        return row, thread + WARPGROUP * i - row * chunks

    def query_offset(self, tensor: cute.Tensor, segment: Segment, call: Call):
        """Element offset in q or o of query 0 and the first head of a segment's tile."""
        heads = cute.rank(tensor) - 2
        head = segment.tile.head_kv * call.group
        offset = Int64(segment.sequence.q_start) * Int64(tensor.stride[heads - 1])
        offset = offset + Int64(head) * Int64(tensor.stride[heads])
        if const_expr(not self.features.packed_q):
            offset = offset + Int64(segment.tile.batch_idx) * Int64(tensor.stride[0])
        return offset

    @cute.jit
    def attend_keys(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        regs: Fragments,
        rings: Rings,
        v_bytes: cute.Pointer,
        place: Place,
        keys: PackedRange,
        segment: Segment,
        call: Call,
        blocks_read: Int32,
    ):
        """All key blocks of a segment, last to first; returns the new count of blocks read.

        P V of a block is issued behind Q K of the next one. Leaves the unnormalised output and the
        row statistics in registers.
        """
        # The first block has nothing to overlap with.
        k_state = stage_at(blocks_read, self.schedule.stages, False)
        self.wait_full(rings.k, k_state)
        matmul(mma_qk, regs.scores, regs.q, regs.k[None, None, None, k_state.index], False)
        warpgroup.wait_group(0)
        rings.k.consumer_release(k_state)
        self.softmax(regs, place, call, segment.end - 1, is_first=True, is_masked=True)
        accumulator.round_into(regs.probabilities, regs.scores)

        # What is left, in the order of visiting: [clear_end, rest) masked by the right bound,
        # [clear_first, clear_end) whole, [first, clear_first) masked in front.
        rest = segment.end - 1
        clear_end = cutlass.min(cutlass.max(keys.clear_end, segment.first), rest)
        clear_first = cutlass.min(cutlass.max(keys.clear_first, segment.first), clear_end)
        step = (mma_qk, mma_pv, regs, rings, v_bytes, place, keys, call)
        if const_expr(self.features.has_right_bound):
            for i in cutlass.range(rest - clear_end, unroll=1):
                self.block_step(*step, rest - 1 - i, blocks_read + i, is_masked=True)
            blocks_read = blocks_read + (rest - clear_end)
            rest = clear_end
        for i in cutlass.range(rest - clear_first, unroll=1):
            self.block_step(*step, rest - 1 - i, blocks_read + i, is_masked=False)
        blocks_read = blocks_read + (rest - clear_first)
        if const_expr(self.has_front):
            for i in cutlass.range(clear_first - segment.first, unroll=1):
                self.block_step(*step, clear_first - 1 - i, blocks_read + i, is_masked=True)
            blocks_read = blocks_read + (clear_first - segment.first)

        v_state = stage_at(blocks_read, self.schedule.stages, False)
        self.wait_full(rings.v, v_state)
        self.clear_dead_values(v_bytes, v_state, place, keys, segment.first)
        p = accumulator.as_operand_a(regs.probabilities)
        matmul(mma_pv, regs.out, p, regs.v[None, None, None, v_state.index], True)
        warpgroup.wait_group(0)
        rings.v.consumer_release(v_state)
        return blocks_read + 1

    @cute.jit
    def block_step(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        regs: Fragments,
        rings: Rings,
        v_bytes: cute.Pointer,
        place: Place,
        keys: PackedRange,
        call: Call,
        n_block: Int32,
        blocks_read: Int32,
        is_masked: cutlass.Constexpr[bool],
    ):
        """Scores and softmax of block ``n_block``, with P V of the block before it underneath.

        blocks_read  ring position of the block before, n_block + 1; its probabilities are in
                     registers
        """
        k_state = stage_at(blocks_read + 1, self.schedule.stages, False)
        v_state = stage_at(blocks_read, self.schedule.stages, False)
        p = accumulator.as_operand_a(regs.probabilities)
        self.wait_full(rings.v, v_state)
        self.clear_dead_values(v_bytes, v_state, place, keys, n_block + 1)
        self.wait_full(rings.k, k_state)
        matmul(mma_qk, regs.scores, regs.q, regs.k[None, None, None, k_state.index], False)
        matmul(mma_pv, regs.out, p, regs.v[None, None, None, v_state.index], True)
        warpgroup.wait_group(1)
        rings.k.consumer_release(k_state)
        self.softmax(regs, place, call, n_block, is_first=False, is_masked=is_masked)
        warpgroup.wait_group(0)
        rings.v.consumer_release(v_state)
        # Before the output is scaled: conversions run at half rate, and the multiplications that
        # follow fill the gaps.
        accumulator.round_into(regs.probabilities, regs.scores)
        scale_rows(accumulator.by_row(regs.out), regs.rescale)

    @cute.jit
    def wait_full(self, ring: pipeline.PipelineAsync, state: pipeline.PipelineState):
        ring.consumer_wait(state)
        if const_expr(self.gathers):
            # The matmuls read through another proxy than cp.async writes.
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_dead_values(
        self,
        v_bytes: cute.Pointer,
        v_state: pipeline.PipelineState,
        place: Place,
        keys: PackedRange,
        n_block: Int32,
    ):
        """Overwrite the rows of a V block that no row of the tile sees with zeros.

        Gathered rows are zeros already, and blocks that are seen whole have none.
        """
        schedule = self.schedule
        tile_n, dim = schedule.tile_n, schedule.head_dim_v
        if const_expr(not self.gathers):
            begin = keys.lo - n_block * tile_n
            end = keys.hi - n_block * tile_n
            if (begin > 0) | (end < tile_n):
                chunks = dim // CHUNK
                threads = WARPGROUP * schedule.warpgroups
                zeros = cute.make_rmem_tensor(CHUNK, self.dtype)
                zeros.fill(0.0)
                stage = v_bytes + v_state.index * (tile_n * dim)
                for i in cutlass.range(tile_n * chunks // threads, unroll=1):
                    index = place.warpgroup * WARPGROUP + place.thread + threads * i
                    row = index // chunks
                    if (row < begin) | (row >= end):
                        target = stage + swizzled(row, index - row * chunks, tile_n, dim)
                        vector_at(target, CHUNK, CHUNK_BYTES).store(zeros.load())
                cute.arch.fence_proxy("async.shared", space="cta")
                pipeline.NamedBarrier(
                    barrier_id=Barrier.VALUES, num_threads=threads
                ).arrive_and_wait()

    def scale_log2(self, call: Call):
        """What turns the scores that the softmax sees into exponents of 2."""
        if self.features.score == "plain":
            return call.softmax_scale * LOG2_E
        return Float32(LOG2_E)

    @cute.jit
    def softmax(
        self,
        regs: Fragments,
        place: Place,
        call: Call,
        n_block: Int32,
        is_first: cutlass.Constexpr[bool],
        is_masked: cutlass.Constexpr[bool],
    ):
        """Turn the raw products of one block into probabilities, updating the row statistics."""
        features = self.features
        if const_expr(features.score == "softcap"):
            soft_cap(regs.scores, call.softmax_scale, call.softcap)
        elif const_expr(features.score == "scaled"):
            scale_scores(regs.scores, call.softmax_scale)
        scores = accumulator.by_row(regs.scores)
        if const_expr(is_masked):
            first_key = n_block * self.schedule.tile_n + place.column
            mask_packed(scores, first_key, regs.begin, regs.end, self.has_front)
        online_softmax_step(
            scores,
            regs.row_max,
            regs.row_sum,
            regs.rescale,
            self.scale_log2(call),
            is_first,
            may_hide_all=is_masked,
        )

    @cute.jit
    def store(self, results: Results, regs: Fragments, segment: Segment, place: Place, call: Call):
        """Normalise, and write the output and the LSE: the final ones, or a partial result.

        A thread's neighbouring columns leave as one store; four lanes fill a sector of 32 bytes.
        """
        is_final = segment.slot == WHOLE
        has_sink = const_expr(results.sink is not None)
        rows = segment.sequence.q_rows * call.group
        acc = accumulator.by_row(regs.out)
        base = self.query_offset(results.out, segment, call)
        for r in cutlass.range_constexpr(2):
            row = segment.tile.m_block * self.schedule.tile_m + place.row + 8 * r
            position = divide(row, call.group)
            head = row - position * call.group
            sink_log2 = -Float32.inf
            if const_expr(has_sink):
                # The sink joins once: in the merge, where there is one.
                if is_final & (row < rows):
                    head_idx = segment.tile.head_kv * call.group + head
                    sink_log2 = results.sink[head_idx].to(Float32) * LOG2_E
            # All lanes, since those of a row add up their sums.
            factor, lse = finish_row(
                regs.row_max[r], regs.row_sum[r], self.scale_log2(call), sink_log2, has_sink
            )
            regs.rescale[r] = factor
            if row < rows:
                if is_final:
                    self.store_row(results.out, base, position, head, acc, r, regs, place)
                    if (call.stores_lse != 0) & (place.column == 0):
                        self.store_lse(results.lse, lse, position, head, segment, call)
                elif const_expr(self.schedule.merges):
                    part_row = row - segment.tile.m_block * self.schedule.tile_m
                    dim = results.out.shape[cute.rank(results.out) - 1]
                    part = (segment.slot, part_row)
                    self.store_partial_row(results.partial, part, dim, acc, r, regs, place)
                    if place.column == 0:
                        results.partial[segment.slot, part_row, dim] = lse

    @cute.jit
    def merge(
        self,
        results: Results,
        parts: Parts,
        parts_before: cute.Pointer,
        segment: Segment,
        place: Place,
        call: Call,
    ):
        """Count a partial result in; where it is the last of its tile, merge all of them.

        Parts are added up in the order of their keys, whoever comes last.
        """
        warpgroups = self.schedule.warpgroups
        barrier = pipeline.NamedBarrier(
            barrier_id=Barrier.PARTS, num_threads=WARPGROUP * warpgroups
        )
        # All rows have been written; the count makes them, and those of others, visible.
        barrier.arrive_and_wait()
        if place.warpgroup * WARPGROUP + place.thread == 0:
            parts_before.store(combine.count_part(results.counters, parts.counter, parts.count))
        barrier.arrive_and_wait()
        if parts_before.load() == parts.count - 1:
            first_row = segment.tile.m_block * self.schedule.tile_m
            rows = cutlass.min(
                segment.sequence.q_rows * call.group - first_row, self.schedule.tile_m
            )
            warp = place.warpgroup * WARPS + place.thread // 32
            for row in cutlass.range(warp, rows, WARPS * warpgroups, unroll=1):
                self.merge_row(results, parts, first_row, row, segment, call)

    @cute.jit
    def merge_row(
        self,
        results: Results,
        parts: Parts,
        first_row: Int32,
        row: Int32,
        segment: Segment,
        call: Call,
    ):
        """One row of a tile from its parts, by one warp."""
        out = results.out
        rank = cute.rank(out)
        dim = out.shape[rank - 1]
        position = divide(first_row + row, call.group)
        head = first_row + row - position * call.group
        sink_log2 = -Float32.inf
        if const_expr(results.sink is not None):
            head_idx = segment.tile.head_kv * call.group + head
            sink_log2 = results.sink[head_idx].to(Float32) * LOG2_E
        width = results.partial.shape[2]
        slot_bytes = Int64(call.slot_rows) * width
        where = (
            parts.first * slot_bytes + row * width,
            parts.second * slot_bytes + row * width,
            parts.step * slot_bytes,
        )
        places = combine.PartPlaces(*where, *where)
        lse_partial = results.partial.iterator + dim
        chunks = -(-self.schedule.head_dim_v // (32 * combine.VECTOR))
        acc = cute.make_rmem_tensor((combine.VECTOR, chunks), Float32)
        reference, total = combine.merged_row(
            acc, results.partial.iterator, lse_partial, places, parts.count, sink_log2, dim
        )
        scale = Float32(0.0)
        if total != 0.0:
            scale = 1.0 / total
        lane = cute.arch.lane_idx()
        offset = self.query_offset(out, segment, call)
        offset = offset + Int64(position) * Int64(out.stride[rank - 3])
        offset = offset + Int64(head) * Int64(out.stride[rank - 2])
        rounded = cute.make_rmem_tensor(combine.VECTOR, self.dtype)
        for c in cutlass.range_constexpr(chunks):
            column = (32 * c + lane) * combine.VECTOR
            if column < dim:
                scaled = acc[None, c]
                for i in cutlass.range_constexpr(combine.VECTOR):
                    scaled[i] = scaled[i] * scale
                accumulator.round_into(rounded, scaled)
                target = out.iterator + (offset + column)
                vector_at(target, combine.VECTOR, min(8, self.features.q_align)).store(
                    rounded.load()
                )
        if (call.stores_lse != 0) & (lane == 0):
            lse = combine.log_of(reference, total)
            self.store_lse(results.lse, lse, position, head, segment, call)

    @cute.jit
    def store_row(
        self,
        out: cute.Tensor,
        base: Int64,
        position: Int32,
        head: Int32,
        acc: cute.Tensor,
        r: cutlass.Constexpr[int],
        regs: Fragments,
        place: Place,
    ):
        """This thread's columns of row ``r`` of its two, rounded to the output."""
        heads = cute.rank(out) - 2
        offset = base + Int64(position) * Int64(out.stride[heads - 1])
        offset = offset + Int64(head) * Int64(out.stride[heads])
        first = out.iterator + (offset + place.column)
        columns = out.shape[heads + 1] - place.column
        pair = cute.make_rmem_tensor(2, Float32)
        rounded = cute.make_rmem_tensor(2, self.dtype)
        for c in cutlass.range_constexpr(0, cute.size(acc, mode=[1]), 2):
            pair[0] = acc[r, c] * regs.rescale[r]
            pair[1] = acc[r, c + 1] * regs.rescale[r]
            accumulator.round_into(rounded, pair)
            target = vector_at(first + 4 * c, 2, min(4, self.features.q_align))
            if 4 * c < columns:
                target.store(rounded.load())

    @cute.jit
    def store_partial_row(
        self,
        partial: cute.Tensor,
        part,
        dim: Int32,
        acc: cute.Tensor,
        r: cutlass.Constexpr[int],
        regs: Fragments,
        place: Place,
    ):
        """This thread's columns of row ``r`` of its two, in float32."""
        slot, row = part
        offset = (Int64(slot) * partial.shape[1] + row) * partial.shape[2]
        first = partial.iterator + (offset + place.column)
        columns = dim - place.column
        pair = cute.make_rmem_tensor(2, Float32)
        for c in cutlass.range_constexpr(0, cute.size(acc, mode=[1]), 2):
            pair[0] = acc[r, c] * regs.rescale[r]
            pair[1] = acc[r, c + 1] * regs.rescale[r]
            target = cute.make_tensor((first + 4 * c).align(8), cute.make_layout(2))
            if 4 * c < columns:
                target.store(pair.load())

    @cute.jit
    def store_lse(
        self,
        mLSE: cute.Tensor,
        lse: Float32,
        position: Int32,
        head: Int32,
        segment: Segment,
        call: Call,
    ):
        head_idx = segment.tile.head_kv * call.group + head
        if const_expr(self.features.packed_q):
            mLSE[head_idx, segment.sequence.q_start + position] = lse
        else:
            mLSE[segment.tile.batch_idx, head_idx, position] = lse

    @cute.jit
    def fill_padding(self, results: Results, tidx: Int32, call: Call):
        """Rows of q behind the last sequence: LSE -inf, and output 0 unless it is the caller's."""
        if const_expr(self.features.packed_q):
            out, threads = results.out, WARPGROUP * self.schedule.warpgroups
            heads, dim = out.shape[1], out.shape[2]
            first = call.cu_seqlens_q[call.batch] + cute.arch.block_idx()[0]
            for row in cutlass.range(first, call.rows_q, cute.arch.grid_dim()[0], unroll=1):
                if call.fills_padding != 0:
                    for i in cutlass.range(tidx, heads * dim, threads, unroll=1):
                        head = divide(i, dim)
                        out[row, head, i - head * dim] = self.dtype(0.0)
                if call.stores_lse != 0:
                    for head in cutlass.range(tidx, heads, threads, unroll=1):
                        results.lse[head, row] = -Float32.inf


def compile_decode(
    features: DecodeFeatures, schedule: DecodeSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `HopperDecode.__call__`.

    Strides of q, k, v and o are promised nothing here: the caller has checked that every stride in
    use is a multiple of what the features say.
    """
    dtype = DTYPES[features.dtype]
    strided = fake_tensors.strided

    def compact(element, modes: int, present: bool = True, align: int | None = None):
        if not present:
            return None
        shape = tuple(cute.sym_int() for _ in range(modes))
        order = tuple(reversed(range(modes)))
        return cute.runtime.make_fake_compact_tensor(
            element, shape, stride_order=order, assumed_align=align
        )

    q_modes = 3 if features.packed_q else 4
    table_modes = {"own": 0, "batch_idx": 1, "page_table": 2}[features.addressing]
    return cute.compile(
        HopperDecode(features, schedule),
        strided(dtype, q_modes, align=features.q_align),
        strided(dtype, 4, align=features.cache_align),
        strided(dtype, 4, align=features.cache_align),
        strided(dtype, q_modes, align=features.q_align),
        strided(Float32, q_modes - 1),
        compact(Float32, 3, schedule.merges, align=16),
        compact(Int32, 1, schedule.merges),
        strided(Int32, 1, features.packed_q),
        strided(Int32, 1),
        strided(Int32, 1, features.packed_new),
        strided(Int32, 1, features.has_leftpad),
        strided(Int32, table_modes, table_modes > 0),
        strided(DTYPES.get(features.sink_dtype), 1, features.sink_dtype is not None),
        DecodeNumbers(Float32(1.0), Float32(0.0), *[Int32(1) for _ in DecodeNumbers._fields[2:]]),
        Int32(1),
        Int32(1),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
