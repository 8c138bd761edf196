"""Checkpoints: folders of safetensors and JSON in Hugging Face layout, written atomically.

    output_dir/
      step_000050/            as save_pretrained writes: config.json and model*.safetensors, with
                              an index (adapter_model.safetensors for adapters); of a sharded
                              model, `models.sharded_files` says which rank writes what
        tokenizer.json ..     the tokenizer, if the manager has one
        optimizer.safetensors tensors of the optimizer's state
        optimizer.json        its other values and parameter groups
        trainer_state.json    {"step", and the state of the run}
        critic/               with PPO: the files of the critic's model and optimizer
        controller_state.json with controllers: tau, beta and the state of their controllers
        manifest.json         size and hash of each file above, written last (`files.manifest`)
                              and with layout="shallow" that layout
      latest.json             {"last_checkpoint", "step", "manifest"}: its hash

No file is a pickle, and no pickle is read. A checkpoint is written to a temporary folder and
renamed, and renamed again before it is deleted (`files.atomic`), so a crash leaves older
checkpoints intact. `models.state_files` writes and reads models and optimizers.

Files are verified before they are read. A damaged checkpoint is skipped with a warning that names
the damaged files, and the newest verified one is taken. Checkpoints of versions that wrote no
manifest are read with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ludic.errors import CheckpointError, check_value
from ludic.files.atomic import (
    clear_unfinished,
    clear_unfinished_files,
    delete_folder,
    encode_json,
    read_json,
    restore_replaced,
    write_json,
)
from ludic.files.checkpoints import (
    LATEST,
    STATE,
    STEP_NAME,
    check_layout,
    find_checkpoint_faults,
    parse_step,
    warn_if_unverifiable,
)
from ludic.files.manifest import MANIFEST, VerifiedFolders, hash_manifest, replace_listed_json, write_manifest
from ludic.images.store import current_store
from ludic.models.saving import StaticFiles, TokenizerFiles, write_card
from ludic.models.sharding import is_sharded
from ludic.models.state_files import read_model, read_optimizer_if_stored
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend, with_defaults
from ludic.training.backend.saving import replace_folder_on_ranks, write_weights

logger = logging.getLogger(__name__)

CRITIC = "critic"
"""Folder of the critic in a checkpoint."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often checkpoints are saved, and how many are kept."""

    output_dir: str | Path
    """Folder of the checkpoints."""
    every_n_steps: int = 0
    """Save every this many steps; 0: only on request."""
    max_to_keep: int | None = 2
    """Number of checkpoints to keep; older ones are deleted. None means that all are kept."""
    save_optimizer: bool = True
    """Save the optimizer's state too."""
    layout: Literal["full", "shallow"] = "full"
    """`full`: a checkpoint is a model that transformers and vLLM open, with the tokenizer if the
    manager has one. `shallow`: for resuming alone. Each rank of a sharded model writes the parts
    that it has, and no tokenizer is written; `ludic checkpoint export` makes a model of it."""
    static_files: str | Path | None = None
    """Folder of a model: its config and tokenizer are added to each checkpoint that lacks them."""

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_value("every_n_steps", self.every_n_steps, "0 saves only on request", least=0)
        check_value("max_to_keep", self.max_to_keep, "the latest checkpoint is always kept", optional=True, least=1)


class CheckpointManager:
    """Writes, finds, reads and deletes checkpoints. With several ranks, all ranks call `save`. Rank
    0 writes; of a sharded model, each rank writes its own files.

    >>> manager = CheckpointManager(CheckpointConfig("checkpoints", every_n_steps=50))
    >>> manager.maybe_save(model, optimizer=optimizer, step=50)
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        *,
        tokenizer: Any = None,
        model: Any = None,
        card: Callable[[int], str | None] | None = None,
    ) -> None:
        """`tokenizer` is saved with each full checkpoint, and the processor of `model` if it sees
        images, so that a server can load the folder.
        `card`: step -> the model card of its checkpoint."""
        self.cfg, self._make_card = cfg, card
        self._is_shallow = cfg.layout == "shallow"
        self._small_files: list[TokenizerFiles | StaticFiles] = []
        if tokenizer is not None and not self._is_shallow:
            self._small_files.append(TokenizerFiles(tokenizer, model))
        if cfg.static_files is not None:
            self._small_files.append(StaticFiles(Path(cfg.static_files)))
        self.root = Path(cfg.output_dir)
        self.root.mkdir(parents=True, exist_ok=True)
        self.protected: frozenset[int] = frozenset()
        """Steps whose checkpoints are not deleted and do not count as `max_to_keep`."""
        self._saved: Path | None = None
        self._verified = VerifiedFolders()

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

        saved = optimizer if self.cfg.save_optimizer else None
        write = partial(write_weights, model, saved, as_held=self._is_shallow)
        return self.write(write, step, metadata, shared=is_sharded(model))

    def save_backend(
        self,
        backend: TrainingBackend,
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, Mapping[str, Any]] | None = None,
        critic: TrainingBackend | None = None,
    ) -> Path | None:
        """Save the backend's weights and optimizer; `Trainer` calls this method. If a subclass
        overrides `save` and the model is in this process, this calls `save`. `files`: names and
        contents of more JSON files. `critic`: a second backend, which is saved in the folder
        `critic` of the checkpoint."""
        here = with_defaults(backend)
        if here.model is not None and type(self).save is not CheckpointManager.save:
            folder = self.save(here.model, optimizer=here.optimizer, step=step, metadata=metadata)
            with ranks.agree(f"saving the checkpoint of step {step}"):
                self._save_critic(critic, folder)
                if folder is not None:
                    _write_files(folder, files)
                if folder is not None and (folder / MANIFEST).exists():
                    self._write_manifest(folder, step)  # of what the subclass changed after it called `save`
                    self._point_to(folder)
            return folder
        save = here.save_as_held if self._is_shallow and here.model is not None else backend.save

        def write(folder: Path | None) -> None:
            save(folder, optimizer=self.cfg.save_optimizer).wait()
            self._save_critic(critic, folder)

        return self.write(write, step, metadata, shared=here.is_sharded, files=files)

    def _save_critic(self, critic: TrainingBackend | None, folder: Path | None) -> None:
        if critic is None:
            return
        here = with_defaults(critic)
        whole = None if folder is None or (ranks.rank() and not here.is_sharded) else folder / CRITIC
        save = here.save_as_held if self._is_shallow else critic.save
        save(whole, optimizer=self.cfg.save_optimizer).wait()

    def write(
        self,
        write: Callable[[Path | None], None],
        step: int,
        metadata: Mapping[str, Any] | None = None,
        *,
        shared: bool,
        files: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Path | None:
        """`save` of what `write` writes to a folder: weights and optimizer. With `shared` it gets
        the folder on all ranks, else None on ranks other than 0."""
        content = {"step": step, **(metadata or {})}
        target = self.root / f"step_{step:06d}"
        current_store().flush()
        with ranks.agree(f"saving the checkpoint of step {step}"):
            with replace_folder_on_ranks(target, write, shared=shared) as written:
                if written is not None:
                    folder, described = written
                    for small in self._small_files:
                        small.write(folder)
                    write_card(folder, None if self._make_card is None else self._make_card(step))
                    write_json(folder / STATE, content)
                    _write_files(folder, files)
                    self._write_manifest(folder, step, described=described)
            if ranks.rank() == 0:
                self._point_to(target)
                self._prune(target)
        self._saved = target
        return target if ranks.rank() == 0 else None

    def holds(self, step: int) -> bool:
        """Whether there is an undamaged checkpoint of `step`."""
        folder = self.root / f"step_{step:06d}"
        return folder.is_dir() and (folder == self._saved or not self._find_faults(folder))

    def has_any(self) -> bool:
        """Whether there is a checkpoint, damaged or not."""
        restore_replaced(self.root)
        return bool(self._folders())

    def amend(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Update the metadata of the last saved checkpoint, if it belongs to `step`."""
        if self._saved is None or parse_step(self._saved) != step:
            return
        with ranks.agree(f"amending the checkpoint of step {step}"):
            if ranks.rank() == 0:
                replace_listed_json(self._saved, STATE, {**read_json(self._saved / STATE), **metadata})
                self._point_to(self._saved)

    def _write_manifest(self, folder: Path, step: int, **options: Any) -> None:
        write_manifest(folder, {"step": step, **({"layout": self.cfg.layout} if self._is_shallow else {})}, **options)

    def _point_to(self, folder: Path) -> None:
        write_json(self.root / LATEST, self._describe_latest(folder))

    def _prune(self, written: Path) -> None:
        """Delete the leftovers of interrupted saves, and all checkpoints but `written` and the
        newest others, `max_to_keep` in total; `protected` ones remain."""
        clear_unfinished(self.root)
        if self.cfg.max_to_keep is None:
            return
        step = parse_step(written)
        older = [folder for folder in self._folders() if folder != written and parse_step(folder) not in self.protected]
        older.sort(key=lambda folder: (parse_step(folder) <= step, parse_step(folder)))  # steps beyond it were left behind
        for folder in older[: max(0, len(older) - (self.cfg.max_to_keep - 1))]:
            delete_folder(folder)

    def clear_leftovers(self) -> None:
        """Delete what killed processes left here unfinished. Call it where no other process can be
        saving; a save clears only leftovers next to the checkpoints."""
        clear_unfinished(self.root)
        for folder in (self.root, *self._folders()):
            clear_unfinished_files(folder)

    def _folders(self) -> list[Path]:
        folders = [path for path in self.root.iterdir() if path.is_dir() and STEP_NAME.fullmatch(path.name)]
        return sorted(folders, key=parse_step)

    def find(self, *, step: int | None = None, path: str | Path | None = None) -> Path:
        """The checkpoint folder: `path` if given, else `step`, else the one that latest.json names,
        else the newest.

        A checkpoint named by `path` or `step` raises CheckpointError if it is damaged.
        Otherwise damaged ones are skipped with a warning. Raises FileNotFoundError without any
        checkpoint, and CheckpointError if all are damaged.
        """
        if path is not None or step is not None:
            folder = self.root / f"step_{step:06d}" if path is None else Path(path)
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no checkpoint at {folder}")
            faults = self._find_faults(folder)
            if not faults:
                return warn_if_unverifiable(folder)
            others = (other for other in self._folders()[::-1] if other != folder and not find_checkpoint_faults(other))
            raise CheckpointError(f"{folder} is damaged: {', '.join(faults)}; the newest undamaged one is {next(others, 'none')}")
        restore_replaced(self.root)
        damaged: list[str] = []
        newest_first, latest = self._folders()[::-1], self._read_pointer()
        for folder in sorted(newest_first, key=lambda each: each != latest):
            faults = self._find_faults(folder)
            if not faults:
                if damaged:
                    logger.warning("%s; going back to %s", "; ".join(damaged), folder.name)
                return warn_if_unverifiable(folder)
            damaged.append(f"{folder} is damaged: {', '.join(faults)}")
        if damaged:
            raise CheckpointError(f"no checkpoint can be read. {'; '.join(damaged)}. Delete {self.root} to begin anew")
        raise FileNotFoundError(f"{self.root} has no checkpoint (step_NNNNNN); save one first, or pass path=")

    def _find_faults(self, folder: Path) -> list[str]:
        return self._verified.find_faults(folder, find_checkpoint_faults)

    def _read_pointer(self) -> Path | None:
        """The checkpoint that latest.json names, which may be damaged. None, with a warning, if it
        names none."""
        pointer = self.root / LATEST
        if not pointer.exists():
            return None
        try:
            content = read_json(pointer)
            folder = self.root / str(content.get("last_checkpoint"))
            if folder not in self._folders() or content.get("step", parse_step(folder)) != parse_step(folder):
                raise CheckpointError(f"{pointer} names no checkpoint of its folder")
        except (CheckpointError, OSError) as error:
            logger.warning("%s is damaged (%s); the newest undamaged checkpoint is used", pointer, error)
            return None
        if content != self._describe_latest(folder) or pointer.read_bytes() != encode_json(content).encode():
            logger.warning("%s is not as it was written, or %s was changed later", pointer, folder.name)
        return folder

    @staticmethod
    def _describe_latest(folder: Path) -> dict[str, Any]:
        """What latest.json says of a checkpoint. Older versions did not write `manifest`."""
        latest = {"last_checkpoint": folder.name, "step": parse_step(folder)}
        try:
            manifest = hash_manifest(folder)
        except CheckpointError:
            manifest = "damaged"
        return latest if manifest is None else {**latest, "manifest": manifest}

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

    def load_backend(self, backend: TrainingBackend, folder: Path, *, critic: TrainingBackend | None = None) -> dict[str, Any]:
        """Load a checkpoint into the backend; `Trainer` calls this method. If a subclass overrides
        `load` and the model is in this process, this calls `load`. Raises CheckpointError for one
        without a critic if there is to be one."""
        here = with_defaults(backend)
        if critic is not None:
            if not (folder / CRITIC).is_dir():
                raise CheckpointError(f"{folder} has no folder {CRITIC}, since another algorithm wrote it; begin a new run")
            critic.load(folder / CRITIC).wait()
        if here.model is not None and type(self).load is not CheckpointManager.load:
            return self.load(here.model, optimizer=here.optimizer, path=folder)
        backend.load(folder).wait()
        return _read_metadata(folder)

    def locate(self, checkpoint: int | str | Path) -> Path:
        """Return the folder of a checkpoint, given its step or its path. Example: 50 and "50" mean
        step_000050, unless a folder named 50 exists."""
        is_step = isinstance(checkpoint, int) or (str(checkpoint).isdigit() and not Path(checkpoint).exists())
        return self.find(step=int(str(checkpoint))) if is_step else self.find(path=str(checkpoint))


def _write_files(folder: Path, files: Mapping[str, Mapping[str, Any]] | None) -> None:
    for name, content in (files or {}).items():
        write_json(folder / name, content)


def _read_metadata(folder: Path) -> dict[str, Any]:
    state = folder / STATE
    return read_json(state) if state.exists() else {"step": 0}
