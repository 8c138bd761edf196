"""The samples of a supervised run, and of the warm-up of `ludic train`: from files, or from a
task. Which rows of a data set are held out, of pairs too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from ludic.data.formats import AUTO, FormatCount, count_formats
from ludic.data.row_images import intern_row
from ludic.data.row_stream import RowStream
from ludic.data.rows_on_disk import Changed
from ludic.data.sources import read_table
from ludic.errors import ConfigError
from ludic.inference.prompts.template import find_turn_end, read_template
from ludic.recipes.build import build_task
from ludic.recipes.epochs_schema import SFTRecipe, list_data_files
from ludic.recipes.schema import Recipe
from ludic.tasks import EpisodicTask, as_episodic
from ludic.tasks.agents import AgentDemonstrations
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.source import BatchSourceBase
from ludic.training.batching.streamed import StreamedBatchSource
from ludic.training.samples.conversations import AssistantTurns
from ludic.training.samples.sft import Row, SFTItems
from ludic.training.types import SAWItem

_SPLIT_SEED = 20_000  # the held-out rows are the same in every run


def split_by_prompt(rows: Sequence[list[SAWItem]], share: float) -> tuple[list[SAWItem], list[SAWItem]]:
    """Split the samples of all rows into (training, held out).

    Rows with the same prompt stay together, so that no prompt is both trained and measured. At most
    `share` of the rows is held out."""
    by_prompt: dict[bytes, list[int]] = {}
    for number, items in enumerate(rows):
        by_prompt.setdefault(identify_prompt(items[0]), []).append(number)
    groups = list(by_prompt.values())
    heldout_rows: set[int] = set()
    for index in np.random.default_rng(_SPLIT_SEED).permutation(len(groups)):
        if len(heldout_rows) + len(groups[index]) <= int(share * len(rows)):
            heldout_rows.update(groups[index])
    train = [item for number, items in enumerate(rows) if number not in heldout_rows for item in items]
    return train, [item for number in sorted(heldout_rows) for item in rows[number]]


def explain_no_heldout(rows: int, share: float, prompts: int, smallest: int) -> str:
    """Why no rows are held out, and the remedy. `rows` is the number of rows, `prompts` of
    different prompts, `smallest` of the rows with the rarest prompt."""
    if share == 0:
        return "heldout is 0; set heldout=0.05, or give heldout_data"
    return (
        f"heldout ({share:g}) of {rows:,} rows is {int(share * rows):,}, rows with one prompt stay together, and each of the {prompts:,} "
        f"different prompts is in {smallest:,} rows or more; raise heldout to {smallest / rows:.2g} or above, or give heldout_data"
    )


def identify_prompt(item: SAWItem) -> bytes:
    """The same for two samples with the same prompt: the digest from the sample's row, else the
    tokens and images before the first trained one."""
    if "prompt_digest" in item.meta:
        return str(item.meta["prompt_digest"]).encode()
    end = int(np.argmax(item.action_mask))
    digests = "".join(span.digest for span in item.images if span.start < end)
    return np.asarray(item.input_ids[:end]).tobytes() + digests.encode()


Rows = Sequence[tuple[str, Row]]


@dataclass(frozen=True)
class SFTData:
    """The samples of a run."""

    train: list[SAWItem]
    heldout: list[SAWItem]
    """Empty if nothing is measured."""
    why_no_heldout: str = ""
    """Why `heldout` is empty."""
    formats: tuple[str, ...] = ()
    """For each file, the formats of its rows in words."""

    @classmethod
    def read(cls, recipe: SFTRecipe, tokenizer: Any) -> SFTData:
        """Read and tokenize all rows, so that a wrong one is found before anything is written."""
        make = make_items(recipe, tokenizer)
        rows, formats = read_training_rows(recipe, tokenizer)
        items = [make.of_row(row, where) for where, row in rows]
        if recipe.heldout_data is not None:
            measured, its_formats = read_rows(recipe.heldout_data, "heldout_data", recipe.data_format, recipe.image_folder)
            return cls([item for of_row in items for item in of_row], make.of(measured), "", formats + its_formats)
        train, heldout = split_by_prompt(items, recipe.heldout)
        if heldout:
            return cls(train, heldout, "", formats)
        prompts = Counter(identify_prompt(of_row[0]) for of_row in items)
        why = explain_no_heldout(len(items), recipe.heldout, len(prompts), min(prompts.values()))
        return cls(train, heldout, why, formats)

    def make_source(self, recipe: SFTRecipe) -> ItemBatchSource:
        """The batches of this process; all ranks share them."""
        source = ItemBatchSource(self.train, batch_size=recipe.batch_size, seed=recipe.seed, name="sft")
        source.unshard()
        return source

    def count_steps(self, recipe: SFTRecipe) -> int:
        """Batches in `epochs` passes."""
        return recipe.epochs * self.make_source(recipe).num_batches_per_epoch

    def describe(self) -> str:
        """What is trained on, in words."""
        return f"{len(self.train):,} samples"

    def count_epochs(self, source: BatchSourceBase | None, steps: int, batch_size: int) -> float:
        """Passes over the data in `steps` batches."""
        return steps * batch_size / len(self.train)

    def count(self, source: BatchSourceBase | None, max_seq_len: int, end_tokens: frozenset[int]) -> dict[str, int]:
        """Sums of `count_sample` over all samples."""
        total: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        for item in self.train:
            total.update(count_sample(item, max_seq_len, end_tokens))
        return {"samples": len(self.train), "heldout_samples": len(self.heldout), **total}


COUNTS = ("tokens", "trained_tokens", "samples_cut", "samples_cut_empty", "samples_without_end")


def count_sample(item: SAWItem, max_seq_len: int, end_tokens: frozenset[int]) -> dict[str, int]:
    """Numbers of tokens, and of those that are trained; whether it is cut to `max_seq_len`, and
    loses all trained tokens; and whether it does not teach the model to end."""
    is_cut = len(item.input_ids) > max_seq_len
    return {
        "tokens": len(item.input_ids),
        "trained_tokens": item.meta["completion_length"],
        "samples_cut": int(is_cut),
        "samples_cut_empty": int(is_cut and not np.any(item.action_mask[1:max_seq_len])),
        "samples_without_end": int(not item.meta.get("is_continued") and not teaches_end(item, max_seq_len, end_tokens)),
    }


def describe_missing_ends(samples: int, tokenizer: Any) -> str:
    end = find_turn_end(tokenizer).token
    fault = f"{samples:,} samples do not end with {tokenizer.decode([end])}: after these the model is not taught to stop"
    return f"{fault}; if their chat template ends turns with another token, set eos_token=TOKEN"


def teaches_end(item: SAWItem, max_seq_len: int, end_tokens: frozenset[int]) -> bool:
    """Whether the last run of trained tokens has an end token.

    Trained positions 2, 3, 6, 7 are the runs [2, 3] and [6, 7]; the last one counts."""
    trained = np.flatnonzero(item.action_mask[:max_seq_len])
    if not len(trained):
        return False
    last = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)[-1]
    return any(int(item.input_ids[row]) in end_tokens for row in last)


def make_demonstrations(recipe: SFTRecipe, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """`rows` demonstrations of the task, which depend on the seed: prompt and completion, as
    messages if the tokenizer has a chat template."""
    task, rng = as_episodic(build_task(recipe.task)), Random(f"demonstrations {recipe.seed}")
    if task.max_turns > 1:
        raise ConfigError(f"task.kind ({recipe.task.kind}) has several turns; use ludic train {recipe.task.kind} steps=0")
    for _ in range(recipe.rows):
        demonstrations = task.demonstrations(1, rng)
        if demonstrations is None:
            raise ConfigError(f"task.kind ({recipe.task.kind}) has no demonstrations to train on; set data=FILE")
        [[turn]] = demonstrations
        prompt, completion = turn.observation, turn.action
        if read_template(tokenizer):
            yield {"prompt": [{"role": "user", "content": prompt}], "completion": [{"role": "assistant", "content": completion}]}
        else:
            yield {"prompt": prompt, "completion": completion}


def make_items(recipe: SFTRecipe, tokenizer: Any) -> SFTItems:
    """What makes samples of rows by the settings of a recipe."""
    turns = cast(AssistantTurns, recipe.assistant_turns)
    return SFTItems(tokenizer, turns, row_format=recipe.data_format, max_tokens=recipe.trainer.max_seq_len)


def read_training_rows(recipe: SFTRecipe, tokenizer: Any) -> tuple[Rows, tuple[str, ...]]:
    """The rows of `data`, or demonstrations, and their formats in words."""
    if recipe.data is not None:
        return read_rows(recipe.data, "data", recipe.data_format, recipe.image_folder)
    return [(f"demonstration {number}", row) for number, row in enumerate(make_demonstrations(recipe, tokenizer), 1)], ()


def read_rows(setting: Any, name: str, row_format: str = AUTO, image_folder: str | None = None) -> tuple[Rows, tuple[str, ...]]:
    """(place, row) of each row of the files that the setting `name` names; and for each file, the
    formats of its rows in words. Images are stored when a row is taken; paths are relative to
    `image_folder`, or to the folder of the file. Raises DataError for a file that mixes formats."""
    paths: Sequence[Path] = list_data_files(setting, name)
    rows: list[tuple[str, Row, Path | None]] = []
    formats = []
    for path in paths:
        table = read_table(str(path))
        folder = table.folder if image_folder is None else Path(image_folder).expanduser()
        of_file = [(table.where(index), row) for index, row in enumerate(table.rows)]
        rows += [(where, row, folder) for where, row in of_file]
        if of_file:
            formats.append(count_formats(of_file, table.name, row_format).describe())
    if not rows:
        raise ConfigError(f"{name}: there are no rows in {', '.join(map(str, paths))}")
    return Changed(rows, lambda _, placed: (placed[0], intern_row(dict(placed[1]), placed[2], placed[0]))), tuple(formats)


MANY_SAMPLES = ("text", "rollout")
"""Formats of which a row may make several samples."""


@dataclass(frozen=True)
class StreamedSFTData:
    """The settings of the data, known before it is read."""

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
            raise ConfigError("streaming=true reads data=FILE, and data is null; name a file, or set streaming=false")
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
            measured, its_formats = read_rows(recipe.heldout_data, "heldout_data", recipe.data_format, recipe.image_folder)
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
            make_stream(recipe),
            self._make_samples,
            batch_size=recipe.batch_size,
            count=lambda item: {"samples": 1, **count_sample(item, self.max_seq_len, self.end_tokens)},
            name="sft",
        )
        source.unshard()
        return source

    def _make_samples(self, row: Row, where: str) -> list[SAWItem]:
        items = self.items.of_row(row, where)
        return [] if self.heldout_prompts and _digest(items[0]) in self.heldout_prompts else items

    def count_steps(self, recipe: SFTRecipe) -> int:
        """Batches in `epochs` passes. Raises ConfigError if only reading the data would tell."""
        several = recipe.assistant_turns == "each" or self.first_format in MANY_SAMPLES
        rows = None if several else make_stream(recipe).count_rows()
        if rows is None:
            why = "a row may make several samples" if several else "the stream does not tell its length"
            raise ConfigError(f"steps (null, epochs={recipe.epochs}, batch_size={recipe.batch_size}): {why}; set steps=N")
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
    folder = None if recipe.image_folder is None else Path(recipe.image_folder).expanduser()
    return RowStream(sources, buffer_rows=recipe.shuffle_buffer, seed=recipe.seed, image_folder=folder)


def _digest(item: SAWItem) -> bytes:
    return sha256(identify_prompt(item)).digest()[:16]


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
        if section.data is None and section.steps and not _has_teacher(task):
            if recipe.mode in ("sft", "sft+rl"):
                raise ConfigError(f"mode={recipe.mode} needs demonstrations, and the task has none; set warmup.data=FILE")
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
            kind = DemonstrationSource if task.agent is None else AgentDemonstrations
            return kind(task, tokenizer, batch_size=batch_size, seed=seed, system_prompt=recipe.rollout.system_prompt)
        source = ItemBatchSource(self.items, batch_size=batch_size, seed=seed, name="warmup")
        source.unshard()  # all ranks share its batches
        return source

    def describe(self) -> str:
        if self.items is None:
            return f"Warm-up: {self.steps} steps on demonstrations of an imperfect teacher"
        return f"Warm-up: {self.steps} steps on {len(self.items):,} samples of {'; '.join(self.formats)}"


def _has_teacher(task: EpisodicTask) -> bool:
    if task.agent is not None:
        return task.teach is not None
    return task.demonstrations(1, Random("trial")) is not None
