"""The settings of the queue between actors and the trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional
from urllib.parse import parse_qsl, urlsplit

from ludic.errors import ConfigError

URL_VARIABLE = "LUDIC_QUEUE_URL"
FILE = "queue.sqlite"
"""The queue in the folder of a run, if no address is given."""


@dataclass
class QueueSection:
    """The queue of a run with actors (`place.actors`)."""

    url: Optional[str] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """redis://HOST:6379/0, or rediss:// for TLS: a Redis server, for actors on other machines. A
    name that ends in .sqlite: a file in the run's folder, for actors on this machine, which is the
    default with `place.actors`. The variable LUDIC_QUEUE_URL replaces the address; one with a
    password belongs there."""
    order: str = "exact"
    """`exact`: each batch has its own prompts, sampled by the version `inference.batches_ahead`
    before it, so that the run does not depend on when actors finish or die. `arrival`: a batch has
    the prompts that are finished first."""
    max_lag: Optional[int] = None  # noqa: UP045
    """With `order=arrival`: a step waits for prompts that are still being answered by a version
    this much older. Null: `inference.batches_ahead` + 2."""
    prompts_per_entry: Optional[int] = None  # noqa: UP045
    """Prompts that an actor answers at a time; must divide `rollout.prompts`. More are faster,
    fewer are shared by more actors. Null: at most a quarter of a batch. The last digits of results
    depend on it."""
    lease_s: float = 60.0
    """Seconds after which another actor takes the prompts of one that died."""
    patience_s: float = 300.0
    """Seconds without an answer of the queue, or without any actor at work, after which the run
    ends; it can be resumed."""


def find_queue(section: QueueSection, folder: Path) -> str:
    """The address of the queue of the run in `folder`, with the password if it has one: never print
    it. Raises `ConfigError` if `LUDIC_QUEUE_URL` is no address."""
    address = os.environ.get(URL_VARIABLE)
    if address and "://" not in address and not address.endswith(".sqlite"):
        raise ConfigError(
            f"{URL_VARIABLE} must begin with redis:// or rediss://, or be a file name in .sqlite; its value ({len(address)} characters) is "
            "not shown, since it may have a password"
        )
    address = address or section.url or FILE
    return address if "://" in address else str(folder / address)


def check_url(url: str) -> None:
    """Raise `ConfigError` for what is no address of a queue, and for one that may have a
    password."""
    if "://" not in url and url.endswith(".sqlite"):
        return
    shown = _hide_password(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"queue.url ({shown}) has no readable host") from None
    if parts.scheme not in ("redis", "rediss"):
        raise ConfigError(f"queue.url ({shown}) must begin with redis:// or rediss://, or be a file name in .sqlite")
    after_host = parts.path + parts.query + parts.fragment
    named = any(name.lower().endswith("password") for name, _ in parse_qsl(parts.query))
    if parts.password or "@" in after_host or named:  # a password with a `/` ends the host, as in redis://:/secret@host
        raise ConfigError(
            f"queue.url ({shown}) has a password, and settings are written to config.yaml and sent to trackers; set {URL_VARIABLE} to "
            "the whole address, and queue.url to the address without it"
        )


def _hide_password(url: str) -> str:
    """The address to show: `redis://***@host/0` for `redis://user:secret@host/0?ssl_password=x`.

    Everything before the last `@` is hidden, since a password may hold any character.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    _, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{place.partition('?')[0].partition('#')[0]}"
