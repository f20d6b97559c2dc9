"""Small CuTe-DSL kernels, one for each of the ways in which threads compute, exchange and copy.

Importing this imports the DSL.
"""

from __future__ import annotations

import tempfile
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.memory import SmemAllocator


def compile_kernel(arch: str, function: Any, *shapes: tuple[Any, tuple[int, ...]]) -> Any:
    """cute.compile for row-major tensors of (dtype, shape), for the emulator of an architecture."""
    tensors = []
    for dtype, shape in shapes:
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        tensors.append(
            cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=16)
        )
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(
            function,
            *tensors,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --generate-line-info "
            f"--dump-dir={folder}",
            no_jit_engine=True,
        )


class Gelu:
    """y = x (1 + tanh(0.8 x + 0.04 x^3)) / 2 in CTAs of 80 threads, whose last warp is a half."""

    threads = 80

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(x), self.threads)
        self.kernel(x, y).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if i < cute.size(x):
            value = x[i].to(cutlass.Float32)
            inner = value * (0.8 + 0.04 * value * value)
            result = 0.5 * value * (1.0 + cute.math.tanh(inner, fastmath=True))
            y[i] = result.to(y.element_type)


class Transpose:
    """y = x^T in tiles of 32 by 32 through shared memory whose rows are one element longer."""

    tile = 32
    rows = 8  # of threads

    def __init__(self, synchronises: bool = True) -> None:
        self.synchronises = synchronises

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        m, n = x.shape
        grid = [cute.ceil_div(n, self.tile), cute.ceil_div(m, self.tile), 1]
        self.kernel(x, y).launch(grid=grid, block=[self.tile, self.rows, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        column, row, _ = cute.arch.thread_idx()
        tile_x, tile_y, _ = cute.arch.block_idx()
        layout = cute.make_layout((self.tile, self.tile), stride=(self.tile + 1, 1))
        tile = SmemAllocator().allocate_tensor(x.element_type, layout, 16)
        m, n = x.shape
        for step in cutlass.range_constexpr(self.tile // self.rows):
            r = row + step * self.rows
            if tile_y * self.tile + r < m and tile_x * self.tile + column < n:
                tile[r, column] = x[tile_y * self.tile + r, tile_x * self.tile + column]
        if cutlass.const_expr(self.synchronises):
            cute.arch.sync_threads()
        for step in cutlass.range_constexpr(self.tile // self.rows):
            r = row + step * self.rows
            if tile_x * self.tile + r < n and tile_y * self.tile + column < m:
                y[tile_x * self.tile + r, tile_y * self.tile + column] = tile[column, r]


class RowSums:
    """Sum, largest element and count of positive ones of each row: a CTA of 4 warps a row.

    Lanes meet by shuffles, redux and votes, warps through shared memory.
    """

    warps = 4

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        total: cute.Tensor,
        largest: cute.Tensor,
        positive: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.kernel(x, total, largest, positive).launch(
            grid=[x.shape[0], 1, 1], block=[32 * self.warps, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, total: cute.Tensor, largest: cute.Tensor, positive: cute.Tensor
    ):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warp_index, lane = thread // 32, thread % 32
        smem = SmemAllocator()
        sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout(self.warps), 16)
        maxima = smem.allocate_tensor(cutlass.Int32, cute.make_layout(self.warps), 16)
        counts = smem.allocate_tensor(cutlass.Int32, cute.make_layout(self.warps), 16)
        value = cutlass.Float32(0.0)
        whole = cutlass.Int32(-(2**31))
        count = cutlass.Int32(0)
        for start in cutlass.range(0, x.shape[1], 32 * self.warps):
            element = cutlass.Float32(0.0)
            if start + thread < x.shape[1]:
                element = x[row, start + thread]
                whole = cutlass.max(whole, element.to(cutlass.Int32))
            value += element
            count += cute.arch.popc(cute.arch.vote_ballot_sync(element > 0.0))
        value = cute.arch.warp_reduction_sum(value)
        whole = cute.arch.warp_redux_sync(whole, "max")
        if lane == 0:
            sums[warp_index] = value
            maxima[warp_index] = whole
            counts[warp_index] = count
        cute.arch.sync_threads()
        if thread == 0:
            value = sums[0]
            whole = maxima[0]
            count = counts[0]
            for other in cutlass.range_constexpr(1, self.warps):
                value += sums[other]
                whole = cutlass.max(whole, maxima[other])
                count += counts[other]
            total[row] = value
            largest[row] = whole
            positive[row] = count


class Histogram:
    """Counts of the values 0 to 15, by atomics in shared and in global memory; and tickets."""

    threads = 96

    @cute.jit
    def __call__(
        self, x: cute.Tensor, counts: cute.Tensor, tickets: cute.Tensor, stream: cuda.CUstream
    ):
        blocks = cute.ceil_div(cute.size(x), self.threads)
        self.kernel(x, counts, tickets).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, counts: cute.Tensor, tickets: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        own = SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(16), 16)
        if thread < 16:
            own[thread] = 0
        cute.arch.sync_threads()
        i = block * self.threads + thread
        if i < cute.size(x):
            cute.arch.atomic_add(own.iterator + x[i], cutlass.Int32(1))
            # The last element of `counts` hands out tickets: one for each element, none twice.
            tickets[i] = cute.arch.atomic_add(counts.iterator + 16, cutlass.Int32(1))
        cute.arch.sync_threads()
        if thread < 16:
            cute.arch.atomic_add(counts.iterator + thread, own[thread])


class Product:
    """C = A B^T of bf16 (m, 64) and (8, 64): 16 rows a CTA of one warp.

    cp.async brings A and B in two groups of 32 columns, ldmatrix the fragments to registers.
    """

    k, columns = 64, 32

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        self.kernel(a, b, c).launch(grid=[a.shape[0] // 16, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        rows = cute.make_layout((16, self.k), stride=(self.k + 8, 1))
        shared_a = smem.allocate_tensor(a.element_type, rows, 16)
        rows_b = cute.make_layout((8, self.k), stride=(self.k + 8, 1))
        shared_b = smem.allocate_tensor(b.element_type, rows_b, 16)
        own = cute.local_tile(a, (16, self.k), (block, 0))
        op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, a.element_type, num_bits_per_copy=128)
        # 8 rows of 4 chunks of 8 elements: a chunk a lane.
        chunks = cute.make_tiled_copy_tv(
            atom, cute.make_layout((8, 4), stride=(4, 1)), cute.make_layout((1, 8))
        ).get_slice(lane)
        for group in cutlass.range_constexpr(self.k // self.columns):
            for source, target, num_rows in (
                (own, shared_a, 16),
                (b, shared_b, 8),
            ):
                shape = (num_rows, self.columns)
                cute.copy(
                    atom,
                    chunks.partition_S(cute.local_tile(source, shape, (0, group))),
                    chunks.partition_D(cute.local_tile(target, shape, (0, group))),
                )
            cute.arch.cp_async_commit_group()
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(a.element_type, cutlass.Float32, (16, 8, 16)))
        slice_mma = mma.get_slice(lane)
        accumulator = cute.make_rmem_tensor(mma.partition_shape_C((16, 8)), cutlass.Float32)
        accumulator.fill(0.0)
        load_a = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), a.element_type), mma
        )
        load_b = cute.make_tiled_copy_B(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2), b.element_type), mma
        )
        for group in cutlass.range_constexpr(self.k // self.columns):
            cute.arch.cp_async_wait_group(self.k // self.columns - 1 - group)
            cute.arch.sync_warp()
            tile_a = cute.local_tile(shared_a, (16, self.columns), (0, group))
            tile_b = cute.local_tile(shared_b, (8, self.columns), (0, group))
            fragment_a = slice_mma.make_fragment_A(slice_mma.partition_A(tile_a))
            fragment_b = slice_mma.make_fragment_B(slice_mma.partition_B(tile_b))
            copy_a, copy_b = load_a.get_slice(lane), load_b.get_slice(lane)
            cute.copy(load_a, copy_a.partition_S(tile_a), copy_a.retile(fragment_a))
            cute.copy(load_b, copy_b.partition_S(tile_b), copy_b.retile(fragment_b))
            cute.gemm(mma, accumulator, fragment_a, fragment_b, accumulator)
        target = slice_mma.partition_C(cute.local_tile(c, (16, 8), (block, 0)))
        cute.autovec_copy(accumulator, target)
