"""Zero-column masks: the examples of the ISA, and what it does not allow."""

import pytest

from fa4.emulator.errors import InvalidDescriptor
from fa4.emulator.mma_descriptor_sm100 import MmaShape, decode_shape
from fa4.emulator.zero_columns import ZeroColumns


def stationary(m: int, n: int, shift_code: int = 3) -> MmaShape:
    bits = 1 << 4 | n // 8 << 17 | m // 16 << 24 | shift_code << 30
    return decode_shape(bits, "f16", 1, is_ws=True)


def descriptor(
    starts: tuple[int, ...], firsts: tuple[int, ...], *, enabled: int = 1, shift: int = 0
) -> int:
    """With spans of 3 zeros and 4 used columns, as in all of the ISA's examples."""
    bits = enabled << 39 | 2 << 40 | 3 << 48 | shift << 56
    for part, (start, first) in enumerate(zip(starts, firsts, strict=True)):
        bits |= start << 8 * part | first << 32 + part
    return bits


def mask_text(bits: int, m: int, n: int) -> list[str]:
    """Each part with column 0 on the right, as the ISA writes masks."""
    mask = ZeroColumns.decode(bits, stationary(m, n)).mask(m, n)
    parts = mask.reshape(128 // m, -1)
    return ["".join("01"[int(zero)] for zero in reversed(part)) for part in parts]


def test_without_a_mask_all_columns_are_used() -> None:
    assert mask_text(descriptor((0,), (0,), enabled=0), 128, 64) == ["0" * 64]


def test_one_part_of_128_rows() -> None:
    (mask,) = mask_text(descriptor((0,), (0,)), 128, 64)
    assert mask.endswith("1110000" * 3)


def test_two_parts_of_64_rows() -> None:
    first, second = mask_text(descriptor((0, 0), (1, 0)), 64, 64)
    assert first.endswith("11100001110000111")
    assert second.endswith("000011100001110000")


def test_four_parts_of_32_rows() -> None:
    bits = descriptor((0, 1, 2, 1), (1, 1, 0, 0), shift=2)
    masks = mask_text(bits, 32, 128)
    endings = ["00001110000111", "0000111000011", "111000011100", "1110000111000"]
    assert all(mask.endswith(end) for mask, end in zip(masks, endings, strict=True))
    assert ZeroColumns.decode(bits, stationary(32, 128)).shift == 2


@pytest.mark.parametrize(
    ("bits", "m", "shift_code"),
    [(17 << 56, 32, 3), (9 << 56, 128, 1), (1 << 36, 64, 3), (1 << 62, 64, 3)],
)
def test_shifts_beyond_the_instructions_and_reserved_bits(
    bits: int, m: int, shift_code: int
) -> None:
    with pytest.raises(InvalidDescriptor, match="Zero-column mask"):
        ZeroColumns.decode(bits, stationary(m, 64, shift_code))
