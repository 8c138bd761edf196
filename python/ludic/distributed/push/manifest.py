"""Whether weights fit a server: names as in its checkpoint, its shapes and its dtypes. All of this
is checked before a push begins.

A server that gets a tensor of another shape crashes; one that gets half of a fused layer serves a
mix of old and new weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludic.distributed.interfaces import WeightMetadata
from ludic.errors import PublishError, shorten_names
from ludic.models.names import REPLACED_PART, is_adapter, strip_peft_parts

if TYPE_CHECKING:
    from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
SHOWN_NAMES = 4
"""Weights that a message names."""


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
        """From a worker's answer to `ludic_manifest`. Raises PublishError if the worker found no
        checkpoint."""
        if answer.get("weights") is None:
            raise PublishError(
                f"{url} found no safetensors of its own model, so that nothing can be checked against it; start it from a folder or a "
                "downloaded model"
            )
        weights = {name: (tuple(weight["shape"]), str(weight["dtype"])) for name, weight in answer["weights"].items()}
        tied = bool(answer["tied"])
        if tied:
            weights.pop(HEAD, None)
        return cls(str(answer["dtype"]), tied, weights)


def checkpoint_names(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under their names in the checkpoint, without the prefixes of wrappers.

    Adapters are left out; the weights that they are merged into stay.
    `base_model.model.model.norm.weight` -> `model.norm.weight`, `layers.0.up.weight` ->
    `model.layers.0.up.weight`.
    """
    return {
        _checkpoint_name(name): tensor
        for name, tensor in state_dict.items()
        if not is_adapter(name) and REPLACED_PART not in name
    }


def _checkpoint_name(name: str) -> str:
    name = strip_peft_parts(name).replace("model.model.", "model.")
    return f"model.{name}" if name.startswith("layers.") else name


def cast_to_server(weights: Mapping[str, Tensor], manifest: ServerManifest, *, partial: bool) -> dict[str, Tensor]:
    """The weights in the server's dtypes, sorted by name. Raises PublishError for weights that do
    not fit."""
    import torch

    weights = without_tied_head(weights, manifest)
    check_fit(
        [{"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in weights.items()],
        manifest,
        partial=partial,
    )
    return {name: weights[name].detach().to(getattr(torch, manifest.weights[name][1])).contiguous() for name in sorted(weights)}


def without_tied_head(weights: Mapping[str, Tensor], manifest: ServerManifest) -> Mapping[str, Tensor]:
    """The weights without a head that the server ties to the embedding. Raises PublishError if
    this head is not equal to the embedding."""
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
    """Raise PublishError unless every name is one of the server's, with its shape and a dtype of
    the same kind, and, unless `partial`, all of the server's weights are there."""
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
                f"weight {name!r} is {entry['dtype']}, the server holds {dtype}; a quantised checkpoint cannot be published to"
            )
    missing = sorted(set(manifest.weights) - set(entries))
    if missing and not partial:
        raise PublishError(
            f"{shorten_names(missing, SHOWN_NAMES)} of the server's model are missing in the push; publish every weight, "
            "or pass partial=True if they are frozen and the server's own are right"
        )


def _is_floating(dtype: str) -> bool:
    name = dtype.removeprefix("torch.")
    return name.startswith(("float16", "float32", "float64", "bfloat"))
