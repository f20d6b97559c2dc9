"""Views of the caller's tensors that TMA can address, and their clipping to one sequence.

Plain functions, run while a kernel is traced: they hold no control flow of the device.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

TMA_ALIGNMENT = 16  # bytes: base address and every stride but the innermost


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
    """Make (rows, dim, ...) clippable at the end of any sequence inside it, in hardware.

    Returns a tensor (rows, dim, ends, ...) whose element (r, c, e) lies at row r + e - N of the
    original, N being its number of rows. A sequence of ``length`` rows from ``start`` is then
    the coordinates r = N - length + i, e = start + length: the end of the sequence falls on the
    bound of mode 0, so that TMA fills loads beyond it with zeros and drops stores beyond it. The
    view starts N rows before the tensor; no address in front of the tensor is ever formed from a
    coordinate in bounds. Technique: the ragged TMA descriptors of Triton.
    """
    rows = tensor.shape[0]
    row_stride = tensor.stride[0]
    shape = (rows, tensor.shape[1], rows + 1, *tensor.shape[2:])
    stride = (row_stride, tensor.stride[1], row_stride, *tensor.stride[2:])
    base = tensor.iterator.toint() - Int64(rows) * Int64(row_stride) * (
        tensor.element_type.width // 8
    )
    pointer = cute.make_ptr(
        tensor.element_type, base, cute.AddressSpace.gmem, assumed_align=TMA_ALIGNMENT
    )
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def one_sequence(
    tensor: cute.Tensor,
    start: Int32,
    length: Int32,
    head_idx: Int32,
    batch_idx: Int32,
    is_ragged: bool,
    is_packed: bool,
):
    """The (rows, dim) part of a TMA tensor that belongs to one head of one sequence.

    start, length  rows of the sequence; a dense tensor counts rows from its own batch entry
    is_ragged      the tensor was made by `ragged`, and is clipped to ``length``
    is_packed      there is no batch mode
    """
    if is_ragged:
        if is_packed:
            rows = tensor[None, None, start + length, head_idx]
        else:
            rows = tensor[None, None, start + length, head_idx, batch_idx]
        first = tensor.shape[0] - length
    else:
        rows = tensor[None, None, head_idx, batch_idx]
        first = start
    return cute.domain_offset((first, 0), rows)
