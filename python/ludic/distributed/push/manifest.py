"""Checks that weights fit a server, before a push begins: names as in its checkpoint, shapes and
dtypes.

A server that gets a tensor of another shape crashes, and one that gets half of a fused layer serves
a mix of old and new weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludic.distributed.interfaces import WeightMetadata
from ludic.errors import PublishError, shorten_names
from ludic.inference.publishing import WeightSource
from ludic.models.names import REPLACED_PART, is_adapter, strip_peft_parts

if TYPE_CHECKING:
    from torch import Tensor

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

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], url: str) -> ServerManifest:
        """Read a worker's answer to `ludic_manifest`. Raises PublishError if the worker found no
        checkpoint."""
        if answer.get("weights") is None:
            raise PublishError(
                f"{url} found no safetensors of its own model, so a push cannot be checked against it; start it from a folder or a "
                "downloaded model"
            )
        weights = {name: (tuple(weight["shape"]), str(weight["dtype"])) for name, weight in answer["weights"].items()}
        tied = bool(answer["tied"])
        if tied:
            weights.pop(HEAD, None)
        return cls(str(answer["dtype"]), tied, weights)


def rename_to_checkpoint(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def cast_to_server(weights: Mapping[str, Tensor], manifest: ServerManifest, *, partial: bool) -> dict[str, Tensor]:
    """The weights in the server's dtypes, sorted by name. Raises PublishError for weights that do
    not fit."""
    import torch

    weights = drop_tied_head(weights, manifest)
    check_fit(
        [{"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in weights.items()],
        manifest,
        partial=partial,
    )
    return {name: weights[name].detach().to(getattr(torch, manifest.weights[name][1])).contiguous() for name in sorted(weights)}


class StreamToServer:
    """Weights on their way from several processes to servers: renamed and cast as `cast_to_server`
    does, one after the other. Raises PublishError at once for weights that do not fit."""

    def __init__(self, weights: WeightSource, manifest: ServerManifest, *, partial: bool) -> None:
        self._weights, self._manifest = weights, manifest
        check_fit(
            [{"name": name, "dtype": str(like.dtype), "shape": list(like.shape)} for name, like in self._renamed().items()],
            manifest,
            partial=partial,
        )

    def _renamed(self) -> dict[str, Tensor]:
        return rename_to_checkpoint(self._weights.describe())

    def describe(self) -> dict[str, Tensor]:
        return {name: self._cast(name, like) for name, like in self._renamed().items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for old, tensor in self._weights:
            name = find_checkpoint_name(old)
            if name is not None:
                yield name, self._cast(name, tensor)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        import torch

        return tensor.detach().to(getattr(torch, self._manifest.weights[name][1])).contiguous()


def has_tied_head(weights: WeightSource, manifest: ServerManifest) -> bool:
    """Whether the weights have a head that the server ties to the embedding: it must be compared
    with that, which needs both at once."""
    return manifest.tied and HEAD in rename_to_checkpoint(weights.describe())


def drop_tied_head(weights: Mapping[str, Tensor], manifest: ServerManifest) -> Mapping[str, Tensor]:
    """Drop the head if the server ties it to the embedding. Raises PublishError if the two
    differ."""
    if not manifest.tied or HEAD not in weights:
        return weights
    import torch

    embeddings = [tensor for name, tensor in weights.items() if name.endswith(EMBEDDING)]
    if embeddings and not torch.equal(embeddings[0], weights[HEAD]):
        raise PublishError(
            f"{HEAD} differs from the embedding, and the server's config has tie_word_embeddings=true; train a tied head, or serve "
            "a checkpoint whose config has tie_word_embeddings=false"
        )
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


def check_fit(metadata: Iterable[WeightMetadata], manifest: ServerManifest, *, partial: bool) -> None:
    """Raise PublishError unless the server has a weight of each name, with the same shape and kind
    of dtype (floating or not). Unless `partial`, all of the server's weights must be included."""
    entries = {entry["name"]: entry for entry in metadata}
    if not entries:
        raise PublishError("there is no weight to publish; is every parameter frozen?")
    unknown = sorted(set(entries) - set(manifest.weights))
    if unknown:
        raise PublishError(
            f"the server's model has no weights {shorten_names(unknown, SHOWN_NAMES)}; serve the model that is trained"
        )
    for name, entry in entries.items():
        shape, dtype = manifest.weights[name]
        if tuple(entry["shape"]) != shape:
            raise PublishError(
                f"weight {name!r} has shape {tuple(entry['shape'])}, the server's has {shape}; serve the model that is trained"
            )
        if _is_floating(entry["dtype"]) != _is_floating(dtype):
            raise PublishError(
                f"weight {name!r} is {entry['dtype']}, the server's is {dtype}; publishing to a quantised checkpoint is not supported"
            )
    missing = sorted(set(manifest.weights) - set(entries))
    if missing and not partial:
        raise PublishError(
            f"{shorten_names(missing, SHOWN_NAMES)} of the server's model are missing in the push; publish every weight, "
            "or pass partial=True if they are frozen and the server has the right values"
        )


def _is_floating(dtype: str) -> bool:
    name = dtype.removeprefix("torch.")
    return name.startswith(("float16", "float32", "float64", "bfloat"))
