"""A run on several ranks: one of the processes that torchrun or srun started.

It joins the others, a watchdog ends it if it hangs, and an error ends all of them. Rank 0 prints
and writes as a single process does. The others write to `ranks/rank_NNNN.log`.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import IO, TextIO, cast

from rich.console import Console

from ludic.errors import TRY_AGAIN
from ludic.launch.rank_environment import RankEnvironment, read_rank_environment, tell_status
from ludic.recipes.processes import RanksSection, phase_deadlines
from ludic.runs.console import INTERRUPTED, run_with_console
from ludic.runs.exit_status import rank_exit_status


class RankLog(io.TextIOBase):
    """A text stream that keeps its text until the run's folder is known (`open_file`).

    >>> with RankLog(rank=1).in_use() as log:
    ...     print("this goes to ranks/rank_0001.log")
    ...     log.open_file(directory.ranks)
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._early = io.StringIO()
        self._file: TextIO | None = None

    def open_file(self, folder: Path) -> None:
        """Write to `folder/rank_NNNN.log` from now on, what was written before first. A log of an
        earlier start is continued."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank_{self._rank:04d}.log").open("a", encoding="utf-8", buffering=1)
        self._file.write(self._early.getvalue())

    def write(self, text: str) -> int:
        return (self._early if self._file is None else self._file).write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        super().close()

    @contextmanager
    def in_use(self) -> Iterator[RankLog]:
        """Let standard output and logged warnings go to the log; logged errors go to standard
        error too, with the rank."""
        warnings = logging.StreamHandler(self)
        errors = logging.StreamHandler(sys.stderr)
        errors.setLevel(logging.ERROR)
        errors.setFormatter(logging.Formatter(f"rank {self._rank}: %(message)s"))
        root = logging.getLogger()
        for handler in (warnings, errors):
            root.addHandler(handler)
        try:
            with redirect_stdout(self):
                yield self
        finally:
            for handler in (warnings, errors):
                root.removeHandler(handler)


ENDING_S = 60.0
"""How long a rank may take to end after an error."""


def run_on_ranks(section: RanksSection, work: Callable[[Console, RankLog | None], tuple[int, str]], *, json_only: bool) -> int:
    """Run `work`, which returns (exit status, summary), on all ranks, and return the exit status.
    It gets the log of its rank, and None on rank 0."""
    from ludic.training import ranks
    from ludic.training.ranks.rendezvous import Failure

    def lead(console: Console) -> tuple[int, str]:
        try:
            return work(console, None)
        except KeyboardInterrupt:  # a second Ctrl-C ends it immediately, and the other ranks are told
            meeting = ranks.current_rendezvous()
            if meeting is not None:
                meeting.report_failure(Failure(0, meeting.host, "interrupted", INTERRUPTED))
            raise

    environment = read_rank_environment(port=section.port)
    assert environment is not None
    timeouts = {"timeout_s": section.timeout_s, "rendezvous_timeout_s": section.rendezvous_timeout_s}
    with ranks.joined(environment, **timeouts, exit_code=rank_exit_status), _watched(environment, section):
        if environment.rank == 0:
            return run_with_console(lead, json_only=json_only)
        with RankLog(environment.rank) as log, log.in_use():
            return work(Console(file=cast(IO[str], log), soft_wrap=True, highlight=False), log)[0]


@contextmanager
def ended_as_rank() -> Iterator[None]:
    """End the process of a rank where the block ends, without clean-up: everything is written
    then, and threads of torch's process groups may wait for other ranks, or abort the process."""
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    tell_status(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def _watched(environment: RankEnvironment, section: RanksSection) -> Iterator[None]:
    """Run the block under the watchdog. After an error it watches the end of the process too."""
    from ludic.training import ranks
    from ludic.training.ranks.rendezvous import Failure
    from ludic.training.watchdog import Watchdog

    meeting = ranks.current_rendezvous()
    assert meeting is not None

    def find_failure() -> tuple[str, int] | None:
        try:
            meeting.give_sign()
            failure, ended = meeting.find_failure(), meeting.describe_ended()
        except Exception:  # the store is gone: the main thread finds it too
            return None
        if failure is not None:
            return f"rank {failure.rank} failed, on {failure.host}: {failure.text}", failure.exit_code
        return None if ended is None else (ended, TRY_AGAIN)

    dog = Watchdog(
        {**phase_deadlines(section), "ending": ENDING_S},
        name=f"rank {environment.rank} of {environment.world_size}",
        find_failure=find_failure,
        report=lambda why: meeting.report_failure(Failure(environment.rank, meeting.host, why)),
    )
    dog.start()
    try:
        yield
    except BaseException:
        dog.enter_last("ending")
        raise
    dog.close()
