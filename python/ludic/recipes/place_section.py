"""The settings of the processes of a run: how many actors there are, and who restarts them."""

from __future__ import annotations

from dataclasses import dataclass

from ludic.errors import ConfigError


@dataclass
class PlaceSection:
    """The processes of a run. By default there is one, which samples and trains."""

    actors: int = 0
    """Actors that are started on this machine: processes that sample for the trainer, each with a
    model of its own. 0: none; with `queue.url`, actors that are started by hand are waited for."""
    restarts: int = 3
    """How often an actor that fails is started again in ten minutes; one failure more ends the
    run, which can be resumed."""


def check_place(section: PlaceSection) -> None:
    """Raise `ConfigError` for numbers that make no sense."""
    for name, value in (("actors", section.actors), ("restarts", section.restarts)):
        if value < 0:
            raise ConfigError(f"place.{name} ({value}) must be >= 0")
