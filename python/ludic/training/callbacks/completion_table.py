"""Shows sampled completions with their rewards as a table while a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ludic.errors import check_value, escape_controls
from ludic.images.content import show_content
from ludic.training.callbacks.base import Callback, TrainingEvent
from ludic.training.types import SAWItem
from ludic.types import ENVIRONMENT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_CHARACTERS = 300


class CompletionTable(Callback):
    """Prints `rows` samples of every `every`-th batch: from the best reward to the worst, evenly
    spaced. Characters that a terminal would obey are shown as escapes. Samples without the text of
    their answer, as in `ludic sft`, are not shown.
    """

    def __init__(self, *, every: int = 10, rows: int = 5, console: Console | None = None) -> None:
        """`console`: None for the standard output."""
        for name, value in (("every", every), ("rows", rows)):
            check_value(name, value, "leave the callback out to show nothing", least=1)
        self.every, self.rows, self._console = every, rows, console

    def on_step(self, event: TrainingEvent) -> None:
        if event.step % self.every or event.batch is None:
            return
        shown = spread([item for item in event.batch.items if "action" in item.meta], self.rows)
        if shown:
            self._open_console().print(make_table(shown, f"Completions of step {event.step}"))

    def _open_console(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console()
        return self._console


def spread(items: Sequence[SAWItem], count: int) -> list[SAWItem]:
    """`count` items from the best reward to the worst, evenly spaced; all if there are fewer.

    Example: of the rewards 1, 0, 0.5, 0, 0 and 3 items: 1, 0, 0, which are the ranks 0, 2, 4.
    """
    ranked = sorted(items, key=_reward_of, reverse=True)
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(place * (len(ranked) - 1) / (count - 1))] for place in range(count)]


def make_table(items: Sequence[SAWItem], title: str) -> Table:
    """A rich table of prompt, completion, reward, advantage (the sample's weight) and tokens; in a
    run with several environments each with its name."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_lines=True)
    is_mixed = any(ENVIRONMENT in item.meta for item in items)
    if is_mixed:
        table.add_column(ENVIRONMENT)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    for name in ("reward", "advantage", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in items:
        numbers = (f"{_reward_of(item):.3g}", f"{item.weight:+.3g}", str(item.meta.get("completion_length", "")))
        prompt, completion = show_content(item.meta.get("prev_obs", "")), item.meta["action"]
        environment = [str(item.meta.get(ENVIRONMENT, ""))] if is_mixed else []
        table.add_row(*environment, Text(_shorten(prompt, keep_end=True)), Text(_shorten(completion)), *numbers)
    return table


def _reward_of(item: SAWItem) -> float:
    return float(item.meta.get("total_reward", item.meta.get("reward", 0.0)))


def _shorten(text: Any, *, keep_end: bool = False) -> str:
    whole = escape_controls(str(text))
    if len(whole) <= SHOWN_CHARACTERS:
        return whole
    return f"... {whole[-SHOWN_CHARACTERS:]}" if keep_end else f"{whole[:SHOWN_CHARACTERS]} ..."
