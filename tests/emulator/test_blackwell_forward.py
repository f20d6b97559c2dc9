"""Our Blackwell forward kernel, run by its own host code on the CPU, gives the exact answer.

The cases are the smallest that reach each part of the kernel: partial query tiles, one and two of
them, several key blocks and ring wraps, masks, lengths, several work items a CTA. Errors are
budgeted by `tests.oracle`.
"""

import pytest
import torch

import fa4
from fa4.emulator import emulate_forward
from fa4.launch import Lengths
from tests.oracle import Case, Inputs, assert_matches, bits, guarded, make_inputs, padding_rows

CASES = [
    Case((40,), (40,), 1, 1),
    Case((300,), (700,), 1, 1),  # three query tiles; more key blocks than stages
    Case((300,), (500,), 2, 1, head_dim=128, causal=True),  # query tiles with ends of their own
    Case((300,), (450,), 1, 1, window_size=(64, 30)),
    Case((70,), (50,), 1, 1, causal=True),  # the first 20 rows see no key
    Case((400,), (20,), 1, 1, causal=True),  # the first query tile sees no key
    Case((65,), (129,), 2, 1, head_dim=72, head_dim_v=40),  # dims that TMA fills up and clips
    Case((50,), (90,), 2, 1, softcap=5.0, dtype=torch.float16),
    Case((50,), (90,), 2, 1, softmax_scale=-0.2),
    Case((50,), (90,), 2, 1, sink=torch.float32),
    Case((30, 1, 290), (60, 7, 300), 1, 1, packed_q=True, packed_k=True, tail_q=9, tail_k=20),
    Case((60, 60), (80, 80), 1, 1, used_q=(33, 0), used_k=(41, 80), causal=True),
    Case((120,), (400,), 1, 1, head_dim=256, causal=True),  # one query tile, scores in turn
    Case((140,), (300,), 1, 1, head_dim=192, head_dim_v=128),  # O in Q's shared memory
    Case((100,), (300,), 1, 1, head_dim=136, head_dim_v=184),
    # Pairs of CTAs, of which the second sees more keys, or has no rows
    Case((600,), (500,), 1, 1, head_dim=128),
    Case((300,), (500,), 1, 1, head_dim=256, causal=True),
    Case((300, 700), (500, 100), 1, 1, 192, 128, packed_q=True, packed_k=True, causal=True),
]


def emulate(
    inputs: Inputs, out: torch.Tensor | None = None, arch: str = "sm_100a", **options
) -> tuple[torch.Tensor, torch.Tensor]:
    decision = fa4.explain(
        inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options, arch=arch
    )
    lengths = Lengths(**inputs.lengths)
    return emulate_forward(
        decision, inputs.q, inputs.k, inputs.v, lengths, inputs.sink, out, True, **options
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated_kernel_gives_the_exact_answer(case: Case) -> None:
    inputs = make_inputs(case)
    assert_matches(*emulate(inputs), inputs)


@pytest.mark.parametrize(
    "case",
    [
        Case((200, 200), (450, 450), 1, 1, head_dim=128),
        Case((300, 300), (450, 450), 1, 1, head_dim=128),
        Case((300,), (500,), 1, 1, head_dim=128, causal=True),
        Case((120, 120), (600, 600), 1, 1, head_dim=256),
        Case((300, 300), (450, 450), 1, 1, head_dim=256),
    ],
    ids=str,
)
def test_result_does_not_depend_on_how_warps_take_turns(case: Case) -> None:
    """So few multiprocessors that a persistent CTA, or a pair, takes several work items."""
    inputs = make_inputs(case)
    out, lse = emulate(inputs, multiprocessors=2)
    assert_matches(out, lse, inputs)
    for schedule, seed in (("random", 0), ("random", 1), ("adversarial", 2)):
        other, other_lse = emulate(inputs, multiprocessors=2, schedule=schedule, seed=seed)
        assert torch.equal(bits(other), bits(out)), f"{schedule}, seed {seed}"
        assert torch.equal(bits(other_lse), bits(lse)), f"{schedule}, seed {seed}"


@pytest.mark.parametrize(
    "case",
    [
        Case((200, 200), (450, 450), 1, 1, head_dim=128),
        Case((300, 300), (450, 450), 1, 1, head_dim=128),
        Case((300,), (500,), 1, 1, head_dim=128, causal=True),
        Case((30, 1, 290), (60, 7, 300), 1, 1, packed_q=True, packed_k=True),
        Case((120, 120), (600, 600), 1, 1, head_dim=256),
        Case((300,), (300,), 1, 1, head_dim=256, causal=True),
        Case((300,), (300,), 1, 1, head_dim=192, head_dim_v=128, causal=True),
    ],
    ids=str,
)
def test_no_race_is_found(case: Case) -> None:
    inputs = make_inputs(case)
    out, lse = emulate(inputs, check_races=True, multiprocessors=2)
    assert_matches(out, lse, inputs)


def test_scores_far_apart_rescale_the_output() -> None:
    """Row maxima that rise by more than the threshold from block to block."""
    inputs = make_inputs(Case((130,), (520,), 1, 1, spread=30.0))
    assert_matches(*emulate(inputs), inputs)


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
