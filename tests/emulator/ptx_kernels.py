"""Runs PTX snippets in the emulator: one-instruction kernels, and bodies that tests write out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from fa4.emulator.execute import Options, Statistics, run_launch
from fa4.emulator.launch_record import Launch
from fa4.emulator.memory import GlobalMemory
from fa4.emulator.tensor_map import ElementType, TensorMap, encode

# Registers of every snippet: predicates, 16, 32 and 64 bits; the address of array n is in %rd<n>
# and the thread's element offset times 1 is in %rd60 (its number in the CTA), %r60 the same.
HEADER = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel({parameters})
{directives}
{{
    .reg .pred %p<64>;
    .reg .b16 %h<64>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<64>;
    mov.u32 %r60, %tid.x;
    cvt.u64.u32 %rd60, %r60;
"""
FOOTER = "    ret;\n}\n"

PREFIX = {"pred": "%p", 1: "%h", 2: "%h", 4: "%r", 8: "%rd"}
DTYPES = {
    **{f"u{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"b{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


def kernel_text(body: str, arrays: int, min_ctas: int = 1) -> str:
    """A whole module around a body, with one pointer parameter an array."""
    directives = f".minnctapersm {min_ctas}" if min_ctas > 1 else ""
    parameters = ", ".join(f".param .u64 p{index}" for index in range(arrays))
    loads = "".join(f"    ld.param.b64 %rd{index}, [p{index}];\n" for index in range(arrays))
    return HEADER.format(parameters=parameters, directives=directives) + loads + body + FOOTER


def run_body(
    body: str,
    arrays: Sequence[np.ndarray[Any, Any]] = (),
    *,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared_bytes: int = 1024,
    min_ctas: int = 1,
    **options: Any,
) -> Statistics:
    """Run a body; %rd0, %rd1, ... are the addresses of the arrays, which it may write."""
    memory = GlobalMemory()
    for index, array in enumerate(arrays):
        assert array.flags.c_contiguous
        memory.register(f"array {index}", array.ctypes.data, array.reshape(-1).view(np.uint8))
    params = b"".join(struct.pack("<Q", array.ctypes.data) for array in arrays)
    launch = Launch(
        "kernel",
        kernel_text(body, len(arrays), min_ctas),
        (grid, 1, 1),
        (threads, 1, 1),
        (cluster, 1, 1),
        shared_bytes,
        params,
    )
    return run_launch(launch, memory, Options(**options))


def run_instruction(opcode: str, result: str, *operands: tuple[str, Any]) -> np.ndarray[Any, Any]:
    """One lane a case: (type, values) of each source, a value being an array, a text, or "%p"s.

    Sources are loaded from memory with their type, the result is stored with the type `result`.
    A source of type "pred" is a boolean array, a source of type "" is text put in as it is.
    """
    lanes = max(len(v) for kind, v in operands if kind)
    arrays: list[np.ndarray[Any, Any]] = []
    body = ""
    names = []
    for number, (kind, values) in enumerate(operands, start=20):
        if not kind:
            names.append(values)
            continue
        dtype = np.dtype(np.uint32) if kind == "pred" else DTYPES[kind]
        array = np.zeros(32, dtype)
        array[: len(values)] = values
        name = f"{PREFIX[dtype.itemsize]}{number}"
        bits = f"b{8 * dtype.itemsize}" if dtype.itemsize > 1 else kind
        body += f"    mad.lo.u64 %rd50, %rd60, {dtype.itemsize}, %rd{len(arrays)};\n"
        body += f"    ld.global.{bits} {name}, [%rd50];\n"
        if kind == "pred":
            body += f"    setp.ne.b32 %p{number}, {name}, 0;\n"
            name = f"%p{number}"
        arrays.append(array)
        names.append(name)
    output = np.zeros(32, np.uint32 if result == "pred" else DTYPES[result])
    target = f"{PREFIX['pred' if result == 'pred' else output.itemsize]}40"
    body += f"    {opcode} {', '.join([target, *names])};\n"
    if result == "pred":
        body += "    selp.b32 %r40, 1, 0, %p40;\n"
        target = "%r40"
    body += f"    mad.lo.u64 %rd50, %rd60, {output.itemsize}, %rd{len(arrays)};\n"
    body += f"    st.global.b{8 * output.itemsize} [%rd50], {target};\n"
    run_body(body, [*arrays, output])
    return output[:lanes].astype(np.bool_) if result == "pred" else output[:lanes]


# -- kernels with a tensor map ---------------------------------------------------------------------

MAPPED_BASE = 0x7F00_0000_0000
MAPPED_BYTES = 4096
MAPPED_SHARED_BYTES = 16384
MAPPED_THREADS = 128
# (dim 64, rows 16) of bf16 in tiles of 8 rows: 1024 bytes, swizzled.
MAP = encode(TensorMap(MAPPED_BASE, ElementType.BF16, (64, 16), (2, 128), (64, 8), 128))
# The address of the data is in %rd0, that of the map in %rd1, of shared memory in %r0; %r1 is the
# thread, %p0 whether it is the first.
MAPPED_HEADER = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(
    .param .align 64 .b8 map[128],
    .param .u64 pointer
)
.reqntid 128, 1, 1
{
    .reg .pred %p<8>;
    .reg .b16 %h<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .reg .b32 %acc<4>;
    ld.param.b64 %rd0, [pointer];
    mov.b64 %rd1, map;
    cvta.param.u64 %rd1, %rd1;
    mov.b32 %r0, dynamic;
    mov.u32 %r1, %tid.x;
    setp.eq.b32 %p0, %r1, 0;
"""


def mapped_text(statements: str) -> str:
    """A whole module around statements that may share a line."""
    return MAPPED_HEADER + statements.replace(";", ";\n") + "\n ret;\n}\n"


def run_mapped(
    statements: str, cluster: int = 1, read_only: bool = False, options: Options | None = None
) -> None:
    """Run statements in one cluster; the data is zeros."""
    memory = GlobalMemory()
    data = np.zeros(MAPPED_BYTES, np.uint8)
    memory.register("data", MAPPED_BASE, data, writable=not read_only)
    ctas = (cluster, 1, 1)
    launch = Launch(
        "kernel",
        mapped_text(statements),
        ctas,
        (MAPPED_THREADS, 1, 1),
        ctas,
        MAPPED_SHARED_BYTES,
        MAP + MAPPED_BASE.to_bytes(8, "little"),
    )
    run_launch(launch, memory, options or Options())
