"""A run of `ludic train` that is interrupted at a given step."""

import os
import signal
from typing import Any

import pytest
from typer.testing import CliRunner

from ludic.cli import app


def train_until(phase: str, step: int, arguments: list[str]) -> int:
    """Interrupt this process, as Ctrl-C would, when the metrics of that step are written; the exit status."""
    from ludic.training.loggers import JSONLLogger

    class Interrupting(JSONLLogger):
        def log(self, number: int, stats: Any) -> None:
            super().log(number, stats)
            if (stats["phase"], number) == (phase, step):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.recipes.run.JSONLLogger", Interrupting)
        return CliRunner().invoke(app, ["train", *arguments]).exit_code
