"""Views of the caller's tensors that TMA can address, and their clipping to one sequence.

Plain functions, run while a kernel is traced, but for one that the host part runs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.kernels.features import TMA_ALIGNMENT

RAGGED_ROWS = 1 << 30  # more rows than any sequence has
ANY_EXTENT = 0x7FFF0000  # of a mode whose bound is never meant to clip


def rows_first(tensor: cute.Tensor):
    """Reorder (batch, rows, heads, dim) or (rows, heads, dim) to (rows, dim, heads[, batch]).

    Strides of extents of one are replaced: they are never used, and callers may hold any number
    there, which TMA would refuse. All others are promised to be multiples of 16 bytes; the caller
    has checked that.
    """
    step = TMA_ALIGNMENT * 8 // tensor.element_type.width
    order = (0, 2, 1) if cute.rank(tensor) == 3 else (1, 3, 2, 0)
    shape = tuple(tensor.shape[mode] for mode in order)

    def promised(mode):
        stride = tensor.stride[mode]
        in_use = Int64(cutlass.select_(tensor.shape[mode] == 1, Int64(step), stride))
        return cute.assume(in_use, divby=step)

    stride = tuple(1 if mode == order[1] else promised(mode) for mode in order)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def modes_reversed(tensor: cute.Tensor):
    """Reverse the modes: an LSE ([batch,] heads, rows) becomes (rows, heads[, batch])."""
    return cute.make_tensor(
        tensor.iterator,
        cute.make_layout(tuple(tensor.shape)[::-1], stride=tuple(tensor.stride)[::-1]),
    )


@cute.jit
def greatest_common_divisor(a: Int64, b: Int64):
    while b != 0:
        a, b = b, a % b
    return a


def ragged(tensor: cute.Tensor):
    """Make (rows, dim, heads[, batch]) clippable at the end of any sequence inside it, in hardware.

    Returns (view, row_units, batch_units). The view is (rows, dim, back, forth, heads): its
    element (r, c, RAGGED_ROWS, f, h) lies RAGGED_ROWS rows in front of row r of the original, and
    f units of the forth mode behind that. A sequence of ``length`` rows from ``start`` of batch
    entry b is then the coordinates r = RAGGED_ROWS - length + i and
    f = (start + length) * row_units + b * batch_units: the end of the sequence falls on the bound
    of mode 0, so that TMA fills loads beyond it with zeros and drops stores beyond it.

    The way back is a stride so long that its product with RAGGED_ROWS wraps around 64 bits.
    (Moving the base address to the front instead saves a mode, but with it loads were seen to
    fault on an H200.) TMA has five modes, so rows and batch entries share the forth mode, whose
    unit is the greatest common divisor of their strides.
    Technique: the ragged TMA descriptors of Triton.
    """
    row_stride, dim_stride, head_stride = tensor.stride[:3]
    step = TMA_ALIGNMENT * 8 // tensor.element_type.width
    batch_stride = Int64(0)
    if cute.rank(tensor) == 4:
        batch_stride = Int64(
            cutlass.select_(tensor.shape[3] == 1, Int64(0), Int64(tensor.stride[3]))
        )
    common = greatest_common_divisor(Int64(row_stride), batch_stride)
    # Both are 0 where one row is shown many times.
    unit = cutlass.max(common, Int64(step))
    view = cute.make_tensor(
        tensor.iterator,
        cute.make_layout(
            (RAGGED_ROWS, tensor.shape[1], ANY_EXTENT, ANY_EXTENT, ANY_EXTENT),
            stride=(
                row_stride,
                dim_stride,
                cute.assume(Int64(1 << 34) - row_stride, divby=step),
                cute.assume(unit, divby=step),
                head_stride,
            ),
        ),
    )
    return view, Int32(row_stride // unit), Int32(batch_stride // unit)


def one_sequence(
    tensor: cute.Tensor,
    units: tuple[Int32, Int32] | None,
    start: Int32,
    length: Int32,
    head_idx: Int32,
    batch_idx: Int32,
):
    """The (rows, dim) part of a TMA tensor that belongs to one head of one sequence.

    units          (row_units, batch_units) of `ragged`, whose view is clipped to ``length``; None
                   for a plain dense tensor
    start, length  rows of the sequence; a dense tensor counts rows from its own batch entry
    """
    if units is None:
        return cute.domain_offset((start, 0), tensor[None, None, head_idx, batch_idx])
    row_units, batch_units = units
    forth = (start + length) * row_units + batch_idx * batch_units
    rows = tensor[None, None, RAGGED_ROWS, forth, head_idx]
    return cute.domain_offset((RAGGED_ROWS - length, 0), rows)
