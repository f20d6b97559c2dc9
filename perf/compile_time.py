"""How long do compiling, loading and the first call take, with the kernel compiled before and not?

Each figure is of processes of their own that have imported torch (and made their tensors), so that
what is timed is the implementation: importing it, then loading or compiling, and one call. Without
a GPU the call is left out, and kernels are compiled for --arch.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch

from perf.command import finish, make_parser, progress

# Prints "name=seconds" lines. The cache is the folder that the environment names.
CALL = """
import time, torch
q, k, v = (torch.randn(1, 512, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
{imports}
imported = time.perf_counter()
{call}
torch.cuda.synchronize()
print(f"import={{imported - start}}\\nfirst call={{time.perf_counter() - imported}}")
"""
COMPILE = """
import time, torch
start = time.perf_counter()
import fa4
from fa4 import compiler
imported = time.perf_counter()
q = torch.empty(1, 512, 8, 128, device="meta", dtype=torch.bfloat16)
decision = fa4.explain(q, q, q, causal=True, arch="{arch}")
compiler.get_kernel(decision.kernel)
print(f"import={{imported - start}}\\nload={{time.perf_counter() - imported}}")
"""
PROGRAMS = {
    "fa4": CALL.format(
        imports="import fa4", call='fa4.flash_attn_func(q, k, v, causal=True, backend="fa4")'
    ),
    "flash-attn-4": CALL.format(
        imports="from flash_attn.cute import flash_attn_func",
        call="flash_attn_func(q, k, v, causal=True)",
    ),
}


def run_process(program: str, cache: str) -> dict[str, float]:
    """What a fresh process printed. Raises RuntimeError with the end of its errors."""
    # flash-attn-4's cache is off unless asked for.
    caches = dict.fromkeys(("FA4_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"), cache)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | caches | {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or ["no message"])[-1])
    return {
        name: float(value)
        for name, value in re.findall(r"^([a-z ]+)=([\d.e-]+)$", result.stdout, re.M)
    }


def measure(name: str, program: str, repeats: int) -> list[dict[str, Any]]:
    """Rows: the empty cache once, then the median of processes that find it filled."""
    with tempfile.TemporaryDirectory() as cache:
        cold = run_process(program, cache)
        warm = [run_process(program, cache) for _ in range(repeats)]
    rows = []
    for what in cold:
        if what != "import":
            rows.append((f"{what}, empty disk cache", [cold[what]]))
        title = what if what == "import" else f"{what}, warm disk cache"
        rows.append((title, [times[what] for times in warm]))
    return [
        {
            "contender": name,
            "case": title,
            "seconds": statistics.median(seconds),
            "seconds_slowest": max(seconds),
            "processes": len(seconds),
        }
        for title, seconds in rows
    ]


def programs(arch: str) -> dict[str, str]:
    """The programs that this machine can run."""
    if torch.cuda.is_available():
        return PROGRAMS
    return {f"fa4 for {arch}, no call": COMPILE.format(arch=arch)}


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--arch", default="sm_90a", help="target without a GPU (%(default)s)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    chosen = {
        name: program
        for name, program in programs(arguments.arch).items()
        if re.search(arguments.contenders, name)
    }
    for name in progress(list(chosen)):
        try:
            measured = measure(name, chosen[name], arguments.rounds)
        except RuntimeError as error:
            print(f"not available: {name}: {error}")
            continue
        for row in measured:
            if re.search(arguments.cases, row["case"]):
                print(f"{name:24} {row['case']:28} {row['seconds']:8.4f} s", flush=True)
                rows.append(row)
    finish(rows, arguments, "compile_time", "seconds")


if __name__ == "__main__":
    main()
