"""Hopper schedules of attention over a key/value cache, and the rule that divides the keys.

What bounds decoding is how fast keys and values come out of memory, so a schedule is chosen for
bytes in flight: as many stages as shared memory holds. A block of 128 keys of 128 dims takes an SM
some 3300 clocks to read and a third of that to multiply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fa4.kernels.features import TMA_ALIGNMENT, DecodeFeatures
from fa4.pipelines.registers import WARPGROUP, registers_at_launch, role_problems
from fa4.pipelines.sm90 import (
    BARRIER_BYTES,
    ELEMENT_BYTES,
    OTHER_REGISTERS,
    SMEM_BYTES,
)

# TMA writes rows of eight at a time in the pattern that wgmma reads; fewer cannot be one copy.
MIN_COPY_ROWS = 8


@dataclass(frozen=True)
class DecodeSchedule:
    """How the Hopper decode kernel runs.

    head_dim, head_dim_v   padded head dims the buffers are made for
    warpgroups             consumer warpgroups, of 64 packed query rows each
    tile_n                 keys of a block
    stages                 K and V buffers of each kind
    copy_rows              rows of one TMA copy, which lie in one page; 0: pages are too small for
                           TMA or rows not aligned for it, and a warpgroup gathers rows
    is_balanced            keys are divided into equal shares of all CTAs; else into a number of
                           splits that the call states (`kernels.blocks.key_splits`)
    merges                 partial results may arise, and the last CTA of a tile merges them
    ctas_per_sm            CTAs that share a multiprocessor
    consumer_registers     per thread, after setmaxnreg
    producer_registers     per thread, after setmaxnreg
    """

    head_dim: int
    head_dim_v: int
    warpgroups: int
    tile_n: int
    stages: int
    copy_rows: int
    is_balanced: bool
    merges: bool
    ctas_per_sm: int
    consumer_registers: int
    producer_registers: int

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """One producer warpgroup and the consumers."""
        return (1 + self.warpgroups) * WARPGROUP

    @property
    def moves_registers(self) -> bool:
        """Whether the launch gives a consumer too few, so that it takes the producer's."""
        at_launch = registers_at_launch(self.threads, self.ctas_per_sm) // self.threads
        return at_launch < self.consumer_registers

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: barriers, Q, K and V stages."""
        q = self.tile_m * self.head_dim
        kv = self.stages * self.tile_n * (self.head_dim + self.head_dim_v)
        return BARRIER_BYTES + ELEMENT_BYTES * (q + kv)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer thread for O (fp32), S (fp32) and P (16 bit)."""
        return self.head_dim_v // 2 + self.tile_n // 2 + self.tile_n // 4

    @property
    def description(self) -> str:
        """One line for people."""
        rows = f"TMA of {self.copy_rows} rows" if self.copy_rows else "rows gathered"
        if self.is_balanced:
            division = "keys in equal shares of all CTAs"
        else:
            division = "keys in a stated number of splits" if self.merges else "keys not split"
        return (
            f"{self.tile_m} packed query rows, key block {self.tile_n}, {self.stages} K/V stages, "
            f"{rows}, {division}, {self.ctas_per_sm} CTA an SM, "
            f"{self.smem_bytes // 1024} KiB shared memory"
        )

    @property
    def name(self) -> str:
        copies = f"tma{self.copy_rows}" if self.copy_rows else "gather"
        division = "fixed" if self.merges else "whole"
        if self.is_balanced:
            division = "balanced"
        several = f"x{self.ctas_per_sm}" if self.ctas_per_sm > 1 else ""
        return f"m{self.tile_m}n{self.tile_n}s{self.stages}{several}_{copies}_{division}"

    def __post_init__(self) -> None:
        problems = []
        if self.warpgroups not in (1, 2):
            problems.append(f"warpgroups={self.warpgroups} is not 1 or 2")
        if self.tile_n not in (32, 64, 128):
            # Four gathering warps take a power of two of rows each, at most one a lane.
            problems.append(f"tile_n={self.tile_n} is not 32, 64 or 128")
        if self.stages < 2:
            # K(j-1) is requested while V(j) is still in use: one stage would deadlock.
            problems.append(f"stages={self.stages} is below 2")
        if self.copy_rows and (self.copy_rows < MIN_COPY_ROWS or self.tile_n % self.copy_rows):
            problems.append(
                f"copy_rows={self.copy_rows} is neither 0 nor a divisor of tile_n={self.tile_n} "
                f"from {MIN_COPY_ROWS}"
            )
        if self.is_balanced and not self.merges:
            problems.append("a balanced schedule has partial results to merge")
        problems += role_problems(
            {
                "consumer_registers": (self.consumer_registers, self.warpgroups),
                "producer_registers": (self.producer_registers, 1),
            },
            self.threads,
            self.ctas_per_sm,
        )
        needed = self.accumulator_registers + OTHER_REGISTERS
        if needed > self.consumer_registers:
            problems.append(
                f"O, S and P need about {needed} registers, more than {self.consumer_registers}"
            )
        if self.smem_bytes > SMEM_BYTES // self.ctas_per_sm:
            problems.append(
                f"shared memory {self.smem_bytes} exceeds {SMEM_BYTES // self.ctas_per_sm} bytes"
            )
        if problems:
            raise ValueError(f"{self}: " + "; ".join(problems))


def copy_rows(page_size: int | None, tile_n: int, cache_align: int = TMA_ALIGNMENT) -> int:
    """Rows of one TMA copy for a page size (None: no pages), 0 where rows must be gathered.

    cache_align  bytes that the caches' addresses and strides are multiples of
    """
    rows = tile_n if page_size is None else math.gcd(page_size, tile_n)
    return rows if rows >= MIN_COPY_ROWS and cache_align >= TMA_ALIGNMENT else 0


class DecodeNumbers(NamedTuple):
    """What a launch says in numbers, whatever its tensors hold.

    left, right  window bounds, read only by kernels that have them
    new_rows     keys appended to each sequence, where they are not packed
    num_splits   parts of each tile; ignored by balanced schedules
    slot_rows    rows of a partial result
    max_ctas     CTAs of the launch, or (balanced) the most
    head_groups  groups of key heads (`head_groups`); ignored by schedules that are not balanced
    """

    softmax_scale: float
    softcap: float
    left: int
    right: int
    new_rows: int
    num_splits: int
    slot_rows: int
    max_ctas: int
    head_groups: int


@dataclass(frozen=True)
class DecodePlan:
    """A schedule and the number of splits that a launch states; 0 for a balanced one."""

    schedule: DecodeSchedule
    num_splits: int


def decode_plan(
    features: DecodeFeatures,
    packed_rows: int,
    tiles: int,
    page_size: int | None,
    num_splits: int,
    multiprocessors: int,
    capacity: int,
    has_equal_lengths: bool,
) -> DecodePlan:
    """The schedule for a problem, from bounds that the host knows.

    packed_rows        most packed query rows a sequence may have: group * seqlen_q
    tiles              sequences times key heads
    page_size          of a paged cache, else None
    num_splits         what the caller asked for: 0 is automatic
    multiprocessors    of the device
    capacity           most positions a sequence may have in use
    has_equal_lengths  whether the host knows that all sequences are equally long

    Automatic, where a sequence's queries fit one tile, as they do in decoding: parts of equal
    length where those fill all CTAs (`even_splits`), else equal shares for all CTAs. Longer queries
    give several tiles a sequence, which are split only where there are fewer of them than CTAs
    (`automatic_splits`).

    A stated number of splits has a schedule that depends neither on the other sequences nor on
    bounds of all, so that a sequence keeps its bits.
    """
    warpgroups = 1 if packed_rows <= 64 else 2
    fits_one_tile = packed_rows <= 64 * warpgroups
    shapes = [
        Shape(tile_n, stages, 1, *role_registers(warpgroups, gathers))
        for tile_n in (128, 64, 32)
        for gathers in [copy_rows(page_size, tile_n, features.cache_align) == 0]
        for stages in (4, 3, 2)
    ]
    if (
        num_splits == 0
        and warpgroups == 1
        and (features.head_dim, features.head_dim_v) == (128, 128)
        and wants_two_ctas(
            tiles, page_size, multiprocessors, capacity, has_equal_lengths, features.cache_align
        )
    ):
        shapes.insert(0, TWO_CTAS)
    for shape in shapes:
        ctas = multiprocessors * shape.ctas_per_sm
        is_balanced, splits = False, num_splits
        if num_splits == 0 and fits_one_tile:
            blocks = -(-capacity // shape.tile_n)
            # Few tiles are cut for one CTA an SM, even where an SM has room for two.
            places = multiprocessors if tiles < multiprocessors else ctas
            splits = even_splits(tiles, blocks, places) if has_equal_lengths else 0
            is_balanced = splits == 0
        elif num_splits == 0:
            splits = automatic_splits(packed_rows, tiles, warpgroups, ctas)
        try:
            schedule = DecodeSchedule(
                head_dim=features.head_dim,
                head_dim_v=features.head_dim_v,
                warpgroups=warpgroups,
                copy_rows=copy_rows(page_size, shape.tile_n, features.cache_align),
                is_balanced=is_balanced,
                merges=is_balanced or splits > 1,
                **shape._asdict(),
            )
        except ValueError:
            continue  # over a budget: try the next smaller one
        return DecodePlan(schedule, splits)
    raise ValueError(
        f"no decode schedule fits head_dim={features.head_dim}, head_dim_v={features.head_dim_v}"
    )


class Shape(NamedTuple):
    """Fields of a `DecodeSchedule` that are chosen for speed."""

    tile_n: int
    stages: int
    ctas_per_sm: int
    consumer_registers: int
    producer_registers: int


def role_registers(warpgroups: int, gathers: bool) -> tuple[int, int]:
    """Registers of a thread that attends and of one that loads, which needs more to gather rows.

    Two warpgroups of 224 spill with every feature at once at head dim 256, of 232 they do not.
    """
    if warpgroups == 1:
        return 240, 64
    return (224, 56) if gathers else (232, 40)


# Positions of the shortest part of few tiles for which the shape below was measured.
LONG_PART = 4096

# One CTA's copies go on while the other starts or ends a tile, and two producers look up pages.
TWO_CTAS = Shape(64, 3, 2, 176, 80)


def wants_two_ctas(
    tiles: int,
    page_size: int | None,
    multiprocessors: int,
    capacity: int,
    has_equal_lengths: bool,
    cache_align: int = TMA_ALIGNMENT,
) -> bool:
    """Whether CTAs of which two fit an SM read faster than larger ones, for head dim 128.

    Measured on the H200, lengths on the device, TB/s by one and by two: 64 sequences of 1 to 32768
    keys 4.20 and 4.33, in pages of 64 4.15 and 4.27; batch 32 of 8192
    keys in pages of 16 4.24 and 4.34, in pages of 1 4.20 and 4.26; batch 128 of 4096 keys in pages
    of 64 4.39 and 4.42. Without pages batches of equal lengths do not tell them apart: 4.47 and
    4.46, 4.45 and 4.47. Few tiles in equal shares want one: batch 1 of 65536 keys 3.74 and 3.51. So
    do whole tiles of lengths that the host knows to be equal: batch 32 4.49, batch 128 4.50.

    A few long tiles in equal parts, no more of them than SMs, want the smaller CTAs: batch 1 of
    65536 keys, 8 tiles in 16 parts of 4096 keys, 3.93 and 4.02; in 33 parts, two an SM, 3.81.
    Shorter parts (`LONG_PART`) and pages were not measured, and keep the larger ones.
    """
    rows = copy_rows(page_size, TWO_CTAS.tile_n, cache_align)
    has_short_copies = rows < TWO_CTAS.tile_n
    if tiles >= multiprocessors:
        return has_short_copies or not has_equal_lengths
    splits = even_splits(tiles, capacity // LONG_PART, multiprocessors)
    return has_equal_lengths and page_size is None and not has_short_copies and splits > 1


# Share of the CTAs' time that parts of equal length must fill to be preferred to equal shares.
WAVES_FILLED = 0.95


def even_splits(tiles: int, blocks: int, ctas: int) -> int:
    """Splits of tiles of equal length that keep nearly all CTAs at work to the end; 0: none do.

    tiles   of equal length
    blocks  most key blocks of a tile: no part may be sure to have none
    ctas    that are to have one part each

    Equal shares cost every CTA a search for its own, and cut tiles that need merging. Measured on
    the H200 in TB/s, lengths on the device and parts of equal length: batch 32 with 8 key heads,
    256 whole tiles on 132 CTAs, 1.94 of 2 waves: 4.47 and 4.49; batch 128, 1024 tiles, 7.76 of 8
    waves: 4.45 and 4.50 (whole tiles either way); batch 1 of 65536 keys, 8 tiles in 16 parts, 0.97
    of a wave: 3.74 and 3.97. There 33 parts by two CTAs an SM are slower, 3.87, though 16 parts by
    the same CTAs are faster (`wants_two_ctas`).
    """
    splits = max(1, ctas // tiles)
    parts = tiles * splits
    waves = -(-parts // ctas)
    return splits if splits <= blocks and parts >= WAVES_FILLED * waves * ctas else 0


def automatic_splits(packed_rows: int, tiles: int, warpgroups: int, ctas: int) -> int:
    """Splits for queries of several tiles: enough to give every CTA work, and no more."""
    work = tiles * -(-packed_rows // (64 * warpgroups))
    return max(1, ctas // max(1, work))


# Share of the CTAs that may be left without work so that the others can be grouped.
IDLE_CTAS = 0.05


def head_groups(heads_kv: int, ctas: int) -> int:
    """Groups of key heads whose keys are shared apart, by as many CTAs each: the most that leave
    few CTAs over.

    CTAs of different groups then read the heads of the same rows side by side. Measured on the H200
    in TB/s, one group and eight: 64 sequences of 1 to 32768 keys 4.29 and 4.33, in pages of 64 4.25
    and 4.29; batch 1 of 65536 keys 3.45 and 3.74; equal lengths of 4096 and 8192 keys the same.
    """
    groups = [g for g in range(1, min(heads_kv, ctas) + 1) if heads_kv % g == 0]
    return max(g for g in groups if ctas % g <= IDLE_CTAS * ctas)
