"""Clock and power are read while a block lasts, and told apart by contender."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from perf.device_state import NvmlReader, Reading, Sampler


class Rising:
    """A reader whose clock rises by 1 MHz a reading."""

    def __init__(self) -> None:
        self.count = 0

    def read(self) -> Reading:
        self.count += 1
        return Reading(1000.0 + self.count, 500.0, is_capped=self.count % 2 == 0)


def test_readings_come_at_the_period_and_end_with_the_block() -> None:
    reader = Rising()
    with Sampler(reader, period_s=0.002) as sampler:
        time.sleep(0.1)
    count = reader.count
    assert 5 <= count <= 60
    time.sleep(0.02)
    assert reader.count == count == len(sampler.samples)
    stamps = [at for at, _ in sampler.samples]
    assert stamps == sorted(stamps)


def test_only_readings_inside_the_intervals_count() -> None:
    sampler = Sampler(Rising())
    for at, mhz, watts, capped in (
        (1.0, 1980.0, 300.0, False),  # before
        (2.0, 1700.0, 690.0, True),
        (2.5, 1600.0, 700.0, True),
        (3.5, 1200.0, 100.0, False),  # another contender's turn
        (4.0, 1500.0, 695.0, False),
    ):
        sampler.samples.append((at, Reading(mhz, watts, capped)))
    state = sampler.over([(1.5, 3.0), (4.0, 5.0)])
    assert state is not None
    assert (state.sm_mhz, state.sm_mhz_lowest, state.power_w) == (1600.0, 1500.0, 695.0)
    assert state.capped_share == pytest.approx(2 / 3)
    assert state.readings == 3
    assert sampler.over([(10.0, 11.0)]) is None


def test_an_error_of_the_reader_is_raised_when_the_block_ends() -> None:
    class Failing:
        def read(self) -> Reading:
            raise OSError("lost the card")

    with pytest.raises(OSError, match="lost the card"), Sampler(Failing(), period_s=0.001):
        time.sleep(0.02)


def fake_nvml(instant_milliwatts: int | None) -> SimpleNamespace:
    """pynvml for one card "GPU-abc", as far as the reader asks."""

    def by_uuid(name: str) -> str:
        assert name == "GPU-abc"
        return "handle"

    def fields(handle: str, ids: list[int]) -> list[SimpleNamespace]:
        assert (handle, ids) == ("handle", [186])
        status = 0 if instant_milliwatts is not None else 3
        return [
            SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=instant_milliwatts or 0))
        ]

    return SimpleNamespace(
        NVML_FI_DEV_POWER_INSTANT=186,
        NVML_CLOCK_SM=1,
        nvmlClocksThrottleReasonSwPowerCap=4,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=128,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetPowerUsage=lambda handle: 321_000,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1755,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4,
    )


@pytest.mark.parametrize(("instant", "watts"), [(698_500, 698.5), (None, 321.0)])
def test_power_is_the_instant_reading_where_the_card_has_one(
    monkeypatch: pytest.MonkeyPatch, instant: int | None, watts: float
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(instant))
    reader = NvmlReader("abc")
    assert reader.read() == Reading(1755.0, watts, is_capped=True)
    assert reader.driver == "580.1"
