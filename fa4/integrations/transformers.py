"""fa4 as an attention implementation of Hugging Face transformers 5.

    from fa4.integrations import transformers as fa4_transformers
    fa4_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4_kernels")

`register` gives transformers two functions under one name: one that computes attention and one
that prepares its mask. Both are needed; without the second, transformers drops padding in silence.

Padding. The mask function hands a 2-dimensional mask (batch, seqlen_k) through the model, None
where there is neither padding nor packing. Sequences that are padded on the right run as they lie,
with lengths; any other mask (padding on the left, holes) has the used rows of each sequence moved
to its front first, and the output moved back. Rows of padding get zeros. Holes between used rows
are refused where there is a sliding window, because distances count across them.

Generation. A few queries before many keys, without gradients and with nothing or the left padded,
go to `fa4.flash_attn_with_kvcache`, which shares the keys of a sequence out over the whole GPU.

Packing. Documents in one row are told from cu_seq_lens_q and cu_seq_lens_k where the caller gives
them, else from position_ids that start again, as transformers' own masks tell them.

Continuous batching (`model.generate_batch`) of transformers 5.17 and 5.18: with "paged|" before the
name, "paged|fa4_kernels". Later versions admit no implementation but their own.

What cannot be right is refused with an error: dropout, 4-dimensional masks, mask patterns other
than causal, bidirectional, sliding window and packed (chunked attention, blocks of an image),
attention weights, a static cache or continuous batching inside torch.compile.

The default name is without "flash" on purpose: transformers replaces names that contain it by
other implementations for some models, with no more than a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4.attention import (
    BACKENDS,
    autocast_dtype,
    flash_attn_func,
    flash_attn_varlen_func,
    is_traced,
)
from fa4.dispatch import UnsupportedProblemError
from fa4.kvcache import flash_attn_with_kvcache

NAME = "fa4_kernels"
MAX_DECODED_ROWS = 8  # queries of a sequence that are still few
PAGED = "paged|"  # before the names of attention over a paged cache
DOCUMENTS = torch.int32  # dtype of a mask that numbers documents instead of marking padding


def register(name: str = NAME, *, backend: str = "fa4") -> None:
    """Make fa4 an attention implementation of transformers, to be chosen by its name.

    name     for attn_implementation=...
    backend  of `fa4.flash_attn_func`. "fa4" raises `fa4.UnsupportedProblemError` for what no kernel
             answers; "auto" lets the reference answer that, with a warning

    A name that transformers knows already is refused, unless it was registered here.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}.")
    known = AttentionInterface().get(name)
    if known is not None and getattr(known, "func", None) is not attention:
        raise ValueError(f"name={name!r} is an attention implementation of transformers already.")
    AttentionInterface.register(name, functools.partial(attention, backend))
    AttentionMaskInterface.register(name, padding_mask)
    # Without a mask function: continuous batching has lengths in the place of masks.
    AttentionInterface.register(PAGED + name, functools.partial(paged_attention, backend))


# -- attention -----------------------------------------------------------------------------------

# Arguments that some models or generation modes give, and that change what is computed.
_REFUSED = (
    "output_attentions",
    "position_bias",
    "attention_bias",
    "head_mask",
    "cache",
    "block_table",
)


def attention(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    query           (batch, heads, seqlen_q, head_dim); key and value with heads_kv, not repeated
    attention_mask  None, or (batch, seqlen_k) of `padding_mask`
    sliding_window  keys that a query sees, itself included; to both sides where not causal
    s_aux           (heads,) sink logits

    Returns ((batch, seqlen_q, heads, head_dim_v), None).
    """
    _refuse(dropout, attention_mask, others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "softcap": softcap,
        "sink": None if s_aux is None else s_aux.contiguous(),
        "backend": backend,
    }
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    q, k, v = (t.transpose(1, 2) for t in _in_half_precision(module, query, key, value))

    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        return _attend_packed(q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), options), None
    if attention_mask is None:
        starts = _packed_starts(position_ids, q, k)
        if starts is not None:
            return _attend_packed(q, k, v, starts, starts, options), None
        return _dense(q, k, v, options), None
    if attention_mask.dtype == DOCUMENTS and not is_traced(attention_mask):
        rows = _remember(attention_mask, "_fa4_starts", _starts_of_documents)
        return _attend_packed(q, k, v, rows, rows, options), None
    return _attend_padded(q, k, v, attention_mask.bool(), options), None


def _refuse(dropout: float, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    if dropout > 0.0:
        raise NotImplementedError(
            f"dropout is {dropout}: fa4 has no attention dropout; set the model's "
            "attention_dropout to 0."
        )
    for name in _REFUSED:
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"{name} is given, and fa4 does not support it.")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask has {attention_mask.dim()} dimensions: fa4 takes masks of padding, "
            "(batch, seqlen_k), and no others."
        )


def _in_half_precision(module: torch.nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """float32 inputs of a model whose weights are of a half type, in that type.

    Layer norms that are kept in float32 for training make them float32. Autocast is left to
    `fa4.flash_attn_func`.
    """
    if tensors[0].dtype != torch.float32:
        return tensors
    config = getattr(module, "config", None)
    if hasattr(config, "_is_quantized"):
        dtype = getattr(config, "dtype", None)
    else:
        linear = next((m for m in module.modules() if isinstance(m, torch.nn.Linear)), None)
        dtype = None if linear is None else linear.weight.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return tensors
    return tuple(t.to(dtype) for t in tensors)


def _dense(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    if _is_decoding(q, k, v, options):
        decoded = _decode(q, k, v, None, options)
        if decoded is not None:
            return decoded
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def _varlen(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], **lengths: Any) -> Tensor:
    out = flash_attn_varlen_func(q, k, v, **lengths, **options)
    assert isinstance(out, Tensor)
    return out


# -- generation ----------------------------------------------------------------------------------


def _is_decoding(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether few queries come before many keys, and nobody wants gradients."""
    rows = q.shape[1]
    if rows > MAX_DECODED_ROWS or rows >= k.shape[1] or is_traced(q):
        return False
    if autocast_dtype(q.device) is not None:
        return False
    inputs = (q, k, v, options["sink"])
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs))


def _decode(
    q: Tensor, k: Tensor, v: Tensor, leftpad: Tensor | None, options: dict[str, Any]
) -> Tensor | None:
    """The output over k but the first ``leftpad`` rows of each sequence; None without a kernel."""
    try:
        out = flash_attn_with_kvcache(
            *(q, k, v),
            cache_seqlens=_same_lengths(k.device, k.shape[0], k.shape[1]),
            cache_leftpad=leftpad,
            **options,
        )
    except UnsupportedProblemError:
        return None  # the kernels for many queries may have an answer, or the better reasons
    assert isinstance(out, Tensor)
    return out


def _same_lengths(device: torch.device, batch: int, length: int) -> Tensor:
    """(batch,) int32; all layers ask for the same in a step of generation."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # What is made during a capture belongs to the graph.
        return torch.full((batch,), length, dtype=torch.int32, device=device)
    return _kept_lengths(device, batch, length)


@functools.lru_cache(maxsize=64)
def _kept_lengths(device: torch.device, batch: int, length: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), length, dtype=torch.int32, device=device)


# -- continuous batching -------------------------------------------------------------------------


def paged_attention(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: Any = None,
    read_index: Any = None,
    write_index: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for continuous batching: new tokens of several requests.

    query          (1, heads, total_q, head_dim), request after request; key and value likewise
    cache          transformers' PagedAttentionCache, which the new keys and values are written to
    cu_seq_lens_q  (requests + 1,): request i has the rows cu[i] to cu[i+1] - 1 of query
    cu_seq_lens_k, max_seqlen_k
                   likewise of keys, cached ones included; by kind of layer where there are several
    read_index     of each group of layers, where in the cache the keys of all requests lie; empty
                   where nothing but the new ones is attended to
    write_index    of each group of layers, where the new ones go

    Layers without a window read the cache where it lies. The others attend to a copy, because a new
    key may take the place of one that earlier queries of its request still see.

    Returns ((1, total_q, heads, head_dim), None); rows of no request are 0.
    """
    if cache is None:
        raise ValueError(
            f"attn_implementation={PAGED!r} and a name is for continuous batching, which gives a "
            "cache; use the name alone."
        )
    _refuse(dropout, attention_mask, others)
    if is_traced(query):
        raise NotImplementedError(
            "continuous batching inside torch.compile is not supported by fa4: leave "
            "default_compile_level at 0."
        )
    if value.shape[-1] != key.shape[-1]:
        raise NotImplementedError(
            f"values have head_dim {value.shape[-1]} and keys {key.shape[-1]}: transformers' paged "
            "cache has room for one head_dim."
        )
    layer = _layer_of(cache, module.layer_idx)
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if layer.window is None else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    assert cu_seq_lens_q is not None
    cu_seqlens_q, cu_seqlens_k = cu_seq_lens_q.int(), cu_seq_lens_k.int()
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": True,
        "softcap": softcap,
        "sink": None if s_aux is None else s_aux.contiguous(),
        "backend": backend,
    }
    if layer.window is not None:
        options["window_size"] = (layer.window - 1, 0)
    query, key, value = _in_half_precision(module, query, key, value)
    q = query[0].transpose(0, 1)
    rows = read_index[layer.group]
    if layer.k_pages is not None and layer.v_pages is not None and rows.numel() > 0:
        for cached, new in ((layer.k_pages, key), (layer.v_pages, value)):
            cached.flatten(0, 1).index_copy_(0, write_index[layer.group], new[0].transpose(0, 1))
        page_table, lengths = _pages_in_use(rows, cu_seqlens_k, max_seqlen_k, layer)
        try:
            out = flash_attn_with_kvcache(
                *(q, layer.k_pages, layer.v_pages),
                cache_seqlens=lengths,
                page_table=page_table,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=max_seqlen_q,
                **options,
            )
        except UnsupportedProblemError:
            pass  # the kernels for packed sequences may have an answer, or the better reasons
        else:
            assert isinstance(out, Tensor)
            return out[None], None
    k, v = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    out = _varlen(q, k, v, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return out[None], None


class _CachedLayer(NamedTuple):
    """What a PagedAttentionCache has of a layer.

    group             number of the layers that share a read_index and a write_index
    is_first          whether it is the first of them
    window            keys that a query sees, itself included; None for all
    k_pages, v_pages  (pages, page_size, heads_kv, head_dim); None for a layer with a window, whose
                      rows are used in turn
    """

    group: int
    is_first: bool
    window: int | None
    k_pages: Tensor | None
    v_pages: Tensor | None


def _layer_of(cache: Any, layer_idx: Any) -> _CachedLayer:
    if hasattr(cache, "layer_to_allocator"):  # transformers 5.18
        allocator = cache.layer_to_allocator[layer_idx]
        is_first = layer_idx == allocator.layer_indices[0]
        if not allocator.supports_block_table:
            return _CachedLayer(allocator.index, is_first, allocator.sliding_window, None, None)
        pages = allocator.get_cache_for_block_table(layer_idx)
        return _CachedLayer(allocator.index, is_first, None, *pages)
    group, place = cache.layer_index_to_group_indices[layer_idx]
    window = cache.sliding_windows[layer_idx]
    if window != 1:  # which stands for none
        return _CachedLayer(group, place == 0, window, None, None)
    k_rows, v_rows = cache.key_cache[place], cache.value_cache[place]
    pages = (rows.unflatten(0, (-1, cache.block_size)) for rows in (k_rows, v_rows))
    return _CachedLayer(group, place == 0, None, *pages)


def _pages_in_use(
    rows: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, layer: _CachedLayer
) -> tuple[Tensor, Tensor]:
    """((requests, pages), (requests,)) int32: the page table and lengths of cached requests.

    rows  (keys,): row of the cache of each key, request after request, page after page

    The first layer of those that share ``rows`` works it out in each step, for all of them: what an
    earlier step has left is no good to a CUDA graph, which must contain the work.
    """
    assert layer.k_pages is not None
    found: tuple[Tensor, Tensor] | None = getattr(rows, "_fa4_pages", None)
    if layer.is_first or found is None:
        page_size = layer.k_pages.shape[1]
        firsts = torch.arange(0, max_seqlen_k, page_size, device=rows.device)
        # Pages past the end of a request are not read.
        firsts = (cu_seqlens_k[:-1, None] + firsts).clamp(max=rows.numel() - 1)
        page_table = rows[firsts].div(page_size, rounding_mode="floor").int()
        found = page_table, cu_seqlens_k.diff()
        rows._fa4_pages = found  # type: ignore[attr-defined]
    return found


# -- packing -------------------------------------------------------------------------------------


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Documents one after the other, all rows of the batch counted through."""
    flat_q, flat_k, flat_v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    out = _varlen(flat_q, flat_k, flat_v, options, **lengths)
    return out.view(*q.shape[:3], v.shape[-1])


def _packed_starts(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """cu_seqlens of the documents in rows whose positions start again; None for plain rows.

    A position that does not follow the one before it starts a document.
    """
    batch, rows = q.shape[:2]
    if position_ids is None or position_ids.dim() != 2 or rows != k.shape[1] or rows == 1:
        return None
    if position_ids.shape != (1, rows) and position_ids.shape != (batch, rows):
        return None
    if is_traced(q):
        # Where documents begin is not known while tracing.
        follows = (position_ids.diff(dim=-1) == 1).all()
        torch._assert_async(
            follows,
            "position_ids start again: inside torch.compile give packed sequences to fa4 by "
            "cu_seq_lens_q and cu_seq_lens_k",
        )
        return None
    documents = _remember(position_ids, "_fa4_documents", _documents_of_positions)
    if documents is None:
        return None
    return _starts_of_documents(documents.expand(batch, rows))


def _documents_of_positions(position_ids: Tensor) -> Tensor | None:
    """Which document each position belongs to, counted within a row; None if each row is one."""
    starts = position_ids.diff(dim=-1) != 1
    if not starts.any():
        return None
    documents = torch.nn.functional.pad(starts, (1, 0)).cumsum(dim=-1)
    return documents.to(DOCUMENTS)


def _starts_of_documents(documents: Tensor) -> Tensor:
    """(documents + 1,) int32: the first row of each, all rows of the batch counted through.

    documents  (batch, rows), a number for each row that changes with the document
    """
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first_rows = starts.flatten().nonzero().flatten()
    return torch.nn.functional.pad(first_rows, (0, 1), value=documents.numel()).int()


# -- padding -------------------------------------------------------------------------------------

HOLES = (
    "attention_mask has zeros between ones: with a sliding window, distances count across them, "
    "which fa4 does not support"
)


class _Rows(NamedTuple):
    """The used rows of one side of padded sequences.

    used   (batch,) int32: how many
    order  (batch, rows): where the used ones come first, each in its turn; None if they do already
    """

    used: Tensor
    order: Tensor | None


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """mask (batch, keys) bool: the first so many of k are in use where True.

    Where positions matter, the queries are those of the mask's last entries.
    """
    seqlen_q, num_keys = q.shape[1], mask.shape[1]
    if k.shape[1] < num_keys:
        raise ValueError(f"attention_mask has {num_keys} entries, and there are {k.shape[1]} keys.")
    k, v = k[:, :num_keys], v[:, :num_keys]
    if is_traced(mask):
        shape = None
        if "window_size" in options:
            torch._assert_async((_num_runs(mask) <= 1).all(), HOLES)
    else:
        shape = _remember(mask, "_fa4_shape", _shape_of)
    if shape == "full":
        return _dense(q, k, v, options)
    if shape == "holes" and "window_size" in options:
        raise NotImplementedError(HOLES)
    if shape == "left" and _is_decoding(q, k, v, options):
        leftpad = _remember(mask, "_fa4_leftpad", _unused_rows)
        decoded = _decode(q, k, v, leftpad, options)
        if decoded is not None:
            return decoded
    rows_k = _rows_of(mask, shape)
    k, v = _to_front(k, rows_k), _to_front(v, rows_k)
    has_positions = options["causal"] or "window_size" in options
    if not has_positions and seqlen_q != num_keys:
        return _varlen(q, k, v, options, seqused_k=rows_k.used)
    if seqlen_q > num_keys:
        raise ValueError(
            f"attention_mask has {num_keys} entries, and there are {seqlen_q} queries."
        )
    rows_q = rows_k if seqlen_q == num_keys else _rows_of(mask[:, num_keys - seqlen_q :], shape)
    q = _to_front(q, rows_q)
    out = _varlen(q, k, v, options, seqused_q=rows_q.used, seqused_k=rows_k.used)
    if rows_q.order is None:
        return out
    index = rows_q.order[:, :, None, None].expand_as(out)
    return torch.zeros_like(out).scatter(1, index, out)


def _rows_of(mask: Tensor, shape: str | None) -> _Rows:
    used = mask.sum(dim=-1, dtype=torch.int32)
    if shape == "right":
        return _Rows(used, None)
    return _Rows(used, mask.int().argsort(dim=-1, descending=True, stable=True))


def _to_front(x: Tensor, rows: _Rows) -> Tensor:
    if rows.order is None:
        return x
    return x.gather(1, rows.order[:, :, None, None].expand_as(x))


def _unused_rows(mask: Tensor) -> Tensor:
    return (~mask).sum(dim=-1, dtype=torch.int32)


def _shape_of(mask: Tensor) -> str:
    """Where rows are used: "full", "right" or "left" padding alone, one "run" each, or "holes".

    Waits for the device.
    """
    facts = (
        mask.all(),
        (mask[:, 1:] <= mask[:, :-1]).all(),
        (mask[:, 1:] >= mask[:, :-1]).all(),
        (_num_runs(mask) <= 1).all(),
    )
    names = ("full", "right", "left", "run")
    true = (name for name, is_so in zip(names, torch.stack(facts).tolist(), strict=True) if is_so)
    return next(true, "holes")


def _num_runs(mask: Tensor) -> Tensor:
    """(batch,) runs of used rows."""
    return (mask[:, 1:] & ~mask[:, :-1]).sum(dim=-1) + mask[:, 0]


def _remember(tensor: Tensor, name: str, work_out: Callable[[Tensor], Any]) -> Any:
    """What was worked out for this very tensor: all layers of a model are given the same one.

    Forgotten when the tensor is written to, which inference tensors do not tell.
    """
    if tensor.is_inference():
        return work_out(tensor)
    version, value = getattr(tensor, name, (None, None))
    if version != tensor._version:
        value = work_out(tensor)
        setattr(tensor, name, (tensor._version, value))
    return value


# -- the mask function ---------------------------------------------------------------------------

# Patterns of transformers.masking_utils that `attention` can follow, by the function that makes
# them.
_PATTERNS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    # transformers 5.24: positions count from each document's start. Among the keys of one document
    # that moves queries and keys alike, and others are hidden by packed_sequence_mask_function.
    "remap_positions_for_packed_sequence",
    "and_masks",
}


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """transformers' mask function: what `attention` must know of padding and packing.

    Returns None where there is neither; (batch, keys) bool where rows are padded or the cache has
    room behind the keys; (batch, keys) int32 where rows are packed: the document of each key.
    Waits for the device once, as transformers' own mask functions do.
    """
    is_tracing = torch.compiler.is_compiling()
    patterns: dict[str, Any] = {}
    if mask_function is not None and not is_tracing:
        patterns = _patterns(mask_function)
        unknown = sorted(set(patterns) - _PATTERNS)
        if "packed_sequence_mask_function" not in patterns:
            unknown += [name for name in patterns if name.startswith("remap_positions")]
        if unknown:
            raise NotImplementedError(
                f"this model masks attention by {', '.join(unknown)}, which fa4 does not support."
            )
    if others.get("use_vmap"):
        raise NotImplementedError(
            "this model masks attention by a function of its own, which fa4 does not support."
        )
    num_keys = kv_length
    if "bidirectional_mask_function" not in patterns:
        if isinstance(q_offset, Tensor):
            if is_tracing:
                raise NotImplementedError(
                    "a static cache inside torch.compile is not supported by fa4: generate with "
                    "disable_compile=True."
                )
            q_offset = int(q_offset)
        # A static cache has room behind the keys.
        num_keys = min(kv_length, q_offset + q_length - kv_offset)
    if attention_mask is None:
        if not is_tracing and "packed_sequence_mask_function" in patterns:
            documents = patterns["packed_sequence_mask_function"]["packed_sequence_mask"]
            return documents.to(DOCUMENTS) + 1
        if num_keys < kv_length:
            return torch.ones((batch_size, num_keys), dtype=torch.bool, device=device)
        return None
    mask = attention_mask.bool()[:, kv_offset : kv_offset + num_keys]
    if not is_tracing:
        shape = _remember(mask, "_fa4_shape", _shape_of)
        if shape == "full" and mask.shape[1] == kv_length:
            return None
    return mask


def _patterns(mask_function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The functions that a mask function is made of, and what each has enclosed, by name."""
    found: dict[str, dict[str, Any]] = {}
    functions: list[Any] = [mask_function]
    while functions:
        function = functions.pop()
        name = getattr(function, "__qualname__", repr(function)).split(".")[0]
        cells = getattr(function, "__closure__", None) or ()
        names = function.__code__.co_freevars if cells else ()
        enclosed = {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}
        found[name] = enclosed
        for value in enclosed.values():
            members = value if isinstance(value, (tuple, list)) else (value,)
            functions += [m for m in members if callable(m) and not isinstance(m, Tensor)]
    return found
