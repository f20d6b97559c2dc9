"""Which rows does a CTA of the kernels before and behind the backward pass have?"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa4.kernels.blocks.row_range import first_row_with_keys
from fa4.kernels.blocks.sequence_bounds import SequenceBounds, sequence_bounds
from fa4.kernels.blocks.tile_order import find_sequence
from fa4.kernels.features import FinishFeatures, PrepareFeatures


class Lengths(NamedTuple):
    """Lengths of the sequences, as in the other kernels."""

    cu_seqlens_q: Optional[cute.Tensor]
    cu_seqlens_k: Optional[cute.Tensor]
    seqused_q: Optional[cute.Tensor]
    seqused_k: Optional[cute.Tensor]
    rows_q: Int32
    rows_k: Int32
    right: Int32


class RowBlock(NamedTuple):
    """Rows of one query head of one sequence.

    entry    batch entry of the workspaces and of dense tensors
    block    of the workspaces' rows
    m_block  of the sequence's, counted from `origin`
    origin   its first row that sees a key
    """

    entry: Int32
    head_idx: Int32
    block: Int32
    m_block: Int32
    q: SequenceBounds
    origin: Int32


@cute.jit
def locate_block(
    index: Int32,
    num_heads: Int32,
    num_blocks: Int32,
    lengths: Lengths,
    tile_m: cutlass.Constexpr[int],
    features: cutlass.Constexpr[PrepareFeatures | FinishFeatures],
):
    """The ``index``-th block: head after head, ``num_blocks`` each; all lanes of a warp call it."""
    pair = index // num_blocks
    block = index - pair * num_blocks
    entry = pair // num_heads
    head_idx = pair - entry * num_heads
    batch_idx, m_block = entry, block
    if const_expr(features.packed_q):
        batch_idx, first_slot = find_sequence(block, lengths.cu_seqlens_q, tile_m)
        m_block = block - first_slot
    q = sequence_bounds(batch_idx, lengths.rows_q, lengths.cu_seqlens_q, lengths.seqused_q)
    k = sequence_bounds(batch_idx, lengths.rows_k, lengths.cu_seqlens_k, lengths.seqused_k)
    origin = first_row_with_keys(q.length, k.length, lengths.right, features.has_right_bound)
    return RowBlock(entry, head_idx, block, m_block, q, origin)
