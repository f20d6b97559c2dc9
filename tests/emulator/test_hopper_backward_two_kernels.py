"""The Hopper backward without atomics, run by its own host code on the CPU, is exact to rounding.

The cases are the smallest that reach each part: partial tiles, several blocks and ring wraps,
masked and whole blocks, lengths, head dims that TMA fills up and clips, groups of query heads.
Errors are budgeted by `tests.backward_oracle`; rows that must not be read hold NaN.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import fa4
from fa4.backward import backward_steps, emulate_backward, tensor_uses
from fa4.dispatch import BackwardDecision, decide_backward
from fa4.emulator.device import PreparedRun, prepare
from fa4.emulator.execute import Options
from fa4.emulator.mutation import score, sync_instructions
from fa4.launch import Lengths
from fa4.reference_backward import Gradients
from tests.backward_oracle import Incoming, assert_gradients_match, make_incoming
from tests.oracle import Case, Inputs, bits, exact_answer, make_inputs, readable_rows

CASES = [
    Case((40,), (40,), 1, 1),
    Case((300,), (70,), 1, 1),  # more query blocks than stages
    Case((100,), (300,), 1, 1, head_dim=128),  # more key blocks than stages
    Case((200,), (200,), 1, 1, causal=True),
    Case((100,), (300,), 1, 1, window_size=(64, 0)),
    Case((300,), (100,), 1, 1, window_size=(20, 30)),
    Case((70,), (50,), 1, 1, causal=True),  # the first 20 rows see no key
    Case((50,), (200,), 1, 1, window_size=(10, 5)),  # the first keys are seen by no row
    Case((65,), (129,), 2, 1, head_dim=72, head_dim_v=40),  # dims that TMA fills up and clips
    Case((50,), (90,), 2, 1, softcap=5.0, dtype=torch.float16),
    Case((50,), (90,), 2, 1, causal=True, softcap=3.0, head_dim=128),
    Case((50,), (90,), 2, 1, softmax_scale=-0.2),
    Case((50,), (90,), 2, 1, softmax_scale=0.0, causal=True),
    Case((50,), (90,), 6, 2, sink=torch.float32),
    Case((30, 1, 90), (60, 7, 100), 1, 1, packed_q=True, packed_k=True, tail_q=9, tail_k=20),
    Case((30, 0, 90), (60, 7, 0), 2, 1, packed_q=True, packed_k=True, causal=True),
    Case((60, 60), (80, 80), 1, 1, used_q=(33, 0), used_k=(41, 80), causal=True),
    Case((40, 40), (30, 50), 1, 1, packed_k=True, used_k=(30, 20), storage="fused"),
    Case((130,), (100,), 1, 1, head_dim=256),
    Case((90,), (150,), 1, 1, head_dim=192, head_dim_v=128, causal=True),
    Case((90,), (80,), 1, 1, head_dim=64, head_dim_v=256, causal=True),
    Case((90,), (80,), 2, 1, head_dim=256, head_dim_v=64, window_size=(20, 10)),
]


class Call(NamedTuple):
    """Everything of one backward call, with the forward's results rounded as kernels round them."""

    decision: BackwardDecision
    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    incoming: Incoming

    @property
    def arguments(self) -> tuple[Any, ...]:
        inputs = self.inputs
        lengths = Lengths(**inputs.lengths)
        return (
            *(inputs.q, inputs.k, inputs.v, lengths, inputs.sink),
            *(self.out, self.lse, self.incoming.grad_out, self.incoming.grad_lse),
        )


def make_call(case: Case, has_grad_lse: bool = False, seed: int | None = None) -> Call:
    inputs = make_inputs(case, seed=seed)
    problem = fa4.explain(inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options).problem
    decision = decide_backward(problem, "sm_90a", True, has_grad_lse)
    assert decision.path == "two kernels", decision.reasons
    out, lse = exact_answer(inputs)
    live, _ = readable_rows(case)
    out = out.to(case.dtype).masked_fill_(~live[..., None, None], torch.nan)
    return Call(decision, inputs, out, lse.float(), make_incoming(inputs, has_grad_lse))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_gradients_are_right(case: Case) -> None:
    call = make_call(case)
    found = emulate_backward(call.decision, *call.arguments)
    assert_gradients_match(found, call.inputs, call.incoming, call.out)


@pytest.mark.parametrize(
    "case",
    [
        Case((70,), (50,), 2, 1, causal=True, sink=torch.bfloat16),
        Case((30, 0, 40), (60, 7, 0), 2, 2, packed_q=True, packed_k=True, sink=torch.float32),
        Case((60, 60), (80, 80), 1, 1, used_q=(33, 0), used_k=(41, 80)),
    ],
    ids=str,
)
def test_gradient_of_the_lse_enters(case: Case) -> None:
    call = make_call(case, has_grad_lse=True)
    found = emulate_backward(call.decision, *call.arguments)
    assert_gradients_match(found, call.inputs, call.incoming, call.out)


def test_bits_do_not_depend_on_how_warps_take_turns() -> None:
    call = make_call(Case((200,), (150,), 2, 1, head_dim=128, causal=True))
    first = emulate_backward(call.decision, *call.arguments)
    for schedule, seed in (("random", 0), ("random", 1), ("adversarial", 2)):
        other = emulate_backward(call.decision, *call.arguments, schedule=schedule, seed=seed)
        for name in ("dq", "dk", "dv"):
            one, two = getattr(first, name), getattr(other, name)
            assert torch.equal(bits(one), bits(two)), f"{name}, {schedule}, seed {seed}"


RACE_CASES = [
    Case((300,), (200,), 1, 1, head_dim=64, causal=True),
    Case((200,), (130,), 2, 1, head_dim=256),  # one stage of dO, and of V
    Case((30, 1, 90), (60, 7, 130), 1, 1, head_dim=128, packed_q=True, packed_k=True),
    Case((130,), (130,), 1, 1, head_dim=128, softcap=4.0, window_size=(30, 30)),
]


@pytest.mark.parametrize("case", RACE_CASES, ids=str)
def test_no_race_is_found_under_any_interleaving(case: Case) -> None:
    call = make_call(case)
    for options in (
        {"schedule": "round_robin"},
        {"schedule": "random", "seed": 1},
        {"schedule": "adversarial", "seed": 2},
    ):
        found = emulate_backward(call.decision, *call.arguments, check_races=True, **options)
        assert_gradients_match(found, call.inputs, call.incoming, call.out)


def prepare_step(call: Call, index: int) -> tuple[PreparedRun, Gradients]:
    """A kernel of the call, ready to run with its statistics filled in, and the gradients."""
    steps, gradients, _ = backward_steps(call.decision, *call.arguments)
    for step in (steps[0], steps[index]):
        run = prepare(step.spec, *step.arguments, uses=tensor_uses(step))
        if step is not steps[index]:
            run.execute()
    return run, Gradients(*gradients, None)


# Synchronisation without which no fault is noticed, and why.
REDUNDANT = {
    1: {
        # Before K and V are loaded nobody has used their stages. Warpgroup 2 waits for w, which
        # warpgroup 1 made from a Q that it had waited for (in the loop and behind it).
        "mbarrier wait": 2 + 2,
        # In front of the stores each warp overwrites the rows of K and V that only it has read,
        # as far as the emulator can tell: it runs a warpgroup's product as a whole.
        "named barrier sync": 2,
    },
    2: {
        # Before each warpgroup's Q and dO are loaded nobody has used their stages.
        "mbarrier wait": 2 * 2,
        # In front of the store, as above; the last turn, which nobody waits behind. Turns protect
        # no data, they only order requests: that one in the loop is not waited for shows where it
        # is left over at the end, and not where two of them make up a whole barrier.
        "named barrier sync": 3,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 2], ids=["dkv", "dq"])
def test_missing_synchronisation_is_noticed(index: int) -> None:
    call = make_call(Case((200,), (280,), 1, 1, head_dim=256))
    run, gradients = prepare_step(call, index)

    def result() -> bytes:
        written = (gradients.dk, gradients.dv) if index == 1 else (gradients.dq,)
        return b"".join(bits(t).numpy().tobytes() for t in written)

    kinds = ("mbarrier wait", "named barrier sync", "named barrier arrive", "proxy fence")
    chosen = [i for i in sync_instructions(run.launches[0].ptx) if i.kind in kinds]
    options = [
        Options("round_robin", check_races=True),
        Options("adversarial", 2, check_races=True),
    ]
    unnoticed: dict[str, int] = {}
    for verdict in score(run, result, options, chosen):
        if verdict.fault is None:
            kind = verdict.instruction.kind
            unnoticed[kind] = unnoticed.get(kind, 0) + 1
    assert unnoticed == REDUNDANT[index]


def with_schedules(call: Call, dkv_changes: dict[str, Any], dq_changes: dict[str, Any]) -> Call:
    """The call with something else than its schedules have."""
    decision = call.decision
    prepare_spec, (dkv, dq) = decision.prepare, decision.kernels
    assert prepare_spec is not None
    dkv_schedule = dataclasses.replace(dkv.schedule, **dkv_changes)
    tile_m = dkv_schedule.tile_m
    schedules = (
        dataclasses.replace(prepare_spec.schedule, tile_m=tile_m),
        dkv_schedule,
        dataclasses.replace(dq.schedule, statistics_tile=tile_m, **dq_changes),
    )
    prepare_spec, dkv, dq = (
        dataclasses.replace(spec, schedule=schedule)
        for spec, schedule in zip((prepare_spec, dkv, dq), schedules, strict=True)
    )
    changed = dataclasses.replace(decision, prepare=prepare_spec, kernels=(dkv, dq))
    return call._replace(decision=changed)


@pytest.mark.parametrize(
    ("dkv_changes", "dq_changes"),
    [
        ({"tile_m": 64, "grad_stages": 1}, {"tile_n": 48, "v_stages": 1, "takes_turns": False}),
        ({"tile_m": 80, "q_stages": 3}, {"tile_n": 64, "k_stages": 3}),
    ],
    ids=["single stages", "three stages"],
)
def test_other_schedules_give_right_gradients(
    dkv_changes: dict[str, Any], dq_changes: dict[str, Any]
) -> None:
    """Stages, blocks and turns that the rule does not choose here; more blocks than stages."""
    case = Case((300,), (200,), 1, 1, head_dim=128, causal=True)
    call = with_schedules(make_call(case), dkv_changes, dq_changes)
    found = emulate_backward(call.decision, *call.arguments, check_races=True)
    assert_gradients_match(found, call.inputs, call.incoming, call.out)


@pytest.mark.parametrize(
    "case",
    [
        # Clusters of one CTA with work and one without; ranges that differ inside a cluster.
        Case((100,), (70,), 2, 1, head_dim=128),
        Case((400,), (200,), 1, 1, causal=True),
        Case((30, 1, 290), (60, 7, 150), 1, 1, packed_q=True, packed_k=True, tail_q=9, tail_k=20),
    ],
    ids=str,
)
def test_clusters_that_share_loads_give_right_gradients(case: Case) -> None:
    call = with_schedules(make_call(case), {"cluster": 2}, {"cluster": 2})
    for schedule, seed in (("round_robin", 0), ("adversarial", 1)):
        found = emulate_backward(
            call.decision, *call.arguments, schedule=schedule, seed=seed, check_races=True
        )
        assert_gradients_match(found, call.inputs, call.incoming, call.out)
