"""flash-attn-4's own functions on CPU tensors: its kernels are compiled as they are and emulated.

    python -m tests.emulator.flash_attn_4 ARCH CASE     CASE is a number in `CASES`

Exits with an error unless the output matches the exact answer. A process of its own, because the
DSL compiles for one architecture a process, and because what is replaced here stays replaced:

- `cute.compile` keeps the PTX, and returns a function that runs in the emulator;
- the number of multiprocessors is the emulated device's;
- CPU tensors say that they are on a GPU, also to the compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fa4.emulator import DeviceModel, run
from fa4.emulator.cuda_tensors import CudaExporter
from tests.oracle import Case, assert_matches, make_inputs

MULTIPROCESSORS = 4

CASES = [
    Case((200,), (300,), 2, 2, head_dim=128),
    Case((250,), (250,), 4, 1, head_dim=64, causal=True),
    Case((300,), (300,), 1, 1, head_dim=64, window_size=(100, 20)),
    Case((130,), (200,), 1, 1, head_dim=256),
    Case((70, 70), (140, 140), 2, 1, head_dim=96, dtype=torch.float16),
]


class OnGpu(TorchFunctionMode):
    """Tensors answer that they are on a GPU, and new ones are made on the CPU all the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Hardware:
    """What persistent kernels size their grid by, instead of `cutlass.utils.HardwareInfo`."""

    def get_device_multiprocessor_count(self) -> int:
        return MULTIPROCESSORS

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return MULTIPROCESSORS // cluster_size


def replace_compiler(arch: str) -> None:
    """From here on compiled functions of flash-attn-4 run in the emulator."""
    import cutlass.cute as cute
    import cutlass.utils
    from flash_attn.cute import cute_dsl_utils

    compile_for_gpu, from_dlpack = cute.compile, cute_dsl_utils.from_dlpack
    device = DeviceModel(arch, MULTIPROCESSORS)

    def compile_for_emulator(*args: Any, options: str = "", **keywords: Any) -> Any:
        options = f"{options} --keep-ptx --gpu-arch {arch}"
        compiled = compile_for_gpu(*args, options=options, **keywords)

        def launch(*arguments: Any) -> None:
            with torch._C.DisableTorchFunction():
                run(compiled, *arguments, device=device)

        return launch

    cutlass.utils.HardwareInfo = Hardware
    cute.compile = compile_for_emulator
    cute_dsl_utils.from_dlpack = lambda tensor, **keywords: from_dlpack(
        CudaExporter(tensor), **keywords
    )


def forward(case: Case, arch: str) -> None:
    """Run a case and compare; raises AssertionError, or what the emulator reports."""
    from flash_attn.cute import interface

    inputs = make_inputs(case)
    left, right = (None if bound in (None, -1) else bound for bound in case.window_size)
    with OnGpu():
        out, lse, *_ = interface._flash_attn_fwd(
            inputs.q,
            inputs.k,
            inputs.v,
            causal=case.causal,
            window_size_left=left,
            window_size_right=right,
            return_lse=True,
            _arch=int(arch.removeprefix("sm_").rstrip("a")),
        )
    assert_matches(out, lse, inputs)


def main() -> None:
    arch, number = sys.argv[1:]
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(MULTIPROCESSORS)
    replace_compiler(arch)
    forward(CASES[int(number)], arch)
    print("matches")


if __name__ == "__main__":
    main()
