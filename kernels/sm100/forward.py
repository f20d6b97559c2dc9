"""Blackwell forward attention: tensor-memory accumulators, two query tiles in flight.

    o[i, :] = sum_j p[i, j] v[j, :] / l[i],   p[i, j] = exp(x[i, j] - m[i]),   x = scale * q k^T
    lse[i] = m[i] + ln l[i]

over the keys j that row i sees, with softcap, window and sink as `fa4.attention` defines them.
Method: FA2 (query tile outer, key blocks inner, online softmax), FA4 (scores, probabilities and
output in tensor memory, two query tiles in turn, a warpgroup that rescales O off the critical
path, and only where the maximum has risen by a lot).

Roles (T + 2 warpgroups; T = query_tiles)
  warpgroups 0..T-1  softmax     each the scores of its query tile, a row a thread
  warpgroup T        correction  rescales O in tensor memory; at the end divides, rounds, writes it
                                 to shared memory, and stores the LSE
  warpgroup T+1      warp 0 mma      issues every matrix product; owns the tensor memory
                     warp 1 load     issues every TMA load
                     warp 2 store    issues every TMA store
                     warp 3 ask      asks the hardware for further work, in the dynamic order

Tensor memory, by column (`ForwardSchedule.score_column`, `.output_column`)
  S0, S1      tile_n columns each: fp32 scores, then the 16-bit probabilities made from them in the
              first half. With two query tiles one for each; with one the blocks alternate
  O0[, O1]    head_dim_v columns each: fp32 output accumulator of each query tile

Shared memory (sizes in elements of q's type; `ForwardSchedule.smem_bytes`)
  sQ   (128, head_dim) a query tile
  sO   (128, head_dim_v) a query tile; Q's own slab if o_shares_q
  sKV  stages, taken in turn by K (tile_n, head_dim) and V (tile_n, head_dim_v) of block after block

Hand-offs (mbarriers; `Mbarriers`). "block" barriers are indexed by the buffer of scores
  Q_FULL, Q_EMPTY      load -> mma; given back by a commit behind the tile's last Q K^T, or by the
                       store warp when O has left through the slab
  KV_FULL, KV_EMPTY    load -> mma; given back by a commit
  S_FULL       block   mma -> softmax: scores are in tensor memory
  P_FULL       block   softmax -> mma: probabilities have taken their place
  O_READY      block   correction -> mma: O is in the units of the next block's probabilities, or
                       has been taken away if the block was a tile's last. The very first block
                       does not wait
  O_DONE       block   mma -> correction: the block has been added to O
  R_FULL, R_EMPTY      softmax -> correction: one float a row. The factor for O with every block
                       but a tile's first, then the sum and the maximum of the row
  OUT_FULL, OUT_EMPTY  correction -> store: O is in shared memory
  ITEM_FULL, _EMPTY    ask -> everybody: the next work item, in the dynamic order
A query tile that sees no key takes part in the statistics alone: correction stores its zeros.

Matrix products of one CTA are executed in the order they are issued in. So Q K^T of a block may
overwrite probabilities as soon as the P V that reads them has been issued, and with two query
tiles the order P0 V, S0, P1 V, S1 lets each softmax run beside two products of the other tile.

Where few query positions would leave tiles empty, the query heads that share keys share a tile too
(`ForwardSchedule.heads_in_rows`): a row is then a position of one of them.

Blocks are visited from the last to the first, so that the masked ones (sequence end, diagonal)
come first and the loop over whole blocks carries no mask code. A query tile takes part in the
blocks that its own rows see.

Not run on hardware; executed by `fa4.emulator`.
"""

from enum import IntEnum
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from fa4.kernels.blocks import fake_tensors, global_view
from fa4.kernels.blocks.key_range import KeyRange, key_range
from fa4.kernels.blocks.online_softmax import LOG2_E, finish_total, scale_scores, soft_cap
from fa4.kernels.blocks.sequence_bounds import SequenceBounds, sequence_bounds
from fa4.kernels.blocks.tile_order import Tile, count_tiles, locate_tile
from fa4.kernels.features import TMA_ALIGNMENT, ForwardFeatures
from fa4.kernels.sm100 import tensor_memory
from fa4.kernels.sm100.matrix_product import Operand, instruction_descriptor, multiply
from fa4.kernels.sm100.row_softmax import (
    CHUNK,
    LANES,
    add_up,
    exponentials,
    highest_score,
    mask_row,
    part,
    round_into,
)
from fa4.pipelines.sm100 import (
    ELEMENT_BYTES,
    ROWS,
    STATISTICS_STAGES,
    TMEM_COLUMNS,
    WARPGROUP,
    ForwardSchedule,
)

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
WARP = 32
VECTOR = 8  # 16-bit elements of a 16-byte store
ANSWER_BYTES = 16  # of cluster launch control


class Warp(IntEnum):
    """Warps of the last warpgroup, counted from its first."""

    MMA = 0
    LOAD = 1
    STORE = 2
    ASK = 3


class Tma(NamedTuple):
    """A TMA copy, the tensor of coordinates that it takes, and its units where rows are ragged.

    units  of `global_view.ragged`, or of `BlackwellForward.ragged_with_heads`
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    units: Optional[tuple[Int32, ...]]


class Call(NamedTuple):
    """Run-time arguments of a launch that several roles read.

    rows_q, rows_k  extent of the row mode of q, and of k and v
    heads_q         query heads, or groups of them that share a tile
    num_tiles       tiles of all CTAs; the other counts are those of `tile_order.locate_tile`
    fills_padding   whether output rows of padding are set to 0
    stores_lse      whether the LSE is wanted
    """

    cu_seqlens_q: Optional[cute.Tensor]
    cu_seqlens_k: Optional[cute.Tensor]
    seqused_q: Optional[cute.Tensor]
    seqused_k: Optional[cute.Tensor]
    rows_q: Int32
    rows_k: Int32
    heads_q: Int32
    heads_kv: Int32
    num_tiles: Int32
    num_m_blocks: Int32
    num_batches: Int32
    heads_in_group: Int32
    softmax_scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    fills_padding: Int32
    stores_lse: Int32


class Work(NamedTuple):
    """One work item: which it is, the rows of its sequence, and the keys it sees.

    exists      for each query tile: 1 if it has rows of the sequence, padding included
    keys        for each query tile: the blocks its rows see
    first, end  the blocks [first, end) hold all of those
    """

    tile: Tile
    q: SequenceBounds
    k: SequenceBounds
    exists: tuple[Int32, ...]
    keys: tuple[KeyRange, ...]
    first: Int32
    end: Int32


class Mbarriers:
    """Where each mbarrier is, counted from the first, and how many arrivals complete it."""

    def __init__(self, schedule: ForwardSchedule):
        tiles, buffers = schedule.query_tiles, schedule.score_buffers
        warps = WARPGROUP // WARP * schedule.ctas  # of a role: both CTAs tell the one that issues
        own_warps = WARPGROUP // WARP
        self.size = 0
        self.arrivals: list[int] = []
        self.Q_FULL = self._add(tiles, 1)
        self.Q_EMPTY = self._add(tiles, 1)
        self.KV_FULL = self._add(schedule.stages, 1)
        self.KV_EMPTY = self._add(schedule.stages, 1)
        self.S_FULL = self._add(buffers, 1)
        self.P_FULL = self._add(buffers, warps)
        self.O_READY = self._add(buffers, warps)
        self.O_DONE = self._add(buffers, 1)
        self.R_FULL = self._add(tiles * STATISTICS_STAGES, own_warps)
        self.R_EMPTY = self._add(tiles * STATISTICS_STAGES, own_warps)
        self.OUT_FULL = self._add(tiles, own_warps)
        self.OUT_EMPTY = self._add(tiles, 1)
        # Readers of the next work item: everybody but the one that asks, mma in one CTA only.
        readers = schedule.ctas * (own_warps * (tiles + 1) + 2) + 1
        self.ITEM_FULL = self._add(1, 1)
        self.ITEM_EMPTY = self._add(1, readers)
        # Room for an answer of 16 bytes behind the barriers.
        self.ANSWER = -(-self.size // 2) * 2
        self.words = self.ANSWER + 2

    def _add(self, count: int, arrivals: int) -> int:
        first = self.size
        self.size += count
        self.arrivals += [arrivals] * count
        return first


class BlackwellForward:
    """One compiled forward kernel: what it can do (features) and how it does it (schedule)."""

    def __init__(self, features: ForwardFeatures, schedule: ForwardSchedule):
        self.features = features
        self.schedule = schedule
        self.dtype = DTYPES[features.dtype]
        self.q_is_ragged = features.packed_q or features.has_seqused_q
        self.k_is_ragged = features.packed_k or features.has_seqused_k
        self.group = tcgen05.CtaGroup.TWO if schedule.ctas == 2 else tcgen05.CtaGroup.ONE
        self.mbarriers = Mbarriers(schedule)
        # This CTA's part of a block: half of the keys of K, half of the dims of V.
        self.k_rows = schedule.tile_n // schedule.ctas
        self.v_dims = schedule.head_dim_v // schedule.ctas
        self.q_operand = Operand(ROWS, schedule.head_dim, is_transposed=False)
        self.k_operand = Operand(self.k_rows, schedule.head_dim, is_transposed=False)
        self.v_operand = Operand(schedule.tile_n, self.v_dims, is_transposed=True)
        m = schedule.tile_rows
        self.qk_instruction = instruction_descriptor(self.dtype, m, schedule.tile_n, False)
        self.pv_instruction = instruction_descriptor(self.dtype, m, schedule.head_dim_v, True)

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
        stores_lse: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel; the arguments are those of `HopperForward.__call__`.

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
        stores_lse      0: mLSE is a placeholder
        """
        schedule = self.schedule
        tiles = schedule.query_tiles
        head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v
        q, k, v, o = [global_view.rows_first(t) for t in (mQ, mK, mV, mO)]
        rows_q = q.shape[0]
        q_tiled, o_tiled = self.with_heads_in_rows(q), self.with_heads_in_rows(o)

        sQ_layout = self.rows_layout(ROWS, head_dim, tiles)
        sK_layout = self.rows_layout(self.k_rows, head_dim, schedule.stages)
        sV_layout = self.rows_layout(schedule.tile_n, self.v_dims, schedule.stages)
        sO_layout = self.rows_layout(ROWS, head_dim_v, tiles)

        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_tma = self.tma(load, q_tiled, self.q_is_ragged, sQ_layout, (ROWS, head_dim))
        k_tma = self.tma(load, k, self.k_is_ragged, sK_layout, (self.k_rows, head_dim))
        v_tma = self.tma(load, v, self.k_is_ragged, sV_layout, (schedule.tile_n, self.v_dims))
        o_tma = self.tma(store, o_tiled, self.q_is_ragged, sO_layout, (ROWS, head_dim_v))

        o_elements = 0 if schedule.o_shares_q else tiles * ROWS * head_dim_v

        @cute.struct
        class SharedStorage:
            mbarriers: cute.struct.Align[
                cute.struct.MemRange[cutlass.Int64, self.mbarriers.words], 16
            ]
            tmem_address: cutlass.Int32
            statistics: cute.struct.Align[
                cute.struct.MemRange[Float32, tiles * STATISTICS_STAGES * ROWS], 128
            ]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, tiles * schedule.q_slab], 1024]
            sO: cute.struct.Align[cute.struct.MemRange[self.dtype, o_elements], 1024]
            sKV: cute.struct.Align[
                cute.struct.MemRange[self.dtype, schedule.stages * schedule.stage_elements], 1024
            ]

        self.shared_storage = SharedStorage

        heads_q = q_tiled.shape[2]
        num_m_blocks, num_batches = count_tiles(q, mCuQ, schedule.positions, self.features.packed_q)
        num_tiles = num_m_blocks * heads_q * num_batches
        call = Call(
            mCuQ,
            mCuK,
            mUsedQ,
            mUsedK,
            rows_q,
            k.shape[0],
            heads_q,
            k.shape[2],
            num_tiles,
            num_m_blocks,
            num_batches,
            heads_in_group,
            softmax_scale,
            softcap,
            left,
            right,
            fills_padding,
            stores_lse,
        )
        num_items = num_tiles
        if const_expr(schedule.tile_order == "static"):
            num_items = cutlass.min(num_tiles, cutlass.max(max_ctas // schedule.ctas, 1))
        self.kernel.set_name_prefix(
            f"fa4_sm100_forward_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            q_tma,
            k_tma,
            v_tma,
            o_tma,
            o,
            global_view.modes_reversed(mLSE),
            mSink,
            (sQ_layout, sK_layout, sV_layout, sO_layout),
            call,
        ).launch(
            grid=(num_items * schedule.ctas, 1, 1),
            block=(schedule.threads, 1, 1),
            cluster=(schedule.ctas, 1, 1),
            # Without it ptxas does not know the registers at entry, and ignores setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )

    def with_heads_in_rows(self, tensor: cute.Tensor):
        """View q or o (rows, dim, heads[, batch]) as ((group, rows), dim, heads / group[, batch]).

        Row r is position r // group of the group's head r % group.
        """
        group = self.schedule.heads_in_rows
        if group == 1:
            return tensor
        rows, dim, heads, *batch = tensor.shape
        row_stride, dim_stride, head_stride, *batch_stride = tensor.stride
        return cute.make_tensor(
            tensor.iterator,
            cute.make_layout(
                ((group, rows), dim, heads // group, *batch),
                stride=(
                    (head_stride, row_stride),
                    dim_stride,
                    head_stride * group,
                    *batch_stride,
                ),
            ),
        )

    def ragged_with_heads(self, tensor: cute.Tensor):
        """`global_view.ragged` of what `with_heads_in_rows` returns, whose rows take two modes.

        Returns (view, row_units, batch_units, group_units). The view is ((group, positions), dim,
        back, forth): groups of heads share the forth mode with rows and batch entries, so that
        TMA's five modes suffice. Its back mode has fewer steps than that of `global_view.ragged`,
        and longer ones, so that all rows can be counted in 32 bits.
        """
        group = self.schedule.heads_in_rows
        (head_stride, row_stride), dim_stride, group_stride, *batch = tensor.stride
        batch_stride = Int64(0)
        if batch:
            batch_stride = Int64(cutlass.select_(tensor.shape[3] == 1, Int64(0), Int64(batch[0])))
        step = TMA_ALIGNMENT // ELEMENT_BYTES
        common = global_view.greatest_common_divisor(Int64(row_stride), batch_stride)
        common = global_view.greatest_common_divisor(common, Int64(group_stride))
        unit = cutlass.max(common, Int64(step))
        any_extent = global_view.ANY_EXTENT
        # A multiple of 16 bytes below 2**40, TMA's limit; times the steps, a multiple of 2**64.
        back = Int64(group << 33) - row_stride
        view = cute.make_tensor(
            tensor.iterator,
            cute.make_layout(
                (
                    (group, global_view.RAGGED_ROWS // group),
                    tensor.shape[1],
                    any_extent,
                    any_extent,
                ),
                stride=(
                    (head_stride, row_stride),
                    dim_stride,
                    cute.assume(back, divby=step),
                    cute.assume(unit, divby=step),
                ),
            ),
        )
        units = (Int32(stride // unit) for stride in (row_stride, batch_stride, group_stride))
        return view, *units

    def rows_layout(self, rows: int, dim: int, stages: int):
        """(rows, dim, stages), rows swizzled as TMA and matrix descriptors agree on."""
        return sm100.make_smem_layout(OperandMajorMode.K, (rows, dim), self.dtype, stages)

    def tma(self, op, tensor: cute.Tensor, is_ragged: bool, staged_layout, tile):
        """A TMA copy of ``tile`` rows by dims of ``tensor`` to or from one stage of a layout."""
        units = None
        if is_ragged and isinstance(tensor.shape[0], tuple):
            tensor, *units = self.ragged_with_heads(tensor)
        elif is_ragged:
            tensor, *units = global_view.ragged(tensor)
        one_stage = cute.slice_(staged_layout, (None, None, 0))
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, one_stage, tile)
        return Tma(atom, coordinates, units and tuple(units))

    # -------------------------------------------------------------- device side
    @cute.kernel
    def kernel(
        self,
        q_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        o_tma: Tma,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        layouts,
        call: Call,
    ):
        schedule = self.schedule
        tiles = schedule.query_tiles
        is_pair = const_expr(schedule.ctas == 2)
        sQ_layout, sK_layout, sV_layout, sO_layout = layouts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        other_warp = warp_idx - 4 * (tiles + 1)
        if other_warp == Warp.LOAD:
            for tma in (q_tma, k_tma, v_tma, o_tma):
                cpasync.prefetch_descriptor(tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        q_slab, stage = schedule.q_slab, schedule.stage_elements
        sQ = storage.sQ.get_tensor(self.apart(sQ_layout.outer, q_slab), swizzle=sQ_layout.inner)
        sK = storage.sKV.get_tensor(self.apart(sK_layout.outer, stage), swizzle=sK_layout.inner)
        sV = storage.sKV.get_tensor(self.apart(sV_layout.outer, stage), swizzle=sV_layout.inner)
        if const_expr(schedule.o_shares_q):
            # Each query tile's O lies over its own Q, and nobody else's.
            sO = storage.sQ.get_tensor(self.apart(sO_layout.outer, q_slab), swizzle=sO_layout.inner)
        else:
            sO = storage.sO.get_tensor(sO_layout.outer, swizzle=sO_layout.inner)
        statistics = storage.statistics.get_tensor(
            cute.make_layout((ROWS, STATISTICS_STAGES, tiles))
        )
        bars = storage.mbarriers.data_ptr()
        rank = Int32(0)
        if const_expr(is_pair):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        if other_warp == Warp.MMA:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.mbarriers.size):
                    cute.arch.mbarrier_init(bars + i, self.mbarriers.arrivals[i])
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.ptr, is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_pair)
        tensor_memory.before_arrival()
        cute.arch.sync_threads()
        tensor_memory.after_wait()
        if const_expr(is_pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        tmem_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address.ptr)
        tmem = tmem_pointer.toint()

        if other_warp >= 0:
            cute.arch.setmaxregister_decrease(schedule.other_registers)
            if other_warp == Warp.LOAD:
                self.load(q_tma, k_tma, v_tma, sQ, sK, sV, bars, rank, call)
            if other_warp == Warp.MMA:
                if rank == 0:
                    self.mma(sQ, sK, sV, tmem, bars, call)
            if other_warp == Warp.STORE:
                self.store(o_tma, sO, bars, rank, call)
            if const_expr(schedule.tile_order == "dynamic"):
                if other_warp == Warp.ASK:
                    if rank == 0:
                        self.ask(bars, call)
        elif warp_idx >= 4 * tiles:
            self.set_registers(schedule.correction_registers)
            self.correct(mO, mLSE, mSink, statistics, sO, tmem, bars, rank, call)
        else:
            self.set_registers(schedule.softmax_registers)
            self.softmax(statistics, tmem, bars, rank, call)

        # Nobody may still use tensor memory, or tell a CTA of the pair that has ended.
        tensor_memory.before_arrival()
        cute.arch.sync_threads()
        tensor_memory.after_wait()
        if const_expr(is_pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if other_warp == Warp.MMA:
            cute.arch.dealloc_tmem(tmem_pointer, TMEM_COLUMNS, is_pair)

    def set_registers(self, count: int):
        """setmaxnreg to ``count`` from what the launch gave each thread."""
        at_launch = 65_536 // self.schedule.threads // 8 * 8
        if count > at_launch:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    def apart(self, layout: cute.Layout, distance: int):
        """(rows, dim, stages) with the stages ``distance`` elements apart."""
        return cute.make_layout(layout.shape, stride=(*layout.stride[:2], distance))

    # -- barriers ----------------------------------------------------------------------------------

    def wait(self, bars: cute.Pointer, which, parity):
        """Wait for the completion of a barrier's phase of that parity."""
        cute.arch.mbarrier_wait(bars + which, parity)

    @cute.jit
    def arrive(self, bars: cute.Pointer, which):
        """One arrival for the calling warp, behind everything that its lanes have done."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars + which)

    @cute.jit
    def arrive_at_issuer(self, bars: cute.Pointer, which):
        """The same, at the CTA of the pair that issues the products."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if const_expr(self.schedule.ctas == 2):
                cute.arch.mbarrier_arrive(bars + which, 0)
            else:
                cute.arch.mbarrier_arrive(bars + which)

    @cute.jit
    def commit(self, bars: cute.Pointer, which):
        """Arrive, in each CTA of the pair, when every product issued so far is done."""
        with cute.arch.elect_one():
            if const_expr(self.schedule.ctas == 2):
                tcgen05.commit(bars + which, 0b11, self.group)
            else:
                tcgen05.commit(bars + which, None, self.group)

    def block_state(self, query_tile, count: Int32):
        """(buffer of scores, phase parity) of a query tile's ``count``-th block."""
        if const_expr(self.schedule.query_tiles == 2):
            return query_tile, count & 1
        return count & 1, (count >> 1) & 1

    @cute.jit
    def stage_at(self, count: Int32, stages: cutlass.Constexpr[int]):
        """(index, phase parity) of the ``count``-th use of a ring of buffers."""
        # Unsigned, because rounding a signed quotient down takes five instructions more.
        turns = Int32(Uint32(count) // stages)
        return count - turns * stages, turns & 1

    # -- work --------------------------------------------------------------------------------------

    def first_item(self):
        """The work item that this CTA begins with, and the distance to its next one."""
        ctas = self.schedule.ctas
        return cute.arch.block_idx()[0] // ctas, cute.arch.grid_dim()[0] // ctas

    @cute.jit
    def next_item(self, tile_idx: Int32, step: Int32, items: Int32, bars: cute.Pointer, call: Call):
        """The work item after ``tile_idx``, the ``items``-th that the warp has had; past the end
        where there is none.

        All roles of a CTA, and of a pair, have to agree, so the answer to one question is read by
        each of them.
        """
        following = tile_idx + step
        if const_expr(self.schedule.tile_order == "dynamic"):
            at = self.mbarriers
            self.wait(bars, at.ITEM_FULL, items & 1)
            following = self.answer(bars, call)
            self.arrive_at_issuer(bars, at.ITEM_EMPTY)
        return following

    @cute.jit
    def answer(self, bars: cute.Pointer, call: Call):
        """The work item that the hardware has answered with."""
        where = cute.recast_ptr(bars + self.mbarriers.ANSWER, dtype=Int32)
        first_cta, _, _, is_there = cute.arch.clc_response(where)
        # The next answer comes through the async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        return first_cta // self.schedule.ctas if is_there != 0 else call.num_tiles

    @cute.jit
    def ask(self, bars: cute.Pointer, call: Call):
        """Ask warp (of the first CTA): take work of clusters that have not started, one ahead.

        Waits for ITEM_EMPTY; the hardware's answer signals ITEM_FULL in each CTA.
        """
        at = self.mbarriers
        ctas = self.schedule.ctas
        items = Int32(0)
        tile_idx, _ = self.first_item()
        while tile_idx < call.num_tiles:
            self.wait(bars, at.ITEM_EMPTY, (items & 1) ^ 1)
            where = cute.recast_ptr(bars + at.ANSWER, dtype=Int32)
            with cute.arch.elect_one():
                for cta in cutlass.range_constexpr(ctas):
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        bars + at.ITEM_FULL, ANSWER_BYTES, cta if const_expr(ctas == 2) else None
                    )
                cute.arch.issue_clc_query(bars + at.ITEM_FULL, where, multicast=ctas == 2)
            self.wait(bars, at.ITEM_FULL, items & 1)
            tile_idx = self.answer(bars, call)
            items = items + 1

    @cute.jit
    def locate(self, tile_idx: Int32, call: Call):
        """The work that an index stands for; a slot of no tile has m_block past its rows."""
        schedule, features = self.schedule, self.features
        tile = locate_tile(
            tile_idx,
            call.num_m_blocks,
            call.heads_q,
            call.num_batches,
            call.heads_in_group,
            call.rows_q,
            call.cu_seqlens_q,
            schedule.positions,
            features.has_right_bound,
        )
        q = sequence_bounds(tile.batch_idx, call.rows_q, call.cu_seqlens_q, call.seqused_q)
        k = sequence_bounds(tile.batch_idx, call.rows_k, call.cu_seqlens_k, call.seqused_k)
        keys = tuple(
            key_range(
                (tile.m_block * schedule.query_tiles + i) * schedule.tile_positions,
                q.length,
                k.length,
                call.left,
                call.right,
                features.has_left_bound,
                features.has_right_bound,
                schedule.tile_positions,
                schedule.tile_n,
            )
            for i in range(schedule.query_tiles)
        )
        first_rows = [
            tile.m_block * schedule.positions + i * schedule.tile_positions
            for i in range(schedule.query_tiles)
        ]
        exists = tuple(Int32(row < q.rows) for row in first_rows)
        first, end = keys[0].first, keys[0].end
        if const_expr(schedule.query_tiles == 2):
            # An empty range counts for nothing.
            other = keys[1]
            if end == 0:
                first = other.first
            elif other.end > 0:
                first = cutlass.min(first, other.first)
            end = cutlass.max(end, other.end)
        return Work(tile, q, k, exists, keys, first, end)

    def sees(self, keys: KeyRange, n_block: Int32):
        """Whether a query tile takes part in a block."""
        return (n_block >= keys.first) & (n_block < keys.end)

    @cute.jit
    def stored_rows(self, work: Work, call: Call):
        """Rows of a sequence whose output is stored."""
        rows = work.q.rows
        if const_expr(self.q_is_ragged):
            rows = work.q.rows if call.fills_padding != 0 else work.q.length
        return rows

    def num_blocks(self, keys: KeyRange):
        return keys.end - keys.first

    def counted(self, counts: tuple[Int32, ...], work: Work):
        """Counts of the query tiles that have seen a key, after one more work item."""
        return tuple(
            count + Int32(self.num_blocks(keys) > 0)
            for count, keys in zip(counts, work.keys, strict=True)
        )

    # -- load --------------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        q_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        bars: cute.Pointer,
        rank: Int32,
        call: Call,
    ):
        """Load warp: request Q, and K and V block by block, as far ahead as buffers are free.

        Waits for Q_EMPTY and KV_EMPTY; the copies signal Q_FULL and KV_FULL, in a pair those of
        the CTA that issues the products.
        """
        schedule = self.schedule
        at = self.mbarriers
        tiles = schedule.query_tiles
        q_loaded = (Int32(0),) * tiles
        blocks_loaded = Int32(0)
        items = Int32(0)
        tile_idx, step = self.first_item()
        while tile_idx < call.num_tiles:
            work = self.locate(tile_idx, call)
            tile = work.tile
            if tile.m_block * schedule.positions < work.q.rows:
                gQ = self.query_tiles_of(q_tma, work, work.q.length, schedule.head_dim)
                gK = self.key_rows(k_tma, work, call, (self.k_rows, schedule.head_dim), 0)
                gV = self.key_rows(v_tma, work, call, (schedule.tile_n, self.v_dims), rank)
                num_blocks = work.end - work.first
                last = work.end - 1
                for i in cutlass.range_constexpr(tiles):
                    if self.num_blocks(work.keys[i]) > 0:
                        self.wait(bars, at.Q_EMPTY + i, (q_loaded[i] & 1) ^ 1)
                        m_idx = (tile.m_block * tiles + i) * schedule.ctas + rank
                        self.request(q_tma, gQ, m_idx, sQ, i, bars, at.Q_FULL + i, rank)
                    if const_expr(i == 0):
                        if num_blocks > 0:
                            self.load_block(
                                k_tma, gK, last * schedule.ctas + rank, sK,
                                2 * blocks_loaded, bars, rank,
                            )  # fmt: skip
                for j in cutlass.range(num_blocks, unroll=1):
                    if j > 0:
                        self.load_block(
                            k_tma, gK, (last - j) * schedule.ctas + rank, sK,
                            2 * (blocks_loaded + j), bars, rank,
                        )  # fmt: skip
                    self.load_block(
                        v_tma, gV, last - j, sV, 2 * (blocks_loaded + j) + 1, bars, rank
                    )
                blocks_loaded = blocks_loaded + num_blocks
                q_loaded = self.counted(q_loaded, work)
            tile_idx = self.next_item(tile_idx, step, items, bars, call)
            items = items + 1

    def query_tiles_of(self, tma: Tma, work: Work, length: Int32, dim: int):
        """Rows of q or o of a tile's sequence and head, cut into (ROWS, dim, tiles)."""
        tile = work.tile
        # Packed sequences are told apart by their rows, not by a batch mode.
        batch_idx = Int32(0) if self.features.packed_q else tile.batch_idx
        start, head_idx = work.q.start, tile.head_idx
        group = self.schedule.heads_in_rows
        if const_expr(self.q_is_ragged and group > 1):
            row_units, batch_units, group_units = tma.units
            forth = (start + length) * row_units + batch_idx * batch_units + head_idx * group_units
            positions = global_view.RAGGED_ROWS // group
            rows = cute.domain_offset(
                ((0, positions - length), 0), tma.tensor[None, None, positions, forth]
            )
        else:
            rows = global_view.one_sequence(
                tma.tensor, tma.units, start, length, head_idx, batch_idx
            )
        return cute.local_tile(rows, (ROWS, dim), (None, 0))

    def key_rows(self, tma: Tma, work: Work, call: Call, shape: tuple[int, int], column):
        """Rows of k or v that a tile's sequence sees, of its head, as (*shape, row tiles)."""
        tile, keys = work.tile, work.keys[0]
        head_kv = tile.head_idx // (call.heads_q // call.heads_kv)
        batch_idx = Int32(0) if self.features.packed_k else tile.batch_idx
        rows = global_view.one_sequence(
            tma.tensor, tma.units, work.k.start + keys.origin, keys.length, head_kv, batch_idx
        )
        return cute.local_tile(rows, shape, (None, column))

    @cute.jit
    def load_block(
        self,
        tma: Tma,
        gX: cute.Tensor,
        block_idx: Int32,
        sX: cute.Tensor,
        count: Int32,
        bars: cute.Pointer,
        rank: Int32,
    ):
        """Copy one block of gX (rows, dim, blocks) to the ring's next stage, once that is free."""
        stage, phase = self.stage_at(count, self.schedule.stages)
        self.wait(bars, self.mbarriers.KV_EMPTY + stage, phase ^ 1)
        full = self.mbarriers.KV_FULL + stage
        self.request(tma, gX, block_idx, sX, stage, bars, full, rank)

    @cute.jit
    def request(
        self,
        tma: Tma,
        gX: cute.Tensor,
        block_idx: Int32,
        sX: cute.Tensor,
        stage: Int32,
        bars: cute.Pointer,
        full: Int32,
        rank: Int32,
    ):
        """Start a copy that signals a barrier, of the first CTA if there are two."""
        whole = cute.make_layout(1)
        tXsX, tXgX = cpasync.tma_partition(
            tma.atom, 0, whole, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        nbytes = cute.size_in_bytes(sX.element_type, sX[None, None, 0].layout)
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + full, self.schedule.ctas * nbytes)
        cute.copy(tma.atom, tXgX[None, block_idx], tXsX[None, stage], tma_bar_ptr=bars + full)

    # -- mma ---------------------------------------------------------------------------------------

    @cute.jit
    def mma(
        self,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        tmem: Int32,
        bars: cute.Pointer,
        call: Call,
    ):
        """MMA warp (of the first CTA): S = Q K^T of each block, and P V one block behind.

        Waits for Q_FULL, KV_FULL, P_FULL and O_READY; commits to S_FULL, O_DONE, KV_EMPTY and
        Q_EMPTY.
        """
        schedule = self.schedule
        at = self.mbarriers
        tiles = schedule.query_tiles
        q_read = (Int32(0),) * tiles
        blocks = (Int32(0),) * tiles
        kv_read = Int32(0)
        items = Int32(0)
        tile_idx, step = self.first_item()
        while tile_idx < call.num_tiles:
            work = self.locate(tile_idx, call)
            if work.tile.m_block * schedule.positions < work.q.rows:
                num_blocks = work.end - work.first
                for i in cutlass.range_constexpr(tiles):
                    if self.num_blocks(work.keys[i]) > 0:
                        self.wait(bars, at.Q_FULL + i, q_read[i] & 1)
                for j in cutlass.range(num_blocks + 1, unroll=1):
                    n_block = work.end - 1 - j
                    if j == num_blocks:
                        if const_expr(not schedule.o_shares_q):
                            for i in cutlass.range_constexpr(tiles):
                                if self.num_blocks(work.keys[i]) > 0:
                                    self.commit(bars, at.Q_EMPTY + i)
                    k_stage, k_phase = self.stage_at(2 * (kv_read + j), schedule.stages)
                    v_stage, v_phase = self.stage_at(
                        cutlass.max(2 * (kv_read + j) - 1, 0), schedule.stages
                    )
                    if const_expr(tiles == 1):
                        # The other buffer of scores is free: its P V has been issued.
                        if j < num_blocks:
                            self.wait(bars, at.KV_FULL + k_stage, k_phase)
                            self.add_scores(sQ, sK, k_stage, tmem, bars, work, 0, blocks, n_block)
                            self.commit(bars, at.KV_EMPTY + k_stage)
                        if j > 0:
                            self.wait(bars, at.KV_FULL + v_stage, v_phase)
                            self.add_output(sV, v_stage, tmem, bars, work, 0, blocks, n_block + 1)
                            self.commit(bars, at.KV_EMPTY + v_stage)
                    else:
                        if j > 0:
                            self.wait(bars, at.KV_FULL + v_stage, v_phase)
                            self.add_output(sV, v_stage, tmem, bars, work, 0, blocks, n_block + 1)
                        if j < num_blocks:
                            self.wait(bars, at.KV_FULL + k_stage, k_phase)
                            self.add_scores(sQ, sK, k_stage, tmem, bars, work, 0, blocks, n_block)
                        if j > 0:
                            self.add_output(sV, v_stage, tmem, bars, work, 1, blocks, n_block + 1)
                            self.commit(bars, at.KV_EMPTY + v_stage)
                        if j < num_blocks:
                            self.add_scores(sQ, sK, k_stage, tmem, bars, work, 1, blocks, n_block)
                            self.commit(bars, at.KV_EMPTY + k_stage)
                kv_read = kv_read + num_blocks
                q_read = self.counted(q_read, work)
                blocks = tuple(blocks[i] + self.num_blocks(work.keys[i]) for i in range(tiles))
            tile_idx = self.next_item(tile_idx, step, items, bars, call)
            items = items + 1

    def address(self, tensor: cute.Tensor, stage) -> Int32:
        """Shared-memory address of a stage's first element."""
        return Int32(tensor[None, None, stage].iterator.toint())

    @cute.jit
    def add_scores(
        self,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        stage: Int32,
        tmem: Int32,
        bars: cute.Pointer,
        work: Work,
        query_tile: cutlass.Constexpr[int],
        blocks: tuple[Int32, ...],
        n_block: Int32,
    ):
        """S = Q K^T of a block, if the query tile takes part in it."""
        schedule = self.schedule
        keys = work.keys[query_tile]
        if self.sees(keys, n_block):
            buffer, _ = self.block_state(query_tile, blocks[query_tile] + keys.end - 1 - n_block)
            multiply(
                tmem + schedule.score_column(buffer),
                self.address(sQ, query_tile),
                self.q_operand,
                self.address(sK, stage),
                self.k_operand,
                self.qk_instruction,
                Int32(0),
                schedule.ctas,
            )
            self.commit(bars, self.mbarriers.S_FULL + buffer)

    @cute.jit
    def add_output(
        self,
        sV: cute.Tensor,
        stage: Int32,
        tmem: Int32,
        bars: cute.Pointer,
        work: Work,
        query_tile: cutlass.Constexpr[int],
        blocks: tuple[Int32, ...],
        n_block: Int32,
    ):
        """O += P V of a block, if the query tile takes part in it."""
        schedule = self.schedule
        at = self.mbarriers
        keys = work.keys[query_tile]
        if self.sees(keys, n_block):
            count = blocks[query_tile] + keys.end - 1 - n_block
            buffer, phase = self.block_state(query_tile, count)
            ready, ready_phase = self.block_state(query_tile, count - 1)
            self.wait(bars, at.O_READY + ready, ready_phase)
            self.wait(bars, at.P_FULL + buffer, phase)
            tensor_memory.after_wait()
            multiply(
                tmem + schedule.output_column(query_tile),
                tmem + schedule.score_column(buffer),
                None,
                self.address(sV, stage),
                self.v_operand,
                self.pv_instruction,
                Int32(n_block != keys.end - 1),
                schedule.ctas,
            )
            self.commit(bars, at.O_DONE + buffer)

    # -- softmax -----------------------------------------------------------------------------------

    def scale_log2(self, call: Call):
        """What turns the scores that the softmax sees into exponents of 2."""
        if self.features.score == "plain":
            return call.softmax_scale * LOG2_E
        return Float32(LOG2_E)

    def position_of(self, row: Int32):
        """Query position of a row, and its head's place among those that share a tile."""
        group = self.schedule.heads_in_rows
        position = Int32(Uint32(row) // group)
        return position, row - position * group

    def row_of(self, work: Work, query_tile, rank: Int32, thread: Int32):
        """Row of a thread of a warpgroup, counted from its sequence's first."""
        schedule = self.schedule
        tile_row = work.tile.m_block * schedule.tile_m + query_tile * schedule.tile_rows
        return tile_row + rank * ROWS + thread

    @cute.jit
    def softmax(
        self,
        statistics: cute.Tensor,
        tmem: Int32,
        bars: cute.Pointer,
        rank: Int32,
        call: Call,
    ):
        """Softmax warpgroups: probabilities from scores, block by block, for 128 rows each.

        Waits for S_FULL and R_EMPTY; signals P_FULL and R_FULL.
        """
        schedule = self.schedule
        tiles = schedule.query_tiles
        tidx = cute.arch.thread_idx()[0]
        query_tile = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP
        lane_address = tmem + (cute.arch.make_warp_uniform(thread // WARP) * WARP << 16)
        blocks = Int32(0)
        messages = Int32(0)
        items = Int32(0)
        tile_idx, step = self.first_item()
        while tile_idx < call.num_tiles:
            work = self.locate(tile_idx, call)
            keys, exists = work.keys[0], work.exists[0]
            if const_expr(tiles == 2):
                if query_tile == 1:
                    keys, exists = work.keys[1], work.exists[1]
            if exists != 0:
                row = self.row_of(work, query_tile, rank, thread)
                row_max, row_sum = -Float32.inf, Float32(0.0)
                position, _ = self.position_of(row)
                place = (query_tile, thread, position, lane_address)
                if keys.first < keys.end:
                    row_max, row_sum = self.softmax_block(
                        statistics, bars, place, keys, call, keys.end - 1, blocks, messages,
                        row_max, row_sum, is_first=True, is_masked=True,
                    )  # fmt: skip
                    blocks = blocks + 1
                    for begin, end, is_masked in self.later_blocks(keys):
                        num = end - begin
                        for j in cutlass.range(num, unroll=1):
                            row_max, row_sum = self.softmax_block(
                                statistics, bars, place, keys, call, end - 1 - j, blocks + j,
                                messages + j, row_max, row_sum,
                                is_first=False, is_masked=is_masked,
                            )  # fmt: skip
                        blocks = blocks + num
                        messages = messages + num
                self.tell(statistics, bars, query_tile, thread, messages, row_sum)
                self.tell(statistics, bars, query_tile, thread, messages + 1, row_max)
                messages = messages + 2
            tile_idx = self.next_item(tile_idx, step, items, bars, call)
            items = items + 1

    def later_blocks(self, keys: KeyRange):
        """Ranges [begin, end) of blocks behind the first one, and whether they need masks.

        In the order of visiting: those that the right bound crosses, those that every row sees
        whole, those that the left bound crosses.
        """
        rest = keys.end - 1
        clear_end = cutlass.min(keys.clear_end, rest)
        clear_first = cutlass.min(keys.clear_first, clear_end)
        ranges = [(clear_first, clear_end, False)]
        if self.features.has_right_bound:
            ranges.insert(0, (clear_end, rest, True))
        if self.features.has_left_bound:
            ranges.append((keys.first, clear_first, True))
        return ranges

    @cute.jit
    def tell(
        self,
        statistics: cute.Tensor,
        bars: cute.Pointer,
        query_tile: Int32,
        thread: Int32,
        count: Int32,
        value: Float32,
    ):
        """Hand one float a row to the correction warpgroup: the ``count``-th of the query tile."""
        stage, phase = self.stage_at(count, STATISTICS_STAGES)
        index = query_tile * STATISTICS_STAGES + stage
        self.wait(bars, self.mbarriers.R_EMPTY + index, phase ^ 1)
        statistics[thread, stage, query_tile] = value
        self.arrive(bars, self.mbarriers.R_FULL + index)

    @cute.jit
    def hear(
        self,
        statistics: cute.Tensor,
        bars: cute.Pointer,
        query_tile: cutlass.Constexpr[int],
        thread: Int32,
        count: Int32,
    ):
        """The other side of `tell`."""
        stage, phase = self.stage_at(count, STATISTICS_STAGES)
        index = query_tile * STATISTICS_STAGES + stage
        self.wait(bars, self.mbarriers.R_FULL + index, phase)
        value = statistics[thread, stage, query_tile]
        self.arrive(bars, self.mbarriers.R_EMPTY + index)
        return value

    @cute.jit
    def softmax_block(
        self,
        statistics: cute.Tensor,
        bars: cute.Pointer,
        place,
        keys: KeyRange,
        call: Call,
        n_block: Int32,
        count: Int32,
        message: Int32,
        row_max: Float32,
        row_sum: Float32,
        is_first: cutlass.Constexpr[bool],
        is_masked: cutlass.Constexpr[bool],
    ):
        """One block of one row: scores to probabilities; returns the new row maximum and sum.

        row_max  what is subtracted from the scores: within a threshold of their maximum
        """
        schedule, features = self.schedule, self.features
        at = self.mbarriers
        query_tile, thread, position, lane_address = place
        tile_n = schedule.tile_n
        buffer, phase = self.block_state(query_tile, count)
        scores = cute.make_rmem_tensor(tile_n, Float32)
        self.wait(bars, at.S_FULL + buffer, phase)
        tensor_memory.after_wait()
        column = lane_address + schedule.score_column(buffer)
        for first in cutlass.range_constexpr(0, tile_n, CHUNK):
            tensor_memory.load(scores, first, column + first, CHUNK)
        tensor_memory.wait_for_loads()
        if const_expr(features.score == "softcap"):
            soft_cap(scores, call.softmax_scale, call.softcap)
        elif const_expr(features.score == "scaled"):
            scale_scores(scores, call.softmax_scale)
        if const_expr(is_masked):
            aligned = position + keys.diagonal
            first_key = n_block * tile_n
            end = keys.length - first_key
            if const_expr(features.has_right_bound):
                end = cutlass.min(end, aligned + call.right + 1 - first_key)
            mask_row(scores, aligned - call.left - first_key, end, features.has_left_bound)

        scale_log2 = self.scale_log2(call)
        highest = highest_score(scores)
        reference = highest
        if const_expr(not is_first):
            reference = highest
            # False for NaN, which then is the reference, and makes the whole row NaN.
            if (highest - row_max) * scale_log2 <= schedule.rescale_threshold:
                reference = row_max
        # A row that has seen no key yet has a maximum of -inf.
        shift = Float32(0.0) if reference == -Float32.inf else reference * scale_log2
        if const_expr(not is_first):
            rescale = cute.math.exp2(row_max * scale_log2 - shift, fastmath=True)
            self.tell(statistics, bars, query_tile, thread, message, rescale)
            row_sum = row_sum * rescale
        sums = cute.make_rmem_tensor(LANES, Float32)
        sums.fill(0.0)
        sums[0] = row_sum
        rounded = cute.make_rmem_tensor(tile_n, self.dtype)
        packed = cute.recast_tensor(rounded, Int32)
        # Hidden scores need exact zeros.
        polynomials = 0 if is_masked else schedule.exp2_polynomials
        for first in cutlass.range_constexpr(0, tile_n, CHUNK):
            chunk = part(scores, first, CHUNK)
            exponentials(chunk, scale_log2, shift, polynomials)
            round_into(part(rounded, first, CHUNK), chunk)
            tensor_memory.store(packed, first // 2, column + first // 2, CHUNK // 2)
            add_up(sums, chunk)
        tensor_memory.wait_for_stores()
        tensor_memory.before_arrival()
        self.arrive_at_issuer(bars, at.P_FULL + buffer)
        row_sum = sums.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return reference, row_sum

    # -- correction --------------------------------------------------------------------------------

    @cute.jit
    def correct(
        self,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        statistics: cute.Tensor,
        sO: cute.Tensor,
        tmem: Int32,
        bars: cute.Pointer,
        rank: Int32,
        call: Call,
    ):
        """Correction warpgroup: keeps O in the units of each row's current maximum; ends tiles.

        Waits for R_FULL, O_DONE and OUT_EMPTY; signals R_EMPTY, O_READY and OUT_FULL.
        """
        schedule = self.schedule
        at = self.mbarriers
        tiles = schedule.query_tiles
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane_address = tmem + (cute.arch.make_warp_uniform(thread // WARP) * WARP << 16)
        used = (Int32(0),) * tiles
        blocks = (Int32(0),) * tiles
        messages = (Int32(0),) * tiles
        items = Int32(0)
        tile_idx, step = self.first_item()
        while tile_idx < call.num_tiles:
            work = self.locate(tile_idx, call)
            if work.tile.m_block * schedule.positions < work.q.rows:
                for j in cutlass.range(work.end - work.first, unroll=1):
                    n_block = work.end - 1 - j
                    for i in cutlass.range_constexpr(tiles):
                        keys = work.keys[i]
                        if (n_block >= keys.first) & (n_block < keys.end - 1):
                            later = keys.end - 1 - n_block
                            factor = self.hear(statistics, bars, i, thread, messages[i] + later - 1)
                            before, phase = self.block_state(i, blocks[i] + later - 1)
                            if cute.arch.vote_any_sync(factor != 1.0):
                                self.wait(bars, at.O_DONE + before, phase)
                                tensor_memory.after_wait()
                                self.rescale(lane_address + schedule.output_column(i), factor)
                                tensor_memory.before_arrival()
                            self.arrive_at_issuer(bars, at.O_READY + before)
                for i in cutlass.range_constexpr(tiles):
                    if work.exists[i] != 0:
                        keys = work.keys[i]
                        num_blocks = self.num_blocks(keys)
                        heard = messages[i] + cutlass.max(num_blocks - 1, 0)
                        row_sum = self.hear(statistics, bars, i, thread, heard)
                        row_max = self.hear(statistics, bars, i, thread, heard + 1)
                        position, member = self.position_of(self.row_of(work, i, rank, thread))
                        head_idx = work.tile.head_idx * schedule.heads_in_rows + member
                        factor = self.normalise(
                            mLSE, mSink, row_sum, row_max, position, head_idx, work, call
                        )
                        if num_blocks > 0:
                            self.hand_over(
                                sO, bars, i, thread, factor, lane_address,
                                blocks[i] + num_blocks, used[i],
                            )  # fmt: skip
                        elif position < self.stored_rows(work, call):
                            self.store_zeros(mO, position, head_idx, work)
                messages = tuple(
                    messages[i]
                    + (cutlass.max(self.num_blocks(work.keys[i]) - 1, 0) + 2) * work.exists[i]
                    for i in range(tiles)
                )
                used = self.counted(used, work)
                blocks = tuple(blocks[i] + self.num_blocks(work.keys[i]) for i in range(tiles))
            tile_idx = self.next_item(tile_idx, step, items, bars, call)
            items = items + 1

    @cute.jit
    def rescale(self, address: Int32, factor: Float32):
        """Multiply this thread's row of O in tensor memory."""
        for first in cutlass.range_constexpr(0, self.schedule.head_dim_v, CHUNK):
            out = cute.make_rmem_tensor(CHUNK, Float32)
            tensor_memory.load(out, 0, address + first, CHUNK)
            tensor_memory.wait_for_loads()
            out.store(out.load() * factor)
            tensor_memory.store(out, 0, address + first, CHUNK)
        tensor_memory.wait_for_stores()

    @cute.jit
    def normalise(
        self,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        row_sum: Float32,
        row_max: Float32,
        position: Int32,
        head_idx: Int32,
        work: Work,
        call: Call,
    ):
        """What a row's output must be multiplied by; stores its LSE if that is wanted."""
        tile, q = work.tile, work.q
        has_sink = const_expr(self.features.sink_dtype is not None)
        sink_log2 = Float32(0.0)
        if const_expr(has_sink):
            sink_log2 = mSink[head_idx].to(Float32) * LOG2_E
        factor, lse = finish_total(row_max, row_sum, self.scale_log2(call), sink_log2, has_sink)
        if position >= q.length:
            # Padding: what was computed for it came from zeros.
            factor = Float32(0.0)
            lse = -Float32.inf
        if (call.stores_lse != 0) & (position < q.rows):
            if const_expr(self.features.packed_q):
                mLSE[q.start + position, head_idx] = lse
            else:
                mLSE[position, head_idx, tile.batch_idx] = lse
        return factor

    @cute.jit
    def store_zeros(self, mO: cute.Tensor, position: Int32, head_idx: Int32, work: Work):
        """One row of output that sees no key, past shared memory, which its tile has no turn of."""
        tile, q = work.tile, work.q
        if const_expr(self.features.packed_q):
            gO = mO[q.start + position, None, head_idx]
        else:
            gO = mO[position, None, head_idx, tile.batch_idx]
        address = gO.iterator.toint()
        for c in cutlass.range(gO.shape[0] // VECTOR, unroll=1):
            cute.arch.inline_ptx(
                "st.global.v4.b32 [{$r0}], {0, 0, 0, 0};",
                read_only_args=[address + cutlass.Int64(c) * (VECTOR * ELEMENT_BYTES)],
            )

    @cute.jit
    def hand_over(
        self,
        sO: cute.Tensor,
        bars: cute.Pointer,
        query_tile: cutlass.Constexpr[int],
        thread: Int32,
        factor: Float32,
        lane_address: Int32,
        blocks_done: Int32,
        used: Int32,
    ):
        """Tensor memory -> registers -> shared memory: this thread's row of the output.

        blocks_done  blocks of the query tile in all, this work item's included
        used         outputs that have gone through the slab before
        """
        schedule = self.schedule
        at = self.mbarriers
        if const_expr(not schedule.o_shares_q):
            self.wait(bars, at.OUT_EMPTY + query_tile, (used & 1) ^ 1)
        # Also says, where O shares the slab, that Q is not read any more.
        last, phase = self.block_state(query_tile, blocks_done - 1)
        self.wait(bars, at.O_DONE + last, phase)
        tensor_memory.after_wait()
        address = lane_address + schedule.output_column(query_tile)
        slab = sO[None, None, query_tile]
        for first in cutlass.range_constexpr(0, schedule.head_dim_v, CHUNK):
            out = cute.make_rmem_tensor(CHUNK, Float32)
            tensor_memory.load(out, 0, address + first, CHUNK)
            tensor_memory.wait_for_loads()
            out.store(out.load() * factor)
            rounded = cute.make_rmem_tensor(CHUNK, self.dtype)
            round_into(rounded, out)
            for c in cutlass.range_constexpr(0, CHUNK, VECTOR):
                place = cute.local_tile(slab, (1, VECTOR), (thread, (first + c) // VECTOR))
                row_part = cute.make_tensor(
                    rounded.iterator + c, cute.make_layout((1, VECTOR), stride=(0, 1))
                )
                cute.autovec_copy(row_part, place)
        tensor_memory.before_arrival()
        self.arrive_at_issuer(bars, at.O_READY + last)
        # Make these writes visible to the TMA engine before anyone starts it.
        cute.arch.fence_proxy("async.shared", space="cta")
        self.arrive(bars, at.OUT_FULL + query_tile)

    # -- store -------------------------------------------------------------------------------------

    @cute.jit
    def store(self, o_tma: Tma, sO: cute.Tensor, bars: cute.Pointer, rank: Int32, call: Call):
        """Store warp: output tiles from shared memory to global, clipped to the sequence.

        Waits for OUT_FULL; signals OUT_EMPTY, or Q_EMPTY where O shares Q's slab.
        """
        schedule = self.schedule
        at = self.mbarriers
        tiles = schedule.query_tiles
        used = (Int32(0),) * tiles
        items = Int32(0)
        tile_idx, step = self.first_item()
        while tile_idx < call.num_tiles:
            work = self.locate(tile_idx, call)
            if work.tile.m_block * schedule.positions < work.q.rows:
                gO = self.query_tiles_of(
                    o_tma, work, self.stored_rows(work, call), schedule.head_dim_v
                )
                whole = cute.make_layout(1)
                tOsO, tOgO = cpasync.tma_partition(
                    o_tma.atom, 0, whole, cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
                )
                for i in cutlass.range_constexpr(tiles):
                    if self.num_blocks(work.keys[i]) > 0:
                        self.wait(bars, at.OUT_FULL + i, used[i] & 1)
                        m_idx = (work.tile.m_block * tiles + i) * schedule.ctas + rank
                        cute.copy(o_tma.atom, tOsO[None, i], tOgO[None, m_idx])
                        cute.arch.cp_async_bulk_commit_group()
                if const_expr(tiles == 2):
                    if self.num_blocks(work.keys[1]) > 0:
                        # All but the last copy, which is the second tile's.
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                    else:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                for i in cutlass.range_constexpr(tiles):
                    if self.num_blocks(work.keys[i]) > 0:
                        if const_expr(i == tiles - 1):
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                        given_back = at.Q_EMPTY if schedule.o_shares_q else at.OUT_EMPTY
                        self.arrive(bars, given_back + i)
                used = self.counted(used, work)
            tile_idx = self.next_item(tile_idx, step, items, bars, call)
            items = items + 1


def compile_forward(
    features: ForwardFeatures, schedule: ForwardSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `BlackwellForward.__call__`.

    Strides of q, k, v and o are promised nothing here: `global_view.rows_first` relies on the
    caller's check that every stride in use is a multiple of 16 bytes.
    """
    return cute.compile(
        BlackwellForward(features, schedule),
        *fake_tensors.forward_arguments(features, DTYPES),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
