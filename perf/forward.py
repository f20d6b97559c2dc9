"""How fast is the forward pass, beside every other implementation installed, in one run?

Prints TFLOP/s (4 M N d per unmasked pair, half of that when causal), median of interleaved rounds
with the slowest and fastest, and the ratio of fa4 to the best other. Writes the same as CSV.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perf.contenders import forward_contenders
from perf.timing import device_times, write_csv


class Case(NamedTuple):
    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int

    def flops(self, causal: bool) -> float:
        pairs = self.seqlen**2 * (0.5 if causal else 1.0)
        return 2.0 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)


CASES = (
    Case(32, 1024, 16, 16, 128, 128),
    Case(4, 4096, 16, 16, 128, 128),
    Case(1, 16384, 16, 16, 128, 128),
    Case(4, 4096, 32, 8, 128, 128),
    Case(4, 4096, 32, 32, 64, 64),
    Case(4, 4096, 16, 16, 192, 128),
    Case(4, 4096, 8, 8, 256, 256),
)


def measure(case: Case, causal: bool, rounds: int) -> list[dict[str, Any]]:
    """One row for each contender that takes the case."""
    rows = (case.batch, case.seqlen)
    q, k, v = (
        torch.randn(*rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        for heads, dim in (
            (case.heads_q, case.head_dim),
            (case.heads_kv, case.head_dim),
            (case.heads_kv, case.head_dim_v),
        )
    )
    calls = {}
    for name, forward in forward_contenders().items():
        try:
            forward(q, k, v, causal)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as refusal:
            print(f"    {name} does not take this case: {str(refusal).splitlines()[0][:90]}")
        else:
            calls[name] = lambda forward=forward: forward(q, k, v, causal)
    table = []
    for name, sample in device_times(calls, rounds=rounds).items():
        tflops = {
            column: round(case.flops(causal) / milliseconds / 1e9, 1)
            for column, milliseconds in (
                ("tflops", sample.median),
                ("tflops_slowest", sample.slowest),
                ("tflops_fastest", sample.fastest),
            )
        }
        table.append(
            case._asdict()
            | {"causal": causal, "contender": name, "ms": round(sample.median, 4)}
            | tflops
        )
    return table


def report(case: Case, causal: bool, table: list[dict[str, Any]]) -> None:
    kind = "causal" if causal else "full"
    print(f"{' '.join(f'{name}={value}' for name, value in case._asdict().items())} {kind}")
    others = [row["tflops"] for row in table if row["contender"] != "fa4"]
    for row in table:
        line = f"{row['tflops']:7.1f} [{row['tflops_slowest']:.0f}, {row['tflops_fastest']:.0f}]"
        ratio = f"  {row['tflops'] / max(others):.3f} of the best other" if others else ""
        print(f"    {row['contender']:36} {line}{ratio if row['contender'] == 'fa4' else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument("--head-dim", type=int, nargs="*", help="only cases with these head dims")
    parser.add_argument("--seqlen", type=int, nargs="*", help="only cases with these lengths")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.head_dim and case.head_dim not in arguments.head_dim:
            continue
        if arguments.seqlen and case.seqlen not in arguments.seqlen:
            continue
        for causal in (False, True):
            table = measure(case, causal, arguments.rounds)
            report(case, causal, table)
            rows += table
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
