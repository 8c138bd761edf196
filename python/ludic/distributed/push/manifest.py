"""Checks that weights fit a server, before a push begins: names as in its checkpoint, shapes and
dtypes.

A server that gets a tensor of another shape crashes, and one that gets half of a fused layer serves
a mix of old and new weights.

Weights are also written as folders of safetensors for servers to read, with fingerprints.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ludic.distributed.interfaces import WeightMetadata, describe_weights
from ludic.errors import ConfigError, PublishError, check_value, shorten_names
from ludic.files.atomic import delete_folder, replace_folder
from ludic.inference.client import Weights, WeightSource
from ludic.models.names import REPLACED_PART, is_adapter, strip_peft_parts

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
SHOWN_NAMES = 4
"""How many weights a message names."""


@dataclass(frozen=True)
class ServerManifest:
    """The weights of a server's model."""

    dtype: str
    """The dtype that the server computes in, such as `bfloat16`."""
    tied: bool
    """Whether the head is the embedding. A tied head is not sent."""
    weights: Mapping[str, tuple[tuple[int, ...], str]]
    """Name in the checkpoint -> shape and dtype."""
    config: Mapping[str, Any] | None = field(default=None, compare=False)
    """The content of the model's config.json."""

    def rename(self, weights: Mapping[str, T]) -> dict[str, T]:
        """The weights under their names in the checkpoint, if the model's own are others."""
        renamed = {} if self.weights.keys() >= weights.keys() else self._renamed
        return {renamed.get(name, name): weight for name, weight in weights.items()}

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        from ludic.models.loading import find_stored_names

        return find_stored_names(self.config or {}, self.weights)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], url: str) -> ServerManifest:
        """Read a worker's answer to `ludic_manifest`. Raises PublishError if the worker found no
        checkpoint."""
        if answer.get("weights") is None:
            raise PublishError(f"{url} found no safetensors of its model; start it from a folder or a downloaded model")
        weights = {name: (tuple(weight["shape"]), str(weight["dtype"])) for name, weight in answer["weights"].items()}
        tied = bool(answer["tied"])
        if tied:
            weights.pop(HEAD, None)
        return cls(str(answer["dtype"]), tied, weights, answer.get("config"))


def rename_to_checkpoint(state_dict: Weights) -> dict[str, Tensor]:
    """The weights under their names in the checkpoint, without the prefixes that wrappers add.

    Adapters are left out; the weights into which they are merged stay. Examples:
    `base_model.model.model.norm.weight` -> `model.norm.weight`, `layers.0.up.weight` ->
    `model.layers.0.up.weight`.
    """
    return {name: tensor for old, tensor in state_dict.items() if (name := find_checkpoint_name(old)) is not None}


def find_checkpoint_name(name: str) -> str | None:
    """The name in the checkpoint; None for adapters and what they replace."""
    if is_adapter(name) or REPLACED_PART in name:
        return None
    name = strip_peft_parts(name).replace("model.model.", "model.")
    return f"model.{name}" if name.startswith("layers.") else name


def cast_to_server(weights: Weights, manifest: ServerManifest, *, partial: bool) -> dict[str, Tensor]:
    """The weights in the server's dtypes, sorted by name. Raises PublishError for weights that do
    not fit."""
    import torch

    weights = drop_tied_head(manifest.rename(weights), manifest)
    check_fit(describe_weights(weights), manifest, partial=partial)
    return {name: weights[name].detach().to(getattr(torch, manifest.weights[name][1])).contiguous() for name in sorted(weights)}


class StreamToServer:
    """Weights on their way from several processes to servers: renamed and cast as `cast_to_server`
    does, one after the other. Raises PublishError immediately for weights that do not fit."""

    def __init__(self, weights: WeightSource, manifest: ServerManifest, *, partial: bool) -> None:
        self._weights, self._manifest = weights, manifest
        self.record: Callable[[str, Tensor], None] | None = None
        """Is called with each tensor before it is yielded."""
        check_fit(describe_weights(self._renamed()), manifest, partial=partial)

    def _renamed(self) -> dict[str, Tensor]:
        return self._manifest.rename(rename_to_checkpoint(self._weights.describe()))

    def describe(self) -> dict[str, Tensor]:
        return {name: self._cast(name, like) for name, like in self._renamed().items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for old, tensor in self._weights:
            name = find_checkpoint_name(old)
            if name is not None:
                [name] = self._manifest.rename({name: tensor})
                cast = self._cast(name, tensor)
                if self.record is not None:
                    self.record(name, cast)
                yield name, cast

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        import torch

        return tensor.detach().to(getattr(torch, self._manifest.weights[name][1])).contiguous()


def has_tied_head(weights: WeightSource, manifest: ServerManifest) -> bool:
    """Whether the weights have a head that the server ties to the embedding: it must be compared
    with the embedding, which needs both in memory."""
    return manifest.tied and HEAD in rename_to_checkpoint(weights.describe())


def drop_tied_head(weights: Weights, manifest: ServerManifest) -> Weights:
    """Drop the head if the server ties it to the embedding. Raises PublishError if the two
    differ."""
    if not manifest.tied or HEAD not in weights:
        return weights
    import torch

    embeddings = [tensor for name, tensor in weights.items() if name.endswith(EMBEDDING)]
    if embeddings and not torch.equal(embeddings[0], weights[HEAD]):
        raise PublishError(f"{HEAD} differs from the embedding; serve the model with tie_word_embeddings=false")
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


def check_fit(metadata: Iterable[WeightMetadata], manifest: ServerManifest, *, partial: bool) -> None:
    """Raise PublishError unless the server has a weight of each name, with the same shape and kind
    of dtype (floating or not). Unless `partial`, all of the server's weights must be included."""
    entries = {entry["name"]: entry for entry in metadata}
    if not entries:
        raise PublishError("there is no weight to publish; is every parameter frozen?")
    unknown = sorted(set(entries) - set(manifest.weights))
    if unknown:
        raise PublishError(f"the server has no weights {shorten_names(unknown, SHOWN_NAMES)}; serve the model that is trained")
    for name, entry in entries.items():
        shape, dtype = manifest.weights[name]
        if tuple(entry["shape"]) != shape:
            raise PublishError(f"weight {name!r} has shape {tuple(entry['shape'])}, the server's {shape}; serve the same model")
        if _is_floating(entry["dtype"]) != _is_floating(dtype):
            raise PublishError(f"weight {name!r} is {entry['dtype']}, the server's is {dtype}; serve one that is not quantised")
    missing = sorted(set(manifest.weights) - set(entries))
    if missing and not partial:
        raise PublishError(f"{shorten_names(missing, SHOWN_NAMES)} are missing in the push; publish all, or pass partial=True")


def _is_floating(dtype: str) -> bool:
    name = dtype.removeprefix("torch.")
    return name.startswith(("float16", "float32", "float64", "bfloat"))


WEIGHTS_FILE = "model.safetensors"
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files that a server needs in addition to the weights: config and tokenizer."""


class VersionFolders:
    """Writes one folder for each version, complete or not at all, and keeps the newest ones.

    >>> VersionFolders("/shared/policy").write(weights, version=17)
    PosixPath('/shared/policy/version_17')
    """

    def __init__(self, root: str | Path, *, keep: int = 2, model: str | Path | None = None) -> None:
        """`keep` is the number of versions to keep. `model` is a folder whose config and tokenizer
        are copied next to the weights."""
        check_value("keep", keep, "the version that is served must not be deleted", least=1)
        self.root = Path(root).resolve()
        self.keep = keep
        self.model = None if model is None else Path(model)
        if self.model is not None and not (self.model / "config.json").exists():
            raise ConfigError(f"{self.model} has no config.json; give the folder of the model that is served")
        self._written: list[Path] = []

    def write(self, weights: Weights, version: str | int | None) -> Path:
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
            copied = [] if self.model is None else [path for pattern in MODEL_FILES for path in self.model.glob(pattern)]
            for path in copied:
                if not path.name.endswith(".index.json"):
                    shutil.copyfile(path, folder / path.name)
            write(folder)
        self._written = [*(path for path in self._written if path != target), target]
        return target

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
        raise PublishError(f"{folder} is not a complete checkpoint ({error}); write all of it first") from error
    return stored, served
