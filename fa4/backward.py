"""The backward pass: gradients from a forward call's inputs, output and LSE.

    AttentionProblem -> BackwardDecision (fa4.dispatch) -> kernels, or fa4.reference_backward

Beside the gradients a call allocates its row statistics, 8 bytes for each query row and head, and
where dQ is summed up in memory 32 bytes more and 4 bytes for each element of dQ, head dim and rows
rounded up to the kernels' blocks.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4.compiler import KernelSpec, get_kernel
from fa4.device_counters import device_counters
from fa4.dispatch import (
    BackwardDecision,
    UnsupportedProblemError,
    architecture_of,
    decide_backward,
)
from fa4.launch import Lengths, heads_in_group, multiprocessor_count
from fa4.pipelines.sm90_backward import LOTS_AHEAD, STATISTIC_TERMS, OneKernelSchedule
from fa4.problem import AttentionProblem, layout_fault
from fa4.reference_backward import Gradients, attention_backward_reference

__all__ = ["Gradients", "attention_backward", "backward_steps", "emulate_backward"]

EMULATED_ARCH = "sm_90a"  # by default
KEYS_AT_ONCE = 128  # of a multiprocessor: one tile, or two of the kernel of dK and dV alone
EMULATED_MULTIPROCESSORS = 2  # few, so that a CTA takes several tiles
LOG2_E = math.log2(math.e)


def attention_backward(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    deterministic: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> Gradients:
    """(dq, dk, dv, dsink) of the forward call that ``problem`` describes; dsink None without sink.

    q, k, v, lengths, sink  what the forward call was given
    out, lse                what it returned; the normalisation is not computed again
    grad_out, grad_lse      gradients of those, any strides (one that TMA cannot address is copied
                            once); None for grad_lse is zero
    deterministic           equal bits in every run; torch's deterministic algorithms ask for it too
    backend, arch           as in `fa4.flash_attn_func`

    The gradients are new contiguous tensors of their inputs' shapes and dtypes. Queries that see
    no key, keys that no query sees and rows of padding get exactly 0.
    """
    if not problem.has_queries or not problem.has_keys:
        # Nothing depends on anything, and TMA cannot describe an empty tensor.
        dsink = None if sink is None else torch.zeros_like(sink)
        dq, dk, dv = (q.new_zeros(t.shape) for t in (q, k, v))
        return Gradients(dq, dk, dv, dsink)
    operands = (q, k, v, lengths, sink, out, lse, grad_out, grad_lse)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if backend == "reference":
        return attention_backward_reference(problem, *operands)
    target: str | None
    if backend == "emulator":
        target, device = arch or EMULATED_ARCH, "the emulator"
        if q.device.type != "cpu":
            raise ValueError(f'q is on {q.device}; backend="emulator" takes CPU tensors.')
    else:
        target, device = architecture_of(q.device)
    decision = decide_backward(problem, target, deterministic, grad_lse is not None, device)
    if decision.prepare is None:
        if backend != "auto":
            raise UnsupportedProblemError(
                f"no fa4 kernel works out the gradients of this problem: "
                f"{'; '.join(decision.reasons)}. ({problem})"
            )
        # The forward pass has warned already.
        return attention_backward_reference(problem, *operands)
    if backend == "emulator":
        return emulate_backward(decision, *operands)
    is_elsewhere = torch.cuda.device_count() > 1 and torch.cuda.current_device() != q.device.index
    # Counters of tiles, too, are those of the device's current stream.
    with torch.cuda.device(q.device) if is_elsewhere else contextlib.nullcontext():
        steps, gradients, statistics = backward_steps(
            decision, *operands, multiprocessor_count(q.device)
        )
        for step in steps:
            get_kernel(step.spec)(*step.arguments)
    return Gradients(*gradients, sink_gradient(sink, statistics))


class Step(NamedTuple):
    """One kernel of a backward pass.

    arguments  of the compiled function
    names      of its tensors, for messages; the arguments begin with those
    outputs    positions of the tensors that it writes whole
    sums       positions of the tensors that it adds to, or writes in part
    counters   positions of the tensors that it finds and leaves at 0
    """

    spec: KernelSpec
    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    sums: tuple[int, ...] = ()
    counters: tuple[int, ...] = ()


def backward_steps(
    decision: BackwardDecision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    multiprocessors: int = EMULATED_MULTIPROCESSORS,
) -> tuple[list[Step], tuple[Tensor, Tensor, Tensor], Tensor]:
    """(kernels with their arguments, (dq, dk, dv), row statistics); nothing is launched here.

    multiprocessors  of the device

    The statistics are (2, batch or 1, heads_q, rows) fp32: `kernels.blocks.row_statistics`.
    """
    problem, prepare = decision.problem, decision.prepare
    assert prepare is not None
    clips_q = problem.has_seqused_q and not problem.packed_q
    out = _addressable("out", out, clips_q)
    grad_out = _addressable("grad_out", grad_out.to(out.dtype), clips_q)
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float32)
    statistics = torch.empty(
        statistics_shape(problem, prepare.schedule.tile_m),  # type: ignore[attr-defined]
        dtype=torch.float32,
        device=q.device,
    )
    first, second = decision.kernels
    terms = dq_sums = zeroed = None
    pairs_in_lot = heads_to_zero = 0
    if decision.path == "one kernel":
        shape = (*statistics.shape[:3], statistics.shape[3] * STATISTIC_TERMS)
        terms = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
        dq_sums = torch.empty(
            dq_sums_shape(statistics, first.schedule),  # type: ignore[arg-type]
            dtype=torch.float32,
            device=q.device,
        )
        pairs_in_lot, lots = lots_of_heads(problem, multiprocessors)
        heads_to_zero = dq_sums.shape[0] * dq_sums.shape[1]
        if lots > LOTS_AHEAD:
            heads_to_zero = LOTS_AHEAD * pairs_in_lot * (problem.heads_q // problem.heads_kv)
        zeroed = torch.empty(lots, dtype=torch.int32, device=q.device)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    right = problem.window_right or 0
    scalars = (problem.softmax_scale, problem.softcap, problem.window_left or 0, right)
    steps = [
        Step(
            prepare,
            (
                *(out, grad_out, lse, grad_lse, statistics, terms, dq_sums, zeroed),
                *(*lengths, problem.seqlen_k, right, heads_to_zero, problem.softmax_scale),
            ),
            (
                *("out", "grad_out", "lse", "grad_lse"),
                *("statistics", "terms", "dq_sums", "zeroed", *Lengths._fields),
            ),
            outputs=(4, 5, 7),
            sums=(6,),
        )
    ]
    pairs_in_turn = key_heads_in_turn(problem, multiprocessors)
    inputs = (q, k, v, grad_out, statistics)
    names = ("q", "k", "v", "grad_out", "statistics")
    if decision.path == "one kernel":
        steps.append(
            Step(
                first,
                (
                    *(*inputs, terms, dq_sums, dk, dv, device_counters(q.device, 1)),
                    *(zeroed, *lengths, *scalars, pairs_in_turn, pairs_in_lot, multiprocessors),
                ),
                (*names, "terms", "dq_sums", "dk", "dv", "counter", "zeroed", *Lengths._fields),
                outputs=(7, 8),
                sums=(6, 10),
                counters=(9,),
            )
        )
        steps.append(
            Step(
                second,
                (dq_sums, dq, *lengths, problem.seqlen_k, right, problem.softmax_scale),
                ("dq_sums", "dq", *Lengths._fields),
                (1,),
            )
        )
    else:
        steps.append(
            Step(
                first,
                (*inputs, dk, dv, *lengths, *scalars, pairs_in_turn),
                (*names, "dk", "dv", *Lengths._fields),
                (5, 6),
            )
        )
        steps.append(
            Step(
                second,
                (*inputs, dq, *lengths, *scalars, heads_in_group(problem)),
                (*names, "dq", *Lengths._fields),
                (5,),
            )
        )
    return steps, (dq, dk, dv), statistics


def emulate_backward(
    decision: BackwardDecision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    multiprocessors: int = EMULATED_MULTIPROCESSORS,
    **options: Any,
) -> Gradients:
    """What `attention_backward` does on a device, with its kernels emulated on CPU tensors.

    decision  names kernels; see `fa4.dispatch.decide_backward` with the arch to be emulated
    multiprocessors  of the device: few of them make persistent kernels take several tiles each
    options   how to run them: the fields of `fa4.emulator.Options` (schedule, check_races, ...)

    Raises as `fa4.emulator.run` does.
    """
    try:
        from fa4.emulator import run
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f'backend="emulator" needs {missing.name}: pip install "fa4-kernels[emulator]".'
        ) from missing
    steps, gradients, statistics = backward_steps(
        decision, q, k, v, lengths, sink, out, lse, grad_out, grad_lse, multiprocessors
    )
    for step in steps:
        # CTAs that take tiles from a counter may wait for each other.
        together = multiprocessors if step.counters else 1
        options_of_step = {"together": together, **options}
        run(step.spec, *step.arguments, uses=tensor_uses(step), **options_of_step)
    return Gradients(*gradients, sink_gradient(sink, statistics))


def tensor_uses(step: Step) -> dict[int, Any]:
    """What a step does to each of its tensors, for the emulator: by position."""
    from fa4.emulator import TensorUse

    return {
        position: TensorUse(
            name,
            is_output=position in (*step.outputs, *step.sums, *step.counters),
            has_content=position not in step.outputs,
            is_counter=position in step.counters,
        )
        for position, name in enumerate(step.names)
    }


def statistics_shape(problem: AttentionProblem, tile_m: int) -> tuple[int, int, int, int]:
    """Of the workspace for row statistics, in blocks of ``tile_m`` rows."""
    if problem.packed_q:
        blocks = problem.seqlen_q // tile_m + problem.batch + 1
        return 2, 1, problem.heads_q, blocks * tile_m
    return 2, problem.batch, problem.heads_q, -(-problem.seqlen_q // tile_m) * tile_m


def dq_sums_shape(statistics: Tensor, schedule: OneKernelSchedule) -> tuple[int, int, int, int]:
    """Of the fp32 workspace for dQ, (batch or 1, heads_q, blocks, elements of a block).

    statistics  the other workspace, with as many rows
    """
    entries, heads_q, rows = statistics.shape[1:]
    tile_m = schedule.tile_m
    return entries, heads_q, rows // tile_m, tile_m * schedule.head_dim


def sink_gradient(sink: Tensor | None, statistics: Tensor) -> Tensor | None:
    """-sum_i exp(sink - lse[i]) delta[i] over the rows of each head; rows without keys add 0."""
    if sink is None:
        return None
    lse_log2, delta = statistics.unbind(0)
    weight = torch.exp2(sink.float()[:, None] * LOG2_E - lse_log2)
    return -(weight * delta).sum(dim=(0, 2)).to(sink.dtype)


def key_tiles(problem: AttentionProblem) -> tuple[int, int]:
    """(tiles of keys of a pair, pairs) of a key head and a batch entry; packed, there is one."""
    if problem.packed_k:
        return problem.seqlen_k // KEYS_AT_ONCE + problem.batch + 1, problem.heads_kv
    return -(-problem.seqlen_k // KEYS_AT_ONCE), problem.heads_kv * problem.batch


def lots_of_heads(problem: AttentionProblem, multiprocessors: int) -> tuple[int, int]:
    """(pairs of a key head and a batch entry whose sums of dQ are zeroed together, such lots).

    A lot has tiles for three quarters of the multiprocessors or more, so that those of the next
    ones have something to wait for that is done; `kernels.sm90.dq_zeros`.
    """
    tiles, pairs = key_tiles(problem)
    if problem.packed_q != problem.packed_k:
        # The sums of a pair do not lie together.
        return pairs, 1
    in_turn = key_heads_in_turn(problem, multiprocessors)
    pairs_in_lot = in_turn * max(1, -(-3 * multiprocessors // (4 * tiles * in_turn)))
    pairs_in_lot = min(pairs, pairs_in_lot)
    return pairs_in_lot, -(-pairs // pairs_in_lot)


def key_heads_in_turn(problem: AttentionProblem, multiprocessors: int) -> int:
    """(key head, batch entry) pairs whose key tiles a causal launch takes in turn.

    The tiles of a pair differ in length; those of several pairs are ordered by it, so that the last
    wave is made of short ones. As many pairs as have about `KEYS_AT_ONCE` keys for each
    multiprocessor. With more of them, each wave of tiles would read the rows of q and grad_out and
    the sums of dQ from memory again: d64 1k lost a quarter.
    """
    if problem.window_right is None:
        return 1
    tiles, pairs = key_tiles(problem)
    together = max(1, multiprocessors // tiles)
    together = 1 << (together.bit_length() - 1)  # a power of two divides most head counts
    return max(1, min(pairs, together))


def _addressable(name: str, tensor: Tensor, is_clipped: bool) -> Tensor:
    """The tensor, or a copy of one that TMA cannot address."""
    if layout_fault(name, tensor, is_clipped) is None:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
