"""Device code of `test_cluster_launch_control`: CTAs that take the work of others."""

from __future__ import annotations

import tempfile
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator


class TakeWork:
    """owner[i] = 1 + the CTA that did the work of CTA i; one CTA an element."""

    @cute.jit
    def __call__(self, owner: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel(owner).launch(grid=[cute.size(owner), 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, owner: cute.Tensor) -> None:
        thread = cute.arch.thread_idx()[0]
        this_cta = cute.arch.block_idx()[0]
        shared = SmemAllocator()
        barrier = shared.allocate_array(cutlass.Int64, 1)
        answer = cute.recast_ptr(shared.allocate(16, 16), dtype=cutlass.Int32)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tile, has_work, phase = this_cta, cutlass.Int32(1), cutlass.Int32(0)
        while has_work != 0:
            if thread == 0:
                owner[tile] = this_cta + 1
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 16)
                cute.arch.issue_clc_query(barrier, answer, multicast=False)
            cute.arch.mbarrier_wait(barrier, phase)
            phase ^= 1
            tile, _, _, has_work = cute.arch.clc_response(answer)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()


def compile_take_work() -> Any:
    with tempfile.TemporaryDirectory(prefix="fa4-") as folder:  # where the PTX is left as a file
        return cute.compile(
            TakeWork(),
            cute.runtime.make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=4),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_100a --dump-dir={folder}",
        )
