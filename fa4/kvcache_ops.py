"""Attention over a key/value cache as operators of torch: what tracers and compiled graphs contain.

    torch.ops.fa4.kvcache_attention(q, k_cache, v_cache, ...) -> (out, lse)
    torch.ops.fa4.kvcache_attention_out(out, q, k_cache, v_cache, ...) -> lse; writes out
    torch.ops.fa4.kvcache_append_attention(q, k_cache, v_cache, k, v, ...) -> (out, lse)
    torch.ops.fa4.kvcache_append_attention_out(out, q, k_cache, v_cache, k, v, ...) -> lse

The arguments are those of `fa4.flash_attn_with_kvcache`, which turns into these where torch traces
it: the window as two integers (-1 is unbounded), cache_seqlens as a tensor or cache_length as one
integer for all. The append operators write k and v into the caches. For inference: none of them has
a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4.autograd import without_autocast
from fa4.kvcache import flash_attn_with_kvcache
from fa4.ops import lse_like

_VECTORS = ", ".join(
    f"Tensor? {name}=None"
    for name in (
        "cache_seqlens",
        "cache_batch_idx",
        "cache_leftpad",
        "page_table",
        "cu_seqlens_q",
    )
)
_NEW_VECTORS = ", ".join(
    f"Tensor? {name}=None"
    for name in ("rotary_cos", "rotary_sin", "cu_seqlens_k_new", "rotary_seqlens")
)
_OPTIONS = (
    "SymInt? cache_length=None, SymInt? max_seqlen_q=None, Tensor? sink=None, "
    "float? softmax_scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, "
    'float softcap=0.0, SymInt num_splits=0, str backend="auto", str? arch=None'
)


def _run(out: Tensor | None, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """(out, lse) by the public function, in the terms of an operator."""
    length = options.pop("cache_length", None)
    if length is not None:
        if options.get("cache_seqlens") is not None:
            raise ValueError(f"cache_length={length} and cache_seqlens are both given.")
        options["cache_seqlens"] = length
    window_size = (options.pop("window_left", -1), options.pop("window_right", -1))
    with without_autocast(tensors[0].device):
        return flash_attn_with_kvcache(
            *tensors, window_size=window_size, out=out, return_lse=True, **options
        )


def _define(name: str, appends: bool, has_out: bool) -> Callable[..., Any]:
    """Make an operator, which calls `flash_attn_with_kvcache`, and what it does to fake tensors."""
    caches = (
        "Tensor(b!) k_cache, Tensor(c!) v_cache" if appends else "Tensor k_cache, Tensor v_cache"
    )
    parts = [
        *(["Tensor(a!) out"] if has_out else []),
        f"Tensor q, {caches}",
        *(["Tensor k, Tensor v"] if appends else []),
        _VECTORS,
        *([_NEW_VECTORS, "bool rotary_interleaved=True"] if appends else []),
        _OPTIONS,
    ]
    schema = f"({', '.join(parts)}) -> {'Tensor' if has_out else '(Tensor, Tensor)'}"
    mutated = (*(("out",) if has_out else ()), *(("k_cache", "v_cache") if appends else ()))
    num_tensors = 3 + 2 * appends
    names = [a.name for a in torch._C.parse_schema(f"fa4::{name}{schema}").arguments]
    option_names = names[has_out + num_tensors :]

    def split(
        arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Tensor | None, tuple[Tensor, ...], dict[str, Any]]:
        out = arguments[0] if has_out else None
        tensors, others = arguments[has_out:][:num_tensors], arguments[has_out:][num_tensors:]
        return out, tensors, dict(zip(option_names, others, strict=False)) | keywords

    def implementation(*arguments: Any, **keywords: Any) -> Any:
        out, tensors, options = split(arguments, keywords)
        result, lse = _run(out, tensors, options)
        lse = lse.contiguous()
        return lse if has_out else (result.contiguous(), lse)

    def fake(*arguments: Any, **keywords: Any) -> Any:
        _, tensors, options = split(arguments, keywords)
        q, _, v_cache = tensors[:3]
        lse = lse_like(q, options.get("cu_seqlens_q"))
        return lse if has_out else (q.new_empty((*q.shape[:-1], v_cache.shape[-1])), lse)

    operator = torch.library.custom_op(
        f"fa4::{name}", implementation, mutates_args=mutated, schema=schema
    )
    operator.register_fake(fake)
    return operator


for _appends in (False, True):
    for _has_out in (False, True):
        _define(
            f"kvcache_{'append_' if _appends else ''}attention{'_out' if _has_out else ''}",
            _appends,
            _has_out,
        )
