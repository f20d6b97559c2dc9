"""Device code of `test_capture`'s launch with a cluster; importing it imports the DSL."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute


class WriteRanks:
    """ranks[i] = rank of CTA i in its cluster of two; every CTA asks for some shared memory."""

    def __init__(self, shared_bytes: int) -> None:
        self.shared_bytes = shared_bytes

    @cute.jit
    def __call__(self, ranks: cute.Tensor, stream: cuda.CUstream):
        self.kernel(ranks).launch(
            grid=[cute.size(ranks), 1, 1],
            block=[32, 1, 1],
            cluster=[2, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, ranks: cute.Tensor):
        block_idx, _, _ = cute.arch.block_idx()
        thread_idx, _, _ = cute.arch.thread_idx()
        if thread_idx == 0:
            ranks[block_idx] = cute.arch.block_idx_in_cluster()
