"""What the trainers do with a public model on tasks of reasoning-gym: the tables and the picture of
docs/measured.md.

    make smollm2 && .venv/bin/pip install '.[reasoning-gym]'
    python -m benches.python.public_models --output FOLDER             # all, seeds 0 to 2
    python -m benches.python.public_models sums sums-lora --output FOLDER --seeds 0
    python -m benches.python.public_models --output FOLDER --show      # tables of what is there

A run is one command, which is printed. Runs follow one another; one that has finished in FOLDER is
not repeated. `--save NAME` writes benches/results/NAME.json and docs/NAME.png.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "target" / "models" / "smollm2"
_GYM = ["task.kind=reasoning_gym", "task.args.answer_in=number", "task.args.partial_credit=false"]
_SIZE = ["rollout.prompts=8", "rollout.group_size=8", "rollout.max_new_tokens=16", "steps=40"]
_HELD_OUT = ["evaluation.prompts=100", "evaluation.samples_per_prompt=2", "threads=2"]
_SUMS = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}"
_DIGITS = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
SUMS = [*_GYM, "task.args.name=chain_sum", f"task.args.config={_SUMS}", *_SIZE, *_HELD_OUT]
PRODUCTS = [*_GYM, "task.args.name=products", f"task.args.config={_DIGITS}", *_SIZE, *_HELD_OUT]
FULL, LORA = ["trainer.lr=1e-5"], ["lora.rank=16", "trainer.lr=3e-4"]
EXPERIMENTS: dict[str, list[str]] = {
    "sums": [*SUMS, *FULL],
    "sums-lora": [*SUMS, *LORA],
    "products": [*PRODUCTS, *FULL],
    "products-lora": [*PRODUCTS, *LORA],
    "sums-bfloat16": [*SUMS, *FULL, "dtype=bfloat16"],
    "sums-sft": [*SUMS, *FULL, "warmup.steps=10", "warmup.batch_size=16"],
}
"""Name -> settings of `ludic train`, besides model, seed and name."""


def run(name: str, seed: int, output: Path) -> None:
    """Run one seed of an experiment, unless it has finished, and note its processor seconds."""
    folder = output / f"{name}-{seed}"
    if (folder / "summary.json").is_file():
        return
    settings = [f"model={MODEL}", *EXPERIMENTS[name], f"seed={seed}", f"name={folder.name}", f"output={output}"]
    print("ludic train", shlex.join(settings), flush=True)
    cpu, started = _cpu_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "ludic.cli", "train", *settings], stdout=subprocess.DEVNULL, check=True)
    cost = {"cpu_s": _cpu_seconds() - cpu, "process_s": time.perf_counter() - started, "load": os.getloadavg()[0]}
    (folder / "cost.json").write_text(json.dumps(cost))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read(output: Path, name: str) -> list[dict[str, Any]]:
    """The finished runs of an experiment, by seed, with the reward of each step as `curve`."""
    found = []
    for folder in sorted(output.glob(f"{name}-[0-9]*")):
        if (folder / "summary.json").is_file():
            summary = json.loads((folder / "summary.json").read_text())
            steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            curve = [step["train/avg_sampled_reward"] for step in steps if "train/avg_sampled_reward" in step]
            cost = json.loads((folder / "cost.json").read_text()) if (folder / "cost.json").is_file() else {}
            found.append({**summary, "curve": curve, **cost})
    return found


def format_table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| run | seed | sampled before | after | greedy before | after | minutes | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        for each in runs:
            cells = [
                f"{_rate(each, when, rate)}" for rate in ("sampled_reward", "greedy_accuracy") for when in ("before", "after")
            ]
            memory = each["memory"]["process_peak_mb"] / 1024
            lines.append(f"| {name} | {each['seed']} | {' | '.join(cells)} | {each['wall_s'] / 60:.1f} | {memory:.1f} GiB |")
    return "\n".join(lines)


def _rate(summary: dict[str, Any], when: str, rate: str) -> str:
    low, high = summary["intervals"][when][rate]
    return f"{summary[when][rate]:.3f} ({low:.2f} to {high:.2f})"


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The mean reward of the sampled answers of each step, a thin line for each seed and a thick
    one for their mean over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), constrained_layout=True)
    for number, (name, runs) in enumerate(results.items()):
        length = min(len(each["curve"]) for each in runs)
        for each in runs:
            axes.plot(range(1, length + 1), each["curve"][:length], color=f"C{number}", alpha=0.25, linewidth=0.8)
        mean = [sum(each["curve"][step] for each in runs) / len(runs) for step in range(length)]
        smooth = [sum(mean[max(0, step - 4) : step + 1]) / len(mean[max(0, step - 4) : step + 1]) for step in range(length)]
        axes.plot(range(1, length + 1), smooth, color=f"C{number}", label=f"{name} (seeds: {len(runs)})")
    axes.set(xlabel="step of 64 answers", ylabel="reward of the sampled answers", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), help=", ".join(EXPERIMENTS))
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--save", metavar="NAME", help="write benches/results/NAME.json and docs/NAME.png")
    options = parser.parse_args()
    if not options.show:
        for seed in options.seeds:
            for name in options.experiments:
                run(name, seed, options.output)
    results = {name: runs for name in options.experiments if (runs := read(options.output, name))}
    print(format_table(results))
    if options.save:
        keys = ("seed", "before", "after", "intervals", "wall_s", "memory", "versions", "mismatch", "curve", "cpu_s", "load")
        record = {name: [{key: each.get(key) for key in keys} for each in runs] for name, runs in results.items()}
        folder = REPOSITORY / "benches" / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{options.save}.json").write_text(json.dumps(record, indent=1) + "\n")
        plot(results, REPOSITORY / "docs" / f"{options.save}.png")


if __name__ == "__main__":
    main()
