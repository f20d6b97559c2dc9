"""ldmatrix and stmatrix lane maps, and the narrow float formats."""

import numpy as np
import pytest

from fa4.emulator.float_formats import (
    bf16_to_f32,
    e4m3_to_f32,
    e5m2_to_f32,
    f32_to_bf16,
    truncate_to_tf32,
)
from fa4.emulator.matrix_fragments import registers_to_rows, rows_to_registers


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_register_of_a_lane_holds_two_neighbouring_elements(matrices, is_transposed):
    elements = np.arange(matrices * 64, dtype=np.uint16).reshape(matrices, 8, 8)
    rows = elements.view(np.uint8).reshape(-1, 16)
    registers = rows_to_registers(rows, is_transposed)
    assert registers.shape == (matrices, 32)
    for matrix, lane in np.ndindex(matrices, 32):
        first, second = (lane // 4, 2 * (lane % 4)), (lane // 4, 2 * (lane % 4) + 1)
        if is_transposed:
            first, second = first[::-1], second[::-1]
        low, high = (int(elements[matrix][place]) for place in (first, second))
        assert registers[matrix, lane] == low | high << 16
    assert (registers_to_rows(registers, is_transposed) == rows).all()


def test_bf16_rounds_to_nearest_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF], np.uint32)
    rounded = f32_to_bf16(bits.view(np.float32))
    assert [hex(r) for r in rounded] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80", "0x7f80"]
    specials = np.array([np.inf, -np.inf, -0.0, np.nan, -np.nan], np.float32)
    assert [hex(r) for r in f32_to_bf16(specials)] == [
        "0x7f80", "0xff80", "0x8000", "0x7fff", "0x7fff"
    ]  # fmt: skip
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    numbers = every[~np.isnan(bf16_to_f32(every))]
    assert (f32_to_bf16(bf16_to_f32(numbers)) == numbers).all()


def test_tf32_operands_lose_their_low_bits():
    bits = np.array([0x3F801FFF, 0xC0402000], np.uint32)
    truncated = truncate_to_tf32(bits.view(np.float32)).view(np.uint32)
    assert [hex(t) for t in truncated] == ["0x3f800000", "0xc0402000"]


def test_eight_bit_formats():
    codes = np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE, 0x7F], np.uint8)
    expected = [0, 2.0**-9, 2.0**-6, 1, 448, -448, np.nan]
    assert np.array_equal(e4m3_to_f32(codes), np.float32(expected), equal_nan=True)
    codes = np.array([0x00, 0x01, 0x04, 0x3C, 0x7B, 0xFC, 0x7E], np.uint8)
    expected = [0, 2.0**-16, 2.0**-14, 1, 57344, -np.inf, np.nan]
    assert np.array_equal(e5m2_to_f32(codes), np.float32(expected), equal_nan=True)


def test_eight_bit_formats_agree_with_torch():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    for convert, dtype in [
        (e4m3_to_f32, torch.float8_e4m3fn),
        (e5m2_to_f32, torch.float8_e5m2),
    ]:
        theirs = torch.from_numpy(codes).view(dtype).float().numpy()
        assert np.array_equal(convert(codes), theirs, equal_nan=True)
