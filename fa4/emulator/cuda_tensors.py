"""CPU tensors as tensors of a CUDA device, which is what compiled host functions accept.

Only the label changes: the data stays where it is, so the pointers that the host code passes to
its kernels are host addresses.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_CPU, _CUDA = 1, 2  # DLDeviceType


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _TensorHead(ctypes.Structure):
    """The first fields of DLTensor, with which a DLManagedTensor begins."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class CudaExporter:
    """A DLPack producer that says "cuda:0" of a CPU tensor.

    Raises ValueError for a tensor that is not on the CPU.
    """

    def __init__(self, tensor: torch.Tensor):
        if tensor.device.type != "cpu":
            raise ValueError(f"the tensor is on {tensor.device}; the emulator takes CPU tensors")
        self.tensor = tensor.detach()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **options: Any) -> Any:
        # Asked for without a version, torch answers with the unversioned structure.
        capsule = self.tensor.__dlpack__()
        head = _TensorHead.from_address(_capsule_pointer(capsule, b"dltensor"))
        assert head.device.type == _CPU
        head.device.type, head.device.index = _CUDA, 0
        return capsule


def as_cuda(tensor: torch.Tensor) -> Any:
    """A TVM-FFI tensor over the memory of a CPU tensor, labelled as one of device cuda:0.

    It keeps the memory alive. Raises as `CudaExporter` does.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(CudaExporter(tensor))
