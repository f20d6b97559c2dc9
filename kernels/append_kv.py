"""Appending keys and values to a cache, and rotating keys and queries on the way.

    k_cache[b, p + i] = rotate(k[b, i], t + i),   v_cache[b, p + i] = v[b, i]
    q_rotated[b, i] = rotate(q[b, i], t + i or t)

with p = cache_seqlens[b] and t = rotary_seqlens[b], else p. For any architecture.

A thread moves the 16 bytes of one chunk of one head (in single elements where tensors are not
16-byte aligned); the third grid dimension says of what: keys,
values or queries. There is nothing to share and nothing to wait for.
"""

from enum import IntEnum
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, const_expr

from fa4.kernels.blocks import fake_tensors
from fa4.kernels.blocks.gqa_packing import divide
from fa4.kernels.blocks.paging import CHUNK, Addressing, locate_position, vector_at
from fa4.kernels.blocks.rotary import load_vector, rotated_chunk
from fa4.kernels.features import AppendFeatures

THREADS = 128
DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class Kind(IntEnum):
    """What a CTA moves: its z index in the grid."""

    KEYS = 0
    VALUES = 1
    QUERIES = 2


class Lengths(NamedTuple):
    """(batch,) or (batch + 1,) int32 vectors, see `AppendKV.__call__`."""

    cu_seqlens_q: Optional[cute.Tensor]
    cache_seqlens: cute.Tensor
    cu_seqlens_new: Optional[cute.Tensor]
    rotary_seqlens: Optional[cute.Tensor]


class AppendKV:
    """One compiled append kernel."""

    def __init__(self, features: AppendFeatures):
        self.features = features
        self.dtype = DTYPES[features.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: Optional[cute.Tensor],
        mRotated: Optional[cute.Tensor],
        mKNew: cute.Tensor,
        mVNew: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mCos: Optional[cute.Tensor],
        mSin: Optional[cute.Tensor],
        mCuQ: Optional[cute.Tensor],
        mLengths: cute.Tensor,
        mCuNew: Optional[cute.Tensor],
        mTurned: Optional[cute.Tensor],
        mTable: Optional[cute.Tensor],
        stream: cuda.CUstream,
    ):
        """Launch the kernel.

        mQ, mRotated  (batch, rows, heads_q, dim) or packed (total, heads_q, dim), with rotary
        mKNew, mVNew  (batch, rows, heads_kv, dim) or packed (total, heads_kv, dim)
        mK, mV        (slots, rows, heads_kv, dim)
        mCos, mSin    (positions, rotary_dim / 2)
                      all with a unit last stride; addresses and other strides as the features'
                      new_align and cache_align say, those of mRotated multiples of 16 bytes
        mLengths      (batch,) positions in use: where the first new key goes
        mTurned       (batch,) position by which the first new key is rotated
        mCuQ, mCuNew  (batch + 1,) where those are packed
        mTable        see `blocks.paging`
        """
        lengths = Lengths(mCuQ, mLengths, mCuNew, mTurned)
        addressing = Addressing(mTable, mK.shape[1], mK.shape[0])
        work = cutlass.max(self.chunks(mKNew), self.chunks(mVNew))
        if const_expr(self.features.rotary is not None):
            work = cutlass.max(work, self.chunks(mQ))
        kinds = len(Kind) if self.features.rotary is not None else len(Kind) - 1
        self.kernel.set_name_prefix(f"fa4_append_kv_{self.features.name}", keep_mangled_name=False)
        self.kernel(mQ, mRotated, mKNew, mVNew, mK, mV, mCos, mSin, lengths, addressing).launch(
            grid=(cute.ceil_div(work, THREADS), 1, kinds), block=(THREADS, 1, 1), stream=stream
        )

    def chunks(self, tensor: cute.Tensor):
        """Number of 16-byte chunks of (.., heads, dim)."""
        rows = cute.size(tensor.shape[:-1])
        return rows * (tensor.shape[-1] // CHUNK)

    @cute.kernel
    def kernel(
        self,
        mQ: Optional[cute.Tensor],
        mRotated: Optional[cute.Tensor],
        mKNew: cute.Tensor,
        mVNew: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mCos: Optional[cute.Tensor],
        mSin: Optional[cute.Tensor],
        lengths: Lengths,
        addressing: Addressing,
    ):
        kind = cute.arch.block_idx()[2]
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if kind == Kind.KEYS:
            self.append(mKNew, mK, mCos, mSin, lengths, addressing, index)
        elif kind == Kind.VALUES:
            self.append(mVNew, mV, None, None, lengths, addressing, index)
        elif const_expr(self.features.rotary is not None):
            self.rotate_query(mQ, mRotated, mCos, mSin, lengths, index)

    @cute.jit
    def append(
        self,
        new: cute.Tensor,
        cache: cute.Tensor,
        cos: Optional[cute.Tensor],
        sin: Optional[cute.Tensor],
        lengths: Lengths,
        addressing: Addressing,
        index: Int32,
    ):
        """Move chunk ``index`` of the new keys or values to its place in the cache.

        A position past the cache's capacity is not written.
        """
        if index < self.chunks(new):
            token, head, chunk = self.split(new, index)
            batch_idx, i, is_row = self.owner(
                token, lengths.cu_seqlens_new, new, self.features.packed_new
            )
            if is_row:
                position = lengths.cache_seqlens[batch_idx] + i
                capacity = addressing.rows
                if const_expr(self.features.addressing == "page_table"):
                    capacity = capacity * addressing.table.shape[1]
                if position < capacity:
                    slot, row = locate_position(addressing, batch_idx, position, Boolean(True))
                    source = new.iterator + self.row_offset(new, token, head)
                    target = cache.iterator + (
                        Int64(slot) * Int64(cache.stride[0])
                        + Int64(row) * Int64(cache.stride[1])
                        + Int64(head) * Int64(cache.stride[2])
                    )
                    if const_expr(cos is not None):
                        turn = self.position(lengths, batch_idx) + i
                        values = self.rotate(source, chunk, cos, sin, turn)
                        self.store_chunk(target, chunk, values, self.features.cache_align)
                    else:
                        source = source + Int64(chunk * CHUNK)
                        values = load_vector(source, CHUNK, self.features.new_align)
                        self.store_chunk(target, chunk, values, self.features.cache_align)

    @cute.jit
    def rotate_query(
        self,
        mQ: cute.Tensor,
        mRotated: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        lengths: Lengths,
        index: Int32,
    ):
        """Rotate chunk ``index`` of the queries; rows of padding are left alone."""
        if index < self.chunks(mQ):
            token, head, chunk = self.split(mQ, index)
            batch_idx, i, is_row = self.owner(
                token, lengths.cu_seqlens_q, mQ, self.features.packed_q
            )
            if is_row:
                turn = self.position(lengths, batch_idx)
                if const_expr(self.features.q_advances):
                    turn = turn + i
                source = mQ.iterator + self.row_offset(mQ, token, head)
                target = mRotated.iterator + self.row_offset(mRotated, token, head)
                self.store_chunk(target, chunk, self.rotate(source, chunk, cos, sin, turn), 16)

    def split(self, tensor: cute.Tensor, index: Int32):
        """(token over all sequences, head, chunk of the head) of a chunk's index."""
        chunks = tensor.shape[-1] // CHUNK
        rest = divide(index, chunks)
        token = divide(rest, tensor.shape[-2])
        return token, rest - token * tensor.shape[-2], index - rest * chunks

    @cute.jit
    def owner(
        self,
        token: Int32,
        cu_seqlens: Optional[cute.Tensor],
        tensor: cute.Tensor,
        is_packed: cutlass.Constexpr[bool],
    ):
        """(sequence of a token, its place in it, whether it is in a sequence and not padding)."""
        if const_expr(not is_packed):
            batch_idx = divide(token, tensor.shape[1])
            return batch_idx, token - batch_idx * tensor.shape[1], Boolean(True)
        # The last sequence that begins at or before the token; empty ones in front of it do too.
        first = Int32(0)
        end = Int32(cu_seqlens.shape[0] - 1)
        while end - first > 1:
            middle = (first + end) // 2
            if cu_seqlens[middle] <= token:
                first = middle
            else:
                end = middle
        return first, token - cu_seqlens[first], token < cu_seqlens[first + 1]

    def row_offset(self, tensor: cute.Tensor, token: Int32, head: Int32):
        """Element offset of a token's head in a packed or dense tensor."""
        if cute.rank(tensor) == 3:
            return Int64(token) * Int64(tensor.stride[0]) + Int64(head) * Int64(tensor.stride[1])
        batch_idx = divide(token, tensor.shape[1])
        i = token - batch_idx * tensor.shape[1]
        return (
            Int64(batch_idx) * Int64(tensor.stride[0])
            + Int64(i) * Int64(tensor.stride[1])
            + Int64(head) * Int64(tensor.stride[2])
        )

    def position(self, lengths: Lengths, batch_idx: Int32):
        """The position by which the first new token of a sequence is rotated."""
        if self.features.has_rotary_seqlens:
            return lengths.rotary_seqlens[batch_idx]
        return lengths.cache_seqlens[batch_idx]

    @cute.jit
    def rotate(
        self,
        row: cute.Pointer,
        chunk: Int32,
        cos: cute.Tensor,
        sin: cute.Tensor,
        turn: Int32,
    ):
        return rotated_chunk(
            row,
            chunk,
            cos.iterator + Int64(turn) * Int64(cos.stride[0]),
            sin.iterator + Int64(turn) * Int64(sin.stride[0]),
            2 * cos.shape[1],
            self.features.rotary == "interleaved",
            self.features.new_align,
        )

    @cute.jit
    def store_chunk(
        self,
        row: cute.Pointer,
        chunk: Int32,
        values: cute.Tensor,
        align: cutlass.Constexpr[int],
    ):
        """Round a chunk and store it in its head."""
        rounded = cute.make_rmem_tensor(CHUNK, self.dtype)
        rounded.store(values.load().to(self.dtype))
        vector_at(row + Int64(chunk * CHUNK), CHUNK, align).store(rounded.load())


def compile_append(features: AppendFeatures, schedule: None, arch: str, options: str = ""):
    """Compile for any batch, lengths, heads and strides; see `AppendKV.__call__`."""
    dtype = DTYPES[features.dtype]

    strided = fake_tensors.strided
    rotates = features.rotary is not None
    q_modes = 3 if features.packed_q else 4
    new_modes = 3 if features.packed_new else 4
    table_modes = {"own": 0, "batch_idx": 1, "page_table": 2}[features.addressing]
    angles = DTYPES.get(features.rotary_dtype)
    new_align, cache_align = features.new_align, features.cache_align
    angle_align = max(new_align, angles.width // 8) if rotates else None
    return cute.compile(
        AppendKV(features),
        strided(dtype, q_modes, rotates, align=new_align),
        strided(dtype, q_modes, rotates, align=16),
        strided(dtype, new_modes, align=new_align),
        strided(dtype, new_modes, align=new_align),
        strided(dtype, 4, align=cache_align),
        strided(dtype, 4, align=cache_align),
        strided(angles, 2, rotates, align=angle_align),
        strided(angles, 2, rotates, align=angle_align),
        strided(Int32, 1, rotates and features.packed_q),
        strided(Int32, 1),
        strided(Int32, 1, features.packed_new),
        strided(Int32, 1, features.has_rotary_seqlens),
        strided(Int32, table_modes, table_modes > 0),
        fake_tensors.stream(),
        options=fake_tensors.options(arch, options),
    )
