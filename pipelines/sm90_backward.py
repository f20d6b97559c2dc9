"""Hopper backward schedules: tiles, stages, roles and registers of each kernel, with their cost.

One source for the kernels of a path that must agree: the block of query rows (tile_m) in which the
preparing kernel lays out its statistics is the one in which the others read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.kernels.features import BackwardFeatures
from fa4.pipelines.registers import WARPGROUP, role_problems
from fa4.pipelines.sm90 import (
    BARRIER_BYTES,
    ELEMENT_BYTES,
    OTHER_REGISTERS,
    SMEM_BYTES,
)

STATISTIC_BYTES = 4  # fp32
STATISTIC_TERMS = 8  # bf16 that add up to one: as many as wgmma reads at a time
MOST_REGISTERS = 255  # of a thread
LOTS_AHEAD = 3  # of heads, between the tiles that zero sums of dQ and those that add to them
ZERO_BYTES = 8192  # that are copied at a time
ROWS = 64  # M of a wgmma: keys or query rows of a consumer warpgroup


@dataclass(frozen=True)
class PrepareSchedule:
    """How `kernels.backward_prepare` runs.

    head_dim_v  padded head dim of the output
    tile_m      query rows of a CTA, and of a block of the workspace
    for_sums    in front of the kernel that sums up dQ in memory: write the statistics as terms of
                a matrix product, too, and zeros to add to
    threads     of a CTA
    """

    head_dim_v: int
    tile_m: int
    for_sums: bool = False
    threads: int = 256

    @property
    def lanes_a_row(self) -> int:
        """Lanes of a warp that share a row, 16 bytes each: a power of two."""
        return 1 << (self.head_dim_v // 8 - 1).bit_length()

    @property
    def rows_at_once(self) -> int:
        """Rows that the CTA's threads share out at a time."""
        return self.threads // self.lanes_a_row

    @property
    def steps(self) -> int:
        """Times that they do. At most as many as lanes a row, each of which keeps one result."""
        return -(-self.tile_m // self.rows_at_once)

    @property
    def name(self) -> str:
        return f"m{self.tile_m}{'_sums' if self.for_sums else ''}"

    def __post_init__(self) -> None:
        if self.tile_m % 16 or self.tile_m < 16:
            raise ValueError(f"{self}: tile_m={self.tile_m} is not a multiple of 16")
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"{self}: threads={self.threads} is not a multiple of 32 up to 1024")
        if not 8 <= self.head_dim_v <= 256:
            raise ValueError(f"{self}: head_dim_v={self.head_dim_v} is not between 8 and 256")
        if self.tile_m > self.threads:
            raise ValueError(f"{self}: tile_m={self.tile_m} exceeds threads={self.threads}")


def _role_problems(consumer: int, producer: int) -> list[str]:
    """What is wrong with the registers of two consumer warpgroups and a producer warpgroup."""
    roles = {"consumer_registers": (consumer, 2), "producer_registers": (producer, 1)}
    return role_problems(roles, 3 * WARPGROUP)


@dataclass(frozen=True)
class DkvSchedule:
    """How `kernels.sm90.backward_dkv` runs one tile of 64 keys.

    head_dim, head_dim_v  padded head dims the buffers are made for
    tile_m                query rows of a block
    q_stages              Q buffers, each with its rows' LSE
    grad_stages           dO buffers, each with its rows' delta
    cluster               CTAs with neighbouring keys that share their loads of Q and dO: 1 or 2
    consumer_registers    per thread, after setmaxnreg
    producer_registers    per thread, after setmaxnreg
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    q_stages: int
    grad_stages: int
    cluster: int = 1
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
        tiles = ELEMENT_BYTES * (2 * self.slab + self.tile_m * stage_rows)
        stages = self.q_stages + self.grad_stages
        ahead = 2 * 8 * (2 + stages) + STATISTIC_BYTES * stages * self.tile_m
        ahead += 2 * ELEMENT_BYTES * self.tile_n * self.tile_m
        # Tiles begin at multiples of their swizzle's period.
        return -(-ahead // 1024) * 1024 + tiles

    @property
    def accumulator_registers(self) -> int:
        """Of the fuller consumer: its gradient, a block of scores in fp32 and in 16 bits.

        The warpgroup that sums up dK also holds the other one's weights, in 16 bits.
        """
        scores = self.tile_m // 2 + self.tile_m // 4
        return max(self.head_dim_v // 2 + scores, self.head_dim // 2 + scores + self.tile_m // 4)

    @property
    def name(self) -> str:
        name = f"m{self.tile_m}n{self.tile_n}q{self.q_stages}g{self.grad_stages}"
        return name if self.cluster == 1 else f"{name}_cluster{self.cluster}"

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"dK, dV: key tile {self.tile_n}, query block {self.tile_m}, {self.q_stages} Q and "
            f"{self.grad_stages} dO stages, a warpgroup for each gradient, "
            f"{f'clusters of {self.cluster}, ' if self.cluster > 1 else ''}"
            f"{self.smem_bytes // 1024} KiB shared memory"
        )

    def __post_init__(self) -> None:
        problems = _role_problems(self.consumer_registers, self.producer_registers)
        if self.tile_m % 16 or not 16 <= self.tile_m <= 256:
            problems.append(f"tile_m={self.tile_m} is not a multiple of 16 from 16 to 256")
        if self.q_stages < 2:
            # S of a block is computed while the Q of the block before is still in use.
            problems.append(f"q_stages={self.q_stages} is below 2")
        if self.cluster not in (1, 2):
            problems.append(f"cluster={self.cluster} is not 1 or 2")
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
    cluster               CTAs with neighbouring rows that share their loads of K and V: 1 or 2
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
    cluster: int = 1
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
        name = f"m{self.tile_m}n{self.tile_n}k{self.k_stages}v{self.v_stages}"
        return name if self.cluster == 1 else f"{name}_cluster{self.cluster}"

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"dQ: query tile {self.tile_m}, key block {self.tile_n}, {self.k_stages} K and "
            f"{self.v_stages} V stages, "
            f"{f'clusters of {self.cluster}, ' if self.cluster > 1 else ''}"
            f"{self.smem_bytes // 1024} KiB shared memory"
        )

    def __post_init__(self) -> None:
        problems = _role_problems(self.consumer_registers, self.producer_registers)
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            problems.append(f"tile_n={self.tile_n} is not a multiple of 16 from 16 to 256")
        if self.k_stages < 2:
            # S of a block is computed while the K of the block before is still in use.
            problems.append(f"k_stages={self.k_stages} is below 2")
        if self.cluster not in (1, 2):
            problems.append(f"cluster={self.cluster} is not 1 or 2")
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
    """Two stages of every operand where blocks of 48 and more fit them, then the largest blocks.

    With a single stage the next load waits for the product that reads the last one, and is then
    waited for itself. Smaller blocks read more of shared memory for each multiplication.
    """
    dkv = _dkv_schedule(features)
    prepare = PrepareSchedule(features.head_dim_v, dkv.tile_m)
    return TwoKernelSchedules(prepare, dkv, _dq_schedule(features, dkv.tile_m))


def _dkv_schedule(features: BackwardFeatures) -> DkvSchedule:
    head_dims = features.head_dim, features.head_dim_v
    # Measured on an H200, 4k, TFLOP/s executed full/causal.
    if head_dims == (256, 256):
        # 739/679; 519/530 with the best of blocks of 48 to 80 rows, two stages of Q, with and
        # without clusters.
        return DkvSchedule(256, 256, tile_m=48, q_stages=3, grad_stages=2, cluster=2)
    if features.score == "plain":
        # A third Q to load while S of one block and dK of the block before use two.
        if head_dims == (192, 128):  # 629/572; blocks of 112 rows, two stages of Q 534/488
            return DkvSchedule(192, 128, tile_m=80, q_stages=3, grad_stages=2)
        if head_dims == (128, 128):  # 677/611; two stages of Q 565/487
            return DkvSchedule(128, 128, tile_m=128, q_stages=3, grad_stages=2)
    # With softcap the derivative of a block is kept beside its probabilities.
    largest = 128 if features.score == "plain" else 64
    for grad_stages, smallest in ((2, 48), (1, 16)):
        for tile_m in range(largest, smallest - 1, -16):
            try:
                return DkvSchedule(features.head_dim, features.head_dim_v, tile_m, 2, grad_stages)
            except ValueError:
                continue  # over a budget: try the next smaller one
    raise ValueError(
        f"no dK/dV schedule fits head_dim={features.head_dim}, head_dim_v={features.head_dim_v}"
    )


def _dq_schedule(features: BackwardFeatures, statistics_tile: int) -> DqSchedule:
    head_dims = features.head_dim, features.head_dim_v
    # Measured on an H200, 4k, TFLOP/s executed full/causal.
    if head_dims == (256, 256):  # 669/668; blocks of 48 keys and two stages of V 587/593
        return DqSchedule(256, 256, 64, 2, 1, statistics_tile)
    if head_dims == (192, 128):  # 801/726; blocks of 80 keys, two stages of K 715/661
        return DqSchedule(192, 128, 64, 3, 2, statistics_tile, cluster=2)
    largest = 128
    if head_dims == (96, 256):
        # With more keys ptxas puts every product behind the one before, and spills.
        largest = 64
    for v_stages, smallest in ((2, 48), (1, 16)):
        for tile_n in range(largest, smallest - 1, -16):
            try:
                return DqSchedule(
                    features.head_dim, features.head_dim_v, tile_n, 2, v_stages, statistics_tile
                )
            except ValueError:
                continue  # over a budget: try the next smaller one
    raise ValueError(
        f"no dQ schedule fits head_dim={features.head_dim}, head_dim_v={features.head_dim_v}"
    )


@dataclass(frozen=True)
class OneKernelSchedule:
    """How `kernels.sm90.backward` runs one tile of 128 keys.

    head_dim, head_dim_v  padded head dims the buffers are made for
    tile_m                query rows of a block: 64 or 128
    stages                Q buffers, with their rows' LSE
    grad_stages           dO buffers, with their rows' delta
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    stages: int
    grad_stages: int

    @property
    def tile_n(self) -> int:
        """Keys of a CTA: 64 for each of its warpgroups."""
        return 2 * ROWS

    @property
    def threads(self) -> int:
        """Two warpgroups: with half of the register file each thread has 255."""
        return 2 * WARPGROUP

    @property
    def requests_scores_early(self) -> bool:
        """There are registers for S of the next block beside P and dS of this one.

        dV and dK, which read P and dS from registers, then come late in a warpgroup's turn: while
        the other one stores its dS, which operands in shared memory would keep waiting.
        """
        return self.tile_m == ROWS

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warpgroup works out.

        With 128 rows in a block each takes 64 of them, whole. With 64 rows each takes half of the
        columns, but at d96, where halves would not start on a swizzle's period, 64: the second
        half then begins inside the first, and what both have is added once.
        """
        if self.tile_m == 2 * ROWS:
            return self.head_dim
        return max(self.head_dim // 2, 64) if self.head_dim != 64 else 32

    @property
    def dq_column_step(self) -> int:
        """Columns of dQ between the first of warpgroup 0 and the first of warpgroup 1."""
        return 0 if self.tile_m == 2 * ROWS else self.head_dim - self.dq_columns

    @property
    def dq_octet_step(self) -> int:
        """The same in the dQ workspace, in units of 64 rows by 8 columns."""
        return (self.head_dim if self.tile_m == 2 * ROWS else self.dq_column_step) // 8

    @property
    def smem_bytes(self) -> int:
        """Barriers, K and V, the Q and dO stages with their statistics, two stages of dS."""
        stage_rows = self.stages * self.head_dim + self.grad_stages * self.head_dim_v
        elements = self.tile_n * (self.head_dim + self.head_dim_v) + self.tile_m * stage_rows
        elements += 2 * self.tile_n * self.tile_m
        buffers = self.stages + self.grad_stages
        next_tile = 4 * 4  # beside the barriers
        barriers = -(-(2 * 8 * (2 + buffers) + next_tile) // 128) * 128 + ZERO_BYTES
        halves = 128  # what statistics are multiplied by
        statistics = buffers * self.tile_m * ELEMENT_BYTES * STATISTIC_TERMS
        # Tiles begin at multiples of their swizzle's period.
        ahead = -(-(barriers + halves + statistics) // 1024) * 1024
        return ahead + ELEMENT_BYTES * elements

    @property
    def accumulator_registers(self) -> int:
        """Of a thread: dK, dV, S and dP of a block, and its part of a block's dQ, all fp32."""
        return (self.head_dim + self.head_dim_v + self.dq_columns) // 2 + self.tile_m

    @property
    def name(self) -> str:
        return f"m{self.tile_m}n{self.tile_n}s{self.stages}g{self.grad_stages}"

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"key tile {self.tile_n}, query block {self.tile_m}, {self.stages} Q and "
            f"{self.grad_stages} dO stages, {self.smem_bytes // 1024} KiB shared memory"
        )

    def __post_init__(self) -> None:
        problems = []
        if self.tile_m not in (64, 128):
            problems.append(f"tile_m={self.tile_m} is not 64 or 128")
        for name in ("stages", "grad_stages"):
            if getattr(self, name) < 3:
                # One block is in use, S and dP of the next one are worked out, one is loaded.
                problems.append(f"{name}={getattr(self, name)} is below 3")
        if self.accumulator_registers + OTHER_REGISTERS > MOST_REGISTERS:
            problems.append(
                f"gradients and scores need about {self.accumulator_registers + OTHER_REGISTERS} "
                f"registers, more than {MOST_REGISTERS}"
            )
        if self.smem_bytes > SMEM_BYTES:
            problems.append(f"shared memory {self.smem_bytes} exceeds {SMEM_BYTES} bytes")
        if problems:
            raise ValueError(f"{self}: " + "; ".join(problems))


@dataclass(frozen=True)
class FinishSchedule:
    """How `kernels.backward_finish` runs.

    head_dim  padded head dim of the dQ workspace
    tile_m    query rows of a CTA, and of a block of the workspace
    threads   of a CTA
    """

    head_dim: int
    tile_m: int
    threads: int = 256

    @property
    def name(self) -> str:
        return f"m{self.tile_m}"

    def __post_init__(self) -> None:
        if self.tile_m % 64 or self.tile_m < 64:
            raise ValueError(f"{self}: tile_m={self.tile_m} is not a multiple of 64")
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"{self}: threads={self.threads} is not a multiple of 32 up to 1024")
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            raise ValueError(f"{self}: head_dim={self.head_dim} is not a multiple of 8 up to 256")


@dataclass(frozen=True)
class OneKernelSchedules:
    """Schedules of the path that sums dQ up in memory: statistics, the gradients, then dQ."""

    prepare: PrepareSchedule
    gradients: OneKernelSchedule
    finish: FinishSchedule


ONE_KERNEL_HEAD_DIM_MAX = 128  # dK and dV of 64 keys fill a warpgroup's registers


def one_kernel_schedules(features: BackwardFeatures) -> OneKernelSchedules:
    """The fastest that fits without spilling. Raises ValueError for head dims above 128."""
    head_dim, head_dim_v = features.head_dim, features.head_dim_v
    if max(head_dim, head_dim_v) > ONE_KERNEL_HEAD_DIM_MAX:
        raise ValueError(
            f"no one-kernel schedule fits head_dim={head_dim}, head_dim_v={head_dim_v}: each must "
            f"be at most {ONE_KERNEL_HEAD_DIM_MAX}"
        )
    # Measured on an H200, TFLOP/s full/causal at 4k, bf16, all launches: d64 572/524, d128 621/582.
    # At d64 blocks of 64 rows were a fifth slower in an earlier loop; softcap in 128 rows spills.
    if (head_dim, head_dim_v) == (64, 64) and features.score == "plain":
        gradients = OneKernelSchedule(64, 64, 2 * ROWS, stages=3, grad_stages=3)
    else:
        gradients = OneKernelSchedule(head_dim, head_dim_v, ROWS, stages=3, grad_stages=3)
    return OneKernelSchedules(
        PrepareSchedule(head_dim_v, gradients.tile_m, for_sums=True),
        gradients,
        FinishSchedule(head_dim, gradients.tile_m),
    )
