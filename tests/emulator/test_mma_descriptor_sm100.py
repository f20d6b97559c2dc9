"""Instruction descriptors of tcgen05.mma: what they say, and what they cannot say."""

import pytest

from fa4.emulator.errors import InvalidDescriptor, UnknownInstruction
from fa4.emulator.mma_descriptor_sm100 import MmaShape, Scaling, decode_shape, scale_bytes
from fa4.emulator.tensor_core import Operand
from fa4.emulator.tensor_core_sums import Accumulator

BF16 = 1 << 4 | 1 << 7 | 1 << 10  # D f32, A and B bf16
E2M1_PAIRS = 1 << 7 | 1 << 10
UE8M0 = 1 << 23


def shape_bits(m: int, n: int, types: int = BF16) -> int:
    return types | n // 8 << 17 | m // 16 << 24


def test_instruction_descriptor_is_decoded() -> None:
    shape = decode_shape(shape_bits(256, 128) | 1 << 14 | 1 << 16, "f16", 2)
    assert shape == MmaShape(2, Operand.BF16, Operand.BF16, 256, 128, False, True, 1, -1)
    assert (shape.rows, shape.columns, shape.parts) == (128, 128, 1)


def test_64_rows_of_a_pair_use_half_the_columns() -> None:
    shape = decode_shape(shape_bits(128, 128), "f16", 2)
    assert (shape.rows, shape.columns, shape.parts) == (64, 64, 2)


@pytest.mark.parametrize(
    ("m", "n", "group"),
    [(256, 128, 1), (64, 64, 2), (256, 24, 2), (128, 0, 1), (96, 64, 1), (128, 264, 1)],
)
def test_shapes_that_do_not_exist_are_refused(m: int, n: int, group: int) -> None:
    with pytest.raises(InvalidDescriptor, match=f"M = {m} and N = {n}"):
        decode_shape(shape_bits(m, n), "f16", group)


def test_mn_major_bytes_of_b_come_sixteen_at_a_time() -> None:
    types = 1 << 4  # D f32, A and B e4m3
    decode_shape(shape_bits(128, 24, types), "f8f6f4", 1)
    with pytest.raises(InvalidDescriptor, match="N a multiple of 16"):
        decode_shape(shape_bits(128, 24, types) | 1 << 16, "f8f6f4", 1)


@pytest.mark.parametrize(
    ("bits", "kind", "message"),
    [
        (shape_bits(128, 64) | 1 << 2, "f16", "Bits 0x4"),  # sparse
        (shape_bits(128, 64), "tf32", "operand types 1 and 1"),
        (shape_bits(128, 64, 1 << 4 | 2 << 7), "f8f6f4", "operand types 2 and 0"),
    ],
)
def test_what_is_not_modelled_is_refused(bits: int, kind: str, message: str) -> None:
    with pytest.raises(UnknownInstruction, match=message):
        decode_shape(bits, kind, 1)


@pytest.mark.parametrize(
    ("types", "kind", "a", "b", "accumulator"),
    [
        (0, "f16", Operand.F16, Operand.F16, Accumulator.F16),
        (1 << 4 | 3 << 7 | 4 << 10, "f8f6f4", Operand.E2M3, Operand.E3M2, Accumulator.F32),
        (0 << 4 | 5 << 7, "f8f6f4", Operand.E2M1, Operand.E4M3, Accumulator.F16),
        (2 << 4 | 1 << 7, "i8", Operand.S8, Operand.U8, Accumulator.S32),
    ],
)
def test_types_of_a_kind(
    types: int, kind: str, a: Operand, b: Operand, accumulator: Accumulator
) -> None:
    shape = decode_shape(shape_bits(128, 64, types), kind, 1)
    assert (shape.a, shape.b, shape.accumulator) == (a, b, accumulator)
    assert shape.a.k == (16 if kind == "f16" else 32)


def test_scale_factors_are_decoded() -> None:
    bits = shape_bits(128, 64, E2M1_PAIRS | UE8M0 | 2 << 4) | 2 << 29
    shape = decode_shape(bits, "mxf4", 1, vectors=2)
    assert shape.scaling == Scaling(2, is_ue8m0=True)
    assert (shape.a, shape.a.k) == (Operand.E2M1_PAIRS, 64)
    assert scale_bytes(bits) == (2, 2)
    nv = decode_shape(shape_bits(256, 64, E2M1_PAIRS), "mxf4nvf4", 2, vectors=4)
    assert nv.scaling == Scaling(4, is_ue8m0=False)


def test_weight_stationary_shapes() -> None:
    shape = decode_shape(shape_bits(32, 128) | 2 << 30, "f16", 1, is_ws=True)
    assert (shape.parts, shape.columns, shape.max_shift) == (4, 32, 16)
    assert not decode_shape(shape_bits(64, 128), "f16", 1, is_ws=True).is_interleaved


@pytest.mark.parametrize(
    ("bits", "kind", "options", "message"),
    [
        (shape_bits(128, 64, 5 << 7 | 1 << 15), "f8f6f4", {}, "MN-major A of e2m1"),
        (shape_bits(128, 64, 2 << 4 | 1 << 13), "i8", {}, "cannot negate"),
        (shape_bits(128, 40, 2 << 4), "i8", {}, "a multiple of 16"),
        (shape_bits(128, 64, 2 << 4), "f16", {}, "accumulators of type 2"),
        (shape_bits(128, 64) & ~0x30, "tf32", {}, "accumulators of type 0"),
        (shape_bits(64, 64, UE8M0), "mxf8f6f4", {"vectors": 1}, "M = 64"),
        (shape_bits(128, 64, 0), "mxf8f6f4", {"vectors": 1}, "as ue8m0"),
        (shape_bits(128, 64, E2M1_PAIRS | UE8M0 | 1 << 4), "mxf4", {"vectors": 2}, "bytes"),
        (shape_bits(128, 64, E2M1_PAIRS | 2 << 29), "mxf4nvf4", {"vectors": 4}, "bytes"),
        (shape_bits(128, 32), "f16", {"is_ws": True}, "N = 32"),
        (shape_bits(256, 64), "f16", {"is_ws": True}, "M = 256"),
    ],
)
def test_what_hardware_has_not_is_an_error(
    bits: int, kind: str, options: dict, message: str
) -> None:
    with pytest.raises(InvalidDescriptor, match=message):
        decode_shape(bits, kind, 1, **options)


def test_a_depth_of_96_is_refused() -> None:
    with pytest.raises(UnknownInstruction, match="Bits 0x80000000"):
        decode_shape(shape_bits(128, 64, E2M1_PAIRS | UE8M0) | 1 << 31, "mxf4", 1, vectors=2)
