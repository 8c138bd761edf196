"""What a supervised run would train on: rows after the chat template, with the trained tokens
marked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.text import Text

from ludic.errors import escape_controls
from ludic.inference.prompts.template import find_turn_end, read_template
from ludic.recipes.epochs_schema import SFTRecipe
from ludic.runs.data.sft import make_items, read_training_rows
from ludic.training.types import SAWItem

OPEN, CLOSE = "⟦", "⟧"
"""Around trained text where there are no colours."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens that are all trained, or all not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class SamplePreview:
    """One sample. Tokens from `max_seq_len` on are cut: they are counted, and in no span."""

    row: str
    """The place of its row."""
    tokens: int
    """Tokens that are kept."""
    trained_tokens: int
    """Tokens that are kept and trained."""
    cut_tokens: int
    cut_trained_tokens: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Preview:
    """The first rows of the data of a run."""

    formats: tuple[str, ...]
    """For each file, the formats of its rows in words."""
    rows: int
    """Rows of all files."""
    samples: tuple[SamplePreview, ...]
    end_of_turn: str | None = None
    """The token that ends an answer of a conversation; None without a chat template."""

    def to_dict(self) -> dict[str, Any]:
        """The preview as plain values, for JSON."""
        return asdict(self)

    def show(self, console: Console) -> None:
        """Print it: trained text is green on a terminal with colours, else in `⟦⟧`."""
        for line in self.formats:
            console.print(escape_controls(line), highlight=False, markup=False)
        for sample in self.samples:
            _show_sample(sample, console)
        tokens, trained = (sum(getattr(sample, name) for sample in self.samples) for name in ("tokens", "trained_tokens"))
        console.print(
            f"\n{len({sample.row for sample in self.samples}):,} of {self.rows:,} rows: {len(self.samples):,} samples, {trained:,} of "
            f"{tokens:,} tokens trained ({trained / max(1, tokens):.0%})",
            highlight=False,
            markup=False,
        )
        if self.end_of_turn is not None:
            console.print(f"An answer of a conversation ends with {self.end_of_turn!r}", highlight=False, markup=False)


def preview(recipe: SFTRecipe, tokenizer: Any, rows: int) -> Preview:
    """The samples of the first `rows` rows. The formats are the formats of all rows; only the rows
    that are shown are tokenised."""
    make = make_items(recipe, tokenizer)
    all_rows, formats = read_training_rows(recipe, tokenizer)
    items = [item for where, row in islice(all_rows, rows) for item in make.of_row(row, where)]
    samples = tuple(_sample(item, tokenizer, recipe.trainer.max_seq_len) for item in items)
    end = tokenizer.decode([find_turn_end(tokenizer).token]) if read_template(tokenizer) else None
    return Preview(formats, len(all_rows), samples, end)


def _sample(item: SAWItem, tokenizer: Any, max_seq_len: int) -> SamplePreview:
    """Example: ids of `2+2=4<eos>` with the mask 000011 and `max_seq_len` 5 are the spans `2+2=`
    and `4`, trained; one trained token is cut."""
    ids, mask = [int(token) for token in item.input_ids], [int(trained) for trained in item.action_mask]
    kept = list(zip(ids, mask, strict=True))[:max_seq_len]
    spans = [
        Span(tokenizer.decode([token for token, _ in run], skip_special_tokens=False), bool(trained))
        for trained, run in ((trained, list(run)) for trained, run in groupby(kept, key=lambda pair: pair[1]))
    ]
    return SamplePreview(
        row=str(item.meta["rollout_id"]),
        tokens=len(kept),
        trained_tokens=sum(mask[:max_seq_len]),
        cut_tokens=len(ids) - len(kept),
        cut_trained_tokens=sum(mask[max_seq_len:]),
        spans=tuple(spans),
    )


def _show_sample(sample: SamplePreview, console: Console) -> None:
    has_colours = console.is_terminal and not console.no_color
    text = Text()
    for span in sample.spans:
        shown = escape_controls(span.text, keep="\n\t")
        if has_colours:
            text.append(shown, style="green" if span.trained else "dim")
        else:
            text.append(f"{OPEN}{shown}{CLOSE}" if span.trained else shown)
    row = escape_controls(sample.row)
    console.print(f"\n{row}: {sample.tokens:,} tokens, {sample.trained_tokens:,} trained", highlight=False, markup=False)
    console.print(text, highlight=False, markup=False)
    if sample.cut_tokens:
        console.print(
            f"... {sample.cut_tokens:,} tokens beyond trainer.max_seq_len are cut, {sample.cut_trained_tokens:,} of them trained",
            highlight=False,
            markup=False,
        )
