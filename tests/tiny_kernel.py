"""The smallest kernel that the compile cache can be tested with: y[i] = x[i] + constant.

Compiles in a few hundredths of a second once the DSL is up. `TinyFeatures` and `TinySchedule` are
what a test makes a `KernelSpec` of; `compile_tiny` is its entry. Importing this module does not
import the DSL.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fa4.compiler import KernelSpec


@dataclass(frozen=True)
class TinyFeatures:
    """dtype of x and y ("fp32", "fp16", "int32"), and a constant that is baked into the code."""

    dtype: str = "fp32"
    constant: int = 1

    @property
    def name(self) -> str:
        return f"{self.dtype}_plus{self.constant}"


@dataclass(frozen=True)
class TinySchedule:
    threads: int = 128


def tiny_spec(
    dtype: str = "fp32",
    constant: int = 1,
    threads: int = 128,
    arch: str = "sm_90a",
    entry: str = "compile_tiny",
) -> KernelSpec:
    return KernelSpec(
        f"{__name__}:{entry}", arch, TinyFeatures(dtype, constant), TinySchedule(threads)
    )


def compile_tiny(features: TinyFeatures, schedule: TinySchedule, arch: str) -> Any:
    import cutlass
    import cutlass.cute as cute

    from tests.tiny_device_code import AddConstant

    dtype = {"fp32": cutlass.Float32, "fp16": cutlass.Float16, "int32": cutlass.Int32}[
        features.dtype
    ]
    length = cute.sym_int()
    x, y = (
        cute.runtime.make_fake_tensor(dtype, (length,), (1,), assumed_align=4) for _ in range(2)
    )
    return cute.compile(
        AddConstant(features.constant, schedule.threads),
        x,
        y,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
        no_jit_engine=True,
    )


def compile_slowly(features: TinyFeatures, schedule: TinySchedule, arch: str) -> Any:
    """As long as a real kernel takes, so that processes which start together do overlap."""
    time.sleep(2.0)
    return compile_tiny(features, schedule, arch)


def compile_for_another_target(features: TinyFeatures, schedule: TinySchedule, arch: str) -> Any:
    """The mistake of an entry that does not pass its target on."""
    return compile_tiny(features, schedule, "sm_100a" if arch == "sm_90a" else "sm_90a")


def compile_without_tvm_ffi(features: TinyFeatures, schedule: TinySchedule, arch: str) -> Any:
    """The mistake of an entry that returns something other than a compiled TVM-FFI function."""
    return object()


def compile_badly(features: TinyFeatures, schedule: TinySchedule, arch: str) -> Any:
    raise RuntimeError(f"no such tile: {schedule.threads}")
