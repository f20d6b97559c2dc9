"""Blackwell schedules: tiles, stages, warp roles, registers and tensor memory, with their cost.

A schedule is data. Its shared memory, tensor memory and register budgets are computed here and
checked on any machine; a kernel receives a schedule and never chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.kernels.features import ForwardFeatures
from fa4.pipelines.registers import WARPGROUP, role_problems

SMEM_BYTES = 232_448  # per CTA: 227 KiB
TMEM_COLUMNS = 512  # of 128 lanes of 32 bits per SM
ROWS = 128  # query rows of a CTA's matrix product: lanes of tensor memory
ELEMENT_BYTES = 2  # bf16 and fp16

RESCALE_THRESHOLD = 8.0  # bf16 and fp16 hold 2**8 as exactly as 1

HEADS_IN_ROWS = (1, 2, 4, 8, 16, 32, 64)
TILE_ORDERS = ("single", "static", "dynamic")
MBARRIERS_BYTES = 512  # room for every mbarrier and the address of tensor memory
STATISTICS_STAGES = 2  # of one float a row, for each query tile


@dataclass(frozen=True)
class ForwardSchedule:
    """How the Blackwell forward kernel runs one tile.

    head_dim, head_dim_v   padded head dims the buffers are made for
    query_tiles            query tiles of 128 rows that a CTA has in flight: 2, which take turns on
                           the tensor cores, or 1 with two buffers of scores, where O is too wide
    ctas                   CTAs that work on a tile: 1, or 2 as a pair, each with its own rows and
                           with half of every K and V block in its shared memory
    tile_n                 keys of a block
    stages                 K and V buffers, taken in turn by K and V of one block after the other
    softmax_registers      per thread, after setmaxnreg; so are the next two
    correction_registers
    other_registers        of the warpgroup with the load, MMA and store warps
    o_shares_q             O leaves through Q's buffer; otherwise it has its own, and the next
                           tile's Q is loaded while this tile's O is still being stored
    tile_order             which tiles a CTA takes: "single", the one it was launched for; "static",
                           every n-th of n CTAs; "dynamic", after its own those of CTAs that have
                           not started, which cluster launch control hands out
    heads_in_rows          query heads that share their keys and a tile, as rows of it (FA2's packed
                           GQA): so that few positions fill a tile, and keys are read once for all
    exp2_polynomials       of 32 exponentials of a row, how many the FMA units compute in blocks
                           without masks, so that MUFU is not what everything waits for
    rescale_threshold      O is rescaled when a row's maximum has risen by more than this, in
                           powers of 2; until then its probabilities may be as large as 2 to this
    """

    head_dim: int
    head_dim_v: int
    query_tiles: int
    ctas: int
    tile_n: int
    stages: int
    softmax_registers: int
    correction_registers: int
    other_registers: int
    o_shares_q: bool
    tile_order: str
    exp2_polynomials: int
    rescale_threshold: float
    heads_in_rows: int = 1

    @property
    def tile_m(self) -> int:
        """Query rows of a work item: of a CTA, or of a pair."""
        return self.query_tiles * self.tile_rows

    @property
    def tile_rows(self) -> int:
        """Rows of one query tile: M of a matrix product."""
        return ROWS * self.ctas

    @property
    def positions(self) -> int:
        """Query positions of a work item."""
        return self.tile_m // self.heads_in_rows

    @property
    def tile_positions(self) -> int:
        """Query positions of one query tile."""
        return self.tile_rows // self.heads_in_rows

    @property
    def threads(self) -> int:
        """A softmax warpgroup for each query tile, correction, and the other roles."""
        return (self.query_tiles + 2) * WARPGROUP

    # -- tensor memory -----------------------------------------------------------------------------

    @property
    def score_buffers(self) -> int:
        """Accumulators of Q K^T; P takes the place of the scores it is made from."""
        return 2

    def score_column(self, buffer: int) -> int:
        """First column of a buffer of scores, and of the probabilities made from them."""
        return buffer * self.tile_n

    def output_column(self, query_tile: int) -> int:
        """First column of the output accumulator of a query tile."""
        return self.score_buffers * self.tile_n + query_tile * self.head_dim_v

    @property
    def used_columns(self) -> int:
        return self.output_column(self.query_tiles)

    # -- shared memory -----------------------------------------------------------------------------

    @property
    def q_slab(self) -> int:
        """Elements of shared memory for one query tile's Q, and for its O where that shares it."""
        return ROWS * (max(self.head_dim, self.head_dim_v) if self.o_shares_q else self.head_dim)

    @property
    def stage_elements(self) -> int:
        """Elements of shared memory for this CTA's part of a block of K or of V."""
        return self.tile_n * max(self.head_dim, self.head_dim_v) // self.ctas

    @property
    def small_bytes(self) -> int:
        """mbarriers and row statistics, ahead of the tiles, which are 1024-byte aligned."""
        statistics = 4 * ROWS * STATISTICS_STAGES * self.query_tiles
        return -(-(MBARRIERS_BYTES + statistics) // 1024) * 1024

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: small things, Q and O (or one for both), K and V stages."""
        q_and_o = self.query_tiles * self.q_slab
        if not self.o_shares_q:
            q_and_o += self.query_tiles * ROWS * self.head_dim_v
        return self.small_bytes + ELEMENT_BYTES * (q_and_o + self.stages * self.stage_elements)

    # -- words -------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """One line for people."""
        return (
            f"{self.query_tiles} query tile{'s' if self.query_tiles > 1 else ''} of "
            f"{self.tile_rows}, key block {self.tile_n}, "
            f"{'a pair of CTAs' if self.ctas == 2 else 'one CTA'}, {self.stages} K/V stages, "
            f"{f'{self.heads_in_rows} heads a tile, ' if self.heads_in_rows > 1 else ''}"
            f"registers: softmax {self.softmax_registers}, correction "
            f"{self.correction_registers}, others {self.other_registers}, "
            f"{self.tile_order} tile order, "
            f"{self.smem_bytes // 1024} KiB shared memory, {self.used_columns} TMEM columns"
        )

    @property
    def name(self) -> str:
        parts = [f"m{self.tile_m}n{self.tile_n}s{self.stages}"]
        if self.ctas == 2:
            parts.append("pair")
        if self.heads_in_rows > 1:
            parts.append(f"heads{self.heads_in_rows}")
        if self.tile_order != "single":
            parts.append(self.tile_order)
        return "_".join(parts)

    def __post_init__(self) -> None:
        problems = []
        if self.query_tiles not in (1, 2):
            problems.append(f"query_tiles={self.query_tiles} is not 1 or 2")
        if self.ctas not in (1, 2):
            problems.append(f"ctas={self.ctas} is not 1 or 2")
        if self.heads_in_rows not in HEADS_IN_ROWS:
            problems.append(f"heads_in_rows={self.heads_in_rows} is not one of {HEADS_IN_ROWS}")
        if self.tile_order not in TILE_ORDERS:
            problems.append(f"tile_order={self.tile_order!r} is not one of {TILE_ORDERS}")
        if self.tile_n not in (64, 128):
            problems.append(f"tile_n={self.tile_n} is not 64 or 128")
        if self.stages < 2:
            # K of a block is requested while V of the one before is still in use.
            problems.append(f"stages={self.stages} is below 2")
        if self.ctas == 2 and (self.head_dim_v // 2) % 32:
            problems.append(f"half of head_dim_v={self.head_dim_v} is not a multiple of 32")
        problems += role_problems(
            {
                "softmax_registers": (self.softmax_registers, self.query_tiles),
                "correction_registers": (self.correction_registers, 1),
                "other_registers": (self.other_registers, 1),
            },
            self.threads,
            most=256,
        )
        if self.exp2_polynomials % 2 or not 0 <= self.exp2_polynomials <= 32:
            problems.append(
                f"exp2_polynomials={self.exp2_polynomials} is not an even number from 0 to 32"
            )
        if self.used_columns > TMEM_COLUMNS:
            problems.append(f"{self.used_columns} TMEM columns exceed {TMEM_COLUMNS}")
        if self.smem_bytes > SMEM_BYTES:
            problems.append(f"shared memory {self.smem_bytes} exceeds {SMEM_BYTES} bytes")
        if problems:
            raise ValueError(f"{self}: " + "; ".join(problems))


def forward_schedule(
    features: ForwardFeatures, rows: int | None = None, group: int = 1, arch: str = "sm_100a"
) -> ForwardSchedule:
    """The forward schedule for what a kernel must be able to do.

    rows   query rows of a sequence, of the mean one where they differ; None for many
    group  query heads for each head of keys and values
    arch   "sm_100a" or "sm_103a", whose MUFU is twice as fast

    Reasons are clocks of a block by unit, in docs/blackwell.md. Nothing here has been measured.
    """
    head_dim, head_dim_v = features.head_dim, features.head_dim_v
    # Two output accumulators and two buffers of 128 scores fill tensor memory at 128; two tiles of
    # queries and two K/V stages fill shared memory at 192.
    query_tiles = 2 if head_dim <= 192 and head_dim_v <= 128 else 1
    # What each role needs so that nothing spills, found by compiling.
    softmax, correction, other = (184, 80, 64) if query_tiles == 2 else (216, 160, 128)
    is_uniform = not (
        features.has_right_bound
        or features.packed_q
        or features.packed_k
        or features.has_seqused_q
        or features.has_seqused_k
    )
    dims = (head_dim, head_dim_v)
    heads = _heads_in_rows(features, rows, group)
    if rows is not None:
        rows *= heads
    for ctas in (2, 1) if _suits_a_pair(features, query_tiles, rows) else (1,):
        for o_shares_q in (False, True):
            for stages in range(6, 1, -1):
                # A stage less is a smaller loss than a Q that waits for the O before it.
                if stages < 3 and not o_shares_q:
                    continue
                try:
                    return ForwardSchedule(
                        head_dim=head_dim,
                        head_dim_v=head_dim_v,
                        query_tiles=query_tiles,
                        ctas=ctas,
                        tile_n=128,
                        stages=stages,
                        softmax_registers=softmax,
                        correction_registers=correction,
                        other_registers=other,
                        o_shares_q=o_shares_q,
                        # Tiles of equal cost need nobody to ask.
                        tile_order="static" if is_uniform else "dynamic",
                        exp2_polynomials=_exp2_polynomials(max(dims), query_tiles, arch),
                        rescale_threshold=RESCALE_THRESHOLD,
                        heads_in_rows=heads,
                    )
                except ValueError:
                    continue  # over a budget: try the next smaller one
    raise ValueError(f"no forward schedule fits head_dim={head_dim}, head_dim_v={head_dim_v}")


def _suits_a_pair(features: ForwardFeatures, query_tiles: int, rows: int | None) -> bool:
    """Whether two CTAs should work on a tile together, and share its keys and values."""
    if rows is not None and rows <= query_tiles * ROWS:
        return False  # one CTA holds all rows of a sequence
    widest = max(features.head_dim, features.head_dim_v)
    if widest > 128:
        return True  # one CTA has no room for more than two stages
    # Operands from shared memory are what limits one CTA at 128. Below, the exponentials are; with
    # a diagonal, twice the rows a tile mask more of it away than the operands cost.
    return widest == 128 and not features.has_right_bound


def _heads_in_rows(features: ForwardFeatures, rows: int | None, group: int) -> int:
    """The group where it fills query tiles that would be more than a tenth emptier without."""
    if rows is None or group not in HEADS_IN_ROWS:
        return 1
    rows = max(rows, 1)  # a mean below 1
    apart = -(-rows // ROWS) * group
    together = -(-rows * group // ROWS)
    return group if 1.1 * together < apart else 1


def _exp2_polynomials(widest: int, query_tiles: int, arch: str) -> int:
    """Exponentials of 32 for the FMA units: as many as bring MUFU below what else takes long."""
    if arch == "sm_103a" or query_tiles == 1:
        return 0  # MUFU has slack
    return 12 if widest <= 64 else 8
