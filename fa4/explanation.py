"""Which kernel answers a call, or why none does: one function for every public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from torch import Tensor

from fa4.attention import explain_attention, flash_attn_func, flash_attn_varlen_func
from fa4.dispatch import Decision
from fa4.kvcache import explain_kvcache, flash_attn_with_kvcache
from fa4.kvcache_launch import KVCacheDecision
from fa4.sdpa import SdpaDecision, explain_sdpa, scaled_dot_product_attention

_EXPLAINERS: dict[Callable[..., Any], Callable[..., Any]] = {
    flash_attn_func: explain_attention,
    flash_attn_varlen_func: explain_attention,
    flash_attn_with_kvcache: explain_kvcache,
    scaled_dot_product_attention: explain_sdpa,
}


@overload
def explain(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Decision: ...


@overload
def explain(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any
) -> Decision | KVCacheDecision | SdpaDecision: ...


def explain(*call: Any, **options: Any) -> Any:
    """How a call would be answered; runs nothing. `str` of the result is a text for people.

    explain(q, k, v, ...)             a call of `flash_attn_func` or `flash_attn_varlen_func`
    explain(function, q, k, v, ...)   a call of that public function, for example of
                                      `flash_attn_with_kvcache`, `scaled_dot_product_attention`

    Takes the arguments of the call itself. arch ("sm_90a", ...) asks for another machine than the
    tensors', with any backend.
    """
    if not call or isinstance(call[0], Tensor) or not callable(call[0]):
        return explain_attention(*call, **options)
    function, *arguments = call
    if function not in _EXPLAINERS:
        names = ", ".join(known.__name__ for known in _EXPLAINERS)
        raise ValueError(f"explain knows calls of {names}, not of {function!r}.")
    return _EXPLAINERS[function](*arguments, **options)
