"""Weights as a folder of safetensors for servers to read: it appears whole or not at all, and
what is in it is known before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.distributed.push.manifest import EMBEDDING, HEAD, ServerManifest, check_fit, without_tied_head
from ludic.errors import ConfigError, PublishError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
UNFINISHED = ".unfinished_"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""What a server needs of a model beside its weights: config and tokenizer."""


class CheckpointFolder:
    """One folder for each version, of which the newest stay.

    >>> CheckpointFolder("/shared/policy").write(weights, version=17)
    PosixPath('/shared/policy/version_17')
    """

    def __init__(self, root: str | Path, *, keep: int = 2, model: str | Path | None = None) -> None:
        """`keep` versions stay. `model` is a folder whose config and tokenizer are put beside
        the weights."""
        if keep < 1:
            raise ConfigError(f"keep ({keep}) must be >= 1; the version that is served stays")
        self.root = Path(root).resolve()
        self.keep = keep
        self.model = None if model is None else Path(model)
        if self.model is not None and not (self.model / "config.json").exists():
            raise ConfigError(f"{self.model} has no config.json; give the folder of the model that is served")
        self._written: list[Path] = []

    def write(self, weights: Mapping[str, Tensor], version: str | int | None) -> Path:
        """The folder of this version. One of the same version is replaced."""
        from safetensors.torch import save_file

        held = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        return self.fill(version, lambda folder: save_file(held, folder / WEIGHTS, metadata={"format": "pt"}))

    def fill(self, version: str | int | None, write: Callable[[Path], object]) -> Path:
        """The folder of this version, with what `write` puts into it."""
        target = self.root / f"version_{version}"
        if target.parent != self.root:
            raise ConfigError(f"version ({version}) must be a name for a folder, without slashes")
        aside = self.root / f"{UNFINISHED}{target.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if self.model is not None:
            for path in (
                path for pattern in COPIED for path in self.model.glob(pattern) if not path.name.endswith(".index.json")
            ):
                shutil.copyfile(path, aside / path.name)
        write(aside)
        for path in [*aside.iterdir(), aside]:
            _flush(path)
        self._replace(target, aside)
        return target

    def _replace(self, target: Path, aside: Path) -> None:
        if target.exists():
            replaced = self.root / f"{UNFINISHED}replaced_{target.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
            os.replace(aside, target)
            shutil.rmtree(replaced)
        else:
            os.replace(aside, target)
        _flush(self.root)
        self._written = [*(path for path in self._written if path != target), target]

    def prune(self, served: Path) -> None:
        """Delete versions that this process wrote, but for the newest; the one that is served
        stays."""
        while len(self._written) > self.keep:
            oldest = self._written.pop(0)
            if oldest != served:
                shutil.rmtree(oldest, ignore_errors=True)


def folder_marks(folder: Path, manifest: ServerManifest, *, partial: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprints of the weights in a folder, as they are stored and in the server's dtypes. One
    tensor is held at a time.

    Raises PublishError for a folder that cannot be read here, that is not complete, or whose
    weights are not those of the server's model.
    """
    import torch
    from safetensors import SafetensorError

    from ludic.inference.vllm.in_server.weight_fingerprint import tensor_mark
    from ludic.inference.vllm.in_server.weight_receiver import Checkpoint, WeightTransferError

    stored, served = {}, {}
    try:
        checkpoint = Checkpoint(folder)
        ends = [name for name in checkpoint.weights if name == HEAD or name.endswith(EMBEDDING)]
        tied = set(ends) - set(without_tied_head(dict(checkpoint.read(ends)), manifest))
        names = sorted(set(checkpoint.weights) - tied)
        entries = ((name, checkpoint.weights[name]) for name in names)
        check_fit([{"name": n, "dtype": w["dtype"], "shape": w["shape"]} for n, w in entries], manifest, partial=partial)
        for name, tensor in checkpoint.read(names):
            stored[name] = tensor_mark(tensor)
            served[name] = tensor_mark(tensor.to(getattr(torch, manifest.weights[name][1])))
    except (WeightTransferError, SafetensorError, OSError, ValueError, KeyError) as error:
        raise PublishError(
            f"{folder} is no complete checkpoint ({error}); write it again, whole, before servers are told"
        ) from error
    return stored, served


def _flush(path: Path) -> None:
    """Have the disk hold it before it is given its name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
