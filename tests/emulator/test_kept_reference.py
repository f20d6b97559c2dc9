"""The Hopper forward kernel where the row maxima it keeps are far too small (emulated)."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.test_hopper_forward import emulate
from tests.oracle import Case, assert_matches, bits, make_inputs
from tests.score_jumps import EDGES, JUMPS, raise_scores, raise_scores_to_the_edge


@pytest.mark.parametrize("jumps", JUMPS.values(), ids=JUMPS)
def test_scores_that_jump_give_the_exact_answer(jumps: dict[int, float]) -> None:
    inputs = make_inputs(Case((130,), (400,), 1, 1))
    raise_scores(inputs, jumps)
    assert_matches(*emulate(inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_jump_to_the_edge_of_fp32_give_the_exact_answer(dtype: torch.dtype) -> None:
    """What the tile is scaled down by may be too small for a normal number, the tile's sum not."""
    inputs = make_inputs(Case((20,), (250,), len(EDGES), len(EDGES), dtype=dtype))
    raise_scores_to_the_edge(inputs)
    assert_matches(*emulate(inputs), inputs)


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float16}, {"causal": True}, {"head_dim": 128}, {"sink": torch.float32}],
    ids=str,
)
def test_scores_that_jump_in_kernels_of_every_kind(options) -> None:
    inputs = make_inputs(Case((130,), (400,), 1, 1, **options))
    raise_scores(inputs, JUMPS["again_and_again"])
    assert_matches(*emulate(inputs), inputs)


def test_an_output_that_only_the_kept_reference_overflows_is_exact() -> None:
    inputs = make_inputs(Case((70,), (400,), 1, 1))
    raise_scores(inputs, {300: 9.0})
    inputs.v.mul_(2.0**118)
    out, lse = emulate(inputs)
    assert out.isfinite().all()
    inputs.v.mul_(2.0**-118)
    assert_matches(out * 2.0**-118, lse, inputs)


def test_infinite_scores_are_those_of_online_softmax() -> None:
    """A score of -inf hides its key; one of +inf or NaN makes its row NaN and no other."""
    inputs = make_inputs(Case((70,), (400,), 1, 1))
    raise_scores(inputs, {})
    inputs.q[..., 0] = 1
    inputs.k[:, 40, :, 0] = -torch.inf
    inputs.k[:, 330, :, 0] = -torch.inf
    inputs.q[:, 7, :, 1] = torch.nan
    out, lse = emulate(inputs)
    row = torch.arange(70) == 7
    assert out[:, row].isnan().all()
    hidden = torch.tensor([j not in (40, 330) for j in range(400)])
    inputs.k, inputs.v = inputs.k[:, hidden], inputs.v[:, hidden]
    clean = make_inputs(Case((69,), (398,), 1, 1))
    clean.q, clean.k, clean.v = inputs.q[:, ~row], inputs.k, inputs.v
    assert_matches(out[:, ~row], lse[..., ~row], clean)


@pytest.mark.parametrize("schedule", ["round_robin", "adversarial"])
def test_tiles_repeated_in_several_rounds_of_a_cta(schedule: str) -> None:
    """40 tiles of a CTA make two rounds; some of both overflow, and the others do not notice."""
    inputs = make_inputs(Case((64,), (140,), 40, 40))
    marked = [3, 31, 32, 39]
    jumping = make_inputs(Case((64,), (140,), 40, 40))
    raise_scores(jumping, {5: 150.0})
    for tensor, other in ((inputs.q, jumping.q), (inputs.k, jumping.k)):
        tensor[:, :, marked] = other[:, :, marked]
    options = {"multiprocessors": 1, "schedule": schedule}
    out, lse = emulate(inputs, **options)
    assert_matches(out, lse, inputs)
    # Without the marked heads no tile is repeated, and the others keep their bits.
    quiet = [h for h in range(40) if h not in marked]
    alone = make_inputs(Case((64,), (140,), 36, 36))
    alone.q, alone.k, alone.v = (t[:, :, quiet] for t in (inputs.q, inputs.k, inputs.v))
    out_alone, lse_alone = emulate(alone, **options)
    assert torch.equal(bits(out[:, :, quiet].contiguous()), bits(out_alone))
    assert torch.equal(bits(lse[:, quiet].contiguous()), bits(lse_alone))


def test_no_race_is_found_among_repeated_tiles() -> None:
    inputs = make_inputs(Case((300,), (140,), 2, 2))
    raise_scores(inputs, {5: 150.0})
    out, lse = emulate(inputs, check_races=True, multiprocessors=1)
    assert_matches(out, lse, inputs)
