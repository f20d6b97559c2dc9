"""flash-attn-4's forward with packed sequences, used lengths and paged keys.

Run as `python -m tests.emulator.flash_attn_4_lengths ARCH CASE [races]`, with the number of a case
in `CASES`; see flash_attn_4.py.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tests.emulator.flash_attn_4 import replace_compilers
from tests.emulator.gpu_stand_in import MULTIPROCESSORS, OnGpu
from tests.oracle import Case, Inputs, assert_matches, make_inputs

# A page of 128 keys is a tile, which TMA loads; smaller pages are gathered by cp.async.
CASES: list[tuple[Case, int | None]] = [
    (Case((40, 130), (100, 200), 4, 1, 128, causal=True, packed_q=True, packed_k=True), None),
    (Case((90, 90), (160, 160), 2, 2, 64, used_q=(90, 33), used_k=(160, 41)), None),
    (Case((100,), (256,), 4, 1, 128, causal=True, used_k=(230,)), 128),
    (Case((100,), (256,), 4, 1, 128, causal=True, used_k=(230,)), 16),
]


def paged(x: torch.Tensor, page_size: int, table: torch.Tensor) -> torch.Tensor:
    """Rows (1, seqlen, heads, dim) as (pages, page_size, heads, dim), page i at table[0, i]."""
    pages = torch.empty(x.shape[1] // page_size, page_size, *x.shape[2:], dtype=x.dtype)
    pages[table[0].long()] = x[0].unflatten(0, (-1, page_size))
    return pages


def forward(inputs: Inputs, page_size: int | None) -> None:
    """Raises AssertionError unless the output is right."""
    from flash_attn.cute import interface

    # The kernels multiply rows that no query sees by zeros.
    k, v = inputs.k.nan_to_num(1.0), inputs.v.nan_to_num(1.0)
    options: dict[str, Any] = dict(inputs.lengths)
    if inputs.case.packed_q:
        options["max_seqlen_q"] = max(inputs.case.seqlens_q)
    if page_size is not None:
        table = torch.randperm(k.shape[1] // page_size).int()[None]
        k, v = paged(k, page_size, table), paged(v, page_size, table)
        options["page_table"] = table
    with OnGpu():
        out, lse, *_ = interface._flash_attn_fwd(
            inputs.q.nan_to_num(1.0), k, v, causal=inputs.case.causal, return_lse=True, **options
        )
    padding = inputs.q[..., 0, 0].isnan()
    out[padding] = 0
    lse.movedim(-2, -1)[padding] = -torch.inf
    assert_matches(out, lse, inputs)


def main() -> None:
    arch, number, *options = sys.argv[1:]
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(MULTIPROCESSORS)
    replace_compilers(arch, "races" in options)
    case, page_size = CASES[int(number)]
    forward(make_inputs(case), page_size)
    print("matches")


if __name__ == "__main__":
    main()
