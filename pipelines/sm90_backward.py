"""Hopper backward schedules: tiles, stages, roles and registers of each kernel, with their cost.

One source for the kernels of a path that must agree: the block of query rows (tile_m) in which the
preparing kernel lays out its statistics is the one in which the others read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.kernels.features import BackwardFeatures
from fa4.pipelines.sm90 import (
    BARRIER_BYTES,
    ELEMENT_BYTES,
    OTHER_REGISTERS,
    REGISTER_FILE,
    SMEM_BYTES,
    WARPGROUP,
)

STATISTIC_BYTES = 4  # fp32
ROWS = 64  # M of a wgmma: keys or query rows of a consumer warpgroup


@dataclass(frozen=True)
class PrepareSchedule:
    """How `kernels.backward_prepare` runs.

    head_dim_v  padded head dim of the output
    tile_m      query rows of a CTA, and of a block of the workspace
    threads     of a CTA
    """

    head_dim_v: int
    tile_m: int
    threads: int = 256

    @property
    def lanes_a_row(self) -> int:
        """Lanes of a warp that share a row, 16 bytes each: a power of two."""
        return 1 << (self.head_dim_v // 8 - 1).bit_length()

    @property
    def name(self) -> str:
        return f"m{self.tile_m}"

    def __post_init__(self) -> None:
        if self.tile_m % 16 or self.tile_m < 16:
            raise ValueError(f"{self}: tile_m={self.tile_m} is not a multiple of 16")
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"{self}: threads={self.threads} is not a multiple of 32 up to 1024")
        if not 8 <= self.head_dim_v <= 256:
            raise ValueError(f"{self}: head_dim_v={self.head_dim_v} is not between 8 and 256")


def _role_problems(consumer: int, producer: int) -> list[str]:
    """What is wrong with the registers of two consumer warpgroups and a producer warpgroup."""
    problems = []
    for role, count in (("consumer_registers", consumer), ("producer_registers", producer)):
        if count % 8 or not 24 <= count <= 240:
            problems.append(f"{role}={count} is not a multiple of 8 from 24 to 240")
    # setmaxnreg moves registers inside what the launch was given; more than that waits for ever.
    threads = 3 * WARPGROUP
    at_launch = REGISTER_FILE // threads // 8 * 8 * threads
    roles = WARPGROUP * (producer + 2 * consumer)
    if roles > at_launch:
        problems.append(f"the roles' registers, {roles}, exceed the CTA's {at_launch}")
    return problems


@dataclass(frozen=True)
class DkvSchedule:
    """How `kernels.sm90.backward_dkv` runs one tile of 64 keys.

    head_dim, head_dim_v  padded head dims the buffers are made for
    tile_m                query rows of a block
    q_stages              Q buffers, each with its rows' LSE
    grad_stages           dO buffers, each with its rows' delta
    consumer_registers    per thread, after setmaxnreg
    producer_registers    per thread, after setmaxnreg
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    q_stages: int
    grad_stages: int
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def tile_n(self) -> int:
        """Keys of a CTA: one warpgroup sums up dV for them, the other dK."""
        return ROWS

    @property
    def threads(self) -> int:
        """One producer and two consumer warpgroups."""
        return 3 * WARPGROUP

    @property
    def slab(self) -> int:
        """Elements of shared memory for K, and later dV; as many for V, and later dK."""
        return self.tile_n * max(self.head_dim, self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """Barriers, K and V, the Q and dO stages with their statistics, two stages of P."""
        stage_rows = self.q_stages * self.head_dim + self.grad_stages * self.head_dim_v
        elements = 2 * self.slab + self.tile_m * stage_rows + 2 * self.tile_n * self.tile_m
        statistics = (self.q_stages + self.grad_stages) * self.tile_m
        return BARRIER_BYTES + ELEMENT_BYTES * elements + STATISTIC_BYTES * statistics

    @property
    def accumulator_registers(self) -> int:
        """Of the fuller consumer: its gradient, a block of scores in fp32 and in 16 bits."""
        gradient = max(self.head_dim, self.head_dim_v) // 2
        return gradient + self.tile_m // 2 + self.tile_m // 4

    @property
    def name(self) -> str:
        return f"m{self.tile_m}n{self.tile_n}q{self.q_stages}g{self.grad_stages}"

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"dK, dV: key tile {self.tile_n}, query block {self.tile_m}, {self.q_stages} Q and "
            f"{self.grad_stages} dO stages, a warpgroup for each gradient, "
            f"{self.smem_bytes // 1024} KiB shared memory"
        )

    def __post_init__(self) -> None:
        problems = _role_problems(self.consumer_registers, self.producer_registers)
        if self.tile_m % 16 or not 16 <= self.tile_m <= 256:
            problems.append(f"tile_m={self.tile_m} is not a multiple of 16 from 16 to 256")
        if self.q_stages < 2:
            # S of a block is computed while the Q of the block before is still in use.
            problems.append(f"q_stages={self.q_stages} is below 2")
        if self.grad_stages < 1:
            problems.append(f"grad_stages={self.grad_stages} is below 1")
        needed = self.accumulator_registers + OTHER_REGISTERS
        if needed > self.consumer_registers:
            problems.append(
                f"a gradient, scores and P need about {needed} registers, more than "
                f"{self.consumer_registers}"
            )
        if self.smem_bytes > SMEM_BYTES:
            problems.append(f"shared memory {self.smem_bytes} exceeds {SMEM_BYTES} bytes")
        if problems:
            raise ValueError(f"{self}: " + "; ".join(problems))


@dataclass(frozen=True)
class DqSchedule:
    """How `kernels.sm90.backward_dq` runs one tile of 128 query rows.

    head_dim, head_dim_v  padded head dims the buffers are made for
    tile_n                keys of a block
    k_stages, v_stages    K and V buffers
    statistics_tile       tile_m of the workspace that holds the row statistics
    takes_turns           warpgroups issue their matmuls in turns, so that one computes on scores
                          while the other keeps the tensor cores busy
    consumer_registers    per thread, after setmaxnreg
    producer_registers    per thread, after setmaxnreg
    """

    head_dim: int
    head_dim_v: int
    tile_n: int
    k_stages: int
    v_stages: int
    statistics_tile: int
    takes_turns: bool = True
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA, 64 a consumer warpgroup."""
        return 2 * ROWS

    @property
    def threads(self) -> int:
        """One producer and two consumer warpgroups."""
        return 3 * WARPGROUP

    @property
    def smem_bytes(self) -> int:
        """Barriers, Q (and later dQ) and dO, the K and V stages."""
        rows = self.tile_m * (self.head_dim + self.head_dim_v)
        keys = self.tile_n * (self.k_stages * self.head_dim + self.v_stages * self.head_dim_v)
        return BARRIER_BYTES + ELEMENT_BYTES * (rows + keys)

    @property
    def accumulator_registers(self) -> int:
        """Of a consumer thread: dQ, a block of S and one of dP in fp32, dS in 16 bits."""
        return self.head_dim // 2 + self.tile_n + self.tile_n // 4

    @property
    def name(self) -> str:
        return f"m{self.tile_m}n{self.tile_n}k{self.k_stages}v{self.v_stages}"

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"dQ: query tile {self.tile_m}, key block {self.tile_n}, {self.k_stages} K and "
            f"{self.v_stages} V stages, {self.smem_bytes // 1024} KiB shared memory"
        )

    def __post_init__(self) -> None:
        problems = _role_problems(self.consumer_registers, self.producer_registers)
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            problems.append(f"tile_n={self.tile_n} is not a multiple of 16 from 16 to 256")
        if self.k_stages < 2:
            # S of a block is computed while the K of the block before is still in use.
            problems.append(f"k_stages={self.k_stages} is below 2")
        if self.v_stages < 1:
            problems.append(f"v_stages={self.v_stages} is below 1")
        needed = self.accumulator_registers + OTHER_REGISTERS
        if needed > self.consumer_registers:
            problems.append(
                f"dQ, S, dP and dS need about {needed} registers, more than "
                f"{self.consumer_registers}"
            )
        if self.smem_bytes > SMEM_BYTES:
            problems.append(f"shared memory {self.smem_bytes} exceeds {SMEM_BYTES} bytes")
        if problems:
            raise ValueError(f"{self}: " + "; ".join(problems))


@dataclass(frozen=True)
class TwoKernelSchedules:
    """Schedules of the path without atomics: statistics, then dK and dV, then dQ."""

    prepare: PrepareSchedule
    dkv: DkvSchedule
    dq: DqSchedule


def two_kernel_schedules(features: BackwardFeatures) -> TwoKernelSchedules:
    """The largest blocks whose shared memory and registers fit, with two stages before one."""
    dkv = _dkv_schedule(features)
    prepare = PrepareSchedule(features.head_dim_v, dkv.tile_m)
    return TwoKernelSchedules(prepare, dkv, _dq_schedule(features, dkv.tile_m))


def _dkv_schedule(features: BackwardFeatures) -> DkvSchedule:
    # With softcap the derivative of a block is kept beside its probabilities.
    largest = 128 if features.score == "plain" else 64
    for tile_m in range(largest, 15, -16):
        for grad_stages in (2, 1):
            try:
                return DkvSchedule(features.head_dim, features.head_dim_v, tile_m, 2, grad_stages)
            except ValueError:
                continue  # over a budget: try the next smaller one
    raise ValueError(
        f"no dK/dV schedule fits head_dim={features.head_dim}, head_dim_v={features.head_dim_v}"
    )


def _dq_schedule(features: BackwardFeatures, statistics_tile: int) -> DqSchedule:
    for tile_n in range(128, 15, -16):
        for v_stages in (2, 1):
            try:
                return DqSchedule(
                    features.head_dim, features.head_dim_v, tile_n, 2, v_stages, statistics_tile
                )
            except ValueError:
                continue  # over a budget: try the next smaller one
    raise ValueError(
        f"no dQ schedule fits head_dim={features.head_dim}, head_dim_v={features.head_dim_v}"
    )
