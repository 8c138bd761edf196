"""Which GPUs of this machine which process sees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ludic.errors import LaunchError
from ludic.launch.process import Process

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/proc/driver/nvidia/gpus")


def find_gpus(environment: Mapping[str, str], devices: Path = _DEVICES) -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them: those that it lists
    if it is set, else all that the driver has."""
    visible = environment.get(VISIBLE)
    if visible is not None:
        return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]
    return [str(number) for number in range(len(os.listdir(devices)))] if devices.is_dir() else []


class GpuPool:
    """Lends GPUs to processes. Whole numbers are GPUs of their own; a fraction shares one."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._free = dict.fromkeys(gpus, 1.0)
        self._lent: dict[str, tuple[list[str], float]] = {}

    def lend(self, process: Process) -> dict[str, str]:
        """The variables that show the process its GPUs; empty for a process that requested none.
        Raises LaunchError if too few are free."""
        if process.gpus == 0:
            return {}
        share = min(process.gpus, 1.0)
        fitting = sorted((free, gpu) for gpu, free in self._free.items() if free >= share - 1e-9)
        count = max(1, int(process.gpus))
        if len(fitting) < count:
            raise LaunchError(
                f"{process.name} needs {process.gpus:g} GPUs, but of the {len(self._free)} of this machine only {len(fitting)} have room; "
                f"ask for fewer, or set {VISIBLE} to more"
            )
        chosen = sorted((gpu for _, gpu in fitting[:count]), key=list(self._free).index)  # the fullest that fits
        for gpu in chosen:
            self._free[gpu] -= share
        self._lent[process.name] = chosen, share
        return {VISIBLE: ",".join(chosen)}

    def give_back(self, name: str) -> None:
        chosen, share = self._lent.pop(name, ([], 0.0))
        for gpu in chosen:
            self._free[gpu] = min(1.0, self._free[gpu] + share)
