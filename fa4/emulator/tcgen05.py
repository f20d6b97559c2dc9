"""`tcgen05`: tensor memory and the tensor cores of sm_100.

`mma` and `commit` of a warp happen in the order in which it issued them, some time after: steps of
one product are collected and multiplied as one, at the latest when the commit behind them happens.
The scheduler (scheduler.py) decides when. Loads and stores of tensor memory happen at once, so
their waits, and the fences, order nothing more here.

Tensor memory is in tensor_memory.py, descriptors and products are in tensor_core_sm100.py.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator import tensor_core_sm100, tensor_memory
from fa4.emulator.data_movement import address
from fa4.emulator.errors import EmulationError, InvalidDescriptor
from fa4.emulator.instructions import Modifiers, instruction, vector
from fa4.emulator.memory import RANK_SHIFT, Space
from fa4.emulator.ptx import Instruction, Memory, Operand, Register, Symbol, Vector
from fa4.emulator.register_kinds import LANES
from fa4.emulator.tensor_core_sm100 import KINDS, MmaShape

if TYPE_CHECKING:
    from fa4.emulator.execute import Cta
    from fa4.emulator.translate import Emitter
    from fa4.emulator.warp import Warp

Array = np.ndarray[Any, Any]

_FIRST_LANE = np.arange(LANES) == 0


@dataclass
class _Product:
    """Steps of k, issued in a row, that go to one accumulator.

    ctas      that give rows of A and get rows of D, even one first
    adds      whether to add to what D holds
    a_steps   matrix descriptors, or addresses in tensor memory, one a step
    b_steps   matrix descriptors
    """

    shape: MmaShape
    ctas: Sequence[Cta]
    d: int
    adds: bool
    a_in_tensor_memory: bool
    a_steps: list[int]
    b_steps: list[int]
    is_done: bool = False

    def takes(self, next_step: _Product) -> bool:
        """Whether the next product (of one step) is a further step of this one."""
        if self.is_done or not next_step.adds:
            return False
        same = (self.shape, self.d, self.a_in_tensor_memory) == (
            next_step.shape,
            next_step.d,
            next_step.a_in_tensor_memory,
        )
        layout = tensor_core_sm100.layout_of
        return (
            same
            and layout(self.b_steps[0]) == layout(next_step.b_steps[0])
            and (self.a_in_tensor_memory or layout(self.a_steps[0]) == layout(next_step.a_steps[0]))
        )

    def execute(self) -> None:
        self.is_done = True
        shape = self.shape
        rows_of_b = shape.n // shape.group
        b = np.concatenate(
            [
                tensor_core_sm100.gather(
                    cta.shared,
                    self.b_steps,
                    rows_of_b,
                    shape.b_major_mn,
                    shape.b,
                    "B of tcgen05.mma",
                )
                for cta in self.ctas
            ]
        )
        for cta in self.ctas:
            a = self._gather_a(cta)
            tensor_core_sm100.add_product(cta.tensor_memory, self.d, shape, a, b, self.adds)

    def _gather_a(self, cta: Cta) -> Array:
        shape, what = self.shape, "A of tcgen05.mma"
        if self.a_in_tensor_memory:
            return tensor_core_sm100.gather_from_tensor_memory(
                cta.tensor_memory, self.a_steps, shape.a, what
            )
        return tensor_core_sm100.gather(
            cta.shared, self.a_steps, shape.rows, shape.a_major_mn, shape.a, what
        )


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
        group: int,
        kind: str,
        a_in_tensor_memory: bool,
        operands: tuple[Array, Array, Array, Array, Array],
        disabled: tuple[Array, ...],
        mask: Array,
    ) -> None:
        """Each active lane issues one; operands are D, A, B, instruction descriptor, whether to
        add to D. ``disabled`` are masks of lanes of D that are kept, which must be 0."""
        line = self.warp._calling_line()
        for lane in np.flatnonzero(mask):
            d, a, b, shape_bits, adds = (int(operand[lane]) for operand in operands)
            if any(int(words[lane]) for words in disabled):
                raise EmulationError(
                    "tcgen05.mma with a disable-output-lane mask other than 0 is not emulated."
                )
            shape = tensor_core_sm100.decode_shape(shape_bits, kind, group)
            if a_in_tensor_memory and (shape.rows != 128 or shape.a_major_mn):
                raise InvalidDescriptor(
                    f"tcgen05.mma with A in tensor memory is emulated with 128 K-major rows a CTA, "
                    f"not with {shape.rows} {'MN' if shape.a_major_mn else 'K'}-major ones."
                )
            product = _Product(
                shape, self._ctas(group), d, bool(adds), a_in_tensor_memory, [a], [b]
            )
            if self._last is not None and self._last.takes(product):
                self._last.a_steps.append(a)
                self._last.b_steps.append(b)
                continue
            self._last = product
            self._enqueue(product.execute, line, may_happen_now=False)

    def commit(self, where: Array, ranks: Array | None, group: int, mask: Array) -> None:
        """Arrive when everything issued before has happened: at an mbarrier, or at those with its
        offset in the CTAs of a mask of ranks."""
        line = self.warp._calling_line()
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
            self.warp._mbarrier(where).arrive()

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
        self.warp._require_whole(full, "tcgen05.alloc")
        self._ctas(group)
        memory = self.warp.cta.tensor_memory
        start = memory.allocate(columns)
        if start is None:
            self.warp._wait(
                lambda: memory.has_room(columns),
                lambda: f"{columns} columns of {memory.name} (allocated: {memory.describe()})",
            )
            return False
        data = np.full((LANES, 1), start, np.uint32).view(np.uint8)
        self.warp.store(Space.SHARED, where, data, _FIRST_LANE)
        return True

    def deallocate(self, where: int, columns: int, group: int, full: bool) -> None:
        self.warp._require_whole(full, "tcgen05.dealloc")
        self._ctas(group)
        self.warp.cta.tensor_memory.deallocate(where, columns)

    def relinquish_permit(self, group: int, full: bool) -> None:
        self.warp._require_whole(full, "tcgen05.relinquish_alloc_permit")
        self._ctas(group)
        self.warp.cta.tensor_memory.relinquish_permit()

    def load(self, shape: str, repeat: int, where: int, full: bool) -> Array:
        """(registers, 32 lanes) uint32."""
        self.warp._require_whole(full, "tcgen05.ld")
        memory = self.warp.cta.tensor_memory
        return tensor_memory.load_registers(
            memory, where, self.warp.index, shape, repeat, "tcgen05.ld"
        )

    def store(self, shape: str, where: int, registers: Array, full: bool) -> None:
        self.warp._require_whole(full, "tcgen05.st")
        memory = self.warp.cta.tensor_memory
        tensor_memory.store_registers(
            memory, where, self.warp.index, shape, registers, "tcgen05.st"
        )

    def wait(self, operation: str, full: bool) -> None:
        """Loads and stores have happened."""
        self.warp._require_whole(full, f"tcgen05.wait::{operation}")


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
    """[D], A descriptor or [A], B descriptor, instruction descriptor, {masks}, whether to add."""
    group = _group(m)
    kind = m.required(*(f"kind::{name}" for name in KINDS)).removeprefix("kind::")
    if m.take("collector"):  # ".collector::a::use" and the like: A may be kept, which shows nowhere
        raise e.unknown("a collector without a buffer")
    m.one_of(*(f"collector::a::{name}" for name in ("fill", "use", "lastuse", "discard")))
    d, a, b, shape, *rest = i.operands
    masks: tuple[Operand, ...] = ()
    if rest and isinstance(rest[0], Vector):
        masks = rest[0].elements
        rest = rest[1:]
        if len(masks) != 4 * group:
            raise e.unknown(f"{len(masks)} disable-output-lane masks")
    if len(rest) != 1:
        raise e.unknown("a scale of D, or another number of operands")
    in_tensor_memory = isinstance(a, Memory)
    left = address(e, a) if in_tensor_memory else e.read(a, "u64")
    operands = (
        address(e, d),
        left,
        e.read(b, "u64"),
        e.read(shape, "u32"),
        e.read(rest[0], "pred"),
    )
    disabled = "".join(f"{e.read(mask, 'u32')}, " for mask in masks)
    e.line(
        f"w.tcgen05.mma({group}, {kind!r}, {in_tensor_memory}, ({', '.join(operands)}), "
        f"({disabled}), {e.active()})"
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
    return shape, repeat


def _uniform_address(e: Emitter, operand: Operand) -> str:
    return f"w.uniform({address(e, operand)}, mask)"


@instruction("tcgen05.ld")
def _load(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _whole_warp(e, m)
    shape, repeat = _shape(e, m)
    m.kind("b32")
    destinations = vector(e, i.operands[0])
    if len(destinations) != tensor_memory.registers_of(shape, repeat):
        raise e.unknown(f"{len(destinations)} registers")
    e.flush_chain()
    where = _uniform_address(e, i.operands[1])
    words = e.local(f"w.tcgen05.load({shape!r}, {repeat}, {where}, full)")
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


_WORDS = ("u32", "s32", "f32")


@instruction("tcgen05.st")
def _store(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _whole_warp(e, m)
    shape, repeat = _shape(e, m)
    m.kind("b32")
    sources = vector(e, i.operands[1])
    if len(sources) != tensor_memory.registers_of(shape, repeat):
        raise e.unknown(f"{len(sources)} registers")
    e.flush_chain()
    where = _uniform_address(e, i.operands[0])
    kinds = {e.translation.storage[s.name] if isinstance(s, Register) else "u32" for s in sources}
    kind = "f32" if kinds == {"f32"} else "u32"
    rows = ", ".join(e.read(source, kind) for source in sources)
    block = f"np.concatenate(({rows},)).view(t_u32).reshape({len(sources)}, {LANES})"
    e.line(f"w.tcgen05.store({shape!r}, {where}, {block}, full)")


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    _whole_warp(e, m)
    e.flush_chain()
    e.line(f"w.tcgen05.wait({i.parts[1].removeprefix('wait::')!r}, full)")


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.flush_chain()
    e.line(f"w.fence({i.opcode!r})")
