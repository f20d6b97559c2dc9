"""Which problems are measured: the cases of every script, their work, and their tensors."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fa4
from fa4.problem import AttentionProblem

SEED = 20230717  # of the lengths of varlen mixes and ragged batches, and of all values


@dataclass(frozen=True)
class Case:
    """One problem, self-attention unless the lengths say otherwise.

    lengths_q, lengths_k  rows of each sequence
    page_size             of a paged cache (decode), None for a contiguous one
    is_latent             values are the first head_dim_v columns of the keys (MLA)
    label                 words for the lengths where they differ from sequence to sequence
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    page_size: int | None = None
    is_latent: bool = False
    label: str = ""

    @property
    def batch(self) -> int:
        return len(self.lengths_k)

    @property
    def name(self) -> str:
        """Such as "d128-4k-b4-h16-causal": what --cases looks in, and what plots show."""
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        heads = f"h{self.heads_q}"
        if self.heads_kv != self.heads_q:
            heads += f"k{self.heads_kv}"
        parts = [dims, self.label or short(self.lengths_k[0]), f"b{self.batch}", heads]
        if self.page_size is not None:
            parts.append(f"page{self.page_size}")
        if self.lengths_q == self.lengths_k:
            parts.append("causal" if self.causal else "full")
        return "-".join(parts)

    @property
    def pairs(self) -> float:
        """(query, key) pairs of all heads that a row sees; half of all when causal, as is usual."""
        pairs = sum(q * k for q, k in zip(self.lengths_q, self.lengths_k, strict=True))
        return self.heads_q * pairs * (0.5 if self.causal else 1.0)

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.pairs * (self.head_dim + self.head_dim_v)

    @property
    def backward_flops(self) -> float:
        """Five products: S, dP, dV, dK, dQ."""
        return 2.0 * self.pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    @property
    def kv_bytes(self) -> int:
        """Of 16-bit keys and values, each read once."""
        dims = self.head_dim + (0 if self.is_latent else self.head_dim_v)
        return 2 * sum(self.lengths_k) * self.heads_kv * dims

    def row(self) -> dict[str, object]:
        """The case's columns in a CSV."""
        return {
            "case": self.name,
            "batch": self.batch,
            "seqlen_q": max(self.lengths_q),
            "seqlen_k": max(self.lengths_k),
            "tokens_k": sum(self.lengths_k),
            "heads_q": self.heads_q,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "causal": self.causal,
            "page_size": self.page_size,
        }


def short(rows: int) -> str:
    return f"{rows // 1024}k" if rows % 1024 == 0 else str(rows)


def dense(batch: int, seqlen: int, heads_q: int, heads_kv: int, dim: int, dim_v: int = 0) -> Case:
    lengths = (seqlen,) * batch
    return Case(lengths, lengths, heads_q, heads_kv, dim, dim_v or dim)


def both_masks(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    return tuple(replace(case, causal=causal) for case in cases for causal in (False, True))


FORWARD = both_masks(
    (
        dense(32, 1024, 32, 32, 64),
        dense(4, 4096, 32, 32, 64),
        dense(1, 16384, 32, 32, 64),
        dense(32, 1024, 16, 16, 128),
        dense(4, 4096, 16, 16, 128),
        dense(1, 16384, 16, 16, 128),
        dense(32, 1024, 8, 8, 256),
        dense(4, 4096, 8, 8, 256),
        dense(1, 16384, 8, 8, 256),
        dense(4, 4096, 16, 16, 192, 128),
        dense(4, 4096, 32, 8, 128),
    )
)

BACKWARD = both_masks(
    (
        dense(32, 1024, 32, 32, 64),
        dense(4, 4096, 32, 32, 64),
        dense(1, 16384, 32, 32, 64),
        dense(32, 1024, 16, 16, 128),
        dense(4, 4096, 16, 16, 128),
        dense(1, 16384, 16, 16, 128),
        dense(4, 4096, 32, 8, 128),
        dense(4, 4096, 8, 8, 256),
        dense(1, 16384, 8, 8, 256),
        dense(4, 4096, 16, 16, 192, 128),
    )
)


def drawn_lengths(kind: str, sequences: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Lengths drawn with a fixed seed: "uniform", or "log" with as many from each octave."""
    generator = random.Random(f"{SEED} {kind} {sequences} {longest} {shortest}")
    if kind == "uniform":
        return tuple(generator.randint(shortest, longest) for _ in range(sequences))
    octaves = (longest / shortest) ** 0.5  # geometric middle, then half as far either way
    return tuple(
        round((shortest * longest) ** 0.5 * octaves ** generator.uniform(-1, 1))
        for _ in range(sequences)
    )


def mix(kind: str, sequences: int, heads_q: int, heads_kv: int, dim: int) -> Case:
    lengths = drawn_lengths(kind, sequences, 8192, 128)
    label = f"{kind}128to8k"
    return Case(lengths, lengths, heads_q, heads_kv, dim, dim, label=label)


VARLEN = both_masks(
    (
        mix("uniform", 8, 32, 32, 64),
        mix("log", 16, 32, 32, 64),
        mix("uniform", 8, 16, 16, 128),
        mix("log", 16, 16, 16, 128),
        mix("log", 16, 32, 8, 128),
        mix("log", 16, 8, 8, 256),
    )
)


def decode(
    batch: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    page_size: int | None = None,
) -> Case:
    """One query row a sequence, d128."""
    ones, lengths = (1,) * batch, (seqlen_k,) * batch
    return Case(ones, lengths, heads_q, heads_kv, 128, 128, page_size=page_size)


RAGGED = drawn_lengths("log", 64, 32768, 1)

DECODE = (
    decode(32, 8192, 32, 8),
    decode(32, 8192, 32, 8, page_size=16),
    decode(32, 8192, 32, 8, page_size=1),
    decode(1, 65536, 32, 8),
    decode(128, 4096, 64, 8),
    decode(128, 4096, 64, 8, page_size=64),
    Case((1,) * 64, RAGGED, 32, 8, 128, 128, label="log1to32k"),
    Case((1,) * 64, RAGGED, 32, 8, 128, 128, page_size=64, label="log1to32k"),
    Case((1,) * 128, (4096,) * 128, 128, 1, 576, 512, page_size=64, is_latent=True),
)

SMOKE = both_masks((dense(2, 1024, 8, 8, 64), dense(2, 1024, 8, 2, 128)))


@dataclass
class Inputs:
    """Tensors of a case; (batch, rows, heads, dim), or packed (total, heads, dim).

    For decode q is (batch, 1, heads, dim) and k, v are a cache: (batch, longest, heads, dim), or
    pages (number, page_size, heads, dim) in random order with ``page_table`` (batch, pages).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None = None
    page_table: Tensor | None = None
    cache_seqlens: Tensor | None = None


def input_bytes(case: Case) -> int:
    """Bytes of q, k and v in 16 bits."""
    return 2 * sum(case.lengths_q) * case.heads_q * case.head_dim + case.kv_bytes


def make_inputs(case: Case, device: str, copy: int = 0) -> Inputs:
    """Normal random bf16 values; each copy has its own. On "meta" shapes without values."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(SEED + copy)
    values = functools.partial(
        torch.randn, generator=generator, device=device, dtype=torch.bfloat16
    )
    if case.label and case.lengths_q == case.lengths_k:
        total = sum(case.lengths_k)
        cu_seqlens = list(itertools.accumulate(case.lengths_k, initial=0))
        return Inputs(
            values(total, case.heads_q, case.head_dim),
            values(total, case.heads_kv, case.head_dim),
            values(total, case.heads_kv, case.head_dim_v),
            cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32, device=device),
        )
    q = values(case.batch, case.lengths_q[0], case.heads_q, case.head_dim)
    rows = (case.batch, max(case.lengths_k))
    page_table = None
    if case.page_size is not None:
        pages = [-(-length // case.page_size) for length in case.lengths_k]
        rows = (sum(pages), case.page_size)
        page_table = _page_table(pages, generator, device)
    k = values(*rows, case.heads_kv, case.head_dim)
    if case.is_latent:
        v = k[..., : case.head_dim_v]
    else:
        v = values(*rows, case.heads_kv, case.head_dim_v)
    is_decode = case.lengths_q != case.lengths_k
    lengths = torch.tensor(case.lengths_k, dtype=torch.int32, device=device)
    cache_seqlens = lengths if is_decode else None
    return Inputs(q, k, v, page_table=page_table, cache_seqlens=cache_seqlens)


def problem_of(inputs: Inputs, **options: Any) -> AttentionProblem:
    """What fa4's dispatch sees of a forward case on Hopper; options as of `fa4.flash_attn_func`."""
    cu_seqlens = inputs.cu_seqlens
    return fa4.explain(
        inputs.q, inputs.k, inputs.v, cu_seqlens, cu_seqlens, arch="sm_90a", **options
    ).problem


def _page_table(pages: list[int], generator: torch.Generator | None, device: str) -> Tensor:
    """(batch, most pages) int32; pages lie in random order; entries not in use are 0."""
    order = torch.randperm(sum(pages), generator=generator, device=device, dtype=torch.int32)
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for b, (used, share) in enumerate(zip(pages, order.split(pages), strict=True)):
        table[b, :used] = share
    return table
