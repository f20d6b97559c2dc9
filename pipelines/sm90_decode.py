"""Hopper schedules of attention over a key/value cache, and the rule that divides the keys.

What bounds decoding is how fast keys and values come out of memory, so a schedule is chosen for
bytes in flight: as many stages as shared memory holds. A block of 128 keys of 128 dims takes an SM
some 3300 clocks to read and a third of that to multiply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa4.kernels.features import DecodeFeatures
from fa4.pipelines.sm90 import (
    BARRIER_BYTES,
    ELEMENT_BYTES,
    OTHER_REGISTERS,
    REGISTER_FILE,
    SMEM_BYTES,
    WARPGROUP,
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
                           TMA, and a warpgroup gathers rows with cp.async
    is_balanced            keys are divided into equal shares of all CTAs; else into a number of
                           splits that the call states (`kernels.blocks.key_splits`)
    merges                 partial results may arise, and are merged by a second kernel
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
        at_launch = REGISTER_FILE // (self.threads * self.ctas_per_sm)
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
        rows = f"TMA of {self.copy_rows} rows" if self.copy_rows else "rows gathered by cp.async"
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
        division = "balanced" if self.is_balanced else "fixed" if self.merges else "whole"
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
        for role, count in (
            ("consumer_registers", self.consumer_registers),
            ("producer_registers", self.producer_registers),
        ):
            if count % 8 or not 24 <= count <= 240:
                problems.append(f"{role}={count} is not a multiple of 8 from 24 to 240")
        roles = WARPGROUP * (self.producer_registers + self.warpgroups * self.consumer_registers)
        if roles * self.ctas_per_sm > REGISTER_FILE:
            problems.append(f"the roles' registers, {roles}, exceed a CTA's share of the file")
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


def copy_rows(page_size: int | None, tile_n: int) -> int:
    """Rows of one TMA copy for a page size (None: no pages), 0 where rows must be gathered."""
    rows = tile_n if page_size is None else math.gcd(page_size, tile_n)
    return rows if rows >= MIN_COPY_ROWS else 0


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
) -> DecodePlan:
    """The schedule for a problem, from bounds that the host knows.

    packed_rows      most packed query rows a sequence may have: group * seqlen_q
    tiles            sequences times key heads
    page_size        of a paged cache, else None
    num_splits       what the caller asked for: 0 is automatic
    multiprocessors  of the device

    Automatic: equal shares for all CTAs wherever a sequence's queries fit one tile, as they do in
    decoding. Longer queries give several tiles a sequence, which are split only where there are
    fewer of them than CTAs (`automatic_splits`).
    """
    warpgroups = 1 if packed_rows <= 64 else 2
    is_balanced = num_splits == 0 and packed_rows <= 64 * warpgroups
    if num_splits == 0 and not is_balanced:
        num_splits = automatic_splits(packed_rows, tiles, warpgroups, multiprocessors)
    for tile_n in (128, 64, 32):
        for stages in (4, 3, 2):
            try:
                schedule = DecodeSchedule(
                    head_dim=features.head_dim,
                    head_dim_v=features.head_dim_v,
                    warpgroups=warpgroups,
                    tile_n=tile_n,
                    stages=stages,
                    copy_rows=copy_rows(page_size, tile_n),
                    is_balanced=is_balanced,
                    merges=is_balanced or num_splits > 1,
                    ctas_per_sm=1,
                    consumer_registers=240 if warpgroups == 1 else 224,
                    producer_registers=56,
                )
            except ValueError:
                continue  # over a budget: try the next smaller one
            return DecodePlan(schedule, num_splits)
    raise ValueError(
        f"no decode schedule fits head_dim={features.head_dim}, head_dim_v={features.head_dim_v}"
    )


def automatic_splits(packed_rows: int, tiles: int, warpgroups: int, ctas: int) -> int:
    """Splits for queries of several tiles: enough to give every CTA work, and no more."""
    work = tiles * -(-packed_rows // (64 * warpgroups))
    return max(1, ctas // max(1, work))
