"""Attention over a key/value cache: the public functions of serving, and the path of a call.

    arguments -> KVCacheProblem (fa4.kvcache_problem) -> KVCacheDecision (fa4.kvcache_launch)
              -> kernels (fa4.compiler) -> launch, or the reference (fa4.reference_kvcache)

The path is walked once for each combination of shapes, strides, dtypes and options; later calls
find its end in a table.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa4.attention import BACKENDS, EMULATED_ARCH, Window, _num_dispatch_modes, is_traced
from fa4.checked_mode import is_checked
from fa4.compiler import KernelSpec, get_kernel
from fa4.dispatch import FallbackWarning, UnsupportedProblemError, architecture_of
from fa4.kernels.features import TMA_ALIGNMENT, DecodeFeatures
from fa4.kvcache_launch import (
    COUNTERS_PLACE,
    CacheLengths,
    KVCacheDecision,
    KVCacheLaunch,
    combine_spec,
    decide_kvcache,
    lengths_on_device,
)
from fa4.kvcache_problem import check_cache_contents, describe_kvcache
from fa4.launch import multiprocessor_count
from fa4.problem import DTYPE_NAMES, layout_fault
from fa4.reference_kvcache import combine_reference, kvcache_reference

EMULATED_MULTIPROCESSORS = 4
DEFAULT_MULTIPROCESSORS = 132  # of a machine that is only asked about: an H100 or H200


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    sink: Tensor | None = None,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of new queries over cached keys, which new keys may first be appended to.

    q        (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) packed with
             cu_seqlens_q. One row is a decode step; several a speculative one or a prefill chunk
    k_cache  (batch, rows, heads_kv, head_dim); with page_table (pages, page_size, heads_kv,
             head_dim), any page size from 1
    v_cache  likewise with head_dim_v
             any strides with a unit last one; never copied. Kernels are fastest where the other
             strides and the addresses are multiples of 16 bytes, as for q, k, v and out too
    k, v     (batch, seqlen_new, heads_kv, head_dim[_v]), or packed with cu_seqlens_k_new: written
             to the cache behind the positions in use, before attending

    cache_seqlens    (batch,) int32 positions in use *before* appending, or one int for all; None is
                     the whole cache (only without k, page_table and cache_leftpad)
    cache_batch_idx  (batch,) int32 cache entry of each sequence; default its own index. Not with
                     page_table
    cache_leftpad    (batch,) int32 positions at the front of each sequence that are not in use;
                     cache_seqlens counts them
    page_table       (batch, pages_per_sequence) int32: position p lies in row p % page_size of page
                     page_table[b, p // page_size]. Entries past the used part may hold anything
    cu_seqlens_q     (batch + 1,) int32: sequence i has the query rows cu[i] to cu[i+1] - 1
    cu_seqlens_k_new (batch + 1,) int32, likewise for k and v
    max_seqlen_q     the most query rows of a packed sequence: a promise, which lets short ones be
                     scheduled as such; default the rows of q
    rotary_cos, rotary_sin
                     (positions, rotary_dim / 2), q's dtype or both float32, for new keys and the
                     queries with them: the first rotary_dim dims (a multiple of 16) of k row i are
                     rotated by position t + i with t = cache_seqlens. Query row i is rotated by
                     t + i under a causal mask or a window, else by t. Only with k and v
    rotary_seqlens   (batch,) int32: t, where it is not cache_seqlens
    rotary_interleaved  pairs are dims 2i and 2i + 1 (GPT-J), else i and i + rotary_dim / 2 (NeoX)
    causal, window_size, softcap, sink, softmax_scale
                     as in `fa4.flash_attn_func`; masks are aligned to the last key, appended ones
                     included
    num_splits       0: automatic, all multiprocessors get equal shares of all keys, or whole tiles
                     or equal parts of them where those fill them as well; bits of a result may then
                     depend on the other sequences' lengths. n >= 1: the keys of each tile of
                     queries are cut into n equal parts; then they do not
    return_lse       also return lse (batch, heads_q, seqlen_q), packed (heads_q, total_q): fp32,
                     natural logarithm
    out              written in place and returned
    backend, arch    as in `fa4.flash_attn_func`

    Lengths, pages and tokens are read on the device, never by the host: a captured CUDA graph may
    be replayed with changed ones. Cache entries out of use may hold NaN. A row that sees no key has
    output 0 and LSE -inf; so have rows of q behind the last packed sequence, which are left alone
    in a caller's ``out``. New keys past the capacity are not written.
    The contents of vectors and tables are trusted; `fa4.checked` validates them.
    Inference only: NotImplementedError where a tensor requires grad under autograd. Under
    torch.compile and other tracers the call is an operator of `fa4.kvcache_ops`. Raises TypeError
    or ValueError, before any launch, naming the argument at fault.
    Method: FA2, Flash-Decoding and FA3; see docs/guides/serving.md.
    """
    is_run = not (
        # `is_traced` written out, which saves its call.
        is_dynamo_compiling() or (type(q) is not Tensor and is_traced(q)) or _num_dispatch_modes()
    )
    launch = key = None
    if is_run:
        try:
            # Everything that the walk looks at but contents, and what compiled functions check
            # anyway. Every look at a tensor costs a tenth of a microsecond or two.
            key = (
                q.shape,
                k_cache.shape,
                v_cache.shape,
                None
                if q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
                else (q.stride(), k_cache.stride(), v_cache.stride()),
                q.dtype,
                q.device,
                torch.is_grad_enabled()
                and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad),
                int if type(cache_seqlens) is int else _shape_of(cache_seqlens),
                None if page_table is None else page_table.shape,
                None if cache_batch_idx is None else cache_batch_idx.shape,
                None if cache_leftpad is None else cache_leftpad.shape,
                None if cu_seqlens_q is None else cu_seqlens_q.shape,
                max_seqlen_q,
                softmax_scale,
                causal,
                window_size,
                softcap,
                None if sink is None else (sink.shape, sink.dtype, sink.requires_grad),
                None if out is None else (out.shape, out.stride()),
                num_splits,
                backend,
                arch,
                None
                if k is None
                and v is None
                and rotary_cos is None
                and rotary_sin is None
                and cu_seqlens_k_new is None
                and rotary_seqlens is None
                else _key_of_new(
                    k,
                    v,
                    rotary_cos,
                    rotary_sin,
                    cu_seqlens_k_new,
                    rotary_seqlens,
                    rotary_interleaved,
                ),
            )
            launch = _launches.get(key)
            if launch is None:
                launch = _launches.get(
                    _with_addresses(key, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, out)
                )
        except (AttributeError, TypeError):
            pass  # something is no tensor, or a window is a list: the walk sees to it
    if launch is not None and not is_checked():
        lengths = launch.lengths_of(cache_seqlens)
        if lengths is not None:
            try:
                result, lse = launch(
                    q,
                    k_cache,
                    v_cache,
                    k,
                    v,
                    rotary_cos,
                    rotary_sin,
                    CacheLengths(
                        lengths,
                        cu_seqlens_q,
                        cu_seqlens_k_new,
                        cache_leftpad,
                        cache_batch_idx if page_table is None else page_table,
                        rotary_seqlens,
                    ),
                    sink,
                    out,
                    return_lse,
                )
                return (result, lse) if return_lse else result
            except (TypeError, ValueError, RuntimeError):
                # The compiled functions check what the key leaves out: dtypes, devices, alignment.
                # The walk has a better message, or another answer, or meets the same error. New
                # keys that were appended already are appended again, to the same place.
                pass
    tensors = _Tensors(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, sink, out)
    vectors = _Vectors(
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        rotary_seqlens,
    )
    options = _Options(
        max_seqlen_q,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        num_splits,
        backend,
        arch,
    )
    if is_run:
        result, lse = _walk(tensors, vectors, options, return_lse, key)
    else:
        result, lse = _by_operator(tensors, vectors, options)
    return (result, lse) if return_lse else result


def _by_operator(tensors: _Tensors, vectors: _Vectors, options: _Options) -> tuple[Tensor, Tensor]:
    """Leave the call to an operator of `fa4.kvcache_ops`, which a tracer can write down."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError(
            "a tensor requires grad, and attention over a cache has no gradients. Call it under "
            "torch.no_grad()."
        )
    length = vectors.cache_seqlens
    left, right = options.window_size
    keywords: dict[str, Any] = {
        "cache_seqlens": length if isinstance(length, Tensor) else None,
        "cache_length": None if isinstance(length, Tensor) else length,
        "cache_batch_idx": vectors.cache_batch_idx,
        "cache_leftpad": vectors.cache_leftpad,
        "page_table": vectors.page_table,
        "cu_seqlens_q": vectors.cu_seqlens_q,
        "max_seqlen_q": options.max_seqlen_q,
        "sink": tensors.sink,
        "softmax_scale": options.softmax_scale,
        "causal": options.causal,
        "window_left": -1 if left is None else left,
        "window_right": -1 if right is None else right,
        "softcap": options.softcap or 0.0,
        "num_splits": options.num_splits,
        "backend": options.backend,
        "arch": options.arch,
    }
    new = {
        "rotary_cos": tensors.rotary_cos,
        "rotary_sin": tensors.rotary_sin,
        "cu_seqlens_k_new": vectors.cu_seqlens_k_new,
        "rotary_seqlens": vectors.rotary_seqlens,
    }
    q, k_cache, v_cache, out = tensors.q, tensors.k_cache, tensors.v_cache, tensors.out
    if tensors.k is None or tensors.v is None:
        given = [name for name in ("k", "v") if getattr(tensors, name) is not None]
        given += [name for name, tensor in new.items() if tensor is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: to append, k and v must both be given.")
        if out is None:
            return torch.ops.fa4.kvcache_attention(q, k_cache, v_cache, **keywords)
        return out, torch.ops.fa4.kvcache_attention_out(out, q, k_cache, v_cache, **keywords)
    appended = (q, k_cache, v_cache, tensors.k, tensors.v)
    keywords |= {**new, "rotary_interleaved": options.rotary_interleaved}
    if out is None:
        return torch.ops.fa4.kvcache_append_attention(*appended, **keywords)
    return out, torch.ops.fa4.kvcache_append_attention_out(out, *appended, **keywords)


def explain_kvcache(*args: Any, **keywords: Any) -> KVCacheDecision:
    """How a call of `flash_attn_with_kvcache` would be answered; takes its arguments, runs nothing.

    arch ("sm_90a", ...) asks for another machine than the tensors', with any backend.
    """
    bound = inspect.signature(flash_attn_with_kvcache).bind(*args, **keywords)
    bound.apply_defaults()
    return _decide(
        _Tensors(*[bound.arguments[name] for name in _Tensors._fields]),
        _Vectors(*[bound.arguments[name] for name in _Vectors._fields]),
        _Options(*[bound.arguments[name] for name in _Options._fields]),
    )


def combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each set.

    out_partial  (num_splits, batch, seqlen_q, heads_q, head_dim_v), or packed (num_splits, total_q,
                 heads_q, head_dim_v); fp32, bf16 or fp16
    lse_partial  (num_splits, batch, heads_q, seqlen_q), or packed (num_splits, heads_q, total_q);
                 fp32, natural logarithm, any strides. out_partial[s] and lse_partial[s] are what
                 `fa4.flash_attn_func` returns for set s with return_lse=True
    out_dtype    of the output; default that of out_partial
    backend, arch  as in `fa4.flash_attn_func`

        lse = log sum_s exp(lse_s),   out = sum_s exp(lse_s - lse) out_s

    Returns (out, lse) without the first dimension, lse in fp32 (fp64 for fp64). A split whose LSE
    is -inf counts for nothing, whatever its output holds, NaN included; a row for which all are
    has output 0 and LSE -inf. Splits are added in a fixed order: equal inputs have equal bits.
    """
    _check_partial(out_partial, lse_partial)
    out_dtype = out_partial.dtype if out_dtype is None else out_dtype
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(
            f"out_dtype is {out_dtype}; allowed are {', '.join(map(str, DTYPE_NAMES))}."
        )
    _check_backend(backend, arch)
    target = arch or EMULATED_ARCH if backend == "emulator" else None
    words = ""
    if target is None:
        target, words = architecture_of(out_partial.device)
    reasons = _combine_refusals(out_partial, out_dtype, target, words)
    if backend == "reference" or reasons or out_partial.numel() == 0:
        if backend in ("fa4", "emulator") and reasons:
            raise UnsupportedProblemError(f"no fa4 kernel combines this: {'; '.join(reasons)}.")
        if backend == "auto" and reasons:
            _warn(f"partial results are combined by the PyTorch reference: {'; '.join(reasons)}.")
        out, lse = combine_reference(out_partial, lse_partial)
        return out.to(out_dtype), lse
    assert target is not None
    names = (DTYPE_NAMES[out_partial.dtype], DTYPE_NAMES[out_dtype])
    spec = combine_spec(target, *names, out_partial.shape[-1])
    run = _emulated(spec) if backend == "emulator" else get_kernel(spec)
    shape = out_partial.shape[1:]
    out = torch.empty(shape, dtype=out_dtype, device=out_partial.device)
    lse = torch.empty(lse_partial.shape[1:], dtype=torch.float32, device=out_partial.device)
    arguments = (out_partial, lse_partial, out, lse)
    if out_partial.dim() == 4:  # packed: a batch of one
        arguments = (
            out_partial.unsqueeze(1),
            lse_partial.unsqueeze(1),
            out.unsqueeze(0),
            lse.unsqueeze(0),
        )
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        run(*arguments)
    return out, lse


# -- the path --------------------------------------------------------------------------------------


class _Tensors(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    sink: Tensor | None
    out: Tensor | None


class _Vectors(NamedTuple):
    cache_seqlens: Tensor | int | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None


class _Options(NamedTuple):
    max_seqlen_q: int | None
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float | None
    rotary_interleaved: bool
    num_splits: int
    backend: str
    arch: str | None


# Ends of the path, by what the walk looks at. Emptied when full: shapes that keep changing cost
# the walk.
_launches: dict[tuple[Any, ...], KVCacheLaunch] = {}
MAX_LAUNCHES = 4096


def _with_addresses(key: tuple[Any, ...], *tensors: Any) -> tuple[Any, ...]:
    """The key of a launch for tensors that lie where these do.

    Kernels for aligned tensors find odd addresses out themselves, so that the usual key need not
    have any; those for odd ones are slow, and must not be found for aligned tensors.
    """
    places = [0 if tensor is None else tensor.data_ptr() % TMA_ALIGNMENT for tensor in tensors]
    return (*key, *places) if any(places) else key


def _shape_of(tensor: Any) -> Any:
    return None if tensor is None else tensor.shape


def _key_of_new(
    k: Any,
    v: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cu_seqlens_k_new: Any,
    rotary_seqlens: Any,
    rotary_interleaved: bool,
) -> tuple[Any, ...]:
    """The part of a key that new keys add. AttributeError where something is no tensor."""
    return (
        k.shape,
        v.shape,
        None if k.is_contiguous() and v.is_contiguous() else (k.stride(), v.stride()),
        torch.is_grad_enabled() and (k.requires_grad or v.requires_grad),
        None
        if rotary_cos is None and rotary_sin is None
        else (
            rotary_cos.shape,
            rotary_sin.shape,
            rotary_cos.stride(),
            rotary_sin.stride(),
            rotary_cos.dtype,
            rotary_interleaved,
        ),
        _shape_of(cu_seqlens_k_new),
        _shape_of(rotary_seqlens),
    )


def _launch(
    launch: KVCacheLaunch, tensors: _Tensors, vectors: _Vectors, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    assert isinstance(vectors.cache_seqlens, Tensor)
    lengths = CacheLengths(
        vectors.cache_seqlens,
        vectors.cu_seqlens_q,
        vectors.cu_seqlens_k_new,
        vectors.cache_leftpad,
        vectors.cache_batch_idx if vectors.page_table is None else vectors.page_table,
        vectors.rotary_seqlens,
    )
    return launch(*tensors[:7], lengths, tensors.sink, tensors.out, wants_lse)


def _walk(
    tensors: _Tensors,
    vectors: _Vectors,
    options: _Options,
    wants_lse: bool,
    key: tuple[Any, ...] | None,
) -> tuple[Tensor, Tensor]:
    """The whole path for one call; keeps its end under ``key`` if that is a launch."""
    _check_backend(options.backend, options.arch)
    decision = _decide(tensors, vectors, options)
    problem, device = decision.problem, tensors.q.device
    vectors = vectors._replace(
        cache_seqlens=lengths_on_device(vectors.cache_seqlens, problem, device)
    )
    if is_checked():
        _check_contents(tensors, vectors, options, decision)
    if decision.kernel is None:
        return _by_reference(decision, tensors, vectors, options)
    if options.backend == "emulator":
        if device.type != "cpu":
            raise ValueError(f'q is on {device}; backend="emulator" takes CPU tensors.')
        launch = KVCacheLaunch(decision, device, EMULATED_MULTIPROCESSORS, _emulated)
        return _launch(launch, tensors, vectors, wants_lse)
    launch = KVCacheLaunch(decision, device, multiprocessor_count(device))
    if key is not None:
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[_with_addresses(key, *tensors[:7], tensors.out)] = launch
    return _launch(launch, tensors, vectors, wants_lse)


def _decide(tensors: _Tensors, vectors: _Vectors, options: _Options) -> KVCacheDecision:
    """Check the arguments and choose; see `fa4.kvcache_problem` and `fa4.kvcache_launch`."""
    problem = describe_kvcache(
        *tensors[:7],
        **vectors._asdict(),
        max_seqlen_q=options.max_seqlen_q,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window_size=options.window_size,
        softcap=options.softcap,
        sink=tensors.sink,
        rotary_interleaved=options.rotary_interleaved,
        num_splits=options.num_splits,
        out=tensors.out,
    )
    if options.backend == "reference":
        return KVCacheDecision(problem, "reference", reasons=('backend="reference" was asked for',))
    arch = options.arch
    if arch is None and options.backend == "emulator":
        arch = EMULATED_ARCH
    if arch is not None:
        emulated = options.backend == "emulator"
        multiprocessors = EMULATED_MULTIPROCESSORS if emulated else DEFAULT_MULTIPROCESSORS
        return decide_kvcache(problem, arch, arch, multiprocessors)
    device = tensors.q.device
    arch, words = architecture_of(device)
    if arch is None:
        return decide_kvcache(problem, arch, words)
    return decide_kvcache(problem, arch, words, multiprocessor_count(device))


def _check_contents(
    tensors: _Tensors, vectors: _Vectors, options: _Options, decision: KVCacheDecision
) -> None:
    problem = decision.problem
    contents = vectors._asdict()
    check_cache_contents(
        tensors.q,
        tensors.k_cache,
        tensors.k,
        tensors.rotary_cos,
        **contents,
        max_seqlen_q=options.max_seqlen_q,
        advances=(problem.window_left, problem.window_right) != (None, None),
    )


def _by_reference(
    decision: KVCacheDecision, tensors: _Tensors, vectors: _Vectors, options: _Options
) -> tuple[Tensor, Tensor]:
    problem = decision.problem
    has_work = problem.has_queries and problem.has_keys
    if options.backend in ("fa4", "emulator") and has_work:
        raise UnsupportedProblemError(
            f"no fa4 kernel answers this problem: {'; '.join(decision.reasons)}. ({problem})"
        )
    if options.backend == "auto" and has_work:
        _warn(
            "attention over a cache is computed by the PyTorch reference: "
            f"{'; '.join(decision.reasons)}."
        )
    out = tensors.out
    assert isinstance(vectors.cache_seqlens, Tensor)
    result, lse = kvcache_reference(
        *tensors[:7],
        **vectors._asdict(),
        softmax_scale=problem.softmax_scale,
        causal=options.causal,
        window_size=options.window_size,
        softcap=options.softcap,
        sink=tensors.sink,
        rotary_interleaved=options.rotary_interleaved,
    )
    if out is None:
        return result, lse
    if vectors.cu_seqlens_q is not None:
        # Rows behind the last sequence stay as they were.
        rows = torch.arange(problem.rows_q, device=out.device)
        result = torch.where((rows < vectors.cu_seqlens_q[-1])[:, None, None], result, out)
    return out.copy_(result), lse


def _check_backend(backend: str, arch: str | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}.")
    if arch is not None and backend != "emulator":
        raise ValueError(f'arch={arch!r} is for backend="emulator", not {backend!r}.')


def _emulated(
    spec: KernelSpec, multiprocessors: int = EMULATED_MULTIPROCESSORS
) -> Callable[..., Any]:
    """The kernel as a function that runs it on the emulated device."""
    try:
        from fa4.emulator import DeviceModel, TensorUse, run
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f'backend="emulator" needs {missing.name}: pip install "fa4-kernels[emulator]".'
        ) from missing
    device = DeviceModel(spec.arch, multiprocessors)
    uses = {}
    if isinstance(spec.features, DecodeFeatures) and getattr(spec.schedule, "merges", False):
        uses[COUNTERS_PLACE] = TensorUse("counters", is_counter=True)
    return functools.partial(run, spec, device=device, uses=uses)


_warned: set[str] = set()


def _warn(message: str) -> None:
    """One warning for each distinct message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=6)  # the caller of the public function


def _check_partial(out_partial: Tensor, lse_partial: Tensor) -> None:
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(f"{name} requires grad, and combining has no gradients.")
    if out_partial.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"out_partial has dtype {out_partial.dtype}; allowed are "
            f"{', '.join(map(str, DTYPE_NAMES))}."
        )
    wide = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    if lse_partial.dtype != wide:
        raise TypeError(f"lse_partial has dtype {lse_partial.dtype}; it must be {wide}.")
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)}; it must be (num_splits, batch, "
            "seqlen_q, heads_q, head_dim_v) or (num_splits, total_q, heads_q, head_dim_v)."
        )
    *outer, rows, heads, _ = out_partial.shape
    if tuple(lse_partial.shape) != (*outer, heads, rows):
        raise ValueError(
            f"lse_partial has shape {tuple(lse_partial.shape)}; for out_partial "
            f"{tuple(out_partial.shape)} it must be {(*outer, heads, rows)}."
        )
    if not outer[0]:
        raise ValueError("out_partial has 0 splits; there must be at least one.")
    if lse_partial.device != out_partial.device:
        raise ValueError(
            f"lse_partial is on {lse_partial.device}, out_partial on {out_partial.device}; they "
            "must be on one."
        )


def _combine_refusals(
    out_partial: Tensor, out_dtype: torch.dtype, arch: str | None, device: str
) -> list[str]:
    """Every reason why the kernel cannot combine these, each as a clause."""
    reasons = []
    if arch is None:
        reasons.append(f"{device} has no kernels")
    for name, dtype in (("out_partial", out_partial.dtype), ("out_dtype", out_dtype)):
        if dtype == torch.float64:
            reasons.append(f"{name} is {dtype}")
    dim = out_partial.shape[-1]
    if dim % 8 or dim > 256:
        reasons.append(f"head_dim_v={dim} is not a multiple of 8 up to 256")
    fault = layout_fault("out_partial", out_partial)
    if fault is not None:
        reasons.append(fault)
    return reasons
