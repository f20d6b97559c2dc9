"""Runs compiled kernels on a CPU: their real host code, their PTX, and checks of what they do.

`run` takes any compiled CuTe-DSL function, `emulate_forward` a decision of `fa4.dispatch`.
"""

from fa4.emulator.capture import DeviceModel
from fa4.emulator.device import LaunchReport, TensorUse, emulate_forward, run
from fa4.emulator.errors import EmulationError
from fa4.emulator.execute import Options
from fa4.emulator.launch_record import Launch

__all__ = [
    "DeviceModel",
    "EmulationError",
    "Launch",
    "LaunchReport",
    "Options",
    "TensorUse",
    "emulate_forward",
    "run",
]
