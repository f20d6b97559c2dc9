"""Views of the caller's tensors that TMA can address, and their clipping to one sequence.

Plain functions, run while a kernel is traced: they hold no control flow of the device.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

TMA_ALIGNMENT = 16  # bytes: base address and every stride but the innermost

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


def ragged(tensor: cute.Tensor):
    """Make (rows, dim, heads[, batch]) clippable at the end of any sequence inside it, in hardware.

    Returns (view, row_step, head_step). The view is (rows, dim, back, forth, heads): its element
    (r, c, RAGGED_ROWS, f, h) lies at row r + f - RAGGED_ROWS of the original. A sequence of
    ``length`` rows from ``start`` is then the coordinates r = RAGGED_ROWS - length + i and
    f = start + length: the end of the sequence falls on the bound of mode 0, so that TMA fills
    loads beyond it with zeros and drops stores beyond it. The way back is a stride so long that
    its product with RAGGED_ROWS wraps around 64 bits. (Moving the base address to the front instead
    saves a mode, but with it loads were seen to fault on an H200.) Technique: the ragged TMA
    descriptors of Triton.

    TMA has five modes, so a batch mode is folded into the rows or the heads: batch entry b lies
    row_step * b rows or head_step * b heads further. The caller has checked that one of the two
    strides divides the batch's.
    """
    dims = tensor.shape[1]
    row_stride, dim_stride, head_stride = tensor.stride[:3]
    step = TMA_ALIGNMENT * 8 // tensor.element_type.width
    back = cute.assume(Int64(1 << 34) - row_stride, divby=step)
    view = cute.make_tensor(
        tensor.iterator,
        cute.make_layout(
            (RAGGED_ROWS, dims, ANY_EXTENT, ANY_EXTENT, ANY_EXTENT),
            stride=(row_stride, dim_stride, back, row_stride, head_stride),
        ),
    )
    row_step = head_step = Int32(0)
    if cute.rank(tensor) == 4:
        batch_stride = Int64(tensor.stride[3])
        # Strides of 0 (expanded) divide nothing; extents of one move nothing.
        moves = (tensor.shape[3] != 1) & (batch_stride != 0)
        by_rows = (row_stride > 0) & (batch_stride % cutlass.max(row_stride, 1) == 0)
        quotients = [batch_stride // cutlass.max(s, Int64(1)) for s in (row_stride, head_stride)]
        row_step = Int32(cutlass.select_(moves & by_rows, quotients[0], Int64(0)))
        head_step = Int32(cutlass.select_(moves & ~by_rows, quotients[1], Int64(0)))
    return view, row_step, head_step


def one_sequence(
    tensor: cute.Tensor,
    steps: tuple[Int32, Int32] | None,
    start: Int32,
    length: Int32,
    head_idx: Int32,
    batch_idx: Int32,
):
    """The (rows, dim) part of a TMA tensor that belongs to one head of one sequence.

    steps          (row_step, head_step) of `ragged`, whose view is clipped to ``length``; None for
                   a plain dense tensor
    start, length  rows of the sequence; a dense tensor counts rows from its own batch entry
    """
    if steps is None:
        return cute.domain_offset((start, 0), tensor[None, None, head_idx, batch_idx])
    row_step, head_step = steps
    forth = start + length + batch_idx * row_step
    rows = tensor[None, None, RAGGED_ROWS, forth, head_idx + batch_idx * head_step]
    return cute.domain_offset((RAGGED_ROWS - length, 0), rows)
