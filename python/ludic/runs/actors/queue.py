"""The queue of a run: where it is, and the id that keeps the entries of runs apart. Without
torch."""

from __future__ import annotations

import secrets
from pathlib import Path

from ludic.errors import QueueError
from ludic.files.atomic import write_text
from ludic.recipes.processes import QUEUE_FILE, QueueSection, find_queue
from ludic.training.queue.base import GroupLog
from ludic.training.queue.opening import open_log

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
