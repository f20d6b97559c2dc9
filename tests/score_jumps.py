"""Inputs whose later keys are far likelier than those a kernel meets first.

The Hopper kernel keeps the row maxima of the blocks that it visits first, the last ones of a
sequence, as long as later probabilities stay moderate. These inputs leave that path in each of
the ways there are.
"""

from __future__ import annotations

import torch

from tests.oracle import Inputs

# Score of one key above those around it, in natural units, by key; keys count from the front.
JUMPS: dict[str, dict[int, float]] = {
    "below_the_limit": {300: 9.0},
    "above_the_limit": {300: 12.0, 120: 30.0, 5: 60.0},
    "beyond_fp32": {300: 150.0},
    "again_and_again": {340: 20.0, 200: 95.0, 130: 250.0, 2: 400.0},
}


# Jumps, one a head, around those that fp32 can just hold: 2^126 to 2^128 are 87.3 to 88.7, and what
# they are counted from is up to four above the scores around it.
EDGES = [84.0 + 0.25 * i for i in range(36)]


def raise_scores_to_the_edge(inputs: Inputs) -> None:
    """`raise_scores` of one key by another of `EDGES` for each of as many heads."""
    raise_scores(inputs, {})
    for head, jump in enumerate(EDGES):
        one_head = slice(head, head + 1)
        inputs.q[:, :, one_head, 0] = 1
        inputs.k[:, 20, one_head, 0] = jump / inputs.q.shape[-1] ** -0.5


def raise_scores(inputs: Inputs, jumps: dict[int, float], heads: slice = slice(None)) -> None:
    """Make some keys of dense inputs score ``jumps`` higher, for a random third of the rows.

    A further third of the rows gets half of it, the others nothing. Lost is the first component
    of queries and keys.
    """
    q, k = inputs.q, inputs.k
    scale = q.shape[-1] ** -0.5
    share = torch.randint(0, 3, q.shape[:-1], device=q.device) / 2
    q[..., 0] = 0
    q[:, :, heads, 0] = share.to(q.dtype)[:, :, heads]
    k[..., 0] = 0
    for key, jump in jumps.items():
        k[:, key, :, 0] = jump / scale
