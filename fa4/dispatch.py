"""Which kernel and schedule answer a problem on a device, or every reason why none does."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa4.compiler import KernelSpec
from fa4.kernels.features import (
    BackwardFeatures,
    FinishFeatures,
    ForwardFeatures,
    PrepareFeatures,
    head_dim_class,
)
from fa4.kvcache_problem import KVCacheProblem
from fa4.pipelines import sm90, sm90_backward, sm100
from fa4.pipelines.sm90_backward import ONE_KERNEL_HEAD_DIM_MAX
from fa4.problem import AttentionProblem

# Compute capability -> compilation target.
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
ARCHITECTURE_NAMES = {"sm_90a": "Hopper", "sm_100a": "Blackwell", "sm_103a": "Blackwell Ultra"}

# Of a launch: a role's tile index goes one grid past the last tile before it stops, in 32 bits.
MAX_TILES = 2**30 - 1
MAX_CTAS = 2**31 - 1  # of a grid

# In fp32 the kernels' arithmetic on scores stays finite, and right to 1e-3, within these.
SCALE_MAX = 1e30
SOFTCAP_MIN, SOFTCAP_MAX = 1e-3, 4096.0
# A smaller positive scale may round to 0, which must not meet the -inf of a masked score.
PLAIN_SCALE_MIN = 1e-30


ForwardSchedule = sm90.ForwardSchedule | sm100.ForwardSchedule


class FallbackWarning(UserWarning):
    """A call is answered by the exact PyTorch reference because no kernel answers it."""


class UnsupportedProblemError(NotImplementedError):
    """backend="fa4" was asked for and no kernel answers the problem; the message says why."""


@dataclass(frozen=True)
class Capability:
    """What the kernels of one architecture answer. The documentation's table is made from these.

    An empty ``dtypes`` means that nothing is built for the architecture yet.
    """

    operation: str
    arch: str
    dtypes: tuple[str, ...] = ()
    head_dim_max: int = 0
    head_dim_multiple: int = 8
    sink_dtypes: tuple[str, ...] = ()
    needs_grad: bool = False
    entry: str = ""
    schedule: Callable[[ForwardFeatures, int, int], ForwardSchedule] | None = None


CAPABILITIES = (
    Capability(
        operation="forward",
        arch="sm_90a",
        dtypes=("bf16", "fp16"),
        head_dim_max=256,
        sink_dtypes=("fp32", "bf16", "fp16"),
        needs_grad=True,
        entry="fa4.kernels.sm90.forward:compile_forward",
        schedule=lambda features, rows, group: sm90.forward_schedule(features),
    ),
    *(
        Capability(
            operation="forward",
            arch=arch,
            dtypes=("bf16", "fp16"),
            head_dim_max=256,
            sink_dtypes=("fp32", "bf16", "fp16"),
            entry="fa4.kernels.sm100.forward:compile_forward",
            schedule=functools.partial(sm100.forward_schedule, arch=arch),
        )
        for arch in ("sm_100a", "sm_103a")
    ),
    Capability(
        operation="kv cache",
        arch="sm_90a",
        dtypes=("bf16", "fp16"),
        head_dim_max=256,
        sink_dtypes=("fp32", "bf16", "fp16"),
        entry="fa4.kernels.sm90.decode:compile_decode",
    ),
    Capability(operation="kv cache", arch="sm_100a"),
    Capability(operation="kv cache", arch="sm_103a"),
)

# The backward pass: its row statistics; the path that sums dQ up in memory; the one that does not.
PREPARE_ENTRY = "fa4.kernels.backward_prepare:compile_prepare"
ONE_KERNEL_ENTRY = "fa4.kernels.sm90.backward:compile_backward"
FINISH_ENTRY = "fa4.kernels.backward_finish:compile_finish"
DKV_ENTRY = "fa4.kernels.sm90.backward_dkv:compile_dkv"
DQ_ENTRY = "fa4.kernels.sm90.backward_dq:compile_dq"


def capability_of(operation: str, arch: str | None) -> Capability | None:
    """The row of the table for an operation on an architecture."""
    rows = (c for c in CAPABILITIES if (c.operation, c.arch) == (operation, arch))
    return next(rows, None)


@dataclass(frozen=True)
class Decision:
    """How a problem is answered; `str` of it is a text for people.

    problem  what was asked
    backend  "fa4" or "reference"
    kernel   the kernel that will run, None for the reference
    reasons  why each kernel was refused, in words a user can act on; empty for a kernel
    """

    problem: AttentionProblem
    backend: str
    kernel: KernelSpec | None = None
    reasons: tuple[str, ...] = ()

    @property
    def kernel_name(self) -> str | None:
        """The name a profiler shows."""
        if self.kernel is None:
            return None
        schedule = self.kernel.schedule
        return f"{self.kernel.name}_{getattr(schedule, 'name', '')}".rstrip("_")

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}"]
        if self.kernel is None:
            lines.append("answer    reference (exact attention in PyTorch)")
            lines += [f"because   {reason}" for reason in self.reasons]
        else:
            schedule = self.kernel.schedule
            lines.append(f"answer    kernel {self.kernel_name} for {self.kernel.arch}")
            if isinstance(schedule, ForwardSchedule):
                lines.append(f"schedule  {schedule.description}")
            if self.problem.needs_grad:
                lines += str(decide_backward(self.problem, self.kernel.arch)).splitlines()[1:]
        return "\n".join(lines)


def decide(problem: AttentionProblem, arch: str | None, device: str = "this device") -> Decision:
    """Choose the kernel for a problem on an architecture; pure, and the same on any machine.

    arch    target such as "sm_90a"; None where kernels cannot run at all
    device  words for the device, used in the reasons
    """
    if not problem.has_queries or not problem.has_keys:
        # Nothing to multiply: zeros and -inf, and TMA cannot describe an empty tensor.
        return Decision(problem, "reference", reasons=("there are no queries or no keys",))
    capability = capability_of("forward", arch)
    if capability is None:
        supported = ", ".join(
            f"{major}.{minor} ({ARCHITECTURE_NAMES[name]})"
            for (major, minor), name in ARCHITECTURES.items()
        )
        return Decision(
            problem,
            "reference",
            reasons=(f"{device} has no kernels; they need compute capability {supported}",),
        )
    reasons = _refusals(problem, capability)
    if reasons:
        return Decision(problem, "reference", reasons=reasons)
    features = features_of(problem)
    assert capability.schedule is not None and arch is not None
    group = problem.heads_q // problem.heads_kv
    schedule = capability.schedule(features, rows_of_a_sequence(problem), group)
    tiles = num_tiles(problem, schedule.tile_m)
    if tiles > MAX_TILES:
        reason = f"the problem has {tiles} query tiles; one launch holds {MAX_TILES}"
        return Decision(problem, "reference", reasons=(reason,))
    return Decision(problem, "fa4", KernelSpec(capability.entry, arch, features, schedule))


@dataclass(frozen=True)
class BackwardDecision:
    """How the gradients of a problem are worked out; `str` of it is a text for people.

    problem  what was asked of the forward pass
    path     "one kernel" (all gradients, dQ by atomic sums in fp32), "two kernels" (dK and dV, then
             dQ; equal bits in every run) or "reference"
    prepare  the kernel that works out the row statistics; None for the reference
    kernels  the kernels behind it, in order; empty for the reference
    reasons  why no kernel answers, in words a user can act on; empty for a kernel
    """

    problem: AttentionProblem
    path: str
    prepare: KernelSpec | None = None
    kernels: tuple[KernelSpec, ...] = ()
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}", f"backward  {self.path}"]
        lines += [f"because   {reason}" for reason in self.reasons]
        for spec in (self.prepare, *self.kernels):
            if spec is not None:
                lines.append(f"kernel    {spec.name}_{getattr(spec.schedule, 'name', '')}")
                description = getattr(spec.schedule, "description", None)
                if description is not None:
                    lines.append(f"schedule  {description}")
        return "\n".join(lines)


@functools.lru_cache(maxsize=4096)
def decide_backward(
    problem: AttentionProblem,
    arch: str | None,
    deterministic: bool = False,
    has_grad_lse: bool = False,
    device: str = "this device",
) -> BackwardDecision:
    """Choose the kernels for the gradients of a problem; pure, and the same on any machine.

    deterministic  equal bits in every run are asked for
    has_grad_lse   the LSE has a gradient
    arch, device   as for `decide`, whose conditions are those of this too
    """
    forward = decide(dataclasses.replace(problem, needs_grad=True), arch, device)
    if forward.kernel is None or arch is None:
        return BackwardDecision(problem, "reference", reasons=forward.reasons)
    features = backward_features_of(problem)
    takes_one = max(features.head_dim, features.head_dim_v) <= ONE_KERNEL_HEAD_DIM_MAX
    kernels: tuple[KernelSpec, ...]
    if takes_one and not deterministic:
        one = sm90_backward.one_kernel_schedules(features)
        prepare_schedule, tile_n = one.prepare, one.gradients.tile_n
        finish = FinishFeatures(
            dtype=features.dtype,
            head_dim=features.head_dim,
            has_right_bound=features.has_right_bound,
            packed_q=features.packed_q,
            packed_k=features.packed_k,
            has_seqused_q=features.has_seqused_q,
            has_seqused_k=features.has_seqused_k,
        )
        kernels = (
            KernelSpec(ONE_KERNEL_ENTRY, arch, features, one.gradients),
            KernelSpec(FINISH_ENTRY, arch, finish, one.finish),
        )
    else:
        two = sm90_backward.two_kernel_schedules(features)
        prepare_schedule, tile_n = two.prepare, two.dkv.tile_n
        kernels = (
            KernelSpec(DKV_ENTRY, arch, features, two.dkv),
            KernelSpec(DQ_ENTRY, arch, features, two.dq),
        )
    ctas = num_tiles(problem, prepare_schedule.tile_m)
    ctas = max(ctas, num_key_tiles(problem, tile_n))
    if ctas > MAX_CTAS:
        reason = f"the problem has {ctas} tiles; one launch holds {MAX_CTAS}"
        return BackwardDecision(problem, "reference", reasons=(reason,))
    prepare = PrepareFeatures(
        dtype=features.dtype,
        head_dim_v=features.head_dim_v,
        has_grad_lse=has_grad_lse,
        has_right_bound=features.has_right_bound,
        packed_q=features.packed_q,
        packed_k=features.packed_k,
        has_seqused_q=features.has_seqused_q,
        has_seqused_k=features.has_seqused_k,
    )
    return BackwardDecision(
        problem,
        "one kernel" if takes_one and not deterministic else "two kernels",
        KernelSpec(PREPARE_ENTRY, arch, prepare, prepare_schedule),
        kernels,
    )


def backward_features_of(problem: AttentionProblem) -> BackwardFeatures:
    """The compile-time part of a problem, for its gradients."""
    return BackwardFeatures(
        dtype=problem.dtype,
        head_dim=head_dim_class(problem.head_dim),
        head_dim_v=head_dim_class(problem.head_dim_v),
        has_left_bound=problem.window_left is not None,
        has_right_bound=problem.window_right is not None,
        score="softcap" if problem.softcap > 0.0 else "plain",
        packed_q=problem.packed_q,
        packed_k=problem.packed_k,
        has_seqused_q=problem.has_seqused_q,
        has_seqused_k=problem.has_seqused_k,
    )


def features_of(problem: AttentionProblem) -> ForwardFeatures:
    """The compile-time part of a problem."""
    if problem.softcap > 0.0:
        score = "softcap"
    else:
        score = "plain" if problem.softmax_scale >= PLAIN_SCALE_MIN else "scaled"
    return ForwardFeatures(
        dtype=problem.dtype,
        head_dim=head_dim_class(problem.head_dim),
        head_dim_v=head_dim_class(problem.head_dim_v),
        has_left_bound=problem.window_left is not None,
        has_right_bound=problem.window_right is not None,
        score=score,
        sink_dtype=problem.sink_dtype,
        packed_q=problem.packed_q,
        packed_k=problem.packed_k,
        has_seqused_q=problem.has_seqused_q,
        has_seqused_k=problem.has_seqused_k,
    )


def rows_of_a_sequence(problem: AttentionProblem) -> int:
    """Query rows of each sequence, or of the mean one where the host does not know them."""
    return problem.seqlen_q // max(problem.batch, 1) if problem.packed_q else problem.seqlen_q


def num_tiles(problem: AttentionProblem, tile_m: int) -> int:
    """Query tiles of a launch; for packed queries the slots of `kernels.blocks.tile_order`."""
    if problem.packed_q:
        return (problem.seqlen_q // tile_m + problem.batch + 1) * problem.heads_q
    return -(-problem.seqlen_q // tile_m) * problem.heads_q * problem.batch


def num_key_tiles(problem: AttentionProblem, tile_n: int) -> int:
    """Key tiles of a launch, as `num_tiles`."""
    if problem.packed_k:
        return (problem.seqlen_k // tile_n + problem.batch + 1) * problem.heads_kv
    return -(-problem.seqlen_k // tile_n) * problem.heads_kv * problem.batch


def _refusals(
    problem: AttentionProblem | KVCacheProblem, capability: Capability
) -> tuple[str, ...]:
    """Every condition of a capability that a problem does not meet, each as a clause."""
    name = ARCHITECTURE_NAMES[capability.arch]
    if not capability.dtypes:
        return (f"no {name} kernel is built yet",)
    reasons = []
    if problem.dtype not in capability.dtypes:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(capability.dtypes)}")
    for argument in ("head_dim", "head_dim_v"):
        dim = getattr(problem, argument)
        if dim % capability.head_dim_multiple or dim > capability.head_dim_max:
            reasons.append(
                f"{argument}={dim} is not a multiple of {capability.head_dim_multiple} "
                f"up to {capability.head_dim_max}"
            )
    if problem.sink_dtype is not None and problem.sink_dtype not in capability.sink_dtypes:
        reasons.append(
            f"a {problem.sink_dtype} sink is not one of {', '.join(capability.sink_dtypes)}"
        )
    if abs(problem.softmax_scale) > SCALE_MAX:
        reasons.append(f"softmax_scale={problem.softmax_scale:g} is beyond {SCALE_MAX:g}")
    if problem.softcap and not SOFTCAP_MIN <= problem.softcap <= SOFTCAP_MAX:
        reasons.append(
            f"softcap={problem.softcap:g} is not between {SOFTCAP_MIN:g} and {SOFTCAP_MAX:g}"
        )
    if problem.needs_grad and not capability.needs_grad:
        reasons.append(f"gradients are asked for and the {name} backward is not built yet")
    if problem.layout_fault is not None:
        reasons.append(problem.layout_fault)
    return tuple(reasons)


@functools.cache
def architecture_of(device: torch.device) -> tuple[str | None, str]:
    """(compilation target or None, words for the device)."""
    if device.type != "cuda":
        return None, f"a {device.type} device"
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    words = f"{name} (compute capability {capability[0]}.{capability[1]})"
    return ARCHITECTURES.get(capability), words


_warned: set[tuple[str, ...]] = set()


def warn_of_fallback(decision: Decision) -> None:
    """One warning for each distinct set of reasons; nothing for a problem without work."""
    if not decision.problem.has_queries or not decision.problem.has_keys:
        return
    if decision.reasons not in _warned:
        _warned.add(decision.reasons)
        warnings.warn(
            f"attention is computed by the PyTorch reference: {'; '.join(decision.reasons)}.",
            FallbackWarning,
            stacklevel=6,  # the caller of the public function
        )


def support_table() -> list[dict[str, str]]:
    """Rows of the documentation's support table, from `CAPABILITIES`."""
    rows = []
    for capability in CAPABILITIES:
        built = bool(capability.dtypes)
        dims = f"multiples of {capability.head_dim_multiple} up to {capability.head_dim_max}"
        rows.append(
            {
                "operation": capability.operation,
                "architecture": f"{ARCHITECTURE_NAMES[capability.arch]} ({capability.arch})",
                "dtypes": ", ".join(capability.dtypes) if built else "not built yet",
                "head_dim, head_dim_v": f"{dims}, each" if built else "",
                "sink dtypes": ", ".join(capability.sink_dtypes),
                "gradients": "yes" if capability.needs_grad else "no",
            }
        )
    return rows
