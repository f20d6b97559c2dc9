"""Do fa4 and the benchmarks work on this machine? Small forward problems, in a few seconds.

Ends with status 1 if fa4 refuses a case or its output is not that of float64 within 2 %.
"""

from __future__ import annotations

import sys

import torch

from fa4.reference import attention_reference
from perf import cases
from perf.command import compare, make_parser, need_gpu, selected
from perf.contenders import Fa4, output_of


def largest_error(case: cases.Case) -> float:
    """Of fa4's forward pass, relative to the largest exact value."""
    inputs = cases.make_inputs(case, "cuda")
    out = output_of(Fa4().forward(case, inputs)()).double()
    q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
    exact, _ = attention_reference(q, k, v, causal=case.causal)
    return ((out - exact).abs().max() / exact.abs().max()).item()


def main() -> None:
    arguments = make_parser(__doc__, rounds=3).parse_args()
    need_gpu()
    chosen = selected(cases.SMOKE, arguments.cases)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    wrong = []
    for case in chosen:
        error = largest_error(case)
        print(f"{case.name:28} largest error {error:.1e} of the largest value")
        if not error < 0.02:
            wrong.append(case.name)
    rows = compare("forward", chosen, arguments, lambda c: c.forward_flops, "tflops", stem="smoke")
    refused = [row["case"] for row in rows if row["contender"] == "fa4" and row["note"]]
    if wrong or refused:
        sys.exit(f"wrong: {wrong}; refused: {refused}")


if __name__ == "__main__":
    main()
