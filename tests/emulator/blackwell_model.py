"""What a block costs our Blackwell forward kernel and flash-attn-4's, by the emulator's report.

    python -m tests.emulator.blackwell_model                  every case, as tables in Markdown
    python -m tests.emulator.blackwell_model KERNEL CASE      one case, as JSON

KERNEL is "fa4" or "flash-attn-4" (which needs the `peers` extra), CASE a number in `CASES`. Each
case is a process of its own; gpu_stand_in.py says why.

Clocks are modelled (`fa4.emulator.costs`), not measured. They are those of one multiprocessor for
128 queries and 128 keys: the difference of two launches, one of which has 512 keys more, so that
what is counted are blocks without masks; and, of a square causal launch, all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import torch

from fa4.emulator.costs import UNITS, Costs, cost_report
from fa4.emulator.device import LaunchReport

ARCH = "sm_100a"
KERNELS = ("fa4", "flash-attn-4")
SHOWN = tuple(unit for unit in UNITS if unit != "issue")
ROWS = 512  # queries: a work item of each kernel, or several
SHORTER, LONGER = 1024, 1536  # keys
SQUARE = 1024
TILE = 128


class Case(NamedTuple):
    head_dim: int
    head_dim_v: int
    causal: bool

    def __str__(self) -> str:
        dims = {self.head_dim, self.head_dim_v}
        name = f"d{self.head_dim}" if len(dims) == 1 else f"d{self.head_dim}/{self.head_dim_v}"
        return f"{name} {'causal' if self.causal else 'full'}"


CASES = [
    Case(head_dim, head_dim_v, causal)
    for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128), (256, 256))
    for causal in (False, True)
]


def launch_of_fa4(case: Case, rows: int, keys: int) -> LaunchReport:
    import fa4
    from fa4.emulator.device import prepare_forward

    q, k, v = inputs(case, rows, keys)
    decision = fa4.explain(q, k, v, causal=case.causal, arch=ARCH)
    prepared, _, _ = prepare_forward(decision, q, k, v, wants_lse=True)
    (report,) = prepared.execute()
    return report


def launch_of_flash_attn_4(case: Case, rows: int, keys: int) -> LaunchReport:
    from flash_attn.cute import interface

    from tests.emulator import flash_attn_4, gpu_stand_in

    reports: list[LaunchReport] = []

    def recorded(*args: Any, **options: Any) -> tuple[LaunchReport, ...]:
        reports.extend(found := run(*args, **options))
        return found

    run = gpu_stand_in.run
    gpu_stand_in.run = recorded  # type: ignore[assignment]
    flash_attn_4.replace_compilers(ARCH, check_races=False)
    q, k, v = inputs(case, rows, keys)
    with gpu_stand_in.OnGpu():
        interface._flash_attn_fwd(q, k, v, causal=case.causal, return_lse=True)
    gpu_stand_in.run = run  # type: ignore[assignment]
    (report,) = reports
    return report


def inputs(case: Case, rows: int, keys: int) -> list[torch.Tensor]:
    dims = ((rows, case.head_dim), (keys, case.head_dim), (keys, case.head_dim_v))
    return [torch.randn(1, length, 1, dim, dtype=torch.bfloat16) for length, dim in dims]


def costs_of(kernel: str, case: Case) -> dict[str, Any]:
    """Clocks by unit of a block of `TILE` by `TILE`, and of the square launch."""
    launch = launch_of_fa4 if kernel == "fa4" else launch_of_flash_attn_4

    def total(rows: int, keys: int) -> Costs:
        report = launch(case, rows, keys)
        return cost_report(report.launch, report.statistics).total

    blocks = ROWS // TILE * ((LONGER - SHORTER) // TILE)
    block = total(ROWS, LONGER) - total(ROWS, SHORTER)
    return {
        "block": {unit: clocks / blocks for unit, clocks in block.clocks.items()},
        "loaded": block.loaded_bytes / blocks,
        "square": total(SQUARE, SQUARE).clocks if case.causal else {},
    }


def found_of(kernel: str, case: Case) -> dict[str, Any]:
    """`costs_of` in a process of its own."""
    env = {
        "CUTE_DSL_ARCH": ARCH,
        "FLASH_ATTENTION_ARCH": ARCH.rstrip("a"),
        "FLASH_ATTENTION_NUM_SMS": "4",
    }
    command = [sys.executable, "-m", __spec__.name, kernel, str(CASES.index(case))]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def row(case: Case, kernel: str, clocks: dict[str, float], further: str) -> str:
    limit = max(SHOWN, key=lambda unit: clocks[unit])
    cells = [f"**{clocks[u]:.0f}**" if u == limit else f"{clocks[u]:.0f}" for u in UNITS]
    return f"| {case} | {kernel} | {' | '.join(cells)} | {further} |"


def main() -> None:
    if len(sys.argv) == 3:
        kernel, number = sys.argv[1:]
        print(json.dumps(costs_of(kernel, CASES[int(number)])))
        return
    found = {(case, kernel): found_of(kernel, case) for case in CASES for kernel in KERNELS}
    title = "| case | kernel | " + " | ".join(UNITS)
    print(f"{title} | KB by TMA |\n| --- | --- |{' --- |' * (len(UNITS) + 1)}")
    for (case, kernel), costs in found.items():
        print(row(case, kernel, costs["block"], f"{costs['loaded'] / 1024:.1f}"))
    print(f"\n{title} | limit |\n| --- | --- |{' --- |' * (len(UNITS) + 1)}")
    for (case, kernel), costs in found.items():
        if case.causal:
            limit = max(SHOWN, key=lambda unit: costs["square"][unit])
            print(row(case, kernel, costs["square"], limit))


if __name__ == "__main__":
    main()
