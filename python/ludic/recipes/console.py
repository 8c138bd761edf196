"""What every command shares: where its words go, what Ctrl-C does, and how a run that can be stopped ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.run_directory import Progress, RunDirectory
    from ludic.recipes.screen import Screen
    from ludic.recipes.watch import StopRequest, Stopwatch

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
    """The exit status of `work`, which returns it with a summary; the summary is printed alone with `--json`."""
    with output_to(json_only) as console:
        try:
            code, summary = work(console)
        except KeyboardInterrupt:
            console.print("Stopped at once.", highlight=False)
            return INTERRUPTED
    if json_only:
        print(summary, end="")
    return code


class Playable(Protocol):
    """A run in its folder."""

    progress: Progress
    screen: Screen
    stop: StopRequest
    watch: Stopwatch

    @property
    def directory(self) -> RunDirectory: ...

    async def play(self) -> None: ...


def play_out(run: Playable, *, command: str, started: float) -> int:
    """Play `run` to its end or to a stop, and keep where it stands either way: 0, or 128 and the signal's number.

    `started` is when the command began, by `time.perf_counter`; `command` is what goes on with the run.
    """
    from ludic.recipes.process import settle_memory
    from ludic.recipes.watch import Interrupted

    settle_memory()
    try:
        asyncio.run(run.play())
    except Interrupted:
        run.screen.note(f"Stopped; go on with `ludic {command} --resume {run.directory.path}`")
        return 128 + (run.stop.signum or 0)
    finally:
        run.watch.add("wall", time.perf_counter() - started)
        run.directory.write_progress(run.progress)
    return 0


def quiet_libraries() -> None:
    """Progress bars of loading and saving small models say nothing."""
    from transformers.utils import logging

    logging.disable_progress_bar()
