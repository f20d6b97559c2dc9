"""Hopper forward attention: warp-specialised, TMA loads and stores, wgmma, P in registers.

    o[i, :] = sum_j p[i, j] v[j, :] / l[i],   p[i, j] = exp(x[i, j] - m[i]),   x = scale * q k^T
    lse[i] = m[i] + ln l[i]

over the keys j that row i sees, with softcap, window and sink as `fa4.attention` defines them.
Method: FA2 (query tile outer, key blocks inner, online softmax), FA3 sections 3.1 and 3.2 (roles,
turns between warpgroups: one computes softmax while the other keeps the tensor cores busy).

Roles (1 + W warpgroups; W = tile_m / 64)
  warpgroup 0       load      warp 0 chooses tiles, sends them to attend and issues every TMA load;
                              its three other warps only give up their registers
  warpgroups 1..W   attend    each owns 64 query rows from the first score to the stored output

Shared memory (sizes in elements of q's type; `ForwardSchedule.smem_bytes`)
  sQ   (64, head_dim, W)               one slab a warpgroup
  sK   (tile_n, head_dim, stages)
  sV   (tile_n, head_dim_v, stages)    read transposed, as the N-major B operand of P V
  sO   (64, head_dim_v, W)             one slab a warpgroup; in sV, a stage each, if o_shares_v

Hand-offs
  messages  `Mailbox`: what to do next. Load is one tile ahead
  q    stage = warpgroup. Filled by load; released by the warpgroup behind Q K of its last block,
       so that the next tile's rows arrive while that one's softmax, P V and output are at work
  k,v  filled by load in the order K(n), then K(n-1), V(n), K(n-2), V(n-1) ...; released by every
       warp of every warpgroup as soon as the matmul that reads it is done
  o    where it leaves through V's buffers, load asks for the next tile's first V when the copies
       have read them

Causal: each warpgroup goes through the blocks that its own rows see, and lets the others go by. Of
its last one it may see half or less: then it multiplies no more of it (`ForwardSchedule.short_n`).

Blocks are visited from the last to the first, so that the masked ones (sequence end, diagonal)
come first and the loop over whole blocks carries no mask code. The masked ones find the rows'
maxima by online softmax; the whole ones keep these as reference (`online_softmax.
kept_reference_step`), and raise them only where probabilities become large. Should a sum or an
output overflow fp32 all the same (a score e^88 times as likely as the reference in one block), the
CTA does that tile again with online softmax throughout: every `TILES_A_ROUND` tiles, load waits for
attend and sends the tiles that it has marked once more. What a tile goes through depends on its own
data alone.

Run on H200s: docs/gpu_runs.md.
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

from fa4.kernels.blocks import accumulator, fake_tensors, global_view
from fa4.kernels.blocks.key_range import KeyRange, key_range
from fa4.kernels.blocks.matmul import matmul
from fa4.kernels.blocks.online_softmax import (
    EXCESS_MAX,
    LOG2_E,
    finish_row,
    kept_reference_step,
    mask_scores,
    online_softmax_step,
    raise_reference,
    scale_rows,
    scale_scores,
    soft_cap,
)
from fa4.kernels.blocks.sequence_bounds import SequenceBounds, sequence_bounds
from fa4.kernels.blocks.tile_order import Tile, count_taken, count_tiles, locate_tile
from fa4.kernels.blocks.tma_rings import Tma, load_block, stage_at, tma_copy, tma_ring
from fa4.kernels.features import ForwardFeatures
from fa4.pipelines.registers import WARPGROUP
from fa4.pipelines.sm90 import ForwardSchedule

ROWS = 64  # query rows of a warpgroup: M of one wgmma
TILES_A_ROUND = 32  # bits of a word of marks
MESSAGES = 2  # from load to attend: load is one ahead
MESSAGE_WORDS = 10
DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA's own. TURN and EPILOGUE take one id a warpgroup from here."""

    TURN = 1
    EPILOGUE = 4
    ROUND = 7
    VALUES_READ = 8


class What(IntEnum):
    """`Message.what` beside bits of tiles; REPEAT is added to the bit of a repeated tile."""

    REPEAT = 32
    ROUND = 64
    END = -1


class Call(NamedTuple):
    """Run-time arguments of a launch that both roles read.

    rows_q, rows_k  extent of the row mode of q, and of k and v
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
    """One query tile: which it is, the rows of its sequence, and the keys it sees.

    slab  its first 64 query rows, of all that the sequence is cut into
    """

    tile: Tile
    slab: Int32
    q: SequenceBounds
    k: SequenceBounds
    keys: KeyRange


class Message(NamedTuple):
    """What attend is to do next: a tile, with what load found out about it, or one of `What`.

    what        bit of the tile in its round, + REPEAT in its second pass; or ROUND: meet load, for
                every tile sent so far is done; or END
    slab        the tile's first 64 query rows, of all that the sequence is cut into
    first, end  key blocks that are loaded for the tile
    """

    what: Int32
    slab: Int32
    head_idx: Int32
    batch_idx: Int32
    q: SequenceBounds
    k_length: Int32
    first: Int32
    end: Int32

    def words(self):
        return (*self[:4], *self.q, *self[5:])

    @staticmethod
    def of_words(words):
        what, slab, head_idx, batch_idx, *q, k_length, first, end = words
        return Message(what, slab, head_idx, batch_idx, SequenceBounds(*q), k_length, first, end)


class Mailbox(NamedTuple):
    """Shared memory by which load directs attend.

    sent       `MESSAGES` barriers: a message is there
    messages   (MESSAGES * MESSAGE_WORDS,)
    tiles      (TILES_A_ROUND,) tile indices of the round
    marks      (1,) bit i: tile i of the round has to be repeated
    o_stored   barrier: O has left the buffers of V (`o_shares_v`)
    """

    sent: cute.Pointer
    messages: cute.Tensor
    tiles: cute.Tensor
    marks: cute.Tensor
    o_stored: cute.Pointer


def first_rows(stages: cute.Tensor, rows: int):
    """The first rows of each of (rows, dim, stages), whose rows lie in groups of eight."""
    (group, _), *others = stages.layout.shape
    layout = cute.make_layout(((group, rows // group), *others), stride=stages.layout.stride)
    return cute.make_tensor(stages.iterator, layout)


@cute.jit
def lowest_bit(word: Int32):
    """Index of the lowest bit that is set."""
    return cute.arch.popc((word & -word) - 1)


class Rings(NamedTuple):
    """The buffers that load fills and attend drains."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


class Products(NamedTuple):
    """The tiled MMAs of one warpgroup: 64 rows of scores, of a short block's, and of output.

    qk_short is None where the schedule has no shorter blocks.
    """

    qk: cute.TiledMma
    qk_short: Optional[cute.TiledMma]
    pv: cute.TiledMma


class Fragments(NamedTuple):
    """What a consumer warpgroup multiplies and keeps in registers.

    q, k, v                      shared-memory operands: (MMA, M or N, K[, stages])
    k_short                      the first keys of each stage of k, None without short blocks
    scores, out                  fp32 accumulators of q k^T and P V
    probabilities                scores in 16 bits, the A operand of P V
    row_max, row_sum, rescale    (2,) statistics of this thread's two rows
    """

    q: cute.Tensor
    k: cute.Tensor
    k_short: Optional[cute.Tensor]
    v: cute.Tensor
    scores: cute.Tensor
    out: cute.Tensor
    probabilities: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    rescale: cute.Tensor


class Place(NamedTuple):
    """Where a consumer thread is: warpgroup, thread in it, and its first accumulator element."""

    warpgroup: Int32
    thread: Int32
    row: Int32  # query row in the sequence; the thread's other row is 8 further
    column: Int32  # key in the block


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
        stores_lse: Int32,
        mCounter: cute.Tensor,
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
        max_ctas        each takes tile after tile
        fills_padding   1: query rows of padding get output 0; 0: they are left alone
        stores_lse      0: mLSE is a placeholder
        mCounter        (1,) int32 by which CTAs take the next tile that nobody has taken: 0 before
                        the launch and after it, and in use by no other launch meanwhile
        """
        schedule = self.schedule
        tile_n, warpgroups = schedule.tile_n, schedule.consumer_warpgroups
        head_dim, head_dim_v = schedule.head_dim, schedule.head_dim_v
        q, k, v, o = [global_view.rows_first(t) for t in (mQ, mK, mV, mO)]

        row_major = tensor_utils.LayoutEnum.ROW_MAJOR
        col_major = tensor_utils.LayoutEnum.COL_MAJOR
        sQ_layout = sm90.make_smem_layout_a(
            row_major, (ROWS, tile_n, head_dim), self.dtype, warpgroups
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
        sO_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (ROWS, head_dim_v), warpgroups)

        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        q_tma = tma_copy(load, q, self.q_is_ragged, sQ_layout, (ROWS, head_dim))
        k_tma = tma_copy(load, k, self.k_is_ragged, sK_layout, (tile_n, head_dim))
        v_tma = tma_copy(load, v, self.k_is_ragged, sV_layout, (tile_n, head_dim_v))
        o_tma = tma_copy(store, o, self.q_is_ragged, sO_layout, (ROWS, head_dim_v))

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
        mma_qk_short = None
        if const_expr(schedule.short_n):
            mma_qk_short = self.score_product(schedule.short_n)
        mmas = Products(self.score_product(tile_n), mma_qk_short, mma_pv)

        o_elements = 0 if schedule.o_shares_v else warpgroups * ROWS * head_dim_v

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * warpgroups]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * schedule.stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * schedule.stages]
            message_barriers: cute.struct.MemRange[cutlass.Int64, MESSAGES]
            o_stored: cute.struct.MemRange[cutlass.Int64, 1]
            messages: cute.struct.MemRange[Int32, MESSAGES * MESSAGE_WORDS]
            tiles: cute.struct.MemRange[Int32, TILES_A_ROUND]
            marks: cute.struct.MemRange[Int32, 1]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sQ_layout)], 1024]
            sO: cute.struct.Align[cute.struct.MemRange[self.dtype, o_elements], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sK_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(sV_layout)], 1024]

        self.shared_storage = SharedStorage

        heads_q = q.shape[2]
        num_m_blocks, num_batches = count_tiles(q, mCuQ, schedule.tile_m, self.features.packed_q)
        num_tiles = num_m_blocks * heads_q * num_batches
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
        self.kernel.set_name_prefix(
            f"fa4_sm90_forward_{self.features.name}_{schedule.name}", keep_mangled_name=False
        )
        self.kernel(
            q_tma,
            k_tma,
            v_tma,
            o_tma,
            global_view.modes_reversed(mLSE),
            mSink,
            mCounter,
            mmas,
            (sQ_layout, sK_layout, sV_layout, sVt_layout, sO_layout),
            call,
        ).launch(
            grid=(cutlass.min(num_tiles, max_ctas), 1, 1),
            block=(schedule.threads, 1, 1),
            stream=stream,
        )

    def score_product(self, keys: int) -> cute.TiledMma:
        """q k^T of a warpgroup's rows and so many keys."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(1, 1, 1),
            tiler_mn=(ROWS, keys),
        )

    # -------------------------------------------------------------- device side
    @cute.kernel
    def kernel(
        self,
        q_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        o_tma: Tma,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        mCounter: cute.Tensor,
        mmas: Products,
        layouts,
        call: Call,
    ):
        schedule = self.schedule
        sQ_layout, sK_layout, sV_layout, sVt_layout, sO_layout = layouts
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in (q_tma, k_tma, v_tma, o_tma):
                cpasync.prefetch_descriptor(tma.atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        sVt = storage.sV.get_tensor(sVt_layout.outer, swizzle=sVt_layout.inner)
        if const_expr(schedule.o_shares_v):
            # Warpgroup w's O lies in stage w of V.
            sO = storage.sV.get_tensor(
                self.with_slabs(sO_layout.outer, schedule.tile_n * schedule.head_dim_v),
                swizzle=sO_layout.inner,
            )
        else:
            sO = storage.sO.get_tensor(sO_layout.outer, swizzle=sO_layout.inner)

        warpgroups = schedule.consumer_warpgroups
        rings = Rings(
            tma_ring(storage.q_barriers, warpgroups, 4, sQ),
            tma_ring(storage.k_barriers, schedule.stages, 4 * warpgroups, sK),
            tma_ring(storage.v_barriers, schedule.stages, 4 * warpgroups, sV),
        )
        box = Mailbox(
            storage.message_barriers.data_ptr(),
            storage.messages.get_tensor(cute.make_layout(MESSAGES * MESSAGE_WORDS)),
            storage.tiles.get_tensor(cute.make_layout(TILES_A_ROUND)),
            storage.marks.get_tensor(cute.make_layout(1)),
            storage.o_stored.data_ptr(),
        )
        if warp_idx == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(MESSAGES):
                    cute.arch.mbarrier_init(box.sent + i, 1)
                cute.arch.mbarrier_init(box.o_stored, warpgroups)
                box.marks[0] = 0
        pipeline.pipeline_init_arrive(is_relaxed=True)
        pipeline.pipeline_init_wait()

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(schedule.producer_registers)
            if warp_idx == 0:
                self.load(q_tma, k_tma, v_tma, mCounter, sQ, sK, sV, rings, box, call)
        else:
            cute.arch.setmaxregister_increase(schedule.consumer_registers)
            self.attend(mmas, o_tma, mLSE, mSink, sQ, sK, sVt, sO, rings, box, call)

    def with_slabs(self, layout: cute.Layout, slab: int):
        """(rows, dim, warpgroups) with the warpgroups' slabs ``slab`` elements apart."""
        return cute.make_layout(layout.shape, stride=(*layout.stride[:2], (0, slab)))

    @cute.jit
    def locate(self, tile_idx: Int32, call: Call):
        """The work that a tile index stands for; a slot of no tile has m_block past its rows."""
        schedule, features = self.schedule, self.features
        tile = locate_tile(
            tile_idx,
            call.num_m_blocks,
            call.heads_q,
            call.num_batches,
            call.heads_in_group,
            call.rows_q,
            call.cu_seqlens_q,
            schedule.tile_m,
            features.has_right_bound,
        )
        q = sequence_bounds(tile.batch_idx, call.rows_q, call.cu_seqlens_q, call.seqused_q)
        k = sequence_bounds(tile.batch_idx, call.rows_k, call.cu_seqlens_k, call.seqused_k)
        # The last tile ends where the sequence does, and the first one may begin in front of it:
        # causal, a tile with little to do should be one that sees few keys.
        warpgroups = schedule.consumer_warpgroups
        slabs = cute.ceil_div(q.rows, ROWS)
        missing = cute.ceil_div(slabs, warpgroups) * warpgroups - slabs
        slab = tile.m_block * warpgroups - missing
        keys = self.keys_of(slab, warpgroups, q.length, k.length, call)
        return Work(tile, slab, q, k, keys)

    @cute.jit
    def keys_of(
        self,
        slab: Int32,
        slabs: cutlass.Constexpr[int],
        seqlen_q: Int32,
        seqlen_k: Int32,
        call: Call,
    ):
        """Key range of some slabs of query rows of a sequence."""
        features = self.features
        return key_range(
            slab * ROWS,
            seqlen_q,
            seqlen_k,
            call.left,
            call.right,
            features.has_left_bound,
            features.has_right_bound,
            slabs * ROWS,
            self.schedule.tile_n,
        )

    @cute.jit
    def next_tile(self, mCounter: cute.Tensor, call: Call):
        """Index of a tile that no other CTA has taken; past the end if there is none.

        Where every CTA has one tile nobody asks, because a small launch would notice the time that
        an answer takes.
        """
        following = call.num_tiles
        if call.num_tiles > cute.arch.grid_dim()[0]:
            taken = Int32(0)
            if cute.arch.lane_idx() == 0:
                taken = count_taken(mCounter, call.num_tiles)
            following = cute.arch.make_warp_uniform(taken) + cute.arch.grid_dim()[0]
        return following

    @cute.jit
    def mark_overflow(self, row_sum: cute.Tensor, rounded: cute.Tensor, bit: Int32, box: Mailbox):
        """Mark a tile for repetition if a sum or an output of this thread is infinite or NaN.

        rounded  the output in 16 bits: no average of finite values rounds to infinity
        """
        excess = row_sum[0] * 0.0 + row_sum[1] * 0.0
        # NaN compares unequal to everything.
        found = (excess != 0.0) | accumulator.has_infinity(rounded)
        if cute.arch.vote_any_sync(found):
            cute.arch.atomic_or(box.marks.iterator, Int32(1) << bit, scope="cta")

    @cute.jit
    def send(self, box: Mailbox, count: Int32, message: Message):
        """Load: the ``count``-th message, in place of the one before last.

        That one has been read: load has been given the buffers of the tile after it, or has met
        attend since.
        """
        state = stage_at(count, MESSAGES, True)
        if cute.arch.lane_idx() == 0:
            for i, value in enumerate(message.words()):
                box.messages[state.index * MESSAGE_WORDS + i] = value
            cute.arch.mbarrier_arrive(box.sent + state.index)

    @cute.jit
    def receive(self, box: Mailbox, count: Int32, call: Call):
        """Attend: the ``count``-th message, the same in all lanes."""
        state = stage_at(count, MESSAGES, False)
        cute.arch.mbarrier_wait(box.sent + state.index, state.phase)
        words = [
            cute.arch.make_warp_uniform(box.messages[state.index * MESSAGE_WORDS + i])
            for i in range(MESSAGE_WORDS)
        ]
        message = Message.of_words(words)
        # What is the same for every tile needs no register.
        q, k_length, first = message.q, message.k_length, message.first
        if const_expr(not self.features.packed_q):
            q = SequenceBounds(Int32(0), q.length, call.rows_q)
        if const_expr(not self.q_is_ragged):
            q = SequenceBounds(q.start, call.rows_q, call.rows_q)
        if const_expr(not self.k_is_ragged):
            k_length = call.rows_k
        if const_expr(not self.features.has_left_bound):
            first = Int32(0)
        return message._replace(q=q, k_length=k_length, first=first)

    @cute.jit
    def load(
        self,
        q_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        mCounter: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        rings: Rings,
        box: Mailbox,
        call: Call,
    ):
        """Warp 0: choose tiles, send them to attend, and request their Q, K and V block by block,
        as far ahead as buffers are free.

        Waits for free stages of q, k and v; the copies signal their full barriers.
        """
        messages = Int32(0)
        tiles_loaded = Int32(0)
        blocks_loaded = Int32(0)
        no_tile = [Int32(0)] * (MESSAGE_WORDS - 1)
        step = (q_tma, k_tma, v_tma, sQ, sK, sV, rings, box, call)
        tile_idx = Int32(cute.arch.block_idx()[0])
        while tile_idx < call.num_tiles:
            in_round = Int32(0)
            while (tile_idx < call.num_tiles) & (in_round < TILES_A_ROUND):
                work = self.locate(tile_idx, call)
                if work.tile.m_block * self.schedule.tile_m < work.q.rows:
                    box.tiles[in_round] = tile_idx
                    blocks_loaded, tile_idx = self.load_tile(
                        *step, work, in_round, messages, tiles_loaded, blocks_loaded, mCounter
                    )
                    messages = messages + 1
                    tiles_loaded = tiles_loaded + 1
                    in_round = in_round + 1
                else:
                    tile_idx = self.next_tile(mCounter, call)
            self.send(box, messages, Message.of_words((Int32(What.ROUND), *no_tile)))
            messages = messages + 1
            self.round_barrier().arrive_and_wait()
            # Every warpgroup has done its part of the round and marked it.
            again = cute.arch.make_warp_uniform(box.marks[0])
            if again != 0:
                cute.arch.sync_warp()
                box.marks[0] = 0
                while again != 0:
                    bit = lowest_bit(again)
                    work = self.locate(box.tiles[bit], call)
                    what = bit + What.REPEAT
                    blocks_loaded, _ = self.load_tile(
                        *step, work, what, messages, tiles_loaded, blocks_loaded, None
                    )
                    messages = messages + 1
                    tiles_loaded = tiles_loaded + 1
                    again = again & (again - 1)
        self.send(box, messages, Message.of_words((Int32(What.END), *no_tile)))
        # No tail: barriers are this CTA's own, and its shared memory lives until its last warp.

    def round_barrier(self):
        """Where load waits for attend to be done with a round."""
        threads = 32 + self.schedule.consumer_warpgroups * WARPGROUP
        return pipeline.NamedBarrier(barrier_id=Barrier.ROUND, num_threads=threads)

    @cute.jit
    def load_tile(
        self,
        q_tma: Tma,
        k_tma: Tma,
        v_tma: Tma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        rings: Rings,
        box: Mailbox,
        call: Call,
        work: Work,
        what: Int32,
        messages: Int32,
        tiles_loaded: Int32,
        blocks_loaded: Int32,
        mCounter: Optional[cute.Tensor],
    ):
        """Send one tile and request what it reads.

        Returns the new count of blocks loaded, and the tile to do next if there is a counter.
        """
        schedule = self.schedule
        warpgroups, stages = schedule.consumer_warpgroups, schedule.stages
        tile, keys = work.tile, work.keys
        message = Message(
            what,
            work.slab,
            tile.head_idx,
            tile.batch_idx,
            work.q,
            work.k.length,
            keys.first,
            keys.end,
        )
        self.send(box, messages, message)
        gQ = self.query_slabs(q_tma, message, work.q.length, schedule.head_dim)
        gK = self.key_blocks(k_tma, work, call, schedule.head_dim)
        gV = self.key_blocks(v_tma, work, call, schedule.head_dim_v)
        num_blocks = keys.end - keys.first
        last = keys.end - 1
        if num_blocks > 0:
            state = stage_at(blocks_loaded, stages, True)
            load_block(k_tma, gK, sK, rings.k, last, state)
        for w in cutlass.range_constexpr(warpgroups):
            state = stage_at(tiles_loaded * warpgroups + w, warpgroups, True)
            load_block(q_tma, gQ, sQ, rings.q, cutlass.max(work.slab + w, 0), state)
        for i in cutlass.range(1, num_blocks, unroll=1):
            state = stage_at(blocks_loaded + i, stages, True)
            load_block(k_tma, gK, sK, rings.k, last - i, state)
            if const_expr(schedule.o_shares_v):
                if i == 1:
                    cute.arch.mbarrier_wait(box.o_stored, (tiles_loaded & 1) ^ 1)
            state = stage_at(blocks_loaded + i - 1, stages, True)
            load_block(v_tma, gV, sV, rings.v, last - i + 1, state)
        if const_expr(schedule.o_shares_v):
            if num_blocks <= 1:
                cute.arch.mbarrier_wait(box.o_stored, (tiles_loaded & 1) ^ 1)
        # Late, because a tile that waits for this CTA could be with one that is idle; but in front
        # of the last block, for whose buffer there is a wait in any case.
        following = Int32(0)
        if const_expr(mCounter is not None):
            following = self.next_tile(mCounter, call)
        if num_blocks > 0:
            state = stage_at(blocks_loaded + num_blocks - 1, stages, True)
            load_block(v_tma, gV, sV, rings.v, keys.first, state)
        return blocks_loaded + num_blocks, following

    def query_slabs(self, tma: Tma, message: Message, length: Int32, dim: int):
        """Rows of q or o of a tile's sequence and head, cut into (ROWS, dim, slabs)."""
        # Packed sequences are told apart by their rows, not by a batch mode.
        batch_idx = Int32(0) if self.features.packed_q else message.batch_idx
        rows = global_view.one_sequence(
            tma.tensor, tma.units, message.q.start, length, message.head_idx, batch_idx
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
    def attend(
        self,
        mmas: Products,
        o_tma: Tma,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sVt: cute.Tensor,
        sO: cute.Tensor,
        rings: Rings,
        box: Mailbox,
        call: Call,
    ):
        """Consumer warpgroups: scores, softmax, P V and output of 64 query rows each.

        Waits for full stages of q, k and v, and gives them back.
        """
        schedule = self.schedule
        warpgroups = schedule.consumer_warpgroups
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread = tidx % WARPGROUP

        # Descriptors are a warpgroup's, not a thread's.
        pv = mmas.pv.get_slice(0)
        scores = self.score_registers(mmas.qk, schedule.tile_n)
        out = cute.make_rmem_tensor(mmas.pv.partition_shape_C((ROWS, schedule.head_dim_v)), Float32)
        k_short = None
        if const_expr(schedule.short_n):
            k_short = self.key_operand(mmas.qk_short, first_rows(sK, schedule.short_n))
        regs = Fragments(
            mmas.qk.make_fragment_A(mmas.qk.get_slice(0).partition_A(sQ[None, None, wg])),
            self.key_operand(mmas.qk, sK),
            k_short,
            mmas.pv.make_fragment_B(pv.partition_B(sVt)),
            scores,
            out,
            cute.make_rmem_tensor_like(scores, self.dtype),
            *[cute.make_rmem_tensor(2, Float32) for _ in range(3)],
        )

        if const_expr(schedule.takes_turns):
            if wg == warpgroups - 1:
                # The turn that nobody passes on: the first one of warpgroup 0.
                self.turn(0).arrive()

        blocks_read = Int32(0)
        tiles_read = Int32(0)
        messages_read = Int32(0)
        message = self.receive(box, messages_read, call)
        # In order of size: tests for equality become a jump through a table.
        while message.what > What.END:
            if message.what >= What.ROUND:
                self.round_barrier().arrive()
            else:
                q = message.q
                is_repeat = message.what >= What.REPEAT
                slab = message.slab + wg
                keys = self.keys_of(slab, 1, q.length, message.k_length, call)
                row = slab * ROWS + thread // 32 * 16 + thread % 32 // 4
                place = Place(wg, thread, row, thread % 4 * 2)
                q_state = pipeline.PipelineState(warpgroups, tiles_read, wg, tiles_read & 1)
                rings.q.consumer_wait(q_state)
                regs.row_max.fill(-Float32.inf)
                regs.row_sum.fill(0.0)
                # Blocks of the tile that other warpgroups see and this one does not.
                blocks = message.end - message.first
                before = cutlass.min(message.end - keys.end, blocks)
                sees_keys = (keys.first < keys.end) & (slab >= 0)
                sees_last = sees_keys & (before <= 0)
                if not sees_last:
                    self.give_back_values(box, place, tiles_read)
                if sees_keys:
                    after = blocks - before - (keys.end - keys.first)
                    if const_expr(self.features.has_right_bound):
                        blocks_read = self.pass_blocks(rings, place, blocks_read, before, before)
                    blocks_read = self.attend_keys(
                        mmas,
                        regs,
                        rings,
                        place,
                        keys,
                        is_repeat,
                        box,
                        call,
                        blocks_read,
                        tiles_read if sees_last else Int32(0),
                        q_state,
                    )
                    if const_expr(self.features.has_left_bound):
                        blocks_read = self.pass_blocks(rings, place, blocks_read, after, after)
                else:
                    regs.out.fill(0.0)
                    blocks_read = self.pass_blocks(rings, place, blocks_read, blocks, blocks - 1)
                    rings.q.consumer_release(q_state)
                self.normalise(mLSE, mSink, regs, place, message, call)
                rounded = cute.make_rmem_tensor_like(regs.out, self.dtype)
                accumulator.round_into(rounded, regs.out)
                if not is_repeat:
                    self.mark_overflow(regs.row_sum, rounded, message.what, box)
                self.store_output(mmas.pv, o_tma, rounded, sO, place, message, call)
                tiles_read = tiles_read + 1
            messages_read = messages_read + 1
            message = self.receive(box, messages_read, call)
        # Shared memory has to outlive the copies that read it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def score_registers(self, mma_qk: cute.TiledMma, keys: int):
        """Accumulator of a warpgroup's scores of so many keys."""
        return cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, keys)), Float32)

    def key_operand(self, mma_qk: cute.TiledMma, sK: cute.Tensor):
        """sK as the B operand of q k^T."""
        return mma_qk.make_fragment_B(mma_qk.get_slice(0).partition_B(sK))

    @cute.jit
    def pass_blocks(
        self, rings: Rings, place: Place, blocks_read: Int32, count: Int32, turns: Int32
    ):
        """Let ``count`` blocks and ``turns`` turns go by; returns the new count of blocks read."""
        schedule = self.schedule
        for i in cutlass.range(count, unroll=1):
            if const_expr(schedule.takes_turns):
                if i < turns:
                    self.turn(place.warpgroup).arrive_and_wait()
                    self.turn((place.warpgroup + 1) % schedule.consumer_warpgroups).arrive()
            state = stage_at(blocks_read + i, schedule.stages, False)
            for ring in (rings.k, rings.v):
                ring.consumer_wait(state)
                ring.consumer_release(state)
        return blocks_read + cutlass.max(count, 0)

    @cute.jit
    def give_back_values(self, box: Mailbox, place: Place, tiles_read: Int32):
        """Tell load that the O of the tile before has left the buffers of V, once it has."""
        if const_expr(self.schedule.o_shares_v):
            if (cute.arch.make_warp_uniform(place.thread // 32) == 0) & (tiles_read > 0):
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.mbarrier_arrive(box.o_stored)

    def turn(self, wg):
        """Barrier at which warpgroup ``wg`` waits for its turn to issue matmuls."""
        return pipeline.NamedBarrier(barrier_id=Barrier.TURN + wg, num_threads=2 * WARPGROUP)

    @cute.jit
    def attend_keys(
        self,
        mmas: Products,
        regs: Fragments,
        rings: Rings,
        place: Place,
        keys: KeyRange,
        is_repeat: cutlass.Boolean,
        box: Mailbox,
        call: Call,
        blocks_read: Int32,
        tiles_stored: Int32,
        q_state: pipeline.PipelineState,
    ):
        """The key blocks that this warpgroup's rows see, last to first.

        Returns the new count of blocks read. Gives V's buffers back if ``tiles_stored`` is above 0.

        P V of a block is issued behind Q K of the next one, so that the tensor cores go on while
        a softmax starts. Leaves the unnormalised output and the row statistics in registers.

        How much of a softmax runs beside its own warpgroup's P V is up to ptxas, which may wait
        for P V first; the matmuls of the other warpgroup run beside it in any case. What that is
        worth, and that it cannot simply be pinned, is in docs/results/notes.md.
        """
        schedule, features = self.schedule, self.features

        # The blocks in the order of visiting: the last one, [clear_end, last) masked by the right
        # bound, [clear_first, clear_end) whole, [first, clear_first) masked by the left bound. A
        # tile that is repeated goes through all of it as if masked.
        last = keys.end - 1
        clear_end = cutlass.min(keys.clear_end, last)
        if is_repeat:
            clear_end = keys.first
        clear_first = cutlass.min(keys.clear_first, clear_end)
        # Descriptors of buffers are made in uniform registers only of what is known to be uniform.
        uniform = cute.arch.make_warp_uniform
        blocks_read = uniform(blocks_read)
        k_state = stage_at(blocks_read, schedule.stages, False)
        rings.k.consumer_wait(k_state)
        step = (mmas, rings, place, keys, call, q_state)
        first = (*step[1:], k_state, box, tiles_stored)
        masked = (step, first, regs, blocks_read, last, clear_end)
        if const_expr(schedule.short_n):
            # P V of a short block is issued behind Q K of a whole one, which there has to be.
            is_short = keys.seen - last * schedule.tile_n <= schedule.short_n
            if is_short & (clear_first < clear_end) & (clear_end == last):
                scores = self.score_registers(mmas.qk_short, schedule.short_n)
                p = cute.make_rmem_tensor_like(scores, self.dtype)
                short = regs._replace(scores=scores, probabilities=p)
                k = regs.k_short[None, None, None, k_state.index]
                self.first_block(mmas.qk_short, k, short, *first)
                clear_end = clear_end - 1
                self.block_step(
                    *step, regs, p, clear_end, blocks_read, is_masked=False, accumulates=False
                )
                blocks_read = blocks_read + 1
            else:
                blocks_read = self.masked_blocks(*masked)
        else:
            blocks_read = self.masked_blocks(*masked)

        blocks_read = uniform(blocks_read)
        step = (*step, regs, regs.probabilities)
        for i in cutlass.range(uniform(clear_end - clear_first), unroll=1):
            self.block_step(*step, clear_end - 1 - i, blocks_read + i, is_masked=False)
        blocks_read = blocks_read + (clear_end - clear_first)
        if const_expr(features.has_left_bound):
            for i in cutlass.range(uniform(clear_first - keys.first), unroll=1):
                self.block_step(*step, clear_first - 1 - i, blocks_read + i, is_masked=True)
            blocks_read = blocks_read + (clear_first - keys.first)

        v_state = stage_at(blocks_read, schedule.stages, False)
        rings.v.consumer_wait(v_state)
        p = accumulator.as_operand_a(regs.probabilities)
        matmul(mmas.pv, regs.out, p, regs.v[None, None, None, v_state.index], True)
        warpgroup.wait_group(0)
        rings.v.consumer_release(v_state)
        return blocks_read + 1

    @cute.jit
    def masked_blocks(
        self, step, first, regs: Fragments, blocks_read: Int32, last: Int32, clear_end: Int32
    ):
        """The last block, and the blocks [clear_end, last) that the right bound masks.

        step, first  what `block_step` and `first_block` have as their first and last arguments
        Returns the ring position of block ``clear_end``.
        """
        mmas = step[0]
        stage = stage_at(blocks_read, self.schedule.stages, False).index
        k = regs.k[None, None, None, stage]
        regs.out.fill(0.0)
        self.first_block(mmas.qk, k, regs, *first)
        step = (*step, regs, regs.probabilities)
        # Else the number is worked out again at the end of every block.
        for i in cutlass.range(cute.arch.make_warp_uniform(last - clear_end), unroll=1):
            self.block_step(*step, last - 1 - i, blocks_read + i, is_masked=True)
        return blocks_read + (last - clear_end)

    @cute.jit
    def first_block(
        self,
        mma_qk: cute.TiledMma,
        k: cute.Tensor,
        regs: Fragments,
        rings: Rings,
        place: Place,
        keys: KeyRange,
        call: Call,
        q_state: pipeline.PipelineState,
        k_state: pipeline.PipelineState,
        box: Mailbox,
        tiles_stored: Int32,
    ):
        """Scores and probabilities of the keys ``k`` of the last block, with nothing underneath."""
        matmul(mma_qk, regs.scores, regs.q, k, False)
        self.give_back_values(box, place, tiles_stored)
        warpgroup.wait_group(0)
        rings.k.consumer_release(k_state)
        if keys.first == keys.end - 1:
            rings.q.consumer_release(q_state)
        self.softmax(regs, place, keys, call, keys.end - 1, is_first=True, is_masked=True)
        accumulator.round_into(regs.probabilities, regs.scores)

    @cute.jit
    def block_step(
        self,
        mmas: Products,
        rings: Rings,
        place: Place,
        keys: KeyRange,
        call: Call,
        q_state: pipeline.PipelineState,
        regs: Fragments,
        before: cute.Tensor,
        n_block: Int32,
        blocks_read: Int32,
        is_masked: cutlass.Constexpr[bool],
        accumulates: cutlass.Constexpr[bool] = True,
    ):
        """Scores and softmax of block ``n_block``, with P V of the block before it underneath.

        before       probabilities of the block before
        blocks_read  its ring position
        accumulates  whether its P V is added to the output, or sets it
        """
        schedule, features = self.schedule, self.features
        k_state = stage_at(blocks_read + 1, schedule.stages, False)
        v_state = stage_at(blocks_read, schedule.stages, False)
        p = accumulator.as_operand_a(before)
        # Both at once: each look at a barrier takes some fifty cycles to answer.
        k_arrived = rings.k.consumer_try_wait(k_state)
        v_arrived = rings.v.consumer_try_wait(v_state)
        rings.k.consumer_wait(k_state, k_arrived)
        if const_expr(schedule.takes_turns):
            self.turn(place.warpgroup).arrive_and_wait()
        matmul(mmas.qk, regs.scores, regs.q, regs.k[None, None, None, k_state.index], False)
        rings.v.consumer_wait(v_state, v_arrived)
        matmul(mmas.pv, regs.out, p, regs.v[None, None, None, v_state.index], accumulates)
        if const_expr(schedule.takes_turns):
            self.turn((place.warpgroup + 1) % schedule.consumer_warpgroups).arrive()
        warpgroup.wait_group(1)
        rings.k.consumer_release(k_state)
        is_last = n_block == keys.first
        gives_q_back_late = const_expr(features.has_right_bound and not is_masked)
        if const_expr(not gives_q_back_late):
            # The next tile's rows may come while this one's last block is worked on.
            if is_last:
                rings.q.consumer_release(q_state)
        if const_expr(is_masked):
            self.softmax(regs, place, keys, call, n_block, is_first=False, is_masked=True)
            warpgroup.wait_group(0)
            rings.v.consumer_release(v_state)
            # Before the output is scaled: conversions run at half rate, and the multiplications
            # that follow fill the gaps.
            accumulator.round_into(regs.probabilities, regs.scores)
            scale_rows(accumulator.by_row(regs.out), regs.rescale)
        else:
            self.transform(regs.scores, call)
            scores, out = accumulator.by_row(regs.scores), accumulator.by_row(regs.out)
            tile_sum = cute.make_rmem_tensor(2, Float32)
            scale_log2 = self.scale_log2(call)
            kept_reference_step(scores, regs.row_max, tile_sum, scale_log2)
            if const_expr(gives_q_back_late):
                # Where ptxas puts the wait for P V decides about 2 % at d128. Here, and if a sum is
                # asked for, which is never negative, it comes behind most of the exponentials.
                is_negative = tile_sum[0] < 0.0
                if is_last & (not is_negative):
                    rings.q.consumer_release(q_state)
            warpgroup.wait_group(0)
            rings.v.consumer_release(v_state)
            # Rounded before anyone asks how large they are, so that conversions fill the gaps
            # between exponentials; what has to be scaled is rounded again.
            accumulator.round_into(regs.probabilities, regs.scores)
            if cute.arch.vote_any_sync((tile_sum[0] > EXCESS_MAX) | (tile_sum[1] > EXCESS_MAX)):
                raise_reference(scores, regs.row_max, regs.row_sum, tile_sum, out, scale_log2)
                accumulator.round_into(regs.probabilities, regs.scores)
            for r in cutlass.range_constexpr(2):
                regs.row_sum[r] = regs.row_sum[r] + tile_sum[r]

    def scale_log2(self, call: Call):
        """What turns the scores that the softmax sees into exponents of 2."""
        if self.features.score == "plain":
            return call.softmax_scale * LOG2_E
        return Float32(LOG2_E)

    @cute.jit
    def transform(self, scores: cute.Tensor, call: Call):
        """Products to what the softmax sees, where that is not the products themselves."""
        if const_expr(self.features.score == "softcap"):
            soft_cap(scores, call.softmax_scale, call.softcap)
        elif const_expr(self.features.score == "scaled"):
            scale_scores(scores, call.softmax_scale)

    @cute.jit
    def softmax(
        self,
        regs: Fragments,
        place: Place,
        keys: KeyRange,
        call: Call,
        n_block: Int32,
        is_first: cutlass.Constexpr[bool],
        is_masked: cutlass.Constexpr[bool],
    ):
        """Turn the raw products of one block into probabilities, updating the row statistics."""
        features = self.features
        self.transform(regs.scores, call)
        scores = accumulator.by_row(regs.scores)
        if const_expr(is_masked):
            mask_scores(
                scores,
                n_block * self.schedule.tile_n + place.column,
                place.row,
                keys.length,
                keys.diagonal,
                call.left,
                call.right,
                features.has_left_bound,
                features.has_right_bound,
            )
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
    def normalise(
        self,
        mLSE: cute.Tensor,
        mSink: Optional[cute.Tensor],
        regs: Fragments,
        place: Place,
        message: Message,
        call: Call,
    ):
        """Divide the output by its row sums, and store the LSE if it is wanted."""
        q, head_idx = message.q, message.head_idx
        has_sink = const_expr(self.features.sink_dtype is not None)
        sink_log2 = Float32(0.0)
        if const_expr(has_sink):
            sink_log2 = mSink[head_idx].to(Float32) * LOG2_E
        for r in cutlass.range_constexpr(2):
            factor, lse = finish_row(
                regs.row_max[r], regs.row_sum[r], self.scale_log2(call), sink_log2, has_sink
            )
            row = place.row + 8 * r
            if row >= q.length:
                # Padding: what was computed for it came from zeros.
                factor = Float32(0.0)
                lse = -Float32.inf
            regs.rescale[r] = factor
            if (call.stores_lse != 0) & (place.thread % 4 == 0) & (0 <= row) & (row < q.rows):
                if const_expr(self.features.packed_q):
                    mLSE[q.start + row, head_idx] = lse
                else:
                    mLSE[row, head_idx, message.batch_idx] = lse
        scale_rows(accumulator.by_row(regs.out), regs.rescale)

    @cute.jit
    def store_output(
        self,
        mma_pv: cute.TiledMma,
        o_tma: Tma,
        rounded: cute.Tensor,
        sO: cute.Tensor,
        place: Place,
        message: Message,
        call: Call,
    ):
        """Registers -> stmatrix -> this warpgroup's slab -> TMA store, clipped to the sequence."""
        schedule = self.schedule
        wg = place.warpgroup
        barrier = pipeline.NamedBarrier(barrier_id=Barrier.EPILOGUE + wg, num_threads=WARPGROUP)
        stores = cute.arch.make_warp_uniform(place.thread // 32) == 0
        slab = sO[None, None, wg]

        if stores:
            with cute.arch.elect_one():
                if message.what >= What.REPEAT:
                    # Two copies to one place are in no order until the first is complete.
                    cute.arch.cp_async_bulk_wait_group(0)
                elif const_expr(not schedule.o_shares_v):
                    # The slab is free once the previous tile's copy has read it.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(schedule.o_shares_v):
            # The previous tile's copy has: load has been told. Values are free once all have
            # multiplied by them.
            threads = schedule.consumer_warpgroups * WARPGROUP
            pipeline.NamedBarrier(
                barrier_id=Barrier.VALUES_READ, num_threads=threads
            ).arrive_and_wait()
        else:
            barrier.arrive_and_wait()
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        r2s = cute.make_tiled_copy_C(stmatrix, mma_pv)
        thr = r2s.get_slice(place.thread)
        cute.copy(r2s, thr.retile(rounded), thr.partition_D(slab))
        # Make these writes visible to the TMA engine before anyone starts it.
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        if stores & (message.slab + wg >= 0):
            stored_rows = message.q.rows
            if const_expr(self.q_is_ragged):
                stored_rows = stored_rows if call.fills_padding != 0 else message.q.length
            gO = self.query_slabs(o_tma, message, stored_rows, schedule.head_dim_v)
            whole = cute.make_layout(1)
            tOsO, tOgO = cpasync.tma_partition(
                o_tma.atom, 0, whole, cute.group_modes(slab, 0, 2), cute.group_modes(gO, 0, 2)
            )
            with cute.arch.elect_one():
                cute.copy(o_tma.atom, tOsO, tOgO[None, message.slab + wg])
                cute.arch.cp_async_bulk_commit_group()


def compile_forward(
    features: ForwardFeatures, schedule: ForwardSchedule, arch: str, options: str = ""
):
    """Compile for any batch, lengths, heads and strides; see `HopperForward.__call__`.

    Strides of q, k, v and o are promised nothing here: `global_view.rows_first` relies on the
    caller's check that every stride in use is a multiple of 16 bytes.
    """
    return cute.compile(
        HopperForward(features, schedule),
        *fake_tensors.forward_arguments(features, DTYPES),
        cute.runtime.make_fake_tensor(Int32, (1,), (1,)),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
