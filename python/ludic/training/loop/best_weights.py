"""The weights of the best evaluation so far, for a run that early stopping watches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ludic.files.atomic import read_json, write_json
from ludic.files.checkpoints import BEST, WEIGHT_FILES
from ludic.files.folders import restore_replaced
from ludic.files.manifest import MANIFEST, find_faults, write_manifest
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend, with_defaults
from ludic.training.backend.saving import replace_folder_on_ranks

logger = logging.getLogger(__name__)


class BestWeights:
    """Keeps one set of weights: in a folder beside the checkpoints, or in memory without
    checkpoints.

    With several ranks, all call both methods. Rank 0 writes the folder; of a sharded model, each
    rank writes its own files.
    """

    def __init__(self, backend: TrainingBackend, checkpoints: Path | None) -> None:
        self._backend = backend
        self.folder = None if checkpoints is None else checkpoints / BEST
        self._in_memory: tuple[int, Any] | None = None

    def keep(self, step: int) -> None:
        """Keep the current weights, those of `step`, and drop the previous ones."""
        if self.folder is None:
            self._in_memory = step, self._backend.snapshot_weights().wait()
            return

        def write(folder: Path | None) -> None:
            self._backend.save(folder, optimizer=False).wait()

        shared = with_defaults(self._backend).is_sharded
        with (
            ranks.agree(f"saving the best weights, of step {step}"),
            replace_folder_on_ranks(self.folder, write, shared=shared) as written,
        ):
            if written is not None:
                folder, described = written
                write_json(folder / "best.json", {"step": step})
                write_manifest(folder, {"step": step}, described=described)

    def restore(self, step: int) -> bool:
        """Set the model to the weights of `step`. Returns False, and changes nothing, if those
        of another step or none were kept, or if they are damaged."""
        if self._in_memory is not None and self._in_memory[0] == step:
            self._backend.restore_weights(self._in_memory[1]).wait()
            return True
        folder = self.folder
        if folder is None or not ranks.ask_rank_0(f"looking for the weights of step {step}", lambda: self._holds(folder, step)):
            return False
        self._backend.load(folder, optimizer=False).wait()
        return True

    @staticmethod
    def _holds(folder: Path, step: int) -> bool:
        """Whether the folder has the undamaged weights of `step`."""
        restore_replaced(folder.parent)
        if not (folder / "best.json").is_file():
            return False
        faults = find_faults(folder, WEIGHT_FILES) if (folder / MANIFEST).exists() else []
        if faults:
            logger.warning("%s is damaged: %s", folder, ", ".join(faults))
        return not faults and read_json(folder / "best.json")["step"] == step
