"""Weights & Biases."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ludic.errors import MissingExtraError

DEFAULT_PROJECT = "Ludic"


class WandbLogger:
    """Logs to a run of its own, started with the first statistics.

    Named arguments outrank `init_kwargs`. The project is `Ludic` unless it is given or `WANDB_PROJECT` is set.
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

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self.init_kwargs)
        self._wandb.log(dict(stats), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._wandb.finish()
            self._run = None

    def __enter__(self) -> WandbLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
