"""The images of a macro-batch, and the ids that stand for them in its table (`models.images.rows`).
A micro-batch has placeholders again, and its `RowImages`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError
from ludic.models.images.rows import KEY, RowImages, key_ids
from ludic.training.types import SAWItem
from ludic.types import ImageSpan, read_spans, stored


@dataclass(frozen=True)
class SampleImages:
    """The images of N samples.

    Example: two samples with the ids [5, 9, 9, 6], of which [1, 3) is the image "a" in the first
    and "b" in the second, have the keyed ids [5, KEY, KEY, 6] and [5, KEY + 1, KEY + 1, 6].
    """

    placeholder_id: int
    digests: tuple[str, ...]
    """The images by their number, in the order of their first appearance."""
    spans: Sequence[tuple[ImageSpan, ...]]
    """[N] the images of each sample."""

    @classmethod
    def of_items(cls, items: Sequence[SAWItem]) -> SampleImages:
        """Raises DataError for a span outside of the ids, and for samples with different
        placeholders."""
        digests: dict[str, None] = {}
        placeholders: dict[int, int] = {}
        for row, item in enumerate(items):
            ids = stored(item, "input_ids") if item.images else ()
            for digest, start, _ in read_spans(item.images, len(ids)):
                digests[digest] = None
                placeholders.setdefault(int(ids[start]), row)
        if len(placeholders) > 1:
            (one, first), (other, row), *_ = placeholders.items()
            raise DataError(
                f"an image of sample {first} begins with token {one}, of sample {row} with {other}; both must be placeholders"
            )
        return cls(next(iter(placeholders), 0), tuple(digests), [item.images for item in items])

    def key(self, items: Sequence[SAWItem]) -> list[SAWItem]:
        """The samples with keyed ids."""
        numbers, keyed = {digest: number for number, digest in enumerate(self.digests)}, list(items)
        for row, item in enumerate(items):
            if item.images:
                ids, attention, mask = (stored(item, name) for name in ("input_ids", "attention_mask", "action_mask"))
                ids = key_ids(ids, item.images, numbers)
                keyed[row] = SAWItem(ids, attention, mask, item.weight, item.meta, item.attachments)
        return keyed

    def select(self, rows: Iterable[int]) -> SampleImages:
        """The images of some samples; their numbers stay."""
        return replace(self, spans=[self.spans[row] for row in rows])

    def restore(self, columns: dict[str, Any]) -> None:
        """Put the placeholder into the `input_ids` of a collation, which are changed."""
        ids = columns["input_ids"]
        ids[ids >= KEY] = self.placeholder_id

    def of_trees(self, samples: NDArray[np.int64], shared: NDArray[np.int64], order: NDArray[np.int64]) -> RowImages:
        """The images of prefix trees. `samples` [N] in the order of the trees, `shared` and `order`
        [N] as `PrefixTrees.from_arrays` takes them. A sample shares an image if it begins before
        `shared`: all of it, since equal keys are equal images."""
        spans = [self.spans[sample] for sample in samples]
        own = [tuple(span for span in each if span.start >= begin) for each, begin in zip(spans, shared.tolist(), strict=True)]
        return RowImages(self.placeholder_id, spans, own, order=order.tolist())
