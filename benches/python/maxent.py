"""MaxEnt-GRPO and its rivals on rising digits: the tables and the picture of docs/maxent.md.

    python -m benches.python.maxent    # 5 seeds x 6 arms, 13 minutes of CPU
    python -m benches.python.maxent --seeds 0 0 --arms maxent grpo
    python -m benches.python.maxent --output runs/maxent --picture docs/maxent.png

An arm is `ludic train maxent` with the settings of `ARMS`; the policy before reinforcement is the
same for all arms of a seed. With `--output`, runs that are there already are read, not repeated,
and stopped ones are resumed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from ludic.eval.picture import make_figure
from ludic.runs.base import TrainingRun
from ludic.runs.command import RunCommand
from ludic.runs.directory import RunDirectory
from ludic.training.loss import CompositeLoss, EntropyBonus, LossTerm

REWARD, OF_8, OF_32, ENTROPY = MEASURES = ("sampled_reward", "distinct_of_8", "distinct_of_32", "entropy_of_right")
EVERY = 10
"""Steps between two measurements of a run."""


@dataclass(frozen=True)
class Arm:
    """One row of the table."""

    label: str
    settings: Sequence[str]
    entropy_bonus: float = 0.0


DOCUMENT = ["algorithm_args={tau: 0.3, beta: 0.1, sampler_exponent: 0, form: likelihood, baseline: none, normalizer: samples}"]
"""The guide of MaxEnt-GRPO: weighted mean log-probabilities, and the KL of their means."""

ARMS = {
    "grpo": Arm("GRPO", ["algorithm=grpo"]),
    "entropy": Arm("GRPO + entropy bonus .05", ["algorithm=grpo"], entropy_bonus=0.05),
    "kl": Arm("GRPO + .1 KL to the start", ["algorithm=grpo", "algorithm_args.reference_kl=0.1"]),
    "document": Arm("MaxEnt as documented: tau .3, beta .1", [*DOCUMENT, "algorithm_args.kl_level=sequence"]),
    "document_token": Arm("the same with the KL of each token", [*DOCUMENT, "algorithm_args.kl_level=token"]),
    "maxent": Arm("MaxEnt: tau .1, beta 0, shared among the best", []),
    "unshared": Arm("MaxEnt: tau .1, beta 0, not shared", ["algorithm_args.sampler_exponent=0"]),
}
Point = tuple[int, dict[str, float]]


def add_entropy_bonus(run: TrainingRun[Any, Any, Any], coeff: float) -> None:
    """Put an entropy bonus beside the loss of the recipe."""
    if coeff:
        algorithm = run.parts.algorithm
        terms = [LossTerm("policy", algorithm.loss), LossTerm("entropy", EntropyBonus(coeff))]
        run.parts.algorithm = replace(algorithm, loss=CompositeLoss(terms))


def train_arm(output: Path, extra: Sequence[str], arm: str, seed: int) -> list[Point]:
    """The measurements of a run, the one before reinforcement at step 0."""
    folder = output / f"{arm}-{seed}"
    if not is_finished(folder):
        settings = [f"seed={seed}", f"output={output}", f"name={folder.name}", "threads=1", f"trainer.eval_every_n_steps={EVERY}"]
        chosen = ARMS[arm]
        begun = folder if folder.exists() else None
        arguments = ["maxent", *settings, *chosen.settings, *extra] if begun is None else []
        with redirect_stdout(StringIO()):  # the summary, which is in the folder too
            add = partial(add_entropy_bonus, coeff=chosen.entropy_bonus)
            RunCommand(RunDirectory, arguments, resume=begun, on_set_up=add).execute(json_only=True)
    if not is_finished(folder):
        raise SystemExit(f"{folder} was stopped; the same command with --output {output} goes on with it")
    return read_course(folder)


def is_finished(folder: Path) -> bool:
    path = folder / "summary.json"
    return path.is_file() and json.loads(path.read_text())["status"] == "finished"


def read_course(folder: Path) -> list[Point]:
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = summary["steps"]
    between = [(line["step"], pick(line, "eval/")) for line in lines if f"eval/{REWARD}" in line and line["step"] < steps]
    return [(0, pick(summary["before"])), *between, (steps, pick(summary["after"]))]


def pick(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    return {name: values[prefix + name] for name in MEASURES}


def format_ranges(measured: Sequence[dict[str, float]]) -> str:
    """The cells of a row: means, and the range over seeds."""
    cells = []
    for name, digits in zip(MEASURES, (3, 1, 1, 2), strict=True):
        values = [rates[name] for rates in measured]
        cells.append(f"{fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})")
    return " | ".join(cells)


def format_table(courses: dict[str, list[list[Point]]]) -> str:
    head = "| arm | reward | distinct of 8 | distinct of 32 | entropy of right |\n|---|---|---|---|---|"
    before = format_ranges([course[0][1] for course in next(iter(courses.values()))])
    rows = [f"| {ARMS[arm].label} | {format_ranges([course[-1][1] for course in runs])} |" for arm, runs in courses.items()]
    return "\n".join([head, f"| before | {before} |", *rows])


def format_at_equal_reward(courses: dict[str, list[list[Point]]]) -> str:
    """How many distinct answers the others have, when they first have the reward that MaxEnt ends
    with, and then MaxEnt's, for each seed."""
    lines = []
    for arm in (name for name in courses if name in ("grpo", "entropy", "kl")):
        pairs = []
        for ours, theirs in zip(courses["maxent"], courses[arm], strict=True):
            aim = ours[-1][1]
            reached = next((rates[OF_32] for _, rates in theirs if rates[REWARD] >= aim[REWARD]), None)
            pairs.append(f"{'not reached' if reached is None else f'{reached:.1f}'} / {aim[OF_32]:.1f}")
        lines.append(f"| {ARMS[arm].label} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def format_seeds(courses: dict[str, list[list[Point]]], seeds: Sequence[int]) -> str:
    """Reward and distinct answers of 32 of every run."""
    head = f"| arm | {' | '.join(map(str, seeds))} |\n|---|{'---|' * len(seeds)}"
    rows = [
        f"| {ARMS[arm].label} | {' | '.join(f'{run[-1][1][REWARD]:.3f} / {run[-1][1][OF_32]:.1f}' for run in runs)} |"
        for arm, runs in courses.items()
    ]
    return "\n".join([head, *rows])


def draw(path: Path, courses: dict[str, list[list[Point]]]) -> None:
    """Reward and distinct answers over steps: each seed thin, the mean of the seeds thick."""
    figure = make_figure((9, 4))
    places = figure.subplots(1, 2)
    for axes, name, title in zip(
        places, (REWARD, OF_32), ("reward of sampled answers", "distinct right answers of 32"), strict=True
    ):
        for colour, arm in enumerate(arm for arm in ("maxent", "grpo") if arm in courses):
            steps = [step for step, _ in courses[arm][0]]
            values = [[rates[name] for _, rates in course] for course in courses[arm]]
            for run in values:
                axes.plot(steps, run, color=f"C{colour}", alpha=0.25, linewidth=1)
            label = "MaxEnt-GRPO" if arm == "maxent" else "GRPO"
            axes.plot(steps, [fmean(at) for at in zip(*values, strict=True)], color=f"C{colour}", linewidth=2, label=label)
        axes.set(xlabel="step", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right" if name == REWARD else "lower left")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(11, 15))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=[arm for arm in ARMS if arm != "unshared"])
    parser.add_argument("--output", type=Path, help="folder of the runs; without it, they are not kept")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    parser.add_argument("--processes", type=int, default=2)
    options, extra = parser.parse_known_args()
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    with tempfile.TemporaryDirectory() as kept_nowhere:
        output = options.output or Path(kept_nowhere)
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
            train = partial(train_arm, output, extra)
            waiting = {arm: [pool.submit(train, arm, seed) for seed in seeds] for arm in options.arms}
            courses = {arm: [run.result() for run in runs] for arm, runs in waiting.items()}
    print(format_table(courses), format_seeds(courses, seeds), sep="\n\n")
    if "maxent" in courses:
        print(f"\nDistinct of 32 when MaxEnt's last reward is first reached / MaxEnt's:\n{format_at_equal_reward(courses)}")
    if options.picture:
        draw(options.picture, courses)


if __name__ == "__main__":
    main()
