"""What a kernel must be able to do: the part of a problem that changes generated code.

A record here, the schedule and the architecture identify one compiled kernel. Batch, lengths,
head counts, strides, the exact head dims, the scale, the softcap and the window bounds are run-time
arguments: none of them may appear here. No import of the DSL, so dispatch and the cache can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

TMA_ALIGNMENT = 16  # bytes, of base addresses and of every stride but the innermost

# Head dims are rounded up to one of these; TMA fills the rest with zeros and clips the store.
HEAD_DIM_CLASSES = (64, 96, 128, 192, 256)

DTYPES = ("bf16", "fp16")
SINK_DTYPES = (None, "fp32", "bf16", "fp16")

# How scores become softmax exponents.
#   plain    a positive softmax_scale is folded into the exponent: one FMA an element
#   scaled   scores are multiplied first; needed where the scale is 0, negative or next to 0: the
#            running maximum of unscaled scores would not be the maximum of the scaled ones, and
#            0 times the -inf of a masked score is NaN
#   softcap  softcap * tanh(scale * score / softcap)
SCORE_TRANSFORMS = ("plain", "scaled", "softcap")


def head_dim_class(head_dim: int) -> int:
    """Smallest compiled head dim that holds ``head_dim`` (8 to 256)."""
    for padded in HEAD_DIM_CLASSES:
        if head_dim <= padded:
            return padded
    raise ValueError(f"head_dim={head_dim} is above the largest class {HEAD_DIM_CLASSES[-1]}")


@dataclass(frozen=True)
class ForwardFeatures:
    """Compile-time features of a forward kernel.

    dtype            of q, k, v and the output: "bf16" or "fp16"
    head_dim         of q and k, rounded up by `head_dim_class`
    head_dim_v       of v and the output, likewise
    has_left_bound   rows see nothing left of a bound (window_size[0])
    has_right_bound  rows see nothing right of a bound (causal, window_size[1])
    score            one of `SCORE_TRANSFORMS`
    sink_dtype       dtype of the sink logits, None where there are none
    packed_q         q, the output and the LSE are packed with cu_seqlens_q
    packed_k         k and v are packed with cu_seqlens_k
    has_seqused_q    the used query length of each sequence is read from memory
    has_seqused_k    likewise for keys
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    has_left_bound: bool = False
    has_right_bound: bool = False
    score: str = "plain"
    sink_dtype: str | None = None
    packed_q: bool = False
    packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("head_dim", HEAD_DIM_CLASSES),
            ("head_dim_v", HEAD_DIM_CLASSES),
            ("score", SCORE_TRANSFORMS),
            ("sink_dtype", SINK_DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")

    @property
    def name(self) -> str:
        """Short identifier for profilers and cache listings, such as ``bf16_d128_right``."""
        parts = [self.dtype, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        if self.has_left_bound:
            parts.append("left")
        if self.has_right_bound:
            parts.append("right")
        if self.score != "plain":
            parts.append(self.score)
        if self.sink_dtype is not None:
            parts.append(f"sink{self.sink_dtype}")
        for flag in ("packed_q", "packed_k", "seqused_q", "seqused_k"):
            if getattr(self, flag if flag.startswith("packed") else f"has_{flag}"):
                parts.append(flag.replace("_", ""))
        return "_".join(parts)


# In the backward pass the LSE is known, so that no running maximum asks for "scaled".
BACKWARD_SCORES = ("plain", "softcap")


@dataclass(frozen=True)
class BackwardFeatures:
    """Compile-time features of the backward kernels; a sink enters them only through the LSE.

    dtype            of q, k, v, the output, and their gradients: "bf16" or "fp16"
    head_dim         of q and k, rounded up by `head_dim_class`
    head_dim_v       of v and the output, likewise
    has_left_bound   rows see nothing left of a bound (window_size[0])
    has_right_bound  rows see nothing right of a bound (causal, window_size[1])
    score            one of `BACKWARD_SCORES`
    packed_q         q, the output and the LSE are packed with cu_seqlens_q
    packed_k         k and v are packed with cu_seqlens_k
    has_seqused_q    the used query length of each sequence is read from memory
    has_seqused_k    likewise for keys
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    has_left_bound: bool = False
    has_right_bound: bool = False
    score: str = "plain"
    packed_q: bool = False
    packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("head_dim", HEAD_DIM_CLASSES),
            ("head_dim_v", HEAD_DIM_CLASSES),
            ("score", BACKWARD_SCORES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")

    @property
    def name(self) -> str:
        """Short identifier for profilers and cache listings, such as ``bf16_d128_right``."""
        parts = [self.dtype, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        for part, is_there in (
            ("left", self.has_left_bound),
            ("right", self.has_right_bound),
            (self.score, self.score != "plain"),
            ("packedq", self.packed_q),
            ("packedk", self.packed_k),
            ("sequsedq", self.has_seqused_q),
            ("sequsedk", self.has_seqused_k),
        ):
            if is_there:
                parts.append(part)
        return "_".join(parts)


@dataclass(frozen=True)
class FinishFeatures:
    """Compile-time features of the kernel that turns summed-up dQ into its dtype.

    dtype       of dq
    head_dim    of q, rounded up by `head_dim_class`
    the others  as in `BackwardFeatures`
    """

    dtype: str
    head_dim: int
    has_right_bound: bool = False
    packed_q: bool = False
    packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False

    @property
    def name(self) -> str:
        """Short identifier for profilers and cache listings, such as ``bf16_d128_right``."""
        parts = [self.dtype, f"d{self.head_dim}"]
        for part, is_there in (
            ("right", self.has_right_bound),
            ("packedq", self.packed_q),
            ("packedk", self.packed_k),
            ("sequsedq", self.has_seqused_q),
            ("sequsedk", self.has_seqused_k),
        ):
            if is_there:
                parts.append(part)
        return "_".join(parts)


@dataclass(frozen=True)
class PrepareFeatures:
    """Compile-time features of the kernel in front of every backward pass.

    dtype         of the output and its gradient
    head_dim_v    of those, rounded up by `head_dim_class`
    has_grad_lse  the LSE has a gradient too
    the others    as in `BackwardFeatures`
    """

    dtype: str
    head_dim_v: int
    has_grad_lse: bool = False
    has_right_bound: bool = False
    packed_q: bool = False
    packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False

    @property
    def name(self) -> str:
        """Short identifier for profilers and cache listings, such as ``bf16_dv128_gradlse``."""
        parts = [self.dtype, f"dv{self.head_dim_v}"]
        for part, is_there in (
            ("gradlse", self.has_grad_lse),
            ("right", self.has_right_bound),
            ("packedq", self.packed_q),
            ("packedk", self.packed_k),
            ("sequsedq", self.has_seqused_q),
            ("sequsedk", self.has_seqused_k),
        ):
            if is_there:
                parts.append(part)
        return "_".join(parts)


# Where the rows of a sequence lie in a cache (slots, rows, heads, dim): in the slot of its own
# index, in one that cache_batch_idx names, or in pages that a page table names.
CACHE_ADDRESSING = ("own", "batch_idx", "page_table")

# Bytes that the addresses and strides of tensors are multiples of. Below 16 there is no TMA, and
# rows are read and written in pieces of so many bytes: slower, and the same to the bit.
ALIGNMENTS = (16, 8, 4, 2)


@dataclass(frozen=True)
class DecodeFeatures:
    """Compile-time features of a kernel that attends to a key/value cache.

    dtype to sink_dtype  as in `ForwardFeatures`
    packed_q             q, the output and the LSE are packed with cu_seqlens_q
    packed_new           lengths of the appended keys are in cu_seqlens_k_new
    has_leftpad          positions in front of cache_leftpad are not in use
    addressing           one of `CACHE_ADDRESSING`
    cache_align          of the caches, one of `ALIGNMENTS`
    q_align              of q and the output: 16, or 2 for any
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    has_left_bound: bool = False
    has_right_bound: bool = False
    score: str = "plain"
    sink_dtype: str | None = None
    packed_q: bool = False
    packed_new: bool = False
    has_leftpad: bool = False
    addressing: str = "own"
    cache_align: int = 16
    q_align: int = 16

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("head_dim", HEAD_DIM_CLASSES),
            ("head_dim_v", HEAD_DIM_CLASSES),
            ("score", SCORE_TRANSFORMS),
            ("sink_dtype", SINK_DTYPES),
            ("addressing", CACHE_ADDRESSING),
            ("cache_align", ALIGNMENTS),
            ("q_align", (16, 2)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")

    @property
    def name(self) -> str:
        """Short identifier for profilers and cache listings, such as ``bf16_d128_pages``."""
        parts = [self.dtype, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        parts += [
            word
            for present, word in (
                (self.has_left_bound, "left"),
                (self.has_right_bound, "right"),
                (self.score != "plain", self.score),
                (self.sink_dtype is not None, f"sink{self.sink_dtype}"),
                (self.packed_q, "packedq"),
                (self.packed_new, "packednew"),
                (self.has_leftpad, "leftpad"),
                (self.addressing == "batch_idx", "batchidx"),
                (self.addressing == "page_table", "pages"),
                (self.cache_align < 16, f"cachealign{self.cache_align}"),
                (self.q_align < 16, f"qalign{self.q_align}"),
            )
            if present
        ]
        return "_".join(parts)


@dataclass(frozen=True)
class AppendFeatures:
    """Compile-time features of the kernel that appends to a cache and rotates.

    dtype               of q, k, v and the caches
    rotary              None, "interleaved" or "half" (see `fa4.reference_kvcache.rotate`)
    rotary_dtype        of cos and sin, None without rotary
    q_advances          query i is rotated to its own position; otherwise all to that of the first
    packed_q            q is packed with cu_seqlens_q
    packed_new          k and v are packed with cu_seqlens_k_new
    addressing          one of `CACHE_ADDRESSING`
    has_rotary_seqlens  positions are given apart from where keys are written
    cache_align         of the caches: 16, or 2 for any
    new_align           of k, v, q and the tables, likewise
    """

    dtype: str
    rotary: str | None = None
    rotary_dtype: str | None = None
    q_advances: bool = False
    packed_q: bool = False
    packed_new: bool = False
    addressing: str = "own"
    has_rotary_seqlens: bool = False
    cache_align: int = 16
    new_align: int = 16

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("rotary", (None, "interleaved", "half")),
            ("rotary_dtype", SINK_DTYPES if self.rotary else (None,)),
            ("addressing", CACHE_ADDRESSING),
            ("cache_align", (16, 2)),
            ("new_align", (16, 2)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")

    @property
    def name(self) -> str:
        """Short identifier, such as ``bf16_half_pages``."""
        parts = [self.dtype]
        if self.rotary is not None:
            parts.append(f"{self.rotary}{self.rotary_dtype}")
        parts += [
            word
            for present, word in (
                (self.q_advances, "advances"),
                (self.packed_q, "packedq"),
                (self.packed_new, "packednew"),
                (self.has_rotary_seqlens, "positions"),
                (self.addressing == "batch_idx", "batchidx"),
                (self.addressing == "page_table", "pages"),
                (self.cache_align < 16, f"cachealign{self.cache_align}"),
                (self.new_align < 16, f"newalign{self.new_align}"),
            )
            if present
        ]
        return "_".join(parts)


@dataclass(frozen=True)
class CombineFeatures:
    """Compile-time features of the kernel that combines partial results of whole tensors.

    partial_dtype  of the partial outputs: "fp32", "bf16" or "fp16"
    out_dtype      of the output, likewise
    head_dim_v     rounded up by `head_dim_class`
    """

    partial_dtype: str
    out_dtype: str
    head_dim_v: int

    def __post_init__(self) -> None:
        for name, allowed in (
            ("partial_dtype", ("fp32", *DTYPES)),
            ("out_dtype", ("fp32", *DTYPES)),
            ("head_dim_v", HEAD_DIM_CLASSES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")

    @property
    def name(self) -> str:
        """Short identifier, such as ``fp32_bf16_d128``."""
        return f"{self.partial_dtype}_{self.out_dtype}_d{self.head_dim_v}"
