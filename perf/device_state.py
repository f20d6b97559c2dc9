"""What did the card's clock and power do meanwhile? NVML, read every 10 ms in a thread.

Without the SM clock a share of the peak means nothing: at long sequences an H200 is held below its
highest clock by its power limit.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

PERIOD_S = 0.010


@dataclass(frozen=True)
class Reading:
    """sm_mhz: SM clock; power_w: of the board; is_capped: held back by the power limit."""

    sm_mhz: float
    power_w: float
    is_capped: bool


@dataclass(frozen=True)
class DeviceState:
    """Readings over some time: medians, the lowest clock, and the share held back by power."""

    sm_mhz: float
    sm_mhz_lowest: float
    power_w: float
    capped_share: float
    readings: int


class Reader(Protocol):
    def read(self) -> Reading: ...


class NvmlReader:
    """Reads one card. Raises ImportError without nvidia-ml-py, NVMLError without a driver."""

    def __init__(self, uuid: str):
        """uuid  as torch gives it; an index would be another card under CUDA_VISIBLE_DEVICES."""
        import pynvml

        self.nvml: Any = pynvml
        pynvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        self.reads_instant = self._instant_power() is not None

    @property
    def driver(self) -> str:
        return str(self.nvml.nvmlSystemGetDriverVersion())

    def read(self) -> Reading:
        nvml = self.nvml
        power = self._instant_power() if self.reads_instant else None
        if power is None:
            power = nvml.nvmlDeviceGetPowerUsage(self.handle)
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        capping = nvml.nvmlClocksThrottleReasonSwPowerCap | (
            nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        return Reading(
            sm_mhz=float(nvml.nvmlDeviceGetClockInfo(self.handle, nvml.NVML_CLOCK_SM)),
            power_w=power / 1000,
            is_capped=bool(reasons & capping),
        )

    def _instant_power(self) -> int | None:
        """Milliwatts now; the plain reading is an average over a second on Hopper."""
        field = getattr(self.nvml, "NVML_FI_DEV_POWER_INSTANT", None)
        if field is None:
            return None
        (value,) = self.nvml.nvmlDeviceGetFieldValues(self.handle, [field])
        return int(value.value.uiVal) if value.nvmlReturn == 0 else None


class Sampler:
    """Reads in a thread for as long as the ``with`` block lasts.

    An error of the reader ends the readings and is raised when the block ends.
    """

    def __init__(self, reader: Reader, period_s: float = PERIOD_S):
        self.reader = reader
        self.period_s = period_s
        self.samples: list[tuple[float, Reading]] = []
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device state", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def over(self, intervals: Iterable[tuple[float, float]]) -> DeviceState | None:
        """The state while any of the intervals lasted (`time.perf_counter`); None if not read."""
        spans = list(intervals)
        inside = [
            reading
            for at, reading in list(self.samples)
            if any(start <= at <= end for start, end in spans)
        ]
        if not inside:
            return None
        clocks = [reading.sm_mhz for reading in inside]
        return DeviceState(
            sm_mhz=statistics.median(clocks),
            sm_mhz_lowest=min(clocks),
            power_w=statistics.median(reading.power_w for reading in inside),
            capped_share=sum(reading.is_capped for reading in inside) / len(inside),
            readings=len(inside),
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                reading = self.reader.read()
            except Exception as error:  # noqa: BLE001  raised in __exit__
                self._error = error
                return
            self.samples.append((time.perf_counter(), reading))
            self._stop.wait(self.period_s)
