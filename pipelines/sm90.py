"""Hopper schedules: tiles, stages, warp roles and registers of each kernel, with their cost.

A schedule is data. Its shared memory and register budgets are computed here and checked on any
machine; a kernel receives a schedule and never chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.kernels.features import ForwardFeatures
from fa4.pipelines import sm90_tuned
from fa4.pipelines.registers import WARPGROUP, role_problems

SMEM_BYTES = 232_448  # per CTA: 227 KiB
BARRIER_BYTES = 1024  # room kept for mbarriers ahead of the tiles, which are 1024-byte aligned
ELEMENT_BYTES = 2  # bf16 and fp16

# Registers a consumer thread needs beside O, S and P: addresses, loop counters, row statistics.
# Found by reading SASS: with less, the compiler spills or serialises wgmma.
OTHER_REGISTERS = 28


@dataclass(frozen=True)
class ForwardSchedule:
    """How the Hopper forward kernel runs one tile.

    head_dim, head_dim_v   padded head dims the buffers are made for
    tile_m                 query rows of a CTA; 64 for each consumer warpgroup
    tile_n                 keys of a block
    stages                 K and V buffers of each kind
    consumer_registers     per thread, after setmaxnreg
    producer_registers     per thread, after setmaxnreg
    o_shares_v             O leaves through the buffers of V, a stage for each warpgroup; otherwise
                           it has its own. The next tile's Q and first K are loaded meanwhile
    takes_turns            warpgroups issue their matmuls in turns, so that one computes softmax
                           while the other keeps the tensor cores busy (FA3 section 3.1)
    short_n                the last block is worked on as one of so many keys where a warpgroup sees
                           no more of it, as on a diagonal; 0: always whole
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    consumer_registers: int
    producer_registers: int
    o_shares_v: bool
    takes_turns: bool
    short_n: int = 0

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """One producer warpgroup and the consumers."""
        return (1 + self.consumer_warpgroups) * WARPGROUP

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: barriers and messages, Q, O where it has its own, K and V."""
        q_and_o = self.tile_m * (self.head_dim + (0 if self.o_shares_v else self.head_dim_v))
        kv = self.stages * self.tile_n * (self.head_dim + self.head_dim_v)
        return BARRIER_BYTES + ELEMENT_BYTES * (q_and_o + kv)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer thread for O (fp32), S (fp32) and P (16 bit)."""
        return self.head_dim_v // 2 + self.tile_n // 2 + self.tile_n // 4

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"query tile {self.tile_m}, key block {self.tile_n}, {self.stages} K/V stages, "
            f"{self.consumer_warpgroups} consumer warpgroups of {self.consumer_registers} "
            f"registers, producer {self.producer_registers}, "
            f"{'turns between warpgroups, ' if self.takes_turns else ''}"
            f"{f'short last blocks of {self.short_n} keys, ' if self.short_n else ''}"
            f"{self.smem_bytes // 1024} KiB shared memory"
        )

    @property
    def name(self) -> str:
        return f"m{self.tile_m}n{self.tile_n}s{self.stages}"

    def __post_init__(self) -> None:
        problems = []
        if self.o_shares_v and (self.tile_n < 64 or self.stages < self.consumer_warpgroups):
            problems.append(
                f"o_shares_v=True needs a stage of 64 rows or more for each of "
                f"{self.consumer_warpgroups} warpgroups; there are {self.stages} of {self.tile_n}"
            )
        if self.tile_m % 64 or not 1 <= self.consumer_warpgroups <= 3:
            problems.append(f"tile_m={self.tile_m} is not 64, 128 or 192")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            problems.append(f"tile_n={self.tile_n} is not a multiple of 16 from 16 to 256")
        if self.short_n % 16 or not 0 <= self.short_n < self.tile_n:
            problems.append(f"short_n={self.short_n} is not a multiple of 16 below tile_n")
        if self.stages < 2:
            # K(j-1) is requested while V(j) is still in use: one stage would deadlock.
            problems.append(f"stages={self.stages} is below 2")
        problems += role_problems(
            {
                "consumer_registers": (self.consumer_registers, self.consumer_warpgroups),
                "producer_registers": (self.producer_registers, 1),
            },
            self.threads,
        )
        needed = self.accumulator_registers + OTHER_REGISTERS
        if needed > self.consumer_registers:
            problems.append(
                f"O, S and P need about {needed} registers, more than {self.consumer_registers}"
            )
        if self.smem_bytes > SMEM_BYTES:
            problems.append(f"shared memory {self.smem_bytes} exceeds {SMEM_BYTES} bytes")
        if problems:
            raise ValueError(f"{self}: " + "; ".join(problems))


def half_block(tile_n: int) -> int:
    """Half the keys of a block, in k-steps of 16: `ForwardSchedule.short_n` where that pays."""
    return tile_n // 32 * 16


def forward_schedule(features: ForwardFeatures) -> ForwardSchedule:
    """The forward schedule for what a kernel must be able to do: measured, else by rule."""
    winner = sm90_tuned.winner(features)
    if winner is not None:
        return ForwardSchedule(head_dim=features.head_dim, head_dim_v=features.head_dim_v, **winner)
    return forward_rule(features)


def forward_rule(features: ForwardFeatures) -> ForwardSchedule:
    """The forward schedule where none was measured to be better.

    The tile is the largest of the permitted ones whose registers and shared memory fit, since a
    longer key block amortises the row statistics and a further stage hides the loads.
    """
    head_dim, head_dim_v = features.head_dim, features.head_dim_v
    # Three consumer warpgroups fit the register file only with a narrow O and simple masks: with
    # a left bound or softcap their 160 registers spill.
    is_narrow = head_dim <= 64 and head_dim_v <= 64
    is_simple = features.score == "plain" and not features.has_left_bound
    # Measured on the H200, causal, with and without: d64 1k 445 and 430 TFLOP/s, 4k 598 and 590,
    # d192/128 4k 762 and 748; d128 4k 735 and 746, and at d256 the same.
    has_short_blocks = features.has_right_bound and head_dim_v <= 128 and head_dim != 128
    tile_m, consumer, producer = (192, 160, 32) if is_narrow and is_simple else (128, 240, 24)
    for tile_n in range(128, 15, -16):
        for o_shares_v in (False, True):
            for stages in (3, 2):
                try:
                    return ForwardSchedule(
                        head_dim=head_dim,
                        head_dim_v=head_dim_v,
                        tile_m=tile_m,
                        tile_n=tile_n,
                        stages=stages,
                        consumer_registers=consumer,
                        producer_registers=producer,
                        o_shares_v=o_shares_v,
                        takes_turns=head_dim_v <= 128,
                        short_n=half_block(tile_n) if has_short_blocks else 0,
                    )
                except ValueError:
                    continue  # over a budget: try the next smaller one
    raise ValueError(f"no forward schedule fits head_dim={head_dim}, head_dim_v={head_dim_v}")
