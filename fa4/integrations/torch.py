"""fa4 behind torch's own attention: F.scaled_dot_product_attention and varlen_attn.

    from fa4.integrations import torch as fa4_torch
    fa4_torch.activate()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model(x)  # unmodified

torch keeps a registry of flash attention implementations (torch.nn.attention, public since 2.11).
`register` puts fa4 there under a name; activating that name replaces the CUDA kernels of the aten
operators behind torch's flash backend, and `torch.nn.attention.restore_flash_attention_impl` puts
torch's own back. The operators' meta and autograd kernels stay torch's.

What an operator asks and no kernel answers raises `fa4.UnsupportedProblemError`; dropout, debug
masks, ALiBi, block tables and more than one split are refused by name. The aten operators are not
public: what this module knows of them was read in torch 2.11, 2.13 and 2.14, and activating in a
torch whose operators have other arguments raises an error that names them.

What torch never routes to its flash backend does not come here: masks, head_dim above 256, a
head_dim_v that differs, is_causal where there are not as many keys as queries. Recent torch prefers
cuDNN on Hopper and Blackwell, so that sdpa_kernel is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from fa4.attention import answer_operator, problem_of_operator
from fa4.autograd import BackwardOptions, gradients
from fa4.launch import Lengths

# Distinct from the names that torch itself registers ("FA3", "FA4").
NAME = "fa4_kernels"


def register(name: str = NAME) -> None:
    """Offer fa4 to torch as a flash attention implementation; activates nothing.

    name  what `torch.nn.attention.activate_flash_attention_impl` will know it by. "FA3" or "FA4"
          replaces torch's own implementation of that name, for programs that activate by name.
    """
    torch_attention.register_flash_attention_impl(name, register_fn=_install)


def activate(name: str = NAME) -> None:
    """Register fa4 under a name and make it torch's flash attention."""
    register(name)
    torch_attention.activate_flash_attention_impl(name)


def restore() -> None:
    """Make torch's own flash attention answer again."""
    torch_attention.restore_flash_attention_impl()


class Installation:
    """The replaced kernels; they stand until `remove`."""

    def __init__(self, library: torch.library.Library):
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Put back what was there before; once is enough."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _install(dispatch_key: str = "CUDA") -> Installation:
    """Replace the kernels of one dispatch key, if torch's operators are those that we know.

    dispatch_key  "CPU" puts the reference there, for tests of this module without a GPU
    """
    backend = "fa4" if dispatch_key == "CUDA" else "reference"
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    try:
        for name, implementation in IMPLEMENTATIONS.items():
            operator = getattr(torch.ops.aten, name, None)
            if operator is None and name in ABSENT_BEFORE_2_13:
                continue
            if operator is None:
                raise RuntimeError(f"torch {torch.__version__} has no operator aten::{name}.")
            check_schema(name, operator.default._schema)
            library.impl(name, functools.partial(implementation, backend), dispatch_key)
    except BaseException:
        library._destroy()
        raise
    return Installation(library)


def check_schema(name: str, schema: Any) -> None:
    """Raise RuntimeError unless a schema has exactly arguments that we know, in our order."""
    arguments = [argument.name for argument in schema.arguments]
    optional = OPTIONAL_ARGUMENTS if name.startswith("_flash_attention_forward") else ()
    expected = [known for known in ARGUMENTS[name] if known in arguments or known not in optional]
    if arguments != expected:
        raise RuntimeError(
            f"aten::{name} of torch {torch.__version__} has the arguments {', '.join(arguments)}; "
            f"fa4 knows {', '.join(ARGUMENTS[name])}."
        )


# -- the operators -------------------------------------------------------------------------------


@torch.no_grad()
def _flash_attention_forward(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    *others: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, rng_state, unused, debug_mask); tensors are (batch, seqlen, heads, dim) or packed.

    The arguments are those of the next function.
    """
    out = None
    if not query.is_contiguous():
        out = _empty_like(query, value.shape[-1])
        if cum_seq_q is not None:
            out.zero_()  # rows of no sequence
    out, lse = _attend(backend, out, query, key, value, cum_seq_q, *others, **options)
    return out, lse, *_dropout_results(query)


@torch.no_grad()
def _flash_attention_forward_no_dropout_inplace(
    backend: str, out: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    """lse; the output goes to ``out``."""
    return _attend(backend, out, *arguments, **options)[1]


def _attend(
    backend: str,
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) for the arguments of torch's forward operators; ``out`` is new where None."""
    _refuse(
        dropout_p=dropout_p,
        return_debug_mask=return_debug_mask,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits,
    )
    return answer_operator(
        query,
        key,
        value,
        Lengths(cum_seq_q, cum_seq_k, None, seqused_k),
        out,
        None,
        scale,
        is_causal,
        _bound(window_size_left),
        _bound(window_size_right),
        backend=backend,
    )


@torch.no_grad()
def _flash_attention_backward(
    backend: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the output and LSE that are given, whoever computed them."""
    _refuse(dropout_p=dropout_p)
    lengths = Lengths(cum_seq_q, cum_seq_k)
    problem = problem_of_operator(
        query,
        key,
        value,
        lengths,
        None,
        scale,
        is_causal,
        (_bound(window_size_left), _bound(window_size_right)),
        0.0,
    )
    found = gradients(
        problem,
        query,
        key,
        value,
        lengths,
        None,
        out,
        logsumexp,
        grad_out,
        None,
        BackwardOptions(torch.are_deterministic_algorithms_enabled(), backend),
    )
    return _laid_out_as(found[0], query), _laid_out_as(found[1], key), _laid_out_as(found[2], value)


@torch.no_grad()
def _scaled_dot_product_flash_attention(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The nine results of torch's operator; tensors are (batch, heads, seqlen, dim)."""
    _refuse_unaligned(is_causal, query, key)
    out = _empty_like(query, value.shape[-1])
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    _, lse = _attend(
        backend,
        out.transpose(1, 2),
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        seqlen_q,
        seqlen_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
    )
    return out, lse, None, None, seqlen_q, seqlen_k, *_dropout_results(query)


@torch.no_grad()
def _scaled_dot_product_flash_attention_backward(
    backend: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); tensors are (batch, heads, seqlen, dim)."""
    _refuse_unaligned(is_causal, query, key)
    found = _flash_attention_backward(
        backend,
        grad_out.transpose(1, 2),
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        out.transpose(1, 2),
        logsumexp,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    dq, dk, dv = (t.transpose(1, 2) for t in found)
    return _laid_out_as(dq, query), _laid_out_as(dk, key), _laid_out_as(dv, value)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention": _scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_backward": _scaled_dot_product_flash_attention_backward,
}
ABSENT_BEFORE_2_13 = ("_flash_attention_forward_no_dropout_inplace",)
OPTIONAL_ARGUMENTS = ("block_table", "num_splits")  # of the forward operators, since 2.13

_TENSORS = ("query", "key", "value")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_WINDOW = ("scale", "window_size_left", "window_size_right")
_FORWARD = (
    *(*_TENSORS, *_LENGTHS, "dropout_p", "is_causal", "return_debug_mask", *_WINDOW),
    *("seqused_k", "alibi_slopes", *OPTIONAL_ARGUMENTS),
)
_BACKWARD = ("grad_out", *_TENSORS, "out", "logsumexp", *_LENGTHS, "dropout_p", "is_causal")
# Of each operator, in torch's order.
ARGUMENTS = {
    "_flash_attention_forward": _FORWARD,
    "_flash_attention_forward_no_dropout_inplace": ("out", *_FORWARD),
    "_flash_attention_backward": (*_BACKWARD, "rng_state", "unused", *_WINDOW),
    "_scaled_dot_product_flash_attention": (
        *(*_TENSORS, "dropout_p", "is_causal", "return_debug_mask", "scale"),
    ),
    "_scaled_dot_product_flash_attention_backward": (
        *(*_BACKWARD, "philox_seed", "philox_offset", "scale"),
    ),
}


# -- pieces --------------------------------------------------------------------------------------


def _refuse(
    dropout_p: float = 0.0,
    return_debug_mask: bool = False,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}: fa4 has no dropout; it must be 0.")
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask is True: fa4 has none; it must be False.")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is a tensor: fa4 has no ALiBi; it must be None.")
    if block_table is not None:
        raise NotImplementedError(
            "block_table is a tensor: paged keys are not routed to fa4; it must be None."
        )
    if num_splits not in (None, 0, 1):
        raise NotImplementedError(
            f"num_splits is {num_splits}: these kernels do not split keys; allowed are None, 0, 1."
        )


def _refuse_unaligned(is_causal: bool, query: Tensor, key: Tensor) -> None:
    """SDPA aligns its causal mask to the top left, the kernels to the bottom right."""
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"is_causal with {query.shape[2]} queries and {key.shape[2]} keys: as many keys as "
            "queries are needed."
        )


def _bound(window_size: int | None) -> int:
    return -1 if window_size is None else window_size


def _empty_like(query: Tensor, head_dim_v: int) -> Tensor:
    """An output with the strides that torch's meta kernels promise: those of query."""
    if head_dim_v == query.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], head_dim_v))


def _laid_out_as(gradient: Tensor, tensor: Tensor) -> Tensor:
    """A gradient with the strides that torch's meta kernels promise: those of its input."""
    if gradient.stride() == tensor.stride():
        return gradient
    promised = torch.empty_like(tensor)
    return gradient if promised.stride() == gradient.stride() else promised.copy_(gradient)


def _dropout_results(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_mask, which mean nothing without dropout."""
    return (
        torch.empty((2,), dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
        torch.empty((0,), dtype=query.dtype, device=query.device),
    )
