"""Our compiled Hopper forward kernel, run by its own host code on the CPU, gives the exact answer.

The cases are the smallest that reach each part of the kernel: partial tiles, several key blocks
and ring wraps, masks, lengths, several tiles a CTA. Errors are budgeted by `tests.oracle`.
"""

import dataclasses
from typing import Any

import pytest
import torch

import fa4
from fa4.dispatch import Decision
from fa4.emulator import emulate_forward
from fa4.launch import Lengths
from fa4.pipelines.sm90 import ForwardSchedule
from tests.oracle import Case, Inputs, assert_matches, bits, guarded, make_inputs, padding_rows

CASES = [
    Case((40,), (40,), 1, 1),
    Case((64,), (300,), 1, 1),  # more key blocks than stages are needed at the start
    Case((200,), (130,), 1, 1, head_dim=128),
    Case((200,), (200,), 1, 1, causal=True),
    Case((100,), (300,), 1, 1, window_size=(64, 0)),
    Case((70,), (50,), 1, 1, causal=True),  # the first 20 rows see no key
    Case((65,), (129,), 2, 1, head_dim=72, head_dim_v=40),  # dims that TMA fills up and clips
    Case((50,), (90,), 2, 1, softcap=5.0, dtype=torch.float16),
    Case((50,), (90,), 2, 1, softmax_scale=-0.2),
    Case((50,), (90,), 2, 1, sink=torch.float32),
    Case((30, 1, 90), (60, 7, 100), 1, 1, packed_q=True, packed_k=True, tail_q=9, tail_k=20),
    Case((60, 60), (80, 80), 1, 1, used_q=(33, 0), used_k=(41, 80), causal=True),
]


def decide(inputs: Inputs) -> Decision:
    return fa4.explain(
        inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options, arch="sm_90a"
    )


def run(
    decision: Decision, inputs: Inputs, out: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = Lengths(**inputs.lengths)
    return emulate_forward(
        decision, inputs.q, inputs.k, inputs.v, lengths, inputs.sink, out, True, **options
    )


def emulate(
    inputs: Inputs, out: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return run(decide(inputs), inputs, out, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_kernel_gives_the_exact_answer(case: Case) -> None:
    inputs = make_inputs(case)
    assert_matches(*emulate(inputs), inputs)


def test_result_does_not_depend_on_how_warps_take_turns() -> None:
    inputs = make_inputs(Case((200,), (200,), 1, 1, causal=True))
    out, lse = emulate(inputs)
    for schedule, seed in (("random", 0), ("random", 1), ("adversarial", 2)):
        other, other_lse = emulate(inputs, schedule=schedule, seed=seed)
        assert torch.equal(bits(other), bits(out)), f"{schedule}, seed {seed}"
        assert torch.equal(bits(other_lse), bits(lse)), f"{schedule}, seed {seed}"


@pytest.mark.parametrize(
    "case",
    [
        Case((200, 200), (400, 400), 1, 1),  # several tiles a CTA
        Case((200,), (400,), 1, 1, causal=True),
        Case((30, 90), (60, 300), 1, 1, head_dim=128, packed_q=True, packed_k=True),
    ],
    ids=str,
)
def test_no_race_is_found(case: Case) -> None:
    inputs = make_inputs(case)
    out, lse = emulate(inputs, check_races=True, multiprocessors=1)
    assert_matches(out, lse, inputs)


@pytest.mark.parametrize(
    "case",
    [
        Case((200,), (200,), 1, 1, causal=True),  # every second slab of rows sees half a block
        Case((130,), (210,), 1, 1, causal=True),  # 82 keys of the last block, then 18
        Case((70,), (192,), 2, 1, head_dim=96, causal=True),  # exactly half a block
        Case((128,), (256,), 1, 1, head_dim=192, head_dim_v=128, causal=True),
        Case((150,), (400,), 1, 1, window_size=(300, 0)),  # a left bound on the other side
        Case((40, 100), (170, 130), 1, 1, packed_q=True, packed_k=True, causal=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["round_robin", "adversarial"])
def test_short_last_blocks_give_the_bits_of_whole_ones(case: Case, order: str) -> None:
    inputs = make_inputs(case)
    decision = decide(inputs)
    assert decision.kernel is not None
    schedule = decision.kernel.schedule
    assert isinstance(schedule, ForwardSchedule)
    assert schedule.short_n > 0
    options = {"schedule": order, "check_races": True, "multiprocessors": 1}
    out, lse = run(decision, inputs, **options)
    assert_matches(out, lse, inputs)
    kernel = dataclasses.replace(decision.kernel, schedule=dataclasses.replace(schedule, short_n=0))
    other, other_lse = run(dataclasses.replace(decision, kernel=kernel), inputs, **options)
    assert torch.equal(bits(other), bits(out))
    assert torch.equal(bits(other_lse), bits(lse))


def test_result_does_not_depend_on_the_number_of_multiprocessors() -> None:
    """One of them makes a single CTA take every tile."""
    inputs = make_inputs(Case((200, 200), (70, 70), 2, 1))
    out, lse = emulate(inputs, multiprocessors=1)
    other, other_lse = emulate(inputs, multiprocessors=16)
    assert torch.equal(bits(other), bits(out))
    assert torch.equal(bits(other_lse), bits(lse))
    assert_matches(out, lse, inputs)


def test_padding_of_a_given_out_is_left_alone() -> None:
    inputs = make_inputs(Case((60, 60), (80, 80), 1, 1, used_q=(33, 60)))
    buffer, given = guarded(torch.empty_like(inputs.q))
    before = buffer.clone()
    out, _ = emulate(inputs, out=given)
    assert out is given
    padding = padding_rows(inputs.case)
    original = before[1024:-1024].view(given.shape)
    assert torch.equal(bits(given[padding]), bits(original[padding]))
    assert torch.equal(bits(buffer[:1024]), bits(before[:1024]))
    assert torch.equal(bits(buffer[-1024:]), bits(before[-1024:]))
    assert given[~padding].isfinite().all()
