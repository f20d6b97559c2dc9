"""How the keys of a batch are divided among CTAs: whole tiles, equal splits, or equal shares.

A tile is the packed query rows of one key head that are computed together (`gqa_packing`). Its
keys are visited by one CTA or by several, whose partial results `kernels.combine` merges.

    fixed     each tile's blocks are cut into num_splits parts of equal length. A part depends on
              its own sequence only, so results do not depend on the rest of the batch
    balanced  one tile a sequence and key head. All blocks of all tiles form a list, cut into as
              many equal shares as there are CTAs: every CTA reads the same number of keys, however
              ragged the batch. A CTA then holds whole tiles, and at most two parts: of its first
              and of its last tile (stream-K: Osama et al. 2023). Tiles that turn out to be equally
              long stay whole where they fill the CTAs nearly as well

A list holds the tiles of one group of key heads, and neighbouring CTAs have the same share of the
lists of different groups: they read the heads of the same rows of a cache at about the same time.
A tile counts as a few blocks more than it has (`TILE_UNITS`), because it costs time to begin and to
end: short sequences would otherwise pile up in few CTAs.

Lengths are read on the device, by every warp that needs them.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa4.kernels.blocks.gqa_packing import Sequence, divide, packed_range

WARP = 32
LONGEST = 2**31 - 1
IDLE_PLACES = 20  # one of so many may idle in the waves of whole tiles
# What beginning and ending a tile costs, in blocks. Measured on the H200 with 64 sequences of 1 to
# 32768 keys: 1, 2, 3 and 4 give 4.28, 4.33, 4.33 and 4.32 TB/s; with one CTA an SM, whose blocks
# have 128 keys, 1 and 2 give 4.12 and 4.20.
TILE_UNITS = 2
WHOLE = -1
NOTHING = -2


class Call(NamedTuple):
    """Run-time arguments of a launch.

    cu_seqlens_q    (batch + 1,) where queries are packed
    cache_seqlens   (batch,) positions in use before new keys are appended
    cu_seqlens_new  (batch + 1,) where new keys are packed
    leftpad         (batch,) first position in use
    rows_q          extent of the row mode of q
    new_rows        new keys of each sequence, where they are not packed
    group           query heads a key head
    num_m_blocks    tiles of one sequence and key head; slots of all sequences where packed
    num_tiles       tiles of all sequences and key heads (fixed)
    num_splits      parts of each tile (fixed)
    sharers         CTAs that share the list of a group of key heads (balanced)
    head_groups     groups of key heads, a divisor of their number (balanced)
    slot_rows       rows of a partial result
    left, right     window bounds, read only by kernels that have them
    fills_padding   whether output rows of padding are set to 0
    stores_lse      whether the LSE is wanted
    """

    cu_seqlens_q: Optional[cute.Tensor]
    cache_seqlens: cute.Tensor
    cu_seqlens_new: Optional[cute.Tensor]
    leftpad: Optional[cute.Tensor]
    batch: Int32
    rows_q: Int32
    new_rows: Int32
    heads_kv: Int32
    group: Int32
    num_m_blocks: Int32
    num_tiles: Int32
    num_splits: Int32
    sharers: Int32
    head_groups: Int32
    slot_rows: Int32
    softmax_scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    fills_padding: Int32
    stores_lse: Int32


class Tile(NamedTuple):
    """Packed rows [m_block * tile_m, ...) of one sequence and key head."""

    batch_idx: Int32
    head_kv: Int32
    m_block: Int32


class Segment(NamedTuple):
    """What a CTA does at a stretch.

    first, end  key blocks of the tile to attend to
    slot        where the partial result goes; WHOLE: all keys of the tile are here; NOTHING: none
                is, and others see to the output
    start       what `KeySplits.parts` finds the other parts by
    """

    tile: Tile
    sequence: Sequence
    first: Int32
    end: Int32
    slot: Int32
    start: Int32


class Entry(NamedTuple):
    """Where the units of a batch entry lie in a list (balanced).

    base   its first unit
    units  of each of its tiles in the list: `TILE_UNITS`, then one for each block
    """

    batch_idx: Int32
    base: Int32
    units: Int32


class Shares(NamedTuple):
    """How a list is cut (balanced): ``longer`` CTAs do length + 1 units, the others ``length``, as
    long as there are any. Where ``whole`` is not 0 it is the units of every tile, and CTAs take
    tiles in turns."""

    total: Int32
    length: Int32
    longer: Int32
    whole: Int32


class Cursor(NamedTuple):
    """How far a CTA is: ``at`` the next unit or part, ``stop`` the end, where units lie."""

    at: Int32
    stop: Int32
    entry: Entry


class Parts(NamedTuple):
    """Where the ``count`` partial results of a tile lie: slots first, second, second + step, ...

    counter  which counter says how many are there
    """

    count: Int32
    counter: Int32
    first: Int32
    second: Int32
    step: Int32


class KeySplits:
    """The division for one kernel, by its compile-time features and schedule."""

    def __init__(self, features, schedule):
        self.features = features
        self.schedule = schedule

    @cute.jit
    def sequence(self, batch_idx: Int32, call: Call):
        """Queries and keys of a batch entry."""
        q_start = Int32(0)
        q_rows = call.rows_q
        if const_expr(call.cu_seqlens_q is not None):
            q_start = call.cu_seqlens_q[batch_idx]
            q_rows = call.cu_seqlens_q[batch_idx + 1] - q_start
        end_k = call.cache_seqlens[batch_idx]
        if const_expr(call.cu_seqlens_new is not None):
            end_k = end_k + call.cu_seqlens_new[batch_idx + 1] - call.cu_seqlens_new[batch_idx]
        else:
            end_k = end_k + call.new_rows
        begin_k = Int32(0)
        if const_expr(call.leftpad is not None):
            begin_k = call.leftpad[batch_idx]
        return Sequence(q_start, q_rows, begin_k, end_k)

    @cute.jit
    def keys(self, m_block: Int32, sequence: Sequence, call: Call):
        """What a tile sees: a `gqa_packing.PackedRange`."""
        return packed_range(
            m_block,
            call.group,
            sequence,
            call.left,
            call.right,
            self.features.has_left_bound,
            self.features.has_right_bound,
            self.schedule.tile_m,
            self.schedule.tile_n,
        )

    # -- fixed -----------------------------------------------------------------
    @cute.jit
    def tile(self, tile_idx: Int32, call: Call):
        """The tile of an index; a slot of no tile has m_block past the rows of its sequence.

        All lanes of a warp must call it together.
        """
        rest = divide(tile_idx, call.num_m_blocks)
        m_block = tile_idx - rest * call.num_m_blocks
        if const_expr(call.cu_seqlens_q is not None):
            batch_idx, m_block = self.find_slot(m_block, call)
            return Tile(batch_idx, rest, m_block)
        if const_expr(self.features.has_right_bound):
            m_block = call.num_m_blocks - 1 - m_block  # what sees most keys comes first
        batch_idx = divide(rest, call.heads_kv)
        return Tile(batch_idx, rest - batch_idx * call.heads_kv, m_block)

    @cute.jit
    def find_slot(self, slot: Int32, call: Call):
        """(batch entry, m_block) of a slot of packed queries.

        Entry b has the slots from cu_seqlens_q[b] * group // tile_m + b on: at least as many as it
        has tiles, and known without a sum (see `tile_order.num_slots`). The last entry also gets
        the slots that are left over.
        """
        cu_seqlens = call.cu_seqlens_q
        tile_m = self.schedule.tile_m
        lane = cute.arch.lane_idx()
        first = Int32(0)
        end = Int32(call.batch)
        while end - first > 1:
            step = (end - first + WARP - 1) // WARP
            probe = first + lane * step
            reached = Boolean(False)
            if probe < end:
                reached = divide(cu_seqlens[probe] * call.group, tile_m) + probe <= slot
            # Lane 0 always holds; the first slots rise, so the lanes that hold come first.
            last = cute.arch.popc(cute.arch.vote_ballot_sync(reached)) - 1
            first = first + last * step
            end = cutlass.min(end, first + step)
        return first, slot - divide(cu_seqlens[first] * call.group, tile_m) - first

    @cute.jit
    def fixed_segment(self, item: Int32, call: Call):
        """Part ``item % num_splits`` of tile ``item // num_splits``."""
        tile_idx = item
        split = Int32(0)
        slot = Int32(WHOLE)
        if const_expr(self.schedule.merges):
            tile_idx = divide(item, call.num_splits)
            split = item - tile_idx * call.num_splits
            slot = item
        tile = self.tile(tile_idx, call)
        sequence = self.sequence(tile.batch_idx, call)
        keys = self.keys(tile.m_block, sequence, call)
        first = keys.first
        end = keys.end
        if const_expr(self.schedule.merges):
            length = divide(keys.end - keys.first + call.num_splits - 1, call.num_splits)
            first = cutlass.min(keys.first + split * length, keys.end)
            end = cutlass.min(first + length, keys.end)
        return Segment(tile, sequence, first, end, slot, tile_idx)

    # -- balanced --------------------------------------------------------------
    @cute.jit
    def units(self, batch_idx: Int32, call: Call):
        """Units of each tile of a batch entry; 0 past the last entry."""
        # Where there is nothing to load, something is: without branches loads are in flight
        # together.
        sequence = self.sequence(cutlass.min(batch_idx, call.batch - 1), call)
        keys = self.keys(Int32(0), sequence, call)
        units = keys.end - keys.first + TILE_UNITS
        return Int32(cutlass.select_(batch_idx < call.batch, units, Int32(0)))

    @cute.jit
    def heads_of_list(self, call: Call):
        return divide(call.heads_kv, call.head_groups)

    @cute.jit
    def shares(self, call: Call):
        """The `Shares` of a call. All lanes of a warp must call it together.

        Where all tiles are equally long and whole ones fill the waves of CTAs nearly as well, a CTA
        gets whole ones: see `pipelines.sm90_decode.even_splits`, which decides where the host knows
        the lengths.
        """
        total = Int32(0)
        least = Int32(LONGEST)
        most = Int32(0)
        for chunk in cutlass.range(0, call.batch, WARP, unroll=4):
            mine = self.units(chunk + cute.arch.lane_idx(), call)
            total = total + mine
            most = cutlass.max(most, mine)
            # 0 is past the last entry.
            least = cutlass.min(least, Int32(cutlass.select_(mine > 0, mine, Int32(LONGEST))))
        for i in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << i))
            least = cutlass.min(least, cute.arch.shuffle_sync_bfly(least, offset=1 << i))
        heads = self.heads_of_list(call)
        total = total * heads
        length = divide(total, call.sharers)
        longer = total - length * call.sharers
        tiles = call.batch * heads
        places = divide(tiles + call.sharers - 1, call.sharers) * call.sharers
        whole = Int32(0)
        if (least == most) & (tiles >= places - divide(places, IDLE_PLACES)):
            whole = most
        return Shares(total, length, longer, whole)

    @cute.jit
    def share(self, sharer: Int32, shares: Shares):
        """First unit of a CTA, where lists are cut."""
        return sharer * shares.length + cutlass.min(sharer, shares.longer)

    @cute.jit
    def owner(self, unit: Int32, shares: Shares):
        """The CTA of a list whose share holds a unit below the total."""
        in_longer = shares.longer * (shares.length + 1)
        sharer = divide(unit, shares.length + 1)
        if unit >= in_longer:
            sharer = shares.longer + divide(unit - in_longer, cutlass.max(shares.length, 1))
        return sharer

    @cute.jit
    def find_entry(self, unit: Int32, call: Call):
        """The entry that holds a unit below the total. All lanes of a warp must call it."""
        lane = cute.arch.lane_idx()
        heads = self.heads_of_list(call)
        batch_idx = Int32(0)
        base = Int32(0)
        units = Int32(1)
        chunk = Int32(0)
        is_found = Boolean(False)
        while (chunk < call.batch) & (not is_found):
            mine = self.units(chunk + lane, call)
            sum_to_here = mine * heads
            for i in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(sum_to_here, offset=1 << i, mask_and_clamp=0)
                sum_to_here = sum_to_here + (before if lane >= 1 << i else 0)
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(base + sum_to_here <= unit))
            if passed < WARP:
                is_found = Boolean(True)
                batch_idx = chunk + passed
                units = cute.arch.shuffle_sync(mine, offset=passed)
                base = base + cute.arch.shuffle_sync(sum_to_here, offset=passed)
                base = base - units * heads
            else:
                base = base + cute.arch.shuffle_sync(sum_to_here, offset=WARP - 1)
            chunk = chunk + WARP
        return Entry(batch_idx, base, units)

    @cute.jit
    def entry_of_tile(self, unit: Int32, whole: Int32, call: Call):
        """The entry that holds a unit, where every tile has ``whole`` units."""
        heads = self.heads_of_list(call)
        batch_idx = divide(divide(unit, whole), heads)
        return Entry(batch_idx, batch_idx * heads * whole, whole)

    @cute.jit
    def first_place(self, cta: Int32, shares: Shares, call: Call):
        """The `Cursor` in front of a CTA's share. All lanes of a warp must call it."""
        sharer = divide(cta, call.head_groups)
        at = self.share(sharer, shares)
        stop = self.share(sharer + 1, shares)
        entry = Entry(Int32(0), Int32(0), Int32(1))
        if shares.whole > 0:
            at = sharer * shares.whole
            stop = shares.total
        elif at < stop:
            entry = self.find_entry(at, call)
        return Cursor(at, stop, entry)

    @cute.jit
    def next_place(self, cursor: Cursor, cta: Int32, shares: Shares, call: Call):
        """(segment at the cursor, cursor behind it)."""
        heads = self.heads_of_list(call)
        at = cursor.at
        entry = cursor.entry
        if shares.whole > 0:
            entry = self.entry_of_tile(at, shares.whole, call)
        elif at >= entry.base + entry.units * heads:
            # The first unit of the next entry.
            batch_idx = entry.batch_idx + 1
            entry = Entry(batch_idx, at, cutlass.max(self.units(batch_idx, call), 1))
        head = divide(at - entry.base, entry.units)
        start = entry.base + head * entry.units
        begin = at - start
        length = cutlass.min(entry.units - begin, cursor.stop - at)
        # The units in front of the blocks are nobody's work.
        first = cutlass.max(begin - TILE_UNITS, 0)
        end = cutlass.max(begin + length - TILE_UNITS, 0)
        slot = 2 * cta + Int32(cutlass.select_(first == 0, Int32(1), Int32(0)))
        if first == end:
            slot = Int32(NOTHING)
        # Of a tile without keys whoever has its last unit writes the output.
        if (first == 0) & (begin + length == entry.units):
            slot = Int32(WHOLE)
        sequence = self.sequence(entry.batch_idx, call)
        keys = self.keys(Int32(0), sequence, call)
        head_kv = (cta - divide(cta, call.head_groups) * call.head_groups) * heads + head
        tile = Tile(entry.batch_idx, head_kv, Int32(0))
        segment = Segment(tile, sequence, keys.first + first, keys.first + end, slot, start)
        step = Int32(cutlass.select_(shares.whole > 0, call.sharers * shares.whole, length))
        return segment, Cursor(at + step, cursor.stop, entry)

    # -- what has to be merged ---------------------------------------------------
    @cute.jit
    def parts(self, segment: Segment, cursor: Cursor, cta: Int32, shares: Shares, call: Call):
        """The `Parts` of the tile that a segment with a slot is of.

        cursor  behind the segment
        """
        if const_expr(not self.schedule.is_balanced):
            first = segment.start * call.num_splits
            return Parts(call.num_splits, segment.start, first, first + 1, Int32(1))
        group = cta - divide(cta, call.head_groups) * call.head_groups
        sharer = self.owner(segment.start + TILE_UNITS, shares)
        last = self.owner(segment.start + cursor.entry.units - 1, shares)
        counter = sharer * call.head_groups + group
        step = 2 * call.head_groups
        return Parts(last - sharer + 1, counter, 2 * counter + 1, 2 * counter + step, step)
