"""How much host time does an inference call take, beside every other implementation installed?

Median of single calls at a size whose device time is short, the launch included.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from perf.contenders import forward_contenders
from perf.timing import host_time, write_csv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    q, k, v = (torch.randn(1, 128, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = []
    # SDPA without the context that forces a backend, which costs more than the call.
    contenders = {n: f for n, f in forward_contenders().items() if "SDPA" not in n}
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    contenders[f"SDPA, torch {torch.__version__}"] = lambda *_: F.scaled_dot_product_attention(
        *heads_first, is_causal=True
    )
    for name, forward in contenders.items():
        microseconds = host_time(lambda forward=forward: forward(q, k, v, True))
        print(f"{name:36} {microseconds:7.1f} us")
        rows.append({"contender": name, "host_us": round(microseconds, 2)})
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
