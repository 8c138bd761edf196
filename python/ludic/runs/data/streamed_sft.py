"""The samples of a supervised run whose data is read while training."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ludic.data.row_stream import RowStream
from ludic.data.sft_formats import FormatCount
from ludic.errors import ConfigError
from ludic.inference.prompts.template import find_turn_end
from ludic.recipes.sft.schema import SFTRecipe, list_data_files
from ludic.runs.data.sft import COUNTS, count_sample, make_items, read_rows
from ludic.runs.data.split import identify_prompt, split_by_prompt
from ludic.training.batching.source import BatchSourceBase
from ludic.training.batching.streamed import StreamedBatchSource
from ludic.training.samples.sft import Row, SFTItems
from ludic.training.types import SAWItem

MANY_SAMPLES = ("text", "rollout")
"""Formats of which a row may make several samples."""


@dataclass(frozen=True)
class StreamedSFTData:
    """What is known of the data before it is read."""

    heldout: list[SAWItem]
    """Of the first `shuffle_buffer` rows, or of `heldout_data`."""
    why_no_heldout: str
    formats: tuple[str, ...]
    """The formats of the first rows in words."""
    max_seq_len: int
    end_tokens: frozenset[int]
    items: SFTItems
    heldout_prompts: frozenset[bytes]
    """Digests of the prompts that are held out. Their rows are trained on nowhere."""
    first_format: str

    @classmethod
    def read(cls, recipe: SFTRecipe, tokenizer: Any) -> StreamedSFTData:
        """Read the first rows, so that a wrong one is found before anything is written."""
        if recipe.data is None:
            raise ConfigError(
                "streaming=true reads data=FILE while training, and data is null; name a file, or set streaming=false"
            )
        make = make_items(recipe, tokenizer)
        stream = make_stream(recipe)
        rows = stream.first(recipe.shuffle_buffer)
        if not rows:
            raise ConfigError(f"data: there are no rows in {', '.join(reader.name for reader in stream.readers)}")
        counted = FormatCount(f"the first {len(rows):,} rows", recipe.data_format)
        for where, row in rows:
            counted.add(row, where)
        items = [make.of_row(row, where) for where, row in rows]
        formats: tuple[str, ...] = (counted.describe(),)
        heldout: list[SAWItem] = []
        if recipe.heldout_data is not None:
            measured, its_formats = read_rows(recipe.heldout_data, "heldout_data", recipe.data_format)
            heldout, formats = make.of(measured), formats + its_formats
        else:
            _, heldout = split_by_prompt(items, recipe.heldout)
        why = f"heldout ({recipe.heldout:g}) of the first {len(rows):,} rows has no whole prompt; raise it, or give heldout_data"
        held = frozenset(_digest(item) for item in heldout) if recipe.heldout_data is None else frozenset()
        return cls(
            heldout, why, formats, recipe.trainer.max_seq_len, find_turn_end(tokenizer).ids, make, held, next(iter(counted.rows))
        )

    def make_source(self, recipe: SFTRecipe) -> StreamedBatchSource:
        """The batches of this process; all ranks share them."""
        source = StreamedBatchSource(
            make_stream(recipe), self._make_samples, batch_size=recipe.batch_size, count=self._count_sample, name="sft"
        )
        source.unshard()
        return source

    def _make_samples(self, row: Row, where: str) -> list[SAWItem]:
        items = self.items.of_row(row, where)
        return [] if self.heldout_prompts and _digest(items[0]) in self.heldout_prompts else items

    def _count_sample(self, item: SAWItem) -> dict[str, int]:
        return {"samples": 1, **count_sample(item, self.max_seq_len, self.end_tokens)}

    def count_steps(self, recipe: SFTRecipe) -> int:
        """Batches in `epochs` passes. Raises ConfigError if only reading the data would tell."""
        several = recipe.assistant_turns == "each" or self.first_format in MANY_SAMPLES
        rows = None if several else make_stream(recipe).count_rows()
        if rows is None:
            why = "a row may make several samples" if several else "the stream does not tell its length"
            raise ConfigError(
                f"steps (null) must be set with streaming=true here: {why}, so that it is not known how many batches epochs "
                f"({recipe.epochs}) have; set steps=N, N batches of {recipe.batch_size} samples"
            )
        return -(-recipe.epochs * max(1, rows - len(self.heldout_prompts)) // recipe.batch_size)

    def describe(self) -> str:
        """What is trained on, in words."""
        return "a stream of samples"

    def count_epochs(self, source: BatchSourceBase | None, steps: int, batch_size: int) -> float:
        """Passes that have begun, the present one not counted."""
        return float(source.rows.pass_number) if isinstance(source, StreamedBatchSource) else 0.0

    def count(self, source: BatchSourceBase | None, max_seq_len: int, end_tokens: frozenset[int]) -> dict[str, int]:
        """Sums of `count_sample` over the samples that were trained on."""
        counts = source.counts if isinstance(source, StreamedBatchSource) else {}
        names = {"samples": counts.get("samples", 0), "heldout_samples": len(self.heldout)}
        return {**names, **{name: counts.get(name, 0) for name in COUNTS}}


def make_stream(recipe: SFTRecipe) -> RowStream:
    """The rows of `data`."""
    sources = [str(path) for path in list_data_files(recipe.data, "data")]
    return RowStream(sources, buffer_rows=recipe.shuffle_buffer, seed=recipe.seed)


def _digest(item: SAWItem) -> bytes:
    return sha256(identify_prompt(item)).digest()[:16]
