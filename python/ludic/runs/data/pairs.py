"""The pairs of a run as samples, from a data set or a built-in task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ludic.data import Row
from ludic.data.sources import Draw
from ludic.errors import ConfigError
from ludic.files.jsonl import write_jsonl
from ludic.recipes.build import build_named
from ludic.recipes.epochs_schema import PairsRecipe
from ludic.runs.data.sft import split_by_prompt
from ludic.tasks import DigitPreferences
from ludic.tasks.preferences import bayes_accuracy, drawn_accuracy
from ludic.training.samples.preference import load_preference_items, preference_dataset_to_saw_items
from ludic.training.types import SAWItem

PREFERENCES: dict[str, Callable[..., Any]] = {"digits": DigitPreferences}
"""Built-in tasks, with `draw`, `heldout`, and pairs that have a `probability`."""

Pairs = list[SAWItem]
"""Chosen and rejected samples alternate; or samples without a partner, for KTO."""


@dataclass(frozen=True)
class PairData:
    """The samples of a run."""

    train: Pairs
    heldout: Pairs
    """Empty if nothing is measured."""
    bayes_accuracy: float | None = None
    """Expected accuracy of the best possible reward model on the held-out pairs; None if it is
    not known."""
    latent_accuracy: float | None = None
    """Accuracy of the generator's own quality on the labels that were drawn; its expectation is
    `bayes_accuracy`."""
    rows: Sequence[Row] = ()
    """Generated rows to train on."""
    heldout_rows: Sequence[Row] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of rows of `data` that make no pair, by reason; if the data was split, rows of
    either part."""
    heldout_left_out: Mapping[str, int] = field(default_factory=dict)
    """The same for the rows of held-out data."""
    task: Any = None
    """What generated the pairs; None for data."""

    @property
    def units(self) -> list[Pairs]:
        """The training samples by row: both of a pair, or one answer."""
        return _divide(self.train)

    @property
    def unit(self) -> str:
        """What a unit is: pairs, or answers."""
        return "answers" if self.train and _unit_size(self.train) == 1 else "pairs"

    @classmethod
    def read(cls, recipe: PairsRecipe, tokenizer: Any, *, note: Callable[[str], None], unpaired: bool = False) -> PairData:
        """Read and tokenize all pairs, so that a wrong one is found before anything is written.
        `note` receives a remark if `heldout_split` has no meaning for a file. `unpaired`: rows may
        have one answer. Of these, a desirable and an undesirable one are measured as a pair."""
        if recipe.data is None:
            return _generate_pairs(recipe, tokenizer)
        load = partial(_load_pairs, recipe, tokenizer, unpaired=unpaired)
        train, left_out = load(recipe.data, recipe.split, Draw(recipe.limit, recipe.seed))
        is_file = Path(recipe.data).expanduser().is_file()
        if recipe.heldout_data is not None or (recipe.heldout_split is not None and not is_file):
            source, split = recipe.heldout_data or recipe.data, recipe.heldout_split or recipe.split
            heldout, heldout_left_out = load(source, split, Draw(recipe.heldout_limit))
            return cls(train, _match(heldout), left_out=left_out, heldout_left_out=heldout_left_out)
        if recipe.heldout_split is not None:
            note(f"{recipe.data} is a file, which has no split {recipe.heldout_split}; {recipe.heldout:.0%} of it are held out")
        train, heldout = split_by_prompt(_divide(train), recipe.heldout)
        heldout = _match(heldout)
        measured = Draw(recipe.heldout_limit).of(len(heldout) // 2)
        return cls(train, [item for pair in measured for item in heldout[2 * pair : 2 * pair + 2]], left_out=left_out)

    def counts(self) -> dict[str, Any]:
        """Numbers of pairs and tokens, of pairs with a sample that was cut to `max_seq_len`, and
        of skipped rows by reason."""
        return {
            "unit": self.unit,
            "pairs": len(self.units),
            "heldout_pairs": len(self.heldout) // 2,
            "tokens": sum(len(item.input_ids) for item in self.train),
            "pairs_cut": sum(any("truncation" in item.meta for item in unit) for unit in self.units),
            "left_out": dict(self.left_out),
            "heldout_left_out": dict(self.heldout_left_out),
        }

    def write_missing_rows(self, train: Path, heldout: Path) -> None:
        """Write the generated rows as files that `data` and `heldout_data` read, where there are
        none yet: a killed run may have written only one."""
        for path, rows in ((train, self.rows), (heldout, self.heldout_rows)):
            if not path.is_file():
                write_jsonl(path, rows)


def _generate_pairs(recipe: PairsRecipe, tokenizer: Any) -> PairData:
    """Generated pairs. The training pairs depend on the seed; the held-out pairs do not."""
    if recipe.heldout_data is not None or recipe.heldout_split is not None:
        raise ConfigError("heldout_data and heldout_split are for data of your own; give data, too")
    task, rng = build_named(PREFERENCES, recipe.task), Random(f"preferences {recipe.seed}")
    rows = [task.draw(rng) for _ in range(min(recipe.pairs, recipe.limit or recipe.pairs))]
    heldout_rows = list(task.heldout())[: recipe.heldout_limit]
    train, heldout = (
        preference_dataset_to_saw_items(part, tokenizer, strict=True, **_tokenizer_options(recipe))
        for part in (rows, heldout_rows)
    )
    accuracies = bayes_accuracy(heldout_rows), drawn_accuracy(heldout_rows)
    return PairData(train, heldout, *accuracies, rows, heldout_rows, task=task)


def _unit_size(items: Pairs) -> int:
    return 2 if len(items) > 1 and items[0].meta["pair_id"] == items[1].meta["pair_id"] else 1


def _divide(items: Pairs) -> list[Pairs]:
    size = _unit_size(items)
    return [items[first : first + size] for first in range(0, len(items), size)]


def _match(items: Pairs) -> Pairs:
    """Pairs as they are; single answers as pairs of a desirable and an undesirable one, in their
    order. Those that are left over of one kind are not measured."""
    if not items or _unit_size(items) == 2:
        return items
    chosen, rejected = ([item for item in items if item.meta["role"] == role] for role in ("chosen", "rejected"))
    return [
        replace(item, meta={**item.meta, "pair_id": f"match_{number}"})
        for number, pair in enumerate(zip(chosen, rejected, strict=False))
        for item in pair
    ]


def _load_pairs(
    recipe: PairsRecipe, tokenizer: Any, source: str, split: str, draw: Draw, *, unpaired: bool
) -> tuple[Pairs, Counter[str]]:
    """(pairs, number of skipped rows by reason)."""
    left_out: Counter[str] = Counter()
    renamed = {name: column for name, column in asdict(recipe.columns).items() if column is not None}
    label = renamed.pop("label", None)
    pairs = load_preference_items(
        source,
        tokenizer,
        config=recipe.data_config,
        split=split,
        columns=renamed or None,
        label_col=label,
        limit=draw.limit,
        seed=draw.seed,
        unpaired=unpaired,
        left_out=left_out,
        image_folder=None if recipe.image_folder is None else Path(recipe.image_folder).expanduser(),
        **_tokenizer_options(recipe),
    )
    return pairs, left_out


def _tokenizer_options(recipe: PairsRecipe) -> dict[str, Any]:
    """How a pair becomes tokens. Samples are cut here, where the end of the prompt is known."""
    return {
        "max_length": recipe.trainer.max_seq_len,
        "use_chat_template": bool(recipe.chat_template),
        "system_prompt": recipe.system_prompt,
    }
