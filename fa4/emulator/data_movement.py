"""Memory, barriers, copies, collectives and tensor cores: instructions that act through the warp.

The counterpart of each call on `w` is a method of `Warp` in execute.py. See instructions.py for the
conventions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.memory import UNTAGGED_MASK, Space, generic_address
from fa4.emulator.ptx import Immediate, Instruction, Memory, Operand, Pair, Register, Symbol, Vector
from fa4.emulator.register_kinds import KINDS
from fa4.emulator.tensor_map import GATHERED_ROWS

if TYPE_CHECKING:
    from fa4.emulator.translate import Emitter

_SPACES = {
    "global": Space.GLOBAL,
    "shared": Space.SHARED,
    "shared::cta": Space.SHARED,
    "shared::cluster": Space.SHARED,
    "param": Space.PARAM,
}
_SEMANTICS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_CACHE_OPERATORS = ("ca", "cg", "cs", "lu", "cv", "nc", "wb", "wt")
_ELEMENT_KINDS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")
_MEMORY_KINDS = ("b8", "b16", "b32", "b64", "b128", *_ELEMENT_KINDS)


def _take_memory_modifiers(m: Modifiers) -> Space | None:
    """Takes ordering, scope, cache hints and state space; returns the space, None for generic.

    Ordering says nothing here: accesses happen in the order in which warps run.
    """
    m.one_of(*_SEMANTICS)
    m.one_of(*_SCOPES)
    m.one_of(*_CACHE_OPERATORS)
    for part in [part for part in m.rest if part.startswith(("L1::", "L2::"))]:
        if not part.endswith("cache_hint"):  # which would be one more operand
            m.take(part)
    space = m.one_of(*_SPACES)
    return None if space is None else _SPACES[space]


def _space(space: Space | None) -> str:
    return "None" if space is None else str(int(space))


def address(e: Emitter, operand: Operand) -> str:
    """Lanes of an address operand, offset included."""
    if not isinstance(operand, Memory):
        raise e.unknown(f"{operand} is no address")
    base = operand.base
    if isinstance(base, Register):
        kind = e.declared(base)
    else:
        kind = "u64"
    value = e.read(base, kind)
    if operand.offset == 0:
        return value
    return e.local(f"{value} + {e.translation.constant(kind, operand.offset)}")


def _uniform(e: Emitter, operand: Operand) -> str:
    """A number that all lanes agree on, as an int."""
    if isinstance(operand, Immediate):
        return str(operand.value)
    return f"w.uniform({e.read(operand, 'u32')}, mask)"


@instruction("ld")
def _load(e: Emitter, i: Instruction, m: Modifiers) -> None:
    space = _take_memory_modifiers(m)
    count = {"v2": 2, "v4": 4, "v8": 8}.get(str(m.one_of("v2", "v4", "v8")), 1)
    kind = m.kind(*_MEMORY_KINDS)
    nbytes = KINDS[kind].bits // 8
    destinations = vector(e, i.operands[0])
    source = i.operands[1]
    if len(destinations) != count or not isinstance(source, Memory):
        raise e.unknown("its operands do not fit")
    if space == Space.PARAM and isinstance(source.base, Symbol):
        parameter = e.translation.kernel.parameters.get(source.base.name)
        if parameter is None:
            raise e.unknown(f"{source.base.name} is no parameter")
        for index, destination in enumerate(destinations):
            offset = parameter.offset + source.offset + index * nbytes
            e.write(destination, kind, f"w.parameter({offset}, t_{kind})")
        return
    where = address(e, source)
    loaded = f"w.load({_space(space)}, {where}, {count * nbytes}, {e.active()})"
    if count == 1:
        e.write(destinations[0], kind, f"{loaded}.view(t_{kind}).reshape(-1)")
        return
    columns = e.local(f"{loaded}.view(t_{kind})")
    for index, destination in enumerate(destinations):
        e.write(destination, kind, f"{columns}[:, {index}].copy()")


@instruction("st")
def _store(e: Emitter, i: Instruction, m: Modifiers) -> None:
    space = _take_memory_modifiers(m)
    count = {"v2": 2, "v4": 4, "v8": 8}.get(str(m.one_of("v2", "v4", "v8")), 1)
    kind = m.kind(*_MEMORY_KINDS)
    values = [e.read(operand, kind) for operand in vector(e, i.operands[1])]
    if len(values) != count:
        raise e.unknown("its operands do not fit")
    where = address(e, i.operands[0])
    data = f"A.interleave({', '.join(values)}).view(np.uint8)"
    e.line(f"w.store({_space(space)}, {where}, {data}, {e.active()})")


@instruction("atom", "red")
def _atomic(e: Emitter, i: Instruction, m: Modifiers) -> None:
    space = _take_memory_modifiers(m)
    operation = m.required("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    width = m.one_of("v2", "v4")
    if width is not None and operation != "add":
        raise e.unknown("vectors are emulated with .add only")
    kind = m.kind(*(("f32",) if width else ("b32", "b64", "u32", "s32", "u64", "s64", "f32")))
    has_result = i.parts[0] == "atom"
    where = address(e, i.operands[1 if has_result else 0])
    operands = i.operands[2 if has_result else 1 :]
    count = int(width[1:]) if width else 1
    if any(len(vector(e, operand)) != count for operand in operands):
        raise e.unknown("its operands do not fit")
    values = ", ".join(
        f"A.interleave({', '.join(e.read(element, kind) for element in vector(e, operand))})"
        for operand in operands
    )
    call = f"w.atomic({_space(space)}, {operation!r}, {where}, ({values},), {e.active()})"
    if not has_result:
        e.line(call)
        return
    before = e.local(call)
    for index, element in enumerate(vector(e, i.operands[0])):
        e.write(element, kind, f"np.ascontiguousarray({before}[:, {index}])")


@instruction("cvta")
def _convert_address(e: Emitter, i: Instruction, m: Modifiers) -> None:
    to_space = m.take("to")
    name = m.required("global", "shared", "shared::cta", "shared::cluster", "param")
    kind = m.kind("u64")
    value = e.read(i.operands[1], kind)
    tag = generic_address(_SPACES[name], 0)
    if to_space:
        e.write(i.operands[0], kind, f"{value} & {e.translation.constant(kind, UNTAGGED_MASK)}")
    else:
        e.write(i.operands[0], kind, f"{value} | {e.translation.constant(kind, tag)}")


@instruction("mapa")
def _map_address(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.required("shared::cluster")
    kind = m.kind("u32")
    value, rank = e.read(i.operands[1], kind), e.read(i.operands[2], "u32")
    e.write(i.operands[0], kind, f"w.map_address({value}, {rank})")


@instruction("prefetch", "createpolicy", "nanosleep", "griddepcontrol", "fence", "membar")
def _without_effect(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Hints and orderings. Fences are reported to the warp, for checkers."""
    m.rest.clear()
    if i.parts[0] == "createpolicy":
        e.write(i.operands[0], "u64", e.translation.constant("u64", 0))
    elif i.parts[0] in ("fence", "membar"):
        e.flush_chain()
        e.line(f"w.fence({i.opcode!r})")


@instruction("mbarrier.init", "mbarrier.inval", "mbarrier.expect_tx", "mbarrier.complete_tx")
def _mbarrier_setup(e: Emitter, i: Instruction, m: Modifiers) -> None:
    operation = i.parts[1]
    m.one_of("relaxed")
    m.one_of("cta", "cluster")
    m.required("shared", "shared::cta", "shared::cluster")
    m.kind("b64")
    where = address(e, i.operands[0])
    value = e.read(i.operands[1], "u32") if len(i.operands) > 1 else "None"
    e.line(f"w.mbarrier_{operation}({where}, {value}, {e.active()})")


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def _mbarrier_arrive(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    expects = m.take("expect_tx")
    m.one_of("release", "relaxed")
    m.one_of("cta", "cluster")
    m.required("shared", "shared::cta", "shared::cluster")
    m.kind("b64")
    has_token = not isinstance(i.operands[0], Memory)
    operands = i.operands[1:] if has_token else i.operands
    where = address(e, operands[0])
    value = e.read(operands[1], "u32") if len(operands) > 1 else "None"
    drop = i.parts[1] == "arrive_drop"
    call = f"w.mbarrier_arrive({where}, {value}, {expects}, {drop}, {e.active()})"
    if has_token:
        e.write(i.operands[0], "u64", call)
    else:
        e.line(call)


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def _mbarrier_wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    parity = m.take("parity")
    m.one_of("acquire", "relaxed")
    m.one_of("cta", "cluster")
    m.required("shared", "shared::cta")
    m.kind("b64")
    where = address(e, i.operands[1])
    value = e.read(i.operands[2], "u32" if parity else "u64")
    blocks = i.parts[1] == "try_wait"
    done = e.local(f"w.mbarrier_wait({where}, {value}, {parity}, {blocks}, {e.active()})")
    if blocks:
        e.line(f"if {done} is None: return -1")
    e.write(i.operands[0], "pred", done)


@instruction("bar", "barrier")
def _named_barrier(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    if i.parts[0] == "bar" and m.take("warp"):
        m.required("sync")
        operand = i.operands[0]
        everyone = isinstance(operand, Immediate) and operand.value in (-1, 0xFFFFFFFF)
        condition = f"not w.converged({e.read(operand, 'u32')}, mask)"
        e.line(f"if {'not full and ' * everyone}{condition}: return -1")
        return
    if i.parts[0] == "barrier" and m.take("cluster"):
        _cluster_barrier(e, i, m)
        return
    m.take("cta")
    operation = m.required("sync", "arrive")
    m.take("aligned")
    if e.predicate is not None:
        raise e.unknown("a predicated barrier")
    number = _uniform(e, i.operands[0])
    threads = _uniform(e, i.operands[1]) if len(i.operands) > 1 else "None"
    call = f"w.named_barrier_{operation}({number}, {threads}, mask)"
    e.line(f"if not {call}: return -1" if operation == "sync" else call)


def _cluster_barrier(e: Emitter, i: Instruction, m: Modifiers) -> None:
    operation = m.required("arrive", "wait")
    m.one_of("release", "relaxed", "acquire")
    is_aligned = m.take("aligned")
    if e.predicate is not None:
        raise e.unknown("a predicated barrier")
    call = f"w.cluster_barrier_{operation}({is_aligned}, mask)"
    e.line(f"if not {call}: return -1" if operation == "wait" else call)


@instruction("cp.async.bulk.tensor")
def _tensor_copy(e: Emitter, i: Instruction, m: Modifiers) -> None:
    rank = int(m.required("1d", "2d", "3d", "4d", "5d")[0])
    e.flush_chain()
    if m.rest[:1] != ["global"]:
        m.required("shared::cta", "shared::cluster")
        m.required("global")
        gathers = m.one_of("tile", "tile::gather4") == "tile::gather4"
        if gathers and rank != 2:
            raise e.unknown("rows are gathered of two dimensions")
        m.required("mbarrier::complete_tx::bytes")
        # Without multicast the mbarrier's address says all: it may be in either CTA of a pair.
        by_pairs = m.one_of("cta_group::1", "cta_group::2") == "cta_group::2"
        is_multicast = m.take("multicast::cluster")
        _take_cache_hint(e, i, m, 3 + is_multicast)
        count = 1 + GATHERED_ROWS if gathers else rank
        packed, coordinates = _tensor_operand(e, i.operands[1], count)
        where, barrier, active = address(e, i.operands[0]), address(e, i.operands[2]), e.active()
        load = f"w.tma_load({{}}, {packed}, {coordinates}, {{}}, {{}})"
        if is_multicast:
            ranks = e.read(i.operands[3], "u16")
            targets = f"w.cluster_copies.targets({where}, {barrier}, {ranks}, {by_pairs}, {active})"
            e.line(f"for place, signalled, lane in {targets}:")
            e.line("    " + load.format("place", "signalled", "lane"))
        else:
            e.line(load.format(where, barrier, active))
        return
    m.required("global")
    m.required("shared::cta")
    m.take("tile")
    m.required("bulk_group")
    _take_cache_hint(e, i, m, 2)
    _store_tile(e, i, rank, "None")


@instruction("cp.reduce.async.bulk.tensor")
def _tensor_reduction(e: Emitter, i: Instruction, m: Modifiers) -> None:
    rank = int(m.required("1d", "2d", "3d", "4d", "5d")[0])
    e.flush_chain()
    m.required("global")
    m.required("shared::cta")
    operation = m.required("add", "min", "max")
    m.take("tile")
    m.required("bulk_group")
    _take_cache_hint(e, i, m, 2)
    _store_tile(e, i, rank, repr(operation))


def _store_tile(e: Emitter, i: Instruction, rank: int, reduction: str) -> None:
    packed, coordinates = _tensor_operand(e, i.operands[0], rank)
    source = address(e, i.operands[1])
    active = e.active()
    if reduction == "None":
        # CuTe leaves a whole warp to store one tile. The assembler's UTMASTG is an instruction of
        # the uniform datapath, issued once a warp; storing equal bytes again changes nothing.
        active = e.local(f"w.lane_of_equals({active}, ({source}, {packed}, *{coordinates}))")
    e.line(f"w.tma_store({source}, {packed}, {coordinates}, {reduction}, {active})")


def _take_cache_hint(e: Emitter, i: Instruction, m: Modifiers, operands: int) -> None:
    operands += m.take("L2::cache_hint")
    if len(i.operands) != operands:
        raise e.unknown(f"it has {len(i.operands)} operands instead of {operands}")


def _tensor_operand(e: Emitter, operand: Operand, rank: int) -> tuple[str, str]:
    if not isinstance(operand, Memory) or len(operand.coordinates) != rank:
        raise e.unknown(f"a tensor operand of {rank} coordinates")
    coordinates = ", ".join(e.read(coordinate, "s32") for coordinate in operand.coordinates)
    return address(e, operand), f"({coordinates},)"


@instruction("cp.async.bulk.commit_group")
def _bulk_commit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"w.bulk_commit({e.active()})")


@instruction("cp.async.bulk.wait_group")
def _bulk_wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    reads_only = m.take("read")
    e.line(f"w.bulk_wait({_uniform(e, i.operands[0])}, {reads_only}, {e.active()})")


@instruction("elect")
def _elect(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.required("sync")
    destination = i.operands[0]
    if not isinstance(destination, Pair):
        raise e.unknown("its destination is not lane|predicate")
    if e.predicate is not None:
        raise e.unknown("a predicated elect.sync")
    e.line(f"if not full: w.require_converged({e.read(i.operands[1], 'u32')}, mask)")
    e.write(destination.second, "pred", "w.elected(mask, full)")
    e.write(destination.first, "u32", "w.leader(mask)")


@instruction("shfl")
def _shuffle(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.required("sync")
    mode = m.required("idx", "bfly", "up", "down")
    kind = m.kind("b32")
    value = e.read(i.operands[1], kind)
    lane, clamp = e.read(i.operands[2], "u32"), e.read(i.operands[3], "u32")
    e.line(f"if not full: w.require_converged({e.read(i.operands[4], 'u32')}, {e.active()})")
    sources = e.local(f"w.shuffle_sources({mode!r}, {lane}, {clamp})")
    destination = i.operands[0]
    if isinstance(destination, Pair):
        e.write(destination.second, "pred", f"{sources}[1]")
        destination = destination.first
    e.write(destination, kind, f"{value}[{sources}[0]]")


@instruction("vote")
def _vote(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.required("sync")
    mode = m.required("ballot", "any", "all", "uni")
    kind = m.kind("b32" if mode == "ballot" else "pred")
    value = e.read(i.operands[1], "pred")
    active = e.active()
    e.line(f"if not full: w.require_converged({e.read(i.operands[2], 'u32')}, {active})")
    e.write(i.operands[0], kind, f"w.vote_{mode}({value}, {active})")


@instruction("redux")
def _reduce_lanes(e: Emitter, i: Instruction, m: Modifiers) -> None:
    m.required("sync")
    operation = m.required("add", "min", "max", "and", "or", "xor")
    absolute, keeps_nan = m.take("abs"), m.take("NaN")
    is_float = m.rest[:1] == ["f32"]
    if is_float and operation not in ("min", "max"):
        raise e.unknown("floats are reduced with .min and .max only")
    if (absolute or keeps_nan) and not is_float:
        raise e.unknown("integers have no .abs and no .NaN")
    kind = m.kind("b32", "u32", "s32", "f32")
    value = e.read(i.operands[1], kind)
    active = e.active()
    e.line(f"if not full: w.require_converged({e.read(i.operands[2], 'u32')}, {active})")
    if is_float:
        call = f"w.reduce_float_lanes({operation!r}, {absolute}, {keeps_nan}, {value}, {active})"
    else:
        call = f"w.reduce_lanes({operation!r}, {value}, {active})"
    e.write(i.operands[0], kind, call)


@instruction("activemask")
def _active_mask(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.write(i.operands[0], m.kind("b32"), "w.vote_ballot(mask, mask)")


_MATRICES = {"x1": 1, "x2": 2, "x4": 4}


@instruction("stmatrix.sync.aligned.m8n8", "ldmatrix.sync.aligned.m8n8")
def _matrix_rows(e: Emitter, i: Instruction, m: Modifiers) -> None:
    stores = i.parts[0] == "stmatrix"
    count = _MATRICES[m.required(*_MATRICES)]
    transposed = m.take("trans")
    m.required("shared", "shared::cta")
    m.kind("b16")
    registers = vector(e, i.operands[1 if stores else 0])
    where = address(e, i.operands[0 if stores else 1])
    if len(registers) != count or e.predicate is not None:
        raise e.unknown(f"{len(registers)} registers, or a predicate")
    if stores:
        e.flush_chain()
        values = ", ".join(e.read(register, "u32") for register in registers)
        e.line(f"w.stmatrix({where}, ({values},), {transposed}, full)")
        return
    loaded = e.local(f"w.ldmatrix({where}, {count}, {transposed}, full)")
    for index, register in enumerate(registers):
        e.write(register, "u32", f"{loaded}[{index}]")


@instruction("setmaxnreg")
def _set_registers(e: Emitter, i: Instruction, m: Modifiers) -> None:
    direction = m.required("inc", "dec")
    m.required("sync")
    m.required("aligned")
    m.kind("u32")
    count = _uniform(e, i.operands[0])
    if direction == "inc":
        e.line(f"if not w.take_registers({count}, full): return -1")
    else:
        e.line(f"w.give_registers({count}, full)")


@instruction("wgmma.fence.sync.aligned")
def _matrix_fence(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if e.predicate is not None:
        raise e.unknown("a predicated wgmma.fence")
    e.line("if not w.wgmma_fence(full): return -1")


@instruction("wgmma.commit_group.sync.aligned")
def _matrix_group(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    e.line("w.wgmma_commit(full)")


@instruction("wgmma.wait_group.sync.aligned")
def _matrix_wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    e.line(f"w.wgmma_wait({_uniform(e, i.operands[0])}, full)")


_MATRIX_KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")


@instruction("wgmma.mma_async.sync.aligned")
def _matrix_multiply(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Operands: D, A descriptor or registers, B descriptor, scale-d, signs, transpositions."""
    shape = m.rest.pop(0)
    n = int(shape.removeprefix("m64n").partition("k")[0])
    if m.rest.pop(0) != "f32":
        raise e.unknown("the accumulator is not f32")
    if len(m.rest) < 2 or not {m.rest[0], m.rest[1]} <= set(_MATRIX_KINDS):
        raise e.unknown("types of its operands")
    a_kind, b_kind = m.rest.pop(0), m.rest.pop(0)
    accumulators, a, b, scale_d, *constants = i.operands
    if not isinstance(accumulators, Vector) or len(accumulators.elements) != n // 2:
        raise e.unknown(f"an accumulator of other than {n // 2} registers")
    flags = [c.value if isinstance(c, Immediate) else None for c in constants]
    sixteen_bits = a_kind in ("f16", "bf16")
    a_in_registers = isinstance(a, Vector)
    transpositions = (1 if a_in_registers else 2) if sixteen_bits else 0
    if flags[:2] != [1, 1] or len(flags) != 2 + transpositions or None in flags:
        raise e.unknown(f"constants {flags} (signs other than 1, or of another number)")
    if e.predicate is not None:
        raise e.unknown("a predicated wgmma")
    b_transposed = bool(flags[-1]) if sixteen_bits else False
    a_transposed = bool(flags[2]) if transpositions == 2 else False
    names = [element.name for element in accumulators.elements if isinstance(element, Register)]
    if isinstance(a, Vector):
        left = f"({', '.join(e.read(element, 'u32') for element in a.elements)})"
    else:
        left = e.read(a, "u64")
    accumulate = e.read(scale_d, "pred")
    step = f"({left}, {e.read(b, 'u64')}, {accumulate})"
    key = (n, a_kind, b_kind, a_in_registers, a_transposed, b_transposed)
    e.matrix_step(key, tuple(names), step)
