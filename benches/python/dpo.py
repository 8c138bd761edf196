"""What `ludic dpo` learns from the built-in preferences, per seed: the table of docs/dpo.md.

    python -m benches.python.dpo --seeds 70 74 threads=1
    python -m benches.python.dpo --seeds 70 74 loss.loss_type=ipo loss.beta=0.1 threads=1

Each run is a process of its own; settings (`key=value`) are passed on to it. Runs follow one
another. `--from FOLDER` reads finished runs instead. A run learnt if its held-out accuracy is above
70 % and the interval of its answers' true quality lies above that of the policy before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benches.python.reward_models import run


def show_rate(rate: dict[str, float]) -> str:
    return f"{rate['mean']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})"


COLUMNS = {
    "accuracy": lambda summary: f"{summary['eval_rewards/accuracies']:.4f}",
    "Bayes rate": lambda summary: f"{summary['bayes_accuracy']:.4f}",
    "margin": lambda summary: f"{summary['eval_rewards/margins']:.3f}",
    "reward of the chosen": lambda summary: f"{summary['eval_rewards/chosen']:.3f}",
    "ECE": lambda summary: f"{summary['eval_ece']:.4f}",
    "quality before": lambda summary: show_rate(summary["before"]["score"]),
    "quality after": lambda summary: show_rate(summary["after"]["score"]),
    "well-formed before, after": lambda summary: (
        f"{summary['before']['well_formed']['mean']:.3f}, {summary['after']['well_formed']['mean']:.3f}"
    ),
    "CPU seconds": lambda summary: f"{summary['cpu_s']:.0f}" if "cpu_s" in summary else "",
}


def has_learnt(summary: dict[str, Any]) -> bool:
    before, after = summary["before"]["score"], summary["after"]["score"]
    return bool(summary["eval_rewards/accuracies"] > 0.7 and after["low"] > before["high"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(70, 74))
    parser.add_argument("--from", dest="finished", type=Path, metavar="FOLDER", help="folder of runs that are finished")
    options, settings = parser.parse_known_args()
    print(f"| seed | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    summaries = []
    with tempfile.TemporaryDirectory() as output:
        for seed in range(options.seeds[0], options.seeds[1] + 1):
            if options.finished is None:
                summaries.append(run(seed, settings, output, command="dpo"))
            else:
                summaries.append(read_run(options.finished, seed))
            print(f"| {seed} | {' | '.join(cell(summaries[-1]) for cell in COLUMNS.values())} |", flush=True)
    print(f"\n{sum(map(has_learnt, summaries))} of {len(summaries)} seeds learnt")


def read_run(folder: Path, seed: int) -> dict[str, Any]:
    """The summary of the finished run of that seed."""
    for path in sorted(folder.glob("*/summary.json")):
        summary: dict[str, Any] = json.loads(path.read_text())
        if summary["seed"] == seed and summary["status"] == "finished":
            return summary
    raise SystemExit(f"{folder} has no finished run of seed {seed}")


if __name__ == "__main__":
    main()
