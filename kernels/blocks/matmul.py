"""A matrix product of one warpgroup."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def matmul(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulates: cutlass.Constexpr[bool],
    more: Optional[tuple[cute.TiledMma, cute.Tensor, cute.Tensor]] = None,
):
    """Issue acc (+)= a b as one wgmma group; the caller waits for it.

    more  (tiled MMA, a, b) of another product to be added, perhaps of another type
    """
    # An atom of our own: the accumulate flag is state, which must not leave this region.
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulates)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    if cutlass.const_expr(more is not None):
        other_mma, other_a, other_b = more
        atom = cute.make_mma_atom(other_mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(cute.size(other_a, mode=[2])):
            cute.gemm(atom, acc, other_a[None, None, k], other_b[None, None, k], acc)
    warpgroup.commit_group()
