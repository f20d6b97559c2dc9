"""Rotary embedding of 16-byte chunks of a head (Su et al. 2021), in float32.

The first rotary_dim dims turn in pairs by the angle of the token's position: (a, b) becomes
(a cos - b sin, a sin + b cos). Pair i is the dims 2i and 2i + 1 ("interleaved", GPT-J), or i and
i + rotary_dim / 2 ("half", NeoX).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa4.kernels.blocks.paging import CHUNK, vector_at


@cute.jit
def load_vector(pointer: cute.Pointer, size: cutlass.Constexpr[int], align: cutlass.Constexpr[int]):
    """``size`` neighbouring elements as float32.

    align  of the tensor that they are of, in bytes: 16, where the address is a multiple of the
           vector's bytes if those are fewer; or 2, where it is one of the element's
    """
    element = pointer.value_type.width // 8
    nbytes = max(element, min(align, size * element))
    values = cute.make_rmem_tensor(size, Float32)
    values.store(vector_at(pointer, size, nbytes).load().to(Float32))
    return values


@cute.jit
def rotated_chunk(
    row: cute.Pointer,
    chunk: Int32,
    cos: cute.Pointer,
    sin: cute.Pointer,
    rotary_dim: Int32,
    is_interleaved: cutlass.Constexpr[bool],
    align: cutlass.Constexpr[int],
):
    """Dims [8 chunk, 8 chunk + 8) of a head, rotated, as float32 registers.

    row         the head's first element
    cos, sin    the token's rows of the tables, rotary_dim / 2 elements each
    rotary_dim  a multiple of 16; chunks behind it stay as they are
    align       of row, cos and sin, see `load_vector`
    """
    first = chunk * CHUNK
    values = load_vector(row + Int64(first), CHUNK, align)
    if first < rotary_dim:
        if const_expr(is_interleaved):
            c = load_vector(cos + first // 2, CHUNK // 2, align)
            s = load_vector(sin + first // 2, CHUNK // 2, align)
            for i in cutlass.range_constexpr(CHUNK // 2):
                a = values[2 * i]
                b = values[2 * i + 1]
                values[2 * i] = a * c[i] - b * s[i]
                values[2 * i + 1] = a * s[i] + b * c[i]
        else:
            half = rotary_dim // 2
            is_first = first < half
            pair = cutlass.select_(is_first, first, first - half)
            other = cutlass.select_(is_first, first + half, first - half)
            sign = Float32(cutlass.select_(is_first, Float32(-1.0), Float32(1.0)))
            partner = load_vector(row + Int64(other), CHUNK, align)
            c = load_vector(cos + pair, CHUNK, align)
            s = load_vector(sin + pair, CHUNK, align)
            for i in cutlass.range_constexpr(CHUNK):
                values[i] = values[i] * c[i] + sign * (partner[i] * s[i])
    return values
