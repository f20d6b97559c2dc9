"""TMA copies of tiles, the rings of shared-memory buffers that they fill, and where one is in them.

`tma_copy` and `tma_ring` are plain functions, run while a kernel is traced.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.kernels.blocks import global_view


class Tma(NamedTuple):
    """A TMA copy, the tensor of coordinates that it takes, and `global_view.ragged`'s units."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    units: Optional[tuple[Int32, Int32]]


def tma_copy(op, tensor: cute.Tensor, is_ragged: bool, staged_layout, tile, parts: int = 1) -> Tma:
    """A TMA copy of ``tile`` rows by dims of ``tensor`` to or from one stage of a layout.

    parts  of which each CTA of the cluster copies one, to all of them
    """
    units = None
    if is_ragged:
        tensor, *units = global_view.ragged(tensor)
    one_stage = cute.slice_(staged_layout, (None, None, 0))
    atom, coordinates = cpasync.make_tiled_tma_atom(
        op, tensor, one_stage, tile, num_multicast=parts
    )
    return Tma(atom, coordinates, units and tuple(units))


def tma_ring(
    barriers,
    stages: int,
    releases: int,
    buffer: cute.Tensor,
    more_bytes: int = 0,
    ctas: int = 1,
) -> pipeline.PipelineTmaAsync:
    """A TMA-to-threads pipeline whose stages are given back by ``releases`` warps a CTA.

    buffer      (rows, dim, stages); more_bytes of a stage lie elsewhere
    ctas        that fill and drain each other's stages
    """
    tile_bytes = cute.size_in_bytes(buffer.element_type, buffer[None, None, 0].layout)
    return pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases * ctas),
        tx_count=tile_bytes + more_bytes,
        barrier_storage=barriers.data_ptr(),
        cta_layout_vmnk=cute.make_layout((1, ctas, 1, 1)),
        defer_sync=True,
    )


@cute.jit
def load_block(
    tma: Tma,
    gX: cute.Tensor,
    sX: cute.Tensor,
    ring: pipeline.PipelineAsync,
    block_idx: Int32,
    state: pipeline.PipelineState,
    parts: cutlass.Constexpr[int] = 1,
):
    """Copy one block of gX (rows, dim, blocks) to the stage of sX, once that is free.

    parts  this CTA copies one of so many, to every CTA of the cluster; all bytes of the stage are
           waited for
    """
    part = cute.arch.block_idx_in_cluster() if const_expr(parts > 1) else 0
    tXsX, tXgX = cpasync.tma_partition(
        tma.atom,
        part,
        cute.make_layout(parts),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )
    ring.producer_acquire(state)
    full = ring.producer_get_barrier(state)
    everyone = None
    if const_expr(parts > 1):
        everyone = cutlass.Int16((1 << parts) - 1)
    cute.copy(
        tma.atom,
        tXgX[None, block_idx],
        tXsX[None, state.index],
        tma_bar_ptr=full,
        mcast_mask=everyone,
    )


@cute.jit
def stage_at(count: Int32, stages: cutlass.Constexpr[int], is_producer: cutlass.Constexpr[bool]):
    """Pipeline state of the ``count``-th use of a ring of ``stages`` buffers.

    One running count a role replaces an index and a phase a pipeline; the producer's phase is the
    opposite one, because an empty barrier starts free.
    """
    # Unsigned, because rounding a signed quotient down takes five instructions more.
    turns = Int32(Uint32(count) // stages)
    phase = turns & 1
    if const_expr(is_producer):
        phase = phase ^ 1
    return pipeline.PipelineState(stages, count, count - turns * stages, phase)
