"""Opens the queue of a run before an actor looks at it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ludic.recipes.queue_section import QueueSection
from ludic.runs.actors.queue import make_run_id, open_queue
from ludic.runs.stop_request import Interrupted, StopRequest
from ludic.training import ranks
from ludic.training.queue.claims import make_owner_name
from ludic.training.queue.patience import Patience


async def reopen_queue(section: QueueSection, folder: Path, stop: StopRequest) -> None:
    """Claim the queue before actors of the run look at it: that of a run which was done is closed,
    and they would end. The trainer's own claim, of the same run, replaces this one. Rank 0 does it,
    and the others wait. Raises Interrupted on all if a stop is asked for while the queue cannot be
    reached."""
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
        patience = Patience(section.patience_s, sleep=sleep)
        await patience.call("claiming the queue", lambda: log.claim(owner, run=run))
    finally:
        await asyncio.to_thread(log.disconnect)
