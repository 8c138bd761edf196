"""The queue of a run: where it is, and the id that keeps the entries of runs apart."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from ludic.errors import QueueError
from ludic.files.atomic import write_text
from ludic.recipes.queue_section import FILE, QueueSection, find_queue
from ludic.runs.stop_request import Interrupted, StopRequest
from ludic.training import ranks
from ludic.training.queue.base import GroupLog
from ludic.training.queue.claims import make_owner_name
from ludic.training.queue.opening import open_log
from ludic.training.queue.patience import Patience

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


def open_queue(section: QueueSection, folder: Path) -> GroupLog:
    """The queue of the run in `folder`. Nothing is connected to yet."""
    address = find_queue(section, folder)
    name = f"ludic-{read_run_id(folder)}" if "://" in address else FILE
    return open_log(address, name=name, timeout_s=min(30.0, section.patience_s))


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
