"""What is asked of attention: arguments checked, and reduced to what choosing a kernel needs."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fa4.kernels.features import TMA_ALIGNMENT
from fa4.reference import mask_bounds

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}

# A window reaches at most this far: farther than any sequence, and sums of bounds and positions
# stay inside 32 bits.
MAX_ROWS = 1 << 29

MAX_COORDINATE = 0x7FFF0000  # of a TMA mode


@dataclass(frozen=True)
class AttentionProblem:
    """What is asked, without the tensors. Frozen and hashable; dispatch decides on nothing else.

    dtype          of q, k and v: "bf16", "fp16", "fp32" or "fp64"
    batch          sequences
    seqlen_q       rows of q: of each batch entry when dense, of all together when packed
    seqlen_k       rows of k and v, likewise
    heads_q        query heads, a multiple of heads_kv
    head_dim       of q and k
    head_dim_v     of v and the output
    softmax_scale  finite real
    softcap        0.0 is off
    window_left    how far left of its diagonal a query sees, inclusive; None is unbounded
    window_right   how far right, causal masking already included; None is unbounded
    sink_dtype     dtype of the sink logits, None without a sink
    packed_q       q is (total_q, heads, head_dim) with cu_seqlens_q
    packed_k       likewise for k and v
    has_seqused_q  the used length of each query sequence is given
    has_seqused_k  likewise for keys
    needs_grad     autograd will ask for gradients
    layout_fault   why TMA cannot address one of the tensors, None if it can
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    sink_dtype: str | None = None
    packed_q: bool = False
    packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    needs_grad: bool = False
    layout_fault: str | None = None

    @property
    def has_queries(self) -> bool:
        """Whether there is any output element."""
        return self.num_query_rows * self.heads_q > 0

    @property
    def has_keys(self) -> bool:
        rows = self.seqlen_k if self.packed_k else self.batch * self.seqlen_k
        return rows * self.heads_kv > 0

    @property
    def num_query_rows(self) -> int:
        return self.seqlen_q if self.packed_q else self.batch * self.seqlen_q

    def __str__(self) -> str:
        def side(rows: int, heads: int, dim: int, packed: bool) -> str:
            extent = f"{rows} packed rows" if packed else f"{rows} rows"
            return f"{extent}, {heads} heads, dim {dim}"

        options = [f"scale {self.softmax_scale:.6g}"]
        if (self.window_left, self.window_right) == (None, 0):
            options.append("causal")
        elif (self.window_left, self.window_right) != (None, None):
            left, right = (
                "unbounded" if bound is None else bound
                for bound in (self.window_left, self.window_right)
            )
            options.append(f"window left {left}, right {right}")
        if self.softcap:
            options.append(f"softcap {self.softcap:g}")
        if self.sink_dtype:
            options.append(f"sink {self.sink_dtype}")
        for name in ("has_seqused_q", "has_seqused_k", "needs_grad"):
            if getattr(self, name):
                options.append(name.removeprefix("has_").replace("needs_grad", "gradients"))
        return (
            f"{self.dtype}, batch {self.batch}; "
            f"q: {side(self.seqlen_q, self.heads_q, self.head_dim, self.packed_q)}; "
            f"k: {side(self.seqlen_k, self.heads_kv, self.head_dim, self.packed_k)}; "
            f"v: dim {self.head_dim_v}; {', '.join(options)}"
        )


def describe_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    out: Tensor | None,
    needs_grad: bool,
) -> AttentionProblem:
    """Check shapes, dtypes, devices and options, and return the problem they pose.

    Reads no tensor contents, so it never synchronises. Raises TypeError for a wrong type or dtype
    and ValueError for a wrong value or shape; the message names the argument, what came and what
    is allowed.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
    _check_dtypes(q, k, v)
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    _check_rank("q", q, packed_q)
    _check_rank("k", k, packed_k)
    _check_rank("v", v, packed_k)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; they must be on one.")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}; "
            "all but the head dim must be equal."
        )
    heads_q, head_dim = q.shape[-2:]
    heads_kv, head_dim_v = v.shape[-2:]
    if k.shape[-1] != head_dim:
        raise ValueError(f"head_dim of q is {head_dim} and of k {k.shape[-1]}; they must be equal.")
    if head_dim < 1 or head_dim_v < 1:
        raise ValueError(f"head_dim={head_dim} and head_dim_v={head_dim_v} must be at least 1.")
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(
            f"heads_q={heads_q} is not a multiple of heads_kv={heads_kv}; each key head serves "
            "the same number of query heads."
        )
    batch = _batch(q, k, cu_seqlens_q, cu_seqlens_k)
    for name, vector, entries, meaning in (
        ("cu_seqlens_q", cu_seqlens_q, batch + 1, "batch + 1"),
        ("cu_seqlens_k", cu_seqlens_k, batch + 1, "batch + 1"),
        ("seqused_q", seqused_q, batch, "batch"),
        ("seqused_k", seqused_k, batch, "batch"),
    ):
        if vector is not None:
            _check_lengths(name, vector, entries, meaning, q.device)
    if sink is not None:
        _check_sink(sink, heads_q, q.device)
    if out is not None:
        _check_out(out, (*q.shape[:-1], head_dim_v), q)

    scale = _real("softmax_scale", softmax_scale, default=1.0 / math.sqrt(head_dim))
    cap = _real("softcap", softcap, default=0.0)
    if cap < 0.0:
        raise ValueError(f"softcap={softcap} is negative; use 0 for none or a positive cap.")
    left, right = mask_bounds(bool(causal), check_window(window_size))
    clips_q = seqused_q is not None and not packed_q
    clips_k = seqused_k is not None and not packed_k
    tensors = [("q", q, clips_q), ("k", k, clips_k), ("v", v, clips_k)]
    if out is not None:
        tensors.append(("out", out, clips_q))
    return AttentionProblem(
        dtype=DTYPE_NAMES[q.dtype],
        batch=batch,
        seqlen_q=q.shape[-3],
        seqlen_k=k.shape[-3],
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=scale,
        softcap=cap,
        window_left=left,
        window_right=right,
        sink_dtype=None if sink is None else DTYPE_NAMES[sink.dtype],
        packed_q=packed_q,
        packed_k=packed_k,
        has_seqused_q=seqused_q is not None,
        has_seqused_k=seqused_k is not None,
        needs_grad=needs_grad,
        layout_fault=next((fault for t in tensors if (fault := layout_fault(*t))), None),
    )


def layout_fault(name: str, tensor: Tensor, is_clipped: bool = False) -> str | None:
    """Why TMA cannot address a tensor, or None. Strides of modes of extent one do not matter.

    is_clipped  dense, and only some rows of each batch entry are in use: rows and entries then
                share one mode of the tensor map (`kernels.blocks.global_view.ragged`)
    """
    size = tensor.element_size()
    if tensor.numel() == 0:
        return None
    if not is_clipped and tensor.is_contiguous():
        # The usual case, in a third of the time: rows are what all other modes consist of.
        row_bytes = tensor.shape[-1] * size
        if (row_bytes | tensor.data_ptr()) % TMA_ALIGNMENT == 0:
            return None
    fault = last_stride_fault(name, tensor)
    if fault is not None:
        return fault
    for mode in range(tensor.dim() - 1):
        if tensor.shape[mode] > 1 and tensor.stride(mode) * size % TMA_ALIGNMENT:
            return (
                f"{name} has a stride of {tensor.stride(mode)} elements in dimension {mode}; "
                f"it must be a multiple of {TMA_ALIGNMENT // size} ({TMA_ALIGNMENT} bytes)"
            )
    if tensor.data_ptr() % TMA_ALIGNMENT:
        return f"{name} starts at an address that is not a multiple of {TMA_ALIGNMENT} bytes"
    if is_clipped:
        (batch, rows), (batch_stride, row_stride) = tensor.shape[:2], tensor.stride()[:2]
        unit = max(math.gcd(batch_stride, row_stride), 1)
        if ((batch - 1) * batch_stride + rows * row_stride) // unit >= MAX_COORDINATE:
            return (
                f"{name} has strides {tensor.stride()}; with seqused it may span "
                f"{MAX_COORDINATE} times the common divisor of its batch and row strides, {unit}"
            )
    return None


def last_stride_fault(name: str, tensor: Tensor) -> str | None:
    """Why a kernel cannot read rows of a tensor as one piece, or None."""
    if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1"
    return None


def widest_access(*tensors: Tensor) -> int:
    """The most bytes, up to 16, of which all addresses and strides in use are multiples."""
    together = TMA_ALIGNMENT
    for tensor in tensors:
        if tensor.numel():
            together |= tensor.data_ptr()
            for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
                if extent > 1:
                    together |= stride * tensor.element_size()
    return together & -together


def check_window(window_size: Any) -> tuple[int | None, int | None]:
    """window_size as a pair whose entries are None, -1 or not negative."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size={window_size!r} must be a pair (left, right).")
    pair: list[int | None] = []
    for side, bound in zip(("left", "right"), window_size, strict=True):
        if bound is not None:
            try:
                bound = operator.index(bound)
            except TypeError:
                raise TypeError(
                    f"window_size: the {side} bound {bound!r} must be an int or None."
                ) from None
            if bound < -1:
                raise ValueError(
                    f"window_size: the {side} bound is {bound}; allowed are -1 or None "
                    "(unbounded), 0 and positive numbers."
                )
            bound = min(bound, MAX_ROWS)
        pair.append(bound)
    return pair[0], pair[1]


def _real(name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite real number.")
    return float(value)


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype == k.dtype == v.dtype and q.dtype in DTYPE_NAMES:
        return
    raise TypeError(
        f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal, and one "
        f"of {', '.join(map(str, DTYPE_NAMES))}."
    )


def _check_rank(name: str, tensor: Tensor, packed: bool) -> None:
    wanted = "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    if tensor.dim() != (3 if packed else 4):
        side = "q" if name == "q" else "k"
        given = "with" if packed else "without"
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; {given} cu_seqlens_{side} it must be "
            f"{wanted}."
        )
    if tensor.shape[-3] > MAX_ROWS:
        raise ValueError(f"{name} has {tensor.shape[-3]} rows; the most is {MAX_ROWS}.")


def _batch(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    sides = []
    for name, tensor, cu_seqlens in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k)):
        if cu_seqlens is None:
            sides.append((f"{name}.shape[0]", tensor.shape[0]))
        else:
            shape = getattr(cu_seqlens, "shape", None)
            if shape is None or len(shape) != 1 or not shape[0]:
                got = type(cu_seqlens).__name__ if shape is None else shape
                kind = TypeError if shape is None else ValueError
                raise kind(
                    f"cu_seqlens_{name} must be an int32 tensor of shape (batch + 1,), got {got}."
                )
            sides.append((f"len(cu_seqlens_{name}) - 1", len(cu_seqlens) - 1))
    (name_q, batch), (name_k, batch_k) = sides
    if batch != batch_k:
        raise ValueError(f"the batch sizes differ: {name_q} is {batch} and {name_k} is {batch_k}.")
    return batch


def _check_lengths(
    name: str, vector: Tensor, entries: int, meaning: str, device: torch.device
) -> None:
    if not isinstance(vector, Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(vector).__name__}.")
    if vector.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {vector.dtype}; it must be torch.int32.")
    if vector.shape != (entries,):
        raise ValueError(
            f"{name} has shape {tuple(vector.shape)}; it must be ({meaning},) = ({entries},)."
        )
    if vector.device != device:
        raise ValueError(f"{name} is on {vector.device}, q on {device}; they must be on one.")
    if not vector.is_contiguous():
        raise ValueError(f"{name} has stride {vector.stride(0)}; it must be contiguous.")


def _check_sink(sink: Tensor, heads_q: int, device: torch.device) -> None:
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink must be a tensor, got {type(sink).__name__}.")
    if sink.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"sink has dtype {sink.dtype}; allowed are {', '.join(map(str, DTYPE_NAMES))}."
        )
    if sink.shape != (heads_q,):
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}; it must be (heads_q,) = ({heads_q},)."
        )
    if sink.device != device:
        raise ValueError(f"sink is on {sink.device}, q on {device}; they must be on one.")
    if not sink.is_contiguous():
        raise ValueError(f"sink has stride {sink.stride(0)}; it must be contiguous.")


def _check_out(out: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, got {type(out).__name__}.")
    if out.dtype != q.dtype or out.device != q.device or tuple(out.shape) != shape:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; "
            f"it must be {q.dtype} {shape} on {q.device}."
        )
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"out has strides {out.stride()}: some of its elements share memory, so it cannot "
            "be written."
        )
    if torch.is_grad_enabled() and out.requires_grad:
        raise ValueError("out requires grad; an output written in place must not.")
