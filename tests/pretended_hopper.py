"""A CPU that passes for a Hopper GPU, so that tests can judge everything between call and launch.

`FakeKernel` stands for compiled code, takes its arguments in the kernel's order, refuses what
TVM-FFI would refuse, and computes the answer from nothing but what it was given.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fa4 import attention, backward, dispatch, launch, sdpa
from fa4.compiler import KernelSpec
from fa4.dispatch import Decision
from fa4.kernels.features import ForwardFeatures
from fa4.problem import AttentionProblem
from fa4.reference import attention_reference
from fa4.reference_backward import Gradients, attention_backward_reference

BF16, FP16 = torch.bfloat16, torch.float16

# Arguments of a compiled kernel, in their order. They are held against the kernel's source by
# tests/test_attention.py, and against a compiled function by tests/test_kernel_code.py.
KERNEL_ARGUMENTS = (
    *("q", "k", "v", "out", "lse"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "sink"),
    *("softmax_scale", "softcap", "left", "right", "heads_in_group", "max_ctas"),
    *("fills_padding", "stores_lse", "counter"),
)


@dataclasses.dataclass
class FakeKernel:
    """What `get_kernel` gives for a specialisation; calls are recorded in `calls`."""

    spec: KernelSpec
    calls: list[tuple["FakeKernel", dict[str, Any]]]

    def __call__(self, *arguments: Any) -> None:
        given_arguments = dict(zip(KERNEL_ARGUMENTS, arguments, strict=True))
        self.check(given_arguments)
        self.calls.append((self, given_arguments))
        self.compute(**given_arguments)

    @property
    def features(self) -> ForwardFeatures:
        assert isinstance(self.spec.features, ForwardFeatures)
        return self.spec.features

    def check(self, arguments: dict[str, Any]) -> None:
        """Refuse what a TVM-FFI function refuses: types, ranks, strides and alignment."""
        features = self.features
        names = {"bf16": BF16, "fp16": FP16, "fp32": torch.float32}
        modes_q, modes_k = 4 - features.packed_q, 4 - features.packed_k
        fp32, int32 = torch.float32, torch.int32
        dtype = names[features.dtype]
        expected = {
            "q": (dtype, modes_q, True),
            "k": (dtype, modes_k, True),
            "v": (dtype, modes_k, True),
            "out": (dtype, modes_q, True),
            "lse": (fp32, modes_q - 1, True),
            "cu_seqlens_q": (int32, 1, features.packed_q),
            "cu_seqlens_k": (int32, 1, features.packed_k),
            "seqused_q": (int32, 1, features.has_seqused_q),
            "seqused_k": (int32, 1, features.has_seqused_k),
            "sink": (names.get(features.sink_dtype or ""), 1, features.sink_dtype is not None),
        }
        for name, (element, modes, is_present) in expected.items():
            tensor = arguments[name]
            if not is_present:
                if tensor is not None:
                    raise TypeError(f"Mismatched type on argument {name}, expected None")
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype != element:
                raise TypeError(f"Mismatched type on argument {name}")
            if tensor.dim() != modes:
                raise ValueError(f"Mismatched rank on argument {name}")
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise ValueError(f"Mismatched stride on argument {name}")
            if name in ("q", "k", "v", "out") and tensor.data_ptr() % 16:
                raise ValueError(f"Misaligned Tensor data on argument {name}")
        for name in KERNEL_ARGUMENTS[10:12]:
            assert type(arguments[name]) is float, name
        for name in KERNEL_ARGUMENTS[12:-1]:
            assert type(arguments[name]) is int, name
        counter = arguments["counter"]
        assert (counter.dtype, counter.tolist()) == (torch.int32, [0])

    def compute(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        sink: Tensor | None,
        softmax_scale: float,
        softcap: float,
        left: int,
        right: int,
        fills_padding: int,
        stores_lse: int,
        heads_in_group: int,
        max_ctas: int,
        counter: Tensor,
        **lengths: Tensor | None,
    ) -> None:
        features = self.features
        assert heads_in_group >= 1
        assert max_ctas >= 1
        assert features.score != "plain" or (softmax_scale > 0 and softcap == 0)
        with torch.no_grad():
            answer, answer_lse = attention_reference(
                q,
                k,
                v,
                softmax_scale=softmax_scale,
                window_size=(
                    left if features.has_left_bound else None,
                    right if features.has_right_bound else None,
                ),
                softcap=softcap if features.score == "softcap" else 0.0,
                sink=sink,
                **lengths,
            )
            padding = self.padding_rows(q, lengths)
            if not fills_padding:
                answer = torch.where(padding[..., None, None], out, answer)
            out.copy_(answer)
            if stores_lse:
                lse.copy_(answer_lse)

    @staticmethod
    def padding_rows(q: Tensor, lengths: dict[str, Tensor | None]) -> Tensor:
        """Rows of q that are in use by no sequence, found with loops."""
        padding = torch.ones(q.shape[:-2], dtype=torch.bool)
        cu_seqlens, seqused = lengths["cu_seqlens_q"], lengths["seqused_q"]
        if cu_seqlens is None:
            for b in range(q.shape[0]):
                padding[b, : q.shape[1] if seqused is None else seqused[b]] = False
            return padding
        for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            padding[start : end if seqused is None else start + int(seqused[b])] = False
        return padding


@dataclasses.dataclass
class Hopper:
    """The pretended machine: launches, kernels asked for, and how often the path was walked."""

    calls: list[tuple[FakeKernel, dict[str, Any]]] = dataclasses.field(default_factory=list)
    specs: list[KernelSpec] = dataclasses.field(default_factory=list)
    walks: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the last launch."""
        return self.calls[-1][1]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    machine = Hopper()

    def get_kernel(spec: KernelSpec) -> FakeKernel:
        machine.specs.append(spec)
        return FakeKernel(spec, machine.calls)

    original = attention.describe_problem

    def describe_problem(*arguments: Any, **options: Any) -> AttentionProblem:
        machine.walks += 1
        return original(*arguments, **options)

    for module in (attention, sdpa):
        monkeypatch.setattr(module, "architecture_of", lambda device: ("sm_90a", "a faked Hopper"))
    monkeypatch.setattr(attention, "describe_problem", describe_problem)
    monkeypatch.setattr(launch, "get_kernel", get_kernel)
    monkeypatch.setattr(launch, "multiprocessor_count", lambda device: 132)
    # The CPU is the GPU here, for autocast as well.
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: get_dtype("cpu"))
    return machine


@pytest.fixture
def training_hopper(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """A pretended Hopper with kernels for calls that want gradients, whatever it has in truth.

    The gradients are the reference's, with any backend.
    """

    def decide(problem: AttentionProblem, arch: str | None, device: str = "a device") -> Decision:
        without = dataclasses.replace(problem, needs_grad=False)
        return dataclasses.replace(dispatch.decide(without, arch, device), problem=problem)

    for module in (attention, sdpa):
        monkeypatch.setattr(module, "decide", decide)

    def attention_backward(*arguments: Any, **options: Any) -> Gradients:
        return attention_backward_reference(*arguments)

    monkeypatch.setattr(backward, "attention_backward", attention_backward)
    return hopper
