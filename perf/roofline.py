"""What bounds each forward kernel on Hopper, and what share of that bound was reached?

Clocks of the units of one multiprocessor for one key block of one tile, all warpgroups together:

    tensor  2 M N (d + dv) / 4096
    exp     M N / 16
    shared  operands that wgmma reads, and what TMA writes, at 128 bytes a clock. Each warpgroup of
            64 rows reads all of K and V again, and its Q; P stays in registers
    issue   warp instructions of the loop over whole blocks / 4 a clock (--sass; needs nvdisasm)

The busiest unit bounds the kernel from below: nothing is said about latencies, other blocks than
whole ones, or the change of tile. --csv takes what perf.forward wrote, with the clock that it read.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fa4.compiler import KernelSpec
from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures
from fa4.pipelines.sm90 import ForwardSchedule, forward_schedule
from perf.records import text_table

ENTRY = "fa4.kernels.sm90.forward:compile_forward"
TENSOR_FLOP, EXP_LANES, SHARED_BYTES, ISSUED_WARPS = 4096, 16, 128, 4
ROWS = 64  # of a warpgroup: M of one wgmma
H200_SMS = 132

# An H200 runs at most at this; long kernels run slower, held back by power. The CSV knows.
H200_MHZ = 1980.0


@dataclass(frozen=True)
class BlockCost:
    """Clocks of one key block of one tile, by unit; issue None where it was not counted."""

    tensor: float
    exp: float
    shared: float
    issue: float | None = None

    @property
    def limit(self) -> str:
        """The busiest unit, or several that are just as busy."""
        units = ("tensor", "exp", "shared", "issue")
        return " = ".join(unit for unit in units if getattr(self, unit) == self.clocks)

    @property
    def clocks(self) -> float:
        return max(self.tensor, self.exp, self.shared, self.issue or 0.0)


def block_cost(schedule: ForwardSchedule, instructions: int | None = None) -> BlockCost:
    """instructions  of a consumer warp for one whole block, where they have been counted"""
    m, n = schedule.tile_m, schedule.tile_n
    d, dv = schedule.head_dim, schedule.head_dim_v
    warpgroups = m // ROWS
    q_bytes, row_bytes = ROWS * 16 * 2, 16 * 2  # operands of one wgmma, 16 of the reduced mode
    operands = warpgroups * (d // 16) * (q_bytes + n * row_bytes)
    operands += warpgroups * (n // 16) * dv * row_bytes
    copies = n * (d + dv) * 2
    return BlockCost(
        tensor=2 * m * n * (d + dv) / TENSOR_FLOP,
        exp=m * n / EXP_LANES,
        shared=(operands + copies) / SHARED_BYTES,
        issue=None if instructions is None else instructions * 4 * warpgroups / ISSUED_WARPS,
    )


def bound_tflops(
    schedule: ForwardSchedule, cost: BlockCost, mhz: float = H200_MHZ, sms: int = H200_SMS
) -> float:
    """Of whole blocks on all multiprocessors, if nothing but the busiest unit takes time."""
    flop = 2 * schedule.tile_m * schedule.tile_n * (schedule.head_dim + schedule.head_dim_v)
    return flop / cost.clocks * mhz * 1e6 * sms / 1e12


def efficiency(seqlen: int, schedule: ForwardSchedule, causal: bool) -> float:
    """Share of the executed products that count: the rest is masked or padding."""
    executed = 0
    for tile in range(math.ceil(seqlen / schedule.tile_m)):
        seen = min(seqlen, (tile + 1) * schedule.tile_m) if causal else seqlen
        executed += math.ceil(seen / schedule.tile_n) * schedule.tile_m * schedule.tile_n
    return seqlen**2 * (0.5 if causal else 1.0) / executed


def interior_instructions(features: ForwardFeatures, schedule: ForwardSchedule) -> int:
    """Instructions of the loop over whole blocks, the one without mask code: the shortest."""
    from tests import sass

    code = sass.code_of(KernelSpec(ENTRY, "sm_90a", features, schedule))
    return min(len(loop) for loop in code.loops_with("HGMMA"))


def features_for(head_dim: int, head_dim_v: int, causal: bool) -> ForwardFeatures:
    return ForwardFeatures("bf16", head_dim, head_dim_v, has_right_bound=causal)


def bound_rows(counts_issue: bool, mhz: float) -> list[dict[str, Any]]:
    pairs = [(d, d) for d in HEAD_DIM_CLASSES] + [(192, 128)]
    rows = []
    for head_dim, head_dim_v in sorted(pairs):
        features = features_for(head_dim, head_dim_v, causal=True)
        schedule = forward_schedule(features)
        counted = interior_instructions(features, schedule) if counts_issue else None
        cost = block_cost(schedule, counted)
        rows.append(
            {
                "head_dim": head_dim,
                "head_dim_v": head_dim_v,
                "schedule": schedule.name,
                "tensor": cost.tensor,
                "exp": cost.exp,
                "shared": cost.shared,
                "issue": cost.issue,
                "limit": cost.limit,
                f"bound at {mhz:.0f} MHz": bound_tflops(schedule, cost, mhz),
            }
        )
    return rows


def reached_rows(table: pd.DataFrame, ours: str = "fa4") -> list[dict[str, Any]]:
    """For each measured case of ours, the bound at the clock that was read and the share of it.

    The schedule is the one that dispatch takes now, not one that the CSV remembers.
    """
    rows = []
    for row in table[(table["contender"] == ours) & table["tflops"].notna()].to_dict("records"):
        causal = row["causal"] in (True, "True")
        schedule = forward_schedule(features_for(row["head_dim"], row["head_dim_v"], causal))
        cost = block_cost(schedule)
        has_clock = pd.notna(row.get("sm_mhz"))
        mhz = row["sm_mhz"] if has_clock else H200_MHZ
        useful = efficiency(int(row["seqlen_k"]), schedule, causal)
        bound = bound_tflops(schedule, cost, mhz)
        rows.append(
            {
                "case": row["case"],
                "schedule": schedule.name,
                "limit": cost.limit,
                "MHz": mhz if has_clock else math.nan,
                "bound": bound,
                "useful": useful,
                "tflops": row["tflops"],
                "share of bound": row["tflops"] / bound,
                "share of useful bound": row["tflops"] / (bound * useful),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="of perf.forward: share reached")
    parser.add_argument("--sass", action="store_true", help="count instructions; compiles kernels")
    parser.add_argument("--mhz", type=float, default=H200_MHZ, help="SM clock (%(default)s)")
    arguments = parser.parse_args()
    rows = bound_rows(arguments.sass, arguments.mhz)
    print(f"clocks of one key block, and TFLOP/s\n{text_table(rows, digits=0)}")
    if arguments.csv:
        print(f"\n{text_table(reached_rows(pd.read_csv(arguments.csv)))}")


if __name__ == "__main__":
    main()
