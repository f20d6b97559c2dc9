"""Our Hopper forward kernels are free of races, and would not be without their synchronisation.

Every schedule kind, with O in its own buffer and in V's; a single emulated
multiprocessor makes a CTA take several tiles, and there are more key blocks than stages.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import fa4
from fa4.emulator.device import PreparedRun, prepare_forward
from fa4.emulator.execute import Options
from fa4.emulator.mutation import score, sync_instructions
from fa4.launch import Lengths
from tests.oracle import Case, Inputs, assert_matches, bits, make_inputs
from tests.score_jumps import raise_scores

INTERLEAVINGS = [
    Options("round_robin", check_races=True),
    Options("random", 1, check_races=True),
    Options("adversarial", 2, check_races=True),
]


class Variant(NamedTuple):
    """A problem, and what its schedule has instead of what it would have."""

    case: Case
    changes: dict[str, Any]

    def __str__(self) -> str:
        return "_".join([str(self.case), *self.changes])


SHARED_BUFFER = Variant(
    Case((130,), (300,), 2, 1, head_dim=128),
    {"o_shares_v": True, "stages": 2},
)
VARIANTS = [
    Variant(Case((130,), (400,), 2, 1), {}),
    Variant(Case((200,), (400,), 1, 1, causal=True), {}),
    Variant(Case((200,), (400,), 2, 1, head_dim=128), {}),
    Variant(Case((30, 1, 90), (60, 7, 300), 1, 1, packed_q=True, packed_k=True), {}),
    SHARED_BUFFER,
]


class Prepared(NamedTuple):
    run: PreparedRun
    out: torch.Tensor
    lse: torch.Tensor
    inputs: Inputs

    def result(self) -> bytes:
        return bytes(bits(self.out).numpy().tobytes() + bits(self.lse).numpy().tobytes())


def prepare(variant: Variant, jumps: dict[int, float] | None = None) -> Prepared:
    inputs = make_inputs(variant.case)
    if jumps:
        raise_scores(inputs, jumps)
    decision = fa4.explain(
        inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options, arch="sm_90a"
    )
    assert decision.kernel is not None
    schedule = dataclasses.replace(decision.kernel.schedule, **variant.changes)
    kernel = dataclasses.replace(decision.kernel, schedule=schedule)
    run, out, lse = prepare_forward(
        dataclasses.replace(decision, kernel=kernel),
        *(inputs.q, inputs.k, inputs.v, Lengths(**inputs.lengths)),
        multiprocessors=1,
    )
    return Prepared(run, out, lse, inputs)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kernel_is_free_of_races_under_every_interleaving(variant: Variant) -> None:
    prepared = prepare(variant)
    for options in INTERLEAVINGS:
        prepared.out.fill_(torch.nan)
        prepared.run.execute(options)
        assert_matches(prepared.out, prepared.lse, prepared.inputs)


# What is reported when one of them is missing from a kernel with O in V's buffers, in the order of
# the text; None is nothing, because the instruction is redundant there or not modelled.
FAULTS = {
    "mbarrier-init fence": ["MissingProxyFence"],
    "proxy fence": ["MissingProxyFence"],
    "bulk commit": ["DataRace"],
    # Two give V's buffers back, for warpgroups that see the last key and those that do not; before
    # a tile is stored again, where copies read and write in one step; before the kernel ends.
    "bulk wait": [*2 * ["DataRace"], None, "UnfinishedCopy"],
    # The barrier after initialisation; the end of a round for load; the warpgroups' turns in both
    # loops over keys, for speed alone, and where one lets a block go by; before O is written to V's
    # buffers; behind that.
    "named barrier sync": [*2 * ["DataRace"], *2 * [None], "Deadlock", *2 * ["DataRace"]],
}


def test_missing_synchronisation_is_reported() -> None:
    prepared = prepare(SHARED_BUFFER, {100: 150.0})  # one of its tiles is repeated
    every = sync_instructions(prepared.run.launches[0].ptx)
    chosen = [instruction for instruction in every if instruction.kind in FAULTS]
    verdicts = score(prepared.run, prepared.result, INTERLEAVINGS[:1], chosen)
    found = {kind: [v.fault for v in verdicts if v.instruction.kind == kind] for kind in FAULTS}
    assert found == FAULTS
