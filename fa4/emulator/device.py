"""Running compiled kernels on CPU tensors: what `fa4.emulator.run` and backend="emulator" do.

compiled kernel -> host library (host_library) -> launches (capture) -> execution (execute)
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fa4.compiler import KernelSpec
from fa4.dispatch import Decision
from fa4.emulator.capture import DeviceModel, HostFunction
from fa4.emulator.errors import EmulationError, UnwrittenRead
from fa4.emulator.execute import Options, Statistics, run_launch
from fa4.emulator.host_library import library_of_compiled, library_of_spec
from fa4.emulator.launch_record import Launch
from fa4.emulator.memory import Allocation, GlobalMemory
from fa4.launch import NO_LENGTHS, Lengths, result_shapes, scalar_arguments, tile_counter


@dataclass(frozen=True)
class LaunchReport:
    """A launch that ran to its end, and what it took."""

    launch: Launch
    statistics: Statistics


@dataclass(frozen=True)
class TensorUse:
    """What a kernel may do with a tensor; the default is a tensor that nothing is known about.

    name         for messages
    is_output    stores are allowed
    has_content  loads are allowed before stores
    is_counter   holds zeros before a run, and must after it
    """

    name: str
    is_output: bool = True
    has_content: bool = True
    is_counter: bool = False


@dataclass(frozen=True)
class PreparedRun:
    """A call whose host code has run: its launches, and the memory that they may touch.

    tensors   keep the memory alive
    outputs   allocations that the launches must write whole
    counters  of `TensorUse.is_counter`
    """

    launches: tuple[Launch, ...]
    memory: GlobalMemory
    tensors: tuple[Any, ...]
    outputs: tuple[Allocation, ...] = ()
    counters: tuple[torch.Tensor, ...] = ()

    def execute(self, options: Options | None = None) -> tuple[LaunchReport, ...]:
        """Run the kernels, one after the other; see `run` for what it raises."""
        for output in self.outputs:
            assert output.written is not None
            output.written[:] = False
        for counter in self.counters:
            counter.zero_()
        options = options or Options()
        reports = tuple(
            LaunchReport(launch, run_launch(launch, self.memory, options))
            for launch in self.launches
        )
        for output in self.outputs:
            _require_whole(output)
        for counter in self.counters:
            if counter.any():
                raise EmulationError(f"Counters are left at {counter.tolist()}, not at 0.")
        return reports


def prepare(
    kernel: Any,
    *args: Any,
    device: DeviceModel | None = None,
    uses: Mapping[int, TensorUse] | None = None,
    check_unwritten: bool = True,
) -> PreparedRun:
    """Run the host code of a compiled function only; the arguments are those of `run`."""
    function = host_function(kernel)
    if device is None and isinstance(kernel, KernelSpec):
        device = DeviceModel(kernel.arch)
    if device is not None:
        function.device = device
    launches = tuple(function.capture(*args))
    memory = GlobalMemory()
    uses = uses or {}
    outputs = _register_tensors(memory, args, uses, check_unwritten)
    counters = tuple(args[position] for position, use in uses.items() if use.is_counter)
    return PreparedRun(launches, memory, args, tuple(outputs), counters)


def run(
    kernel: Any,
    *args: Any,
    device: DeviceModel | None = None,
    uses: Mapping[int, TensorUse] | None = None,
    **options: Any,
) -> tuple[LaunchReport, ...]:
    """Run a compiled function on CPU tensors: its host code as it is, its kernels emulated.

    kernel   a `KernelSpec`, or what cute.compile returned with ``--enable-tvm-ffi --keep-ptx``,
             or a `HostFunction`
    args     the function's arguments: CPU tensors, numbers, None, tuples of them. Kernels write to
             the tensors in place, and can touch nothing else
    device   what host code learns about the device; by default that of the spec's arch
    uses     for arguments by position, what may be done with them
    options  how to run it: the fields of `Options` (schedule, seed, check_races, ...)

    Returns one report a launch. Raises EmulationError for what hardware would punish or hide,
    HostLibraryError for a function that cannot be run here, and what the host code raises.
    """
    chosen = Options(**options)
    prepared = prepare(
        kernel, *args, device=device, uses=uses, check_unwritten=chosen.check_unwritten
    )
    return prepared.execute(chosen)


def prepare_forward(
    decision: Decision,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    wants_lse: bool = True,
    *,
    check_unwritten: bool = True,
    multiprocessors: int = 4,
) -> tuple[PreparedRun, torch.Tensor, torch.Tensor]:
    """The launch that `fa4.launch.ForwardLaunch` would make, and the (out, lse) that it fills.

    decision  names a kernel; see `fa4.dispatch.decide` with the arch that is to be emulated
    lse       is meaningless unless it was wanted
    Raises ValueError for a decision without a kernel.
    """
    problem, spec = decision.problem, decision.kernel
    if spec is None:
        raise ValueError(f"The problem is not answered by a kernel: {'; '.join(decision.reasons)}.")
    out_shape, lse_shape = result_shapes(problem)
    is_ours = out is None
    if out is None:
        out = q.new_empty(out_shape)
    lse = torch.empty(lse_shape if wants_lse else (1,) * len(lse_shape), dtype=torch.float32)
    inputs = ("q", "k", "v", *Lengths._fields, "sink")
    uses = {
        position: TensorUse(name, is_output=False)
        for position, name in zip((0, 1, 2, 5, 6, 7, 8, 9), inputs, strict=True)
    }
    # What the caller gave may keep its padding; what is ours must be written whole.
    uses[3] = TensorUse("out", has_content=not is_ours)
    uses[4] = TensorUse("lse", has_content=not wants_lse, is_output=wants_lse)
    arguments = (
        *(q, k, v, out, lse, *(lengths or NO_LENGTHS), sink),
        *scalar_arguments(problem, multiprocessors),
        int(is_ours),
        int(wants_lse),
    )
    counter = tile_counter(spec, q.device)
    if counter:
        uses[len(arguments)] = TensorUse("counter", is_counter=True)
    prepared = prepare(
        spec,
        *arguments,
        *counter,
        device=DeviceModel(spec.arch, multiprocessors),
        uses=uses,
        check_unwritten=check_unwritten,
    )
    return prepared, out, lse


def emulate_forward(
    decision: Decision,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths | None,
    sink: torch.Tensor | None,
    out: torch.Tensor | None,
    wants_lse: bool,
    *,
    multiprocessors: int = 4,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call of `fa4.launch.ForwardLaunch` does on a device: returns (out, lse).

    decision         names a kernel; see `fa4.dispatch.decide` with the arch to be emulated
    lse              is meaningless unless it was wanted
    multiprocessors  few of them make persistent kernels take several tiles each
    options          how to run it: the fields of `Options` (schedule, seed, check_races, ...)
    Raises as `run` does, and ValueError for a decision without a kernel.
    """
    chosen = Options(**options)
    prepared, filled_out, lse = prepare_forward(
        decision,
        q,
        k,
        v,
        lengths,
        sink,
        out,
        wants_lse,
        check_unwritten=chosen.check_unwritten,
        multiprocessors=multiprocessors,
    )
    prepared.execute(chosen)
    return filled_out, lse


# -- host functions --------------------------------------------------------------------------------

_of_compiled: weakref.WeakKeyDictionary[Any, HostFunction] = weakref.WeakKeyDictionary()


def host_function(kernel: Any) -> HostFunction:
    """The host code of anything that `run` takes; loaded once a process."""
    if isinstance(kernel, HostFunction):
        return kernel
    if isinstance(kernel, KernelSpec):
        return _of_spec(kernel)
    function = _of_compiled.get(kernel)
    if function is None:
        function = _of_compiled[kernel] = HostFunction(library_of_compiled(kernel))
    return function


@functools.cache
def _of_spec(spec: KernelSpec) -> HostFunction:
    return HostFunction(library_of_spec(spec), DeviceModel(spec.arch))


# -- tensors ---------------------------------------------------------------------------------------


def _tensors(args: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Tensors with their positions, also those in tuples."""
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            yield (position,), arg
        elif isinstance(arg, tuple | list):
            for path, tensor in _tensors(arg):
                yield (position, *path), tensor


def _register_tensors(
    memory: GlobalMemory,
    args: Sequence[Any],
    uses: Mapping[int, TensorUse],
    check_unwritten: bool,
) -> list[Allocation]:
    """Let kernels touch the tensors; returns those that must be written whole.

    Tensors that share memory restrict each other's use to nothing: which of them an address
    belongs to cannot be told.
    """
    tensors = {path: tensor for path, tensor in _tensors(args) if tensor.numel()}
    extents = {
        position: (tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor))
        for position, tensor in tensors.items()
    }
    outputs = []
    for position, (first, end) in extents.items():
        name = "argument " + ".".join(map(str, position))
        use = TensorUse(name) if len(position) > 1 else uses.get(position[0], TensorUse(name))
        is_alone = not any(
            other != position and start < end and first < stop
            for other, (start, stop) in extents.items()
        )
        has_content = use.has_content or not is_alone or not check_unwritten
        allocation = memory.register(
            use.name,
            first,
            np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first)),
            writable=use.is_output or not is_alone,
            initialised=has_content,
        )
        if not has_content and tensors[position].is_contiguous():
            outputs.append(allocation)
    return outputs


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (1 + sum(steps)) * tensor.element_size() if tensor.numel() else 0


def _require_whole(output: Allocation) -> None:
    assert output.written is not None
    missing = int(output.written.size - np.count_nonzero(output.written))
    if missing:
        first = int(np.argmin(output.written))
        raise UnwrittenRead(
            f"The launch left {missing} bytes of {output} unwritten, the first at {first}."
        )
