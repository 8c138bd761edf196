"""The curves of a run, from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludic.files.json_values import is_finite
from ludic.runs.reading import read_steps

MAX_POINTS = 4000
"""Steps of a phase that are kept; of more, every k-th and the last, and all evaluations."""
_OF_EVALUATIONS = ("eval/", "eval_seed/")


def read_series(run: Path) -> dict[str, dict[str, Any]]:
    """For each phase, in the order of the file: `steps` [N], and `values`: metric to its N values,
    null where a step has none. A step that was repeated has its last values.

    A line of a training step repeats the numbers of the last evaluation: they count only at the
    step that was evaluated."""
    phases: dict[str, dict[int, dict[str, float]]] = {}
    for line in read_steps(run):
        steps = phases.setdefault(str(line.get("phase", "train")), {})
        is_evaluated = line.get("eval/step", line["step"]) == line["step"]
        numbers = {
            key: round_number(value)
            for key, value in line.items()
            if key not in ("step", "train/step", "eval/step")
            and is_finite(value)
            and (is_evaluated or not key.startswith(_OF_EVALUATIONS))
        }
        steps.setdefault(line["step"], {}).update(numbers)
    return {phase: _make_columns(steps) for phase, steps in phases.items()}


def _make_columns(by_step: dict[int, dict[str, float]]) -> dict[str, Any]:
    steps = _thin(by_step)
    names = dict.fromkeys(name for step in steps for name in by_step[step])
    return {"steps": steps, "values": {name: [by_step[step].get(name) for step in steps] for name in sorted(names)}}


def _thin(by_step: dict[int, dict[str, float]]) -> list[int]:
    steps = sorted(by_step)
    stride = -(-len(steps) // MAX_POINTS)
    return [
        step
        for place, step in enumerate(steps)
        if place % stride == 0 or place == len(steps) - 1 or any(key.startswith(_OF_EVALUATIONS) for key in by_step[step])
    ]


def round_number(value: float) -> float:
    """Six significant digits, which is more than a page shows."""
    return float(f"{value:.6g}")
