"""The search: what is enumerated, what machine code rejects, what is kept, what is written."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pandas")
from fa4.kernels.features import ForwardFeatures
from fa4.pipelines import sm90, sm90_tuned
from fa4.pipelines.sm90 import ForwardSchedule, forward_rule, forward_schedule
from fa4.reference import attention_reference
from perf import tune
from perf.cases import Case, dense
from tests import sass

CAUSAL = ForwardFeatures("bf16", 128, 128, has_right_bound=True)
# What the search starts from here; the rule of today would do, but its name would not be known.
RULE = ForwardSchedule(
    head_dim=128,
    head_dim_v=128,
    tile_m=128,
    tile_n=128,
    stages=2,
    consumer_registers=240,
    producer_registers=24,
    o_shares_v=False,
    takes_turns=True,
)


def test_tiles_are_all_that_fit_once_each_and_never_the_rule() -> None:
    found = tune.tiles(RULE)
    sizes = [(each.tile_m, each.tile_n) for each in found]
    assert len(set(sizes)) == len(sizes)
    assert RULE not in found
    assert {(128, 160), (128, 176), (192, 80), (64, 128)} <= set(sizes)
    assert (192, 128) not in sizes  # 64 + 64 + 32 registers of 160, and addresses
    # The most stages that fit beside a tile, and O in its own buffer where there is room.
    by_size = dict(zip(sizes, found, strict=True))
    assert (by_size[128, 64].stages, by_size[128, 64].o_shares_v) == (4, False)
    assert (by_size[128, 176].stages, by_size[128, 176].o_shares_v) == (2, True)
    assert found == sorted(found, key=tune.rank)
    assert tune.tiles(RULE) == found
    # Short last blocks are halves of the tile's own, if the rule has them.
    assert {each.short_n for each in found} == {0}
    with_short = tune.tiles(dataclasses.replace(RULE, short_n=64))
    assert {(each.tile_n, each.short_n) for each in with_short} >= {(64, 32), (80, 32), (176, 80)}


def test_other_choices_change_one_thing() -> None:
    for other in tune.other_choices(RULE):
        changed = [
            field.name
            for field in dataclasses.fields(RULE)
            if getattr(other, field.name) != getattr(RULE, field.name)
        ]
        assert len(changed) == 1
        assert changed[0] not in ("tile_m", "tile_n", "head_dim", "head_dim_v")
    names = [tune.describe(other) for other in tune.other_choices(RULE)]
    assert "m128n128s2_no_turns" in names
    assert "m128n128s2_o_shares_v" in names
    assert "m128n128s2_short64" in names
    assert len(set(names)) == len(names)


LISTING = """
\t.section\t.text.example,"ax",@progbits
example:
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
{}
        /*0f00*/               @P2 BRA `(.L_x_0) ;
        /*0f10*/                   EXIT ;
"""
WAIT = "        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
STORE = "        /*0030*/                   STL [R1], R4 ;"


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([WAIT] * 2, None),
        ([WAIT] * 2 + [STORE] * 3, "spills: 3 accesses of local memory"),
        ([WAIT] * 28, "serialised: 28 waits for matrix products in a loop"),
    ],
    ids=["good", "spills", "serialised"],
)
def test_machine_code_is_judged_before_it_runs(
    lines: list[str], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = sass.parse(LISTING.format("\n".join(lines)), registers=168)
    monkeypatch.setattr(sass, "code_of", lambda spec: code)
    assert tune.fault_in_code(CAUSAL, RULE) == fault


@pytest.mark.slow
def test_a_schedule_that_spills_is_rejected_by_its_machine_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three warpgroups of 160 registers, with softcap and a left bound: fits on paper only."""
    features = ForwardFeatures("bf16", 64, 64, has_left_bound=True, score="softcap")
    spilling = dataclasses.replace(
        RULE,
        head_dim=64,
        head_dim_v=64,
        tile_m=192,
        stages=3,
        consumer_registers=160,
        producer_registers=32,
    )
    fault = tune.fault_in_code(features, spilling)
    assert fault is not None
    assert fault.startswith(("spills: ", "serialised: "))
    assert tune.fault_in_code(features, forward_rule(features)) is None
    # Rejected for one dtype, rejected for both.
    both = [dataclasses.replace(features, dtype=dtype) for dtype in ("bf16", "fp16")]
    kept = tune.without_faults(both, [forward_rule(features), spilling], workers=1)
    assert kept == [forward_rule(features)]
    assert "rejected m192n128s3" in capsys.readouterr().out


class Gains:
    """Says how fast each tile is, and remembers what was timed."""

    def __init__(self, **by_name: float):
        self.by_name, self.steps = by_name, []

    def __call__(self, rule, others):
        self.steps.append([tune.describe(other) for other in others])
        return {rule: 1.0} | {s: self.by_name.get(tune.describe(s), 0.9) for s in others}


def search(gains: Gains, **options) -> dict[ForwardSchedule, float]:
    options = {"good": list, "limit": 4, "is_over": lambda: False} | options
    return tune.search(RULE, gains, **options)


def test_the_search_varies_other_choices_of_the_best_tile() -> None:
    tile = tune.describe(tune.tiles(RULE)[1])
    gains = Gains(**{tile: 1.04, f"{tile}_no_turns": 1.06})
    found = search(gains)
    assert [len(step) for step in gains.steps[:1]] == [4]
    assert all(name.startswith(tile.split("s")[0]) for name in gains.steps[1])
    best, *_, last = found.items()
    assert (tune.describe(best[0]), best[1]) == (f"{tile}_no_turns", 1.06)
    assert last[1] == 0.9
    timed = [name for step in gains.steps for name in step]
    assert len(timed) == len(set(timed))  # nothing is timed twice


def test_the_search_stops_in_time_and_skips_what_it_is_told_to() -> None:
    gains = Gains()
    assert search(gains, is_over=lambda: True) == {RULE: 1.0}
    assert gains.steps == []
    hanging = tune.describe(tune.tiles(RULE)[0])
    search(gains, exclude=[hanging])
    assert hanging not in gains.steps[0]
    assert len(gains.steps[0]) == 3


def test_what_machine_code_rejects_is_not_timed() -> None:
    gains = Gains()
    assert search(gains, good=lambda schedules: []) == {RULE: 1.0}
    assert all(step == [] for step in gains.steps)


class ReferenceLaunch:
    """Stands in for a kernel's launch: attention, but for tiles of 64 rows."""

    def __init__(self, problem, spec, q):
        self.spoils = spec.schedule.tile_m == 64

    def __call__(self, q, k, v, lengths, sink, out, wants_lse):
        cu = {} if lengths is None else lengths._asdict()
        result, lse = attention_reference(q, k, v, **cu)
        return (result + 0.5 if self.spoils else result), lse


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_schedule_with_another_output_is_not_timed(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(tune, "ForwardLaunch", ReferenceLaunch)
    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "watched", lambda call, name: call())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    case = (
        Case((9, 21), (9, 21), 2, 2, 64, 64, label="mix") if is_packed else dense(1, 32, 2, 2, 64)
    )
    wrong = next(each for each in tune.tiles(RULE) if each.tile_m == 64)
    right = next(each for each in tune.tiles(RULE) if each.tile_m == 192)
    calls = tune.Bench([case], {}, rounds=1).calls(case, [RULE, wrong, right])
    assert list(calls) == [tune.describe(RULE), tune.describe(right)]
    assert f"rejected {tune.describe(wrong)}: its output differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(1.05, 1.04, "written to"), (1.05, 1.01, "not above"), (0.99, 0.99, "the rule stands")],
)
def test_a_winner_is_written_if_it_wins_twice(
    first: float,
    second: float,
    words: str,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """d128 causal: one tile beats the rule in the search by ``first``, alone by ``second``."""
    winner = tune.tiles(forward_rule(CAUSAL))[0]

    class Bench:
        def __init__(self, cases, options, rounds):
            assert options["causal"]

        def gains(self, rule, others):
            gain = second if others == [winner] else first
            return {rule: 1.0} | {each: gain if each == winner else 0.9 for each in others}

    monkeypatch.setattr(tune, "Bench", Bench)
    monkeypatch.setattr(tune, "need_gpu", lambda: None)
    monkeypatch.setattr(tune, "without_faults", lambda features, schedules, workers: schedules)
    monkeypatch.setattr("sys.argv", ["perf/tune.py", "--causal", "--write", "--lengths", "1024"])
    tune.main()
    assert words in capsys.readouterr().out
    if words == "written to":
        (only,) = sm90_tuned.read_rows(table)
        assert float(only["margin"]) == second
        assert forward_schedule(CAUSAL) == winner
    else:
        assert sm90_tuned.read_rows(table) == []


# -- the table -----------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuned.csv"
    path.write_text(",".join(sm90_tuned.COLUMNS) + "\n")
    monkeypatch.setattr(sm90_tuned, "TABLE", path)
    return path


def row(margin: float) -> dict[str, str]:
    cases = [dense(1, 1024, 16, 16, 128)]
    return tune.row_for(CAUSAL, tune.tiles(RULE)[0], margin, (RULE, 1.0), cases)


def test_a_winner_by_more_than_the_margin_overrides_the_rule(table: Path) -> None:
    schedule = tune.tiles(RULE)[0]
    rule = forward_rule(CAUSAL)
    assert forward_schedule(CAUSAL) == rule
    sm90_tuned.write_row(row(1.05), table)
    assert forward_schedule(CAUSAL) == schedule != rule
    # fp16 runs the same instructions; other features are other kernels.
    assert forward_schedule(dataclasses.replace(CAUSAL, dtype="fp16")) == schedule
    full = dataclasses.replace(CAUSAL, has_right_bound=False)
    assert forward_schedule(full) == forward_rule(full)
    sm90_tuned.write_row(row(1.015), table)  # replaces the row, and is not above the margin
    assert forward_schedule(CAUSAL) == rule
    with table.open() as file:
        (only,) = csv.DictReader(file)
    assert only["features"] == "d128_right"
    assert only["runner_up"] == "m128n128s2 1.0000"
    assert only["lengths"] == "1024"


def test_rows_survive_being_written(table: Path) -> None:
    fields = {"tile_m": 128, "takes_turns": False, "rescale": "always"}
    assert sm90_tuned.fields_of(sm90_tuned.text_of(fields)) == fields
    sm90_tuned.write_row(row(1.1), table)
    first = table.read_text()
    sm90_tuned.write_row(row(1.1), table)
    assert table.read_text().count("\n") == first.count("\n") == 2
    table.write_text("features,margin\n")
    with pytest.raises(ValueError, match="has the columns"):
        sm90_tuned.read_rows(table)


def test_the_table_in_use_holds_measured_winners_that_fit() -> None:
    rows = sm90_tuned.read_rows(sm90_tuned.TABLE)
    keys = [each["features"] for each in rows]
    assert keys == sorted(set(keys))
    for each in rows:
        assert float(each["margin"]) > 1.0
        assert each["device"].startswith("NVIDIA")
        assert each["command"].startswith("python -m perf.tune")
        fields = sm90_tuned.fields_of(each["schedule"])
        names = {field.name for field in dataclasses.fields(sm90.ForwardSchedule)}
        assert set(fields) <= names
