"""tcgen05 instructions: what they do, in which order, and faults that kernels commit with them."""

import re

import numpy as np
import pytest

from fa4.emulator.errors import (
    DataRace,
    Deadlock,
    EmulationError,
    Misaligned,
    UnknownInstruction,
    UnwrittenRead,
)
from fa4.emulator.float_formats import E2M1, E3M2, f32_to_bf16
from fa4.emulator.tensor_memory import TensorMemoryMisuse
from tests.emulator.ptx_kernels import run_body

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], {};\n"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, {};\n"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r4, %r5}, [%r1+6];\n"
STORE = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1+6], {%r2, %r3};\n"

# Warp 0 allocates 64 columns, all warps learn the address: %r1.
PROLOGUE = f"""
    setp.lt.u32 %p1, %r60, 32;
    @!%p1 bra allocated;
    {ALLOC.format(64)}
allocated:
    bar.sync 0;
    ld.shared.b32 %r1, [dynamic];
"""
EPILOGUE = f"""
    bar.sync 0;
    @!%p1 bra freed;
    {DEALLOC.format(64)}
freed:
"""


def run(body: str, *arrays: np.ndarray, threads: int = 128, **options: object) -> None:
    run_body(PROLOGUE + body + EPILOGUE, arrays, threads=threads, shared_bytes=16384, **options)


# -- tensor memory ---------------------------------------------------------------------------------


def test_each_warp_loads_what_it_stored() -> None:
    out = np.zeros((128, 2), np.uint32)
    run(
        f"""
    shl.b32 %r2, %r60, 1;
    add.u32 %r3, %r2, 1;
    {STORE}
    tcgen05.wait::st.sync.aligned;
    {LOAD}
    tcgen05.wait::ld.sync.aligned;
    mad.lo.u64 %rd50, %rd60, 8, %rd0;
    st.global.v2.b32 [%rd50], {{%r4, %r5}};
""",
        out,
    )
    assert np.array_equal(out.reshape(-1), np.arange(256))


def test_loaded_registers_can_be_overwritten_one_by_one() -> None:
    """A load gives its registers as rows of one block: writing to one must leave the others."""
    out = np.zeros((32, 2), np.float32)
    run(
        f"""
    mov.b32 %r2, 0f3F800000;
    mov.b32 %r3, 0f40000000;
    {STORE}
    {LOAD}
    add.f32 %r4, %r4, %r4;
    fma.rn.f32 %r5, %r5, %r4, %r5;
    {LOAD.replace("%r4, %r5", "%r6, %r7")}
    add.f32 %r5, %r5, %r7;
    mad.lo.u64 %rd50, %rd60, 8, %rd0;
    st.global.v2.b32 [%rd50], {{%r4, %r5}};
""",
        out,
        threads=32,
    )
    assert (out == [2.0, 8.0]).all()


def test_a_read_of_unwritten_columns_is_located() -> None:
    with pytest.raises(UnwrittenRead, match=r"lane 0, column 6") as caught:
        run(LOAD, threads=32)
    assert caught.value.location is not None
    assert "tcgen05.ld" in caught.value.location.text
    run(LOAD, check_unwritten=False)


def test_an_address_in_another_warps_quarter_is_an_error() -> None:
    with pytest.raises(Misaligned, match="warp 0 names lane 32"):
        run("    add.u32 %r1, %r1, 0x200000;\n" + LOAD, threads=32)


def test_lanes_that_disagree_about_an_address_are_an_error() -> None:
    with pytest.raises(EmulationError, match="Lanes disagree"):
        run("    add.u32 %r1, %r1, %r60;\n" + LOAD)


def test_a_part_of_a_warp_cannot_load() -> None:
    body = f"""
    and.b32 %r2, %r60, 1;
    setp.eq.u32 %p2, %r2, 1;
    @%p2 bra skip;
    {LOAD}
skip:
"""
    with pytest.raises(EmulationError, match="part of the warp"):
        run(body)


def test_memory_that_is_not_given_back_is_an_error() -> None:
    with pytest.raises(TensorMemoryMisuse, match="not given back"):
        run_body(ALLOC.format(64))


def test_memory_of_another_size_cannot_be_given_back() -> None:
    body = ALLOC.format(64) + "ld.shared.b32 %r1, [dynamic];\n" + DEALLOC.format(32)
    with pytest.raises(TensorMemoryMisuse, match="64 columns at 0"):
        run_body(body)


def test_the_permit_can_be_given_up_once_all_is_allocated() -> None:
    permit = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
    end = "ld.shared.b32 %r1, [dynamic];\n" + DEALLOC.format(64)
    run_body(ALLOC.format(64) + permit + end)
    with pytest.raises(TensorMemoryMisuse, match="relinquish"):
        run_body(permit + ALLOC.format(64) + end)


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_an_allocation_waits_for_room(schedule: str) -> None:
    """Warp 1 asks for all columns while warp 0 has some of them."""
    body = f"""
    setp.lt.u32 %p1, %r60, 32;
    @!%p1 bra second;
    {ALLOC.format(64)}
    ld.shared.b32 %r1, [dynamic];
    bar.arrive 1, 64;
    bar.sync 2, 32;
    {DEALLOC.format(64)}
    bra done;
second:
    bar.sync 1, 64;
    {ALLOC.format(512).replace("dynamic", "dynamic+4")}
    ld.shared.b32 %r1, [dynamic+4];
    {DEALLOC.format(512)}
done:
"""
    run_body(body, threads=64, schedule=schedule)


def test_an_allocation_without_room_ever_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="waits for 512 columns of tensor memory"):
        run_body(ALLOC.format(64) + ALLOC.format(512))


# -- products --------------------------------------------------------------------------------------

ROWS, COLUMNS, DEPTH = 128, 32, 32  # two steps of k
A_BYTES, B_BYTES = ROWS * DEPTH * 2, COLUMNS * DEPTH * 2
A_START, B_START, BARRIERS = 1024, 1024 + A_BYTES, 64
SHAPE = 1 << 4 | 1 << 7 | 1 << 10 | COLUMNS // 8 << 17 | ROWS // 16 << 24


def descriptor(start: int, rows: int, step: int) -> int:
    """K major without swizzle: blocks of 8 rows of 16 bytes, then the next 16 bytes of k."""
    start += step * 2 * rows * 16
    return start >> 4 | rows * 16 >> 4 << 16 | 128 >> 4 << 32 | 1 << 46


def blocked(matrix: np.ndarray) -> np.ndarray:
    rows, depth = matrix.shape
    bits = f32_to_bf16(matrix).reshape(rows // 8, 8, depth // 8, 8)
    return np.ascontiguousarray(bits.transpose(2, 0, 1, 3)).reshape(-1)


def mma(step: int, adds: int, a: str = "%rd10") -> str:
    return f"""
    mov.b64 %rd10, {descriptor(A_START, ROWS, step)};
    mov.b64 %rd11, {descriptor(B_START, COLUMNS, step)};
    mov.b32 %r11, {SHAPE};
    setp.ne.u32 %p3, {adds}, 0;
    @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r1], {a}, %rd11, %r11, %p3;
"""


COMMIT = f"""
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic+{BARRIERS}];
"""
WAIT = f"""
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [dynamic+{BARRIERS}], 0;
    @!%p4 bra waiting;
"""
# Thread 0 loads both operands; all wait for them.
OPERANDS = f"""
    setp.eq.u32 %p2, %r60, 0;
    @!%p2 bra loaded;
    mbarrier.init.shared.b64 [dynamic+{BARRIERS}], 1;
    mbarrier.init.shared.b64 [dynamic+{BARRIERS + 8}], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd12, [dynamic+{BARRIERS + 8}], {A_BYTES + B_BYTES};
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes \
        [dynamic+{A_START}], [%rd0], {A_BYTES}, [dynamic+{BARRIERS + 8}];
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes \
        [dynamic+{B_START}], [%rd1], {B_BYTES}, [dynamic+{BARRIERS + 8}];
loaded:
    bar.sync 0;
loading:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [dynamic+{BARRIERS + 8}], 0;
    @!%p4 bra loading;
"""
REGISTERS = ", ".join(f"%r{index}" for index in range(12, 12 + 32))
STORE_D = f"""
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{REGISTERS}}}, [%r1];
    mad.lo.u64 %rd50, %rd60, {4 * COLUMNS}, %rd2;
""" + "".join(f"    st.global.b32 [%rd50+{4 * i}], %r{12 + i};\n" for i in range(COLUMNS))


@pytest.fixture
def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and D of small whole numbers; D is zero."""
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (ROWS, DEPTH)).astype(np.float32)
    b = rng.integers(-4, 5, (COLUMNS, DEPTH)).astype(np.float32)
    return a, b, np.zeros((ROWS, COLUMNS), np.float32)


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_steps_add_up_in_the_order_of_issue(operands, schedule: str) -> None:
    a, b, d = operands
    body = mma(1, 0) + mma(0, 0) + mma(1, 1) + mma(1, 1)  # the first is overwritten
    for seed in range(4):
        run(
            OPERANDS + body + COMMIT + WAIT + STORE_D,
            blocked(a),
            blocked(b),
            d,
            schedule=schedule,
            seed=seed,
        )
        exact = a[:, :16] @ b[:, :16].T + 2 * a[:, 16:] @ b[:, 16:].T
        assert np.array_equal(d, exact), seed


def test_a_from_tensor_memory(operands) -> None:
    a, b, d = operands
    registers = "%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27"
    body = f"""
    mad.lo.u64 %rd50, %rd60, 32, %rd3;
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd50];
    ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%rd50+16];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r1+48], {{{registers}}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
""" + mma(1, 0, a="[%r1+48]")
    rows = np.ascontiguousarray(f32_to_bf16(a[:, 16:]))
    run(OPERANDS + body + COMMIT + WAIT + STORE_D, blocked(a), blocked(b), d, rows)
    assert np.array_equal(d, a[:, 16:] @ b[:, 16:].T)


@pytest.mark.parametrize("schedule", ["adversarial"])
def test_a_product_that_nobody_waits_for_is_missed(operands, schedule: str) -> None:
    a, b, d = operands
    with pytest.raises(UnwrittenRead, match="column 0 of tensor memory"):
        run(OPERANDS + mma(0, 0) + COMMIT + STORE_D, blocked(a), blocked(b), d, schedule=schedule)


def test_a_wait_without_a_commit_is_a_deadlock(operands) -> None:
    a, b, d = operands
    with pytest.raises(Deadlock, match="parity 0 of mbarrier"):
        run(OPERANDS + mma(0, 0) + WAIT + STORE_D, blocked(a), blocked(b), d)


def test_adding_to_an_accumulator_that_nothing_wrote_is_an_error(operands) -> None:
    a, b, d = operands
    with pytest.raises(UnwrittenRead, match="of D") as caught:
        run(OPERANDS + mma(0, 1) + COMMIT + WAIT + STORE_D, blocked(a), blocked(b), d)
    assert caught.value.location is not None
    assert "tcgen05.mma" in caught.value.location.text


def test_an_unwritten_operand_is_an_error(operands) -> None:
    a, b, d = operands
    body = OPERANDS.replace(f"{A_BYTES + B_BYTES};", f"{A_BYTES};")
    body = re.sub(r"cp\.async\.bulk[^;]*%rd1\][^;]*;", "", body)
    with pytest.raises(UnwrittenRead, match=r"B of tcgen05\.mma"):
        run(body + mma(0, 0) + COMMIT + WAIT + STORE_D, blocked(a), blocked(b), d)


# -- other forms of products -----------------------------------------------------------------------


def test_lanes_of_d_can_be_disabled(operands) -> None:
    a, b, d = operands
    masked = mma(1, 1).replace("%r11, %p3", "%r11, {%r12, %r12, %r13, %r12}, %p3")
    body = mma(0, 0) + "    mov.b32 %r12, 0;\n    mov.b32 %r13, 0x0000000F;\n" + masked
    run(OPERANDS + body + COMMIT + WAIT + STORE_D, blocked(a), blocked(b), d)
    first, second = a[:, :16] @ b[:, :16].T, a[:, 16:] @ b[:, 16:].T
    second[64:68] = 0  # bits of the third word
    assert np.array_equal(d, first + second)


def test_d_can_be_scaled_before_it_is_added_to(operands) -> None:
    a, b, d = operands
    body = mma(0, 0) + mma(1, 1).replace("%p3;", "%p3, 2;") + mma(1, 1)
    run(OPERANDS + body + COMMIT + WAIT + STORE_D, blocked(a), blocked(b), d)
    first, second = a[:, :16] @ b[:, :16].T, a[:, 16:] @ b[:, 16:].T
    assert np.array_equal(d, first / 4 + 2 * second)


def test_weight_stationary_product_with_columns_of_zeros() -> None:
    """M = 32 and N = 64: four parts of 16 columns, of which spans of 3 are zeros."""
    rng = np.random.default_rng(2)
    a = rng.integers(-4, 5, (32, 16)).astype(np.float32)
    b = rng.integers(-4, 5, (64, 16)).astype(np.float32)
    d = np.zeros((128, 16), np.float32)
    registers = ", ".join(f"%r{index}" for index in range(12, 28))
    operands = (
        OPERANDS.replace(str(A_BYTES), str(a.size * 2))
        .replace(f"+{B_START}]", "+4096]")
        .replace(f", {B_BYTES},", f", {b.size * 2},")
        .replace(f"], {A_BYTES + B_BYTES};", f"], {2 * (a.size + b.size)};")
    )
    body = f"""
    mov.b64 %rd10, {descriptor(A_START, 32, 0)};
    mov.b64 %rd11, {descriptor(4096, 64, 0)};
    mov.b32 %r11, {1 << 4 | 1 << 7 | 1 << 10 | 64 // 8 << 17 | 32 // 16 << 24};
    mov.b64 %rd13, {1 << 39 | 2 << 40 | 3 << 48};
    setp.ne.u32 %p3, 0, 0;
    @%p2 tcgen05.mma.ws.cta_group::1.kind::f16.collector::b0::fill
        [%r1], %rd10, %rd11, %r11, %p3, %rd13;
    {COMMIT}{WAIT}
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r1];
    mad.lo.u64 %rd50, %rd60, 64, %rd2;
""" + "".join(f"    st.global.b32 [%rd50+{4 * i}], %r{12 + i};\n" for i in range(16))
    run(operands + body, blocked(a), blocked(b), d)
    exact = a @ b.T
    for part in range(4):
        columns = exact[:, 16 * part : 16 * part + 16] * (np.arange(16) % 7 < 4)
        assert np.array_equal(d[32 * part : 32 * part + 32], columns), part


def test_narrow_elements_are_read_from_padded_blocks() -> None:
    """A of e2m1 times B of e3m2: 16 elements in 16 bytes, the rest of them ones."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (ROWS, 32)), rng.integers(0, 64, (COLUMNS, 32))
    d = np.zeros((ROWS, COLUMNS), np.float32)
    raw = []
    for matrix, bits in zip(codes, (4, 6), strict=True):
        blocks = np.full((2, len(matrix), 16), 0xFF, np.uint8)
        for half, row in np.ndindex(2, len(matrix)):
            elements = matrix[row, 16 * half : 16 * half + 16].tolist()
            number = sum(code << bits * index for index, code in enumerate(elements))
            number |= (1 << 128) - (1 << 16 * bits)
            blocks[half, row] = np.frombuffer(number.to_bytes(16, "little"), np.uint8)
        raw.append(blocks.reshape(-1))
    shape = 1 << 4 | 5 << 7 | 4 << 10 | COLUMNS // 8 << 17 | ROWS // 16 << 24
    one_step = mma(0, 0).replace(str(SHAPE), str(shape)).replace("kind::f16", "kind::f8f6f4")
    operands = (
        OPERANDS.replace(f"], {A_BYTES + B_BYTES};", f"], {(A_BYTES + B_BYTES) // 2};")
        .replace(f", {A_BYTES},", f", {A_BYTES // 2},")
        .replace(f", {B_BYTES},", f", {B_BYTES // 2},")
    )
    run(operands + one_step + COMMIT + WAIT + STORE_D, raw[0], raw[1], d)
    assert np.array_equal(d, E2M1[codes[0]] @ E3M2[codes[1]].T)


# -- copies to tensor memory -----------------------------------------------------------------------


def copy_a(step: int, column: int) -> str:
    """16 columns of A, from shared memory to columns of tensor memory."""
    return f"""
    mov.b64 %rd10, {descriptor(A_START, ROWS, step)};
    add.u32 %r10, %r1, {column};
    @%p2 tcgen05.cp.cta_group::1.128x256b [%r10], %rd10;
"""


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_a_copy_comes_between_the_products_around_it(operands, schedule: str) -> None:
    """The first product reads what the first copy brought, the second what the second did."""
    a, b, d = operands
    body = copy_a(0, 48) + mma(0, 0, a="[%r1+48]") + copy_a(1, 48) + mma(1, 1, a="[%r1+48]")
    for seed in range(4):
        run(
            OPERANDS + body + COMMIT + WAIT + STORE_D,
            blocked(a),
            blocked(b),
            d,
            schedule=schedule,
            seed=seed,
            check_races=True,
        )
        assert np.array_equal(d, a @ b.T), seed


def test_a_copy_that_nobody_waits_for_is_a_race(operands) -> None:
    a, b, d = operands
    body = copy_a(0, 0) + STORE_D.replace("x32.", "x8.").replace(
        REGISTERS, ", ".join(f"%r{index}" for index in range(12, 20))
    )
    with pytest.raises(DataRace, match=r"tcgen05\.ld .* comes after a tcgen05\.cp"):
        run(OPERANDS + body + COMMIT, blocked(a), blocked(b), d, threads=32, check_races=True)
    run(
        OPERANDS + body.replace("    tcgen05.ld", COMMIT + WAIT + "    tcgen05.ld"),
        blocked(a),
        blocked(b),
        d,
        threads=32,
        check_races=True,
    )


# -- other accesses to tensor memory ---------------------------------------------------------------


def test_registers_with_two_halves_each() -> None:
    out = np.zeros((32, 4), np.uint32)
    run(
        """
    shl.b32 %r2, %r60, 16;
    or.b32 %r2, %r2, 0x0000ABCD;
    not.b32 %r3, %r2;
    tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r1], {%r2, %r3};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r4, %r5}, [%r1];
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r1];
    mad.lo.u64 %rd50, %rd60, 16, %rd0;
    st.global.v4.b32 [%rd50], {%r4, %r5, %r6, %r7};
""",
        out,
        threads=32,
    )
    first = np.arange(32, dtype=np.uint32) << 16 | 0xABCD
    assert np.array_equal(out[:, 0], first)
    assert np.array_equal(out[:, 1], ~first)
    assert np.array_equal(out[:, 2:] & 0xFFFF, np.stack((first & 0xFFFF, first >> 16), axis=1))


def test_two_ranges_of_columns_of_16_lanes() -> None:
    """Threads 0 to 15 have lanes 0 to 15 of columns 0 and 1, the others those of 6 and 7."""
    out = np.zeros((32, 2), np.uint32)
    block = np.zeros((32, 8), np.uint32)
    row = ", ".join(f"%r{n}" for n in range(10, 18))
    run(
        """
    mad.lo.u32 %r10, %r60, 100, 0;
"""
        + "".join(f"    add.u32 %r{10 + n}, %r10, {n};\n" for n in range(7, 0, -1))
        + f"""
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r1], {{{row}}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {{%r4, %r5}}, [%r1], 6;
    tcgen05.st.sync.aligned.16x32bx2.x2.b32 [%r1], 2, {{%r4, %r5}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{row}}}, [%r1];
    mad.lo.u64 %rd50, %rd60, 8, %rd0;
    st.global.v2.b32 [%rd50], {{%r4, %r5}};
    mad.lo.u64 %rd50, %rd60, 32, %rd1;
    st.global.v4.b32 [%rd50], {{%r10, %r11, %r12, %r13}};
    st.global.v4.b32 [%rd50+16], {{%r14, %r15, %r16, %r17}};
""",
        out,
        block,
        threads=32,
    )
    lane = np.arange(32)
    expected = 100 * (lane % 16) + np.where(lane < 16, 0, 6)
    assert np.array_equal(out, np.stack((expected, expected + 1), axis=1))
    stored = 100 * lane[:, None] + np.arange(8)
    stored[:16, 2:4] = stored[:16, 6:8]
    assert np.array_equal(block, stored)


@pytest.mark.parametrize(
    ("modifiers", "expected"),
    [
        ("max.f32", 3.0),
        ("min.f32", -5.0),
        ("max.abs.f32", 5.0),
        ("min.abs.f32", 2.0),
        ("max.NaN.f32", np.nan),
        ("f32.max", 3.0),
    ],
)
def test_a_load_can_reduce_its_columns(modifiers: str, expected: float) -> None:
    out = np.zeros((32, 2), np.float32)
    values = [2.0, -5.0, np.nan, 3.0]
    bits = np.array(values, np.float32).view(np.uint32).tolist()
    run(
        "".join(f"    mov.b32 %r{10 + n}, {word};\n" for n, word in enumerate(bits))
        + f"""
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r1], {{%r10, %r11, %r12, %r13}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x4.{modifiers} {{%r4, %r5, %r6, %r7}}, %r8, [%r1];
    tcgen05.wait::ld.sync.aligned;
    mad.lo.u64 %rd50, %rd60, 8, %rd0;
    st.global.v2.b32 [%rd50], {{%r8, %r5}};
""",
        out,
        threads=32,
    )
    np.testing.assert_array_equal(out, np.full((32, 2), (expected, -5.0)))


def test_a_load_can_reduce_integers() -> None:
    out = np.zeros(32, np.int32)
    run(
        """
    mov.b32 %r10, 7;
    mov.b32 %r11, -9;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {%r10, %r11};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x2.min.s32 {%r4, %r5}, %r8, [%r1];
    mad.lo.u64 %rd50, %rd60, 4, %rd0;
    st.global.b32 [%rd50], %r8;
""",
        out,
        threads=32,
    )
    assert (out == -9).all()


# -- what is not modelled --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcgen05.mma.cta_group::1.kind::f64 [%r1], %rd1, %rd2, %r2, %p1;", "kind::f16"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;", "sparse"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 16;", "scale of D"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd1, %rd2, %r2, %p1, 1;", "scale of D"),
        (
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale "
            "[%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
            "scale factors",
        ),
        ("tcgen05.cp.cta_group::1.32x128b [%r1], %rd1;", "shape"),
        ("tcgen05.shift.cta_group::1.down [%r1];", "no such instruction"),
        ("tcgen05.ld.red.sync.aligned.16x32bx2.x2.max.f32 {%r1, %r2}, %r3, [%r4], 2;", "reduction"),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r2];", "second half"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2], 2;", "more than it has"),
    ],
)
def test_unknown_forms_are_errors_that_name_them(text: str, why: str) -> None:
    opcode = re.escape(text.split()[0])
    with pytest.raises(UnknownInstruction, match=f"{opcode} .*{why}"):
        run_body(text)


def test_a_pair_needs_two_ctas() -> None:
    body = ALLOC.format(64).replace("cta_group::1", "cta_group::2")
    with pytest.raises(EmulationError, match="needs a pair of CTAs"):
        run_body(body)
