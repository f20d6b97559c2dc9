"""What kernels are compiled for: tensors of any size and strides, known by modes and alignment.

An argument that a specialisation has not got is None.
"""

import cutlass.cute as cute
from cutlass import Int32

from fa4.kernels.blocks import global_view


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
    return strided(element, 3 if is_packed else 4, align=global_view.TMA_ALIGNMENT)


def vector(present: bool, element=Int32):
    """Of lengths, unless it says otherwise."""
    return strided(element, 1, present)


def stream():
    """The caller's current stream, whichever that is at a launch."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def options(arch: str, more: str = "") -> str:
    """Options of `cute.compile` for a function that takes such tensors."""
    return f"--enable-tvm-ffi --gpu-arch {arch} {more}".strip()
