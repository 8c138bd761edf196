"""The queue of a run: where it is, the id that keeps the entries of runs apart, and opening it
before an actor looks at it. Imports no torch."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.errors import QueueError
from ludic.files.atomic import write_text
from ludic.recipes.processes import QUEUE_FILE, QueueSection, find_queue
from ludic.runs.stop_request import Interrupted, StopRequest
from ludic.training.queue.base import GroupLog
from ludic.training.queue.opening import QueueRetryPolicy, make_owner_name, open_log

if TYPE_CHECKING:
    from ludic.training.queue.actor import StopFlag


RUN_ID = "run_id"


def make_run_id(folder: Path) -> str:
    """The id of the run in `folder`, which a resumed run keeps."""
    path = folder / RUN_ID
    if not path.is_file():
        write_text(path, secrets.token_hex(8) + "\n")
    return read_run_id(folder)


def read_run_id(folder: Path) -> str:
    """The id that the trainer made. Raises QueueError if there is none yet."""
    try:
        return (folder / RUN_ID).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise QueueError(f"{folder} has no {RUN_ID} yet: its trainer makes it when it starts; try again then") from None


def open_queue(section: QueueSection, folder: Path, *, timeout_s: float = 30.0) -> GroupLog:
    """The queue of the run in `folder`. Nothing is connected to yet; each call then takes at most
    `timeout_s` seconds."""
    address = find_queue(section, folder)
    name = f"ludic-{read_run_id(folder)}" if "://" in address else QUEUE_FILE
    return open_log(address, name=name, timeout_s=min(timeout_s, section.patience_s))


REOPEN_S = 1800.0
"""How long an actor of a job waits for the trainer that opens its queue again."""
POLL_S = 1.0


async def wait_until_open(log: GroupLog, patience: QueueRetryPolicy, stop: StopFlag) -> bool:
    """Wait while the queue is closed, until `stop` is set or for `REOPEN_S` seconds, and return
    whether it is open. The actors of a Slurm job start together with its trainer: the queue of a
    run that was done, and takes more steps, is closed until the trainer has loaded its model."""
    deadline = patience.clock() + REOPEN_S
    while is_closed := await patience.call("looking whether the queue is closed", log.is_closed):
        if stop.is_set() or patience.clock() >= deadline:
            break
        await patience.sleep(POLL_S)
    return not is_closed


async def reopen_queue(section: QueueSection, folder: Path, stop: StopRequest) -> None:
    """Claim the queue before actors of the run look at it: the queue of a run which was done is
    closed, and they would end. The trainer's own claim, of the same run, replaces this one. Rank 0
    does it, and the others wait. Raises Interrupted on all if a stop is requested while the queue
    cannot be reached."""
    from ludic.training import ranks

    async def sleep(seconds: float) -> None:
        if stop:
            raise Interrupted
        await asyncio.sleep(seconds)

    with ranks.rank_0_alone("opening the queue") as is_open:
        if ranks.rank() == 0:
            run, owner = make_run_id(folder), make_owner_name()
            log = open_queue(section, folder)
            try:
                patience = QueueRetryPolicy(section.patience_s, sleep=sleep)
                await patience.call("claiming the queue", lambda: log.claim(owner, run=run))
                is_open.append(True)
            except Interrupted:
                is_open.append(False)
            finally:
                await asyncio.to_thread(log.disconnect)
    if not is_open[0]:
        raise Interrupted
