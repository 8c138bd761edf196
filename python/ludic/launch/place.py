"""What every place that runs processes can do."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Protocol

from ludic.launch.process import Ended, Process, Started


class Place(Protocol):
    """Runs processes. A process ends with the place, even if the place's own process is killed."""

    def start(self, process: Process) -> None:
        """Start a process that does not run. `poll` reports when it has started, or `Ended` if it
        cannot be placed. Raises LaunchError if it cannot be started at all."""
        ...

    def poll(self) -> list[Started | Ended]:
        """What has happened since the last call, in order, each event once. Does not wait."""
        ...

    def ask(self, name: str, number: int = signal.SIGTERM) -> None:
        """Send the signal to a process, which may end, and do not wait. Does nothing if it does not
        run."""
        ...

    def stop(self, names: Sequence[str], grace_s: float) -> list[Ended]:
        """End processes: SIGTERM, and SIGKILL for them and all that they started after `grace_s`
        seconds, or at once if that is 0. Names that do not run are left out."""
        ...

    def close(self, grace_s: float = 0.0) -> list[Ended]:
        """End all processes, within the same `grace_s` seconds, and free the place. A second call
        does nothing."""
        ...
