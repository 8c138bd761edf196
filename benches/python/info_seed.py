"""InfoSeed on rising digits: whether the seed of fresh answers can be told.

    python -m benches.python.info_seed              # 3 seeds x 2 arms, 100 steps each
    python -m benches.python.info_seed --seeds 0 0 --steps 40
    python -m benches.python.info_seed info_seed.loss=ce --coeffs 0 1

An arm is `ludic train maxent` with 4 seeds and a coefficient of the loss: 0.1, and 0. A seed
stands before the question, where this small model, which knows no tags, minds it. The share of
held-out answers whose seed is predicted is measured every 20 steps; by chance it is 0.25. Beside it
stands what the best guess from an answer could reach: the probabilities of all 1,000 answers of
three digits to each question and seed say it exactly. No loss on representations of given answers
can raise that; only other answers can.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ludic.models.loading import load_model, load_tokenizer
from ludic.runs.command import RunCommand
from ludic.runs.directory import RunDirectory
from ludic.training.info_seed.seed_tags import tag_prompt

SEEDS, PROBLEMS, EVERY = 4, 5, 20
COEFF = 0.1
TEMPLATE = "{seed}{prompt}"
ANSWERS = [f"{number:03d}" for number in range(1000)]


class Point(NamedTuple):
    """A measurement."""

    step: int
    pred_acc: float
    pass_at_n: float
    reward: float
    distinct: float
    """Different right answers among 32 to a question without a seed."""
    answers: int
    """Answers whose seed was predicted."""


def measure(
    output: Path, *, seed: int, steps: int = 100, samples: int = 64, coeff: float = COEFF, extra: Sequence[str] = ()
) -> list[Point]:
    """Train, and return the measurements of the run, the one before the first step at step 0. The
    run is in the folder `seed{seed}-{coeff}`."""
    name = f"seed{seed}-{coeff}"
    settings = [f"seed={seed}", f"steps={steps}", f"output={output}", f"name={name}", "threads=1"]
    settings += [f"info_seed.num_seeds={SEEDS}", f"info_seed.coeff={coeff}", f"info_seed.eval_samples={samples}"]
    settings += [f'info_seed.template="{TEMPLATE}"', "evaluation.samples_per_prompt=64"]
    with redirect_stdout(StringIO()):  # the summary, which is in the folder too
        arguments = ["maxent", *settings, f"trainer.eval_every_n_steps={EVERY}", *extra]
        RunCommand(RunDirectory, arguments).execute(json_only=True)
    summary = json.loads((output / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    between = [(line["step"], line, "eval/") for line in lines if "eval_seed/pred_acc" in line and line["step"] < steps]
    answers = PROBLEMS * SEEDS * samples
    return [
        Point(
            step,
            values["eval_seed/pred_acc"],
            values["eval_seed/pass_at_n"],
            values[f"{prefix}sampled_reward"],
            values[f"{prefix}distinct_of_32"],
            answers,
        )
        for step, values, prefix in [(0, summary["before"], ""), *between, (steps, summary["after"], "")]
    ]


def is_above_chance(point: Point) -> bool:
    """By more than four standard errors of chance."""
    chance = 1 / SEEDS
    return point.pred_acc > chance + 4 * sqrt(chance * (1 - chance) / point.answers)


def best_guess(probabilities: NDArray[np.float64]) -> tuple[float, float]:
    """Between which shares of the answers the best guess of the seed is right, given the question.

    probabilities: [questions, seeds, answers] of some of the possible answers. The others, whose
    probability is what is missing to 1, can be told at best always. Example: two seeds with (.6,
    .2) and (.2, .6) are guessed right in (.6 + .6) / 2 = .6, at best in .2 more.
    """
    seen = probabilities.max(axis=1).sum(axis=1) / probabilities.shape[1]
    missing = (1 - probabilities.sum(axis=2)).mean(axis=1)
    return float(seen.mean()), float((seen + missing).mean())


def probabilities_of(folder: Path) -> NDArray[np.float64]:
    """[questions, seeds, 1000] probability of each answer of three digits, with its end token."""
    model, tokenizer = load_model(str(folder), "float32").eval(), load_tokenizer(str(folder))
    answers = torch.tensor([[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in ANSWERS])
    found = np.zeros((PROBLEMS, SEEDS, len(ANSWERS)))
    for problem, seed in np.ndindex(PROBLEMS, SEEDS):
        prompt = torch.tensor(tokenizer.encode(tag_prompt(f"{problem}>", seed + 1, TEMPLATE)))
        with torch.no_grad():
            logps = model(input_ids=torch.cat([prompt.expand(len(answers), -1), answers], dim=1)).logits.log_softmax(dim=-1)
        chosen = logps[:, len(prompt) - 1 : -1].gather(2, answers[:, :, None])[..., 0]
        found[problem, seed] = chosen.sum(dim=1).double().exp().numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(0, 2))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--coeffs", type=float, nargs="+", default=(COEFF, 0.0), help="coefficients of the loss: 0.1 and 0")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the recipe for all runs")
    options = parser.parse_args()
    print(
        "| coefficient | seed | step: predicted | best guess | right of one of 4 | reward | distinct of 32 |\n" + "|---" * 7 + "|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for coeff in options.coeffs:
            for seed in range(options.seeds[0], options.seeds[1] + 1):
                course = measure(Path(folder), seed=seed, steps=options.steps, coeff=coeff, extra=options.settings)
                least, most = best_guess(probabilities_of(Path(folder) / f"seed{seed}-{coeff}" / "model"))
                predicted, last = ", ".join(f"{point.step}: {point.pred_acc:.3f}" for point in course), course[-1]
                cells = [f"{least:.3f} to {most:.3f}", f"{last.pass_at_n:.2f}", f"{last.reward:.3f}", f"{last.distinct:.1f}"]
                print(f"| {coeff} | {seed} | {predicted} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
