"""D = A B^T on the tensor cores of sm_100, one tile a CTA or pair, as small as CuTe allows.

All of A and B is loaded at once, warp 0 multiplies, and every thread stores what it reads of tensor
memory where CuTe's layouts say it belongs. So whatever the emulator gets wrong about descriptors,
tensor memory or the registers of a load, D shows.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.memory import SmemAllocator

TYPES = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "tf32": cutlass.TFloat32,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
    "s8": cutlass.Int8,
    "u8": cutlass.Uint8,
}
ACCUMULATORS = {"f32": cutlass.Float32, "f16": cutlass.Float16, "s32": cutlass.Int32}
LOADS = {
    "32x32b": tcgen05.Ld32x32bOp,
    "16x64b": tcgen05.Ld16x64bOp,
    "16x128b": tcgen05.Ld16x128bOp,
    "16x256b": tcgen05.Ld16x256bOp,
    "16x32bx2": tcgen05.Ld16x32bx2Op,
}


@dataclass(frozen=True)
class TileShape:
    """What is compiled.

    m, n, k       of a tile
    ctas          that work on it: 1 or 2
    tiles         of m rows; B is loaded once for all, by multicast from every CTA of the cluster
    a_mn, b_mn    whether A and B are stored MN major, k the slower dimension
    load, repeat  instruction that reads tensor memory
    b_dtype       type of B, if it is another one
    acc           type of D
    rounds        whether TMA rounds operands to tf32
    """

    dtype: str = "bf16"
    m: int = 128
    n: int = 64
    k: int = 64
    ctas: int = 1
    tiles: int = 1
    a_mn: bool = False
    b_mn: bool = False
    load: str = "32x32b"
    repeat: int = 8
    b_dtype: str = ""
    acc: str = "f32"
    rounds: bool = False


class OneTileGemm:
    threads = 128

    def __init__(self, tile: TileShape):
        self.tile = tile
        self.group = tcgen05.CtaGroup.ONE if tile.ctas == 1 else tcgen05.CtaGroup.TWO
        self.tmem_columns = max(32, tile.n)
        self.b_dtype = tile.b_dtype or tile.dtype

    def tmem_load(self):
        """Made while tracing: only then is the architecture the one that is compiled for."""
        pack = tcgen05.Pack.PACK_16b_IN_32b if self.tile.acc == "f16" else tcgen05.Pack.NONE
        return LOADS[self.tile.load](tcgen05.Repetition(self.tile.repeat), pack)

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        tile = self.tile
        mnk = (tile.m, tile.n, tile.k)
        modes = [
            OperandMajorMode.MN if is_mn else OperandMajorMode.K for is_mn in (tile.a_mn, tile.b_mn)
        ]
        tiled_mma = sm100.make_trivial_tiled_mma(
            TYPES[tile.dtype],
            TYPES[self.b_dtype],
            *modes,
            ACCUMULATORS[tile.acc],
            self.group,
            (tile.m, tile.n),
        )
        sA_layout = sm100.make_smem_layout_a(tiled_mma, mnk, mA.element_type, 1)
        sB_layout = sm100.make_smem_layout_b(tiled_mma, mnk, mB.element_type, 1)
        self.cluster_size = tile.ctas * tile.tiles
        cluster = cute.tiled_divide(
            cute.make_layout((self.cluster_size, 1, 1)), (tiled_mma.thr_id,)
        )
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        load_b = load
        if cutlass.const_expr(tile.tiles > 1):
            load_b = cpasync.CopyBulkTensorTileG2SMulticastOp(self.group)
        stage = (None, None, None, 0)
        tma_a, mA_tma = make_tiled_tma_atom_A(
            load, mA, cute.slice_(sA_layout, stage), mnk, tiled_mma, cluster.shape
        )
        tma_b, mB_tma = make_tiled_tma_atom_B(
            load_b, mB, cute.slice_(sB_layout, stage), mnk, tiled_mma, cluster.shape
        )

        @cute.struct
        class Storage:
            loaded: cutlass.Int64
            multiplied: cutlass.Int64
            tmem_address: cutlass.Int32
            sA: cute.struct.Align[
                cute.struct.MemRange[mA.element_type, cute.cosize(sA_layout)], 1024
            ]
            sB: cute.struct.Align[
                cute.struct.MemRange[mB.element_type, cute.cosize(sB_layout)], 1024
            ]

        self.storage = Storage
        self.kernel(
            tiled_mma, cluster, tma_a, mA_tma, tma_b, mB_tma, mD, sA_layout, sB_layout
        ).launch(
            grid=(self.cluster_size, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster_size, 1, 1),
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
        mD: cute.Tensor,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ) -> None:
        tile = self.tile
        is_pair = cutlass.const_expr(tile.ctas == 2)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tidx = cute.arch.thread_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tile_idx, rank_in_tile = rank // tile.ctas, rank % tile.ctas
        is_cluster = cutlass.const_expr(self.cluster_size > 1)

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
        cute.arch.sync_threads()
        if is_cluster:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        acc_type = ACCUMULATORS[tile.acc]
        tmem = cute.arch.retrieve_tmem_ptr(acc_type, 16, storage.tmem_address.ptr)

        acc_layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((tile.m, tile.n))).layout
        tCtD = cute.make_tensor(tmem, acc_layout)
        cta_mma = tiled_mma.get_slice(rank_in_tile)
        gA = cute.local_tile(mA, (tile.m, tile.k), (tile_idx, 0))
        gD = cute.local_tile(mD, (tile.m, tile.n), (tile_idx, 0))
        tCgD = cta_mma.partition_C(gD)  # (MMA, 1, 1): this CTA's rows of D

        if warp_idx == 0:
            self.load(tiled_mma, cluster, rank, tma_a, gA, sA, tma_b, mB, sB, loaded)
            if rank_in_tile == 0:
                pair = None if cutlass.const_expr(tile.ctas == 1) else 0b11 << rank
                self.multiply(tiled_mma, pair, tCtD, sA, sB, loaded, multiplied)
        cute.arch.mbarrier_wait(multiplied, 0)

        atom = cute.make_copy_atom(self.tmem_load(), acc_type)
        t2r = tcgen05.make_tmem_copy(atom, tCtD[(None, None), 0, 0])
        thread = t2r.get_slice(tidx)
        tTRtD = thread.partition_S(tCtD[(None, None), 0, 0])
        tTRgD = thread.partition_D(tCgD[(None, None), 0, 0])
        rD = cute.make_rmem_tensor(tTRgD.shape, acc_type)
        cute.copy(t2r, tTRtD, rD)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(rD, tTRgD)

        cute.arch.sync_threads()
        if is_cluster:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp_idx == 0:
            cute.arch.dealloc_tmem(tmem, self.tmem_columns, is_pair)

    @cute.jit
    def load(
        self,
        tiled_mma: cute.TiledMma,
        cluster: cute.Layout,
        rank: cutlass.Int32,
        tma_a: cute.CopyAtom,
        gA: cute.Tensor,
        sA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        sB: cute.Tensor,
        loaded: cute.Pointer,
    ) -> None:
        """Each CTA loads its rows of A and its share of B; the first of a tile counts all bytes."""
        rank_in_tile, tile_idx, _, _ = cluster.get_flat_coord(rank)
        cta_mma = tiled_mma.get_slice(rank_in_tile)
        whole = cute.make_layout(1)
        tCgA = cute.group_modes(cta_mma.partition_A(gA), 0, 3)
        tCgB = cute.group_modes(cta_mma.partition_B(mB), 0, 3)
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, whole, cute.group_modes(sA, 0, 3), tCgA)
        tiles = cute.make_layout(cute.slice_(cluster, (0, None, 0, 0)).shape)
        tBsB, tBgB = cpasync.tma_partition(tma_b, tile_idx, tiles, cute.group_modes(sB, 0, 3), tCgB)
        nbytes = self.tile.ctas * (
            cute.size_in_bytes(sA.element_type, sA.layout)
            + cute.size_in_bytes(sB.element_type, sB.layout)
        )
        if rank_in_tile == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, nbytes)
        cute.copy(tma_a, tAgA, tAsA[None, 0], tma_bar_ptr=loaded)
        if cutlass.const_expr(self.tile.tiles > 1):
            where = cluster.get_flat_coord(rank)
            mask = cpasync.create_tma_multicast_mask(cluster, where, mcast_mode=1)
            cute.copy(tma_b, tBgB, tBsB[None, 0], tma_bar_ptr=loaded, mcast_mask=mask)
        else:
            cute.copy(tma_b, tBgB, tBsB[None, 0], tma_bar_ptr=loaded)

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        pair: cutlass.Int32 | None,
        tCtD: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        loaded: cute.Pointer,
        multiplied: cute.Pointer,
    ) -> None:
        """The first CTA of a pair issues for both; ``pair`` is their mask of ranks."""
        tCrA = tiled_mma.make_fragment_A(sA)
        tCrB = tiled_mma.make_fragment_B(sB)
        cute.arch.mbarrier_wait(loaded, 0)
        tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            cute.gemm(tiled_mma, tCtD, tCrA[None, None, k, 0], tCrB[None, None, k, 0], tCtD)
            tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
        with cute.arch.elect_one():
            tcgen05.commit(multiplied, pair, self.group)


def compile_gemm(tile: TileShape) -> Any:
    """(A, B, D): (tiles m, k) and (n, k) of the tile's types, (tiles m, n) of D's."""

    def matrix(dtype: Any, rows: int, columns: int, is_mn: bool) -> Any:
        stride = (1, rows) if is_mn else (columns, 1)
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride, assumed_align=16)

    def element(name: str) -> Any:
        # A tensor of type tf32 is rounded by TMA; the tensor core itself reads float32.
        return cutlass.Float32 if name == "tf32" and not tile.rounds else TYPES[name]

    with tempfile.TemporaryDirectory(prefix="fa4-") as folder:  # where the PTX is left as a file
        return cute.compile(
            OneTileGemm(tile),
            matrix(element(tile.dtype), tile.tiles * tile.m, tile.k, tile.a_mn),
            matrix(element(tile.b_dtype or tile.dtype), tile.n, tile.k, tile.b_mn),
            matrix(ACCUMULATORS[tile.acc], tile.tiles * tile.m, tile.n, False),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_100a --dump-dir={folder}",
        )
