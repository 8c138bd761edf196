"""What `ludic eval` shows and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.recipes.run_directory import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.envs.tasks import EpisodicTask
    from ludic.eval import Interval, Measurement

SUMMARY, PICTURE, PROBLEMS = "summary.json", "accuracy.png", "problems.jsonl"
SHOWN_ERRORS = 5


def summary_of(measurement: Measurement, facts: Mapping[str, Any]) -> str:
    """The content of summary.json: where it comes from, and all numbers."""
    return json.dumps({**facts, **measurement.to_dict()}, indent=2) + "\n"


def write(folder: Path, measurement: Measurement, summary: str, *, title: str) -> None:
    """summary.json, problems.jsonl with a line for each problem, and accuracy.png."""
    from ludic.eval import write_jsonl
    from ludic.eval.picture import draw_measurements

    write_jsonl(folder / PROBLEMS, (problem.to_dict() for problem in measurement.problems))
    draw_measurements(folder / PICTURE, {"pass@k": measurement}, title=title)
    write_text(folder / SUMMARY, summary)


def show(console: Console, measurement: Measurement, folder: Path, task: EpisodicTask) -> None:
    """A table of numbers with their intervals, what failed, and where the files are."""
    console.print(_table(measurement, task))
    for line in _failure_lines(measurement):
        console.print(line, highlight=False, markup=False, style="red")
    console.print(f"[bold]What is right[/]: the reward sees {task.reward_sees}.", highlight=False)
    console.print(f"[bold]Written to[/] {folder}/", highlight=False)
    notes = {
        SUMMARY: "this, for programs",
        PICTURE: "accuracy with intervals, and the pass@k curve",
        PROBLEMS: "answers, right answers and failures by problem",
        "rollouts.jsonl": "every episode that was played to its end",
        "config.yaml": "the resolved recipe",
    }
    for name, note in notes.items():
        console.print(f"  {name:<15}{note}", highlight=False, markup=False)


def _table(measurement: Measurement, task: EpisodicTask) -> Any:
    from rich.table import Table

    asked = f"{len(measurement.problems)} problems x {measurement.samples_per_problem}"
    table = Table(title=f"Held-out problems: {asked}", title_justify="left")
    table.add_column("")
    for column in ("mean", f"{measurement.confidence:.0%} interval", "problems"):
        table.add_column(column, justify="right")
    for label, interval in _rows(measurement, task).items():
        table.add_row(label, f"{interval.value:.3f}", _reach(interval), str(interval.num_problems))
    return table


def _rows(measurement: Measurement, task: EpisodicTask) -> dict[str, Interval]:
    k = measurement.samples_per_problem
    rows = {f"accuracy (avg@{k})" if k > 1 else "accuracy": measurement.accuracy}
    rows |= {f"pass@{k}": interval for k, interval in measurement.pass_at_k.items() if k > 1}
    rows["reward"] = measurement.reward
    labels = {**task.facts, "cut_off": "reached the token limit", "answer_tokens": "tokens of an answer"}
    return rows | {labels.get(name, name): interval for name, interval in measurement.also.items()}


def _reach(interval: Interval) -> str:
    return "unknown" if interval.low is None or interval.high is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _failure_lines(measurement: Measurement) -> list[str]:
    """Nothing, if nothing failed."""
    if not measurement.num_failed_episodes:
        return []
    low, high = measurement.accuracy_bounds
    lines = [
        f"{measurement.num_failed_episodes} of {measurement.num_episodes} episodes failed and are in no mean; with all of them wrong "
        f"the accuracy would be {low:.3f}, with all right {high:.3f}."
    ]
    if measurement.num_unanswered_problems:
        lines.append(f"{measurement.num_unanswered_problems} problems have no answer at all.")
    shown = list(measurement.errors.items())[:SHOWN_ERRORS]
    return lines + [f"  {count} x {error[:200]}" for error, count in shown]
