"""Narrow formats: values of codes, and how narrow elements are packed."""

import numpy as np
import pytest

from fa4.emulator import float_formats as formats
from fa4.emulator.tensor_core import Operand


@pytest.mark.parametrize(
    ("table", "code", "value"),
    [
        (formats.E2M1, 0b0_00_1, 0.5),
        (formats.E2M1, 0b0_11_1, 6.0),
        (formats.E2M1, 0b1_01_0, -1.0),
        (formats.E2M3, 0b0_00_001, 0.125),
        (formats.E2M3, 0b0_11_111, 7.5),
        (formats.E3M2, 0b0_000_01, 0.0625),
        (formats.E3M2, 0b1_111_11, -28.0),
        (formats.E4M3, 0b0_1111_110, 448.0),
        (formats.E4M3, 0b0_0000_001, 2.0**-9),
        (formats.UE8M0, 0, 2.0**-127),
        (formats.UE8M0, 254, 2.0**127),
        (formats.UE4M3, 0b0_1111_110, 448.0),
    ],
)
def test_values(table: np.ndarray, code: int, value: float) -> None:
    assert table[code] == value


def test_what_is_not_a_number() -> None:
    assert np.isnan(formats.UE8M0[255])
    assert np.isnan(formats.E4M3[[0x7F, 0xFF]]).all()
    assert np.isnan(formats.UE4M3[0x7F:]).all()
    assert np.isfinite(formats.E2M1).all()
    assert np.isfinite(formats.E3M2).all()


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (16,) from the lowest bits of 16 bytes on; the rest is ones."""
    number = sum(int(code) << bits * index for index, code in enumerate(codes))
    number |= (1 << 128) - (1 << 16 * bits)
    return np.frombuffer(number.to_bytes(16, "little"), np.uint8)


@pytest.mark.parametrize(
    ("operand", "bits", "table"),
    [
        (Operand.E2M1, 4, formats.E2M1),
        (Operand.E2M3, 6, formats.E2M3),
        (Operand.E3M2, 6, formats.E3M2),
    ],
)
def test_padded_blocks_of_shared_memory(operand: Operand, bits: int, table: np.ndarray) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 2, 16), np.uint8)
    raw = np.stack([np.concatenate([packed(block, bits) for block in row]) for row in codes])
    assert np.array_equal(operand.to_f32(raw), table[codes.reshape(3, 32)])


@pytest.mark.parametrize(
    ("operand", "bits", "shift", "table"),
    [(Operand.E2M1, 4, 2, formats.E2M1), (Operand.E3M2, 6, 0, formats.E3M2)],
)
def test_bytes_of_tensor_memory(operand: Operand, bits: int, shift: int, table: np.ndarray) -> None:
    codes = np.arange(1 << bits, dtype=np.uint8).reshape(2, -1)
    assert np.array_equal(operand.from_tensor_memory(codes << shift), table[codes])


def test_pairs_are_two_a_byte_the_lower_half_first() -> None:
    assert Operand.E2M1_PAIRS.to_f32(np.array([[0x21, 0xF4]], np.uint8)).tolist() == [
        [0.5, 1.0, 2.0, -6.0]
    ]
