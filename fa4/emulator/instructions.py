"""What each PTX instruction means, as Python that an `Emitter` (translate.py) collects.

One function an instruction or family, found by the longest prefix of the opcode. Each takes its
modifiers one by one from a `Modifiers`; a modifier or type that nobody took is an error, because an
instruction with a modifier dropped is another instruction.

In the generated code `w` is the warp (execute.py), `A` is arithmetic.py, `mask` the active lanes.
Data movement, barriers and tensor cores are in data_movement.py; this file has the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fa4.emulator.ptx import (
    Immediate,
    Instruction,
    Memory,
    Not,
    Operand,
    Pair,
    Register,
    Vector,
)
from fa4.emulator.register_kinds import KINDS, kind_of

if TYPE_CHECKING:
    from fa4.emulator.translate import Emitter

Handler = Callable[["Emitter", Instruction, "Modifiers"], None]
HANDLERS: dict[tuple[str, ...], Handler] = {}


def instruction(*opcodes: str) -> Callable[[Handler], Handler]:
    """Registers the function that emits opcodes with these beginnings."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[tuple(opcode.split("."))] = handler
        return handler

    return register


def emit(e: Emitter, i: Instruction) -> None:
    """Emits one instruction, or raises `UnknownInstruction` that names it."""
    # Imported here because it registers handlers in this module.
    from fa4.emulator import (  # noqa: F401
        async_copy,
        bulk_copy,
        cluster_copy,
        cluster_launch_control,
        data_movement,
        local_memory,
        tcgen05,
        warp_mma,
    )

    parts = i.parts
    for length in range(min(len(parts), 6), 0, -1):
        handler = HANDLERS.get(parts[:length])
        if handler is not None:
            modifiers = Modifiers(e, parts[length:])
            handler(e, i, modifiers)
            modifiers.done()
            return
    raise e.unknown("no such instruction is known")


class Modifiers:
    """The dotted parts of an opcode that are still to be understood."""

    def __init__(self, e: Emitter, parts: Sequence[str]):
        self.e = e
        self.rest = list(parts)

    def take(self, name: str) -> bool:
        if name in self.rest:
            self.rest.remove(name)
            return True
        return False

    def one_of(self, *names: str) -> str | None:
        """The one of these that is there, in the order of the opcode."""
        for name in self.rest:
            if name in names:
                self.rest.remove(name)
                return name
        return None

    def required(self, *names: str) -> str:
        name = self.one_of(*names)
        if name is None:
            raise self.e.unknown(f"it needs one of .{', .'.join(names)}")
        return name

    def kind(self, *allowed: str) -> str:
        """The type that comes next; untyped bits are unsigned."""
        if not self.rest or self.rest[0] not in allowed:
            raise self.e.unknown(
                f"its type must be one of .{', .'.join(allowed)} (.{'.'.join(self.rest)} is left)"
            )
        return kind_of(self.rest.pop(0))

    def done(self) -> None:
        if self.rest:
            raise self.e.unknown(f"modifier .{'.'.join(self.rest)}")


def registers_of(i: Instruction) -> Iterator[str]:
    """Names of all registers of an instruction, its predicate included."""
    if i.predicate is not None:
        yield i.predicate
    for operand in i.operands:
        yield from _registers(operand)


def _registers(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Not):
        yield operand.operand.name
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Memory):
        yield from _registers(operand.base)
        for element in operand.coordinates:
            yield from _registers(element)


# Their first operand is a register that is read, or no operand is a destination.
_WITHOUT_DESTINATION = (
    "bar",
    "barrier",
    "nanosleep",
    "setmaxnreg",
    "st",
    "red",
    "bra",
    "brx",
    "cp",
)


def uses_and_definitions(i: Instruction) -> tuple[list[str], list[str]]:
    """Registers read and registers written. A predicated write also reads what it may keep."""
    has_destination = (
        bool(i.operands)
        and i.parts[:2] != ("tcgen05", "dealloc")
        and not isinstance(i.operands[0], Memory)
        and (i.parts[0] not in _WITHOUT_DESTINATION or i.parts[1:2] == ("red",))
    )
    definitions = list(_registers(i.operands[0])) if has_destination else []
    uses = [] if i.predicate is None else [i.predicate]
    for operand in i.operands[1 if has_destination else 0 :]:
        uses.extend(_registers(operand))
    if i.predicate is not None or i.opcode.startswith(("wgmma.mma_async", "mma.")):
        uses.extend(definitions)
    return uses, definitions


def wgmma_operands(i: Instruction) -> tuple[list[str], list[str]]:
    """(accumulators, A registers) of a wgmma.mma_async."""
    a = i.operands[1]
    in_registers = list(_registers(a)) if isinstance(a, Vector) else []
    return list(_registers(i.operands[0])), in_registers


def kind_votes(i: Instruction) -> list[tuple[str, str]]:
    """(register, kind) for those that this instruction treats as a kind of number."""
    if i.opcode.startswith("wgmma.mma_async"):
        return [(name, "f32") for name in _registers(i.operands[0])]
    if i.opcode.startswith("mma.sync"):
        return [(name, "f32") for o in (i.operands[0], i.operands[3]) for name in _registers(o)]
    kinds = [part for part in i.parts if part[:1] in "usf" and part in KINDS]
    if any(KINDS[kind].packed for kind in kinds):
        return []
    if i.parts[0] == "cvt" and len(kinds) == 2:
        operand_kinds = zip(i.operands, kinds, strict=False)
        return [(name, kind) for o, kind in operand_kinds for name in _registers(o)]
    if not kinds or i.parts[0] in ("cvt", "shfl", "mov", "st", "elect"):
        return []
    predicates = {i.predicate}
    return [(name, kinds[-1]) for name in registers_of(i) if name not in predicates]


def immediate_bits(immediate: Immediate, kind: str) -> int:
    """Bit pattern of a constant as a kind; integers wrap around."""
    value = immediate.value
    if KINDS[kind].packed:
        raise ValueError(f"A constant cannot be a {kind}.")
    if immediate.bits is not None:
        return immediate.bits
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if kind == "f64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if isinstance(value, float):
        raise ValueError(f"{value} is no integer, as a {kind} constant must be.")
    return int(value != 0) if kind == "pred" else value


def vector(e: Emitter, operand: Operand) -> tuple[Operand, ...]:
    """Elements of a vector operand; a single operand is a vector of one."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_F16_KINDS = ("f16", "f16x2")
_BF16_KINDS = ("bf16", "bf16x2")


def _operands(e: Emitter, i: Instruction, kind: str, count: int) -> list[str]:
    if len(i.operands) != count + 1:
        raise e.unknown(f"it has {len(i.operands)} operands instead of {count + 1}")
    return [e.read(operand, kind) for operand in i.operands[1:]]


@instruction("add", "sub", "mul")
def _add_sub_mul(e: Emitter, i: Instruction, m: Modifiers) -> None:
    name = i.parts[0]
    symbol = {"add": "+", "sub": "-", "mul": "*"}[name]
    part = m.one_of("lo", "hi", "wide") if name == "mul" else None
    if part is not None:
        kind = m.kind(*_INTEGERS)
        a, b = _operands(e, i, kind, 2)
        _write_product(e, i.operands[0], kind, part, a, b, None)
        return
    rounding = m.one_of(*_ROUNDINGS)
    flush, saturate = m.take("ftz"), m.take("sat")
    kinds = ("f32", "f32x2", "f64", *_F16_KINDS, *_BF16_KINDS)
    kind = m.kind(*kinds) if name == "mul" else m.kind(*kinds, *_INTEGERS)
    narrow = m.one_of("f16", "bf16") if kind == "f32" and name != "mul" else None  # of the first
    if narrow is not None and len(i.operands) == 3:
        a, b = _widened(e, i.operands[1], narrow), e.read(i.operands[2], kind)
    else:
        a, b = _operands(e, i, kind, 2)
    if kind[0] in "us":
        if saturate or flush or rounding:
            raise e.unknown("integers are neither rounded nor saturated here")
        e.write(i.operands[0], kind, f"{a} {symbol} {b}")
    elif kind in _BF16_KINDS:
        if rounding not in (None, "rn") or saturate or flush:
            raise e.unknown("bf16 arithmetic is emulated with .rn only")
        # The float32 result of two bf16 is exact or rounds to bf16 as the exact one does.
        wide = f"A.f32_from_bf16({a}) {symbol} A.f32_from_bf16({b})"
        e.write(i.operands[0], kind, f"A.bf16_from_f32({wide})")
    else:
        wide_kind = kind in ("f32", "f32x2")
        if rounding not in (None, "rn"):
            if not wide_kind:
                raise e.unknown("directed rounding is emulated for f32 only")
            operand = f"-{b}" if name == "sub" else b
            function = "mul" if name == "mul" else "add"
            expression = f"A.{function}_f32_directed({a}, {operand}, {rounding!r})"
        else:
            if flush and wide_kind:
                a, b = f"A.flush_f32({a})", f"A.flush_f32({b})"
            expression = f"{a} {symbol} {b}"
        e.write(i.operands[0], kind, _finished(e, kind, expression, flush, saturate))


def _widened(e: Emitter, operand: Operand, kind: str) -> str:
    """A 16-bit float as f32."""
    value = e.read(operand, kind)
    return e.local(f"A.f32_from_bf16({value})" if kind == "bf16" else f"{value}.astype(t_f32)")


def _finished(e: Emitter, kind: str, expression: str, flush: bool, saturate: bool) -> str:
    """An expression with .ftz and .sat applied to the result."""
    if (flush or saturate) and kind not in ("f32", "f32x2"):
        raise e.unknown(f".ftz and .sat are emulated for f32 only, not for {kind}")
    if flush:
        expression = f"A.flush_f32({expression})"
    return f"A.saturate_f32({expression})" if saturate else expression


def _write_product(
    e: Emitter, d: Operand, kind: str, part: str, a: str, b: str, addend: Operand | None
) -> None:
    """Integer product, .lo, .hi or .wide, plus an addend."""
    bits = KINDS[kind].bits
    if part == "lo":
        product, result = f"{a} * {b}", kind
    elif part == "wide":
        if bits == 64:
            raise e.unknown("64-bit factors have no .wide product")
        result = f"{kind[0]}{2 * bits}"
        product = f"{a}.astype(t_{result}) * {b}"
    elif bits == 64:
        product, result = f"A.mul_high_{kind}({a}, {b})", kind
    else:
        wide = f"{kind[0]}{2 * bits}"
        product = f"(({a}.astype(t_{wide}) * {b}) >> {bits}).astype(t_{kind})"
        result = kind
    if addend is not None:
        product = f"{product} + {e.read(addend, result)}"
    e.write(d, result, product)


@instruction("mad", "fma")
def _multiply_add(e: Emitter, i: Instruction, m: Modifiers) -> None:
    part = m.one_of("lo", "hi", "wide")
    if part is not None:
        kind = m.kind(*_INTEGERS)
        if len(i.operands) != 4:
            raise e.unknown(f"it has {len(i.operands)} operands instead of 4")
        a, b = e.read(i.operands[1], kind), e.read(i.operands[2], kind)
        _write_product(e, i.operands[0], kind, part, a, b, i.operands[3])
        return
    rounding = m.required(*_ROUNDINGS)
    flush, saturate = m.take("ftz"), m.take("sat")
    kind = m.kind("f32", "f32x2", *_F16_KINDS, *_BF16_KINDS)
    narrow = m.one_of("f16", "bf16") if kind == "f32" else None  # type of the factors
    if narrow is None:
        a, b, c = _operands(e, i, kind, 3)
    else:
        a, b = (_widened(e, operand, narrow) for operand in i.operands[1:3])
        c = e.read(i.operands[3], kind)
    if kind in ("f32", "f32x2"):
        if flush:
            a, b, c = (f"A.flush_f32({x})" for x in (a, b, c))
        if rounding == "rn":
            expression = f"A.fma_f32({a}, {b}, {c})"
        else:
            expression = f"A.fma_f32_directed({a}, {b}, {c}, {rounding!r})"
        e.write(i.operands[0], kind, _finished(e, kind, expression, flush, saturate))
        return
    if rounding != "rn" or flush or saturate:
        raise e.unknown(f"{kind} is emulated with .rn only")
    function = "fma_bf16" if kind in _BF16_KINDS else "fma_f16"
    e.write(i.operands[0], kind, f"A.{function}({a}, {b}, {c})")


@instruction("min", "max")
def _min_max(e: Emitter, i: Instruction, m: Modifiers) -> None:
    name = i.parts[0]
    keeps_nan, relu, flush = m.take("NaN"), m.take("relu"), m.take("ftz")
    kind = m.kind(*_INTEGERS, "f32", "f64", *_F16_KINDS, *_BF16_KINDS)
    values = _operands(e, i, kind, len(i.operands) - 1)
    is_bf16 = kind in _BF16_KINDS
    if is_bf16:
        values = [f"A.f32_from_bf16({value})" for value in values]
    if len(values) not in (2, 3) or (len(values) == 3 and kind != "f32"):
        raise e.unknown(f"{len(values)} operands of type {kind}")
    if kind[0] in "us":
        function = f"np.{name}imum"
        if keeps_nan or flush:
            raise e.unknown("integers have no NaN")
    else:
        if relu:
            raise e.unknown(".relu is emulated for integers only")
        function = f"np.{name}imum" if keeps_nan else f"np.f{name}"
        if flush:
            values = [f"A.flush_f32({value})" for value in values]
            _finished(e, kind, "", flush, False)
    expression = values[0]
    for value in values[1:]:
        expression = f"{function}({expression}, {value})"
    if relu:
        expression = f"np.maximum({expression}, {e.read(Immediate(0), kind)})"
    e.write(i.operands[0], kind, f"A.bf16_from_f32({expression})" if is_bf16 else expression)


@instruction("div", "rem")
def _divide(e: Emitter, i: Instruction, m: Modifiers) -> None:
    name = i.parts[0]
    mode = m.one_of("rn", "approx", "full") if name == "div" else None
    flush = m.take("ftz")
    kind = m.kind("f32", "f64") if mode else m.kind(*_INTEGERS)
    a, b = _operands(e, i, kind, 2)
    if mode:
        if flush:
            a, b = f"A.flush_f32({a})", f"A.flush_f32({b})"
        e.write(i.operands[0], kind, _finished(e, kind, f"{a} / {b}", flush, False))
        return
    if flush:
        raise e.unknown("integers have no subnormals")
    sign = "signed" if kind[0] == "s" else "unsigned"
    e.write(i.operands[0], kind, f"A.{name}_{sign}({a}, {b})")


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos")
def _function(e: Emitter, i: Instruction, m: Modifiers) -> None:
    name = i.parts[0]
    m.required("approx", *(("rn",) if name in ("rcp", "sqrt") else ()))
    flush = m.take("ftz")
    kind = m.kind("f32")
    (x,) = _operands(e, i, kind, 1)
    if name == "ex2" and flush:
        e.write(i.operands[0], kind, f"A.ex2_ftz_f32({x})")
        return
    if flush:
        x = f"A.flush_f32({x})"
    e.write(i.operands[0], kind, _finished(e, kind, f"A.{name}_f32({x})", flush, False))


@instruction("abs", "neg")
def _abs_neg(e: Emitter, i: Instruction, m: Modifiers) -> None:
    flush = m.take("ftz")
    kind = m.kind("s16", "s32", "s64", "f32", "f64", *_F16_KINDS, *_BF16_KINDS)
    (x,) = _operands(e, i, kind, 1)
    if kind in _BF16_KINDS:
        sign = "& np.uint16(0x7FFF)" if i.parts[0] == "abs" else "^ np.uint16(0x8000)"
        expression = f"{x} {sign}"
    else:
        expression = f"np.abs({x})" if i.parts[0] == "abs" else f"-{x}"
    e.write(i.operands[0], kind, _finished(e, kind, expression, flush, False))


_BITS = ("pred", "b16", "b32", "b64")


@instruction("and", "or", "xor")
def _bitwise(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind(*_BITS)
    a, b = _operands(e, i, kind, 2)
    symbol = {"and": "&", "or": "|", "xor": "^"}[i.parts[0]]
    e.write(i.operands[0], kind, f"{a} {symbol} {b}")


@instruction("not")
def _not(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind(*_BITS)
    (x,) = _operands(e, i, kind, 1)
    e.write(i.operands[0], kind, f"~{x}")


@instruction("shl", "shr")
def _shift(e: Emitter, i: Instruction, m: Modifiers) -> None:
    left = i.parts[0] == "shl"
    kind = m.kind("b16", "b32", "b64", *(() if left else _INTEGERS))
    x = e.read(i.operands[1], kind)
    amount = i.operands[2]
    if isinstance(amount, Immediate) and 0 <= amount.value < KINDS[kind].bits:
        count = e.read(amount, kind)
        e.write(i.operands[0], kind, f"{x} {'<<' if left else '>>'} {count}")
        return
    direction = "left" if left else "right"
    e.write(i.operands[0], kind, f"A.shift_{direction}({x}, {e.read(amount, 'u32')})")


@instruction("shf")
def _funnel_shift(e: Emitter, i: Instruction, m: Modifiers) -> None:
    left = m.required("l", "r") == "l"
    clamp = m.required("clamp", "wrap") == "clamp"
    kind = m.kind("b32")
    low, high, amount = _operands(e, i, kind, 3)
    e.write(i.operands[0], kind, f"A.funnel_shift({low}, {high}, {amount}, {left}, {clamp})")


@instruction("prmt")
def _permute(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind("b32")
    a, b, selector = _operands(e, i, kind, 3)
    e.write(i.operands[0], kind, f"A.permute_bytes({a}, {b}, {selector})")


@instruction("lop3")
def _logic3(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind("b32")
    table = i.operands[4]
    if len(i.operands) != 5 or not isinstance(table, Immediate):
        raise e.unknown("its table must be a constant")
    a, b, c = (e.read(operand, kind) for operand in i.operands[1:4])
    e.write(i.operands[0], kind, f"A.logic3({a}, {b}, {c}, {table.value})")


@instruction("bfe")
def _extract(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind("u32", "s32")
    x, position, length = (e.read(operand, "u32") for operand in i.operands[1:4])
    e.write(i.operands[0], kind, f"A.bit_field_extract_{kind}({x}, {position}, {length})")


@instruction("bfi")
def _insert(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind("b32")
    values = ", ".join(_operands(e, i, kind, 4))
    e.write(i.operands[0], kind, f"A.bit_field_insert_u32({values})")


@instruction("popc", "clz", "bfind", "brev")
def _bit_counts(e: Emitter, i: Instruction, m: Modifiers) -> None:
    name = i.parts[0]
    kind = m.kind("u32", "u64") if name == "bfind" else m.kind("b32", "b64")
    if name == "brev" and kind != "u32":
        raise e.unknown("it is emulated for 32 bits only")
    (x,) = _operands(e, i, kind, 1)
    function = {
        "popc": "popcount",
        "clz": "leading_zeros",
        "bfind": "most_significant_bit",
        "brev": "bit_reverse_u32",
    }[name]
    e.write(i.operands[0], "u32", f"A.{function}({x})")


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {f"{name}u": name for name in _COMPARISONS}


@instruction("setp")
def _set_predicate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    comparison = m.required(*_COMPARISONS, *_UNSIGNED_COMPARISONS, *_UNORDERED, "num", "nan")
    combine = m.one_of("and", "or", "xor")
    flush = m.take("ftz")
    kind = m.kind("b16", "b32", "b64", *_INTEGERS, "f32", "f64", "f16")
    a, b = e.read(i.operands[1], kind), e.read(i.operands[2], kind)
    if flush:
        if kind != "f32":
            raise e.unknown(".ftz is for f32")
        a, b = e.local(f"A.flush_f32({a})"), e.local(f"A.flush_f32({b})")
    result = e.local(_comparison(e, comparison, kind, a, b))
    values = [result]
    destinations = [i.operands[0]]
    if isinstance(destinations[0], Pair):
        destinations = [destinations[0].first, destinations[0].second]
        values.append(f"~{result}")
    if combine is not None:
        symbol = {"and": "&", "or": "|", "xor": "^"}[combine]
        other = e.read(i.operands[3], "pred")
        values = [f"({value}) {symbol} {other}" for value in values]
    elif len(i.operands) != 3:
        raise e.unknown("it has a third source without .and, .or or .xor")
    # All values are read before the first is written.
    values = [e.local(value) for value in values]
    for destination, value in zip(destinations, values, strict=True):
        e.write(destination, "pred", value)


def _comparison(e: Emitter, name: str, kind: str, a: str, b: str) -> str:
    is_float = kind[0] == "f"
    if name in _UNSIGNED_COMPARISONS:
        if kind[0] != "u":
            raise e.unknown(f".{name} compares unsigned integers")
        name = _UNSIGNED_COMPARISONS[name]
    if name in _COMPARISONS:
        expression = f"{a} {_COMPARISONS[name]} {b}"
        # NumPy's != is true for NaN, PTX's is not; the others are false in both.
        if is_float and name == "ne":
            expression = f"({expression}) & ({a} == {a}) & ({b} == {b})"
        return expression
    if not is_float:
        raise e.unknown(f".{name} compares floats")
    nan = f"(({a} != {a}) | ({b} != {b}))"
    if name in ("num", "nan"):
        return nan if name == "nan" else f"~{nan}"
    return f"({a} {_COMPARISONS[_UNORDERED[name]]} {b}) | {nan}"


@instruction("selp")
def _select(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind("b16", "b32", "b64", *_INTEGERS, "f32", "f64")
    a, b = e.read(i.operands[1], kind), e.read(i.operands[2], kind)
    e.write(i.operands[0], kind, f"where({e.read(i.operands[3], 'pred')}, {a}, {b})")


@instruction("mov")
def _move(e: Emitter, i: Instruction, m: Modifiers) -> None:
    kind = m.kind("pred", *_BITS, "b128", *_INTEGERS, "f32", "f64")
    destination, source = i.operands
    if isinstance(destination, Vector):
        _unpack(e, destination, kind, source)
    elif isinstance(source, Vector):
        _pack(e, destination, kind, source)
    elif (
        isinstance(destination, Register)
        and isinstance(source, Register)
        and e.predicate is None
        and e.declared(destination) == e.declared(source)
    ):
        e.move(destination, source)
    else:
        e.write(destination, kind, e.read(source, kind))


def _unpack(e: Emitter, destination: Vector, kind: str, source: Operand) -> None:
    count = len(destination.elements)
    part = f"u{KINDS[kind].bits // count}"
    parts = e.local(f"{e.read(source, kind)}.view(t_{part}).reshape(-1, {count})")
    for index, element in enumerate(destination.elements):
        e.write(element, part, f"{parts}[:, {index}].copy()")


def _pack(e: Emitter, destination: Operand, kind: str, source: Vector) -> None:
    part = f"u{KINDS[kind].bits // len(source.elements)}"
    parts = ", ".join(e.read(element, part) for element in source.elements)
    word = f"u{KINDS[kind].bits}"
    e.write(destination, word, f"A.interleave({parts}).view(t_{word}).reshape(-1)")


_NARROW = ("u8", "s8", *_INTEGERS)
_INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
_FP8_PAIRS = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


@instruction("cvt")
def _convert(e: Emitter, i: Instruction, m: Modifiers) -> None:
    rounding = m.one_of("rna", *_ROUNDINGS, *_INTEGER_ROUNDINGS)
    flush, saturate, finite = m.take("ftz"), m.take("sat"), m.take("satfinite")
    if len(m.rest) < 2:
        raise e.unknown("it needs two types")
    to, source = m.rest[0], m.rest[1]
    if to in ("bf16x2", "f16x2", *_FP8_PAIRS):
        _convert_pair(e, i, m, rounding, finite, bool(flush or saturate))
        return
    if finite or flush:
        raise e.unknown(f".satfinite and .ftz are not emulated for .{to}.{source}")
    if to in _NARROW and source in _NARROW:
        _convert_integer(e, i, m, rounding, saturate)
        return
    if saturate:
        raise e.unknown(f".sat is not emulated for .{to}.{source}")
    if to in _NARROW:
        _convert_to_integer(e, i, m, rounding)
    else:
        _convert_to_float(e, i, m, rounding)


def _convert_integer(
    e: Emitter, i: Instruction, m: Modifiers, rounding: str | None, saturate: bool
) -> None:
    to, source = m.kind(*_NARROW), m.kind(*_NARROW)
    if rounding:
        raise e.unknown("integers are not rounded")
    x = e.read(i.operands[1], source)
    if saturate:
        x = f"np.clip({x}, np.iinfo(t_{to}).min, np.iinfo(t_{to}).max)"
    e.write(i.operands[0], to, f"{x}.astype(t_{to})")


def _convert_to_integer(e: Emitter, i: Instruction, m: Modifiers, rounding: str | None) -> None:
    to, source = m.kind(*_NARROW), m.kind("f16", "bf16", "f32", "f64")
    if rounding not in _INTEGER_ROUNDINGS:
        raise e.unknown("it needs an integer rounding")
    x = e.read(i.operands[1], source)
    if source == "bf16":
        x = f"A.f32_from_bf16({x})"
    e.write(i.operands[0], to, f"A.integer_from_float({x}, t_{to}, {rounding!r})")


def _convert_to_float(e: Emitter, i: Instruction, m: Modifiers, rounding: str | None) -> None:
    to = m.kind("f16", "bf16", "f32", "f64", "tf32") if m.rest[0] != "tf32" else m.rest.pop(0)
    source = m.kind(*_NARROW, "f16", "bf16", "f32", "f64")
    x = e.read(i.operands[1], source)
    if to == "tf32":
        if source != "f32" or rounding not in ("rn", "rna", "rz"):
            raise e.unknown("tf32 comes from f32 with .rn, .rna or .rz")
        e.write(i.operands[0], "u32", f"A.tf32_from_f32({x}, {rounding!r})")
        return
    if source == "bf16":
        x, source = f"A.f32_from_bf16({x})", "f32"
    if KINDS[source].bits < KINDS[to].bits and source[0] == "f":
        if rounding in ("rz", "rm", "rp"):
            raise e.unknown("widening does not round")
        expression = f"{x}.astype(t_{to})"
    elif to == "bf16":
        if rounding != "rn" or source != "f32":
            raise e.unknown("bf16 comes from f32 with .rn")
        expression = f"A.bf16_from_f32({x})"
    elif to == "f32" and source in ("f64", "u32", "s32", "u16", "s16", "u8", "s8"):
        # These integers are exact in float64.
        expression = f"A.round_f64_to_f32({x}.astype(np.float64), {rounding or 'rn'!r})"
    elif to == "f16" and source == "f32" and rounding == "rn":
        expression = f"A.f16_bits({x}).view(np.float16)"
    elif to == "f16" and source[0] in "us" and KINDS[source].bits <= 32 and rounding == "rn":
        expression = f"A.f16_bits({x}.astype(np.float64)).view(np.float16)"
    elif rounding in (None, "rn"):
        expression = f"{x}.astype(t_{to})"
    else:
        raise e.unknown(f".{rounding} from {source} to {to}")
    e.write(i.operands[0], to, expression)


def _convert_pair(
    e: Emitter, i: Instruction, m: Modifiers, rounding: str | None, finite: bool, other: bool
) -> None:
    """Two f32 (the first into the upper half), or pairs of 8 bits from 16-bit pairs and back."""
    to = m.rest.pop(0)
    source = m.rest.pop(0)
    if rounding != "rn" or other:
        raise e.unknown("pairs are converted with .rn only")
    if to in _FP8_PAIRS:
        if not finite or source not in ("f32", "f16x2", "bf16x2"):
            raise e.unknown("fp8 pairs come from f32, f16x2 or bf16x2, with .satfinite")
        if source == "f32":
            values = _operands(e, i, "f32", 2)
        else:
            (pair,) = _operands(e, i, source, 1)
            wide = f"A.f32_from_bf16({pair})" if source == "bf16x2" else f"{pair}.astype(t_f32)"
            name = e.local(wide)
            values = [f"{name}[1::2]", f"{name}[0::2]"]
        high, low = (f"A.{_FP8_PAIRS[to]}_from_f32({x})" for x in values)
        e.write(i.operands[0], "u16", f"A.pack_bytes({high}, {low})")
        return
    if to == "f16x2" and source in _FP8_PAIRS and not finite:
        (pair,) = _operands(e, i, "u16", 1)
        e.write(i.operands[0], "u32", f"A.f16x2_from_{_FP8_PAIRS[source]}x2({pair})")
        return
    if finite or source != "f32":
        raise e.unknown(f"{to} comes from two f32")
    high, low = _operands(e, i, "f32", 2)
    e.write(i.operands[0], "u32", f"A.{to}_from_f32({high}, {low})")


@instruction("bra")
def _branch(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.take("uni")
    e.branch(i)


@instruction("brx.idx")
def _indexed_branch(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.take("uni")
    if i.predicate is not None:
        raise e.unknown("a predicated brx.idx")
    e.indexed_branch(i)


@instruction("ret", "exit")
def _return(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if i.predicate is not None:
        e.write_back()
        e.line(f"return w.leave({e.predicate} & mask, mask, {e.block.index + 1})")
        e.ended = True
    else:
        e.end("return w.leave(mask, mask, -1)")


@instruction("trap")
def _trap(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"w.trap({e.active()})")
    if i.predicate is None:
        e.end("return w.leave(mask, mask, -1)")
