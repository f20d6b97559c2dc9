"""What kernels are compiled for: tensors of any size and strides, known by modes and alignment.

An argument that a specialisation has not got is None.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kernels.features import TMA_ALIGNMENT, BackwardFeatures, ForwardFeatures


def strided(element, modes: int, present: bool = True, align: int | None = None):
    """A tensor of any strides but the last one, which is 1.

    align  bytes that its address is a multiple of; an element's if None
    """
    if not present:
        return None
    shape = tuple(cute.sym_int() for _ in range(modes))
    stride = (*(cute.sym_int64() for _ in range(modes - 1)), 1)
    return cute.runtime.make_fake_tensor(element, shape, stride, assumed_align=align)


def rows(element, is_packed: bool):
    """(batch, rows, heads, dim), or packed (rows, heads, dim), that TMA can address.

    Strides are promised nothing: `global_view.rows_first` relies on the caller's check that those
    in use are multiples of 16 bytes.
    """
    return strided(element, 3 if is_packed else 4, align=TMA_ALIGNMENT)


def vector(present: bool, element=Int32):
    """Of lengths, unless it says otherwise."""
    return strided(element, 1, present)


def lengths(features):
    """cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k, those that the features have."""
    return (
        vector(features.packed_q),
        vector(features.packed_k),
        vector(features.has_seqused_q),
        vector(features.has_seqused_k),
    )


def row_statistics():
    """(2, batch or 1, heads_q, rows) fp32, as `blocks.row_statistics` lays them out."""
    return cute.runtime.make_fake_tensor(
        Float32,
        (2, *(cute.sym_int() for _ in range(3))),
        (*(cute.sym_int64(divisibility=16) for _ in range(3)), 1),
        assumed_align=16,
    )


def forward_arguments(features: ForwardFeatures, dtypes):
    """What the host entries of all forward kernels begin with: q to max_ctas.

    dtypes  element types by their names in features
    """
    dtype = dtypes[features.dtype]
    return (
        rows(dtype, features.packed_q),
        rows(dtype, features.packed_k),
        rows(dtype, features.packed_k),
        rows(dtype, features.packed_q),
        strided(Float32, 2 if features.packed_q else 3),
        *lengths(features),
        vector(features.sink_dtype is not None, dtypes.get(features.sink_dtype)),
        Float32(1.0),
        Float32(0.0),
        *(Int32(0), Int32(0), Int32(1), Int32(1), Int32(1), Int32(1)),
    )


def backward_inputs(features: BackwardFeatures, dtype):
    """What the host entries of the Hopper backward kernels begin with: q, k, v, grad_out."""
    q, k = features.packed_q, features.packed_k
    return rows(dtype, q), rows(dtype, k), rows(dtype, k), rows(dtype, q)


def backward_numbers(features: BackwardFeatures):
    """What those end with before the stream: lengths, scale, softcap, window, heads in a group."""
    return *lengths(features), Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1)


def stream():
    """The caller's current stream, whichever that is at a launch."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def options(arch: str, more: str = "") -> str:
    """Options of `cute.compile` for a function that takes such tensors."""
    return f"--enable-tvm-ffi --gpu-arch {arch} {more}".strip()
