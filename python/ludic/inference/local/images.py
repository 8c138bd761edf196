"""The images of a batch that is decoded: which prompts are equal, the features of their images, and
what the model gets with the tokens.

Shapes: R prompts that are read, P tokens of the longest.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ludic.inference.local.prefixes import PrefixCache
from ludic.models.images.features import Features, encode_images, join_features
from ludic.models.images.processor import find_processor
from ludic.models.images.rows import find_image_blocks, find_positions, has_image_positions, key_ids
from ludic.models.wrappers import count_vocabulary, unwrap_transformer
from ludic.types import ImageSpan

PASS_PATCHES = 2**14
"""Patches after which a pass of the vision tower ends."""


def list_banned(model: nn.Module) -> list[int]:
    """Tokens that are never drawn: the placeholders of a model with a processor."""
    processor = find_processor(model)
    return [] if processor is None else [token for token in processor.banned_ids if token < count_vocabulary(model)]


class BatchImages:
    """The images of one batch, for a model with a processor."""

    def __init__(self, model: nn.Module, known: PrefixCache | None) -> None:
        """`known` has numbers and features of earlier batches, and is cleared in place."""
        processor = find_processor(model)
        assert processor is not None
        self._model, self._processor = model, processor
        self._numbers: dict[str, int] = {} if known is None else known.numbers
        self._features: dict[str, Features] = {} if known is None else known.features
        takes = inspect.signature(unwrap_transformer(model).forward).parameters
        self._kinds = [name for name in ("token_type_ids", "mm_token_type_ids") if name in takes]

    @property
    def see_each_other(self) -> bool:
        """Whether a token of an image may see later ones of it. Such a model reads an image that a
        turn brings with all that is before it: its mask covers the new tokens alone."""
        asks = "mm_token_type_ids" in self._kinds and not has_image_positions(self._model)
        return asks or find_image_blocks(self._model) is not None

    def key(self, ids: list[int], images: Sequence[ImageSpan]) -> list[int]:
        """The ids of a prompt with its images' numbers: equal prompts have equal images."""
        for digest, *_ in images:
            self._numbers.setdefault(digest, len(self._numbers))
        keyed: list[int] = key_ids(ids, images, self._numbers).tolist() if images else ids
        return keyed

    def encode(self, digests: Sequence[str]) -> list[Features]:
        """The features of each image. One that is not known is computed once."""
        missing = [digest for digest in dict.fromkeys(digests) if digest not in self._features]
        images = [self._processor.process(digest) for digest in missing]
        patches = accumulate(image.num_patches for image in images)
        for _, part in groupby(zip(patches, missing, images, strict=True), key=lambda each: each[0] // PASS_PATCHES):
            _, names, together = zip(*part, strict=True)
            self._features.update(zip(names, encode_images(self._model, together), strict=True))
        for digest in digests:  # the last are dropped last
            self._features[digest] = self._features.pop(digest)
        return [self._features[digest] for digest in digests]

    def keywords(self, ids: Tensor, features: Sequence[Features]) -> dict[str, Any]:
        """What the model gets beside the ids [R, P], whose images have these features, in order."""
        is_image = (ids == self._processor.placeholder_id).long()
        return {**dict.fromkeys(self._kinds, is_image), **(join_features(features) if features else {})}

    def positions(self, prompts: Sequence[tuple[Sequence[int], Sequence[ImageSpan], int]], width: int) -> Tensor | None:
        """[3, R, P] positions of the tokens of each prompt (ids, images, first token that is read),
        padded left with zeros to P = `width`. None for a model whose positions count tokens.

        Example: the last three positions [0, 1, 1], [0, 1, 1], [0, 1, 2] of a prompt and a width of
        4 are [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 2].
        """
        if not has_image_positions(self._model):
            return None
        found = [find_positions(self._model, torch.tensor(ids), images)[:, start:] for ids, images, start in prompts]
        padded = [nn.functional.pad(each, (width - each.shape[1], 0)) for each in found]
        return torch.stack(padded, dim=1).to(next(self._model.parameters()).device)
