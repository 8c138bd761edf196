"""Checkpoints: folders of safetensors and JSON in Hugging Face layout, written atomically.

    output_dir/
      step_000050/            as save_pretrained writes: config.json and model*.safetensors
                              (adapter_model.safetensors for adapters)
        optimizer.safetensors tensors of the optimizer's state
        optimizer.json        its other values and parameter groups
        trainer_state.json    {"step", and the state of the run}
      latest.json             {"last_checkpoint", "step"}

No file is a pickle, and no pickle is read. A checkpoint is written to a temporary folder and
renamed, and renamed again before it is deleted (`files.folders`), so a crash leaves older
checkpoints intact. `models.state_files` writes and reads models and optimizers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludic.errors import CheckpointError, ConfigError
from ludic.files.atomic import read_json, write_json
from ludic.files.folders import clear_unfinished, delete_folder, replace_folder
from ludic.models.state_files import read_model, read_optimizer_if_stored, write_model, write_optimizer
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.backend.torch import TorchBackend

logger = logging.getLogger(__name__)

STEP_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often checkpoints are saved, and how many are kept."""

    output_dir: str | Path
    """Folder of the checkpoints."""
    every_n_steps: int = 0
    """Save every this many steps; 0: only on request."""
    max_to_keep: int = 2
    """Number of checkpoints to keep; older ones are deleted."""
    save_optimizer: bool = True
    """Save the optimizer's state too."""

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ConfigError(f"every_n_steps ({self.every_n_steps}) must be >= 0; 0 saves only on request")
        if self.max_to_keep < 1:
            raise ConfigError(f"max_to_keep ({self.max_to_keep}) must be >= 1; the latest checkpoint is always kept")


class CheckpointManager:
    """Writes, finds, reads and deletes checkpoints. With several ranks, all ranks call `save`; rank
    0 writes.

    >>> manager = CheckpointManager(CheckpointConfig("checkpoints", every_n_steps=50))
    >>> manager.maybe_save(model, optimizer=optimizer, step=50)
    """

    def __init__(self, cfg: CheckpointConfig) -> None:
        self.cfg = cfg
        self.root = Path(cfg.output_dir)
        self.root.mkdir(parents=True, exist_ok=True)
        self._saved: Path | None = None

    def should_save(self, step: int) -> bool:
        """Whether `step` is a multiple of `every_n_steps`."""
        return self.cfg.every_n_steps > 0 and step % self.cfg.every_n_steps == 0

    def maybe_save(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """`save` if `should_save(step)`."""
        return self.save(model, optimizer=optimizer, step=step, metadata=metadata) if self.should_save(step) else None

    def save(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Write the checkpoint of `step`, replacing an older one of that step. Returns its
        folder on rank 0, None on other ranks."""

        def write(folder: Path | None) -> None:
            write_model(model, folder)
            if optimizer is not None and self.cfg.save_optimizer:
                write_optimizer(optimizer, model, folder)

        return self._save(write, step, metadata)

    def save_backend(self, backend: TrainingBackend, *, step: int, metadata: Mapping[str, Any] | None = None) -> Path | None:
        """Save the backend's weights and optimizer; `Trainer` calls this method. If a subclass
        overrides `save` and the model is in this process, this calls `save`."""
        if isinstance(backend, TorchBackend) and type(self).save is not CheckpointManager.save:
            return self.save(backend.model, optimizer=backend.optimizer, step=step, metadata=metadata)
        return self._save(lambda folder: backend.save(folder, optimizer=self.cfg.save_optimizer).wait(), step, metadata)

    def _save(self, write: Callable[[Path | None], None], step: int, metadata: Mapping[str, Any] | None) -> Path | None:
        """Write a checkpoint. `write` writes weights and optimizer to a folder; it gets None on
        ranks that write nothing."""
        content = {"step": step, **(metadata or {})}
        target = self.root / f"step_{step:06d}"
        with self._write_aside(target) as folder:
            write(folder)
            if folder is not None:
                write_json(folder / "trainer_state.json", content)
        self._saved = target
        ranks.barrier()
        return target if ranks.rank() == 0 else None

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`."""
        return (self.root / f"step_{step:06d}").is_dir()

    def amend(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Update the metadata of the last saved checkpoint, if it is that of `step`."""
        if ranks.rank() == 0 and self._saved is not None and _parse_step(self._saved) == step:
            state = self._saved / "trainer_state.json"
            write_json(state, {**read_json(state), **metadata})

    @contextmanager
    def _write_aside(self, target: Path) -> Iterator[Path | None]:
        """Yield a temporary folder that is renamed to `target` at the end; None on ranks other than
        0, which write nothing."""
        if ranks.rank() != 0:
            yield None
            return
        with replace_folder(target) as aside:
            yield aside
        write_json(self.root / "latest.json", {"last_checkpoint": target.name, "step": _parse_step(target)})
        self._prune(target)

    def _prune(self, written: Path) -> None:
        """Delete the leftovers of interrupted saves, and all checkpoints but `written` and the
        newest others, `max_to_keep` in total."""
        clear_unfinished(self.root)
        older = [folder for folder in self._folders() if folder != written]
        for folder in older[: max(0, len(older) - (self.cfg.max_to_keep - 1))]:
            delete_folder(folder)

    def _folders(self) -> list[Path]:
        """Return the checkpoint folders, sorted by step."""
        folders = [path for path in self.root.iterdir() if path.is_dir() and STEP_NAME.fullmatch(path.name)]
        return sorted(folders, key=_parse_step)

    def find(self, *, step: int | None = None, path: str | Path | None = None) -> Path:
        """Return a checkpoint folder: `path`, else that of `step`, else the one in latest.json,
        else the newest. Raises FileNotFoundError if there is none."""
        if path is not None:
            return _require_folder(Path(path))
        if step is not None:
            return _require_folder(self.root / f"step_{step:06d}")
        return self._latest()

    def _latest(self) -> Path:
        pointer = self.root / "latest.json"
        if pointer.exists():
            named = self.root / str(read_json(pointer).get("last_checkpoint"))
            if named.is_dir():
                return named
            logger.warning("%s names %s, which does not exist; using the newest checkpoint", pointer, named.name)
        folders = self._folders()
        if not folders:
            raise FileNotFoundError(f"{self.root} has no checkpoint (step_NNNNNN); save one first, or pass path=")
        return folders[-1]

    def load(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        path: str | Path | None = None,
    ) -> dict[str, Any]:
        """Read the weights, and the state of `optimizer` if it is not None and was saved.
        Returns the metadata; `{"step": 0}` if there is none."""
        folder = self.find(step=step, path=path)
        read_model(model, folder)
        if optimizer is not None:
            read_optimizer_if_stored(optimizer, model, folder)
        return _read_metadata(folder)

    def load_backend(self, backend: TrainingBackend, folder: Path) -> dict[str, Any]:
        """Load a checkpoint into the backend; `Trainer` calls this method. If a subclass overrides
        `load` and the model is in this process, this calls `load`."""
        if isinstance(backend, TorchBackend) and type(self).load is not CheckpointManager.load:
            return self.load(backend.model, optimizer=backend.optimizer, path=folder)
        backend.load(folder).wait()
        return _read_metadata(folder)

    def locate(self, checkpoint: int | str | Path) -> Path:
        """Return the folder of a checkpoint, given its step or its path. Example: 50 and "50" mean
        step_000050, unless a folder named 50 exists."""
        is_step = isinstance(checkpoint, int) or (str(checkpoint).isdigit() and not Path(checkpoint).exists())
        return self.find(step=int(str(checkpoint))) if is_step else self.find(path=str(checkpoint))


def _read_metadata(folder: Path) -> dict[str, Any]:
    state = folder / "trainer_state.json"
    return read_json(state) if state.exists() else {"step": 0}


def _require_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    return folder


def _parse_step(folder: Path) -> int:
    match = STEP_NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder} is not named step_NNNNNN")
    return int(match.group(1))
