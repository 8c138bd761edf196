"""Output of the commands, and their default reaction to Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ludic.errors import escape_controls

INTERRUPTED = 130


class EscapingConsole(Console):
    """Shows no control character of a text."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_controls(text, keep="\n\t"), **options)


@contextlib.contextmanager
def open_console(json_only: bool) -> Iterator[Console]:
    """The console for everything but the summary: standard output, or with `--json` standard
    error."""
    if not json_only:
        yield EscapingConsole(soft_wrap=True, highlight=False)
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield EscapingConsole(stderr=True, soft_wrap=True, highlight=False)


def run_with_console(
    work: Callable[[Console], tuple[int, str]], *, json_only: bool, stopped: str = "Stopped immediately."
) -> int:
    """Run `work`, which returns (exit status, summary), and return the exit status. With `--json`
    print only the summary. `stopped` is printed if Ctrl-C ends the work."""
    with open_console(json_only) as console:
        try:
            code, summary = work(console)
        except KeyboardInterrupt:
            console.print(stopped)
            return INTERRUPTED
    if json_only:
        print(summary, end="")
    return code


def quiet_libraries() -> None:
    """Hide the progress bars of loading and saving models."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
