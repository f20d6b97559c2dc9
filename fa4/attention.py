"""The public attention functions: options, defaults, and the path of a call.

    arguments -> AttentionProblem (fa4.problem) -> Decision (fa4.dispatch)
              -> kernel (fa4.compiler) -> launch (fa4.launch), or the reference (fa4.reference)

The path is walked once for each combination of shapes, strides, dtypes and options; later calls
find its end in a table, so that an inference call costs a few microseconds of host time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4.checked_mode import check_varlen, is_checked
from fa4.dispatch import (
    Decision,
    UnsupportedProblemError,
    architecture_of,
    decide,
    warn_of_fallback,
)
from fa4.launch import ForwardLaunch
from fa4.problem import DTYPE_NAMES, AttentionProblem, describe_problem
from fa4.reference import attention_reference

BACKENDS = ("auto", "fa4", "reference")
Window = Sequence[int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
    alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of dense batches: softmax(scale * q k^T) v for each head.

    q     (batch, seqlen_q, heads_q, head_dim)     bf16, fp16; fp32 and fp64 by the reference
    k     (batch, seqlen_k, heads_kv, head_dim)    heads_q a multiple of heads_kv (MHA, GQA, MQA)
    v     (batch, seqlen_k, heads_kv, head_dim_v)
    any strides with a unit last one and the others multiples of 16 bytes; nothing is copied

    softmax_scale   any finite real; None is 1/sqrt(head_dim)
    causal          query i sees key j only if j <= i + seqlen_k - seqlen_q (bottom-right aligned)
    window_size     (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to
                    i + seqlen_k - seqlen_q + right, both included; -1 and None are unbounded.
                    Applies together with causal
    softcap         positive: scores x become softcap * tanh(x / softcap); 0 or None: off
    sink            (heads_q,) learnable logits that join the softmax denominator and the LSE;
                    neither scaled nor capped
    deterministic   equal bits in every run; the forward pass always has them
    return_lse      also return lse (batch, heads_q, seqlen_q): log of the softmax denominator,
                    natural, fp32 (fp64 for fp64 inputs)
    out             (batch, seqlen_q, heads_q, head_dim_v) written in place and returned
    backend         "auto": the kernel for this problem, or the PyTorch reference with one warning
                    that says why; "fa4": the kernel, or UnsupportedProblemError with the reasons;
                    "reference": the reference
    dropout_p, alibi_slopes, return_attn_probs: flash-attn's names of what is not supported; only
                    the defaults are accepted

    A row that sees no key has output 0 and LSE -inf. Keys and values that no query sees are never
    read. Raises TypeError or ValueError, before any launch, naming the argument at fault.
    Method: Dao 2023 (FlashAttention-2); on Hopper Shah et al. 2024 (FlashAttention-3).
    """
    return _attend(
        _DENSE,
        (
            softmax_scale,
            causal,
            tuple(window_size) if type(window_size) is list else window_size,
            softcap,
            dropout_p,
            deterministic,
            backend,
            alibi_slopes,
            return_attn_probs,
        ),
        q,
        k,
        v,
        sink,
        out,
        return_lse,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
    alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of sequences with lengths of their own; options as in `flash_attn_func`.

    q             (total_q, heads_q, head_dim) packed if cu_seqlens_q is given, else dense
    k, v          (total_k, heads_kv, head_dim[_v]) packed if cu_seqlens_k is given, else dense
    cu_seqlens_q  (batch + 1,) int32: sequence i has the rows cu[i] to cu[i+1] - 1; starts at 0
    cu_seqlens_k  likewise for keys
    seqused_q     (batch,) int32: only the first so many rows of each sequence are in use
    seqused_k     likewise for keys
    max_seqlen_q, max_seqlen_k
                  accepted for compatibility: upper bounds of the lengths. The kernels need no
                  bound; checked mode refuses one that is too small

    Lengths are read on the device, never by the host. Rows of padding (behind the used part of a
    sequence, behind the last sequence) are not read; they get output 0 and LSE -inf, or are left
    alone in a caller's ``out``. Masks are aligned by the lengths in use.
    LSE of packed queries is (heads_q, total_q).

    The contents of the length tensors are trusted; `fa4.checked` validates them. block_table is
    flash-attn's name of what is not supported yet.
    """
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if bound is not None and (type(bound) is not int or bound < 0):
            _check_max_seqlen(name, bound)
    if block_table is not None:
        raise NotImplementedError("block_table is given, but paged keys are not built yet.")
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if is_checked():
        check_varlen(
            q=q,
            k=k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **lengths._asdict(),
        )
    return _attend(
        lengths,
        (
            softmax_scale,
            causal,
            tuple(window_size) if type(window_size) is list else window_size,
            softcap,
            dropout_p,
            deterministic,
            backend,
            alibi_slopes,
            return_attn_probs,
        ),
        q,
        k,
        v,
        sink,
        out,
        return_lse,
    )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    arch: str | None = None,
    **options: Any,
) -> Decision:
    """How a call of `flash_attn_func` or `flash_attn_varlen_func` would be answered; runs nothing.

    Takes the arguments of either. arch ("sm_90a", ...) asks for another machine than the tensors'.
    """
    options.pop("return_lse", None)
    for unsupported in ("block_table",):
        if options.pop(unsupported, None) is not None:
            raise NotImplementedError(f"{unsupported} is given, but it is not built yet.")
    unknown = set(options) - set(_Options._fields)
    if unknown:
        raise TypeError(f"explain() got unexpected arguments: {', '.join(sorted(unknown))}.")
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return _decide(lengths, _Options(**options), q, k, v, sink, out, arch)


class _Lengths(NamedTuple):
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


class _Options(NamedTuple):
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    softcap: float | None = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    backend: str = "auto"
    alibi_slopes: Tensor | None = None
    return_attn_probs: bool = False


_DENSE = _Lengths()

# Ends of the path, by what the walk looks at. Emptied when full: shapes that keep changing cost
# the walk.
_launches: dict[tuple[Any, ...], ForwardLaunch] = {}
MAX_LAUNCHES = 4096


def _attend(
    lengths: _Lengths,
    options: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor | None,
    wants_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Answer a call: by a launch that is known already, else by walking the path.

    options  the fields of `_Options`
    """
    launch = key = None
    try:
        key = (
            options,
            q.shape,
            q.stride(),
            k.shape,
            k.stride(),
            v.shape,
            v.stride(),
            q.dtype,
            q.device,
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            None if sink is None else (sink.shape, sink.dtype, sink.requires_grad),
            None if out is None else (out.shape, out.stride()),
            None if lengths is _DENSE else tuple(None if t is None else t.shape for t in lengths),
            torch.is_autocast_enabled(),
        )
        launch = _launches.get(key)
    except (AttributeError, TypeError):
        pass  # something is no tensor, or cannot be hashed: the walk says what
    if launch is not None:
        try:
            result, lse = launch(q, k, v, out, lengths, sink, wants_lse)
            return (result, lse) if wants_lse else result
        except (TypeError, ValueError, RuntimeError):
            # The compiled function checks what the key leaves out: dtypes of k and v, devices,
            # alignment. The walk has a better message, or another answer, or meets the same error.
            pass
    result, lse = _walk(key, lengths, _Options(*options), q, k, v, sink, out, wants_lse)
    return (result, lse) if wants_lse else result


def _walk(
    key: tuple[Any, ...] | None,
    lengths: _Lengths,
    options: _Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor | None,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """The whole path for one call; keeps its end under ``key``."""
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        if any(isinstance(t, Tensor) and t.dtype != dtype for t in (q, k, v)):
            # Floating-point inputs take the autocast dtype, as in torch's SDPA. What is launched
            # are the copies, so it is not for the key of these tensors.
            q, k, v = (t.to(dtype) if t.dtype in DTYPE_NAMES else t for t in (q, k, v))
            key = None
    decision = _decide(lengths, options, q, k, v, sink, out)
    if decision.kernel is None:
        return _by_reference(decision, lengths, options, q, k, v, sink, out)
    launch = ForwardLaunch(decision.problem, decision.kernel, q)
    if key is not None:
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    return launch(q, k, v, out, lengths, sink, wants_lse)


def _decide(
    lengths: _Lengths,
    options: _Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor | None,
    arch: str | None = None,
) -> Decision:
    """Check the arguments and choose; see `fa4.problem` and `fa4.dispatch`."""
    if options.dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p={options.dropout_p} is not supported; it must be 0.")
    if options.alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is given, but ALiBi is not supported.")
    if options.return_attn_probs:
        raise NotImplementedError("return_attn_probs is not supported; return_lse=True is.")
    if options.backend not in BACKENDS:
        raise ValueError(
            f"backend={options.backend!r} is not one of {', '.join(map(repr, BACKENDS))}."
        )
    inputs = [t for t in (q, k, v, sink) if t is not None]
    problem = describe_problem(
        q,
        k,
        v,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window_size=options.window_size,
        softcap=options.softcap,
        sink=sink,
        out=out,
        needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in inputs),
        **lengths._asdict(),
    )
    if options.backend == "reference":
        return Decision(problem, "reference", reasons=('backend="reference" was asked for',))
    if arch is None:
        decision = decide(problem, *architecture_of(q.device))
    else:
        decision = decide(problem, arch, arch)
    return decision


def _by_reference(
    decision: Decision,
    lengths: _Lengths,
    options: _Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    problem = decision.problem
    if options.backend == "fa4" and problem.has_queries and problem.has_keys:
        raise UnsupportedProblemError(
            f"no fa4 kernel answers this problem: {'; '.join(decision.reasons)}. ({problem})"
        )
    if options.backend == "auto":
        warn_of_fallback(decision)
    if problem.has_keys or problem.needs_grad:
        result, lse = attention_reference(
            q,
            k,
            v,
            softmax_scale=problem.softmax_scale,
            causal=options.causal,
            window_size=options.window_size,
            softcap=options.softcap,
            sink=sink,
            **lengths._asdict(),
        )
    else:
        # The answer is known without reading lengths, which would wait for the device.
        result = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
        rows, heads = q.shape[-3:-1]
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.full(
            (heads, rows) if problem.packed_q else (problem.batch, heads, rows),
            -torch.inf,
            dtype=lse_dtype,
            device=q.device,
        )
    if out is None:
        return result, lse
    in_use = _query_rows_in_use(problem, lengths, q.device)
    if in_use is not None:
        result = torch.where(in_use[..., None, None], result, out)
    return out.copy_(result), lse


def _query_rows_in_use(
    problem: AttentionProblem, lengths: _Lengths, device: torch.device
) -> Tensor | None:
    """Which rows of q are no padding, in the layout of q's row modes; None if all are."""
    rows = torch.arange(problem.seqlen_q, device=device)
    if not problem.packed_q:
        if lengths.seqused_q is None:
            return None
        return rows < lengths.seqused_q[:, None]
    cu_seqlens = lengths.cu_seqlens_q
    assert cu_seqlens is not None
    if problem.batch == 0:
        return torch.zeros_like(rows, dtype=torch.bool)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if lengths.seqused_q is not None:
        ends = starts + lengths.seqused_q
    member = torch.searchsorted(cu_seqlens[1:].contiguous(), rows.int(), right=True)
    member = member.clamp(max=problem.batch - 1)
    return (rows >= starts[member]) & (rows < ends[member])


def _check_max_seqlen(name: str, bound: Any) -> None:
    if isinstance(bound, Tensor):
        raise TypeError(f"{name} must be an int, got a tensor; reading it would wait for the GPU.")
    try:
        value = operator.index(bound)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(bound).__name__}.") from None
    if value < 0:
        raise ValueError(f"{name}={value} is negative.")
