"""The logs to which the batch source of a run appends, and their sizes in its state: batches that
are made again after a resume replace their lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.files.jsonl import measure_log, truncate_log
from ludic.runs.directory import RunDirectory
from ludic.training.rollouts.ledger_state import check_number

LOGGED_BYTES, FAILED_BYTES = "logged_bytes", "failed_bytes"
"""Keys of the state."""


class BatchLogs:
    """The logs of the episodes of some batches, and of the failed episodes of all."""

    def __init__(self, directory: RunDirectory) -> None:
        self._paths = {LOGGED_BYTES: directory.rollouts, FAILED_BYTES: directory.failed_episodes}

    def state_dict(self) -> dict[str, Any]:
        """The sizes in bytes."""
        return {key: measure_log(path) for key, path in self._paths.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the logs back to their sizes in `state`, which may have more keys. One whose size is
        not in it, of an older version, stays as it is. Raises ConfigError for a size that is not a
        whole number."""
        sizes = {key: check_number(key, state[key]) for key in self._paths if key in state}
        for key, size in sizes.items():
            truncate_log(self._paths[key], size)


def remove_sizes(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without the sizes of the logs."""
    return {key: value for key, value in state.items() if key not in (LOGGED_BYTES, FAILED_BYTES)}
