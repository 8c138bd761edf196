"""Logs to TensorBoard's event files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ludic.errors import MissingExtraError
from ludic.training.loggers.base import plain_values


class TensorboardLogger:
    """Writes each statistic as a scalar to `log_dir`, for `tensorboard --logdir`. The first `log`
    creates the file; values are flushed within `flush_secs` seconds and at `close`.

    >>> with TensorboardLogger("runs/a/tensorboard") as logger:
    ...     logger.log(1, {"train/loss": 0.5})
    """

    def __init__(self, log_dir: str | Path, *, flush_secs: int = 10) -> None:
        """Raises MissingExtraError without the package tensorboard."""
        try:
            importlib.import_module("tensorboard")
        except ImportError as error:
            raise MissingExtraError.for_extra("tensorboard", "tensorboard") from error
        self.log_dir, self.flush_secs = Path(log_dir), flush_secs
        self._writer: Any = None

    def start(self) -> None:
        """Create the file, if the first `log` has not done so."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.log_dir), flush_secs=self.flush_secs)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self.start()
        for key, value in plain_values(stats).items():
            if not isinstance(value, str):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorboardLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
