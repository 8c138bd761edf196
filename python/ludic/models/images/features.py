"""The features of images: the output of the vision tower and its projector, computed outside of
the language model and passed to it as `mm_encoder_outputs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError, check_value
from ludic.models.images.processor import ProcessedImage
from ludic.models.wrappers import has_adapters, unwrap_transformer

TOWERS = ("frozen", "projector", "trained")
MERGERS = ("merger", "deepstack_merger_list")
"""Projectors that are parts of their towers (Qwen-VL, GLM-V)."""


WHOLE_ENCODER = "_ludic_image_features"
"""What a sharded model has in place of `get_image_features`: it makes weights whole."""


@dataclass(frozen=True)
class Features:
    """What the language model gets of one image."""

    tensors: tuple[Tensor, ...]
    """[n, D] each, one vector for each placeholder. The first takes its place; others are added in
    later layers (Qwen3-VL)."""
    form: tuple[Any, Any] = field(repr=False)
    """(class, fields) of the model's container, with a `_Part` in place of each tensor."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Features:
        """The same with other tensors: leaves, or gradients."""
        return replace(self, tensors=tuple(tensors))


@dataclass(frozen=True)
class _Part:
    """The place of a tensor in the model's container."""

    number: int
    """Of the tensor in `Features.tensors`."""
    in_list: bool
    """Whether the model expects a list with one tensor for each image, not one of all."""


def encode_images(model: nn.Module, images: Sequence[ProcessedImage]) -> list[Features]:
    """The features of each image. Images whose arrays fit together are one pass of the tower: their
    arrays are concatenated in dimension 0, without padding. Raises ConfigError if an image has more
    or fewer features than placeholders.

    Example: `pixel_values` [36, 96] and [64, 96] of two images are one pass over [100, 96];
    [1, 3, 28, 28] and [1, 3, 28, 56] are two passes.
    """
    features: dict[int, Features] = {}
    for places in divide_in_passes(images):
        features |= zip(places, _encode(model, [images[place] for place in places]), strict=True)
    return [features[place] for place in range(len(images))]


def divide_in_passes(images: Sequence[ProcessedImage]) -> list[list[int]]:
    """The places of the images whose arrays fit together, for each pass of the tower."""
    passes: dict[Any, list[int]] = {}
    for place, image in enumerate(images):
        shapes = tuple((name, array.dtype, tuple(array.shape[1:])) for name, array in sorted(image.arrays.items()))
        passes.setdefault(shapes, []).append(place)
    return list(passes.values())


def join_features(features: Sequence[Features]) -> dict[str, Any]:
    """The keyword `mm_encoder_outputs` for images in the order of their placeholders. A new object
    for each call: models write into it."""
    kind, fields = features[0].form
    return {"mm_encoder_outputs": {"image": kind(**_fill(fields, [each.tensors for each in features]))}}


def find_tower_owner(model: nn.Module) -> Any:
    """The module that has `get_image_features`: the model without its output layer, or itself."""
    inner = unwrap_transformer(model)
    base = getattr(inner, "model", inner)
    return base if hasattr(base, "get_image_features") else inner


def find_image_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name that belong to the tower and the projector of a model, neither to its
    language model nor to its head; {} for a model that reads text alone."""
    inner, owner = unwrap_transformer(model), find_tower_owner(model)
    if not hasattr(owner, "get_image_features"):
        return {}
    of_text = (inner.get_decoder(), inner.get_input_embeddings(), inner.get_output_embeddings())
    left_out = {id(module) for part in of_text if part is not None for module in part.modules()}
    within = {id(module) for module in owner.modules()} - left_out
    return {name: module for name, module in inner.named_modules() if id(module) in within}


def set_trained_parts(model: nn.Module, tower: str) -> None:
    """Choose which weights are trained that make the features of images. `tower` is one of
    `TOWERS`: `frozen` trains none, `trained` all, `projector` those between the tower and the
    language model. The language model stays as it is. Raises ConfigError for a model without a
    projector of its own, and with adapters, beside which no other weights are saved."""
    check_value("images.tower", tower, choices=TOWERS)
    if has_adapters(model):
        if tower != "frozen":
            raise ConfigError(
                f"images.tower ({tower}) trains weights that are no adapters and would not be saved; set it to frozen"
            )
        return
    encoder = unwrap_transformer(model).get_encoder(modality="image")
    mergers = {id(module) for name, module in encoder.named_modules() if name.split(".")[0] in MERGERS}
    of_tower = {id(module) for module in encoder.modules()} - mergers
    count = 0
    for module in find_image_modules(model).values():
        is_trained = tower == "trained" or (tower == "projector" and id(module) not in of_tower)
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(is_trained)
            count += is_trained
    if tower != "frozen" and not count:
        raise ConfigError(
            f"images.tower ({tower}): {type(unwrap_transformer(model)).__name__} has no such weights; set it to frozen"
        )


def select_arrays(function: Any, images: Sequence[ProcessedImage]) -> dict[str, Tensor]:
    """The arrays of the images that a method of a model names, concatenated in dimension 0."""
    named = inspect.signature(function).parameters.keys() & images[0].arrays.keys() if images else set()
    return {name: torch.cat([image.arrays[name] for image in images]) for name in sorted(named)}


def _encode(model: nn.Module, images: Sequence[ProcessedImage]) -> list[Features]:
    owner, counts = find_tower_owner(model), [image.num_placeholders for image in images]
    kind = next(each.dtype for each in owner.parameters() if each.is_floating_point())
    arrays = {
        name: array.to(owner.device, kind if array.is_floating_point() else None)
        for name, array in select_arrays(owner.get_image_features, images).items()
    }
    output = getattr(owner, WHOLE_ENCODER, owner.get_image_features)(**arrays, return_dict=True)
    parts: list[Sequence[Tensor]] = []
    fields = {"pooler_output": _take_apart(output.get("pooler_output"), counts, parts)}
    if (layers := output.get("deepstack_features")) is not None:
        fields["deepstack_features"] = [_take_apart(layer, counts, parts) for layer in layers]
    if not parts:
        fields["last_hidden_state"] = _take_apart(output.get("last_hidden_state"), counts, parts)
    fields = {name: form for name, form in fields.items() if form is not None}
    if not parts:
        found = output.get("pooler_output", output.get("last_hidden_state"))
        found = found if isinstance(found, list | tuple) else [found]
        shapes = ", ".join(str(tuple(each.shape)) for each in found if isinstance(each, Tensor))
        raise ConfigError(
            f"{type(owner).__name__} makes features {shapes} of {len(images)} images with {counts} placeholders; "
            "the processor is not the model's"
        )
    return [Features(tuple(part[place] for part in parts), (type(output), fields)) for place in range(len(images))]


def _take_apart(value: Any, counts: Sequence[int], parts: list[Sequence[Tensor]]) -> Any:
    """`value` with a `_Part` in place of what has a vector for each of the images' `counts` of
    placeholders; adds to `parts` the tensor of each image. Other tensors are left out.

    Example: for counts [4, 8], a tensor [3, 4, 64] is a part, of [4, 64] and [8, 64]; so is a list
    of these two, and in (5, list) the second."""
    if isinstance(value, list | tuple) and not all(isinstance(each, Tensor) for each in value):
        return type(value)(_take_apart(each, counts, parts) for each in value)
    whole = [value] if isinstance(value, Tensor) else value
    if not isinstance(whole, list | tuple) or not whole or not all(each.ndim for each in whole):
        return None if isinstance(value, Tensor) else value
    rows = [each.reshape(-1, each.shape[-1]) for each in whole]
    if sum(map(len, rows)) != sum(counts):
        return None
    parts.append(rows if [len(each) for each in rows] == counts else torch.cat(rows).split(list(counts)))
    return _Part(len(parts) - 1, not isinstance(value, Tensor))


def _fill(form: Any, tensors: Sequence[tuple[Tensor, ...]]) -> Any:
    """`form` with the tensors of the images in place of its parts."""
    if isinstance(form, _Part):
        of_images = [each[form.number] for each in tensors]
        return of_images if form.in_list else torch.cat(of_images)
    if isinstance(form, dict):
        return {name: _fill(each, tensors) for name, each in form.items()}
    return type(form)(_fill(each, tensors) for each in form) if isinstance(form, list | tuple) else form
