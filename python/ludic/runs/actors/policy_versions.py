"""The versions of the policy that actors sample with: one folder for each in the run's folder.

    policy/version_12/model.safetensors    the weights after 12 steps, adapters merged

The trainer writes a version before it announces it. A folder is there whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from ludic.distributed.push.manifest import WEIGHTS_FILE, VersionFolders
from ludic.errors import PublishError
from ludic.files.atomic import clear_unfinished, delete_folder
from ludic.inference.client import Publisher, Version, WeightSource

_NAME = re.compile(r"version_(\d+)")


class PolicyVersions(Publisher):
    """Publishes to a folder that actors read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders = VersionFolders(root)

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        self._folders.write(state_dict, version)

    def publish_stream(self, weights: WeightSource, version: Version = None) -> None:
        """`publish`, one tensor at a time."""
        self._folders.write_stream(weights, version)

    def begin(self, step: int) -> None:
        """Delete versions after `step`, from which the run continues, and what a killed trainer
        left half written."""
        self.root.mkdir(parents=True, exist_ok=True)
        clear_unfinished(self.root)
        self.keep_only([(0, step)])

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Delete the versions that are in none of the ranges `(first, last)`, both included."""
        retained = list(ranges)
        for number in list_versions(self.root):
            if not any(first <= number <= last for first, last in retained):
                delete_folder(_folder(self.root, number))


def list_versions(root: Path) -> list[int]:
    """The versions in the folder, in order."""
    names = (_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in names if match is not None)


def read_version(root: Path, number: int, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a version for `model`, by name. Raises FileNotFoundError if there is no such
    version, PublishError if it is not one of this model."""
    path = _folder(root, number) / WEIGHTS_FILE
    try:
        weights = load(path.read_bytes())
    except SafetensorError as error:
        raise PublishError(f"{path} is damaged: {error}; resume the run, which writes it again") from error
    missing = [name for name, _ in model.named_parameters() if name not in weights]
    if missing:
        raise PublishError(f"{path} lacks {missing[0]} and {len(missing) - 1} other weights of this model; train all of them")
    return weights


def _folder(root: Path, number: int) -> Path:
    return root / f"version_{number}"
