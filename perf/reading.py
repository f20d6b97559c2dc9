"""A kernel that only reads: what a decoding step could reach at most, with nothing to compute.

Each CTA, one a multiprocessor, keeps `STAGES` copies of `PIECE_BYTES` to shared memory in flight,
as decode kernels do, by the bulk copies of TMA (sm_90 and later), and looks at none of it. Larger
pieces, more of them, and two CTAs a multiprocessor read no faster on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4.compiler import KernelSpec, get_kernel

PIECE_BYTES = 32 * 1024
STAGES = 6


@dataclass(frozen=True)
class ReadingSchedule:
    """One warp of a CTA with ``stages`` copies of ``piece_bytes`` in flight."""

    piece_bytes: int = PIECE_BYTES
    stages: int = STAGES


def reading_spec(arch: str) -> KernelSpec:
    return KernelSpec(f"{__name__}:compile_reading", arch, None, ReadingSchedule())


def reading_kernel(arch: str) -> Any:
    """f(x, y, pieces, ctas): read the first ``pieces`` pieces of each of two flat bf16 tensors."""
    return get_kernel(reading_spec(arch))


def compile_reading(features: None, schedule: ReadingSchedule, arch: str, options: str = "") -> Any:
    """The entry of `reading_spec`; imports the DSL."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Int32

    from fa4.kernels.blocks import fake_tensors
    from perf.reading_kernel import Reading

    flat = [fake_tensors.strided(BFloat16, 1, align=16) for _ in range(2)]
    return cute.compile(
        Reading(schedule),
        *flat,
        *(Int32(1), Int32(1)),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
        no_jit_engine=True,
    )
