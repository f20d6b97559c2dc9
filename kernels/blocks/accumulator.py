"""Register views of wgmma accumulators (m64nNk16, one warpgroup)."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

PACKED_TYPE = {BFloat16: "bf16x2", Float16: "f16x2"}


@cute.jit
def by_row(acc: cute.Tensor):
    """View an accumulator ((2, 2, N/8), 1, N') as (2 rows, columns of this thread).

    Of the 64 rows, warp w and lane l hold 16w + l/4 and 16w + l/4 + 8; column c of the view is
    column 8 (c/2) + 2 (l%4) + c%2 of the tile (PTX ISA, wgmma register fragments).
    """
    (pair, rows, octets), ms, ns = acc.layout.shape
    (pair_stride, row_stride, octet_stride), m_stride, n_stride = acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((rows, ms), (pair, octets, ns)),
            stride=((row_stride, m_stride), (pair_stride, octet_stride, n_stride)),
        ),
    )


@cute.jit
def as_operand_a(acc: cute.Tensor):
    """View an accumulator-shaped fragment as the A operand ((2, 2, 2), M, K) of the next wgmma.

    Both fragments give a thread the same rows, and two neighbouring octets of columns are the
    sixteen of one k-step: the view moves every second octet into the operand, no data moves.
    """
    split = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    (r, c, (pair, rest)), m, n = split.shape
    (rs, cs, (ps, ts)), ms, ns = split.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(((r, c, pair), m, (rest, n)), stride=((rs, cs, ps), ms, (ts, ns))),
    )


@cute.jit
def round_into(rounded: cute.Tensor, acc: cute.Tensor):
    """rounded := acc, fp32 to bf16 or fp16, round to nearest even, both in the same layout.

    Written as PTX on purpose. With a plain conversion LLVM moves it across the loop: the fp32
    scores of one block then stay live beside those of the next, and ptxas, out of registers,
    serialises every wgmma of the loop (seen at d128 x 128, d64 and d256).
    """
    packed = cute.recast_tensor(rounded, Int32)
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = round_pair(acc[2 * i], acc[2 * i + 1], rounded.element_type)


@cute.jit
def round_pair(low: Float32, high: Float32, element_type: cutlass.Constexpr):
    """Two fp32 values as a register of bf16 or fp16."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{PACKED_TYPE[element_type]}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


@cute.jit
def store_rows(
    rounded: cute.Tensor,
    rows: cute.Tensor,
    start: Int32,
    first: Int32,
    end: Int32,
    thread: Int32,
):
    """Write an accumulator's 64 rows to global memory, 16 bytes a thread at a time.

    rounded     of shape ((2, 2, N/8), 1, 1) in 16 bits; N is a multiple of 32
    rows        (rows, dim) whose rows are multiples of 16 bytes; columns behind dim are dropped
    start       row that rows are counted from; the accumulator's are [first, first + 64) of them
    end         rows from there on are dropped
    thread      of the warpgroup
    """
    lane = thread % 32
    packed = cute.recast_tensor(rounded, Int32)
    for r in cutlass.range_constexpr(2):
        row = first + thread // 32 * 16 + lane // 4 + 8 * r
        # A quad has eight columns of a row in a register each: four such octets change hands.
        for four in cutlass.range_constexpr(cute.size(packed) // 8):
            piece = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                piece[i] = packed[2 * (4 * four + i) + r]
            transpose_quad(piece, lane)
            octet = 4 * four + lane % 4
            if (row < end) & (octet * 8 < rows.shape[1]):
                target = cute.local_tile(rows[start + row, None], (8,), (octet,))
                cute.autovec_copy(cute.recast_tensor(piece, rounded.element_type), target)


@cute.jit
def transpose_quad(piece: cute.Tensor, lane: Int32):
    """Exchange four registers in each four lanes: lane q's i-th becomes lane i's q-th."""
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        is_upper = (lane & step) != 0
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & step == 0):
                low, high = piece[i], piece[i + step]
                theirs = cute.arch.shuffle_sync_bfly(low if is_upper else high, step)
                piece[i] = theirs if is_upper else low
                piece[i + step] = high if is_upper else theirs


@cute.jit
def has_infinity(rounded: cute.Tensor):
    """Whether a bf16 or fp16 fragment of this thread holds an infinity or NaN.

    Half an instruction a value: 0 * x + sum of two at once stays 0 for finite x.
    """
    packed = cute.recast_tensor(rounded, Int32)
    kind = PACKED_TYPE[rounded.element_type]
    zero = "{{ .reg .b32 z; mov.b32 z, 0;"
    # Four chains, because the latency of one would show.
    sums: list = [None] * 4
    for i in cutlass.range_constexpr(cute.size(packed)):
        before = sums[i % 4]
        addend = "z" if cutlass.const_expr(before is None) else "{$r1}"
        sums[i % 4] = cute.arch.inline_ptx(
            f"{zero} fma.rn.{kind} {{$w0}}, {{$r0}}, z, {addend}; }}}}",
            write_only_types=[Int32],
            read_only_args=[packed[i], *([] if cutlass.const_expr(before is None) else [before])],
        )
    # Zeros of either sign, or NaN in either half.
    return ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7FFF7FFF) != 0
