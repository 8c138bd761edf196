"""Logs to Trackio: a local database, your own server, or the Hugging Face Hub."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ludic.errors import MissingExtraError
from ludic.training.loggers.base import plain_values

DEFAULT_PROJECT = "Ludic"


class TrackioLogger:
    """Logs to a new run, which the first `log` starts. Without `space_id` and `server_url` the data
    stays on this machine; `trackio show` displays it.

    Named arguments take precedence over `init_kwargs`, the other arguments of `trackio.init`. The
    project is `Ludic` unless it is passed or `TRACKIO_PROJECT` is set.
    """

    def __init__(
        self,
        *,
        init_kwargs: Mapping[str, Any] | None = None,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        resume: str | None = None,
    ) -> None:
        """Raises MissingExtraError without the package trackio. `resume`: whether to continue a run
        with this name: never (the default), allow or must."""
        try:
            self._trackio = importlib.import_module("trackio")
        except ImportError as error:
            raise MissingExtraError.for_extra("trackio", "trackio") from error
        named = {
            "project": project,
            "name": name,
            "group": group,
            "config": None if config is None else dict(config),
            "space_id": space_id,
            "server_url": server_url,
            "resume": resume,
        }
        explicit = {**(init_kwargs or {}), **{key: value for key, value in named.items() if value is not None}}
        self.init_kwargs = {"project": os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT, **explicit}
        self._run: Any = None

    def start(self) -> None:
        """Start the run, if the first `log` has not done so."""
        if self._run is None:
            self._run = self._trackio.init(**self.init_kwargs)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        self._run.log(plain_values(stats), step=step)

    def close(self) -> None:
        """End the run. All values are in the database afterwards."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def __enter__(self) -> TrackioLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
