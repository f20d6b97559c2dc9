"""D = (A scaled) (B scaled)^T on the tensor cores of sm_100, one tile a CTA or pair.

As blackwell_gemm.py, with scale factors: threads copy them to shared memory as they are, where
CuTe's layouts name them, from there `tcgen05.cp` takes them to tensor memory.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as block_scales
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.memory import SmemAllocator

from tests.emulator.blackwell_gemm import OneTileGemm

ELEMENTS = {
    "e2m1": cutlass.Float4E2M1FN,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
SCALES = {"ue8m0": cutlass.Float8E8M0FNU, "ue4m3": cutlass.Float8E4M3FN}
CHUNK_ROWS, CHUNK_SCALES = 128, 4  # of the blocks of 512 bytes in which scale factors lie


@dataclass(frozen=True)
class ScaledTileShape:
    """What is compiled.

    a, b     element types
    scale    type of the scale factors
    block    elements along k that have one scale factor
    m, n, k  of the tile
    ctas     that work on it: 1 or 2
    """

    a: str = "e4m3"
    b: str = "e4m3"
    scale: str = "ue8m0"
    block: int = 32
    m: int = 128
    n: int = 128
    k: int = 128
    ctas: int = 1
    tiles: int = 1


class ScaledTileGemm(OneTileGemm):
    """Its `load` is inherited."""

    def __init__(self, tile: ScaledTileShape):
        self.tile = tile
        self.group = tcgen05.CtaGroup.ONE if tile.ctas == 1 else tcgen05.CtaGroup.TWO
        self.columns_of_d = tile.n
        self.tmem_columns = 512

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mScaleA: cute.Tensor,
        mScaleB: cute.Tensor,
        mD: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        tile = self.tile
        mnk = (tile.m, tile.n, tile.k)
        mA = cute.recast_tensor(mA, ELEMENTS[tile.a])
        mB = cute.recast_tensor(mB, ELEMENTS[tile.b])
        tiled_mma = sm100.make_blockscaled_trivial_tiled_mma(
            ELEMENTS[tile.a],
            ELEMENTS[tile.b],
            OperandMajorMode.K,
            OperandMajorMode.K,
            SCALES[tile.scale],
            tile.block,
            self.group,
            (tile.m, tile.n),
        )
        sA_layout = sm100.make_smem_layout_a(tiled_mma, mnk, ELEMENTS[tile.a], 1)
        sB_layout = sm100.make_smem_layout_b(tiled_mma, mnk, ELEMENTS[tile.b], 1)
        sSFA_layout = block_scales.make_smem_layout_sfa(tiled_mma, mnk, tile.block, 1)
        sSFB_layout = block_scales.make_smem_layout_sfb(tiled_mma, mnk, tile.block, 1)
        cluster = cute.tiled_divide(cute.make_layout((tile.ctas, 1, 1)), (tiled_mma.thr_id,))
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        stage = (None, None, None, 0)
        tma_a, mA_tma = make_tiled_tma_atom_A(
            load, mA, cute.slice_(sA_layout, stage), mnk, tiled_mma, cluster.shape
        )
        tma_b, mB_tma = make_tiled_tma_atom_B(
            load, mB, cute.slice_(sB_layout, stage), mnk, tiled_mma, cluster.shape
        )
        self.bytes_of_scales = [
            cute.cosize(cute.filter_zeros(layout)) for layout in (sSFA_layout, sSFB_layout)
        ]

        @cute.struct
        class Storage:
            loaded: cutlass.Int64
            multiplied: cutlass.Int64
            tmem_address: cutlass.Int32
            sA: cute.struct.Align[
                cute.struct.MemRange[ELEMENTS[tile.a], cute.cosize(sA_layout)], 1024
            ]
            sB: cute.struct.Align[
                cute.struct.MemRange[ELEMENTS[tile.b], cute.cosize(sB_layout)], 1024
            ]
            sSFA: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, self.bytes_of_scales[0]], 1024
            ]
            sSFB: cute.struct.Align[
                cute.struct.MemRange[cutlass.Uint8, self.bytes_of_scales[1]], 1024
            ]

        self.storage = Storage
        self.kernel(
            tiled_mma,
            cluster,
            tma_a,
            mA_tma,
            tma_b,
            mB_tma,
            mScaleA,
            mScaleB,
            mD,
            sA_layout,
            sB_layout,
            sSFA_layout,
            sSFB_layout,
        ).launch(
            grid=(tile.ctas, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(tile.ctas, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        cluster: cute.Layout,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        mScaleA: cute.Tensor,
        mScaleB: cute.Tensor,
        mD: cute.Tensor,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        sSFA_layout: cute.Layout,
        sSFB_layout: cute.Layout,
    ) -> None:
        tile = self.tile
        is_pair = cutlass.const_expr(tile.ctas == 2)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tidx = cute.arch.thread_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = SmemAllocator().allocate(self.storage)
        sA = storage.sA.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)
        sB = storage.sB.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)
        loaded, multiplied = storage.loaded.ptr, storage.multiplied.ptr
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(loaded, 1)
                cute.arch.mbarrier_init(multiplied, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(self.tmem_columns, storage.tmem_address.ptr, is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_pair)
        # Each CTA has the scale factors of its own rows of A and of all rows of B.
        bytes_a, bytes_b = self.bytes_of_scales
        own = cute.make_tensor(mScaleA.iterator + rank * bytes_a, cute.make_layout(bytes_a))
        self.copy_bytes(own, storage.sSFA, bytes_a, tidx)
        self.copy_bytes(mScaleB, storage.sSFB, bytes_b, tidx)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if is_pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, storage.tmem_address.ptr)

        acc_layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((tile.m, tile.n))).layout
        tCtD = cute.make_tensor(tmem, acc_layout)
        gA = cute.local_tile(mA, (tile.m, tile.k), (0, 0))
        gD = cute.local_tile(mD, (tile.m, tile.n), (0, 0))
        tCgD = tiled_mma.get_slice(rank).partition_C(gD)  # (MMA, 1, 1): this CTA's rows of D
        if warp_idx == 0:
            self.load(tiled_mma, cluster, rank, tma_a, gA, sA, tma_b, mB, sB, loaded)
            if rank == 0:
                cute.arch.mbarrier_wait(loaded, 0)
                scale_type = SCALES[tile.scale]
                mnk = (tile.m, tile.n, tile.k)
                stage = (None, None, None, 0)
                scales = [
                    cute.make_tensor(
                        cute.recast_ptr(tmem + column, dtype=scale_type),
                        make_layout(tiled_mma, mnk, tile.block, cute.slice_(layout, stage)),
                    )
                    for column, make_layout, layout in (
                        (tile.n, block_scales.make_tmem_layout_sfa, sSFA_layout),
                        (tile.n + 32, block_scales.make_tmem_layout_sfb, sSFB_layout),
                    )
                ]
                for tSF, memory, layout in (
                    (scales[0], storage.sSFA, sSFA_layout),
                    (scales[1], storage.sSFB, sSFB_layout),
                ):
                    pointer = cute.recast_ptr(memory.data_ptr(), dtype=scale_type)
                    self.copy_scales(cute.make_tensor(pointer, layout), tSF)
                tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                tiles = (None, None, None, 0)
                cute.gemm(tiled_mma, tCtD, [tCrA[tiles], scales[0]], [tCrB[tiles], scales[1]], tCtD)
                pair = None if cutlass.const_expr(tile.ctas == 1) else 0b11
                with cute.arch.elect_one():
                    tcgen05.commit(multiplied, pair, self.group)
        cute.arch.mbarrier_wait(multiplied, 0)

        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(8)), cutlass.Float32)
        t2r = tcgen05.make_tmem_copy(load, tCtD[(None, None), 0, 0])
        thread = t2r.get_slice(tidx)
        tTRgD = thread.partition_D(tCgD[(None, None), 0, 0])
        rD = cute.make_rmem_tensor(tTRgD.shape, cutlass.Float32)
        cute.copy(t2r, thread.partition_S(tCtD[(None, None), 0, 0]), rD)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(rD, tTRgD)

        cute.arch.sync_threads()
        if is_pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp_idx == 0:
            cute.arch.dealloc_tmem(tmem, self.tmem_columns, is_pair)

    @cute.jit
    def copy_bytes(
        self,
        source: cute.Tensor,
        target: Any,
        nbytes: cutlass.Constexpr[int],
        tidx: cutlass.Int32,
    ) -> None:
        words = cute.make_tensor(
            cute.recast_ptr(source.iterator, dtype=cutlass.Uint32), cute.make_layout(nbytes // 4)
        )
        shared = cute.make_tensor(
            cute.recast_ptr(target.data_ptr(), dtype=cutlass.Uint32), cute.make_layout(nbytes // 4)
        )
        for i in cutlass.range_constexpr(nbytes // 4 // self.threads):
            shared[tidx + i * self.threads] = words[tidx + i * self.threads]

    @cute.jit
    def copy_scales(self, sSF: cute.Tensor, tSF: cute.Tensor) -> None:
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), sSF.element_type)
        source, target = cute.filter_zeros(sSF), cute.filter_zeros(tSF)
        copy = tcgen05.make_s2t_copy(atom, target)
        thread = copy.get_slice(0)
        descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, thread.partition_S(source))
        cute.copy(copy, descriptors[None, None, None, None, 0], thread.partition_D(target))


def compile_scaled_gemm(tile: ScaledTileShape) -> Any:
    """(A, B, scales of A, scales of B, D), the first four as bytes.

    Scale factors come in blocks of 512 bytes, as shared memory has them.
    """

    def nbytes(name: str) -> int:
        return tile.k // 2 if name == "e2m1" else tile.k

    def scale_bytes(rows: int) -> int:
        return -(-rows // CHUNK_ROWS) * CHUNK_ROWS * tile.k // tile.block

    def tensor(dtype: Any, shape: tuple[int, ...]) -> Any:
        stride = (*shape[1:], 1)
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)

    with tempfile.TemporaryDirectory(prefix="fa4-") as folder:  # where the PTX is left as a file
        return cute.compile(
            ScaledTileGemm(tile),
            tensor(cutlass.Uint8, (tile.m, nbytes(tile.a))),
            tensor(cutlass.Uint8, (tile.n, nbytes(tile.b))),
            tensor(cutlass.Uint8, (tile.ctas * scale_bytes(tile.m // tile.ctas),)),
            tensor(cutlass.Uint8, (scale_bytes(tile.n),)),
            tensor(cutlass.Float32, (tile.m, tile.n)),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_100a --dump-dir={folder}",
        )
