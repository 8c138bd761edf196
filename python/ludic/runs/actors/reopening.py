"""Opens the queue of a run before an actor looks at it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ludic.recipes.processes import QueueSection
from ludic.runs.actors.queue import make_run_id, open_queue
from ludic.runs.stop_request import Interrupted, StopRequest
from ludic.training import ranks
from ludic.training.queue.actor import StopFlag
from ludic.training.queue.base import GroupLog
from ludic.training.queue.opening import QueueRetryPolicy, make_owner_name

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
    with ranks.rank_0_alone("opening the queue") as is_open:
        if ranks.rank() == 0:
            try:
                await _claim(section, folder, stop)
                is_open.append(True)
            except Interrupted:
                is_open.append(False)
    if not is_open[0]:
        raise Interrupted


async def _claim(section: QueueSection, folder: Path, stop: StopRequest) -> None:
    async def sleep(seconds: float) -> None:
        if stop:
            raise Interrupted
        await asyncio.sleep(seconds)

    run, owner = make_run_id(folder), make_owner_name()
    log = open_queue(section, folder)
    try:
        patience = QueueRetryPolicy(section.patience_s, sleep=sleep)
        await patience.call("claiming the queue", lambda: log.claim(owner, run=run))
    finally:
        await asyncio.to_thread(log.disconnect)
