"""The picture of the live dashboard in the README, from a run of `ludic train`.

    python -m benches.python.dashboard docs/dashboard.svg            # trains, about a minute
    python -m benches.python.dashboard docs/dashboard.svg runs/NAME  # of a run that there is

It replays `metrics.jsonl` through the logger that `ludic train` shows on a terminal.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ludic.runs.loggers import DASHBOARD_KEYS, MEASURED_KEYS, PROGRESS_KEYS
from ludic.runs.reinforce import REINFORCE_KEYS
from ludic.training.loggers import RichLiveLogger
from ludic.training.loggers.base import Duration
from ludic.training.stats import SAMPLED_REWARD

WIDTH = 118
"""Columns of the terminal."""
SHARE = 0.6
"""The picture is of this share of the steps."""
FONT = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)
"""Fonts that rich would have the reader's browser fetch."""


def draw(lines: Iterable[Mapping[str, Any]], *, share: float = SHARE) -> str:
    """The dashboard as SVG. `lines`: those of metrics.jsonl."""
    trained = [line for line in lines if line["phase"] == "reinforce"]
    until = round(share * max(line["step"] for line in trained))
    logger = RichLiveLogger(
        keys=[*REINFORCE_KEYS, *PROGRESS_KEYS, *MEASURED_KEYS, *DASHBOARD_KEYS],
        spark_key=SAMPLED_REWARD,
        console=Console(width=WIDTH, file=io.StringIO()),
    )
    latest: dict[str, Any] = {}
    with logger:
        for line in trained:
            if line["step"] <= until:
                stats = {key: value for key, value in line.items() if key not in ("phase", "step") and value is not None}
                logger.log(line["step"], stats)
                latest |= stats
    latest["perf/time_left_s"] = Duration(latest.get("perf/time_left_s", 0.0))
    picture = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    picture.print(logger.render(until, latest))
    return FONT.sub("", picture.export_svg(title="ludic train"))


def train(folder: Path) -> Path:
    """The folder of a new run."""
    from ludic.cli.app import app

    app(["train", "seed=40", "trainer.eval_every_n_steps=20", f"output={folder}", "name=run"], standalone_mode=False)
    return folder / "run"


def main(arguments: list[str]) -> None:
    place, *given = arguments
    with tempfile.TemporaryDirectory() as folder:
        run = Path(given[0]) if given else train(Path(folder))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        Path(place).write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
