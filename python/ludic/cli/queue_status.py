"""What the queue of a run holds now, for `ludic status`. Changes nothing in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ludic.errors import LudicError
from ludic.recipes.compose import read_yaml
from ludic.recipes.queue_section import QueueSection, find_queue
from ludic.runs.actors.queue import RUN_ID, open_queue

QUEUE_S = 5.0
"""How long the server of a queue may take to answer."""


@dataclass(frozen=True)
class QueueStatus:
    """What the queue holds. Numbers are null if it does not answer."""

    error: str | None = None
    """Why it does not answer."""
    is_closed: bool | None = None
    """Whether the trainer is done."""
    entries: int | None = None
    """Entries that were delivered and are kept until a checkpoint has them."""
    bytes: int | None = None
    outstanding: int | None = None
    """Entries that are offered and not delivered."""
    leased: int | None = None
    """Of these, those that an actor has."""
    oldest_s: float | None = None
    """Seconds since the oldest of them was offered."""
    aside: int | None = None
    """Entries that could not be trained on, since the queue was made."""
    claimed: int | None = None
    """Leases that ran out and were taken over, since the queue was made."""
    actors: tuple[str, ...] = ()
    """Actors that have a lease."""


def read_queue(folder: Path) -> QueueStatus | None:
    """The queue of the run in `folder`; None for a run that has none, or has not made it yet."""
    config = folder / "config.yaml"
    section = _read_section(config) if config.is_file() else None
    if section is None or not (folder / RUN_ID).is_file():
        return None
    try:
        address = find_queue(section, folder)
        if "://" not in address and not Path(address).is_file():
            return None
        log = open_queue(section, folder, timeout_s=QUEUE_S)
    except LudicError as error:  # of LUDIC_QUEUE_URL, or a package that is not installed
        return QueueStatus(error=str(error))
    try:
        stats, outstanding, is_closed = log.stats(), log.outstanding(), log.is_closed()
    except LudicError as error:
        return QueueStatus(error=str(error))
    finally:
        log.disconnect()
    actors = sorted({work.actor for work in outstanding if work.actor is not None})
    return QueueStatus(is_closed=is_closed, **asdict(stats), actors=tuple(actors))


def _read_section(config: Path) -> QueueSection | None:
    """The settings of the queue; None for a run without one."""
    content = read_yaml(config)
    queue, place = content.get("queue"), content.get("place")
    if not isinstance(queue, DictConfig) or not (queue.get("url") or (isinstance(place, DictConfig) and place.get("actors"))):
        return None
    values: dict[str, Any] = {item.name: queue[item.name] for item in fields(QueueSection) if item.name in queue}
    return QueueSection(**values)


def describe_queue(queue: QueueStatus) -> str:
    """Example: `queue: 3 entries (1.2 MB) kept, 4 outstanding, of which 2 are leased (actor0,
    actor1), the oldest for 12 s; set aside 0, taken over 1`."""
    if queue.error is not None:
        return f"queue: {queue.error}"
    assert queue.bytes is not None
    assert queue.oldest_s is not None
    if queue.is_closed:
        return f"queue: closed, the trainer is done; set aside {queue.aside}, taken over {queue.claimed}"
    who = f" ({', '.join(queue.actors)})" if queue.actors else ""
    oldest = f", the oldest for {queue.oldest_s:.0f} s" if queue.outstanding else ""
    return (
        f"queue: {queue.entries} entries ({queue.bytes / 1e6:.1f} MB) kept, {queue.outstanding} outstanding, of which {queue.leased} are "
        f"leased{who}{oldest}; set aside {queue.aside}, taken over {queue.claimed}"
    )
