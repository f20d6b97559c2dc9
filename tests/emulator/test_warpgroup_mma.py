"""wgmma of a warpgroup: chains, both sources of A, and reading shared memory once for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa4.emulator.errors import BarrierMisuse
from fa4.emulator.memory import SharedMemory
from fa4.emulator.tensor_core import a_from_registers, from_registers
from fa4.emulator.warpgroup_mma import MmaShape, WarpgroupMma

RANDOM = np.random.default_rng(0)
N, K = 16, 16
A_START, B_START = 0, 4096
FROM_SHARED = MmaShape(N, "f16", "f16", False, False, False)
FROM_REGISTERS = MmaShape(N, "f16", "f16", True, False, False)


def descriptor(start: int) -> int:
    """K major without swizzle, 8 x 16-byte core matrices: 128 bytes to the next 8 rows."""
    return start // 16 | 2048 // 16 << 16 | 128 // 16 << 32


def write_operand(shared: SharedMemory, start: int, values: np.ndarray[Any, Any]) -> None:
    for row in range(values.shape[0]):
        for half in range(2):
            at = start + row % 8 * 16 + row // 8 * 128 + half * 2048
            shared.bytes[at : at + 16] = values[row, 8 * half : 8 * half + 8].view(np.uint8)
            shared.mark_written(at, 16)


@pytest.fixture
def operands() -> tuple[SharedMemory, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    shared = SharedMemory.create(16384)
    a = RANDOM.standard_normal((64, K)).astype(np.float16)
    b = RANDOM.standard_normal((N, K)).astype(np.float16)
    write_operand(shared, A_START, a)
    write_operand(shared, B_START, b)
    return shared, a.astype(np.float32), b.astype(np.float32)


def all_warps(unit: WarpgroupMma, shape: MmaShape, start: Any, steps: Any) -> np.ndarray[Any, Any]:
    """The (64, N) accumulator after all four warps have executed a chain."""
    parts = [unit.chain(0, warp, shape, start[warp], steps(warp)) for warp in range(4)]
    return from_registers(np.stack(parts).transpose(0, 2, 1))


def test_a_chain_adds_its_steps_to_the_accumulator(operands) -> None:
    shared, a, b = operands
    step = (descriptor(A_START), descriptor(B_START), True)
    start = np.ones((4, N // 2, 32), np.float32)
    found = all_warps(WarpgroupMma(shared), FROM_SHARED, start, lambda warp: [step, step])
    np.testing.assert_allclose(found, 1 + 2 * (a @ b.T), rtol=1e-5, atol=1e-5)


def test_a_step_without_scale_d_starts_again(operands) -> None:
    shared, a, b = operands
    left, right = descriptor(A_START), descriptor(B_START)
    start = np.full((4, N // 2, 32), np.nan, np.float32)
    steps = [(left, right, True), (left, right, False), (left, right, True)]
    found = all_warps(WarpgroupMma(shared), FROM_SHARED, start, lambda warp: steps)
    np.testing.assert_allclose(found, 2 * (a @ b.T), rtol=1e-5, atol=1e-5)


def test_a_from_registers(operands) -> None:
    shared, _, b = operands
    registers = RANDOM.standard_normal((4, 32, 8)).astype(np.float16).view(np.uint32)
    a = a_from_registers(registers, _f16())
    start = np.zeros((4, N // 2, 32), np.float32)
    found = all_warps(
        WarpgroupMma(shared),
        FROM_REGISTERS,
        start,
        lambda warp: [(tuple(registers[warp].T), descriptor(B_START), True)],
    )
    np.testing.assert_allclose(found, a @ b.T, rtol=1e-5, atol=1e-5)


def _f16() -> Any:
    from fa4.emulator.tensor_core import Operand

    return Operand.F16


@pytest.mark.parametrize("shape", [FROM_SHARED, FROM_REGISTERS])
def test_the_first_warp_reads_shared_memory_for_all(operands, shape: MmaShape) -> None:
    shared, a, b = operands
    unit = WarpgroupMma(shared)
    registers = tuple(np.full(32, 0x3C003C00, np.uint32) for _ in range(4))  # A of ones
    left = registers if shape.a_in_registers else descriptor(A_START)
    a = np.ones_like(a) if shape.a_in_registers else a
    parts = []
    for warp in range(4):
        start = np.zeros((N // 2, 32), np.float32)
        parts.append(unit.chain(0, warp, shape, start, [(left, descriptor(B_START), False)]))
        shared.bytes[:] = 0  # a stage that was released at once
    found = from_registers(np.stack(parts).transpose(0, 2, 1))
    np.testing.assert_allclose(found, a @ b.T, rtol=1e-5, atol=1e-5)
    assert not unit.issued


def test_warps_that_disagree_are_reported(operands) -> None:
    shared, _, _ = operands
    unit = WarpgroupMma(shared)
    start = np.zeros((N // 2, 32), np.float32)
    unit.chain(0, 0, FROM_SHARED, start, [(descriptor(A_START), descriptor(B_START), True)])
    with pytest.raises(BarrierMisuse, match="warp 1 of a warpgroup executes another wgmma"):
        unit.chain(0, 1, FROM_SHARED, start, [(descriptor(A_START), descriptor(A_START), True)])
