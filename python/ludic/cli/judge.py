"""`ludic judge eval`: measures a judge on labelled rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.runs.console import run_with_console

if TYPE_CHECKING:
    from ludic.eval.judge import JudgeReport

LABELS = {
    "accuracy": "agrees with the label",
    "first_preferred": "prefers the answer shown first (0.5: no bias)",
    "swap_agreement": "same winner in both orders",
    "self_agreement": "two samples agree",
    "obeyed": "worse answer gains by an order in it",
}


def judge_command(arguments: Sequence[str], *, samples: int, limit: int | None, json_only: bool) -> int:
    """Measure the judge of a recipe or of a run on the rows of `data`. Returns the exit status."""
    from ludic.data import load_data
    from ludic.eval.judge import evaluate_judge
    from ludic.recipes.build import build_judge

    configs = [str(Path(argument) / "config.yaml") for argument in arguments if (Path(argument) / "config.yaml").is_file()]
    recipe = compose([*configs, *(argument for argument in arguments if not (Path(argument) / "config.yaml").is_file())])
    if not isinstance(recipe.data, str) or (configs and not any(argument.startswith("data=") for argument in arguments)):
        raise ConfigError(
            "a judge is measured on labelled rows; set data=FILE of prompt, chosen, rejected or prompt, completion, label"
        )
    judge, data = build_judge(recipe), load_data(recipe.data, limit=limit, seed=recipe.seed)

    def work(console: Console) -> tuple[int, str]:
        report = asyncio.run(evaluate_judge(judge, data.rows, samples=samples))
        _show(console, report)
        bins = {name: values.tolist() for name, values in vars(report.calibration).items()}
        summary = {**asdict(report), "calibration": bins, "calibration_error": report.calibration_error, "model": judge.model}
        return 0, json.dumps(summary, indent=2) + "\n"

    return run_with_console(work, json_only=json_only)


def _show(console: Console, report: JudgeReport) -> None:
    table = Table(box=None, pad_edge=False)
    for column in (f"{report.num_rows} rows", "share", "95 % interval"):
        table.add_column(column, justify="left" if column.endswith("rows") else "right")
    for name, label in LABELS.items():
        interval: Any = getattr(report, name)
        if interval is not None:
            table.add_row(label, f"{interval.value:.3f}", f"{interval.low:.3f} to {interval.high:.3f}")
    table.add_row("ties", f"{report.ties:.3f}", "")
    table.add_row("calibration error", f"{report.calibration_error:.3f}", "")
    console.print(table)
    bins = report.calibration
    said = ", ".join(
        f"{p:.2f} → {y:.2f} ({n})" for p, y, n in zip(bins.confidence, bins.frequency, bins.counts, strict=True) if n
    )
    lines = [f"Probability by the verdicts → how often it came true (verdicts): {said}."]
    first = report.first_preferred
    if first is not None and not (first.low or 0.0) <= 0.5 <= (first.high or 1.0):
        lines.append(f"Position bias: it prefers the answer that is shown {'first' if first.value > 0.5 else 'second'}.")
    lines += [f"{count} rows have no verdict and are in no number: {error[:300]}" for error, count in report.errors.items()]
    for line in lines:
        console.print(line, markup=False, highlight=False)
