"""Run `ludic train`, `ludic sft` and `ludic train-rm` as a user would, and read what they wrote."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ludic.cli.app import app

NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
"""Settings of a model that trains in milliseconds."""


def ludic(command: str, *arguments: str) -> str:
    """Run a command that must succeed. Returns its standard output."""
    result = CliRunner().invoke(app, [command, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def exit_status(command: str, *arguments: str) -> int:
    return CliRunner().invoke(app, [command, *arguments]).exit_code


def refused(command: str, *arguments: str) -> str:
    """Run a command that must be refused. Returns its error message."""
    result = CliRunner().invoke(app, [command, *arguments])
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.stderr


def train_until(command: str, step: int, arguments: list[str], *, phase: str | None = None) -> int:
    """Run a command and send it one SIGINT, as Ctrl-C would, after the metrics of `step` (of
    `phase`) are written. Returns the exit status."""
    from ludic.training.loggers import JSONLLogger

    interrupted: list[int] = []

    class Interrupting(JSONLLogger):
        def log(self, number: int, stats: Any) -> None:
            super().log(number, stats)
            if number == step and phase in (None, stats["phase"]) and not interrupted:
                interrupted.append(number)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.runs.loggers.JSONLLogger", Interrupting)
        return exit_status(command, *arguments)


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_weights(one: Path, two: Path) -> bool:
    """Whether two runs saved bitwise equal models."""
    first, second = (load_file(run / "model" / "model.safetensors") for run in (one, two))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
