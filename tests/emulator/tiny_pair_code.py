"""A function that takes its tensors as one tuple."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


class AddOneToEach:
    """y[i] = x[i] + 1 for one CTA of threads."""

    @cute.jit
    def __call__(self, both: tuple[cute.Tensor, cute.Tensor], stream: cuda.CUstream) -> None:
        x, y = both
        self.kernel(x, y).launch(
            grid=(1, 1, 1), block=(cute.size(x), 1, 1), cluster=(1, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor) -> None:
        thread = cute.arch.thread_idx()[0]
        y[thread] = x[thread] + cutlass.Float32(1.0)
