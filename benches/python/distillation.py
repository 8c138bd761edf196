"""Distillation where rewards are sparse: the same students with GRPO, with the teacher alone, and
with both.

    python -m benches.python.distillation --seeds 0 4 --output target/distillation

The task is `sort` with five digits. One demonstration in a hundred of the students' warm-up is
right, so most groups of answers earn nothing. The teacher is a run on demonstrations of which a
quarter are right. All arms of a seed begin with the same warmed-up student.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ludic.cli.app import app

COMMON = [
    *("sort", "threads=1", "task.args.digits=5", "network.hidden_size=64", "network.intermediate_size=192"),
    *("rollout.prompts=16", "evaluation.prompts=200", "evaluation.samples_per_prompt=2"),
    *("rollout.log_every=0", "checkpoint.every_n_steps=0"),
]
WARMUP = ["warmup.steps=250", "warmup.batch_size=32"]
SPARSE = ["task.args.right=0.01", "task.args.backwards=0.6"]
EVERY = 10
"""Steps whose mean reward is printed together."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.distillation", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 4), metavar=("FIRST", "LAST"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("target/distillation"))
    parser.add_argument("--teacher", type=Path, help="folder of a model; default: one is trained")
    options = parser.parse_args()
    teacher = options.teacher
    if teacher is None:
        print_row("teacher", 40, train(options.output, "teacher", [*COMMON, *WARMUP, "seed=40", "steps=80"]))
        teacher = options.output / "teacher" / "model"
    arms = {
        "grpo": ["algorithm=grpo"],
        "opd": ["algorithm=opd", f"teacher={teacher}"],
        "both": ["algorithm=opd", f"teacher={teacher}", "algorithm_args.reward_coeff=1"],
    }
    for seed in range(options.seeds[0], options.seeds[1] + 1):
        train(options.output, f"student-{seed}", [*COMMON, *WARMUP, *SPARSE, f"seed={seed}", "steps=0"])
        start = [f"model={options.output / f'student-{seed}' / 'model'}", "warmup.steps=0", "trainer.lr=3e-4"]
        for name, settings in arms.items():
            arguments = [*COMMON, *SPARSE, *start, f"seed={seed}", f"steps={options.steps}", *settings]
            print_row(name, seed, train(options.output, f"{name}-{seed}", arguments))


def train(output: Path, name: str, arguments: list[str]) -> tuple[dict[str, Any], list[float]]:
    """The summary of a run, and the mean reward of every `EVERY` steps."""
    done = CliRunner().invoke(app, ["train", *arguments, f"output={output}", f"name={name}"])
    if done.exit_code:
        raise SystemExit(done.output[-2000:])
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [
        line["train/avg_sampled_reward"] for line in lines if line["phase"] == "reinforce" and "train/avg_sampled_reward" in line
    ]
    means = [sum(part) / len(part) for part in (rewards[i : i + EVERY] for i in range(0, len(rewards), EVERY))]
    return json.loads((output / name / "summary.json").read_text()), means


def print_row(name: str, seed: int, found: tuple[dict[str, Any], list[float]]) -> None:
    """One line of a table in Markdown."""
    summary, means = found
    before, after = (summary[when]["sampled_reward"] for when in ("before", "after"))
    print(f"| {name} | {seed} | {before:.3f} | {' '.join(f'{mean:.3f}' for mean in means)} | {after:.3f} |", flush=True)


if __name__ == "__main__":
    main()
