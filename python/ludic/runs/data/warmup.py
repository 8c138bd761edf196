"""What the warm-up of `ludic train` trains on: the rows of `warmup.data`, as `ludic sft` reads
them, or demonstrations of the task."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from ludic.errors import ConfigError
from ludic.recipes.schema import Recipe
from ludic.runs.data.sft import read_rows
from ludic.tasks import EpisodicTask
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.samples.sft import SFTItems
from ludic.training.types import SAWItem


@dataclass(frozen=True)
class Warmup:
    """The samples of a warm-up and the number of its steps."""

    items: list[SAWItem] | None
    """None means demonstrations, without end."""
    steps: int
    formats: tuple[str, ...] = ()
    """For each file, the formats of its rows in words."""

    @classmethod
    def read(cls, recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> Warmup:
        """Read and tokenize all rows, so that a wrong one is found before anything is written. A
        task without demonstrations has no steps."""
        section = recipe.warmup
        if section.data is None and section.steps and task.demonstrations(1, Random("trial")) is None:
            if recipe.mode in ("sft", "sft+rl"):
                raise ConfigError(
                    f"mode={recipe.mode} begins with supervised training, and the task has no demonstrations; set warmup.data=FILE, or "
                    "mode=rl"
                )
            return cls(None, 0)
        if section.data is None:
            return cls(None, section.steps)
        rows, formats = read_rows(section.data, "warmup.data", section.data_format)
        make = SFTItems(tokenizer, row_format=section.data_format, max_tokens=section.trainer.max_seq_len)
        items = make.of(rows)
        if section.epochs is None and section.steps:
            return cls(items, section.steps, formats)
        epochs = 1 if section.epochs is None else section.epochs
        return cls(items, epochs * -(-len(items) // section.batch_size), formats)

    def make_source(self, recipe: Recipe, task: EpisodicTask, tokenizer: Any) -> DemonstrationSource | ItemBatchSource:
        """The batches, which follow from the seed: a resumed run gets the same."""
        batch_size, seed = recipe.warmup.batch_size, recipe.seed
        if self.items is None:
            prompt = recipe.rollout.system_prompt
            return DemonstrationSource(task, tokenizer, batch_size=batch_size, seed=seed, system_prompt=prompt)
        source = ItemBatchSource(self.items, batch_size=batch_size, seed=seed, name="warmup")
        source.unshard()  # all ranks share its batches
        return source

    def describe(self) -> str:
        if self.items is None:
            return f"Warm-up: {self.steps} steps on demonstrations of an imperfect teacher"
        return f"Warm-up: {self.steps} steps on {len(self.items):,} samples of {'; '.join(self.formats)}"
