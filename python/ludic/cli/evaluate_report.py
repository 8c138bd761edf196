"""What `ludic eval` shows and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.files.atomic import write_text

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
class Found:
    """Everything that the report shows."""

    measurement: Measurement
    rollouts: Sequence[Rollout]
    """That it was made of."""
    problems: Sequence[Episode]
    task: EpisodicTask
    success: Success
    solved_at: float | None
    """The reward from which on these answers count as right; None where nothing says what is
    right."""


def summary_of(found: Found, facts: Mapping[str, Any]) -> str:
    """The content of summary.json: where it comes from, and all numbers; no accuracy where
    nothing says what is right."""
    numbers = found.measurement.to_dict()
    if found.solved_at is None:
        numbers |= {"accuracy": None, "accuracy_bounds": None, "pass_at_k": {}}
    return json.dumps({**facts, **numbers}, indent=2) + "\n"


def write(folder: Path, found: Found, summary: str, *, title: str) -> None:
    """summary.json, problems.jsonl with a line for each problem, and accuracy.png where there is
    an accuracy."""
    from ludic.eval import write_jsonl
    from ludic.eval.picture import draw_measurements

    write_jsonl(folder / PROBLEMS, _problem_lines(found))
    if found.solved_at is not None:
        draw_measurements(folder / PICTURE, {"pass@k": found.measurement}, title=title)
    write_text(folder / SUMMARY, summary)


def _problem_lines(found: Found) -> Iterator[dict[str, Any]]:
    """Of each problem its question, the answers in the order of their rewards, the reference of
    the data, and the counts."""
    of_problem = {str(problem["id"]): problem for problem in found.problems}
    shown: dict[str, list[Shown]] = {}
    for rollout in found.rollouts:
        key = str(rollout.meta["problem_id"])
        shown.setdefault(key, []).append(found.task.show(of_problem[key], rollout))
    for result in found.measurement.problems:
        problem, texts = of_problem[result.problem_id], shown.get(result.problem_id, [])
        question = texts[0].question if texts else str(problem.get("question", problem["id"]))
        counts = result.to_dict()
        if found.solved_at is None:
            del counts["right"]
        yield {
            "question": question,
            "reference": texts[0].expected if texts else None,
            "texts": [s.text for s in texts],
            **counts,
        }


def show(console: Console, found: Found, folder: Path) -> None:
    """A table of numbers with their intervals, what failed, and where the files are."""
    console.print(_table(found))
    if found.solved_at is None:
        console.print(found.success.why_unknown("solved_at"), highlight=False, markup=False)
    for line in _failure_lines(found.measurement, has_accuracy=found.solved_at is not None):
        console.print(line, highlight=False, markup=False, style="red")
    right = "" if found.solved_at is None else f" An answer is right from a reward of {found.solved_at:g} on."
    console.print(f"[bold]What is rewarded[/]: the reward sees {found.task.reward_sees}.{right}", highlight=False)
    console.print(f"[bold]Written to[/] {folder}/", highlight=False)
    notes = {
        SUMMARY: "this, for programs",
        PICTURE: "accuracy with intervals, and the pass@k curve",
        PROBLEMS: "questions, answers, rewards and failures by problem",
        "rollouts.jsonl": "every episode that was played to its end",
        "config.yaml": "the resolved recipe",
    }
    for name, note in notes.items():
        if (folder / name).exists():
            console.print(f"  {name:<15}{note}", highlight=False, markup=False)


def _table(found: Found) -> Any:
    from rich.table import Table

    measurement = found.measurement
    asked = f"{len(measurement.problems)} problems x {measurement.samples_per_problem}"
    table = Table(title=f"Held-out problems: {asked}", title_justify="left")
    table.add_column("")
    for column in ("mean", f"{measurement.confidence:.0%} interval", "problems"):
        table.add_column(column, justify="right")
    for label, interval in _rows(found).items():
        table.add_row(label, f"{interval.value:.3f}", _reach(interval), str(interval.num_problems))
    return table


def _rows(found: Found) -> dict[str, Interval]:
    measurement, k = found.measurement, found.measurement.samples_per_problem
    rows: dict[str, Interval] = {}
    if found.solved_at is not None:
        rows[f"accuracy (avg@{k})" if k > 1 else "accuracy"] = measurement.accuracy
        rows |= {f"pass@{k}": interval for k, interval in measurement.pass_at_k.items() if k > 1}
    rows["score as rewarded" if found.task.reward_is_score else "reward"] = measurement.reward
    labels = {
        **found.task.facts,
        **found.task.measures,
        "cut_off": "reached the token limit",
        "answer_tokens": "tokens of an answer",
    }
    return rows | {labels.get(name, name): interval for name, interval in measurement.also.items()}


def _reach(interval: Interval) -> str:
    return "unknown" if interval.low is None or interval.high is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _failure_lines(measurement: Measurement, *, has_accuracy: bool) -> list[str]:
    """Nothing, if nothing failed."""
    if not measurement.num_failed_episodes:
        return []
    low, high = measurement.accuracy_bounds
    bounds = f"; with all of them wrong the accuracy would be {low:.3f}, with all right {high:.3f}" if has_accuracy else ""
    lines = [f"{measurement.num_failed_episodes} of {measurement.num_episodes} episodes failed and are in no mean{bounds}."]
    if measurement.num_unanswered_problems:
        lines.append(f"{measurement.num_unanswered_problems} problems have no answer at all.")
    shown = list(measurement.errors.items())[:SHOWN_ERRORS]
    return lines + [f"  {count} x {error[:200]}" for error, count in shown]
