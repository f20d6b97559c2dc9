"""`tcgen05`: tensor memory and the tensor cores of sm_100.

`mma`, `cp` and `commit` of a warp happen in the order in which it issued them, some time after:
steps of one product are collected and multiplied as one, at the latest when the commit behind them
happens. The scheduler (scheduler.py) decides when. Loads and stores of tensor memory happen at
once, so their waits, and the fences, order nothing more here.

Tensor memory is in tensor_memory.py, instruction descriptors are in mma_descriptor_sm100.py,
operands and accumulators in tensor_core_sm100.py, scale factors in block_scales.py, copies in
tensor_copy.py.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator import block_scales, tensor_copy, tensor_core_sm100, tensor_memory
from fa4.emulator.data_movement import address
from fa4.emulator.errors import EmulationError, InvalidDescriptor
from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.memory import RANK_SHIFT, Space
from fa4.emulator.mma_descriptor_sm100 import (
    KINDS,
    SCALE_VECTORS,
    MmaForm,
    MmaShape,
    decode_shape,
    scale_bytes,
)
from fa4.emulator.ptx import Immediate, Instruction, Memory, Operand, Register, Symbol, Vector
from fa4.emulator.register_kinds import LANES
from fa4.emulator.tensor_core import ROW_BYTES
from fa4.emulator.zero_columns import ZeroColumns

if TYPE_CHECKING:
    from fa4.emulator.execute import Cta
    from fa4.emulator.translate import Emitter
    from fa4.emulator.warp import Warp

Array = np.ndarray[Any, Any]

_FIRST_LANE = np.arange(LANES) == 0


@dataclass(frozen=True)
class Step:
    """One tcgen05.mma of one lane.

    d        address of D
    adds     whether to add to what D holds
    a        matrix descriptor, or address in tensor memory
    b        matrix descriptor
    scales   (address, first byte) of A's and B's scale factors, if it has any
    zeros    columns of B that count as zeros, of a .ws
    kept     (group, 128) bool, lanes of each CTA's D that are not touched; None for none
    """

    form: MmaForm
    shape: MmaShape
    d: int
    adds: bool
    a: int
    b: int
    scales: tuple[tuple[int, int], ...] = ()
    zeros: ZeroColumns | None = None
    kept: bytes | None = None

    def kept_lanes(self, cta: int) -> Array | None:
        if self.kept is None:
            return None
        return np.frombuffer(self.kept, np.bool_).reshape(self.form.group, -1)[cta]


@dataclass
class _Product:
    """Steps of k, issued in a row, that go to one accumulator.

    ctas  that give rows of A and get rows of D, even one first
    """

    ctas: Sequence[Cta]
    steps: list[Step]
    is_done: bool = field(default=False, init=False)

    def takes(self, step: Step) -> bool:
        """Whether the next one is a further step of this one."""
        first = self.steps[0]
        if self.is_done or not step.adds or step.form.scale_exponent:
            return False
        same = (first.form._replace(scale_exponent=0), first.shape, first.d, first.zeros) == (
            step.form,
            step.shape,
            step.d,
            step.zeros,
        )
        layout = tensor_core_sm100.layout_of
        return (
            same
            and first.kept == step.kept
            and layout(first.b) == layout(step.b)
            and (first.form.a_in_tensor_memory or layout(first.a) == layout(step.a))
        )

    def execute(self) -> None:
        self.is_done = True
        first = self.steps[0]
        shape = first.shape
        shift = first.zeros.shift if first.zeros else 0
        b = np.concatenate(
            [
                tensor_core_sm100.gather(
                    cta.shared,
                    [step.b for step in self.steps],
                    shape.n // shape.group + shift,
                    shape.b_major_mn,
                    shape.b,
                    "B of tcgen05.mma",
                )
                for cta in self.ctas
            ]
        )[shift:]
        if first.zeros:
            b = np.where(first.zeros.mask(shape.m, shape.n)[:, None], np.float32(0), b)
        for index, cta in enumerate(self.ctas):
            a, scaled_b = self._gather_a(cta), b
            if shape.scaling is not None:
                a = self._scaled(cta, a, 0)
                scaled_b = self._scaled(cta, b, 1)
            tensor_core_sm100.add_product(
                cta.tensor_memory,
                first.d,
                shape,
                a,
                scaled_b,
                first.adds,
                scale_exponent=first.form.scale_exponent,
                kept=first.kept_lanes(index),
            )

    def _gather_a(self, cta: Cta) -> Array:
        shape, what = self.steps[0].shape, "A of tcgen05.mma"
        addresses = [step.a for step in self.steps]
        if not self.steps[0].form.a_in_tensor_memory:
            return tensor_core_sm100.gather(
                cta.shared, addresses, shape.rows, shape.a_major_mn, shape.a, what
            )
        lanes = tensor_core_sm100.lanes_of(shape, addresses[0], "A")
        return tensor_core_sm100.gather_from_tensor_memory(
            cta.tensor_memory, addresses, lanes, shape.a, what
        )

    def _scaled(self, cta: Cta, operand: Array, side: int) -> Array:
        """A (side 0; parts of lanes have copies of its rows) or B (1) with its scale factors."""
        shape = self.steps[0].shape
        assert shape.scaling is not None
        rows, parts = (shape.n, shape.parts) if side else (shape.rows, 1)
        scales = [
            block_scales.read_scales(
                cta.tensor_memory,
                *step.scales[side],
                rows,
                parts,
                shape.scaling,
                f"Scale factors of {'AB'[side]}",
            )
            for step in self.steps
        ]
        copies = len(operand) // rows
        return block_scales.scaled(operand, np.tile(np.concatenate(scales, axis=1), (copies, 1)))


class Tcgen05:
    """The tcgen05 instructions of one warp.

    queue  what has been issued and has not happened, oldest first
    """

    def __init__(self, warp: Warp):
        self.warp = warp
        self.queue: deque[Callable[[], None]] = deque()
        self._last: _Product | None = None

    # -- the queue -------------------------------------------------------------------------------

    def _enqueue(self, action: Callable[[], None], line: int, may_happen_now: bool) -> None:
        from fa4.emulator.warp import Deferred

        def located() -> None:
            try:
                action()
            except EmulationError as error:
                error.locate(self.warp.location(line))
                raise

        self.queue.append(located)
        scheduler = self.warp.cta.launch_state.scheduler
        # Whichever of the warp's entries the scheduler picks, the oldest action happens.
        entry = Deferred(self._advance)
        if may_happen_now and not scheduler.policy.postpones(entry):
            while self.queue:
                self._advance()
        else:
            scheduler.pending.append(entry)

    def _advance(self) -> None:
        if self.queue:
            self.queue.popleft()()

    def mma(
        self,
        form: MmaForm,
        operands: tuple[Array, Array, Array, Array, Array],
        scales: tuple[Array, ...],
        disabled: tuple[Array, ...],
        zeros: Array | None,
        mask: Array,
    ) -> None:
        """Each active lane issues one.

        operands  D, A, B, instruction descriptor, whether to add to D
        scales    addresses of A's and B's scale factors, if it has any
        disabled  masks of 32 lanes of D each that are kept
        zeros     zero-column mask descriptor of a .ws
        """
        line = self.warp.calling_line()
        for lane in np.flatnonzero(mask):
            step = self._step(form, operands, scales, disabled, zeros, int(lane))
            self._count(step)
            if self._last is not None and self._last.takes(step):
                self._last.steps.append(step)
                continue
            self._last = _Product(self._ctas(form.group), [step])
            self._enqueue(self._last.execute, line, may_happen_now=False)

    def _step(
        self,
        form: MmaForm,
        operands: tuple[Array, Array, Array, Array, Array],
        scales: tuple[Array, ...],
        disabled: tuple[Array, ...],
        zeros: Array | None,
        lane: int,
    ) -> Step:
        d, a, b, bits, adds = (int(operand[lane]) for operand in operands)
        shape = decode_shape(bits, form.kind, form.group, form.is_ws, form.vectors)
        if form.a_in_tensor_memory and shape.a_major_mn:
            raise InvalidDescriptor("tcgen05.mma has A in tensor memory, which cannot be MN major.")
        words = np.array([int(word[lane]) for word in disabled], np.uint32)
        kept = None
        if words.any():
            kept = np.unpackbits(words.view(np.uint8), bitorder="little").tobytes()
        addresses = (int(scale[lane]) for scale in scales)
        return Step(
            form,
            shape,
            d,
            bool(adds),
            a,
            b,
            tuple(zip(addresses, scale_bytes(bits), strict=False)),
            None if zeros is None else ZeroColumns.decode(int(zeros[lane]), shape),
            kept,
        )

    def _count(self, step: Step) -> None:
        """For the cost report. 64 rows of one CTA keep the unit as long as 128."""
        work, shape, kind = self.warp.work, step.shape, step.form.kind
        rows = 2 * shape.m if shape.is_interleaved else shape.m
        flop = 2 * rows * shape.n * shape.a.k
        work.tensor_flop[kind] = work.tensor_flop.get(kind, 0) + flop
        operand_rows = shape.n + (0 if step.form.a_in_tensor_memory else shape.m)
        work.operand_bytes += operand_rows * ROW_BYTES

    def copy(
        self,
        shape_name: str,
        decompression: str | None,
        group: int,
        where: Array,
        descriptor: Array,
        mask: Array,
    ) -> None:
        """tcgen05.cp; see tensor_copy.py."""
        line = self.warp.calling_line()
        ctas = self._ctas(group)
        shape = tensor_copy.SHAPES[shape_name]
        for lane in np.flatnonzero(mask):
            target, bits = int(where[lane]), int(descriptor[lane])

            def copy_all(target: int = target, bits: int = bits) -> None:
                for cta in ctas:
                    tensor_copy.copy_rows(
                        cta.shared, bits, cta.tensor_memory, target, shape, decompression
                    )

            self._last = None  # a product that comes behind is another one
            self._enqueue(copy_all, line, may_happen_now=True)

    def commit(self, where: Array, ranks: Array | None, group: int, mask: Array) -> None:
        """Arrive when everything issued before has happened: at an mbarrier, or at those with its
        offset in the CTAs of a mask of ranks."""
        line = self.warp.calling_line()
        self._ctas(group)
        for lane in np.flatnonzero(mask):
            offset = int(where[lane])
            if ranks is None:
                addresses = [offset]
            else:
                addresses = list(addresses_in(offset, int(ranks[lane])))
            self._enqueue(functools.partial(self._arrive, addresses), line, may_happen_now=True)

    def _arrive(self, addresses: list[int]) -> None:
        for where in addresses:
            self.warp.mbarrier_at(where).arrive()

    def _ctas(self, group: int) -> Sequence[Cta]:
        cta = self.warp.cta
        if group == 1:
            return [cta]
        even = cta.rank & ~1
        if even + 1 >= len(cta.cluster):
            raise EmulationError(
                f"cta_group::2 needs a pair of CTAs; rank {cta.rank} of a cluster of "
                f"{len(cta.cluster)} has no partner."
            )
        return cta.cluster[even : even + 2]

    # -- tensor memory ---------------------------------------------------------------------------

    def allocate(self, where: Array, columns: int, group: int, full: bool) -> bool:
        """Each CTA of a pair executes it for itself. False while there is no room."""
        self.warp.require_whole(full, "tcgen05.alloc")
        self._ctas(group)
        memory = self.warp.cta.tensor_memory
        start = memory.allocate(columns)
        if start is None:
            self.warp.wait_for(
                lambda: memory.has_room(columns),
                lambda: f"{columns} columns of {memory.name} (allocated: {memory.describe()})",
            )
            return False
        data = np.full((LANES, 1), start, np.uint32).view(np.uint8)
        self.warp.store(Space.SHARED, where, data, _FIRST_LANE)
        return True

    def deallocate(self, where: int, columns: int, group: int, full: bool) -> None:
        self.warp.require_whole(full, "tcgen05.dealloc")
        self._ctas(group)
        self.warp.cta.tensor_memory.deallocate(where, columns)

    def relinquish_permit(self, group: int, full: bool) -> None:
        self.warp.require_whole(full, "tcgen05.relinquish_alloc_permit")
        self._ctas(group)
        self.warp.cta.tensor_memory.relinquish_permit()

    def load(
        self, shape: str, repeat: int, packs: bool, half_split: int, where: int, full: bool
    ) -> Array:
        """(registers, 32 lanes) uint32."""
        self.warp.require_whole(full, "tcgen05.ld")
        memory = self.warp.cta.tensor_memory
        access = tensor_memory.RegisterAccess(shape, repeat, packs, half_split)
        return tensor_memory.load_registers(memory, where, self.warp.index, access, "tcgen05.ld")

    def store(
        self,
        shape: str,
        repeat: int,
        unpacks: bool,
        half_split: int,
        where: int,
        registers: Array,
        full: bool,
    ) -> None:
        self.warp.require_whole(full, "tcgen05.st")
        memory = self.warp.cta.tensor_memory
        access = tensor_memory.RegisterAccess(shape, repeat, unpacks, half_split)
        tensor_memory.store_registers(
            memory, where, self.warp.index, access, registers, "tcgen05.st"
        )

    def wait(self, operation: str, full: bool) -> None:
        """Loads and stores have happened."""
        self.warp.require_whole(full, f"tcgen05.wait::{operation}")


def addresses_in(where: int, ranks: int) -> Iterator[int]:
    """The shared address with the offset of ``where`` in each CTA of a mask of ranks."""
    offset = where & ((1 << RANK_SHIFT) - 1)
    return (offset | rank << RANK_SHIFT for rank in range(ranks.bit_length()) if ranks >> rank & 1)


# -- instructions ----------------------------------------------------------------------------------


def _group(m: Modifiers) -> int:
    return int(m.required("cta_group::1", "cta_group::2")[-1])


def _whole_warp(e: Emitter, m: Modifiers) -> None:
    m.required("sync")
    m.required("aligned")
    if e.predicate is not None:
        raise e.unknown("a predicated instruction of the whole warp")


@instruction("tcgen05.alloc")
def _allocate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    _whole_warp(e, m)
    m.one_of("shared::cta")
    m.kind("b32")
    where, columns = address(e, i.operands[0]), e.read(i.operands[1], "u32")
    e.line(
        f"if not w.tcgen05.allocate({where}, w.uniform({columns}, mask), {group}, full): return -1"
    )


@instruction("tcgen05.dealloc")
def _deallocate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    _whole_warp(e, m)
    m.kind("b32")
    where, columns = (f"w.uniform({e.read(o, 'u32')}, mask)" for o in i.operands)
    e.line(f"w.tcgen05.deallocate({where}, {columns}, {group}, full)")


@instruction("tcgen05.relinquish_alloc_permit")
def _relinquish_permit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    _whole_warp(e, m)
    e.line(f"w.tcgen05.relinquish_permit({group}, full)")


@instruction("tcgen05.mma")
def _multiply(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """[D], A descriptor or [A], B descriptor, instruction descriptor, then
    {masks} if any, whether to add, scale of D if any
    [scales of A], [scales of B], whether to add    with block scaling
    whether to add, zero-column mask if any         weight stationary
    """
    is_ws = m.take("ws")
    if m.take("sp"):
        raise e.unknown("a sparse A")
    group = _group(m)
    kind = m.required(*(f"kind::{name}" for name in KINDS)).removeprefix("kind::")
    vectors = _scale_vectors(e, m, kind)
    if m.take("collector"):  # ".collector::a::use" and the like: A may be kept, which shows nowhere
        raise e.unknown("a collector without a buffer")
    buffers = tuple(f"b{number}" for number in range(4)) if is_ws else ("a",)
    uses = ("fill", "use", "lastuse", "discard")
    m.one_of(*(f"collector::{buffer}::{use}" for buffer in buffers for use in uses))
    d, a, b, shape, *rest = i.operands
    masks: tuple[Operand, ...] = ()
    if rest and isinstance(rest[0], Vector) and not is_ws and not vectors:
        masks = rest[0].elements
        rest = rest[1:]
        if len(masks) != 4 * group:
            raise e.unknown(f"{len(masks)} disable-output-lane masks")
    scales = [address(e, operand) for operand in rest[: 2 if vectors else 0]]
    rest = rest[len(scales) :]
    if len(rest) not in ((1,) if vectors else (1, 2)):
        raise e.unknown(f"{len(i.operands)} operands")
    adds, *extra = rest
    exponent, zeros = 0, "None"
    if extra and is_ws:
        zeros = e.read(extra[0], "u64")
    elif extra:
        exponent = _scale_of_d(e, extra[0], kind)
    in_tensor_memory = isinstance(a, Memory)
    left = address(e, a) if in_tensor_memory else e.read(a, "u64")
    operands = (
        address(e, d),
        left,
        e.read(b, "u64"),
        e.read(shape, "u32"),
        e.read(adds, "pred"),
    )
    disabled = "".join(f"{e.read(mask, 'u32')}, " for mask in masks)
    form = (group, kind, in_tensor_memory, is_ws, vectors, exponent)
    e.line(
        f"w.tcgen05.mma(w.mma_form{form!r}, ({', '.join(operands)}), "
        f"({''.join(f'{scale}, ' for scale in scales)}), ({disabled}), {zeros}, {e.active()})"
    )


def _scale_vectors(e: Emitter, m: Modifiers, kind: str) -> int:
    """Scale factors a row of A, which must be named where the kind leaves a choice."""
    if kind not in SCALE_VECTORS:
        return 0
    m.required("block_scale")
    named = m.one_of("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
    allowed = SCALE_VECTORS[kind]
    if named is None:
        found = allowed[0] if len(allowed) == 1 else 0
    elif named == "block32":
        found = allowed[0]
    else:
        found = 4 if named == "block16" else int(named[-2])
    if found not in allowed:
        raise e.unknown(f"kind::{kind} with scale factors {named or 'of no size'}")
    return found


def _scale_of_d(e: Emitter, operand: Operand, kind: str) -> int:
    """The exponent s of D's factor 2^-s."""
    if not isinstance(operand, Immediate) or operand.value not in range(16):
        raise e.unknown(f"a scale of D of {operand}, not a constant from 0 to 15")
    if kind not in ("f16", "tf32"):
        raise e.unknown(f"a scale of D, which kind::{kind} has not")
    return int(operand.value)


@instruction("tcgen05.cp")
def _copy(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """[address in tensor memory], matrix descriptor."""
    group = _group(m)
    shapes = {name.partition(".")[0]: name for name in tensor_copy.SHAPES}
    shape = m.required(*shapes)
    multicast = m.one_of("warpx2::02_13", "warpx2::01_23", "warpx4")
    name = shape if multicast is None else f"{shape}.{multicast}"
    if name not in tensor_copy.SHAPES:
        raise e.unknown(f"the shape .{name}")
    decompression = None
    if m.take("b8x16"):
        decompression = m.required(*tensor_copy.DECOMPRESSIONS)
    if len(i.operands) != 2:
        raise e.unknown(f"{len(i.operands)} operands")
    where, descriptor = address(e, i.operands[0]), e.read(i.operands[1], "u64")
    e.line(
        f"w.tcgen05.copy({name!r}, {decompression!r}, {group}, {where}, {descriptor}, {e.active()})"
    )


@instruction("tcgen05.commit")
def _commit(e: Emitter, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    m.required("mbarrier::arrive::one")
    m.one_of("shared::cluster")
    is_multicast = m.take("multicast::cluster")
    m.kind("b64")
    if len(i.operands) != 1 + is_multicast:
        raise e.unknown(f"{len(i.operands)} operands")
    where = address(e, i.operands[0])
    ranks = e.read(i.operands[1], "u16") if is_multicast else "None"
    e.line(f"w.tcgen05.commit({where}, {ranks}, {group}, {e.active()})")


_REPEATS = {f"x{1 << power}": 1 << power for power in range(8)}


def _shape(e: Emitter, m: Modifiers) -> tuple[str, int]:
    shape = m.required(*tensor_memory.SHAPES)
    repeat = _REPEATS[m.required(*_REPEATS)]
    if repeat > tensor_memory.largest_repeat(shape):
        raise e.unknown(f"{repeat} repetitions of .{shape}")
    return shape, repeat


def _half_split(e: Emitter, shape: str, operands: Sequence[Operand]) -> int:
    """The constant behind the address of .16x32bx2: columns to its second half."""
    if shape != "16x32bx2":
        if operands:
            raise e.unknown(f"{len(operands)} operands more than it has")
        return 0
    if len(operands) != 1 or not isinstance(operands[0], Immediate):
        raise e.unknown("no constant that says where its second half is")
    return int(operands[0].value)


def _uniform_address(e: Emitter, operand: Operand) -> str:
    return f"w.uniform({address(e, operand)}, mask)"


@instruction("tcgen05.ld")
def _load(e: Emitter, i: Instruction, m: Modifiers) -> None:
    reduces = m.take("red")
    _whole_warp(e, m)
    shape, repeat = _shape(e, m)
    destinations = vector(e, i.operands[0])
    if len(destinations) != tensor_memory.registers_of(shape, repeat):
        raise e.unknown(f"{len(destinations)} registers")
    where, *rest = i.operands[2 if reduces else 1 :]
    packs, reduction = False, ""
    if reduces:
        if shape != "32x32b" or repeat < 2:
            raise e.unknown("a reduction is emulated of .32x32b, from .x2 on")
        operation = m.required("min", "max")
        absolute, keeps_nan = m.take("abs"), m.take("NaN")
        kind = m.kind("f32", "u32", "s32")
        if kind != "f32" and (absolute or keeps_nan):
            raise e.unknown("integers have no NaN, and no .abs here")
        reduction = f"({operation!r}, {absolute}, {keeps_nan})"
    else:
        packs = m.take("pack::16b")
        kind = m.kind("b32")
    half_split = _half_split(e, shape, rest)
    e.flush_chain()
    source = _uniform_address(e, where)
    words = e.local(f"w.tcgen05.load({shape!r}, {repeat}, {packs}, {half_split}, {source}, full)")
    views = {"u32": words}
    for index, destination in enumerate(destinations):
        if isinstance(destination, Symbol) and destination.name == "_":
            continue
        if not isinstance(destination, Register) or e.declared(destination) not in _WORDS:
            raise e.unknown(f"destination {destination}")
        storage = e.translation.storage[destination.name]
        if storage not in views:
            views[storage] = e.local(f"{words}.view(t_{storage})")
        # A row of the block, taken out where it is first needed.
        e.set_form(destination.name, storage, f"{views[storage]}[{index}]")
    if reduces:
        e.write(i.operands[1], kind, f"w.reduce_columns({words}.view(t_{kind}), *{reduction})")


_WORDS = ("u32", "s32", "f32")


@instruction("tcgen05.st")
def _store(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _whole_warp(e, m)
    shape, repeat = _shape(e, m)
    unpacks = m.take("unpack::16b")
    m.kind("b32")
    where, *rest, registers = i.operands
    sources = vector(e, registers)
    if len(sources) != tensor_memory.registers_of(shape, repeat):
        raise e.unknown(f"{len(sources)} registers")
    half_split = _half_split(e, shape, rest)
    e.flush_chain()
    target = _uniform_address(e, where)
    kinds = {e.translation.storage[s.name] if isinstance(s, Register) else "u32" for s in sources}
    kind = "f32" if kinds == {"f32"} else "u32"
    rows = ", ".join(e.read(source, kind) for source in sources)
    block = f"np.concatenate(({rows},)).view(t_u32).reshape({len(sources)}, {LANES})"
    e.line(
        f"w.tcgen05.store({shape!r}, {repeat}, {unpacks}, {half_split}, {target}, {block}, full)"
    )


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _whole_warp(e, m)
    e.flush_chain()
    e.line(f"w.tcgen05.wait({i.parts[1].removeprefix('wait::')!r}, full)")


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    e.line(f"w.fence({i.opcode!r})")
