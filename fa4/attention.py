"""The public attention functions: options, defaults, and the path of a call.

    arguments -> AttentionProblem (fa4.problem) -> Decision (fa4.dispatch)
              -> kernel (fa4.compiler) -> launch (fa4.launch), or the reference (fa4.reference)

The path is walked once for each combination of shapes, strides, dtypes and options; later calls
find its end in a table, so that an inference call costs a few microseconds of host time. Calls
that want gradients become a node of autograd's graph (fa4.autograd) at its end. Calls that torch
traces instead of running (torch.compile, fake tensors, dispatch modes) become one of the operators
of fa4.ops, which take the path when the traced program runs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa4.autograd import BackwardOptions, Forward, differentiable
from fa4.checked_mode import check_varlen, is_checked
from fa4.dispatch import (
    Decision,
    UnsupportedProblemError,
    architecture_of,
    decide,
    warn_of_fallback,
)
from fa4.launch import ForwardLaunch, Lengths, result_shapes
from fa4.problem import DTYPE_NAMES, AttentionProblem, describe_problem
from fa4.reference import attention_reference

# Dispatch modes that are active, such as fake tensors, flop counters, selective checkpointing.
_num_dispatch_modes = torch._C._len_torch_dispatch_stack

# Asked once: torch.compile of torch 2.11 cannot trace the question.
_AUTOCAST_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
)

BACKENDS = ("auto", "fa4", "reference", "emulator")
EMULATED_ARCH = "sm_90a"  # by default
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
    arch: str | None = None,
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
    deterministic   equal bits in every run, gradients too; the forward pass always has them. So
                    does torch.use_deterministic_algorithms
    return_lse      also return lse (batch, heads_q, seqlen_q): log of the softmax denominator,
                    natural, fp32 (fp64 for fp64 inputs)
    out             (batch, seqlen_q, heads_q, head_dim_v) written in place and returned; it must
                    not overlap k or v. Refused where gradients are wanted
    backend         "auto": the kernel for this problem, or the PyTorch reference with one warning
                    that says why; "fa4": the kernel, or UnsupportedProblemError with the reasons;
                    "reference": the reference; "emulator": the kernel of ``arch``, executed on
                    the CPU by `fa4.emulator` (CPU tensors, small problems)
    arch            the architecture to emulate, "sm_90a" by default; only with "emulator"
    dropout_p, alibi_slopes, return_attn_probs: flash-attn's names of what is not supported; only
                    the defaults are accepted

    A row that sees no key has output 0 and LSE -inf. Keys and values that no query sees are never
    read. Differentiable once in q, k, v and sink, through out and lse; NotImplementedError for a
    second time. Under torch.compile and other tracers the call is an operator of `fa4.ops`.
    Raises TypeError or ValueError, before any launch, naming the argument at fault.
    Method: Dao 2023 (FlashAttention-2); on Hopper Shah et al. 2024 (FlashAttention-3).
    """
    if dropout_p != 0.0 or alibi_slopes is not None or return_attn_probs:
        _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    return _attend(
        q,
        k,
        v,
        None,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sink,
        out,
        backend,
        arch,
        return_lse,
        deterministic,
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
    arch: str | None = None,
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
    if dropout_p != 0.0 or alibi_slopes is not None or return_attn_probs or block_table is not None:
        _refuse(
            dropout_p=dropout_p,
            alibi_slopes=alibi_slopes,
            return_attn_probs=return_attn_probs,
            block_table=block_table,
        )
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    # Contents of lengths that are traced can only be checked when the traced program runs.
    if not is_dynamo_compiling() and is_checked() and not is_traced(q):
        check_varlen(
            q=q,
            k=k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **lengths._asdict(),
        )
    return _attend(
        q,
        k,
        v,
        lengths,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sink,
        out,
        backend,
        arch,
        return_lse,
        deterministic,
        max_seqlen_q,
        max_seqlen_k,
    )


def explain_attention(
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
    arch: str | None = None,
    alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Decision:
    """How a call of `flash_attn_func` or `flash_attn_varlen_func` would be answered; runs nothing.

    Takes the arguments of either. arch ("sm_90a", ...) asks for another machine than the tensors',
    with any backend.
    """
    _refuse(
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_attn_probs=return_attn_probs,
        block_table=block_table,
    )
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options = _Options(softmax_scale, causal, window_size, softcap, backend, arch, deterministic)
    q, k, v = _autocast(q, k, v) or (q, k, v)
    return _decide(q, k, v, lengths, options, sink, out)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    backend: str,
) -> Tensor:
    """The output of `flash_attn_func` for the options that torch's SDPA has."""
    out = _attend(
        q,
        k,
        v,
        None,
        softmax_scale,
        causal,
        window_size,
        0.0,
        None,
        None,
        backend,
        None,
        False,
        False,
    )
    assert isinstance(out, Tensor)
    return out


class _Options(NamedTuple):
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float | None
    backend: str
    arch: str | None
    deterministic: bool


# Ends of the path, by what the walk looks at. Emptied when full: shapes that keep changing cost
# the walk.
_launches: dict[tuple[Any, ...], ForwardLaunch] = {}
MAX_LAUNCHES = 4096


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float | None,
    sink: Tensor | None,
    out: Tensor | None,
    backend: str,
    arch: str | None,
    wants_lse: bool,
    deterministic: bool,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Answer a call: by a launch that is known already, else by walking the path.

    Every look at a tensor costs a tenth of a microsecond or two here, so the key holds no more
    than it must.
    """
    # `is_traced` written out, which saves its call.
    if is_dynamo_compiling() or (type(q) is not Tensor and is_traced(q)) or _num_dispatch_modes():
        options = _Options(
            softmax_scale, causal, window_size, softcap, backend, arch, deterministic
        )
        bounds = (max_seqlen_q, max_seqlen_k)
        result, lse = _by_operator(q, k, v, lengths or Lengths(), bounds, options, sink, out)
        return (result, lse) if wants_lse else result
    launch = key = None
    needs_grad = False
    try:
        needs_grad = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sink is not None and sink.requires_grad)
        )
        key = (
            q.shape,
            k.shape,
            v.shape,
            None
            if q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
            else (q.stride(), k.stride(), v.stride()),
            q.dtype,
            q.device,
            needs_grad,
            softmax_scale,
            causal,
            window_size,
            softcap,
            backend,
            arch,
            sink if sink is None else (sink.shape, sink.dtype),
            out if out is None else (out.shape, out.stride(), out.requires_grad),
            lengths and tuple(None if t is None else t.shape for t in lengths),
        )
        launch = _launches.get(key)
    except (AttributeError, TypeError):
        pass  # something is no tensor, or a window is a list: the walk sees to it
    if launch is not None:
        try:
            if needs_grad:
                backward = BackwardOptions(deterministic, backend, arch)
                result, lse = differentiable(
                    launch, launch.problem, backward, q, k, v, lengths, sink
                )
            else:
                result, lse = launch(q, k, v, lengths, sink, out, wants_lse)
            return (result, lse) if wants_lse else result
        except (TypeError, ValueError, RuntimeError):
            # The compiled function checks what the key leaves out: dtypes of k and v, devices,
            # alignment. The walk has a better message, or another answer, or meets the same error.
            pass
    options = _Options(softmax_scale, causal, window_size, softcap, backend, arch, deterministic)
    result, lse = _walk(q, k, v, lengths or Lengths(), options, sink, out, wants_lse, key)
    return (result, lse) if wants_lse else result


def _walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: _Options,
    sink: Tensor | None,
    out: Tensor | None,
    wants_lse: bool,
    key: tuple[Any, ...] | None,
) -> tuple[Tensor, Tensor]:
    """The whole path for one call; keeps its end under ``key`` if that is a launch."""
    if options.arch is not None and options.backend != "emulator":
        raise ValueError(
            f'arch={options.arch!r} is for backend="emulator", not {options.backend!r}.'
        )
    cast = _autocast(q, k, v)
    if cast is not None:
        # What is launched are copies, so it is not for the key of these tensors.
        (q, k, v), key = cast, None
    decision = _decide(q, k, v, lengths, options, sink, out)
    if decision.kernel is None:
        return _by_reference(decision, q, k, v, lengths, options, sink, out)
    forward: Forward
    if options.backend == "emulator":
        forward = functools.partial(_emulate, decision)
    else:
        forward = ForwardLaunch(decision.problem, decision.kernel, q)
        if key is not None:
            if len(_launches) >= MAX_LAUNCHES:
                _launches.clear()
            _launches[key] = forward
    if decision.problem.needs_grad:
        backward = BackwardOptions(options.deterministic, options.backend, options.arch)
        return differentiable(forward, decision.problem, backward, q, k, v, lengths, sink)
    return forward(q, k, v, lengths, sink, out, wants_lse)


def is_traced(q: Tensor) -> bool:
    """Whether torch records what happens to a tensor instead of, or beside, doing it."""
    return (
        is_dynamo_compiling()
        or (isinstance(q, Tensor) and type(q).__torch_dispatch__ != Tensor.__torch_dispatch__)
        or _num_dispatch_modes() > 0
    )


def _by_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    max_seqlens: tuple[int | None, int | None],
    options: _Options,
    sink: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Leave the call to an operator of `fa4.ops`, which a tracer can write down."""
    q, k, v = _autocast(q, k, v) or (q, k, v)
    left, right = options.window_size
    arguments = (
        *lengths,
        *max_seqlens,
        sink,
        options.softmax_scale,
        options.causal,
        -1 if left is None else left,
        -1 if right is None else right,
        options.softcap or 0.0,
        options.deterministic,
        options.backend,
        options.arch,
    )
    if out is None:
        return torch.ops.fa4.attention_forward(q, k, v, *arguments)
    if _wants_grad(q, k, v, sink):
        _refuse_out()
    return out, torch.ops.fa4.attention_forward_out(out, q, k, v, *arguments)


def answer_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    out: Tensor | None,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) for an operator of `fa4.ops` that runs; the operator sees to gradients."""
    result = _attend(
        q,
        k,
        v,
        lengths if any(t is not None for t in lengths) else None,
        softmax_scale,
        causal,
        (window_left, window_right),
        softcap,
        sink,
        out,
        backend,
        arch,
        True,
        deterministic,
    )
    assert isinstance(result, tuple)
    return result


def problem_of_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> AttentionProblem:
    """The problem whose gradients an operator of `fa4.ops` computes."""
    return describe_problem(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sink=sink,
        out=None,
        needs_grad=True,
        **lengths._asdict(),
    )


def _wants_grad(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in inputs
    )


def _refuse_out() -> NoReturn:
    raise ValueError(
        "out is given, and gradients are asked for: an output written in place has none. "
        "Call without out, or inside torch.no_grad()."
    )


def _emulate(
    decision: Decision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    out: Tensor | None,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the chosen kernel on the emulated device."""
    if q.device.type != "cpu":
        raise ValueError(f'q is on {q.device}; backend="emulator" takes CPU tensors.')
    try:
        from fa4.emulator import emulate_forward
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f'backend="emulator" needs {missing.name}: pip install "fa4-kernels[emulator]".'
        ) from missing
    return emulate_forward(decision, q, k, v, lengths, sink, out, wants_lse)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Inside torch.autocast q, k and v in its dtype, as in torch's SDPA; None where they may stay.

    Inputs that all have one 16-bit dtype stay in it.
    """
    if not all(isinstance(t, Tensor) and t.dtype in DTYPE_NAMES for t in (q, k, v)):
        return None
    dtype = autocast_dtype(q.device)
    if dtype is None or {q.dtype, k.dtype, v.dtype} in ({torch.bfloat16}, {torch.float16}):
        return None
    return q.to(dtype), k.to(dtype), v.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on a device, None where it is off."""
    kind = device.type
    if kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _refuse(**given: Any) -> None:
    """Refuse arguments whose values would change the result but are not supported."""
    allowed = {
        "dropout_p": (0.0, "dropout is not supported; it must be 0"),
        "alibi_slopes": (None, "ALiBi is not supported; it must be None"),
        "return_attn_probs": (False, "it must be False; return_lse=True returns the LSE"),
        "block_table": (None, "paged keys are not built yet; it must be None"),
    }
    for name, value in given.items():
        default, reason = allowed[name]
        if value is not default and (isinstance(value, Tensor) or value != default):
            what = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {what}: {reason}.")


def _decide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: _Options,
    sink: Tensor | None,
    out: Tensor | None,
) -> Decision:
    """Check the arguments and choose; see `fa4.problem` and `fa4.dispatch`."""
    if options.backend not in BACKENDS:
        raise ValueError(
            f"backend={options.backend!r} is not one of {', '.join(map(repr, BACKENDS))}."
        )
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
        needs_grad=_wants_grad(q, k, v, sink),
        **lengths._asdict(),
    )
    if problem.needs_grad and out is not None:
        _refuse_out()
    if options.backend == "reference":
        return Decision(problem, "reference", reasons=('backend="reference" was asked for',))
    arch = options.arch
    if arch is None and options.backend == "emulator":
        arch = EMULATED_ARCH
    if arch is None:
        return decide(problem, *architecture_of(q.device))
    return decide(problem, arch, arch)


def _by_reference(
    decision: Decision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: _Options,
    sink: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    problem = decision.problem
    if options.backend in ("fa4", "emulator") and problem.has_queries and problem.has_keys:
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
        out_shape, lse_shape = result_shapes(problem)
        result = q.new_zeros(out_shape)
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.full(lse_shape, -torch.inf, dtype=lse_dtype, device=q.device)
    if out is None:
        return result, lse
    in_use = _query_rows_in_use(problem, lengths, q.device)
    if in_use is not None:
        result = torch.where(in_use[..., None, None], result, out)
    return out.copy_(result), lse


def _query_rows_in_use(
    problem: AttentionProblem, lengths: Lengths, device: torch.device
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
