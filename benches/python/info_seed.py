"""InfoSeed on rising digits: whether the seed of fresh answers can be told.

    python -m benches.python.info_seed              # 3 seeds x 2 arms, 100 steps each
    python -m benches.python.info_seed --seeds 0 0 --steps 40

An arm is `ludic train maxent` with 4 seeds and a coefficient of the loss: 0.1, and 0. A seed
stands before the question, where this small model, which knows no tags, minds it. The share of
held-out answers whose seed is predicted is measured every 20 steps; by chance it is 0.25.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from ludic.cli.train import TrainCommand
from ludic.cli.training_command import run_command

SEEDS, PROBLEMS, EVERY = 4, 5, 20
COEFF = 0.1


class Point(NamedTuple):
    """A measurement."""

    step: int
    pred_acc: float
    pass_at_n: float
    reward: float
    answers: int


def measure(output: Path, *, seed: int, steps: int = 100, samples: int = 64, coeff: float = COEFF) -> list[Point]:
    """Train, and return the measurements of the run, the one before the first step at step 0."""
    name = f"seed{seed}-{coeff}"
    settings = [f"seed={seed}", f"steps={steps}", f"output={output}", f"name={name}", "threads=1"]
    settings += [f"info_seed.num_seeds={SEEDS}", f"info_seed.coeff={coeff}", f"info_seed.eval_samples={samples}"]
    settings += ['info_seed.template="{seed}{prompt}"', "evaluation.samples_per_prompt=8"]
    with redirect_stdout(StringIO()):  # the summary, which is in the folder too
        arguments = ["maxent", *settings, f"trainer.eval_every_n_steps={EVERY}"]
        run_command(TrainCommand(), arguments, resume=None, json_only=True, print_config=False)
    summary = json.loads((output / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    between = [(line["step"], line, "eval/") for line in lines if "eval_seed/pred_acc" in line and line["step"] < steps]
    answers = PROBLEMS * SEEDS * samples
    return [
        Point(step, values["eval_seed/pred_acc"], values["eval_seed/pass_at_n"], values[f"{prefix}sampled_reward"], answers)
        for step, values, prefix in [(0, summary["before"], ""), *between, (steps, summary["after"], "")]
    ]


def is_above_chance(point: Point) -> bool:
    """By more than four standard errors of chance."""
    chance = 1 / SEEDS
    return point.pred_acc > chance + 4 * sqrt(chance * (1 - chance) / point.answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(0, 2))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--coeffs", type=float, nargs="+", default=(COEFF, 0.0), help="coefficients of the loss: 0.1 and 0")
    options = parser.parse_args()
    print("| coefficient | seed | step: predicted | right of one of 4 | reward |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for coeff in options.coeffs:
            for seed in range(options.seeds[0], options.seeds[1] + 1):
                course = measure(Path(folder), seed=seed, steps=options.steps, coeff=coeff)
                predicted = ", ".join(f"{point.step}: {point.pred_acc:.3f}" for point in course)
                print(f"| {coeff} | {seed} | {predicted} | {course[-1].pass_at_n:.2f} | {course[-1].reward:.3f} |", flush=True)


if __name__ == "__main__":
    main()
