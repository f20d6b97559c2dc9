"""How much memory does a call need beyond its inputs, against the length: linear, or quadratic?

Peak of torch's allocator over one forward pass, of fa4 and of eager attention, which writes the
scores and the probabilities: at 32 heads and 32k tokens each of them is 64 GiB. Eager runs only
where that is known to fit; elsewhere its scores are computed, not measured, and the row says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fa4
from perf import cases
from perf.command import finish, make_parser, need_gpu, progress, selected

GIB = 2**30
CASES = tuple(cases.dense(1, 1024 << i, 32, 32, 128) for i in range(8))  # 1k to 128k


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it is written down: scores, softmax, product, each a tensor in memory."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(2, 3)).mul_(q.shape[-1] ** -0.5)
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


def scores_bytes(case: cases.Case) -> int:
    """Of one 16-bit tensor of scores."""
    return int(2 * case.pairs)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Of the allocator during a call, beyond what was allocated before."""
    call()  # whatever is allocated once and kept
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def worst_deviation_from_linear(lengths: Sequence[int], peaks: Sequence[float]) -> float:
    """Of peaks from the line through the first and the last point, relative to the line."""
    slope = (peaks[-1] - peaks[0]) / (lengths[-1] - lengths[0])
    line = [peaks[0] + slope * (n - lengths[0]) for n in lengths]
    return max(abs(p - at) / at for p, at in zip(peaks, line, strict=True))


def exponent(lengths: Sequence[int], peaks: Sequence[float]) -> float:
    """p of peaks ~ length^p between the last two lengths."""
    return math.log(peaks[-1] / peaks[-2]) / math.log(lengths[-1] / lengths[-2])


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    need_gpu()
    chosen = selected(CASES, arguments.cases)
    rows = []
    for case in progress(chosen, lambda case: case.name):
        inputs = cases.make_inputs(case, "cuda")
        q, k, v = inputs.q, inputs.k, inputs.v
        common = case.row() | {"inputs_gib": cases.input_bytes(case) / GIB}
        ours = peak_bytes(functools.partial(fa4.flash_attn_func, q, k, v, backend="fa4"))
        rows.append(common | {"contender": "fa4", "peak_gib": ours / GIB, "note": "measured"})
        free, _ = torch.cuda.mem_get_info()
        if 2.5 * scores_bytes(case) < free:
            peak = peak_bytes(functools.partial(eager, q, k, v))
            row = {"peak_gib": peak / GIB, "note": "measured"}
        else:
            row = {"peak_gib": 2 * scores_bytes(case) / GIB, "note": "computed: two score tensors"}
        rows.append(common | {"contender": "eager"} | row)
        beside = f"eager {row['peak_gib']:.1f} GiB ({row['note']})"
        print(f"{case.name:28} fa4 {ours / GIB:.3f} GiB, {beside}", flush=True)
    if len(chosen) > 1:
        lengths = [case.lengths_k[0] for case in chosen]
        for name in ("fa4", "eager"):
            peaks = [row["peak_gib"] for row in rows if row["contender"] == name]
            print(
                f"{name}: grows as length^{exponent(lengths, peaks):.2f}, off a line by at most "
                f"{worst_deviation_from_linear(lengths, peaks):.1%}"
            )
    finish(rows, arguments, "memory", "peak_gib")


if __name__ == "__main__":
    main()
