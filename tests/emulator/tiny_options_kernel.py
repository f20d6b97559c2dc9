"""`tests.tiny_kernel` with an entry that takes compile options, as kernels for the emulator do."""

from __future__ import annotations

import tempfile
from typing import Any

from fa4.compiler import KernelSpec
from tests.tiny_kernel import TinyFeatures, TinySchedule


def tiny_spec(constant: int = 1, threads: int = 128, dtype: str = "fp32") -> KernelSpec:
    return KernelSpec(
        f"{__name__}:compile_tiny",
        "sm_90a",
        TinyFeatures(dtype, constant),
        TinySchedule(threads),
    )


def compile_tiny(
    features: TinyFeatures, schedule: TinySchedule, arch: str, options: str = ""
) -> Any:
    """y[i] = x[i] + constant, one thread an element."""
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
        options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip(),
        no_jit_engine=True,
    )


def compile_pair() -> Any:
    """`AddOneToEach` for vectors of 64 float32, with its PTX."""
    import cutlass
    import cutlass.cute as cute

    from tests.emulator.tiny_pair_code import AddOneToEach

    both = tuple(
        cute.runtime.make_fake_tensor(cutlass.Float32, (64,), (1,), assumed_align=4)
        for _ in range(2)
    )
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(
            AddOneToEach(),
            both,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir={folder}",
        )


def compile_cluster(shared_bytes: int) -> Any:
    """`WriteRanks` for int32 vectors, with its PTX."""
    import cutlass
    import cutlass.cute as cute

    from tests.emulator.tiny_cluster_code import WriteRanks

    ranks = cute.runtime.make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=4)
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(
            WriteRanks(shared_bytes),
            ranks,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir={folder}",
        )
