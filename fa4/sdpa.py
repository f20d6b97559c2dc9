"""torch's scaled_dot_product_attention, answered by a kernel where one can and by torch elsewhere.

The layout is torch's, (batch, heads, seqlen, head_dim), and so are the semantics: is_causal is
aligned to the top left corner, where fa4's own functions align to the bottom right. A top-left mask
is that of the first seqlen_q keys alone if there are more keys than queries, and a window with a
right bound of seqlen_q - seqlen_k otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fa4.attention import attend_dense, autocast_dtype, explain_attention, is_traced
from fa4.dispatch import Decision, UnsupportedProblemError, architecture_of, decide
from fa4.kernels.features import TMA_ALIGNMENT
from fa4.problem import DTYPE_NAMES, AttentionProblem


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by a kernel of fa4 where it can be.

    query  (batch, heads, seqlen_q, head_dim)
    key    (batch, heads_kv, seqlen_k, head_dim)      heads_kv differs with enable_gqa only
    value  (batch, heads_kv, seqlen_k, head_dim_v)

    A kernel takes 4-dimensional CUDA tensors without dropout, without a mask or with one of
    `torch.nn.attention.bias` (causal_upper_left, causal_lower_right), that fa4.flash_attn_func
    has a kernel for; the output is then a transposed (batch, seqlen_q, heads, head_dim_v).
    Everything else is torch's own function, with its own errors, and without a warning:
    ``fa4.explain(fa4.scaled_dot_product_attention, query, ...)`` says which of the two answers, and
    why. Inside torch.compile the choice looks at dtypes, head dims and the device alone; what it
    leaves to a kernel that has none for the strides is answered by the reference, with a warning.
    """
    if is_traced(query):
        call = _kernel_call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if not isinstance(call, str) and _is_answered_by_a_kernel(*call.tensors):
            out = attend_dense(*call.tensors, scale, call.causal, call.window_size, "auto")
            return out.transpose(1, 2)
    else:
        plan = plan_key = None
        if attn_mask is None and dropout_p == 0.0:
            try:
                plan_key = (
                    query.shape,
                    key.shape,
                    value.shape,
                    query.dtype,
                    key.dtype,
                    value.dtype,
                    is_causal,
                    enable_gqa,
                    torch.is_autocast_enabled(query.device.type),
                )
                plan = _plans.get(plan_key)
            except (AttributeError, TypeError, RuntimeError):
                pass  # no tensor, or a nested one: torch's to answer or refuse
        if plan is not None:
            causal, window_size, num_keys = plan
            k, v = key, value
            if num_keys is not None:
                k, v = key[:, :, :num_keys], value[:, :, :num_keys]
            tensors = (query.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            try:
                out = attend_dense(*tensors, scale, causal, window_size, "fa4")
                return out.transpose(1, 2)
            except UnsupportedProblemError:
                pass  # strides or addresses that no kernel takes
        is_known = _left_to_torch and _key(query, key, value, is_causal, scale) in _left_to_torch
        if not is_known:
            call = _kernel_call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            if not isinstance(call, str):
                try:
                    out = attend_dense(*call.tensors, scale, call.causal, call.window_size, "fa4")
                except UnsupportedProblemError:
                    _remember(_key(query, key, value, is_causal, scale))
                else:
                    if plan_key is not None and call.tensors[0].dtype == query.dtype:
                        _keep_plan(plan_key, call, key)
                    return out.transpose(1, 2)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@dataclass(frozen=True)
class SdpaDecision:
    """How a call of `scaled_dot_product_attention` is answered; `str` of it is for people.

    backend      "fa4" or "torch"
    kernel_name  the name a profiler shows, None for torch
    reasons      why no kernel answers; empty for a kernel
    problem      what a kernel was or would be asked; None where the call is not of that kind
    """

    backend: str
    kernel_name: str | None
    reasons: tuple[str, ...]
    problem: AttentionProblem | None

    def __str__(self) -> str:
        lines = [] if self.problem is None else [f"problem   {self.problem}"]
        if self.kernel_name is not None:
            lines.append(f"answer    kernel {self.kernel_name}")
        else:
            lines.append("answer    torch's own scaled_dot_product_attention")
            lines += [f"because   {reason}" for reason in self.reasons]
        return "\n".join(lines)


def explain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    arch: str | None = None,
) -> SdpaDecision:
    """How `scaled_dot_product_attention` would answer; runs nothing.

    arch ("sm_90a", ...) asks for another machine than the tensors'.
    """
    call = _kernel_call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if isinstance(call, str):
        return SdpaDecision("torch", None, (call,), None)
    decision: Decision = explain_attention(
        *call.tensors,
        softmax_scale=scale,
        causal=call.causal,
        window_size=call.window_size,
        arch=arch,
    )
    if decision.kernel is None:
        return SdpaDecision("torch", None, decision.reasons, decision.problem)
    return SdpaDecision("fa4", decision.kernel_name, (), decision.problem)


@dataclass(frozen=True)
class _KernelCall:
    """A call of SDPA in the terms of `fa4.flash_attn_func`."""

    tensors: tuple[Tensor, Tensor, Tensor]
    causal: bool
    window_size: tuple[int, int]


def _kernel_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> _KernelCall | str:
    """What to ask of a kernel, or why there is nothing to ask, as a clause.

    Calls that torch refuses have a clause too, so that torch's error is what the caller gets.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return "query, key and value are not all tensors"
    if dropout_p > 0.0:
        return f"dropout_p is {dropout_p}; kernels have no dropout"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            return f"{name} is a nested tensor"
        if tensor.dim() != 4:
            return f"{name} has {tensor.dim()} dimensions; kernels take 4"
    dtype = autocast_dtype(query.device)
    if dtype is not None:
        # As torch casts SDPA under autocast: everything but float64.
        query, key, value = (
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in (query, key, value)
        )
        if query.dtype == torch.float64:
            return "float64 stays what it is under autocast"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPE_NAMES:
        return f"the dtypes are {query.dtype}, {key.dtype} and {value.dtype}"
    if not query.device == key.device == value.device:
        return f"the devices are {query.device}, {key.device} and {value.device}"
    batch, heads_q, seqlen_q, head_dim = query.shape
    heads_kv, seqlen_k = key.shape[1:3]
    if key.shape[0] != batch or value.shape[:3] != key.shape[:3] or key.shape[3] != head_dim:
        return "key and value have other shapes than query: broadcasting is left to torch"
    if heads_q != heads_kv and not enable_gqa:
        return f"query has {heads_q} heads and key {heads_kv}, and enable_gqa is False"
    if not (batch and heads_kv and seqlen_q and seqlen_k and head_dim and value.shape[3]):
        return "a tensor is empty"
    if heads_q % heads_kv:
        return f"{heads_q} query heads are not a multiple of {heads_kv} key heads"
    if attn_mask is not None:
        if is_causal:
            return "both attn_mask and is_causal are given"
        aligned = _causal_bias(attn_mask, seqlen_q, seqlen_k)
        if aligned is None:
            return "attn_mask is given; kernels take no masks but those of torch.nn.attention.bias"
        is_top_left = aligned == "top left"
        if not is_top_left and seqlen_q > seqlen_k:
            return "the causal mask leaves rows without keys, whose output is torch's to define"
    else:
        is_top_left = is_causal
    window_right = -1
    if is_top_left and seqlen_q < seqlen_k:
        # The other keys lie to the right of the last query.
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
    elif is_top_left and seqlen_q > seqlen_k:
        window_right = seqlen_q - seqlen_k
    causal = (is_causal or attn_mask is not None) and window_right == -1
    tensors = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return _KernelCall(tensors, causal, (-1, window_right))


def _causal_bias(attn_mask: Tensor, seqlen_q: int, seqlen_k: int) -> str | None:
    """The corner to which a mask of torch.nn.attention.bias for these lengths is aligned."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (seqlen_q, seqlen_k):
        return None
    return "top left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom right"


# Calls that a kernel has answered, by what `_kernel_call` looks at: its causal, its window, and how
# many keys it keeps where not all.
_plans: dict[Hashable, tuple[bool, tuple[int, int], int | None]] = {}
MAX_PLANS = 4096


def _keep_plan(plan_key: Hashable, call: _KernelCall, key: Tensor) -> None:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    num_keys = call.tensors[1].shape[1]
    _plans[plan_key] = (
        call.causal,
        call.window_size,
        None if num_keys == key.shape[2] else num_keys,
    )


# Calls that were found to have no kernel, by what that depends on: torch answers these at once.
_left_to_torch: set[Hashable] = set()
MAX_LEFT_TO_TORCH = 4096


def _remember(key: Hashable) -> None:
    if len(_left_to_torch) >= MAX_LEFT_TO_TORCH:
        _left_to_torch.clear()
    _left_to_torch.add(key)


def _key(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Hashable:
    """All that a decision for or against a kernel depends on, and a little more."""
    tensors = (query, key, value)
    if not all(isinstance(t, Tensor) for t in tensors):
        return None
    return (
        *((t.shape, t.stride(), t.dtype, t.data_ptr() % TMA_ALIGNMENT) for t in tensors),
        query.device,
        autocast_dtype(query.device),
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        is_causal,
        scale,
    )


# -- torch.compile -------------------------------------------------------------------------------

_HEAD_DIMS = range(8, 257, 8)


def _is_answered_by_a_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for tensors like these, in terms that a tracer can evaluate."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    # Sizes may be symbols; a comparison with each number makes them numbers.
    dims = [d for d in _HEAD_DIMS if d == head_dim], [d for d in _HEAD_DIMS if d == head_dim_v]
    if not (dims[0] and dims[1]):
        return False
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return _device_has_kernel(q.device, q.dtype, dims[0][0], dims[1][0], needs_grad)


def _device_has_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int, needs_grad: bool
) -> bool:
    problem = AttentionProblem(
        dtype=DTYPE_NAMES[dtype],
        batch=1,
        seqlen_q=1,
        seqlen_k=1,
        heads_q=1,
        heads_kv=1,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=1.0,
        needs_grad=needs_grad,
    )
    return decide(problem, *architecture_of(device)).kernel is not None


# What torch.compiler.assume_constant_result does, which loads torch._dynamo: seconds of an import.
setattr(_device_has_kernel, "_dynamo_marked_constant", True)  # noqa: B010  no attribute for mypy
