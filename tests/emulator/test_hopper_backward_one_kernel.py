"""The Hopper backward in one kernel, run by its own host code on the CPU, is exact to rounding.

The cases are the smallest that reach each part: partial tiles, several row blocks and ring wraps,
masked and whole blocks, groups of query heads, lengths, head dims that TMA fills up and clips, and
each way in which the warpgroups share dQ. Errors are budgeted by `tests.backward_oracle`; rows that
must not be read hold NaN, and so does every gradient before it is written.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch

import fa4
from fa4.backward import Step, backward_steps, emulate_backward, tensor_uses
from fa4.dispatch import BackwardDecision, decide_backward
from fa4.emulator.device import PreparedRun, prepare
from fa4.emulator.execute import Options
from fa4.emulator.mutation import score, sync_instructions
from fa4.launch import Lengths
from fa4.pipelines.sm90_backward import (
    LOTS_AHEAD,
    FinishSchedule,
    OneKernelSchedule,
    PrepareSchedule,
)
from fa4.reference_backward import Gradients
from tests.backward_oracle import Incoming, assert_gradients_match, make_incoming
from tests.oracle import Case, Inputs, exact_answer, make_inputs, readable_rows

CASES = [
    Case((40,), (40,), 1, 1),
    Case((300,), (70,), 1, 1),  # more row blocks than stages
    Case((200,), (130,), 2, 1, head_dim=128),  # both heads of a group, the second key tile partial
    Case((200,), (200,), 1, 1, causal=True),
    Case((150,), (280,), 3, 1, head_dim=128, causal=True),
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
    Case((130,), (130,), 1, 1, head_dim=96, causal=True),  # halves of dQ that overlap
    Case((70,), (140,), 1, 1, head_dim=64, head_dim_v=128),
    Case((70,), (140,), 1, 1, head_dim=128, head_dim_v=64),
    Case((70,), (140,), 1, 1, head_dim=96, head_dim_v=128, window_size=(40, 20)),
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
        return (
            *(inputs.q, inputs.k, inputs.v, Lengths(**inputs.lengths), inputs.sink),
            *(self.out, self.lse, self.incoming.grad_out, self.incoming.grad_lse),
        )


def make_call(case: Case, seed: int | None = None, **schedule: Any) -> Call:
    """A call; ``schedule`` has fields of `OneKernelSchedule` to be used instead of the rule's."""
    inputs = make_inputs(case, seed=seed)
    problem = fa4.explain(inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options).problem
    decision = decide_backward(problem, "sm_90a")
    assert decision.path == "one kernel", decision.reasons
    if schedule:
        decision = rescheduled(decision, **schedule)
    out, lse = exact_answer(inputs)
    live, _ = readable_rows(case)
    out = out.to(case.dtype).masked_fill_(~live[..., None, None], torch.nan)
    return Call(decision, inputs, out, lse.float(), make_incoming(inputs, False))


def rescheduled(decision: BackwardDecision, **fields: Any) -> BackwardDecision:
    """The same kernels with another schedule of the one in the middle."""
    gradients, finish = decision.kernels
    assert isinstance(gradients.schedule, OneKernelSchedule)
    schedule = dataclasses.replace(gradients.schedule, **fields)
    assert decision.prepare is not None
    return dataclasses.replace(
        decision,
        prepare=dataclasses.replace(
            decision.prepare,
            schedule=PrepareSchedule(schedule.head_dim_v, schedule.tile_m, for_sums=True),
        ),
        kernels=(
            dataclasses.replace(gradients, schedule=schedule),
            dataclasses.replace(
                finish, schedule=FinishSchedule(schedule.head_dim, schedule.tile_m)
            ),
        ),
    )


def assert_right(call: Call, **options: Any) -> None:
    found = emulate_backward(call.decision, *call.arguments, **options)
    assert_gradients_match(found, call.inputs, call.incoming, call.out)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_gradients_are_right(case: Case) -> None:
    assert_right(make_call(case))


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (Case((200,), (140,), 1, 1, causal=True), {"tile_m": 64}),
        (Case((300,), (100,), 2, 1, window_size=(20, 30)), {"tile_m": 64, "grad_stages": 4}),
        (Case((270,), (70,), 1, 1, head_dim=96, causal=True), {"stages": 4}),
        (Case((300,), (130,), 2, 1), {"tile_m": 64, "stages": 5, "grad_stages": 4}),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_the_schedule(case: Case, schedule: dict[str, Any]) -> None:
    """Schedules that the rule does not choose are right too; `perf` may measure them."""
    assert_right(make_call(case, **schedule))


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (Case((300,), (200,), 2, 1, causal=True), {}),
        (Case((200,), (130,), 1, 1, head_dim=128), {}),
        (Case((300,), (130,), 1, 1), {"tile_m": 64}),
        (Case((30, 1, 90), (60, 7, 130), 1, 1, packed_q=True, packed_k=True), {}),
        (Case((130,), (130,), 1, 1, head_dim=128, softcap=4.0, window_size=(30, 30)), {}),
    ],
    ids=str,
)
def test_no_race_is_found_under_any_interleaving(case: Case, schedule: dict[str, Any]) -> None:
    call = make_call(case, **schedule)
    for options in (
        {"schedule": "round_robin"},
        {"schedule": "random", "seed": 1},
        {"schedule": "adversarial", "seed": 2},
    ):
        assert_right(call, check_races=True, **options)


@pytest.mark.parametrize(
    "case",
    [
        Case((300,), (400,), 1, 1, causal=True),
        Case((150,), (300,), 4, 2, head_dim=128),
        Case((70,), (300,), 1, 1, window_size=(20, 10)),  # tiles that no row sees, first
        Case((400,), (300,), 1, 1, window_size=(10, 10)),
        Case((60, 60), (300, 300), 1, 1, used_q=(33, 0), used_k=(41, 300)),  # in between, and last
        Case((200, 0, 1), (1, 300, 130), 1, 1, packed_q=True, packed_k=True, tail_k=200),
        Case((90,), (260,), 1, 1, head_dim=96, softcap=4.0, causal=True),
        # The last 64 keys of a tile are hidden from its first rows, or seen by all or some of them;
        # of two query heads only the first one's rows are passed over; tiles of one block.
        Case((300,), (300,), 1, 1, head_dim=128, causal=True),
        Case((300,), (364,), 2, 1, head_dim=128, causal=True),
        Case((300,), (330,), 1, 1, head_dim=128, window_size=(100, 10)),
    ],
    ids=str,
)
def test_one_cta_takes_tile_after_tile(case: Case) -> None:
    """Rings, turns and the places of dS go on where the tile before has left them."""
    call = make_call(case)
    assert_right(call, multiprocessors=1, check_races=True, schedule="adversarial", seed=1)
    assert_right(call, multiprocessors=2, check_races=True, schedule="random", seed=2)


@pytest.mark.parametrize(
    "case",
    [
        Case((40,) * 8, (150,) * 8, 2, 2, causal=True),
        Case((150,) * 3, (300,) * 3, 4, 2, head_dim=128),
        Case((90,) * 2, (260,) * 2, 3, 3, head_dim=96, causal=True),
        Case((200, 0, 1), (1, 300, 130), 10, 5, packed_q=True, packed_k=True, tail_k=200),
        Case((60, 60), (300, 300), 3, 3, used_q=(33, 0), used_k=(41, 300)),
        # With one side packed there is one lot, however many heads and batch entries it has.
        Case((60, 60), (60, 90), 4, 4, packed_k=True),
        Case((40,) * 6, (30, 0, 50, 20, 140, 60), 2, 1, packed_k=True),
        Case((40, 0, 30, 150, 20, 60), (90,) * 6, 2, 1, packed_q=True),
    ],
    ids=str,
)
def test_sums_are_zeroed_while_others_are_added_to(case: Case) -> None:
    """By CTAs that run at the same time: with few multiprocessors the heads make many lots."""
    call = make_call(case)
    for multiprocessors, schedule, seed in (
        (1, "adversarial", 1),
        (2, "random", 2),
        (3, "random", 3),
        (2, "adversarial", 4),
        (3, "round_robin", 0),
    ):
        steps, gradients, _ = backward_steps(
            call.decision, *call.arguments, multiprocessors=multiprocessors
        )
        names = steps[1].names
        steps[1].arguments[names.index("dq_sums")].fill_(torch.nan)
        zeroed = steps[1].arguments[names.index("zeroed")]
        # Where only one side is packed all is zeroed beforehand.
        assert len(zeroed) > LOTS_AHEAD or case.packed_q != case.packed_k
        for step in steps:
            options = Options(schedule, seed, check_races=True, together=multiprocessors)
            prepare_step(step).execute(options)
        assert_gradients_match(Gradients(*gradients, None), call.inputs, call.incoming, call.out)
        assert len(set(zeroed[LOTS_AHEAD:].tolist())) <= 1


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
def test_nothing_is_added_before_the_zeros_are_there(schedule: str) -> None:
    """Lots of one tile, as for one multiprocessor, and six CTAs: the lot behind is soon begun."""
    call = make_call(Case((100,) * 12, (100,) * 12, 1, 1))
    for seed in range(3):
        steps, gradients, _ = backward_steps(call.decision, *call.arguments, multiprocessors=1)
        prepared, gradient_step, finish = steps
        *arguments, multiprocessors = gradient_step.arguments
        assert multiprocessors == 1
        arguments[gradient_step.names.index("dq_sums")].fill_(torch.nan)
        gradient_step = gradient_step._replace(arguments=(*arguments, 6))
        for step in (prepared, gradient_step, finish):
            prepare_step(step).execute(Options(schedule, seed, together=6))
        assert_gradients_match(Gradients(*gradients, None), call.inputs, call.incoming, call.out)


def test_gradients_of_keys_and_values_do_not_depend_on_how_warps_take_turns() -> None:
    """Only dQ is summed up by several CTAs, in an order that may change."""
    call = make_call(Case((200,), (280,), 2, 1, head_dim=128, causal=True))
    first = emulate_backward(call.decision, *call.arguments)
    for schedule, seed in (("random", 0), ("adversarial", 2)):
        other = emulate_backward(call.decision, *call.arguments, schedule=schedule, seed=seed)
        assert torch.equal(first.dk, other.dk)
        assert torch.equal(first.dv, other.dv)


def test_padding_of_every_kind_gets_zero() -> None:
    case = Case(
        *((60, 20, 90), (80, 30, 200), 2, 1),
        causal=True,
        packed_q=True,
        packed_k=True,
        tail_q=70,
        tail_k=140,
        used_q=(33, 0, 90),
        used_k=(41, 30, 0),
    )
    call = make_call(case)
    found = emulate_backward(call.decision, *call.arguments)
    live, seen = readable_rows(case)
    assert not found.dq[~live].any()
    assert not found.dk[~seen].any()
    assert not found.dv[~seen].any()
    assert_gradients_match(found, call.inputs, call.incoming, call.out)


@pytest.mark.parametrize("scale", [0.125, -0.3, 1e-5, 40.0, 0.0], ids=str)
def test_statistics_are_terms_that_add_up_to_them(scale: float) -> None:
    """Three bf16 numbers hold the 24 bits of an fp32; rows behind the last get a weight of 0."""
    call = make_call(Case((70,), (30,), 2, 1, softmax_scale=scale))
    steps, _, statistics = backward_steps(call.decision, *call.arguments)
    prepare_step(steps[0]).execute()
    terms = steps[0].arguments[steps[0].names.index("terms")]
    rows = statistics.shape[3]
    terms = terms.reshape(2, 2, rows, 8).double()
    assert not terms[..., 3:].any()
    lse_terms, delta_terms = terms.sum(dim=-1)[:, :, :70]
    # Scores are multiplied by the scale, but by no less than this.
    exponent_scale = scale * math.log2(math.e) or 2.0**-60
    lse = -call.lse[0].double() * math.log2(math.e) / exponent_scale
    torch.testing.assert_close(lse_terms, lse, rtol=2.0**-20, atol=0)
    delta = (call.out[0].double() * call.incoming.grad_out[0].double()).sum(dim=-1).T
    torch.testing.assert_close(delta_terms, -delta, rtol=2.0**-16, atol=1e-5)
    padding = terms.sum(dim=-1)[:, :, 70:]
    assert (padding[0] * exponent_scale < -1e5).all()
    assert not padding[1].any()


def test_shared_memory_is_what_the_schedule_says() -> None:
    for case, fields in (
        (Case((40,), (40,), 1, 1, head_dim=64), {}),
        (Case((40,), (40,), 1, 1, head_dim=128), {}),
        (Case((40,), (40,), 1, 1, head_dim=64), {"tile_m": 64, "stages": 5, "grad_stages": 4}),
    ):
        call = make_call(case, **fields)
        run, _ = prepare_gradients(call)
        schedule = call.decision.kernels[0].schedule
        assert isinstance(schedule, OneKernelSchedule)
        assert run.launches[0].shared_bytes == schedule.smem_bytes


# Found to be redundant, by kind of synchronisation: the number of instructions without which no
# fault is noticed, and why.
REDUNDANT = {
    # Before they are loaded first nobody has used the buffers of K and V, and of Q and dO of two
    # blocks. With 128 rows in a block whoever gives the turn has finished with its Q and dO, so
    # that the loads in the loop need not wait either; with 64 rows dK may still read them. Whoever
    # has had the last turn of a tile knows that V is free, and the buffers of the two blocks that
    # the next tile begins with: three stages are more than the block in use and those.
    "mbarrier wait": 2 + 4 + 2 + 1 + 4,
    # Behind the halves: warpgroup 0 fences its first dS, too, before anyone reads them here.
    "proxy fence": 1,
}


@pytest.mark.slow
def test_missing_synchronisation_is_noticed() -> None:
    # With 128 rows in a block each warpgroup reads all of K, to the end.
    call = make_call(Case((500,), (200,), 1, 1, head_dim=64))
    run, gradients = prepare_gradients(call)

    def result() -> bytes:
        return b"".join(t.view(torch.int16).numpy().tobytes() for t in (gradients.dk, gradients.dv))

    kinds = ("mbarrier wait", "named barrier sync", "proxy fence")
    chosen = [i for i in sync_instructions(run.launches[0].ptx) if i.kind in kinds]
    assert chosen
    options = [
        Options("round_robin", check_races=True),
        Options("adversarial", 2, check_races=True),
    ]
    unnoticed: dict[str, int] = {}
    for verdict in score(run, result, options, chosen):
        if verdict.fault is None:
            kind = verdict.instruction.kind
            unnoticed[kind] = unnoticed.get(kind, 0) + 1
    assert unnoticed == REDUNDANT


def prepare_gradients(call: Call) -> tuple[PreparedRun, Gradients]:
    """The kernel of the gradients, ready to run with its statistics filled in."""
    # One CTA, so that it takes several tiles.
    steps, gradients, _ = backward_steps(call.decision, *call.arguments, multiprocessors=1)
    prepare_step(steps[0]).execute()
    return prepare_step(steps[1]), Gradients(*gradients, None)


def prepare_step(step: Step) -> PreparedRun:
    return prepare(step.spec, *step.arguments, uses=tensor_uses(step))
