"""Weights as a folder of safetensors for servers to read. The folder appears complete or not at
all."""

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
"""The files of a model that a server needs beside the weights: config and tokenizer."""


class CheckpointFolder:
    """One folder for each version. The newest ones are kept.

    >>> CheckpointFolder("/shared/policy").write(weights, version=17)
    PosixPath('/shared/policy/version_17')
    """

    def __init__(self, root: str | Path, *, keep: int = 2, model: str | Path | None = None) -> None:
        """`keep` is the number of versions that are kept. `model` is a folder with the config and
        the tokenizer, which are copied beside the weights."""
        if keep < 1:
            raise ConfigError(f"keep ({keep}) must be >= 1; the version that is served stays")
        self.root = Path(root).resolve()
        self.keep = keep
        self.model = None if model is None else Path(model)
        if self.model is not None and not (self.model / "config.json").exists():
            raise ConfigError(f"{self.model} has no config.json; give the folder of the model that is served")
        self._written: list[Path] = []

    def write(self, weights: Mapping[str, Tensor], version: str | int | None) -> Path:
        """Write the folder of this version, and return it. A folder of the same version is
        replaced."""
        from safetensors.torch import save_file

        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        return self.fill(version, lambda folder: save_file(on_host, folder / WEIGHTS, metadata={"format": "pt"}))

    def fill(self, version: str | int | None, write: Callable[[Path], object]) -> Path:
        """Make the folder of this version with the files that `write` puts into it, and return
        it."""
        target = self.root / f"version_{version}"
        if target.parent != self.root:
            raise ConfigError(f"version ({version}) must be a name for a folder, without slashes")
        unfinished = self.root / f"{UNFINISHED}{target.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if self.model is not None:
            for pattern in COPIED:
                for path in self.model.glob(pattern):
                    if not path.name.endswith(".index.json"):
                        shutil.copyfile(path, unfinished / path.name)
        write(unfinished)
        for path in [*unfinished.iterdir(), unfinished]:
            _flush(path)
        self._replace(target, unfinished)
        return target

    def _replace(self, target: Path, unfinished: Path) -> None:
        if target.exists():
            replaced = self.root / f"{UNFINISHED}replaced_{target.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
            os.replace(unfinished, target)
            shutil.rmtree(replaced)
        else:
            os.replace(unfinished, target)
        _flush(self.root)
        self._written = [*(path for path in self._written if path != target), target]

    def prune(self, served: Path) -> None:
        """Delete the oldest versions that this process wrote until `keep` are left. The version
        that is served stays."""
        while len(self._written) > self.keep:
            oldest = self._written.pop(0)
            if oldest != served:
                shutil.rmtree(oldest, ignore_errors=True)


def folder_fingerprints(
    folder: Path, manifest: ServerManifest, *, partial: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprints of the weights in a folder: as they are stored, and in the server's dtypes. One
    tensor is in memory at a time.

    Raises PublishError if the folder cannot be read here, is incomplete, or has weights that do not
    fit the server's model.
    """
    import torch
    from safetensors import SafetensorError

    from ludic.inference.vllm.in_server.weight_fingerprint import tensor_fingerprint
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
            stored[name] = tensor_fingerprint(tensor)
            served[name] = tensor_fingerprint(tensor.to(getattr(torch, manifest.weights[name][1])))
    except (WeightTransferError, SafetensorError, OSError, ValueError, KeyError) as error:
        raise PublishError(
            f"{folder} is no complete checkpoint ({error}); write it again, whole, before servers are told"
        ) from error
    return stored, served


def _flush(path: Path) -> None:
    """Wait until the file or folder is on disk, which must be before it gets its final name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
