"""What `ludic train-rm` learns of the built-in preferences, seed by seed: the tables of
docs/reward-models.md.

    python benches/python/reward_models.py --seeds 50 54
    python benches/python/reward_models.py --seeds 50 54 lora.rank=8 trainer.lr=1e-2 threads=1

Each run is a process of its own, one after another, with the settings that follow (`key=value`)
passed on. Seconds are wall time of the whole process, imports included, and its CPU time. The last
line says which of the criteria hold for every seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

COLUMNS = {
    "accuracy": lambda found: f"{found['eval_pairwise_accuracy']:.4f}",
    "Bayes rate": lambda found: f"{found['bayes_accuracy']:.4f}",
    "generator's own": lambda found: f"{found['latent_accuracy']:.4f}",
    "training pairs": lambda found: f"{found['train_pairwise_accuracy']:.4f}",
    "ECE": lambda found: f"{found['eval_ece']:.4f}",
    "median margin": lambda found: f"{found['eval_margin_p50']:.3f}",
    "negative margins": lambda found: f"{found['eval_negative_margin_rate']:.4f}",
    "ROC AUC": lambda found: f"{found['eval_roc_auc']:.4f}",
    "seconds: wall / CPU": lambda found: f"{found['process_s']:.0f} / {found['cpu_s']:.0f}",
}


def run(seed: int, settings: list[str], output: str) -> dict[str, Any]:
    """The summary of one run, with the wall and CPU seconds of its process."""
    command = [sys.executable, "-m", "ludic.cli.app", "train-rm", "--json", f"seed={seed}", f"output={output}", *settings]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    shown = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    summary: dict[str, Any] = json.loads(shown)
    return {**summary, "process_s": time.perf_counter() - started, "cpu_s": used.ru_utime + used.ru_stime}


def verdict(found: list[dict[str, Any]]) -> str:
    """Each criterion, and its worst seed."""
    from ludic.runs.report.reward_model import CRITERIA

    said = []
    for name, (rule, value_of, holds) in CRITERIA.items():
        values = [value_of(summary) for summary in found]
        worst = next((value for value in values if not holds(value)), None)
        span = f"{min(values):.4f} to {max(values):.4f}"
        said.append(f"{name} {rule}: {'holds' if worst is None else 'BROKEN'} ({span})")
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(50, 54))
    options, settings = parser.parse_known_args()
    print(f"| seed | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    found = []
    with tempfile.TemporaryDirectory() as output:
        for seed in range(options.seeds[0], options.seeds[1] + 1):
            found.append(run(seed, settings, output))
            print(f"| {seed} | {' | '.join(cell(found[-1]) for cell in COLUMNS.values())} |", flush=True)
    accuracy = sum(summary["eval_pairwise_accuracy"] for summary in found) / len(found)
    print(f"\nMean accuracy {accuracy:.4f}. {verdict(found)}")


if __name__ == "__main__":
    main()
