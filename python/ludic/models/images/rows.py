"""The images of a micro-batch: where they are, their features, and the positions of their tokens.

A sample has image spans (`types.ImageSpan`). In a table of samples, the placeholders of an image
are `KEY + n`, n the number of the image in the batch: equal ids then mean equal images, and the
core plans prefix trees, chains and digests as for text. The model reads the placeholder itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.models.images.features import Features, find_tower_owner, join_features, select_arrays
from ludic.models.images.processor import find_processor
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.models.wrappers import unwrap_transformer
from ludic.types import ImageSpan

IMAGES = "images"
"""The column of a micro-batch with its `RowImages`."""
KEY = 2**30
"""Ids from here on are images; vocabularies are below it."""


def key_ids(ids: Sequence[int], spans: Sequence[ImageSpan], numbers: Mapping[str, int]) -> Any:
    """The ids with `KEY + number` in place of the placeholders of each image. The token at the
    begin of a span is its placeholder; other tokens in the span stay as they are.

    Example: ids [5, 9, 9, 6] with an image of number 2 at [1, 3) are [5, KEY + 2, KEY + 2, 6].
    """
    import numpy as np

    keyed = np.array(ids, dtype=np.int32)
    for digest, start, length in spans:
        part = keyed[start : start + length]
        part[part == part[0]] = KEY + numbers[digest]
    return keyed


@dataclass(frozen=True)
class RowImages:
    """The images of a micro-batch, in any layout.

    `features` are set for a pass through the model (`bind`).
    """

    placeholder_id: int
    spans: Sequence[tuple[ImageSpan, ...]]
    """The images of each sequence: of each row of a padded batch, of each sequence of a
    padding-free one, of each sample of trees in the order of the trees."""
    computed: Sequence[tuple[ImageSpan, ...]] | None = None
    """With trees: of each sample the images that the row has not got from an earlier sample. None:
    all."""
    features: Mapping[str, Features] | None = field(default=None, repr=False)
    order: Sequence[int] | None = None
    """With trees: which sequence of the batch is at each place of the trees. None: the same
    order."""

    @property
    def occurrences(self) -> list[str]:
        """The digest at each image of the row, in the order of the tokens that the model reads."""
        return [span.digest for spans in (self.spans if self.computed is None else self.computed) for span in spans]

    @property
    def distinct(self) -> list[str]:
        """The digests, each once, in the order of their first appearance."""
        return list(dict.fromkeys(self.occurrences))

    def bind(self, features: Mapping[str, Features]) -> RowImages:
        """The same with the features of its images."""
        return replace(self, features=features)

    def select(self, rows: slice) -> RowImages:
        """The images of some sequences of the batch, which are in no tree.

        Example: spans a b c with the order [2, 0, 1] belong to the sequences b c a."""
        spans = self.spans
        if self.order is not None:
            spans = [own for _, own in sorted(zip(self.order, spans, strict=True), key=lambda each: each[0])]
        return RowImages(self.placeholder_id, spans[rows], None, self.features)

    def keywords(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What a forward pass over the micro-batch `batch` needs beyond the keywords of text: the
        features; with M-RoPE the positions, [3, B, T] of padded rows, [3, 1, S] of a padding-free
        row, [3, 1, U] of trees; for models that ask, which tokens are placeholders; and in a row of
        several sequences, which see each other. Raises ConfigError if the features were not
        computed."""
        if not self.occurrences:
            return {}
        if self.features is None:
            raise ConfigError("the micro-batch has images whose features were not computed; bind them first (RowImages.bind)")
        trees: PrefixTrees | None = batch.get(PREFIX_TREES)
        ids: Tensor = batch["input_ids"] if trees is None else trees.input_ids
        is_image = (ids == self.placeholder_id).long()
        keywords = join_features([self.features[digest] for digest in self.occurrences])
        keywords |= {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if _takes(model, name)}
        is_row = trees is not None or "cu_seqlens" in batch
        blocks = find_image_blocks(model) if is_row else None
        if blocks is None and not has_image_positions(model):
            return keywords
        places: Tensor | None = None
        if trees is not None:
            places = torch.from_numpy(trees.arrays["places"])
            sequences = ids[0].cpu()[places].split(trees.lengths.tolist())
        else:
            sequences = ids[0].cpu().split(batch["cu_seqlens"].diff().tolist()) if is_row else ids.cpu().unbind()

        def lay_out(values: Sequence[Tensor]) -> Tensor:
            """[C, B, T] where the tokens are, from [C, T] of each sequence."""
            joined = torch.cat(list(values), dim=1)
            if places is not None:
                joined = joined.new_zeros(len(joined), ids.shape[1]).index_copy(1, places, joined)
            return joined.reshape(-1, *ids.shape).to(ids.device)

        if has_image_positions(model):
            pairs = zip(sequences, self.spans, strict=True)
            keywords["position_ids"] = lay_out([find_positions(model, each, spans) for each, spans in pairs])
        if blocks is not None:
            keywords[blocks] = lay_out([count_ahead(each == self.placeholder_id)[None] for each in sequences])[0, 0]
        return keywords


def count_ahead(is_image: Tensor) -> Tensor:
    """[T] how many tokens of an image follow each of its tokens, without a gap.

    Example: [0, 1, 1, 1, 0, 1] gives [0, 2, 1, 0, 0, 0]."""
    places = torch.arange(len(is_image))
    ends = torch.where(is_image, len(is_image), places).flip(0).cummin(0).values.flip(0)
    return torch.where(is_image, ends - places - 1, 0)


_BLOCKS = "_ludic_image_blocks"


def find_image_blocks(model: nn.Module) -> str | None:
    """The keyword of `packed_attention` for a model in which the tokens of an image see each other,
    as `note_image_blocks` was told. Without that, for a model that takes `token_type_ids`."""
    default = "tokens_ahead" if _takes(model, "token_type_ids") else None
    return getattr(unwrap_transformer(model), _BLOCKS, default)


def note_image_blocks(model: nn.Module, keyword: str | None) -> None:
    """Have `find_image_blocks` return this for the model and its copies."""
    object.__setattr__(unwrap_transformer(model), _BLOCKS, keyword)


def has_image_positions(model: nn.Module) -> bool:
    """Whether the positions of tokens depend on the images before them (M-RoPE)."""
    return hasattr(find_tower_owner(model), "get_rope_index")


def find_positions(model: nn.Module, ids: Tensor, spans: Sequence[ImageSpan]) -> Tensor:
    """[3, T] position ids of one sequence `ids` [T], on the CPU, by the own rule of a model that
    `has_image_positions`."""
    owner, processor, ids = find_tower_owner(model), find_processor(model), ids[None].cpu()
    assert processor is not None  # or there were no spans
    named = inspect.signature(owner.get_rope_index).parameters.keys()
    of_text = {"mm_token_type_ids": (ids == processor.placeholder_id).int(), "attention_mask": torch.ones_like(ids)}
    arrays = select_arrays(owner.get_rope_index, [processor.process(span.digest) for span in spans])
    positions: Tensor = owner.get_rope_index(ids, **{name: of_text[name] for name in of_text.keys() & named}, **arrays)[0]
    return positions[:, 0]


def _takes(model: nn.Module, keyword: str) -> bool:
    return keyword in inspect.signature(find_tower_owner(model).forward).parameters
