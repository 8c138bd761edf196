"""The files and the report of `ludic eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.files.atomic import write_text
from ludic.runs.report.files import show_files

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.eval import Interval, Measurement
    from ludic.tasks import Episode, EpisodicTask
    from ludic.tasks.episodic import Shown
    from ludic.tasks.success import Success
    from ludic.types import Rollout

SUMMARY, PICTURE, PROBLEMS = "summary.json", "accuracy.png", "problems.jsonl"
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class EvaluationResult:
    """Everything that the report uses."""

    measurement: Measurement
    rollouts: Sequence[Rollout]
    """The rollouts that were measured."""
    problems: Sequence[Episode]
    task: EpisodicTask
    success: Success
    solved_at: float | None
    """The reward from which an answer counts as right; None if nothing says what is right."""


def build_summary(result: EvaluationResult, facts: Mapping[str, Any]) -> str:
    """The content of summary.json: settings and all numbers. There is no accuracy if nothing says
    what is right."""
    numbers = result.measurement.to_dict()
    if result.solved_at is None:
        numbers |= {"accuracy": None, "accuracy_bounds": None, "pass_at_k": {}}
    return json.dumps({**facts, **numbers}, indent=2) + "\n"


def write(folder: Path, result: EvaluationResult, summary: str, *, title: str) -> None:
    """Write summary.json, problems.jsonl with one line for each problem, and accuracy.png if there
    is an accuracy."""
    from ludic.eval import write_jsonl
    from ludic.eval.picture import draw_measurements

    write_jsonl(folder / PROBLEMS, _make_problem_lines(result))
    if result.solved_at is not None:
        draw_measurements(folder / PICTURE, {"pass@k": result.measurement}, title=title)
    write_text(folder / SUMMARY, summary)


def _make_problem_lines(result: EvaluationResult) -> Iterator[dict[str, Any]]:
    """For each problem its question, the data's reference answer, the answers in the order of their
    rewards, and the counts."""
    of_problem = {str(problem["id"]): problem for problem in result.problems}
    shown: dict[str, list[Shown]] = {}
    for rollout in result.rollouts:
        key = str(rollout.meta["problem_id"])
        shown.setdefault(key, []).append(result.task.show(of_problem[key], rollout))
    for counted in result.measurement.problems:
        problem, texts = of_problem[counted.problem_id], shown.get(counted.problem_id, [])
        question = texts[0].question if texts else str(problem.get("question", problem["id"]))
        counts = counted.to_dict()
        if result.solved_at is None:
            del counts["right"]
        yield {
            "question": question,
            "reference": texts[0].expected if texts else None,
            "texts": [s.text for s in texts],
            **counts,
        }


def show(console: Console, result: EvaluationResult, folder: Path) -> None:
    """Print a table of numbers with intervals, the failures, and the files."""
    console.print(_make_table(result))
    if result.solved_at is None:
        console.print(result.success.why_unknown("solved_at"), highlight=False, markup=False)
    for line in _describe_failures(result.measurement, has_accuracy=result.solved_at is not None):
        console.print(line, highlight=False, markup=False, style="red")
    right = "" if result.solved_at is None else f" An answer is right if its reward is at least {result.solved_at:g}."
    console.print(f"[bold]What is rewarded[/]: the reward sees {result.task.reward_sees}.{right}", highlight=False)
    files = {
        folder / SUMMARY: "these numbers, for programs",
        folder / PICTURE: "accuracy with intervals, and the pass@k curve",
        folder / PROBLEMS: "questions, answers, rewards and failures by problem",
        folder / "rollouts.jsonl": "every complete episode",
        folder / "config.yaml": "the resolved recipe",
    }
    show_files(console, folder, files)


def _make_table(result: EvaluationResult) -> Any:
    from rich.table import Table

    measurement = result.measurement
    size = f"{len(measurement.problems)} problems x {measurement.samples_per_problem}"
    table = Table(title=f"Held-out problems: {size}", title_justify="left")
    table.add_column("")
    for column in ("mean", f"{measurement.confidence:.0%} interval", "problems"):
        table.add_column(column, justify="right")
    for label, interval in _make_rows(result).items():
        table.add_row(label, f"{interval.value:.3f}", _format_interval(interval), str(interval.num_problems))
    return table


def _make_rows(result: EvaluationResult) -> dict[str, Interval]:
    measurement, k = result.measurement, result.measurement.samples_per_problem
    rows: dict[str, Interval] = {}
    if result.solved_at is not None:
        rows[f"accuracy (avg@{k})" if k > 1 else "accuracy"] = measurement.accuracy
        rows |= {f"pass@{k}": interval for k, interval in measurement.pass_at_k.items() if k > 1}
    rows["score as rewarded" if result.task.reward_is_score else "reward"] = measurement.reward
    labels = {
        **result.task.facts,
        **result.task.measures,
        "cut_off": "reached the token limit",
        "answer_tokens": "tokens of an answer",
    }
    return rows | {labels.get(name, name): interval for name, interval in measurement.also.items()}


def _format_interval(interval: Interval) -> str:
    return "unknown" if interval.low is None or interval.high is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _describe_failures(measurement: Measurement, *, has_accuracy: bool) -> list[str]:
    """Empty if nothing failed."""
    if not measurement.num_failed_episodes:
        return []
    low, high = measurement.accuracy_bounds
    bounds = f"; if all were wrong the accuracy would be {low:.3f}, if all were right {high:.3f}" if has_accuracy else ""
    lines = [
        f"{measurement.num_failed_episodes} of {measurement.num_episodes} episodes failed and are excluded from all means{bounds}."
    ]
    if measurement.num_unanswered_problems:
        lines.append(f"{measurement.num_unanswered_problems} problems have no answer.")
    shown = list(measurement.errors.items())[:SHOWN_ERRORS]
    return lines + [f"  {count} x {error[:200]}" for error, count in shown]
