"""Trains the built-in sorting task with ludic and with TRL's GRPOTrainer, from the same initial
weights on the same problems, with the same number of samples and steps.

    python -m benches.python.compare_trl --trl-python .venv-trl/bin/python --out docs

TRL is not a dependency: it needs an environment of its own (`pip install trl==1.16.0 -c
constraints.txt`). This process warms a model up with ludic and trains it. A second process, with
that interpreter, runs this module with `--trl` and imports only TRL. Both models get the same
held-out evaluation. The script writes comparison.json and comparison.png, and prints the table of
benches/results/trl.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches.python.trl_grpo import grpo_config

PROMPTS, GROUP, MINIBATCHES = 32, 8, 2
ROOT = Path(__file__).parents[2]


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # for both sides: waiting threads soon sleep
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python", help="interpreter of an environment with TRL")
    parser.add_argument("--steps", type=int, default=120, help="batches of 32 problems x 8 samples")
    parser.add_argument("--seed", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl is not None:
        train_with_trl(args.trl, args.steps, args.seed, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(compare(Path(folder), args), args.out)


def compare(work: Path, args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Train with both from one warm model. Returns the results of each."""
    common = [f"seed={args.seed}", f"threads={args.threads}", f"output={work}"]
    run_ludic(*common, "name=warm", "steps=0")
    warm = work / "warm" / "model"
    write_problems(work, args.steps, args.seed)
    # A loaded model has a lower learning rate by default.
    settings = [*common, f"model={warm}", "warmup.steps=0", "trainer.lr=3e-4"]
    ours = run_ludic(*settings, "name=ludic", f"steps={args.steps}")
    command = [args.trl_python, "-m", "benches.python.compare_trl", "--trl", str(work), "--steps", str(args.steps)]
    subprocess.run([*command, "--seed", str(args.seed), "--threads", str(args.threads)], check=True, cwd=ROOT)
    theirs = json.loads((work / "trl.json").read_text())
    after = run_ludic(*common, f"model={work / 'trl' / 'model'}", "warmup.steps=0", "steps=0", "name=trl-measured")
    phases = ours["phases_s"]
    seconds = sum(phases[name] for name in ("rollout", "batching", "forward_backward", "optimizer", "publish", "other"))
    samples = args.steps * PROMPTS * GROUP
    return {
        "ludic": {
            "before": ours["before"],
            "after": ours["after"],
            "rewards": read_rewards(work / "ludic" / "metrics.jsonl"),
            "seconds": seconds,
            "samples_per_second": samples / seconds,
        },
        "trl": {
            "before": ours["before"],
            "after": after["before"],
            "rewards": theirs["rewards"],
            "seconds": theirs["seconds"],
            "samples_per_second": samples / theirs["seconds"],
        },
    }


def run_ludic(*overrides: str) -> dict[str, dict[str, float]]:
    """Run `ludic train` with these overrides. Returns its summary."""
    command = [sys.executable, "-c", "from ludic.cli.app import main; main()", "train", "--json", *overrides]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, dict[str, float]] = json.loads(process.stdout)
    return summary


def read_rewards(metrics: Path) -> list[float]:
    """The mean reward of each batch."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        line["train/avg_sampled_reward"]
        for line in lines
        if "train/avg_sampled_reward" in line and line.get("phase") == "reinforce"
    ]


def write_problems(work: Path, steps: int, seed: int) -> None:
    """Write the problems that ludic draws in this run, in the same order."""
    from random import Random

    from ludic.tasks.digits import DigitSort

    task, problems = DigitSort(), []
    for batch in range(steps):
        rng = Random(f"rollouts {seed} {batch}")
        for _ in range(PROMPTS):
            problem = task.draw(rng)
            rng.randrange(2**31)  # ludic draws the seed of the request from the same stream
            problems.append({"prompt": problem["question"], "answer": problem["answer"]})
    (work / "problems.json").write_text(json.dumps(problems))


def train_with_trl(work: Path, steps: int, seed: int, threads: int) -> None:
    """GRPO with TRL: two optimizer steps per batch, and the same schedule."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(work / "warm" / "model")
    tokenizer = AutoTokenizer.from_pretrained(work / "warm" / "model")
    data = Dataset.from_list(json.loads((work / "problems.json").read_text()))

    def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(text == target) for text, target in zip(completions, answer, strict=True)]

    config = grpo_config(
        work,
        group=GROUP,
        answer=8,
        seed=seed,
        max_steps=steps * MINIBATCHES,
        per_device_train_batch_size=PROMPTS * GROUP // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        warmup_steps=10 * MINIBATCHES,
    )
    trainer = GRPOTrainer(model=model, reward_funcs=exact_match, args=config, train_dataset=data, processing_class=tokenizer)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    means = [sum(rewards[i : i + MINIBATCHES]) / MINIBATCHES for i in range(0, len(rewards), MINIBATCHES)]
    trainer.model.save_pretrained(work / "trl" / "model")
    tokenizer.save_pretrained(work / "trl" / "model")
    (work / "trl.json").write_text(json.dumps({"seconds": seconds, "rewards": means}))


def report(results: dict[str, dict[str, object]], out: Path) -> None:
    """Write comparison.json and comparison.png to `out`, and print the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(results, indent=1) + "\n")
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for name, result in results.items():
        axes.plot(result["rewards"], label=name)
    axes.set(xlabel="batch of 32 problems x 8 samples", ylabel="mean reward", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "comparison.png", dpi=120)
    print("| | before: sampled / greedy | after: sampled / greedy | seconds | samples per second |\n|---|---|---|---|---|")
    for name, r in results.items():
        before, after = ("{sampled_reward:.3f} / {greedy_accuracy:.3f}".format(**r[key]) for key in ("before", "after"))
        print(f"| {name} | {before} | {after} | {r['seconds']:.1f} | {r['samples_per_second']:.0f} |")


if __name__ == "__main__":
    main()
