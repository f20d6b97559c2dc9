"""How long is the first call of a process, with the kernel compiled before and without?

Each measurement is a process of its own that has imported torch and made its tensors, so that what
is timed is fa4: loading or compiling the kernel, and launching it once. Import time is separate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from perf.timing import write_csv

PROCESS = """
import time
import torch
q, k, v = (torch.randn(1, 512, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
import fa4
imported = time.perf_counter()
fa4.flash_attn_func(q, k, v, causal=True, backend="fa4")
torch.cuda.synchronize()
print(imported - start, time.perf_counter() - imported)
"""


def run_process(cache: str) -> tuple[float, float]:
    """(seconds of import, seconds of the first call) of a fresh process."""
    result = subprocess.run(
        [sys.executable, "-c", PROCESS],
        env=os.environ | {"FA4_CACHE_DIR": cache},
        check=True,
        capture_output=True,
        text=True,
    )
    imported, called = map(float, result.stdout.split())
    return imported, called


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--repeats", type=int, default=5, help="warm processes (default 5)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        _, cold = run_process(cache)
        warm = [run_process(cache) for _ in range(arguments.repeats)]
    imported, called = (statistics.median(times) for times in zip(*warm, strict=True))
    rows = [
        {"what": "import fa4, torch imported before", "seconds": imported},
        {"what": "first call, warm disk cache", "seconds": called},
        {"what": "first call, empty disk cache", "seconds": cold},
    ]
    for row in rows:
        row["seconds"] = round(row["seconds"], 4)
        print(f"{row['what']:36} {row['seconds']:8.4f} s")
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
