"""What bounds each kernel on Hopper, and what share of that bound was reached?

Clocks of the units of one multiprocessor for one block of one tile, all warpgroups together:

    tensor  2 M N K / 4096 for each product
    exp     an exponential a score, 16 a clock
    shared  operands that wgmma reads, tiles that TMA writes, what warpgroups hand over, at 128
            bytes a clock. Each warpgroup of 64 rows reads all of B again, and A where it is not
            in registers
    issue   warp instructions of the forward loop over whole blocks, 4 a clock (--sass)

The busiest unit bounds the kernel: nothing is said about latencies, other blocks than whole ones,
or the change of tile. --csv takes what perf.forward, perf.varlen, perf.backward or perf.decode
wrote, and sets it against the bound at the clock that was read; decoding against HBM's bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fa4.compiler import KernelSpec
from fa4.dispatch import decide_backward, features_of
from fa4.kernels.features import HEAD_DIM_CLASSES, ForwardFeatures
from fa4.pipelines.sm90 import ForwardSchedule, forward_schedule
from fa4.pipelines.sm90_backward import STATISTIC_TERMS
from perf.cases import Case, dense, make_inputs, problem_of
from perf.records import text_table

ENTRY = "fa4.kernels.sm90.forward:compile_forward"
TENSOR_FLOP, EXP_LANES, SHARED_BYTES, ISSUED_WARPS = 4096, 16, 128, 4
ROWS = 64  # of a warpgroup: M of one wgmma
ELEMENT_BYTES, FP32_BYTES = 2, 4

H200_SMS = 132
H200_MHZ = 1980.0  # the most it runs at; long kernels run slower, held back by power
H200_TBYTES = 4.8  # a second, of HBM, nominal


@dataclass(frozen=True)
class BlockCost:
    """Clocks of one block of one tile, by unit; issue None where it was not counted.

    pairs  (query row, key) pairs of the block
    """

    pairs: int
    tensor: float
    exp: float
    shared: float
    issue: float | None = None

    @property
    def clocks(self) -> float:
        return max(self.tensor, self.exp, self.shared, self.issue or 0.0)

    @property
    def limit(self) -> str:
        """The busiest unit, or several that are just as busy."""
        units = ("tensor", "exp", "shared", "issue")
        return " = ".join(unit for unit in units if getattr(self, unit) == self.clocks)


def product(m: int, n: int, k: int, a_in_registers: bool = False) -> tuple[float, int]:
    """(FLOP, bytes of operands read from shared memory) of one product by wgmma."""
    a_bytes = 0 if a_in_registers else ROWS * 16 * ELEMENT_BYTES
    operands = (m // ROWS) * (k // 16) * (a_bytes + n * 16 * ELEMENT_BYTES)
    return 2.0 * m * n * k, operands


def cost(pairs: int, products: list[tuple[float, int]], other_bytes: int) -> BlockCost:
    """other_bytes  what passes through shared memory beside the operands of products"""
    return BlockCost(
        pairs=pairs,
        tensor=sum(flop for flop, _ in products) / TENSOR_FLOP,
        exp=pairs / EXP_LANES,
        shared=(sum(operands for _, operands in products) + other_bytes) / SHARED_BYTES,
    )


def forward_cost(schedule: ForwardSchedule, instructions: int | None = None) -> BlockCost:
    """instructions  of a consumer warp for one whole block, where they have been counted"""
    m, n, d, dv = schedule.tile_m, schedule.tile_n, schedule.head_dim, schedule.head_dim_v
    products = [product(m, n, d), product(m, dv, n, a_in_registers=True)]
    without_issue = cost(m * n, products, n * (d + dv) * ELEMENT_BYTES)
    if instructions is None:
        return without_issue
    issue = instructions * 4 * (m // ROWS) / ISSUED_WARPS
    return dataclasses.replace(without_issue, issue=issue)


def dkv_cost(schedule: Any) -> BlockCost:
    """`pipelines.sm90_backward.DkvSchedule`: 64 keys; the weights pass between warpgroups."""
    m, n, d, dv = schedule.tile_m, schedule.tile_n, schedule.head_dim, schedule.head_dim_v
    products = [
        product(n, m, d),
        product(n, dv, m, a_in_registers=True),
        product(n, m, dv),
        product(n, d, m, a_in_registers=True),
    ]
    handed_over = 2 * n * m * ELEMENT_BYTES  # written, and read
    return cost(m * n, products, m * (d + dv) * ELEMENT_BYTES + handed_over)


def dq_cost(schedule: Any) -> BlockCost:
    """`pipelines.sm90_backward.DqSchedule`: 128 query rows, like the forward kernel."""
    m, n, d, dv = schedule.tile_m, schedule.tile_n, schedule.head_dim, schedule.head_dim_v
    products = [product(m, n, d), product(m, n, dv), product(m, d, n, a_in_registers=True)]
    return cost(m * n, products, n * (d + dv) * ELEMENT_BYTES)


def one_kernel_cost(schedule: Any) -> BlockCost:
    """All three gradients in one kernel: dS passes through shared memory.

    dQ of a block is 64 rows by half of the columns a warpgroup, or 64 of 128 rows. S and dP have a
    k-step of statistics, 16 bytes a row; threads' additions of dQ pass through what is shared
    memory, too.
    """
    m, n, d, dv = schedule.tile_m, schedule.tile_n, schedule.head_dim, schedule.head_dim_v
    shares = 2 if m == ROWS else 1
    dq_flop, dq_operands = product(m, d // shares, n)
    products = [
        product(n, m, d + 2 * STATISTIC_TERMS),
        product(n, m, dv + 2 * STATISTIC_TERMS),
        product(n, dv, m, a_in_registers=True),
        product(n, d, m, a_in_registers=True),
        (dq_flop * shares, dq_operands * shares),
    ]
    statistics = 2 * m * STATISTIC_TERMS * ELEMENT_BYTES
    other = (m * (d + dv) + n * m) * ELEMENT_BYTES + statistics + m * d * FP32_BYTES
    return cost(m * n, products, other)


# By the module of a kernel's entry; kernels that are not in here take next to no time.
BACKWARD_COSTS: dict[str, Callable[[Any], BlockCost]] = {
    "fa4.kernels.sm90.backward_dkv": dkv_cost,
    "fa4.kernels.sm90.backward_dq": dq_cost,
    "fa4.kernels.sm90.backward": one_kernel_cost,
}


def bound_tflops(
    costs: list[BlockCost], flop_a_pair: float, mhz: float = H200_MHZ, sms: int = H200_SMS
) -> float:
    """Of whole blocks of kernels that run one after another, on all multiprocessors."""
    clocks_a_pair = sum(each.clocks / each.pairs for each in costs)
    return flop_a_pair / clocks_a_pair * mhz * 1e6 * sms / 1e12


def forward_flop(head_dim: int, head_dim_v: int) -> float:
    return 2.0 * (head_dim + head_dim_v)


def backward_flop(head_dim: int, head_dim_v: int) -> float:
    """Five products, whatever a path executes."""
    return 2.0 * (3 * head_dim + 2 * head_dim_v)


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


def kernels_of(operation: str, case: Case) -> list[tuple[str, Any, BlockCost]]:
    """(name, schedule, cost) of each kernel that dispatch takes for a case on Hopper."""
    problem = problem_of(make_inputs(case, "meta"), causal=case.causal)
    if operation == "backward":
        specs = decide_backward(problem, "sm_90a").kernels
        modules = [(spec, spec.entry.split(":")[0]) for spec in specs]
        return [
            (module.rsplit(".", 1)[-1], spec.schedule, BACKWARD_COSTS[module](spec.schedule))
            for spec, module in modules
            if module in BACKWARD_COSTS
        ]
    schedule = forward_schedule(features_of(problem))
    return [("forward", schedule, forward_cost(schedule))]


def bound_rows(counts_issue: bool, mhz: float) -> list[dict[str, Any]]:
    """A row for each kernel of each usual pair of head dims, causal."""
    pairs = sorted([(d, d) for d in HEAD_DIM_CLASSES] + [(192, 128)])
    rows = []
    for operation in ("forward", "backward"):
        for d, dv in pairs:
            case = dataclasses.replace(dense(4, 4096, 16, 16, d, dv), causal=True)
            kernels = kernels_of(operation, case)
            flop = (forward_flop if operation == "forward" else backward_flop)(d, dv)
            bound = bound_tflops([each for *_, each in kernels], flop, mhz)
            for name, schedule, each in kernels:
                if counts_issue and operation == "forward":
                    features = ForwardFeatures("bf16", d, dv, has_right_bound=True)
                    each = forward_cost(schedule, interior_instructions(features, schedule))
                    bound = bound_tflops([each], flop, mhz)
                rows.append(
                    {
                        "kernel": name,
                        "head_dim": d,
                        "head_dim_v": dv,
                        "schedule": schedule.name,
                        "tensor": each.tensor,
                        "exp": each.exp,
                        "shared": each.shared,
                        "issue": each.issue,
                        "limit": each.limit,
                        f"{operation} bound": bound,
                    }
                )
    return rows


def reached_rows(table: pd.DataFrame, ours: str = "fa4") -> list[dict[str, Any]]:
    """For each measured case of ours the bound at the clock that was read, and the share of it.

    Schedules are those that dispatch takes now, not ones that the CSV remembers. ``useful`` is the
    share of products that count, of dense forward cases.
    """
    rows = []
    for row in table[(table["contender"] == ours) & table["ms"].notna()].to_dict("records"):
        if row["operation"] == "decode":
            share = row["tbytes"] / H200_TBYTES
            rows.append({"case": row["case"], "TB/s": row["tbytes"], "share of bound": share})
            continue
        d, dv, seqlen = (int(row[name]) for name in ("head_dim", "head_dim_v", "seqlen_k"))
        heads_q, heads_kv = int(row["heads_q"]), int(row["heads_kv"])
        case = dense(int(row["batch"]), seqlen, heads_q, heads_kv, d, dv)
        case = dataclasses.replace(case, causal=row["causal"] in (True, "True"))
        kernels = kernels_of(row["operation"], case)
        flop = (backward_flop if row["operation"] == "backward" else forward_flop)(d, dv)
        has_clock = pd.notna(row.get("sm_mhz"))
        mhz = row["sm_mhz"] if has_clock else H200_MHZ
        bound = bound_tflops([each for *_, each in kernels], flop, mhz)
        columns = {
            "case": row["case"],
            "kernels": ", ".join(f"{name} {schedule.name}" for name, schedule, _ in kernels),
            "limit": ", ".join(each.limit for *_, each in kernels),
            "MHz": mhz if has_clock else math.nan,
            "bound": bound,
            "tflops": row["tflops"],
            "share of bound": row["tflops"] / bound,
        }
        if row["operation"] == "forward":
            columns["useful"] = efficiency(seqlen, kernels[0][1], case.causal)
            columns["share of useful bound"] = row["tflops"] / (bound * columns["useful"])
        rows.append(columns)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="of a benchmark: share reached")
    parser.add_argument("--sass", action="store_true", help="count instructions; compiles kernels")
    parser.add_argument("--mhz", type=float, default=H200_MHZ, help="SM clock (%(default)s)")
    arguments = parser.parse_args()
    print(
        f"clocks of a block, and TFLOP/s of {H200_SMS} multiprocessors at {arguments.mhz:.0f} MHz"
    )
    print(text_table(bound_rows(arguments.sass, arguments.mhz), digits=0))
    if arguments.csv:
        print(f"\n{text_table(reached_rows(pd.read_csv(arguments.csv)))}")


if __name__ == "__main__":
    main()
