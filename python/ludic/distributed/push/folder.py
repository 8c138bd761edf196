"""Writes weights as folders of safetensors for servers to read, and fingerprints such folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.distributed.push.manifest import EMBEDDING, HEAD, ServerManifest, check_fit, drop_tied_head
from ludic.errors import ConfigError, PublishError
from ludic.files.folders import delete_folder, replace_folder
from ludic.inference.publishing import WeightSource

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files that a server needs beside the weights: config and tokenizer."""


class VersionFolders:
    """Writes one folder for each version, complete or not at all, and keeps the newest ones.

    >>> VersionFolders("/shared/policy").write(weights, version=17)
    PosixPath('/shared/policy/version_17')
    """

    def __init__(self, root: str | Path, *, keep: int = 2, model: str | Path | None = None) -> None:
        """`keep` is the number of versions to keep. `model` is a folder whose config and tokenizer
        are copied beside the weights."""
        if keep < 1:
            raise ConfigError(f"keep ({keep}) must be >= 1: the version that is served must not be deleted")
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
        return self.fill(version, lambda folder: save_file(on_host, folder / WEIGHTS_FILE, metadata={"format": "pt"}))

    def write_stream(self, weights: WeightSource, version: str | int | None) -> Path:
        """`write` for weights that are gathered meanwhile; one tensor is in memory at a time."""
        from ludic.models.tensor_files import TensorFileWriter

        def write(folder: Path) -> None:
            with TensorFileWriter(folder / WEIGHTS_FILE, weights.describe()) as file:
                for name, tensor in weights:
                    file.write(name, tensor)

        return self.fill(version, write)

    def fill(self, version: str | int | None, write: Callable[[Path], object]) -> Path:
        """Have `write` put files into a new folder for this version, and return the folder's final
        path."""
        target = self.root / f"version_{version}"
        if target.parent != self.root:
            raise ConfigError(f"version ({version}) must be a valid folder name, without slashes")
        with replace_folder(target) as folder:
            self._copy_model_files(folder)
            write(folder)
        self._written = [*(path for path in self._written if path != target), target]
        return target

    def _copy_model_files(self, folder: Path) -> None:
        if self.model is None:
            return
        for pattern in MODEL_FILES:
            for path in self.model.glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copyfile(path, folder / path.name)

    def prune(self, served: Path) -> None:
        """Delete the oldest versions that this process wrote until `keep` are left, but never the
        one that is served."""
        while len(self._written) > self.keep:
            oldest = self._written.pop(0)
            if oldest != served:
                delete_folder(oldest)


def fingerprint_folder(folder: Path, manifest: ServerManifest, *, partial: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprints of the weights in a folder: as stored, and in the server's dtypes. Reads one
    tensor at a time.

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
        tied_heads = set(ends) - set(drop_tied_head(dict(checkpoint.read(ends)), manifest))
        names = sorted(set(checkpoint.weights) - tied_heads)
        entries = ((name, checkpoint.weights[name]) for name in names)
        check_fit([{"name": n, "dtype": w["dtype"], "shape": w["shape"]} for n, w in entries], manifest, partial=partial)
        for name, tensor in checkpoint.read(names):
            stored[name] = tensor_fingerprint(tensor)
            served[name] = tensor_fingerprint(tensor.to(getattr(torch, manifest.weights[name][1])))
    except (WeightTransferError, SafetensorError, OSError, ValueError, KeyError) as error:
        raise PublishError(
            f"{folder} is not a complete checkpoint ({error}); write all of it before the servers are told to read it"
        ) from error
    return stored, served
