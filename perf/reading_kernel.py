"""The device code of `perf.reading`. Importing this module imports the DSL."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from fa4.kernels.blocks.tma_rings import stage_at
from perf.reading import ReadingSchedule


class Reading:
    def __init__(self, schedule: ReadingSchedule):
        self.schedule = schedule

    @cute.jit
    def __call__(
        self, mX: cute.Tensor, mY: cute.Tensor, pieces: Int32, ctas: Int32, stream: cuda.CUstream
    ):
        """Read ``pieces`` pieces of each tensor, (elements,), by turns of the CTAs."""
        schedule = self.schedule

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[Int64, schedule.stages]
            buffer: cute.struct.Align[
                cute.struct.MemRange[Uint8, schedule.stages * schedule.piece_bytes], 128
            ]

        self.shared_storage = SharedStorage
        self.kernel(mX, mY, pieces).launch(
            grid=(ctas, 1, 1), block=(cute.arch.WARP_SIZE, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, pieces: Int32):
        stages, size = self.schedule.stages, self.schedule.piece_bytes
        storage = SmemAllocator().allocate(self.shared_storage)
        full, buffer = storage.full.data_ptr(), storage.buffer.data_ptr()
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        count = (2 * pieces - first + step - 1) // step
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
            for i in cutlass.range(count + stages, unroll=1):
                state = stage_at(i, stages, True)
                if i >= stages:
                    cute.arch.mbarrier_wait(full + state.index, state.phase)
                if i < count:
                    piece = first + i * step
                    source = mX.iterator.toint()
                    if piece >= pieces:
                        piece = piece - pieces
                        source = mY.iterator.toint()
                    cute.arch.mbarrier_arrive_and_expect_tx(full + state.index, size)
                    cute.arch.inline_ptx(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                        f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
                        read_only_args=[
                            (buffer + state.index * size).toint(),
                            source + Int64(piece) * size,
                            (full + state.index).toint(),
                        ],
                    )
