"""How much host time does an inference call take, beside every other implementation installed?

Median of single calls at a size whose device time is short, the launch included. SDPA is measured
free to choose its backend: the context that forces one costs more than the call.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from perf import cases, contenders
from perf.command import REFUSALS, finish, make_parser, need_gpu, progress, selected
from perf.timing import host_time

CASES = (
    replace(cases.dense(1, 128, 4, 4, 128), causal=True),
    replace(cases.mix("log", 4, 4, 4, 128), causal=True),
    cases.decode(1, 1024, 32, 8),
)


def operation_of(case: cases.Case) -> str:
    if case.lengths_q != case.lengths_k:
        return "decode"
    return "varlen" if case.label else "forward"


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--calls", type=int, default=1000, help="a round (default %(default)s)")
    arguments = parser.parse_args()
    need_gpu()
    rows = []
    free = contenders.Sdpa("sdpa", None)
    for case in progress(selected(CASES, arguments.cases), lambda case: case.name):
        operation = operation_of(case)
        inputs = cases.make_inputs(case, "cuda")
        found, absent = contenders.available(operation, arguments.contenders)
        found = [c for c in found if not isinstance(c, contenders.Sdpa)]
        if hasattr(free, operation) and not arguments.contenders:
            found.append(free)
        for name, reason in absent.items():
            print(f"not available: {name}: {reason}")
        for contender in found:
            row = case.row() | {"contender": contender.name, "version": contender.version}
            row |= {"operation": operation, "host_us": None, "note": ""}
            try:
                call = getattr(contender, operation)(case, inputs)
                times = [host_time(call, arguments.calls) for _ in range(arguments.rounds)]
            except REFUSALS as refusal:
                row["note"] = f"refused: {contenders.first_line(refusal)}"
                print(f"{operation:8} {contender.name:16} {row['note']}")
            else:
                row |= {"host_us": min(times), "host_us_slowest": max(times)}
                print(f"{operation:8} {contender.name:16} {min(times):7.1f} us", flush=True)
            torch.cuda.synchronize()
            rows.append(row)
    finish(rows, arguments, "host_overhead", "host_us")


if __name__ == "__main__":
    main()
