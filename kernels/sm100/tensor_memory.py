"""Tensor memory as a warpgroup sees it: a thread is a lane, registers are columns.

Of the 128 lanes, warp w of a warpgroup reaches 32 (w mod 4) to 32 (w mod 4) + 31 (PTX ISA,
tcgen05.ld). An address has the lane in its upper half and the column in its lower one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LANE = 1 << 16  # in an address


@cute.jit
def load(
    registers: cute.Tensor, first: cutlass.Constexpr[int], address: Int32, count: cutlass.Constexpr
):
    """registers[first : first + count] := columns from ``address`` on; see `wait_for_loads`."""
    values = cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 "
        f"{{{', '.join(f'{{$w{i}}}' for i in range(count))}}}, [{{$r0}}];",
        write_only_types=[Float32] * count,
        read_only_args=[address],
    )
    for i in cutlass.range_constexpr(count):
        registers[first + i] = values[i]


@cute.jit
def store(
    registers: cute.Tensor, first: cutlass.Constexpr[int], address: Int32, count: cutlass.Constexpr
):
    """Columns from ``address`` on := registers[first : first + count]; see `wait_for_stores`."""
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{{$r0}}], "
        f"{{{', '.join(f'{{$r{i + 1}}}' for i in range(count))}}};",
        read_only_args=[address, *[registers[first + i] for i in range(count)]],
    )


def wait_for_loads():
    cute.arch.fence_view_async_tmem_load()


def wait_for_stores():
    cute.arch.fence_view_async_tmem_store()


def before_arrival():
    """Between a thread's work on tensor memory and the barrier that tells others of it."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_wait():
    """Between a barrier and a thread's work on tensor memory that others handed over by it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
