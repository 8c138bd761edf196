"""Logs to Weights & Biases."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ludic.errors import MissingExtraError
from ludic.training.loggers.base import plain_values

logger = logging.getLogger(__name__)

DEFAULT_PROJECT = "Ludic"


class WandbLogger:
    """Logs to the run that is open at the first `log` (`wandb.run`) and leaves it open. If no run
    is open, it starts a run, which `close` ends.

    The arguments are used for a run that it starts; named ones take precedence over `init_kwargs`.
    The project is `Ludic` unless it is passed or `WANDB_PROJECT` is set. With
    `init_kwargs={"reinit": ...}` it always calls `wandb.init`, and ends the run that this returns
    unless it is the one that was open.
    """

    def __init__(
        self,
        *,
        init_kwargs: Mapping[str, Any] | None = None,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        config: Mapping[str, Any] | None = None,
        dir: str | None = None,
        mode: str | None = None,
    ) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingExtraError.for_extra("wandb", "wandb") from error
        named = {
            "project": project,
            "name": name,
            "group": group,
            "tags": None if tags is None else list(tags),
            "notes": notes,
            "config": None if config is None else dict(config),
            "dir": dir,
            "mode": mode,
        }
        self.init_kwargs = {**(init_kwargs or {}), **{key: value for key, value in named.items() if value is not None}}
        if "project" not in self.init_kwargs and not os.environ.get("WANDB_PROJECT"):
            self.init_kwargs["project"] = DEFAULT_PROJECT
        self._run: Any = None
        self._owns_run = False

    def start(self) -> None:
        """Use the open run, or start one, if the first `log` has not done so."""
        if self._run is not None:
            return
        open_run = getattr(self._wandb, "run", None)
        if open_run is None or "reinit" in self.init_kwargs:
            self._run = self._wandb.init(**self.init_kwargs)
            self._owns_run = self._run is not open_run  # some values of `reinit` return the open run
            return
        self._run, self._owns_run = open_run, False
        if set(self.init_kwargs) - {"project"}:
            logger.warning("wandb: a run is open already and gets the values; %s have no effect on it", sorted(self.init_kwargs))

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        log = getattr(self._run, "log", self._wandb.log)  # the run's own method: another run may be started later
        log(plain_values(stats), step=step)

    def close(self) -> None:
        if self._run is not None and self._owns_run:
            getattr(self._run, "finish", self._wandb.finish)()
        self._run, self._owns_run = None, False

    def __enter__(self) -> WandbLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
