"""Contenders take turns, medians and ratios are those of the rounds, inputs are rotated."""

from __future__ import annotations

import pytest

from perf.timing import (
    CALLS_MAX,
    COPIES_MAX,
    Call,
    Times,
    calls_of_batch,
    copies_needed,
    interleave,
    ratio,
    rotated,
    rotating,
)


class FakeTimer:
    """Plays back milliseconds for each call, and remembers the order of batches."""

    def __init__(self, estimates: dict[Call, float], played: dict[Call, list[float]]):
        self.estimates, self.played = estimates, played
        self.batches: list[tuple[Call, int]] = []

    def estimate(self, call: Call) -> float:
        return self.estimates[call]

    def batch(self, call: Call, calls: int) -> float:
        self.batches.append((call, calls))
        return self.played[call].pop(0)


def a() -> None: ...
def b() -> None: ...
def c() -> None: ...


def test_each_round_has_every_contender_once_and_begins_with_another() -> None:
    timer = FakeTimer({a: 1.0, b: 3.0, c: 1000.0}, {a: [1, 2, 9, 1], b: [3] * 4, c: [5] * 4})
    times = interleave({"a": a, "b": b, "c": c}, timer, rounds=4, batch_ms=30.0)
    order = [call for call, _ in timer.batches]
    assert order == [a, b, c, b, c, a, c, a, b, a, b, c]
    assert dict(timer.batches) == {a: 30, b: 10, c: 1}
    assert times["a"].rounds == (1, 2, 9, 1)  # in the order of rounds
    assert list(times) == ["a", "b", "c"]


def test_every_batch_has_the_interval_in_which_it_ran() -> None:
    times = interleave({"a": a}, FakeTimer({a: 1.0}, {a: [1.0, 1.0]}), rounds=2)["a"]
    (first_start, first_end), (second_start, second_end) = times.intervals
    assert first_start <= first_end <= second_start <= second_end


def test_rounds_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds=0"):
        interleave({"a": a}, FakeTimer({a: 1.0}, {a: []}), rounds=0)


def test_median_quartiles_and_extremes() -> None:
    times = Times((4.0, 1.0, 2.0, 3.0, 10.0))
    assert (times.median, times.fastest, times.slowest) == (3.0, 1.0, 10.0)
    assert times.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Times((4.0,)).spread == 0.0


def test_a_ratio_compares_figures_of_the_same_round() -> None:
    """The clock halves after the first round: medians would mix rounds, ratios do not."""
    ours, theirs = Times((1.0, 2.0, 2.0)), Times((1.2, 2.4, 2.4))
    assert ratio(ours, theirs) == pytest.approx(1.2)
    with pytest.raises(ValueError, match="zip"):
        ratio(ours, Times((1.0,)))


@pytest.mark.parametrize(
    ("call_ms", "calls"), [(0.5, 60), (29.9, 2), (30.0, 1), (500.0, 1), (1e-9, CALLS_MAX)]
)
def test_a_batch_lasts_about_as_long_as_asked(call_ms: float, calls: int) -> None:
    assert calls_of_batch(call_ms, 30.0) == calls


@pytest.mark.parametrize(
    ("input_bytes", "copies"),
    [
        (200_000_000, 2),  # larger than L2: never the same twice in a row
        (50_000_000, 3),  # twice L2 in between
        (49_999_999, 4),
        (1, COPIES_MAX),
        (0, COPIES_MAX),
    ],
)
def test_twice_l2_is_read_between_two_uses_of_a_copy(input_bytes: int, copies: int) -> None:
    assert copies_needed(input_bytes, l2_bytes=50_000_000) == copies


def test_rotation_makes_each_call_in_turn() -> None:
    made: list[int] = []
    call = rotating([lambda: made.append(0), lambda: made.append(1)])
    for _ in range(5):
        call()
    assert made == [0, 1, 0, 1, 0]
    assert rotating([a]) is a
    assert rotated([], 3) == []
