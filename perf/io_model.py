"""How many words does exact attention move, by algorithm, against N, d and on-chip memory M?

Words are elements of one head, M too. Loop orders and block sizes are those of the papers:

    materialised  S and P written to memory and read back       Theta(N d + N^2)
    FA1           K/V blocks outermost, O read and rewritten    Theta(N^2 d^2 / M)
    FA2           Q blocks outermost, O written once            Theta(N^2 d^2 / M)

Dao et al. 2022 (FlashAttention), algorithms 0 and 1, theorem 2, and proposition 3: no exact
algorithm does better than N^2 d^2 / M for all M between d and N d. Dao 2023 (FlashAttention-2),
section 3.1: the other loop order.

Below them stands the traffic of fa4's own schedules: what TMA copies into and out of
multiprocessors (from L2, once for each query tile), and what must cross HBM at the least (each
tensor once). --check runs the compiled kernel in the emulator and compares bytes; --ncu compares
with counters that Nsight Compute wrote:

    ncu --csv --page raw --metrics dram__bytes_read.sum,dram__bytes_write.sum ... > counts.csv
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fa4.dispatch import decide, features_of
from fa4.pipelines.sm90 import ForwardSchedule, forward_schedule
from perf.cases import FORWARD, Case, dense, make_inputs, problem_of
from perf.records import text_table

WORD_BYTES = 2  # of q, k, v, o; the statistics of a row are counted as one word each

UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
COUNTERS = {"dram__bytes_read.sum": "hbm_in", "dram__bytes_write.sum": "hbm_out"}


def materialised_words(n: int, d: int) -> int:
    """Algorithm 0: read Q, K; write S; read S, write P; read P, V; write O."""
    return 4 * n * d + 4 * n * n


def block_sizes(n: int, d: int, m: int) -> tuple[int, int]:
    """(rows of Q, rows of K) of a block: algorithm 1, line 1. M must hold four rows."""
    if m < 4 * d:
        raise ValueError(f"M={m} words cannot hold four rows of d={d}.")
    keys = min(n, math.ceil(m / (4 * d)))
    return min(keys, d, n), keys


def fa1_words(n: int, d: int, m: int) -> int:
    """Algorithm 1: for each block of K and V, all of Q, O and two statistics a row; O written.

    The first pass reads an O of zeros, as the algorithm is written.
    """
    _, keys = block_sizes(n, d, m)
    passes = math.ceil(n / keys)
    return 2 * n * d + passes * (3 * n * d + 4 * n)


def fa2_words(n: int, d: int, m: int) -> int:
    """For each block of Q, all of K and V; O and its LSE are written once.

    Q and O stay, K and V pass: the block of Q takes half of M with its O.
    """
    rows = min(n, math.ceil(m / (4 * d)))
    if m < 4 * d:
        raise ValueError(f"M={m} words cannot hold four rows of d={d}.")
    passes = math.ceil(n / rows)
    return 2 * n * d + n + passes * 2 * n * d


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch.

    loaded, stored   by TMA, into and out of multiprocessors; a copy that reaches over the end of a
                     sequence counts whole: clipping is done on the way to memory. What lies in
                     front of a sequence is loaded and not stored
    hbm_least        of HBM: each input read once, the output written once
    """

    loaded: int
    stored: int
    hbm_least: int


def forward_traffic(case: Case, schedule: ForwardSchedule) -> Traffic:
    """Of the Hopper forward kernel for a dense case.

    Every query tile loads itself and the key blocks up to the last one it sees. The last tile
    ends with the last 64 rows of the sequence, and the first one may begin in front of it.
    """
    seqlen_q, seqlen_k = case.lengths_q[0], case.lengths_k[0]
    tile_m, tile_n = schedule.tile_m, schedule.tile_n
    tiles = math.ceil(seqlen_q / tile_m)
    tiles_end = math.ceil(seqlen_q / 64) * 64
    blocks = 0
    for tile in range(tiles):
        seen = seqlen_k
        if case.causal:
            last_row = min(tiles_end - (tiles - 1 - tile) * tile_m, seqlen_q) - 1
            seen = max(0, min(seqlen_k, last_row + seqlen_k - seqlen_q + 1))
        blocks += math.ceil(seen / tile_n)
    pairs = case.batch * case.heads_q
    block_bytes = WORD_BYTES * tile_n * (schedule.head_dim + schedule.head_dim_v)
    tile_bytes = WORD_BYTES * tile_m * schedule.head_dim
    loaded = pairs * (tiles * tile_bytes + blocks * block_bytes)
    q_and_o = WORD_BYTES * case.batch * seqlen_q * case.heads_q * (case.head_dim + case.head_dim_v)
    return Traffic(
        loaded=loaded,
        stored=pairs * WORD_BYTES * tiles_end * schedule.head_dim_v,
        hbm_least=q_and_o + case.kv_bytes,
    )


def schedule_of(case: Case) -> ForwardSchedule:
    """What dispatch takes for a dense case on Hopper."""
    problem = problem_of(make_inputs(case, "meta"), causal=case.causal)
    return forward_schedule(features_of(problem))


def emulated_traffic(case: Case) -> tuple[int, int]:
    """(loaded, stored) bytes of TMA copies, counted while the emulator runs the kernel."""
    from fa4.emulator.costs import cost_report
    from fa4.emulator.device import prepare_forward

    inputs = make_inputs(case, "cpu")
    q, k, v = inputs.q, inputs.k, inputs.v
    decision = decide(problem_of(inputs, causal=case.causal), "sm_90a")
    prepared, _, _ = prepare_forward(decision, q, k, v, wants_lse=False)
    (report,) = prepared.execute()
    total = cost_report(report.launch, report.statistics).total
    return total.loaded_bytes, total.stored_bytes


def read_counters(path: Path) -> pd.DataFrame:
    """A line a launch: kernel, hbm_in, hbm_out in bytes, of a CSV that Nsight Compute wrote.

    Reads the long form (--page details: Metric Name, Metric Unit, Metric Value) and the wide one
    (--page raw: a column a metric, units in the second line). Raises ValueError for another file.
    """
    lines = [text for text in path.read_text().splitlines() if text.startswith('"')]
    if not lines:
        raise ValueError(f"{path} has no lines of a CSV by Nsight Compute (ncu --csv).")
    table = pd.read_csv(io.StringIO("\n".join(lines)), thousands=",", dtype=str)
    if "Metric Name" in table:
        table = table[table["Metric Name"].isin(COUNTERS)]
        values = table["Metric Value"].str.replace(",", "").astype(float)
        table = table.assign(bytes=values * table["Metric Unit"].map(UNITS))
        wide = table.pivot(index=["ID", "Kernel Name"], columns="Metric Name", values="bytes")
        wide = wide.reset_index().rename(columns=COUNTERS)
    elif set(COUNTERS) <= set(table):
        units = table.iloc[0]
        wide = table.iloc[1:].copy()
        for counter, name in COUNTERS.items():
            values = wide[counter].str.replace(",", "").astype(float)
            wide[name] = values * UNITS[units[counter]]
    else:
        raise ValueError(f"{path} has none of the counters {', '.join(COUNTERS)}.")
    return wide[["Kernel Name", "hbm_in", "hbm_out"]].rename(columns={"Kernel Name": "kernel"})


def algorithm_rows(
    lengths: list[int], dims: list[int], memories: list[int]
) -> list[dict[str, Any]]:
    """Words of the three algorithms, and their ratio to the asymptotic N^2 d^2 / M."""
    rows = []
    for n in lengths:
        for d in dims:
            for m in memories:
                fa1, fa2 = fa1_words(n, d, m), fa2_words(n, d, m)
                rows.append(
                    {
                        "N": n,
                        "d": d,
                        "M": m,
                        "materialised": materialised_words(n, d),
                        "FA1": fa1,
                        "FA2": fa2,
                        "FA1 / (N^2 d^2 / M)": fa1 * m / (n * d) ** 2,
                        "FA2 / (N^2 d^2 / M)": fa2 * m / (n * d) ** 2,
                    }
                )
    return rows


def schedule_rows(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        schedule = schedule_of(case)
        traffic = forward_traffic(case, schedule)
        scores = 4 * WORD_BYTES * case.heads_q * sum(n * n for n in case.lengths_q)
        rows.append(
            {
                "case": case.name,
                "schedule": schedule.name,
                "from L2, MB": traffic.loaded / 1e6,
                "stored, MB": traffic.stored / 1e6,
                "HBM at least, MB": traffic.hbm_least / 1e6,
                "materialised, MB": (scores + traffic.hbm_least) / 1e6,
                "FLOP / L2 byte": case.forward_flops / (traffic.loaded + traffic.stored),
            }
        )
    return rows


CHECKED = (
    dense(1, 256, 1, 1, 128),
    dense(1, 320, 2, 1, 64),
    Case((200,), (333,), 1, 1, 128, 128, causal=True),
)


def check(case: Case) -> dict[str, Any]:
    traffic = forward_traffic(case, schedule_of(case))
    loaded, stored = emulated_traffic(case)
    return {
        "case": f"{case.name} q{case.lengths_q[0]} k{case.lengths_k[0]}",
        "loaded, model": traffic.loaded,
        "loaded, emulated": loaded,
        "stored, model": traffic.stored,
        "stored, emulated": stored,
        "equal": (loaded, stored) == (traffic.loaded, traffic.stored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="against bytes counted emulated")
    parser.add_argument("--ncu", type=Path, metavar="FILE", help="against counters of a GPU")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the algorithms' rows")
    arguments = parser.parse_args()
    sram = 228 * 1024 // WORD_BYTES  # of a Hopper multiprocessor
    rows = algorithm_rows([1024, 4096, 16384, 65536], [64, 128, 256], [50_000, sram])
    print(text_table(rows, digits=2))
    print(f"\nfa4's forward schedules on Hopper\n{text_table(schedule_rows(FORWARD), digits=1)}")
    if arguments.csv:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(arguments.csv, index=False)
    if arguments.ncu:
        print(f"\nmeasured\n{read_counters(arguments.ncu).to_string(index=False)}")
    if arguments.check:
        checks = [check(case) for case in CHECKED]
        print(f"\nTMA bytes\n{text_table(checks)}")
        if not all(row["equal"] for row in checks):
            sys.exit("the model and the emulator differ")


if __name__ == "__main__":
    main()
