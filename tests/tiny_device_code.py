"""Device code of `tiny_kernel`; importing it imports the DSL."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute


class AddConstant:
    """y[i] = x[i] + constant for vectors of one length, one thread an element."""

    def __init__(self, constant: int, threads: int) -> None:
        self.constant = constant
        self.threads = threads

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(x), self.threads)
        self.kernel(x, y).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread_idx, _, _ = cute.arch.thread_idx()
        block_idx, _, _ = cute.arch.block_idx()
        i = block_idx * self.threads + thread_idx
        if i < cute.size(x):
            y[i] = x[i] + x.element_type(self.constant)
