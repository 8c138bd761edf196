"""Old samples on a small task: which runs collapse, without a guard, with one, and corrections.

    python -m benches.python.off_policy                        # 5 seeds x 10 arms
    python -m benches.python.off_policy --seeds 1 1 trainer.lr=1e-3 --arms none skip

Each seed trains one small model on demonstrations. Each arm continues from it with `ludic train
sort algorithm=grpo` on samples that are up to `LAG` versions old, at a constant learning rate. The
arm `fresh` has no lag. A run collapsed if its held-out answers are right less often at the end than
before the first step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from ludic.runs.command import RunCommand
from ludic.runs.directory import RunDirectory

LAG, LR, STEPS = 12, 2e-3, 120
SMALL = ["task.args.digits=4", "rollout.prompts=16", "threads=1", "evaluation.prompts=100"]
START = ["mode=sft", "network.hidden_size=64", "network.intermediate_size=128", "warmup.steps=400", "warmup.batch_size=32"]
ARMS = {
    "fresh": ["inference.batches_ahead=0"],
    "none": [],
    "lower": ["callbacks.guard.ess=0.9", "callbacks.guard.action=lower"],
    "skip": ["callbacks.guard.ess=0.5", "callbacks.guard.action=skip"],
    "stop": ["callbacks.guard.ess=0.5", "callbacks.guard.action=stop"],
    **{name: [f"algorithm_args.correction={name}"] for name in ("truncated", "icepop", "kpop", "m2po", "dppo")},
}


def train(output: Path, name: str, *settings: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The summary of a run and its lines of reinforcement."""
    with redirect_stdout(StringIO()):
        RunCommand(RunDirectory, ["sort", *SMALL, f"output={output}", f"name={name}", *settings]).execute(json_only=True)
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    summary: dict[str, Any] = json.loads((output / name / "summary.json").read_text())
    return summary, [line for line in lines if "train/avg_total_reward" in line]


def compare(output: Path, seed: int, arms: Sequence[str], extra: Sequence[str]) -> None:
    if not (output / f"start{seed}").exists():
        train(output, f"start{seed}", f"seed={seed}", *START)
    old = [f"seed={seed}", f"model={output}/start{seed}/model", "mode=rl", f"steps={STEPS}", f"trainer.lr={LR}"]
    old += ["trainer.lr_scheduler_type=constant_with_warmup", f"inference.batches_ahead={LAG}"]
    for arm in arms:
        summary, lines = train(output, f"{arm}{seed}", *old, *ARMS[arm], *extra)
        before, after = (summary[when]["sampled_reward"] for when in ("before", "after"))
        rewards = [line["train/avg_total_reward"] for line in lines]  # a guard may stop the run before five steps
        best = max(fmean(rewards[i : i + 5]) for i in range(max(1, len(rewards) - 4)))
        ess = sorted(line["mismatch/ess"] for line in lines if "mismatch/ess" in line)
        acted = max(line.get("guard/lowered", 0) + line.get("guard/skipped", 0) for line in lines)
        cells = [f"{before:.3f}", f"{best:.3f}", f"{after:.3f}", "yes" if after < before else "no"]
        print(f"| {arm} | {seed} | {' | '.join(cells)} | {ess[len(ess) // 2]:.2f} | {acted:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(1, 5))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the recipe for all runs")
    options, settings = parser.parse_known_args()
    print("| arm | seed | before | best 5 steps | after | collapsed | median ess | guarded batches |\n" + "|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds[0], options.seeds[1] + 1):
            compare(Path(folder), seed, options.arms, [*options.settings, *settings])


if __name__ == "__main__":
    main()
