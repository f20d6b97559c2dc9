"""TMA through packed tensor maps: decoding, clipping, swizzles, wraparound, reductions."""

import itertools
import struct

import numpy as np
import pytest

from fa4.emulator.errors import (
    InvalidDescriptor,
    Misaligned,
    OutOfBounds,
    UnknownInstruction,
    UnwrittenRead,
)
from fa4.emulator.memory import GlobalMemory, SharedMemory
from fa4.emulator.tensor_map import (
    ElementType,
    Reduction,
    TensorMap,
    decode,
    encode,
    gather_tile,
    load_tile,
    of_gathered_rows,
    store_tile,
)

BASE = 0x7F00_0000_1000


def filled_memory(size=1 << 16, **options):
    memory = GlobalMemory()
    data = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    memory.register("k", BASE, data, **options)
    return memory, data


def make_map(**changes):
    """A (rows 100, dim 64) bf16 matrix whose rows lie 256 bytes apart; tiles of 16 rows."""
    fields = {
        "address": BASE,
        "element": ElementType.BF16,
        "sizes": (64, 100),
        "strides": (2, 256),
        "box": (64, 16),
        "swizzle": 128,
    }
    return TensorMap(**{**fields, **changes})


def tile_by_elements(tensor_map, data, coordinates):
    """The tile of `gather_tile`, an element at a time in Python integers."""
    nbytes = tensor_map.element.nbytes
    tile = []
    for position in itertools.product(*(range(size) for size in reversed(tensor_map.box))):
        place = [c + p for c, p in zip(coordinates, reversed(position), strict=True)]
        if all(0 <= c < size for c, size in zip(place, tensor_map.sizes, strict=True)):
            steps = zip(place, tensor_map.strides, strict=True)
            address = (tensor_map.address + sum(c * s for c, s in steps)) % 2**64 - BASE
            tile.append(data[address : address + nbytes])
        else:
            tile.append(np.zeros(nbytes, np.uint8))
    return np.concatenate(tile)


def swizzled_offset(address, width):
    """Hardware's rule for one byte address: chunk bits XORed with the bits from 7 on."""
    if width == 0:
        return address
    return address ^ ((address >> 7) % (width // 16) << 4)


# ------------------------------------------------------------------ decoding


def test_packed_map_decodes_field_by_field():
    packed = bytearray(128)
    struct.pack_into("<Q", packed, 0, 0x7F1234567890)
    struct.pack_into("<I", packed, 8, 2 | 4 << 4 | 10 << 7 | 3 << 13 | 1 << 18 | 1 << 21)
    struct.pack_into("<5I", packed, 12, 16, 1 << 20, 3, 0xFFFF_FFFF, 0x1820)
    struct.pack_into("<5I", packed, 32, 63, 999, 31, 0x7FFE_FFFF, 0)
    packed[55:60] = [63, 127, 0, 1, 2]
    packed[64:] = b"\xcd" * 64  # whoever packs a map leaves these as they were
    assert decode(bytes(packed)) == TensorMap(
        address=0x7F1234567890,
        element=ElementType.BF16,
        sizes=(64, 1000, 32, 0x7FFF_0000, 1),
        strides=(2, 256, 1 << 24 | 2 << 36, 48 | 8 << 36, 0xFFFF_FFFF << 4 | 1 << 36),
        box=(64, 128, 1, 2, 3),
        swizzle=128,
    )


def test_maps_that_host_code_of_the_dsl_packed():
    """As CuTe-DSL 4.8.1 packed K of the Hopper forward kernel: dense, and packed sequences."""
    dense = (0x561138D33200, 0x2000046532, 0x100000010, 0, 0x630000007F, 1, 63 << 56, 0x7F)
    assert decode(struct.pack("<8Q", *dense)) == TensorMap(
        address=0x561138D33200,
        element=ElementType.BF16,
        sizes=(128, 100, 2, 1),  # dim, rows, heads, batch
        strides=(2, 512, 256, 16),
        box=(64, 128, 1, 1),
        swizzle=128,
    )
    ragged = (
        *(0x561138E71240, 0x2000246542, 0x207FFFFFE0, 0x10, 0x3FFFFFFF0000007F),
        *(0x7FFEFFFF7FFEFFFF, 0x3F0000007FFEFFFF, 0x7F),
    )
    assert decode(struct.pack("<8Q", *ragged)) == TensorMap(
        address=0x561138E71240,
        element=ElementType.BF16,
        sizes=(128, 1 << 30, 0x7FFF0000, 0x7FFF0000, 0x7FFF0000),
        strides=(2, 512, 2 * ((1 << 34) - 256), 512, 256),
        box=(64, 128, 1, 1, 1),
        swizzle=128,
    )
    batch_stride = 1 << 39  # bytes; the longest that a map can hold is below 2**40
    words = (0x7E8FFC400000, 0x1000246532, 1, 0x80000000000, 0x3F0000007F, 1 << 32, 63 << 56, 127)
    assert decode(struct.pack("<8Q", *words)).strides == (2, 256, 16, batch_stride)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("element", list(ElementType))
def test_encode_is_the_opposite_of_decode(element, rank, swizzle):
    row_bytes = swizzle or 48
    tensor_map = TensorMap(
        address=BASE + 16,
        element=element,
        sizes=(1000, 100, 7, 5, 1 << 32)[:rank],
        strides=(element.nbytes, 8000, 5 << 36, 16, 0)[:rank],
        box=(row_bytes // element.nbytes, 16, 3, 1, 256)[:rank],
        swizzle=swizzle,
    )
    packed = encode(tensor_map)
    assert len(packed) == 128
    assert decode(packed) == tensor_map


def test_what_hardware_would_refuse_is_an_error():
    with pytest.raises(InvalidDescriptor, match="no tensor map"):
        decode(bytes(128))
    with pytest.raises(InvalidDescriptor, match="128 bytes, got 8"):
        decode(bytes(8))
    with pytest.raises(InvalidDescriptor, match="aligned to 16"):
        decode(encode(make_map(address=BASE + 8)))
    with pytest.raises(InvalidDescriptor, match="multiple of 16"):
        decode(encode(make_map(box=(4, 1), swizzle=0)))
    with pytest.raises(InvalidDescriptor, match="more than the 128"):
        decode(encode(make_map(box=(128, 1))))
    with pytest.raises(InvalidDescriptor, match="rank 8"):
        decode(struct.pack("<QI", BASE, 2 | 7 << 4 | 10 << 7) + bytes(116))
    with pytest.raises(UnknownInstruction, match="Element type 15"):
        decode(struct.pack("<QI", BASE, 2 | 15 << 7) + bytes(116))
    with pytest.raises(UnknownInstruction, match="32 bytes under a swizzle of 128"):
        decode(encode(make_map(box=(16, 1))))


@pytest.mark.parametrize(("word", "bit"), [(1, 11), (1, 22), (3, 48), (6, 32), (7, 32)])
def test_bits_of_unknown_meaning_are_refused(word, bit):
    packed = bytearray(encode(make_map()))
    packed[8 * word + bit // 8] |= 1 << bit % 8
    with pytest.raises(UnknownInstruction, match=f"Bits {1 << bit:#x} of word {word}"):
        decode(bytes(packed))


# --------------------------------------------------------------------- loads


@pytest.mark.parametrize(
    "coordinates",
    [
        (0, 0),
        (0, 96),  # four rows inside
        (0, -5),  # rows in front
        (-8, 10),  # columns in front
        (40, 90),  # clipped at both ends
        (64, 0),  # beside
        (0, 100),  # behind
        (0, -16),  # in front
    ],
)
def test_load_reads_the_inside_and_zeros_outside(coordinates):
    memory, data = filled_memory()
    tensor_map = make_map(swizzle=0)
    tile = gather_tile(tensor_map, memory, coordinates)
    assert (tile == tile_by_elements(tensor_map, data, coordinates)).all()


@pytest.mark.parametrize("element", [ElementType.U8, ElementType.F32])
def test_load_of_five_dimensions(element):
    memory, data = filled_memory()
    tensor_map = TensorMap(
        address=BASE,
        element=element,
        sizes=(32, 5, 4, 3, 2),
        strides=(element.nbytes, 128, 640, 2560, 7680),
        box=(16, 2, 3, 1, 2),
        swizzle=0,
    )
    for coordinates in [(0, 0, 0, 0, 0), (16, 4, 2, 2, 1), (24, -1, 3, 0, -1)]:
        tile = gather_tile(tensor_map, memory, coordinates)
        assert (tile == tile_by_elements(tensor_map, data, coordinates)).all()


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("offset", [0, 128, 1024, 1920])
def test_load_swizzles_by_absolute_shared_address(swizzle, offset):
    memory, _ = filled_memory()
    tensor_map = make_map(box=((swizzle or 128) // 2, 16), swizzle=swizzle)
    shared = SharedMemory.create(8192)
    assert load_tile(tensor_map, memory, shared, offset, (0, 7)) == tensor_map.tile_bytes
    tile = gather_tile(tensor_map, memory, (0, 7))
    for i in range(0, tile.size, 2):
        place = swizzled_offset(offset + i, swizzle)
        assert shared.bytes[place] == tile[i]
    assert shared.written[offset : offset + tile.size].all()
    assert shared.written.sum() == tile.size


def test_ragged_view_wraps_around_and_ends_with_its_sequence():
    # As kernels/blocks/global_view.py builds it: (rows, dim, back, forth) in elements.
    rows, any_extent, row_stride = 1 << 30, 0x7FFF_0000, 128
    memory, data = filled_memory()
    tensor_map = TensorMap(
        address=BASE,
        element=ElementType.BF16,
        sizes=(64, rows, any_extent, any_extent),
        strides=(2, 2 * row_stride, 2 * ((1 << 34) - row_stride), 2 * row_stride),
        box=(64, 16, 1, 1),
        swizzle=128,
    )
    tensor_map = decode(encode(tensor_map))
    start, length = 20, 39
    shared = SharedMemory.create(2048)
    load_tile(tensor_map, memory, shared, 0, (0, rows - length + 32, rows, start + length))
    tile = np.empty(2048, np.uint8)
    for i in range(2048):
        tile[i] = shared.bytes[swizzled_offset(i, 128)]
    tile = tile.reshape(16, 128)
    matrix = data.reshape(-1, 256)[:, :128]
    assert (tile[:7] == matrix[start + 32 : start + 39]).all()
    assert not tile[7:].any()


def test_only_touched_elements_must_exist():
    memory, _ = filled_memory(size=64 * 256)
    tensor_map = make_map(sizes=(64, 1 << 20))
    gather_tile(tensor_map, memory, (0, 48))
    with pytest.raises(OutOfBounds, match=r"TMA load.*nearest is k.*\(0, 49\)"):
        gather_tile(tensor_map, memory, (0, 49))


def test_loading_uninitialised_global_memory_is_an_error():
    memory, _ = filled_memory(initialised=False)
    memory.find(BASE, BASE + 1).written[: 9 * 256 + 30] = True
    with pytest.raises(UnwrittenRead, match=f"byte {9 * 256 + 30} of k"):
        gather_tile(make_map(), memory, (0, 0))


def test_misplaced_tiles_are_errors():
    memory, _ = filled_memory()
    shared = SharedMemory.create(4096)
    with pytest.raises(Misaligned, match=r"offset 64.*128 bytes"):
        load_tile(make_map(), memory, shared, 64, (0, 0))
    with pytest.raises(OutOfBounds, match="bytes 3072 to 5120"):
        load_tile(make_map(), memory, shared, 3072, (0, 0))
    with pytest.raises(InvalidDescriptor, match=r"3 coordinates.*rank 2"):
        load_tile(make_map(), memory, shared, 0, (0, 0, 0))


# -------------------------------------------------------------------- stores


@pytest.mark.parametrize("coordinates", [(0, 0), (0, 92), (-8, -3), (40, 50), (0, 100)])
def test_store_undoes_load_and_drops_what_is_outside(coordinates):
    source, _ = filled_memory()
    target = GlobalMemory()
    stored = np.zeros(1 << 16, np.uint8)
    allocation = target.register("o", BASE, stored, initialised=False)
    shared = SharedMemory.create(4096)
    load_tile(make_map(), source, shared, 1024, coordinates)
    store_tile(make_map(), target, shared, 1024, coordinates)
    expected = np.zeros((256, 256), np.uint8)
    written = np.zeros((256, 256), bool)
    rows = slice(max(0, coordinates[1]), max(0, min(100, coordinates[1] + 16)))
    columns = slice(2 * max(0, coordinates[0]), 2 * min(64, coordinates[0] + 64))
    expected[rows, columns] = source.allocations[0].bytes.reshape(256, 256)[rows, columns]
    written[rows, columns] = True
    assert (stored == expected.ravel()).all()
    assert (allocation.written == written.ravel()).all()


def test_storing_what_was_never_written_is_an_error_unless_it_is_clipped():
    memory, _ = filled_memory()
    shared = SharedMemory.create(4096)
    shared.mark_written(0, 4 * 128)
    store_tile(make_map(), memory, shared, 0, (0, 96))  # four rows inside
    with pytest.raises(UnwrittenRead, match="TMA store reads byte 512 of shared memory"):
        store_tile(make_map(), memory, shared, 0, (0, 95))


def test_storing_to_read_only_memory_is_an_error():
    memory, _ = filled_memory(writable=False)
    with pytest.raises(OutOfBounds, match="read-only"):
        store_tile(make_map(), memory, SharedMemory.create(4096), 0, (0, 0))


@pytest.mark.parametrize("element", [ElementType.F32, ElementType.F16, ElementType.BF16])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_reduction_folds_the_tile_into_memory(element, reduction):
    # Small integers: exact in every type.
    rng = np.random.default_rng(1)
    old, new = rng.integers(-30, 30, (2, 8, 16)).astype(np.float32)

    def packed(values):
        if element == ElementType.F16:
            return values.astype(np.float16)
        return values if element == ElementType.F32 else (values.view(np.uint32) >> 16).astype("u2")

    memory = GlobalMemory()
    data = packed(old).view(np.uint8).ravel().copy()
    memory.register("dq", BASE, data)
    nbytes = element.nbytes
    tensor_map = TensorMap(BASE, element, (16, 7), (nbytes, 16 * nbytes), (16, 8), 0)
    shared = SharedMemory.create(1024)
    shared.bytes[: data.size] = packed(new).view(np.uint8).ravel()
    shared.mark_written(0, data.size)
    store_tile(tensor_map, memory, shared, 0, (0, 0), reduction)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[reduction.value]
    expected = np.where(np.arange(8)[:, None] < 7, function(old, new), old)
    assert (data == packed(expected.astype(np.float32)).view(np.uint8).ravel()).all()


def test_integer_reductions_without_a_known_sign_are_refused():
    memory, _ = filled_memory()
    tensor_map = TensorMap(BASE, ElementType.U32, (4, 4), (4, 16), (4, 4), 0)
    shared = SharedMemory.create(1024)
    shared.mark_written(0, 1024)
    store_tile(tensor_map, memory, shared, 0, (0, 0), Reduction.ADD)
    with pytest.raises(UnknownInstruction, match="min of U32"):
        store_tile(tensor_map, memory, shared, 0, (0, 0), Reduction.MIN)


# ------------------------------------------------------------------ other types and swizzles


def test_maps_of_other_types_that_host_code_of_the_dsl_packed():
    """tf32 with k the slower dimension, and 4-bit elements, by CuTe-DSL 4.8.1."""
    words = (BASE, 0x20000D6392, 0, 0, 0x1F0000007F, 0, 31 << 56, 0x1F)
    assert decode(struct.pack("<8Q", *words)) == TensorMap(
        address=BASE,
        element=ElementType.F32,
        sizes=(128, 32),
        strides=(4, 512),
        box=(32, 32),
        swizzle=128,
        atom=32,
        rounds_to_tf32=True,
    )
    words = (BASE, 0x800046592, 0, 0, 0x7F000000FF, 0, 255 << 56, 0x7F)
    pairs = decode(struct.pack("<8Q", *words))
    assert (pairs.element, pairs.sizes, pairs.box) == (ElementType.U4, (128, 128), (128, 128))
    assert (pairs.row_bytes, pairs.strides) == (128, (1, 128))


@pytest.mark.parametrize(
    "changes",
    [
        {"element": ElementType.U4, "sizes": (64, 100), "strides": (1, 64), "box": (64, 8)},
        {"element": ElementType.F32, "strides": (4, 512), "box": (32, 8), "atom": 32},
        {"element": ElementType.F32, "strides": (4, 512), "box": (32, 8), "rounds_to_tf32": True},
    ],
)
def test_these_maps_are_packed_and_decoded_again(changes):
    tensor_map = make_map(**({"swizzle": 64} if "U4" in str(changes) else {}), **changes)
    assert decode(encode(tensor_map)) == tensor_map


def test_coordinates_of_4_bit_elements_count_elements():
    memory, data = filled_memory()
    tensor_map = make_map(
        element=ElementType.U4, sizes=(64, 100), strides=(1, 64), box=(32, 8), swizzle=32
    )
    tile = gather_tile(tensor_map, memory, (64, 3)).reshape(8, 32)
    assert np.array_equal(tile, data[: 64 * 100].reshape(100, 64)[3:11, 32:])
    with pytest.raises(Misaligned, match="element 1 of U4, in a byte"):
        gather_tile(tensor_map, memory, (1, 0))


def test_loads_of_tf32_round_to_nearest_even():
    memory = GlobalMemory()
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-12], np.float32)
    memory.register("x", BASE, values.view(np.uint8))
    tensor_map = make_map(
        element=ElementType.F32, sizes=(4,), strides=(4,), box=(4,), swizzle=0, rounds_to_tf32=True
    )
    found = gather_tile(tensor_map, memory, (0,)).view(np.float32)
    assert found.tolist() == [1, 1 + 2**-9, 1 + 2**-10, -1]


def test_a_swizzle_with_atoms_of_32_bytes():
    memory, data = filled_memory()
    shared = SharedMemory.create(1 << 14)
    tensor_map = make_map(
        element=ElementType.F32, sizes=(32, 100), strides=(4, 128), box=(32, 16), atom=32
    )
    load_tile(tensor_map, memory, shared, 1024, (0, 0))
    for byte in range(0, tensor_map.tile_bytes, 4):
        place = (1024 + byte) ^ ((1024 + byte) >> 2 & 0x60)
        assert np.array_equal(shared.bytes[place : place + 4], data[byte : byte + 4]), byte


# ------------------------------------------------------------------ rows from anywhere


def test_gathered_rows_lie_together_and_missing_ones_are_zero():
    memory, data = filled_memory()
    shared = SharedMemory.create(4096)
    tensor_map = of_gathered_rows(make_map(box=(64, 1)))
    assert tensor_map.box == (64, 4)
    assert load_tile(tensor_map, memory, shared, 1024, (0, 7, 99, 100, 3)) == 512
    rows = data[: 100 * 256].reshape(100, 256)[:, :128]
    expected = np.stack((rows[7], rows[99], np.zeros(128, np.uint8), rows[3]))
    for row, byte in itertools.product(range(4), range(0, 128, 16)):
        place = swizzled_offset(1024 + 128 * row + byte, 128)
        found = shared.bytes[place : place + 16]
        assert np.array_equal(found, expected[row, byte : byte + 16]), (row, byte)
    with pytest.raises(InvalidDescriptor, match="gather4"):
        of_gathered_rows(make_map())
