"""What a compiled kernel's own host code launches, found by running it.

The host function is called with CPU tensors that are labelled as CUDA ones. It computes grids,
packs TMA descriptors and lays out parameters as always, and its launches arrive here
(`launch_shim.c`) instead of at a driver.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fa4 import dsl_runtime
from fa4.emulator.cuda_tensors import as_cuda
from fa4.emulator.errors import EmulationError
from fa4.emulator.host_library import EXPORT_NAME
from fa4.emulator.launch_record import Dim3, Launch
from fa4.emulator.ptx import Kernel, Module, parse

_SUCCESS, _INVALID_VALUE = 0, 1  # cudaError_t
_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeID

MAX_THREADS = 1024  # of a CTA


class InvalidLaunch(EmulationError):
    """A launch that a driver would refuse."""


@dataclass(frozen=True)
class DeviceModel:
    """What host code learns when it asks about the device.

    arch             target such as "sm_90a"
    multiprocessors  few of them make persistent kernels take several tiles each
    shared_bytes     shared memory that a CTA may have
    """

    arch: str = "sm_90a"
    multiprocessors: int = 4
    shared_bytes: int = 232_448  # compute capability 9.0 and 10.x

    @property
    def compute_capability(self) -> tuple[int, int]:
        return divmod(int(self.arch.removeprefix("sm_").rstrip("af")), 10)

    def attribute(self, number: int) -> int | None:
        """By cudaDeviceAttr; None for one that is not modelled."""
        major, minor = self.compute_capability
        return {
            1: MAX_THREADS,
            10: 32,  # lanes of a warp
            16: self.multiprocessors,
            75: major,
            76: minor,
            95: 1,  # cooperative launch
            97: self.shared_bytes,
        }.get(number)


class _LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = [
        ("id", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    ]


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    ]


_LaunchFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_LaunchConfig),
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_void_p),
)
_AttributeFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)

# A library is loaded once a process, however many functions are made of it, and tells one of them.
_capture_lock = threading.Lock()


class HostFunction:
    """The host code of one compiled function, loaded, with its launches caught.

    library  path or bytes of what `host_library` built. Host code that asks about the device gets
             the answers of the first `capture`, because it keeps them.
    """

    def __init__(self, library: Path | bytes, device: DeviceModel | None = None):
        self.device = device or DeviceModel()
        self._launches: list[Launch] = []
        self._error: Exception | None = None
        self._function, self._image = _load(library)
        self._image.fa4_emulator_text.restype = ctypes.c_char_p
        self.ptx: str = self._image.fa4_emulator_text().decode()
        # ctypes does not keep callbacks alive for C.
        self._callbacks = (_LaunchFunction(self._on_launch), _AttributeFunction(self._on_attribute))

    @functools.cached_property
    def _module(self) -> Module:
        return parse(self.ptx)

    def capture(self, *args: Any) -> list[Launch]:
        """Run the host code on CPU tensors, numbers, None and tuples of them; returns its launches.

        The arguments are those of the compiled function, whose own checks apply. Raises whatever
        it raises, and `InvalidLaunch`.
        """
        relabelled = [_relabelled(arg) for arg in args]
        with _capture_lock:
            self._launches, self._error = [], None
            self._image.fa4_emulator_connect(*self._callbacks)
            try:
                self._function(*relabelled)
            except Exception:
                if self._error is None:
                    raise
            finally:
                self._image.fa4_emulator_connect(None, None)
            if self._error is not None:
                raise self._error
            return self._launches

    def _on_launch(self, config: Any, kernel: bytes, arguments: Any) -> int:
        # An exception must not leave a callback: ctypes would print and forget it.
        try:
            self._launches.append(self._record(config.contents, kernel.decode(), arguments))
        except Exception as error:  # noqa: BLE001  raised again by `capture`
            self._error = self._error or error
            return _INVALID_VALUE
        return _SUCCESS

    def _on_attribute(self, value: Any, number: int) -> int:
        answer = self.device.attribute(number)
        if answer is None:
            self._error = self._error or EmulationError(
                f"The host code asks for device attribute {number} (cudaDeviceAttr), which the "
                "emulator does not model."
            )
            return _INVALID_VALUE
        value[0] = answer
        return _SUCCESS

    def _record(self, config: _LaunchConfig, entry: str, arguments: Any) -> Launch:
        kernel = self._module.kernels.get(entry)
        if kernel is None:
            raise EmulationError(
                f"The PTX text has no entry {entry}, which the host code launches."
            )
        launch = Launch(
            entry=entry,
            ptx=self.ptx,
            grid=_dim3(config.grid),
            block=_dim3(config.block),
            cluster=_cluster(config),
            shared_bytes=config.shared_bytes,
            params=_lay_out(kernel, arguments),
        )
        check_launch(launch, self.device)
        return launch


def _relabelled(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return as_cuda(arg)
    if isinstance(arg, tuple | list):
        elements = [_relabelled(element) for element in arg]
        if hasattr(arg, "_fields"):  # a NamedTuple takes its elements one by one
            return type(arg)(*elements)
        return type(arg)(elements)
    return arg


def check_launch(launch: Launch, device: DeviceModel) -> None:
    """Raises InvalidLaunch for what a driver would refuse."""
    if min(launch.grid) < 1 or min(launch.block) < 1 or min(launch.cluster) < 1:
        raise InvalidLaunch(f"{launch} has an empty dimension")
    if launch.threads > MAX_THREADS:
        raise InvalidLaunch(f"{launch} has more than {MAX_THREADS} threads in a CTA")
    if launch.shared_bytes > device.shared_bytes:
        raise InvalidLaunch(
            f"{launch} asks for more shared memory than the {device.shared_bytes} bytes of a CTA"
        )
    if any(extent % size for extent, size in zip(launch.grid, launch.cluster, strict=True)):
        raise InvalidLaunch(f"{launch} has a grid that is not whole clusters")


def _dim3(values: Sequence[int]) -> Dim3:
    x, y, z = values
    return x, y, z


def _cluster(config: _LaunchConfig) -> Dim3:
    for attribute in config.attributes[: config.num_attributes]:
        if attribute.id == _CLUSTER_DIMENSION:
            return _dim3(attribute.value[:3])
    return 1, 1, 1


def _lay_out(kernel: Kernel, arguments: Any) -> bytes:
    """The parameter buffer, from the array of pointers to the values."""
    buffer = bytearray(kernel.parameter_bytes)
    params = kernel.parameters.values()
    for param, pointer in zip(params, arguments[: len(params)], strict=True):
        buffer[param.offset : param.offset + param.size] = ctypes.string_at(pointer, param.size)
    return bytes(buffer)


def _load(library: Path | bytes) -> tuple[Any, ctypes.CDLL]:
    """(host function, the library's symbols); stays loaded until the process ends."""
    import tvm_ffi

    dsl_runtime.load_runtime()
    if isinstance(library, Path):
        image = ctypes.CDLL(str(library))
        return tvm_ffi.load_module(str(library)).get_function(EXPORT_NAME), image
    # Both loaders must be given the same file; a mapped library survives its removal.
    handle, name = tempfile.mkstemp(prefix="fa4-", suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library)
        return _load(Path(name))
    finally:
        os.unlink(name)
