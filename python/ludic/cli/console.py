"""What every command shares: where its words go, and what Ctrl-C does where nothing else was
asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130


@contextlib.contextmanager
def output_to(json_only: bool) -> Iterator[Console]:
    """Where everything but the summary goes: standard output, or with `--json` standard error."""
    from rich.console import Console

    if not json_only:
        yield Console(soft_wrap=True)
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield Console(stderr=True, soft_wrap=True)


def carry_out(work: Callable[[Console], tuple[int, str]], *, json_only: bool) -> int:
    """The exit status of `work`, which returns it with a summary; the summary is printed alone
    with `--json`."""
    with output_to(json_only) as console:
        try:
            code, summary = work(console)
        except KeyboardInterrupt:
            console.print("Stopped at once.", highlight=False)
            return INTERRUPTED
    if json_only:
        print(summary, end="")
    return code


def quiet_libraries() -> None:
    """Progress bars of loading and saving small models say nothing."""
    from transformers.utils import logging

    logging.disable_progress_bar()
