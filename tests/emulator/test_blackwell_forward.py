"""Our Blackwell forward kernel, run by its own host code on the CPU, gives the exact answer.

Sizes cross every boundary: partial query tiles, one and two of them, more key blocks than stages
and ragged ends, several work items a CTA, pairs whose CTAs see different keys. Errors are budgeted
by `tests.oracle`. The cases marked slow complete the families of specialisations.
"""

from typing import Any

import pytest
import torch

import fa4
from fa4.emulator import emulate_forward
from fa4.emulator.costs import Costs, cost_report
from fa4.launch import Lengths
from fa4.pipelines.sm100 import ForwardSchedule
from tests.emulator import blackwell_model
from tests.oracle import Case, Inputs, assert_matches, bits, guarded, make_inputs, padding_rows

INTERLEAVINGS = [("random", 0), ("random", 1), ("adversarial", 2)]

# Three key blocks or more, ragged ends, two work items a CTA or pair.
QUICK = [
    Case((300, 300), (450, 450), 1, 1),
    Case((300,), (500,), 2, 1, head_dim=128, causal=True),  # query tiles with ends of their own
    Case((30, 1, 290), (60, 7, 400), 1, 1, packed_q=True, packed_k=True, tail_q=9, tail_k=20),
    Case((300,), (500,), 1, 1, head_dim=256, causal=True),  # a pair of CTAs, one query tile
    Case((70,), (400,), 4, 1, causal=True),  # heads that share a tile
    Case((3, 0, 20, 1), (300, 5, 100, 333), 16, 2, packed_q=True, packed_k=True, tail_q=5),  # too
]
SLOW = [
    Case((200, 200), (450, 450), 1, 1, head_dim=128),  # few rows: one CTA
    Case((600, 600), (450, 450), 1, 1, head_dim=128),  # a pair, two query tiles
    Case((600,), (500,), 2, 1, head_dim=128, causal=True, dtype=torch.float16),
    Case((300,), (700,), 2, 1, head_dim=96, head_dim_v=96, window_size=(150, 30)),
    Case((300,), (450,), 2, 1, window_size=(64, None)),
    Case((120, 120), (400, 400), 1, 1, head_dim=256),  # one CTA, one query tile, O over Q
    Case((300, 300), (450, 450), 1, 1, head_dim=256),
    Case((140, 140), (450, 450), 1, 1, head_dim=192, head_dim_v=128),  # O over Q, two query tiles
    Case((600,), (450,), 2, 1, head_dim=192, head_dim_v=128, causal=True),
    Case((100,), (450,), 2, 1, head_dim=136, head_dim_v=184),  # dims that TMA fills up and clips
    Case((300,), (450,), 2, 1, head_dim=72, head_dim_v=40, causal=True),
    Case((300,), (450,), 2, 1, head_dim=256, head_dim_v=64),
    Case((300,), (450,), 2, 1, softcap=5.0, dtype=torch.float16, causal=True),
    Case((300,), (450,), 2, 1, softmax_scale=-0.2),
    Case((300,), (450,), 2, 1, sink=torch.float32),
    Case((260, 260), (400, 400), 1, 1, used_q=(133, 0), used_k=(341, 400), causal=True),
    Case((300, 700), (500, 100), 1, 1, 192, 128, packed_q=True, packed_k=True, causal=True),
    Case((400,), (20,), 2, 1, causal=True),  # query tiles that see no key
    Case((700,), (20,), 2, 1, head_dim=256, causal=True),
    # Heads that share a tile
    Case((3, 3), (450, 450), 16, 2, head_dim=128, sink=torch.bfloat16),
    Case((40,), (450,), 8, 1, head_dim=256, window_size=(200, 10)),
    Case((60,), (400,), 8, 1, head_dim=96, softcap=3.0, used_k=(333,)),
    Case((90,), (20,), 4, 1, causal=True),
    Case(
        (3, 0, 40, 1),
        (300, 5, 100, 333),
        16,
        2,
        128,
        128,
        packed_q=True,
        packed_k=True,
        causal=True,
    ),
    Case((1, 1, 0, 1), (200, 300, 5, 129), 64, 1, packed_q=True, packed_k=True),
    Case(
        (5, 7, 2),
        (5, 7, 2),
        32,
        2,
        packed_q=True,
        packed_k=True,
        storage="fused",
        window_size=(3, 3),
    ),
    Case((40, 70), (400, 300), 8, 1, 256, 256, packed_q=True, packed_k=True, sink=torch.float32),
    Case((60, 90), (300, 400), 8, 2, 192, 128, packed_q=True, packed_k=True, causal=True),
    Case((40, 40), (300, 300), 8, 1, used_q=(13, 40), storage="heads_first", dtype=torch.float16),
    Case((1, 1), (300, 300), 8, 1, used_q=(1, 0), used_k=(300, 17)),
]


def emulate(
    inputs: Inputs, out: torch.Tensor | None = None, arch: str = "sm_100a", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    decision = fa4.explain(
        inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options, arch=arch
    )
    lengths = Lengths(**inputs.lengths)
    return emulate_forward(
        decision, inputs.q, inputs.k, inputs.v, lengths, inputs.sink, out, True, **options
    )


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_exact_without_races_however_warps_take_turns(case: Case) -> None:
    """Two multiprocessors: a CTA that takes tile after tile, or a pair, takes several."""
    inputs = make_inputs(case)
    out, lse = emulate(inputs, multiprocessors=2, check_races=True)
    assert_matches(out, lse, inputs)
    for schedule, seed in INTERLEAVINGS:
        other, other_lse = emulate(inputs, multiprocessors=2, schedule=schedule, seed=seed)
        assert torch.equal(bits(other), bits(out)), f"{schedule}, seed {seed}"
        assert torch.equal(bits(other_lse), bits(lse)), f"{schedule}, seed {seed}"


def test_the_cases_have_every_structure() -> None:
    schedules: list[ForwardSchedule] = []
    for case in (*QUICK, *SLOW):
        inputs = make_inputs(case)
        decision = fa4.explain(
            inputs.q, inputs.k, inputs.v, **inputs.lengths, **inputs.options, arch="sm_100a"
        )
        assert decision.kernel is not None
        assert isinstance(decision.kernel.schedule, ForwardSchedule)
        schedules.append(decision.kernel.schedule)
    found = {(s.query_tiles, s.ctas, s.tile_order, s.o_shares_q) for s in schedules}
    for tiles, ctas in ((2, 1), (2, 2), (1, 1), (1, 2)):
        assert any(each[:2] == (tiles, ctas) for each in found)
    for order in ("static", "dynamic"):
        assert {ctas for _, ctas, each, _ in found if each == order} == {1, 2}
    assert {tiles for tiles, _, _, shares in found if shares} == {1, 2}
    assert {s.ctas for s in schedules if s.heads_in_rows > 1} == {1, 2}


@pytest.mark.slow
def test_the_other_blackwell_gets_the_same_answer() -> None:
    inputs = make_inputs(Case((300,), (500,), 2, 1, head_dim=128, causal=True))
    assert_matches(*emulate(inputs, arch="sm_103a"), inputs)


def test_scores_far_apart_rescale_the_output() -> None:
    """Row maxima that rise by more than the threshold from block to block."""
    inputs = make_inputs(Case((130,), (520,), 1, 1, spread=30.0))
    assert_matches(*emulate(inputs), inputs)


def test_scores_close_to_each_other_do_not() -> None:
    """Probabilities above 1: the reference lags behind the maximum by up to the threshold."""
    inputs = make_inputs(Case((130,), (520,), 1, 1, spread=3.0))
    # Keys sorted so that later visited blocks, which are in front, have the larger scores.
    inputs.k[0, :, 0] = inputs.k[0, inputs.k[0, :, 0, 0].argsort(descending=True), 0]
    inputs.q[..., 0] = inputs.q[..., 0].abs() + 4
    assert_matches(*emulate(inputs), inputs)


@pytest.mark.parametrize("key", [3, 131, 250, 519])
def test_a_key_that_is_not_a_number_reaches_every_row(key: int) -> None:
    """In columns whose exponentials are polynomials, and in others; in the first block visited and
    in later ones."""
    inputs = make_inputs(Case((130,), (520,), 1, 1))
    inputs.k[0, key, 0, 5] = torch.nan
    out, lse = emulate(inputs)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.slow
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


def test_beside_matrix_operands_a_block_takes_shared_memory_for_one_float_a_row() -> None:
    """Modelled: what limits a causal block of head dim 128, written to by softmax, read by
    correction. docs/results/blackwell_model.md has the whole comparison."""
    case = blackwell_model.Case(128, 128, causal=True)

    def total(rows: int, keys: int) -> Costs:
        report = blackwell_model.launch_of_fa4(case, rows, keys)
        return cost_report(report.launch, report.statistics).total

    blocks = 2 * 2  # of 128 rows and 128 keys: two query tiles of one CTA
    clocks = (total(256, 1024) - total(256, 768)).clocks
    tile = 128 * 128 * 2 // 128  # clocks of a tile of Q, K or V
    operands = tile + tile + tile  # Q and K; V, as P is in tensor memory
    copies = (tile + tile) / 2  # K and V, for both query tiles
    statistics = 2 * 128 * 4 / 128
    assert clocks["shared"] / blocks == operands + copies + statistics
    assert clocks["tensor"] / blocks == 1024
