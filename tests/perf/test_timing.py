"""Contenders take turns, medians and ratios are those of the rounds, inputs are rotated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from perf import timing
from perf.timing import (
    CALLS_MAX,
    COPIES_MAX,
    Call,
    DeviceTimer,
    Times,
    calls_of_batch,
    copies_needed,
    host_time,
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


# -- the device's timer, over a simulated device ---------------------------------------------------


class SimulatedDevice:
    """A queue in front of a device; times in milliseconds. Stands in for time and torch.cuda."""

    def __init__(self) -> None:
        self.host = 0.0  # the host's clock
        self.free = 0.0  # when the device has done all that is queued
        self.slept = 0.0

    def call(self, host_ms: float, device_ms: float) -> Call:
        def made() -> None:
            self.host += host_ms
            self.free = max(self.free, self.host) + device_ms

        return made

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def sleep(self, cycles: int) -> None:
        self.free = max(self.free, self.host) + cycles / 2e6
        self.slept += cycles / 2e6

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=self.synchronize)

        def record() -> None:
            event.at = max(self.free, self.host)

        event.record = record
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    simulated = SimulatedDevice()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: simulated.host / 1e3)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", simulated.event)
    monkeypatch.setattr(torch.cuda, "_sleep", simulated.sleep)
    return simulated


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "sleeps"),
    [
        (0.08, 1.0, False),  # the queue stays full by itself
        (0.08, 0.1, True),
        (0.08, 0.01, True),  # the host takes eight times as long as the device
    ],
)
def test_the_hosts_time_is_in_no_figure(
    device: SimulatedDevice, host_ms: float, device_ms: float, sleeps: bool
) -> None:
    timer = DeviceTimer()
    call = device.call(host_ms, device_ms)
    assert timer.estimate(call) == pytest.approx(device_ms)
    device.slept = 0.0
    for calls in (1, 7, 100):
        assert timer.batch(call, calls) == pytest.approx(device_ms)
    assert (device.slept > 0) == sleeps


def test_contenders_of_equal_kernels_and_unequal_hosts_are_equal(device: SimulatedDevice) -> None:
    calls = {"light": device.call(0.01, 0.2), "heavy": device.call(0.5, 0.2)}
    times = interleave(calls, DeviceTimer(), rounds=3)
    assert ratio(times["light"], times["heavy"]) == pytest.approx(1.0)


def test_host_time_is_the_median_of_single_calls(device: SimulatedDevice) -> None:
    assert host_time(device.call(0.02, 0.5), calls=50, drain_every=10) == pytest.approx(20.0)
