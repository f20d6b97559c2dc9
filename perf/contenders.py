"""Who is measured: fa4 and every other forward attention that can be imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4
from fa4.versions import installed_version

Forward = Callable[[Tensor, Tensor, Tensor, bool], Any]


def forward_contenders() -> dict[str, Forward]:
    """Name with version -> forward(q, k, v, causal) of (batch, seqlen, heads, dim) tensors."""
    found: dict[str, Forward] = {"fa4": _fa4}
    try:
        from flash_attn.cute import flash_attn_func as flash_attn_4
    except ImportError:
        pass  # not installed: the table has no column for it
    else:
        version = installed_version("flash-attn-4")
        found[f"flash-attn-4 {version}"] = lambda q, k, v, causal: flash_attn_4(
            q, k, v, causal=causal
        )
    torch_version = torch.__version__
    found[f"cuDNN by SDPA, torch {torch_version}"] = _sdpa(SDPBackend.CUDNN_ATTENTION)
    found[f"SDPA flash, torch {torch_version}"] = _sdpa(SDPBackend.FLASH_ATTENTION)
    return found


def _fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return fa4.flash_attn_func(q, k, v, causal=causal, backend="fa4")


def _sdpa(backend: SDPBackend) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                *heads_first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            )

    return forward
