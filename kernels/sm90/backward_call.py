"""Run-time arguments that the roles of every Hopper backward kernel read."""

from typing import NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Float32, Int32


class Call(NamedTuple):
    """Run-time arguments of a launch.

    rows_q, rows_k  extent of the row mode of q, and of k and v
    num_tiles, num_batches, heads_in_group
                    as `tile_order.locate_tile` wants them: of keys, or in the dQ kernel of rows
    """

    cu_seqlens_q: Optional[cute.Tensor]
    cu_seqlens_k: Optional[cute.Tensor]
    seqused_q: Optional[cute.Tensor]
    seqused_k: Optional[cute.Tensor]
    rows_q: Int32
    rows_k: Int32
    heads_q: Int32
    heads_kv: Int32
    num_tiles: Int32
    num_batches: Int32
    heads_in_group: Int32
    softmax_scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
