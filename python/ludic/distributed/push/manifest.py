"""What fits a server: names as its checkpoint has them, its shapes and dtypes. All of it is settled
before a push begins.

A server that is sent a tensor of another shape ends; one that is sent half of a fused layer serves
a mix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludic.distributed.interfaces import WeightMetadata
from ludic.errors import PublishError
from ludic.models.names import REPLACED_PART, is_adapter, unwrapped_name

if TYPE_CHECKING:
    from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class ServerManifest:
    """The weights of a server's model."""

    dtype: str
    """What the server computes in, such as `bfloat16`."""
    tied: bool
    """The head is the embedding, and is not sent."""
    weights: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of each, by its name in the checkpoint."""

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], url: str) -> ServerManifest:
        """Of what a worker answered to `ludic_manifest`."""
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
    """The weights under the names of the checkpoint: adapters left out (what they are merged
    into stays), wrappers' prefixes too."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if is_adapter(name) or REPLACED_PART in name:
            continue
        renamed[_checkpoint_name(name)] = tensor
    return renamed


def _checkpoint_name(name: str) -> str:
    name = unwrapped_name(name).replace("model.model.", "model.")
    return f"model.{name}" if name.startswith("layers.") else name


def fitted(weights: Mapping[str, Tensor], manifest: ServerManifest, *, partial: bool) -> dict[str, Tensor]:
    """The weights in the server's dtypes, in the order of their names. Raises PublishError for
    what does not fit."""
    import torch

    weights = without_tied_head(weights, manifest)
    check_fit(
        [{"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in weights.items()],
        manifest,
        partial=partial,
    )
    return {name: weights[name].detach().to(getattr(torch, manifest.weights[name][1])).contiguous() for name in sorted(weights)}


def without_tied_head(weights: Mapping[str, Tensor], manifest: ServerManifest) -> Mapping[str, Tensor]:
    """The weights that are sent. Raises PublishError where a head that is left out is not the
    embedding."""
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
    """Every name is the server's, with its shape and a dtype of the same kind; unless `partial`,
    none is missing."""
    given = {entry["name"]: entry for entry in metadata}
    if not given:
        raise PublishError("there is no weight to publish; is every parameter frozen?")
    unknown = sorted(set(given) - set(manifest.weights))
    if unknown:
        raise PublishError(f"the server's model has no weights {_some(unknown)}; serve the model that is trained")
    for name, entry in given.items():
        shape, dtype = manifest.weights[name]
        if tuple(entry["shape"]) != shape:
            raise PublishError(
                f"weight {name!r} has shape {tuple(entry['shape'])}, the server's has {shape}; serve the model that is trained"
            )
        if _is_floating(entry["dtype"]) != _is_floating(dtype):
            raise PublishError(
                f"weight {name!r} is {entry['dtype']}, the server holds {dtype}; a quantised checkpoint cannot be published to"
            )
    missing = sorted(set(manifest.weights) - set(given))
    if missing and not partial:
        raise PublishError(
            f"{_some(missing)} of the server's model are missing in the push; publish every weight, or pass partial=True if they are "
            "frozen and the server's own are right"
        )


def _is_floating(dtype: str) -> bool:
    name = dtype.removeprefix("torch.")
    return name.startswith(("float16", "float32", "float64", "bfloat"))


def _some(names: list[str]) -> str:
    return f"{names[:4]} ({len(names)} in all)" if len(names) > 4 else str(names)
