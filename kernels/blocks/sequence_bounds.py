"""Where each sequence of a batch begins and ends, from cu_seqlens and seqused or dense extents."""

from typing import NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Int32, const_expr


class SequenceBounds(NamedTuple):
    """One side (queries or keys) of one sequence.

    start   first row, in the packed tensor; 0 in a dense one
    length  rows in use
    rows    rows stored, padding included; length <= rows
    """

    start: Int32
    length: Int32
    rows: Int32


@cute.jit
def sequence_bounds(
    batch_idx: Int32,
    dense_rows: Int32,
    cu_seqlens: Optional[cute.Tensor],
    seqused: Optional[cute.Tensor],
):
    """Bounds of sequence ``batch_idx``.

    dense_rows  extent of the sequence mode; for a packed tensor the number of its rows. Rows of a
                packed tensor behind the last sequence form one more, with index ``batch``, of
                which nothing is in use.
    """
    start = Int32(0)
    rows = dense_rows
    length = dense_rows
    if const_expr(cu_seqlens is not None):
        batch = cu_seqlens.shape[0] - 1
        start = cu_seqlens[batch_idx]
        if batch_idx < batch:
            rows = cu_seqlens[batch_idx + 1] - start
            length = rows
        else:
            rows = dense_rows - start
            length = Int32(0)
    if const_expr(seqused is not None):
        # The sequence of padding rows behind a packed tensor has no entry.
        if batch_idx < seqused.shape[0]:
            length = seqused[batch_idx]
    return SequenceBounds(start, length, rows)
