"""How far from float64 attention is each implementation, on plain and on hard inputs?

plain     q, k, v normal
outliers  normal plus, in one of a thousand elements, normal of standard deviation 10 (the
          distribution that FA3 section 4.3 tests with)
large     q eight times as large: a few keys take all of the weight
Largest and root mean square error, over the root mean square of the exact output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa4.reference import attention_reference
from perf import cases, contenders
from perf.command import REFUSALS, finish, make_parser, need_gpu, progress, selected

KINDS = ("plain", "outliers", "large")
CASES = cases.both_masks(
    (
        cases.dense(1, 2048, 4, 4, 64),
        cases.dense(1, 2048, 4, 2, 128),
        cases.dense(1, 2048, 2, 2, 256),
    )
)


def with_values(inputs: cases.Inputs, kind: str) -> cases.Inputs:
    """The inputs with another distribution of values; the same for every contender."""
    generator = torch.Generator(inputs.q.device).manual_seed(cases.SEED)

    def outliers(t: Tensor) -> Tensor:
        extra = torch.randn(t.shape, generator=generator, device=t.device)
        rare = torch.rand(t.shape, generator=generator, device=t.device) < 1e-3
        return (t.float() + 10.0 * extra * rare).to(t.dtype)

    if kind == "outliers":
        return replace(inputs, q=outliers(inputs.q), k=outliers(inputs.k), v=outliers(inputs.v))
    if kind == "large":
        return replace(inputs, q=8.0 * inputs.q)
    return inputs


def errors(out: Tensor, exact: Tensor) -> dict[str, float]:
    scale = exact.square().mean().sqrt()
    difference = (out.double() - exact) / scale
    return {
        "max_error": difference.abs().max().item(),
        "rms_error": difference.square().mean().sqrt().item(),
    }


def main() -> None:
    arguments = make_parser(__doc__, rounds=1).parse_args()
    need_gpu()
    found, absent = contenders.available("forward", arguments.contenders)
    for name, reason in absent.items():
        print(f"not available: {name}: {reason}")
    rows: list[dict[str, Any]] = []
    for case in progress(selected(CASES, arguments.cases), lambda case: case.name):
        for kind in KINDS:
            inputs = with_values(cases.make_inputs(case, "cuda"), kind)
            q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
            exact, _ = attention_reference(q, k, v, causal=case.causal)
            for contender in found:
                row = case.row() | {"case": f"{case.name}-{kind}", "values": kind}
                row |= {"contender": contender.name, "version": contender.version, "note": ""}
                try:
                    out = contenders.output_of(contender.forward(case, inputs)())
                    row |= errors(out.reshape(exact.shape), exact)
                except REFUSALS as refusal:
                    row["note"] = f"refused: {contenders.first_line(refusal)}"
                torch.cuda.synchronize()
                rows.append(row)
                figures = row["note"] or f"max {row['max_error']:.2e} rms {row['rms_error']:.2e}"
                print(f"{row['case']:36} {contender.name:16} {figures}", flush=True)
    finish(rows, arguments, "accuracy", "rms_error")


if __name__ == "__main__":
    main()
