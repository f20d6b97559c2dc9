"""Hopper backward attention, all three gradients in one kernel: for head dims up to 128.

    x = scale * q k^T,   p[i, j] = exp(x[i, j] - lse[i]),   dp = dO v^T
    ds[i, j] = p[i, j] (dp[i, j] - delta[i])
    dv = p^T dO          dk = scale * ds^T q          dq = scale * ds k

with softcap, window and sink as `fa4.attention` defines them (a sink is in the LSE). Five matrix
products a block: scores are worked out again from the LSE instead of being kept.
Method: FA2 section 3.1.2 (keys own the CTA, dQ is summed up in memory), FA3 appendix B (roles).

Products are transposed: S^T = K Q^T and dP^T = V dO^T give a warpgroup 64 keys by tile_m query
rows, and leave P^T and dS^T where the register operands of dV += P^T dO and dK += dS^T Q want
them. Only dS goes through shared memory, once, since dQ = dS K sums over the keys of both
warpgroups.

A CTA takes one tile of 128 keys after the other, until a counter says that there are none left.

Roles (2 warpgroups, 255 registers a thread)
  both             attend    each owns 64 keys of a tile: dK and dV stay in its registers from the
                             first row block of the first query head of its group to the last of the
                             last. Of a block's dQ each makes one half
  one of them      load      too: its four warps issue the TMA loads, one operand each. A producer
                             warpgroup would leave the others 240 registers, too few for S and dP of
                             the next block beside dQ of this one

Shared memory (sizes in elements of q's type; `OneKernelSchedule.smem_bytes`)
  sK   (tile_n, head_dim)
  sV   (tile_n, head_dim_v)
  sQ   (tile_m, head_dim, stages)      and the LSE of those rows
  sdO  (tile_m, head_dim_v, grad_stages)  and their delta
  sdS  (tile_n, tile_m, 2)             written by both warpgroups, read by both
  and the number of the next tile, and zeros to be copied

Hand-offs
  k,v    one `PipelineTmaAsync` stage each, filled once a tile
  q,dO   `PipelineTmaAsync`: Q with its LSE, dO with its delta; released by every warp once dK, and
         dV, of the block are done
  dS     the named barriers TURN: a warpgroup that gives the turn has stored its dS, too
  tiles  the named barrier TILE_DONE: nobody begins a tile that the other has not come to
  zeros  between CTAs, by counters in global memory: `fa4.kernels.sm90.dq_zeros`

A round is one block, and leaves no product in flight, which ptxas would not follow around the loop:

    P and dS from S(j) and dP(j), dS to shared memory
    wait for the turn
    request dQ, S(j+1), dV, dK      in blocks of 128 rows S last, for lack of registers
    wait for dQ, add it to the workspace while the others run
    request dP(j+1), in registers of what is done
    give the turn, load block j+2, wait for S(j+1) and dP(j+1)

The warpgroups take turns at all five products, so that one computes while the other has the tensor
cores: products of two warpgroups at a time take them from each other in no useful order. A
warpgroup comes to its turn with its dS(j) stored, and knows that the other one came so to the turn
before: warpgroup 0 with dS(j), but warpgroup 1 with dS(j-1). Hence warpgroup 0 makes dQ of the
block before. It begins with a dS that is not of this tile, whose dQ is dropped, and has a turn more
at the end. Two stages of dS are enough, because whoever gives the turn has finished its dQ;
warpgroup 0 overwrites what it has just read, and so has its warps meet first.

On the diagonal of a causal mask the last 64 keys of a tile are hidden from its first 64 rows: in a
block of those warpgroup 1 has no S, dP, dV and dK, only zeros for dS and its half of dQ.

Where a tile ends warpgroup 0 stores its dK and dV while warpgroup 1 has its last turn, and
warpgroup 1, which is done with all but K, requests the first blocks, V and K of the next tile. The
gradients go from registers to global memory: shared memory is being filled.

Shared memory is what is short: by `perf.roofline` a block of 64 rows of d128 takes 2688 clocks of
the tensor cores and 2832 of shared memory. Loads by threads wait behind the operands of wgmma: on
an H200 sixteen of them took 3400 clocks instead of 240 beside products of 64 x 64. Hence
 - P^T and dS^T stay in registers, and dQ goes from there to the workspace;
 - threads load no statistics. One more k-step of S = K Q^T adds -lse / scale to the scores, one of
   dP = V dO^T adds -delta: `row_statistics` has them as bf16 terms, eight slots a row. With softcap
   the LSE is subtracted behind the cap, and so is loaded.

dQ is summed up in an fp32 workspace by reductions of 16 bytes a thread, in the order of accumulator
registers (`add_dq`), which `kernels.backward_finish` undoes. The order of the sums differs from run
to run.
"""

from enum import IntEnum
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fa4.kernels.blocks import accumulator, fake_tensors, global_view, row_statistics
from fa4.kernels.blocks.matmul import matmul
from fa4.kernels.blocks.online_softmax import LOG2_E, soft_cap
from fa4.kernels.blocks.row_range import RowRange, row_range
from fa4.kernels.blocks.sequence_bounds import SequenceBounds, sequence_bounds
from fa4.kernels.blocks.tile_order import Tile, count_taken, count_tiles, locate_tile
from fa4.kernels.blocks.tma_rings import Tma, load_block, stage_at, tma_copy, tma_ring
from fa4.kernels.features import BackwardFeatures
from fa4.kernels.sm90.backward_call import Call
from fa4.kernels.sm90.dq_zeros import (
    Lots,
    count_zeroed,
    is_zeroed,
    lots_of_heads,
    wait_for_zeros,
    zero_ahead,
)
from fa4.pipelines.registers import WARPGROUP
from fa4.pipelines.sm90_backward import STATISTIC_TERMS, ZERO_BYTES, OneKernelSchedule

KEYS = 64  # keys of a warpgroup: M of one wgmma
WARPGROUPS = 2
DS_STAGES = 2
LOADED_AHEAD = 2  # blocks
ZEROING_WARP = 4  # of those that are done with a tile first
CHUNK = 64  # query rows of a swizzled line of sdS
OCTET = 4 * WARPGROUP  # elements of the dQ workspace: 64 rows by 8 columns
DTYPES = {"bf16": BFloat16, "fp16": Float16}


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA's own. All but TILE_DONE take one id a warpgroup."""

    TURN = 1
    OWN = 3
    TILE_DONE = 5


class Work(NamedTuple):
    """One key tile: which it is (m_block counts key tiles), its sequence, the rows that see it.

    hidden_keys  keys of the sequence in front of the first that a row sees; never loaded
    k            the keys behind them, which tiles are counted from
    num_blocks   row blocks of all query heads of the group; each has as many
    """

    tile: Tile
    q: SequenceBounds
    hidden_keys: Int32
    k: SequenceBounds
    rows: RowRange
    num_blocks: Int32


class Shared(NamedTuple):
    """Shared memory; `t` is the same bytes with the modes exchanged.

    halves     (64, 16) bf16, all 0.5: the sixteen columns of a statistic are its eight terms twice
    lse        (tile_m, 16, stages) bf16 terms, or with softcap (tile_m, stages) fp32
    delta      (tile_m, 16, grad_stages) bf16 terms
    next_tile  (2, 2) int32, of tiles in turn: its number, and 1 if it may add to dQ's sums
    zeros      (4, quads) fp32, what these begin with
    """

    k: cute.Tensor
    kt: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    qt: cute.Tensor
    do: cute.Tensor
    dot: cute.Tensor
    ds: cute.Tensor
    halves: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    next_tile: cute.Tensor
    zeros: cute.Tensor


class Rings(NamedTuple):
    """The buffers that load fills and attend drains."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync


class Sources(NamedTuple):
    """What is loaded, and where to.

    loads       TMA copies of Q, K, V and dO
    statistics  in global memory: fp32, and as terms
    """

    loads: tuple[Tma, Tma, Tma, Tma]
    statistics: tuple[cute.Tensor, cute.Tensor]
    shared: Shared
    rings: Rings


class Products(NamedTuple):
    """The tiled MMAs: scores and dP, their k-step of statistics, dV, dK, dQ."""

    scores: cute.TiledMma
    statistics: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma


class Fragments(NamedTuple):
    """What a warpgroup multiplies and keeps in registers.

    k, v                     shared-memory A operands: (MMA, 1, K)
    q, do                    B operands of scores and dP: (MMA, 1, K, stages)
    halves                   A operand of the statistics' k-step: (MMA, 1, 1)
    lse, delta               B operands of it: (MMA, 1, 1, stages); no lse with softcap
    qt, dot                  B operands of dK and dV: (MMA, 1, K, stages)
    ds, kt                   A and B operands of dQ: (MMA, 1, K, stages), (MMA, 1, K)
    scores, dp               fp32 accumulators, less the statistics
    p, rounded_ds            P and dS in 16 bits: the A operands of dV and dK
    dk, dv                   fp32 accumulators
    """

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    halves: cute.Tensor
    lse: Optional[cute.Tensor]
    delta: cute.Tensor
    qt: cute.Tensor
    dot: cute.Tensor
    ds: cute.Tensor
    kt: cute.Tensor
    scores: cute.Tensor
    dp: cute.Tensor
    p: cute.Tensor
    rounded_ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


class Progress(NamedTuple):
    """What a CTA has done so far.

    tiles   that it has taken
    loaded  those of them that rows see, and whose K and V were loaded
    blocks  of rows
    """

    tiles: Int32
    loaded: Int32
    blocks: Int32


class Place(NamedTuple):
    """Where a thread is.

    warpgroup  its own, and with it the keys
    column     row of a block that its first accumulator element belongs to
    """

    warpgroup: Int32
    column: Int32


class HopperBackward:
    """One compiled backward kernel: what it can do (features), how it does it (schedule)."""

    def __init__(self, features: BackwardFeatures, schedule: OneKernelSchedule):
        self.features = features
        self.schedule = schedule
        self.dtype = DTYPES[features.dtype]
        # Rows in front of the first one that sees a key are skipped by moving the origin, which
        # the views of a dense tensor can follow too.
        self.q_is_ragged = features.packed_q or features.has_seqused_q
        self.k_is_ragged = features.packed_k or features.has_seqused_k
        # A causal mask hides the last 64 keys of a tile from the first 64 rows that see others.
        self.may_hide_keys = features.has_right_bound and schedule.tile_m == KEYS
        # A softcap comes between the score and the LSE.
        self.scores_have_lse = features.score == "plain"

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mStatistics: cute.Tensor,
        mTerms: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mCounter: cute.Tensor,
        mZeroed: cute.Tensor,
        mCuQ: Optional[cute.Tensor],
        mCuK: Optional[cute.Tensor],
        mUsedQ: Optional[cute.Tensor],
        mUsedK: Optional[cute.Tensor],
        softmax_scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        heads_in_group: Int32,
        pairs_in_lot: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mQ, mK, mV, mdO  (batch, rows, heads, dim) or packed (total, heads, dim), unit last
                         stride, 16-byte aligned
        mStatistics      (2, batch or 1, heads_q, blocks * tile_m) fp32, contiguous, as
                         `kernels.backward_prepare` leaves it; only its LSE is read, with softcap
        mTerms           (2, batch or 1, heads_q, blocks * tile_m * 8) bf16, contiguous, likewise
        mdQ              (batch or 1, heads_q, blocks, tile_m * head_dim) fp32, contiguous, zeros
                         in the first `dq_zeros.LOTS_AHEAD` lots: sums of ds k, in the order that
                         `kernels.backward_finish` reads; head_dim is the schedule's
        mdK, mdV         like mK and mV; written whole, rows of padding with 0
        mCounter         (1,) int32, 0 before and after: tiles taken
        mZeroed          (lots,) int32, 0 before: see `dq_zeros.Lots`
        mCuQ, mCuK       (batch + 1,) int32 where that side is packed
        mUsedQ, mUsedK   (batch,) int32 where lengths in use are given
        left, right      window bounds, read only by kernels that have them
        heads_in_group   (key head, batch entry) pairs that go through their key tiles together,
                         see `tile_order.locate_tile`
        pairs_in_lot     (key head, batch entry) pairs whose tiles and sums are next to each other
        max_ctas         each takes tile after tile
        """
        schedule = self.schedule
        tile_m, tile_n = schedule.tile_m, schedule.tile_n
        stages, grad_stages = schedule.stages, schedule.grad_stages
        head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v
        q, k, v, do, dk, dv = [global_view.rows_first(t) for t in (mQ, mK, mV, mdO, mdK, mdV)]

        # A 64-column dQ is cut into halves of 32: K's swizzle must not reach further.
        k_period = 32 if schedule.dq_columns == 32 else head_dim
        sK_layout, sKt_layout = self.both_ways(tile_n, head_dim, 1, k_period)
        sV_layout, _ = self.both_ways(tile_n, head_dim_v, 1, head_dim_v)
        sQ_layout, sQt_layout = self.both_ways(tile_m, head_dim, stages, head_dim)
        sdO_layout, sdOt_layout = self.both_ways(tile_m, head_dim_v, grad_stages, head_dim_v)
        _, sdS_layout = self.both_ways(tile_n, tile_m, DS_STAGES, tile_m)
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_tma = tma_copy(load, q, self.q_is_ragged, sQ_layout, (tile_m, head_dim))
        do_tma = tma_copy(load, do, self.q_is_ragged, sdO_layout, (tile_m, head_dim_v))
        k_tma = tma_copy(load, k, self.k_is_ragged, sK_layout, (tile_n, head_dim))
        v_tma = tma_copy(load, v, self.k_is_ragged, sV_layout, (tile_n, head_dim_v))

        # One warpgroup's share each: 64 keys, or its part of dQ.
        products = Products(
            self.mma(OperandMajorMode.K, OperandMajorMode.K, tile_m),
            self.mma(OperandMajorMode.K, OperandMajorMode.K, tile_m, dtype=BFloat16),
            self.mma(OperandMajorMode.K, OperandMajorMode.MN, head_dim_v, from_registers=True),
            self.mma(OperandMajorMode.K, OperandMajorMode.MN, head_dim, from_registers=True),
            self.mma(OperandMajorMode.MN, OperandMajorMode.MN, schedule.dq_columns),
        )

        @cute.struct
        class SharedStorage:
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * grad_stages]
            next_tile: cute.struct.MemRange[Int32, 4]
            zeros: cute.struct.Align[cute.struct.MemRange[Float32, ZERO_BYTES // 4], 128]
            halves: cute.struct.Align[cute.struct.MemRange[BFloat16, 64], 128]
            lse: cute.struct.Align[
                cute.struct.MemRange[BFloat16, stages * tile_m * STATISTIC_TERMS], 128
            ]
            delta: cute.struct.Align[
                cute.struct.MemRange[BFloat16, grad_stages * tile_m * STATISTIC_TERMS], 128
            ]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sK_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sV_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sQ_layout)], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sdO_layout)], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sdS_layout)], 1024]

        self.shared_storage = SharedStorage

        num_tiles, num_batches = count_tiles(k, mCuK, tile_n, self.features.packed_k)
        call = Call(
            mCuQ,
            mCuK,
            mUsedQ,
            mUsedK,
            q.shape[0],
            k.shape[0],
            q.shape[2],
            k.shape[2],
            num_tiles,
            num_batches,
            heads_in_group,
            softmax_scale,
            softcap,
            left,
            right,
        )
        lots = lots_of_heads(
            mdQ,
            mZeroed,
            pairs_in_lot * (call.heads_q // call.heads_kv),
            pairs_in_lot * num_tiles,
        )
        self.kernel.set_name_prefix(
            f"fa4_sm90_backward_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            (q_tma, k_tma, v_tma, do_tma),
            (dk, dv),
            (mStatistics, mTerms),
            mdQ,
            mCounter,
            products,
            (sK_layout, sKt_layout, sV_layout, sQ_layout, sQt_layout, sdO_layout, sdOt_layout),
            sdS_layout,
            lots,
            call,
        ).launch(
            grid=(cutlass.min(self.all_tiles(call), max_ctas), 1, 1),
            block=(schedule.threads, 1, 1),
            # Said to the assembler: a thread may have all the registers there are for it.
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def both_ways(self, rows: int, columns: int, stages: int, period: int):
        """Layouts (rows, columns, stages) and (columns, rows, stages) of the same bytes.

        Columns are contiguous; period: elements that swizzled rows may be as long as.
        """
        layouts = []
        for layout, shape, order in (
            (tensor_utils.LayoutEnum.ROW_MAJOR, (rows, columns, stages), (0, 1, 2)),
            (tensor_utils.LayoutEnum.COL_MAJOR, (columns, rows, stages), (1, 0, 2)),
        ):
            kind = sm90.get_smem_layout_atom(layout, self.dtype, period)
            atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
            layouts.append(cute.tile_to_shape(atom, shape, order=order))
        return layouts

    def mma(self, a_major, b_major, columns: int, from_registers: bool = False, dtype=None):
        """64 rows by ``columns`` of one warpgroup."""
        source = warpgroup.OperandSource
        return sm90.make_trivial_tiled_mma(
            dtype or self.dtype,
            dtype or self.dtype,
            a_major,
            b_major,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(KEYS, columns),
            a_source=source.RMEM if from_registers else source.SMEM,
        )

    # -------------------------------------------------------------- device side
    @cute.kernel
    def kernel(
        self,
        loads: tuple[Tma, Tma, Tma, Tma],
        gradients: tuple[cute.Tensor, cute.Tensor],
        statistics: tuple[cute.Tensor, cute.Tensor],
        mdQ: cute.Tensor,
        mCounter: cute.Tensor,
        products: Products,
        load_layouts,
        sdS_layout,
        lots: Lots,
        call: Call,
    ):
        """A CTA: tile after tile of keys, each of one key head of one sequence."""
        schedule = self.schedule
        sK_layout, sKt_layout, sV_layout, sQ_layout, sQt_layout, sdO_layout, sdOt_layout = (
            load_layouts
        )
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in loads:
                cpasync.prefetch_descriptor(tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)

        def view(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        shared = Shared(
            view(storage.sK, sK_layout),
            view(storage.sK, sKt_layout),
            view(storage.sV, sV_layout),
            view(storage.sQ, sQ_layout),
            view(storage.sQ, sQt_layout),
            view(storage.sdO, sdO_layout),
            view(storage.sdO, sdOt_layout),
            view(storage.sdS, sdS_layout),
            # Eight rows of eight columns stand for all of them.
            storage.halves.get_tensor(cute.make_layout(((8, 8), (8, 2)), stride=((8, 0), (1, 0)))),
            self.statistics_view(storage.lse, schedule.stages, self.scores_have_lse),
            self.statistics_view(storage.delta, schedule.grad_stages, True),
            storage.next_tile.get_tensor(cute.make_layout((2, 2))),
            storage.zeros.get_tensor(cute.make_layout((4, ZERO_BYTES // 16))),
        )
        warps = 4 * WARPGROUPS
        stages, grad_stages = schedule.stages, schedule.grad_stages
        # Bytes of statistics, which come with their rows.
        delta_bytes = 2 * STATISTIC_TERMS * schedule.tile_m
        lse_bytes = delta_bytes if self.scores_have_lse else 4 * schedule.tile_m
        rings = Rings(
            tma_ring(storage.k_barriers, 1, warps, shared.k),
            tma_ring(storage.v_barriers, 1, warps, shared.v),
            tma_ring(storage.q_barriers, stages, warps, shared.q, lse_bytes),
            tma_ring(storage.do_barriers, grad_stages, warps, shared.do, delta_bytes),
        )
        if cute.arch.thread_idx()[0] < 8:
            half = cute.make_rmem_tensor(8, BFloat16)
            half.fill(0.5)
            rows = storage.halves.get_tensor(cute.make_layout((8, 8)))
            cute.autovec_copy(half, rows[None, cute.arch.thread_idx()[0]])
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for i in cutlass.range_constexpr(ZERO_BYTES // (16 * schedule.threads)):
            quad = i * schedule.threads + cute.arch.thread_idx()[0]
            cute.autovec_copy(nothing, shared.zeros[None, quad])
        cute.arch.fence_proxy("async.shared", space="cta")
        # The kernel in front does not take tiles: this need not wait for it.
        if cute.arch.thread_idx()[0] == WARPGROUP:
            shared.next_tile[0, 1] = self.next_tile(mCounter, call)
            shared.next_tile[1, 1] = Int32(0)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()
        # Launched before the kernel in front has ended; so may be the one behind, which waits too.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        sources = Sources(loads, statistics, shared, rings)
        self.attend(products, sources, gradients, mdQ, mCounter, lots, call)

    def statistics_view(self, field, stages: int, is_terms: bool):
        """The LSE or delta of each stage's rows: (rows, stages) fp32, or as a B operand.

        That is (rows, 16, stages) bf16, the second eight columns the first eight once more.
        """
        tile_m = self.schedule.tile_m
        if not is_terms:
            first = cute.recast_ptr(field.data_ptr(), dtype=Float32)
            return cute.make_tensor(first, cute.make_layout((tile_m, stages)))
        layout = cute.make_layout(
            ((8, tile_m // 8), (STATISTIC_TERMS, 2), stages),
            stride=((STATISTIC_TERMS, 8 * STATISTIC_TERMS), (1, 0), tile_m * STATISTIC_TERMS),
        )
        return field.get_tensor(layout)

    @cute.jit
    def locate(self, tile_idx: Int32, call: Call):
        """The work of a tile; a slot of no tile has m_block past its rows."""
        schedule, features = self.schedule, self.features
        tile = locate_tile(
            tile_idx,
            call.num_tiles,
            call.heads_kv,
            call.num_batches,
            call.heads_in_group,
            call.rows_k,
            call.cu_seqlens_k,
            schedule.tile_n,
            # With a right bound the first key tiles are the longest ones.
            False,
        )
        q = sequence_bounds(tile.batch_idx, call.rows_q, call.cu_seqlens_q, call.seqused_q)
        k = sequence_bounds(tile.batch_idx, call.rows_k, call.cu_seqlens_k, call.seqused_k)
        hidden = Int32(0)
        if const_expr(features.has_left_bound):
            hidden = cutlass.min(cutlass.max(k.length - q.length - call.left, 0), k.length)
            k = SequenceBounds(k.start + hidden, k.length - hidden, k.rows - hidden)
        rows = self.rows_of(tile.m_block, q.length, k.length, schedule.tile_n, call)
        num_blocks = (rows.end - rows.first) * (call.heads_q // call.heads_kv)
        return Work(tile, q, hidden, k, rows, num_blocks)

    def rows_of(self, n_block: Int32, seqlen_q: Int32, seqlen_k: Int32, keys: int, call: Call):
        """Row range of the ``n_block``-th tile of ``keys`` keys."""
        return row_range(
            n_block,
            seqlen_q,
            seqlen_k,
            call.left,
            call.right,
            self.features.has_left_bound,
            self.features.has_right_bound,
            self.schedule.tile_m,
            keys,
        )

    @cute.jit
    def workspace_entry(self, work: Work):
        """(batch entry, first block) of a sequence in the workspaces of query rows."""
        entry = work.tile.batch_idx
        if const_expr(self.features.packed_q):
            entry = Int32(0)
        first = row_statistics.first_block(
            work.q.start, work.tile.batch_idx, self.schedule.tile_m, self.features.packed_q
        )
        return entry, first

    @cute.jit
    def load_keys(self, sources: Sources, work: Work, loaded: Int32):
        """Request V and K of the tile behind ``loaded`` others, once those are done with."""
        schedule, tile = self.schedule, work.tile
        (_, k_tma, v_tma, _), _, shared, rings = sources
        once = stage_at(loaded, 1, True)
        # Packed sequences are told apart by their rows, not by a batch mode.
        batch_k = Int32(0) if const_expr(self.features.packed_k) else tile.batch_idx
        keys = (tile.head_idx, batch_k, work.k.start, work.k.length)
        gK = self.tiles(k_tma, keys, (schedule.tile_n, schedule.head_dim))
        gV = self.tiles(v_tma, keys, (schedule.tile_n, schedule.head_dim_v))
        # The K before is in use for longest.
        load_block(v_tma, gV, shared.v, rings.v, tile.m_block, once)
        load_block(k_tma, gK, shared.k, rings.k, tile.m_block, once)

    @cute.jit
    def load_rows(
        self,
        sources: Sources,
        work: Work,
        call: Call,
        block: tuple[Int32, Int32, Int32],
        first_warp: cutlass.Constexpr[int],
    ):
        """Request what a block needs: each of four warps one operand.

        block       its number in the CTA, its query head (of the group) and row block
        first_warp  of the warpgroup that calls this

        Waits for free stages of q and do; the copies signal their full barriers. A statistic may
        arrive before its barrier is told what to expect: it counts bytes below zero, too.
        """
        schedule = self.schedule
        (q_tma, _, _, do_tma), (mStatistics, mTerms), shared, rings = sources
        count, head, m_block = block
        head_idx = work.tile.head_idx * (call.heads_q // call.heads_kv) + head
        entry, first_block = self.workspace_entry(work)
        rows = (head_idx, entry, work.q.start + work.rows.origin, work.rows.length)
        first_row = (first_block + m_block) * schedule.tile_m
        state = stage_at(count, schedule.stages, True)
        grad_state = stage_at(count, schedule.grad_stages, True)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - first_warp
        if warp_idx == 0:
            gQ = self.tiles(q_tma, rows, (schedule.tile_m, schedule.head_dim))
            load_block(q_tma, gQ, shared.q, rings.q, m_block, state)
        elif warp_idx == 1:
            gdO = self.tiles(do_tma, rows, (schedule.tile_m, schedule.head_dim_v))
            load_block(do_tma, gdO, shared.do, rings.do, m_block, grad_state)
        elif warp_idx == 2:
            values = mTerms if const_expr(self.scores_have_lse) else mStatistics
            self.load_statistics(
                values[0, entry, head_idx, None], first_row, shared.lse, rings.q, state
            )
        else:
            delta = mTerms[1, entry, head_idx, None]
            self.load_statistics(delta, first_row, shared.delta, rings.do, grad_state)

    def tiles(self, tma: Tma, sequence: tuple[Int32, Int32, Int32, Int32], tile):
        """Rows of a (head, batch entry, first row, number of rows), cut into (*tile, blocks)."""
        head_idx, batch_idx, start, length = sequence
        rows = global_view.one_sequence(tma.tensor, tma.units, start, length, head_idx, batch_idx)
        return cute.local_tile(rows, tile, (None, 0))

    @cute.jit
    def load_statistics(
        self,
        values: cute.Tensor,
        first_row: Int32,
        sX: cute.Tensor,
        ring: pipeline.PipelineAsync,
        state: pipeline.PipelineState,
    ):
        """Copy the LSE or delta of one row block into the stage that its tile is loaded to."""
        # Of fp32 one, of bf16 terms eight.
        elements_a_row = 1 if const_expr(values.element_type is Float32) else STATISTIC_TERMS
        elements = self.schedule.tile_m * elements_a_row
        source = (values.iterator + first_row * elements_a_row).align(16)
        target = (sX.iterator + state.index * elements).align(16)
        line = cute.make_layout(elements)
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), values.element_type)
        with cute.arch.elect_one():
            cute.copy(
                atom,
                cute.make_tensor(source, line),
                cute.make_tensor(target, line),
                mbar_ptr=ring.producer_get_barrier(state),
            )

    @cute.jit
    def attend(
        self,
        products: Products,
        sources: Sources,
        gradients: tuple[cute.Tensor, cute.Tensor],
        mdQ: cute.Tensor,
        mCounter: cute.Tensor,
        lots: Lots,
        call: Call,
    ):
        """A warpgroup: of every tile of the CTA 64 keys, and half of each block's dQ."""
        tidx = cute.arch.thread_idx()[0]
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        place = Place(wg, tidx % 4 * 2)
        shared, rings = sources.shared, sources.rings
        regs = self.fragments(products, shared, wg)
        self.zero_ds(shared, place)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_idx = cute.arch.make_warp_uniform(shared.next_tile[0, 1])
        tiles, loaded, blocks = Int32(0), Int32(0), Int32(0)
        if wg == 1:
            self.load_first(sources, tile_idx, Progress(tiles, loaded, blocks), call)
        while tile_idx < self.all_tiles(call):
            if warp_idx == ZEROING_WARP:
                zero_ahead(lots, tile_idx, shared.zeros.iterator)
            if cute.arch.make_warp_uniform(shared.next_tile[1, (tiles + 1) % 2]) == 0:
                wait_for_zeros(lots, tile_idx)
            work = self.locate(tile_idx, call)
            total = work.num_blocks
            if const_expr(self.features.has_left_bound):
                self.clear_hidden_keys(gradients, work, tidx)
            of_keys = stage_at(loaded, 1, False)
            last_block = Int32(0)
            if total > 0:
                progress = Progress(tiles, loaded, blocks)
                last_block = self.attend_blocks(
                    products, sources, mdQ, mCounter, regs, place, work, progress, call
                )
                rings.v.consumer_release(of_keys)
                loaded = loaded + 1
                blocks = blocks + total
            else:
                regs.dk.fill(0.0)
                regs.dv.fill(0.0)
                if tidx == WARPGROUP:
                    shared.next_tile[0, tiles % 2] = self.next_tile(mCounter, call)
            if wg == 1:
                if total > 0:
                    rings.k.consumer_release(of_keys)
                # One of its threads has written what all read.
                self.barrier(Barrier.OWN + 1, 1).arrive_and_wait()
                following = cute.arch.make_warp_uniform(shared.next_tile[0, tiles % 2])
                self.load_first(sources, following, Progress(tiles, loaded, blocks), call)
                if tidx == WARPGROUP:
                    shared.next_tile[1, tiles % 2] = Int32(is_zeroed(lots, following))
            # Located again: there are no registers to keep it in.
            tile_idx = cute.arch.make_warp_uniform(shared.next_tile[0, (tiles + 1) % 2])
            work = self.locate(tile_idx, call)
            dk, dv = gradients
            self.store_gradient(regs.dv, dv, Float32(1.0), place, work)
            self.store_gradient(regs.dk, dk, call.softmax_scale, place, work)
            if (wg == 0) & (total > 0):
                self.turn(0).arrive_and_wait()
                acc_dq = self.request_dq(products, regs, ds_stage(blocks - 1))
                warpgroup.wait_group(0)
                self.add_dq(mdQ, acc_dq, place, last_block)
                rings.k.consumer_release(of_keys)
            self.barrier(Barrier.TILE_DONE, WARPGROUPS).arrive_and_wait()
            if warp_idx == ZEROING_WARP:
                count_zeroed(lots, tile_idx)
            tile_idx = cute.arch.make_warp_uniform(shared.next_tile[0, tiles % 2])
            tiles = tiles + 1

    def all_tiles(self, call: Call):
        """Tiles of the launch, with slots of none."""
        return call.num_tiles * call.heads_kv * call.num_batches

    @cute.jit
    def next_tile(self, mCounter: cute.Tensor, call: Call):
        """One thread: a tile that no other CTA has taken; past the end if there is none.

        The first one is taken, too: CTAs that do not run have none that others might wait for.
        """
        return count_taken(mCounter, self.all_tiles(call) + cute.arch.grid_dim()[0])

    @cute.jit
    def load_first(self, sources: Sources, tile_idx: Int32, progress: Progress, call: Call):
        """Warpgroup 1: request the first row blocks of a tile, V and K."""
        if tile_idx < self.all_tiles(call):
            work = self.locate(tile_idx, call)
            head, block_idx = Int32(0), work.rows.first
            for i in cutlass.range_constexpr(LOADED_AHEAD):
                if i < work.num_blocks:
                    block = (progress.blocks + i, head, block_idx)
                    self.load_rows(sources, work, call, block, first_warp=4)
                head, block_idx = self.next_block(head, block_idx, work.rows)
            is_first_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 4
            if (work.num_blocks > 0) & is_first_warp:
                self.load_keys(sources, work, progress.loaded)

    @cute.jit
    def clear_hidden_keys(
        self, gradients: tuple[cute.Tensor, cute.Tensor], work: Work, tidx: Int32
    ):
        """dK, dV := 0 for those of the first keys of the sequence, a tile for each CTA."""
        tile, tile_n = work.tile, self.schedule.tile_n
        first = tile.m_block * tile_n
        if first < work.hidden_keys:
            zeros = cute.make_rmem_tensor(8, self.dtype)
            zeros.fill(0.0)
            for gradient in gradients:
                rows = self.rows_of_head(gradient, tile)
                end = cutlass.min(first + tile_n, work.hidden_keys)
                octets = gradient.shape[1] // 8
                for i in cutlass.range(tidx, (end - first) * octets, self.schedule.threads):
                    row = work.k.start - work.hidden_keys + first + i // octets
                    target = cute.local_tile(rows[row, None], (8,), (i % octets,))
                    cute.autovec_copy(zeros, target)

    def rows_of_head(self, gradient: cute.Tensor, tile: Tile):
        """(rows, dim) of a tile's key head, in dK or dV."""
        if self.features.packed_k:
            return gradient[None, None, tile.head_idx]
        return gradient[None, None, tile.head_idx, tile.batch_idx]

    def barrier(self, barrier_id: int, warpgroups: int):
        return pipeline.NamedBarrier(barrier_id=barrier_id, num_threads=warpgroups * WARPGROUP)

    def fragments(self, products: Products, shared: Shared, wg: Int32):
        """Operands and accumulators of warpgroup ``wg``."""
        schedule = self.schedule
        # Descriptors are a warpgroup's, not a thread's.
        scores, statistics, dv, dk, dq = [mma.get_slice(0) for mma in products]

        def fp32(mma, columns):
            return cute.make_rmem_tensor(mma.partition_shape_C((KEYS, columns)), Float32)

        def of_keys(tensor, columns):
            mine = cute.local_tile(tensor[None, None, 0], (KEYS, columns), (wg, 0))
            return products.scores.make_fragment_A(scores.partition_A(mine))

        def of_rows(tensor):
            return products.statistics.make_fragment_B(statistics.partition_B(tensor))

        acc_scores, acc_dp = [fp32(products.scores, schedule.tile_m) for _ in range(2)]
        p, rounded_ds = [cute.make_rmem_tensor_like(acc_scores, self.dtype) for _ in range(2)]
        # With 64 rows in a block both warpgroups work on all of them, else on one half each.
        half = 0 if schedule.tile_m == KEYS else wg
        ds = cute.local_tile(shared.ds, (KEYS, schedule.tile_n, DS_STAGES), (half, 0, 0))
        return Fragments(
            of_keys(shared.k, schedule.head_dim),
            of_keys(shared.v, schedule.head_dim_v),
            products.scores.make_fragment_B(scores.partition_B(shared.q)),
            products.scores.make_fragment_B(scores.partition_B(shared.do)),
            products.statistics.make_fragment_A(statistics.partition_A(shared.halves)),
            of_rows(shared.lse) if self.scores_have_lse else None,
            of_rows(shared.delta),
            products.dk.make_fragment_B(dk.partition_B(shared.qt)),
            products.dv.make_fragment_B(dv.partition_B(shared.dot)),
            products.dq.make_fragment_A(dq.partition_A(ds)),
            products.dq.make_fragment_B(dq.partition_B(self.dq_window(shared.kt, wg))),
            acc_scores,
            acc_dp,
            p,
            rounded_ds,
            fp32(products.dk, schedule.head_dim),
            fp32(products.dv, schedule.head_dim_v),
        )

    def dq_window(self, kt: cute.Tensor, wg: Int32):
        """The columns of K, as (columns, keys), that warpgroup ``wg`` multiplies dS with."""
        schedule = self.schedule
        kt = kt[None, None, 0]
        columns = schedule.dq_columns
        if schedule.tile_m != KEYS:
            return kt
        if schedule.dq_column_step == columns:
            return cute.local_tile(kt, (columns, schedule.tile_n), (wg, 0))
        # The windows overlap, and start on a period of the swizzle.
        (period, _), keys = kt.layout.shape
        (column_stride, period_stride), key_strides = kt.layout.stride
        assert schedule.dq_column_step == period
        assert columns % period == 0
        first = kt.iterator + cute.assume(wg * period_stride, divby=period_stride)
        window = cute.make_layout(
            ((period, columns // period), keys),
            stride=((column_stride, period_stride), key_strides),
        )
        return cute.make_tensor(first, window)

    @cute.jit
    def attend_blocks(
        self,
        products: Products,
        sources: Sources,
        mdQ: cute.Tensor,
        mCounter: cute.Tensor,
        regs: Fragments,
        place: Place,
        work: Work,
        progress: Progress,
        call: Call,
    ):
        """All row blocks of all query heads of the group, one after the other.

        Leaves dV and the unscaled dK in registers, and the number of the tile to do next in shared
        memory. Returns the last block's place in the dQ workspace.
        """
        my_tile = WARPGROUPS * work.tile.m_block + place.warpgroup
        mine = self.rows_of(my_tile, work.q.length, work.k.length, KEYS, call)
        clear_first = mine.clear_first
        if (my_tile + 1) * KEYS > work.k.length:
            # Keys behind the last one have scores of 0, but weights of exp(-lse).
            clear_first = mine.clear_end
        entry, first_block = self.workspace_entry(work)
        head_idx = work.tile.head_idx * (call.heads_q // call.heads_kv)
        dq_head = (entry * call.heads_q + head_idx) * mdQ.shape[2] + first_block
        # Said to be uniform, or the compiler works them out again for every block.
        uniform = cute.arch.make_warp_uniform
        clear = (uniform(clear_first), uniform(mine.clear_end))
        dq_head = uniform(dq_head)
        first, end = uniform(work.rows.first), uniform(work.rows.end)
        rows = work.rows._replace(first=first, end=end)
        work = work._replace(rows=rows)

        if place.warpgroup == 1:
            self.turn(0).arrive()
        # (query head of the group, row block) of a block, and of the next one to load; the place of
        # the block before in the dQ workspace.
        to_load = (Int32(0), first)
        for _ in cutlass.range_constexpr(LOADED_AHEAD):
            to_load = self.next_block(*to_load, rows)
        at = (Int32(0), first, *to_load, Int32(-1))
        end_count = uniform(progress.blocks + work.num_blocks)
        step = (products, sources, mdQ, regs, place, work, call, clear, dq_head, end_count)
        first_count = uniform(progress.blocks)
        if const_expr(self.may_hide_keys):
            hides = (place.warpgroup == 1) & (mine.first > first) & (work.num_blocks > 1)
            if uniform(Int32(hides)) == 1:
                self.begin_blocks(products, sources, regs, progress, is_hidden=True)
                at = self.attend_block(*step, at, first_count, is_last=False, is_hidden=True)
                first_count = first_count + 1
            else:
                self.begin_blocks(products, sources, regs, progress)
        else:
            self.begin_blocks(products, sources, regs, progress)
        regs.dk.fill(0.0)
        regs.dv.fill(0.0)
        for count in cutlass.range(first_count, end_count - 1, unroll=1):
            at = self.attend_block(*step, at, count, is_last=False)
        # Asked not before here, so that a CTA with a long tile does not hold another one, and
        # answered while the last block is at work.
        following = Int32(0)
        if cute.arch.thread_idx()[0] == WARPGROUP:
            following = self.next_tile(mCounter, call)
        at = self.attend_block(*step, at, end_count - 1, is_last=True)
        if cute.arch.thread_idx()[0] == WARPGROUP:
            sources.shared.next_tile[0, progress.tiles % 2] = following
        return at[-1]

    @cute.jit
    def begin_blocks(
        self,
        products: Products,
        sources: Sources,
        regs: Fragments,
        progress: Progress,
        is_hidden: cutlass.Constexpr[bool] = False,
    ):
        """Wait for a tile's keys and first rows; S and dP of those, unless they are hidden."""
        rings = sources.rings
        of_keys = stage_at(progress.loaded, 1, False)
        state = stage_at(progress.blocks, self.schedule.stages, False)
        grad_state = stage_at(progress.blocks, self.schedule.grad_stages, False)
        rings.k.consumer_wait(of_keys)
        rings.q.consumer_wait(state)
        if const_expr(not is_hidden):
            self.request_scores(products, regs, state.index)
        rings.v.consumer_wait(of_keys)
        rings.do.consumer_wait(grad_state)
        if const_expr(not is_hidden):
            self.request_dp(products, regs, grad_state.index)
            warpgroup.wait_group(0)

    @cute.jit
    def attend_block(
        self,
        products: Products,
        sources: Sources,
        mdQ: cute.Tensor,
        regs: Fragments,
        place: Place,
        work: Work,
        call: Call,
        clear: tuple[Int32, Int32],
        dq_head: Int32,
        end_count: Int32,
        at: tuple[Int32, Int32, Int32, Int32, Int32],
        count: Int32,
        is_last: cutlass.Constexpr[bool],
        is_hidden: cutlass.Constexpr[bool] = False,
    ):
        """A warpgroup's round: from S and dP of the ``count``-th block to those of the next one.

        clear      row blocks in which the warpgroup needs no mask: [first, end)
        dq_head    block of the dQ workspace where those of the group's first query head begin
        end_count  of the tile's blocks
        is_hidden  no row of this block sees a key of the warpgroup's: dS is 0, and that is all
        at         as `attend_blocks` begins with; returned for the next block
        """
        schedule, rows = self.schedule, work.rows
        shared, rings = sources.shared, sources.rings
        head, m_block, load_head, load_block_idx, last_block = at
        # Rounds between a warpgroup's dS and its dQ.
        lag = 1 - place.warpgroup
        state = stage_at(count, schedule.stages, False)
        grad_state = stage_at(count, schedule.grad_stages, False)
        if lag == 1:
            # All its warps have finished the dQ whose dS gives its place to this one.
            self.barrier(Barrier.OWN, 1).arrive_and_wait()
        if const_expr(is_hidden):
            regs.rounded_ds.fill(0.0)
        else:
            self.score_gradient(regs, shared, state.index, m_block, place, work, call, clear)
        self.share_ds(regs, shared, place, ds_stage(count))

        next_state = stage_at(count + 1, schedule.stages, False)
        next_grad_state = stage_at(count + 1, schedule.grad_stages, False)
        if const_expr(not is_last):
            rings.q.consumer_wait(next_state)
            rings.do.consumer_wait(next_grad_state)
        # Where they are requested, S is in front of dV and dK, or behind dQ's addition.
        early = const_expr(schedule.requests_scores_early and not is_last)
        self.turn(place.warpgroup).arrive_and_wait()
        acc_dq = self.request_dq(products, regs, ds_stage(count + DS_STAGES - lag))
        if const_expr(early):
            self.request_scores(products, regs, next_state.index)
        if const_expr(not is_hidden):
            p, ds = [accumulator.as_operand_a(x) for x in (regs.p, regs.rounded_ds)]
            dot = regs.dot[None, None, None, grad_state.index]
            matmul(products.dv, regs.dv, p, dot, True)
            qt = regs.qt[None, None, None, state.index]
            matmul(products.dk, regs.dk, ds, qt, True)
        # dQ is done, what was requested behind it is not.
        warpgroup.wait_group((1 if early else 0) + (0 if is_hidden else 2))
        block = dq_head + head * mdQ.shape[2] + m_block
        dq_block = last_block if lag == 1 else block
        if dq_block >= 0:
            self.add_dq(mdQ, acc_dq, place, dq_block)
        if const_expr(is_last):
            self.turn(1 - place.warpgroup).arrive()
            warpgroup.wait_group(0)
        else:
            if const_expr(not early):
                self.request_scores(products, regs, next_state.index)
            if const_expr(not is_hidden):
                # dK is not done, or S; dP takes registers of what is.
                warpgroup.wait_group(1)
            self.request_dp(products, regs, next_grad_state.index)
            self.turn(1 - place.warpgroup).arrive()
            # All but dP is done, or but S and dP.
            warpgroup.wait_group(1 if early else 2)
        rings.do.consumer_release(grad_state)
        rings.q.consumer_release(state)

        if const_expr(not is_last):
            # In the stage of block count - 1, with which both are done, or soon.
            if (place.warpgroup == 0) & (count + LOADED_AHEAD < end_count):
                to_load = (count + LOADED_AHEAD, load_head, load_block_idx)
                self.load_rows(sources, work, call, to_load, first_warp=0)
            load_head, load_block_idx = self.next_block(load_head, load_block_idx, rows)
            head, m_block = self.next_block(head, m_block, rows)
            warpgroup.wait_group(0)
        return head, m_block, load_head, load_block_idx, block

    @cute.jit
    def next_block(self, head: Int32, m_block: Int32, rows: RowRange):
        """The (query head of the group, row block) behind a block."""
        m_block = m_block + 1
        if m_block == rows.end:
            m_block = rows.first
            head = head + 1
        return head, m_block

    def request_scores(self, products: Products, regs: Fragments, stage: Int32):
        """Request S = K Q^T, which with the LSE's k-step is x / scale - lse / scale."""
        q = regs.q[None, None, None, stage]
        if const_expr(self.scores_have_lse):
            lse = regs.lse[None, None, None, stage]
            more = (products.statistics, regs.halves, lse)
            matmul(products.scores, regs.scores, regs.k, q, False, more)
        else:
            matmul(products.scores, regs.scores, regs.k, q, False)

    def request_dp(self, products: Products, regs: Fragments, stage: Int32):
        """Request dP - delta, where dP = V dO^T."""
        do, delta = [x[None, None, None, stage] for x in (regs.do, regs.delta)]
        more = (products.statistics, regs.halves, delta)
        matmul(products.scores, regs.dp, regs.v, do, False, more)

    @cute.jit
    def zero_ds(self, shared: Shared, place: Place):
        """Zeros for the dS that warpgroup 0 multiplies in its first turn."""
        elements = self.schedule.tile_n * self.schedule.tile_m
        threads = self.schedule.threads
        # Zeros need no swizzle.
        stage = cute.recast_ptr(shared.ds.iterator, cute.make_swizzle(0, 4, 3))
        stage = cute.make_tensor(
            stage + (DS_STAGES - 1) * elements,
            cute.make_layout((8, threads, elements // (8 * threads))),
        )
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        thread = place.warpgroup * WARPGROUP + thread_of_warpgroup()
        for i in cutlass.range_constexpr(cute.size(stage, mode=[2])):
            cute.autovec_copy(zeros, stage[None, thread, i])
        cute.arch.fence_proxy("async.shared", space="cta")

    def turn(self, warpgroup: Int32):
        """The named barrier at which a warpgroup waits for the other one to give it the turn."""
        return self.barrier(Barrier.TURN + warpgroup, WARPGROUPS)

    def request_dq(self, products: Products, regs: Fragments, stage: Int32):
        """Request this warpgroup's part of dQ = dS K, which is returned."""
        # A new one for each block: its registers are dP's, between two blocks.
        shape = products.dq.partition_shape_C((KEYS, self.schedule.dq_columns))
        acc = cute.make_rmem_tensor(shape, Float32)
        ds = regs.ds[None, None, None, stage]
        matmul(products.dq, acc, ds, regs.kt, False)
        return acc

    @cute.jit
    def score_gradient(
        self,
        regs: Fragments,
        shared: Shared,
        stage: Int32,
        m_block: Int32,
        place: Place,
        work: Work,
        call: Call,
        clear: tuple[Int32, Int32],
    ):
        """P = exp(x - lse) and dS = P (dP - delta), rounded, 0 where a row does not see a key.

        clear  row blocks in which this warpgroup needs no mask: [first, end)

        With softcap dS has its derivative, 1 - t^2 with t = x / cap, for a factor.
        """
        has_softcap = const_expr(self.features.score == "softcap")
        scale_log2 = row_statistics.exponent_scale(call.softmax_scale)
        if const_expr(has_softcap):
            soft_cap(regs.scores, call.softmax_scale, call.softcap)
            scale_log2 = Float32(LOG2_E)
        scores = accumulator.by_row(regs.scores)
        gradient = accumulator.by_row(regs.dp)
        if (m_block < clear[0]) | (m_block >= clear[1]):
            nothing = -Float32.inf if scale_log2 > 0.0 else Float32.inf
            self.mask(scores, nothing, m_block * self.schedule.tile_m, place, work, call)
        to_t = 1.0 / call.softcap
        packed_p, packed_ds = [cute.recast_tensor(x, Int32) for x in (regs.p, regs.rounded_ds)]
        lse = cute.make_rmem_tensor(4, Float32)
        pair = cute.make_rmem_tensor(2, Float32)
        gradient_pair = cute.make_rmem_tensor(2, Float32)
        # Sixteen rows after another, so that what is rounded takes the place of what it came from.
        for g in cutlass.range_constexpr(self.schedule.tile_m // 16):
            if const_expr(has_softcap):
                of_columns = row_statistics.of_columns(shared.lse[None, stage], place.column)
                cute.autovec_copy(of_columns[None, g], lse)
            for half in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        column = 4 * g + 2 * half + i
                        exponent = scores[r, column] * scale_log2
                        if const_expr(has_softcap):
                            exponent = exponent - lse[2 * half + i]
                        pair[i] = cute.math.exp2(exponent, fastmath=True)
                        gradient_pair[i] = pair[i] * gradient[r, column]
                        if const_expr(has_softcap):
                            t = scores[r, column] * to_t
                            # Bounds for a masked score.
                            t = cute.arch.fmax(cute.arch.fmin(t, Float32(1.0)), Float32(-1.0))
                            gradient_pair[i] = gradient_pair[i] * (1.0 - t * t)
                    at = 4 * g + 2 * half + r
                    for packed, x in ((packed_p, pair), (packed_ds, gradient_pair)):
                        packed[at] = accumulator.round_pair(x[0], x[1], self.dtype)

    @cute.jit
    def mask(
        self,
        scores: cute.Tensor,
        nothing: Float32,
        first_row: Int32,
        place: Place,
        work: Work,
        call: Call,
    ):
        """S := nothing where a row does not see a key.

        scores  (2 keys, columns) view of S; the thread's column c is row 8 (c/2) + c%2 from
                first_row on, and place.column further

        Row i sees key j if j - right <= i + diagonal <= j + left, where there are such bounds.
        """
        features = self.features
        thread = thread_of_warpgroup()
        my_tile = WARPGROUPS * work.tile.m_block + place.warpgroup
        first_key = my_tile * KEYS + thread // 32 * 16 + thread % 32 // 4
        for r in cutlass.range_constexpr(2):
            key = first_key + 8 * r
            # The row on the key's diagonal, counted as the thread's columns are.
            row = key - work.rows.diagonal - first_row - place.column
            begin, end = Int32(0), row + call.left + 1
            if const_expr(features.has_right_bound):
                begin = row - call.right
            if key >= work.k.length:
                begin = Int32(self.schedule.tile_m)
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                column = 8 * (c // 2) + c % 2
                hidden = column < begin
                if const_expr(features.has_left_bound):
                    hidden = hidden | (column >= end)
                scores[r, c] = nothing if hidden else scores[r, c]

    @cute.jit
    def share_ds(self, regs: Fragments, shared: Shared, place: Place, stage: Int32):
        """Registers -> stmatrix -> this warpgroup's keys of sdS, for the matmuls of both."""
        # A row of the store is a key's 8 query rows. A key's 64 rows of a chunk are 128 bytes, in
        # which the swizzle exchanges pieces of 16 by the key's last three bits.
        tile_m, tile_n = self.schedule.tile_m, self.schedule.tile_n
        thread = thread_of_warpgroup()
        lane = thread % 32
        key = place.warpgroup * KEYS + thread // 32 * 16 + lane % 16
        mine = shared.ds.iterator.toint() + stage * (2 * tile_n * tile_m)
        mine = mine + key * (2 * CHUNK) + (lane // 16 ^ lane % 8) * 16
        packed = cute.recast_tensor(regs.rounded_ds, Int32)
        for sixteen in cutlass.range_constexpr(tile_m // 16):
            chunk, pair = sixteen // 4, sixteen % 4
            # Worked out from one address here: four that last would cost three registers.
            target = (mine ^ (32 * pair)) + chunk * (2 * tile_n * CHUNK)
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[target, *[packed[4 * sixteen + i] for i in range(4)]],
            )
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def add_dq(self, mdQ: cute.Tensor, acc: cute.Tensor, place: Place, block: Int32):
        """Add a warpgroup's part of a block's dQ to the workspace.

        block  of the workspace: counted through its heads and batch entries

        The workspace has, for each 64 rows and then each 8 columns, the four registers of each
        thread of the warpgroup that holds them: additions of 16 bytes a thread, in one piece.
        """
        schedule = self.schedule
        octets = schedule.dq_columns // 8
        values = cute.make_tensor(acc.iterator, cute.make_layout((4, octets)))
        dq = Int64(block) * (schedule.tile_m * schedule.head_dim)
        target = mdQ.iterator + (dq + place.warpgroup * (schedule.dq_octet_step * OCTET))
        target = target + thread_of_warpgroup() * 4
        # What both warpgroups have (d96), warpgroup 0 adds.
        twice = octets - schedule.dq_octet_step
        if const_expr(twice > 0):
            if place.warpgroup == 0:
                for o in cutlass.range_constexpr(twice):
                    add_four(target + o * OCTET, values, o)
        for o in cutlass.range_constexpr(twice, octets):
            add_four(target + o * OCTET, values, o)

    @cute.jit
    def store_gradient(
        self,
        acc: cute.Tensor,
        gradient: cute.Tensor,
        factor: Float32,
        place: Place,
        work: Work,
    ):
        """factor * acc -> this warpgroup's rows of the gradient.

        Rows of padding get what their masked accumulators hold: 0.
        """
        tile = work.tile
        rows = self.rows_of_head(gradient, tile)
        acc.store(acc.load() * factor)
        rounded = cute.make_rmem_tensor_like(acc, self.dtype)
        accumulator.round_into(rounded, acc)
        first = (WARPGROUPS * tile.m_block + place.warpgroup) * KEYS
        thread = thread_of_warpgroup()
        accumulator.store_rows(rounded, rows, work.k.start, first, work.k.rows, thread)


@cute.jit
def thread_of_warpgroup():
    """This thread's number in its warpgroup.

    Moved by PTX, so that what is worked out from it is worked out again for each block: there are
    no registers to keep it in.
    """
    thread = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[cute.arch.thread_idx()[0]],
    )
    # Unsigned, or each quotient of what might be negative took five instructions more.
    return Int32(Uint32(thread) % WARPGROUP)


def ds_stage(count: Int32):
    """Where the ``count``-th block's dS is; unsigned, because a signed remainder takes more."""
    return Int32(Uint32(count) % DS_STAGES)


@cute.jit
def add_four(target: cute.Pointer, values: cute.Tensor, column: cutlass.Constexpr[int]):
    """target[0:4] += values[:, column], in global memory, as one unordered 16-byte reduction."""
    cute.arch.inline_ptx(
        "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target.toint(), *[values[i, column] for i in range(4)]],
    )


def compile_backward(
    features: BackwardFeatures, schedule: OneKernelSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `HopperBackward.__call__`.

    As in `fa4.kernels.sm90.forward`, every stride in use must be a multiple of 16 bytes.
    """
    dtype = DTYPES[features.dtype]
    return cute.compile(
        HopperBackward(features, schedule),
        *fake_tensors.backward_inputs(features, dtype),
        fake_tensors.strided(Float32, 4, align=16),
        fake_tensors.strided(BFloat16, 4, align=16),
        fake_tensors.strided(Float32, 4, align=16),
        fake_tensors.rows(dtype, features.packed_k),
        fake_tensors.rows(dtype, features.packed_k),
        fake_tensors.vector(True),
        fake_tensors.vector(True),
        *fake_tensors.backward_numbers(features),
        Int32(1),
        Int32(1),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
