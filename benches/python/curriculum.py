"""Steps to a mean reward of .9 on the possible half of a set whose other half is impossible.

    python -m benches.python.curriculum                # 5 seeds x 4 arms
    python -m benches.python.curriculum --seeds 0 0 --steps 60

The set has 128 sorting problems of three digits, drawn by the seed; every second one wants another
answer. All runs begin with one warmed-up model. The possible problems are measured
every 5 steps. `answers` are all that were sampled, also to problems that the filter replaced;
`equal` is the share of trained groups whose rewards are equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from statistics import fmean

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.runs.command import RunCommand
from ludic.runs.directory import RunDirectory
from ludic.tasks import DigitSort
from ludic.tasks.episodic import Problem, ProblemList

FILTER = ["rollout.group_filter=nonzero_std", "rollout.patience=1000"]
ARMS = {
    "passes": [],
    "filter": FILTER,
    "curriculum": ["data.curriculum=pools"],
    "curriculum and filter": ["data.curriculum=pools", *FILTER],
}
DIGITS, PROBLEMS, EVERY, REACHED = 3, 128, 5, 0.9
PROMPTS, GROUP = 16, 8
SMALL = ["threads=1", "network.hidden_size=64", "network.intermediate_size=128"]


class HalfImpossible(ProblemList):
    """A list of sorting problems, of which every second one wants an answer that is too long to be
    given. The possible ones are measured."""

    digest = "half impossible"

    def __init__(self, seed: int) -> None:
        self._sort, rng = DigitSort(digits=DIGITS, num_heldout=1), Random(seed)
        drawn = {problem["id"]: problem for problem in (self._sort.draw(rng) for _ in range(2 * PROBLEMS))}
        self.training = list(drawn.values())[:PROBLEMS]
        self._possible = self.training[1::2]
        self.training[::2] = [Problem({**each, "answer": "impossible"}) for each in self.training[::2]]

    max_new_tokens = DIGITS + 2

    def heldout(self) -> Sequence[Problem]:
        return self._possible

    def make_env(self, problem: Problem) -> DatasetQAEnv:
        return self._sort.make_env(problem)


def run(folder: Path, name: str, *settings: str) -> list[dict[str, float]]:
    """Train; the lines of metrics.jsonl."""
    with redirect_stdout(StringIO()):  # the summary, which is in the folder too
        RunCommand(RunDirectory, [*settings, *SMALL, f"output={folder}", f"name={name}"]).execute(json_only=True)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def measure(folder: Path, seed: int, arm: str, steps: int) -> tuple[int | None, int, float]:
    """(steps to the reward, None if it was not reached; answers sampled till then; share of
    training groups with equal rewards)."""
    stop = ["callbacks.stop.metric=sampled_reward", f"callbacks.stop.at={REACHED}", f"trainer.eval_every_n_steps={EVERY}"]
    sizes = [f"rollout.prompts={PROMPTS}", f"rollout.group_size={GROUP}", "rollout.log_every=0", f"steps={steps}", f"seed={seed}"]
    start = [f"model={folder}/warm/model", "warmup.steps=0", f"evaluation.prompts={PROBLEMS // 2}"]
    task = ["task.kind=benches.python.curriculum:HalfImpossible", f"task.args.seed={seed}"]
    settings = [*task, *start, *sizes, *stop, "evaluation.samples_per_prompt=4", "checkpoint.every_n_steps=0"]
    settings += ["trainer.lr=1e-3", "trainer.lr_scheduler_type=constant", *ARMS[arm]]
    lines = [line for line in run(folder, f"{arm.replace(' ', '-')}-{seed}", *settings) if line["phase"] == "reinforce"]
    taken = [line for line in lines if "train/loss" in line]
    is_reached = max(line.get("eval/sampled_reward", 0.0) for line in lines) >= REACHED
    answers = sum(PROMPTS + line.get("groups/rejected", 0) for line in taken) * GROUP
    equal = fmean(line["train/frac_reward_zero_std"] for line in taken)
    return (int(taken[-1]["step"]) if is_reached else None), int(answers), equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(0, 4))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options = parser.parse_args()
    print(f"| seed | {' | '.join(f'{arm}: steps, answers, equal' for arm in options.arms)} |", flush=True)
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs) as pool:
        warm = [f"task.args.digits={DIGITS}", "task.args.num_heldout=1", "evaluation.prompts=1", "steps=0", "warmup.steps=400"]
        pool.submit(run, Path(folder), "warm", "sort", *warm).result()
        running = {seed: [pool.submit(measure, Path(folder), seed, arm, options.steps) for arm in options.arms] for seed in seeds}
        for seed, futures in running.items():
            cells = [
                f"{steps or f'> {options.steps}'}, {answers}, {equal:.2f}"
                for steps, answers, equal in (f.result() for f in futures)
            ]
            print(f"| {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
