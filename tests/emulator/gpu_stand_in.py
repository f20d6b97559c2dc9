"""Lets other people's host code believe in a GPU: CPU tensors that say they are on one, and kernels
that are compiled as they are and run in the emulator.

For processes of their own: what is replaced here stays replaced, and the DSL compiles for one
architecture a process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fa4.emulator import DeviceModel, run
from fa4.emulator.cuda_tensors import CudaExporter

MULTIPROCESSORS = 4
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
ALIGNMENT = 512  # of what PyTorch allocates on a GPU


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


class AlignedOnGpu(OnGpu):
    """New tensors also start where a GPU's would."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and result.is_contiguous():
            with torch._C.DisableTorchFunction():
                owns_memory = result.untyped_storage().data_ptr() == result.data_ptr()
                if owns_memory and result._base is None:
                    return aligned(result)
        return result


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it that starts at a multiple of `ALIGNMENT`."""
    if tensor.data_ptr() % ALIGNMENT == 0 or not tensor.numel():
        return tensor
    nbytes = tensor.numel() * tensor.element_size()
    room = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    copy = room[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class Hardware:
    """What persistent kernels size their grid by, instead of `cutlass.utils.HardwareInfo`."""

    def get_device_multiprocessor_count(self) -> int:
        return MULTIPROCESSORS

    def get_max_active_clusters(self, cluster_size: int) -> int:
        return MULTIPROCESSORS // cluster_size


def replace_compiler(arch: str, check_races: bool) -> None:
    """From here on `cute.compile` returns functions that run in the emulator.

    Their tensors may be PyTorch's, or the DSL's made of them by the replaced `from_dlpack`.
    """
    import cutlass.cute as cute
    import cutlass.cute.runtime
    import cutlass.utils

    compile_for_gpu, from_dlpack = cute.compile, cutlass.cute.runtime.from_dlpack
    device = DeviceModel(arch, MULTIPROCESSORS)
    sources: list[tuple[Any, torch.Tensor]] = []  # the DSL's tensors, kept alive, and PyTorch's
    folder = tempfile.mkdtemp(prefix="fa4-", dir=os.environ.get("CUTE_DSL_DUMP_DIR"))

    def compile_for_emulator(*args: Any, options: str = "", **keywords: Any) -> Any:
        if "--enable-tvm-ffi" not in options:
            options += " --enable-tvm-ffi"
        options += f" --keep-ptx --gpu-arch {arch} --dump-dir={folder}"
        compiled = compile_for_gpu(*args, options=options, **keywords)

        def launch(*arguments: Any) -> None:
            with torch._C.DisableTorchFunction():
                plain = [_source_of(argument, sources) for argument in arguments]
                for report in run(compiled, *plain, device=device, check_races=check_races):
                    print(f"launch: grid {report.launch.grid}, cluster {report.launch.cluster}")

        return launch

    def from_cpu_tensor(tensor: torch.Tensor, **keywords: Any) -> Any:
        found = from_dlpack(CudaExporter(tensor), **{**keywords, "enable_tvm_ffi": True})
        sources.append((found, tensor))
        return found

    cutlass.utils.HardwareInfo = Hardware
    cute.compile = compile_for_emulator
    cutlass.cute.runtime.from_dlpack = from_cpu_tensor


def _source_of(argument: Any, sources: list[tuple[Any, torch.Tensor]]) -> Any:
    return next((tensor for found, tensor in sources if found is argument), argument)


def replace_device(arch: str) -> None:
    """From here on `torch.cuda` and the DSL answer as on one GPU of an architecture."""
    import cutlass.base_dsl.runtime.cuda as dsl_cuda

    major, minor = CAPABILITIES[arch]
    shared_bytes = DeviceModel(arch).shared_bytes
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS,
        L2_cache_size=50 << 20,
        major=major,
        minor=minor,
        total_memory=1 << 36,
        shared_memory_per_block_optin=shared_bytes,
    )
    stream = SimpleNamespace(cuda_stream=0)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "current_stream": lambda device=None: stream,
        "device": lambda device=None: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range = lambda *args, **keywords: contextlib.nullcontext()  # type: ignore[assignment]
    reserved = 1024  # shared memory of a CTA that is the system's
    dsl_cuda.get_device_attribute = lambda attribute, device_id=0: {
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": shared_bytes + reserved
    }[attribute.name]
