"""What `ludic train-rm` learns from the built-in preferences, per seed: the tables of
docs/reward-models.md.

    python benches/python/reward_models.py --seeds 50 54
    python benches/python/reward_models.py --seeds 50 54 lora.rank=8 trainer.lr=1e-2 threads=1

Each run is a process of its own; settings (`key=value`) are passed on to it. Runs follow one
another. Seconds are the wall time and the CPU time of the whole process, imports included. The last
line shows which of the criteria hold for every seed.
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
    "accuracy": lambda summary: f"{summary['eval_pairwise_accuracy']:.4f}",
    "Bayes rate": lambda summary: f"{summary['bayes_accuracy']:.4f}",
    "generator's own": lambda summary: f"{summary['latent_accuracy']:.4f}",
    "training pairs": lambda summary: f"{summary['train_pairwise_accuracy']:.4f}",
    "ECE": lambda summary: f"{summary['eval_ece']:.4f}",
    "median margin": lambda summary: f"{summary['eval_margin_p50']:.3f}",
    "negative margins": lambda summary: f"{summary['eval_negative_margin_rate']:.4f}",
    "ROC AUC": lambda summary: f"{summary['eval_roc_auc']:.4f}",
    "seconds: wall / CPU": lambda summary: f"{summary['process_s']:.0f} / {summary['cpu_s']:.0f}",
}


def run(seed: int, settings: list[str], output: str, *, command: str = "train-rm") -> dict[str, Any]:
    """Run one seed. Returns its summary with the wall and CPU seconds of its process."""
    line = [sys.executable, "-m", "ludic.cli", command, "--json", f"seed={seed}", f"output={output}", *settings]
    started = time.perf_counter()
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    output_text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {child.returncode}")
    summary: dict[str, Any] = json.loads(output_text)
    return {**summary, "process_s": time.perf_counter() - started, "cpu_s": usage.ru_utime + usage.ru_stime}


def describe_criteria(summaries: list[dict[str, Any]]) -> str:
    """Each criterion, whether all seeds meet it, and the range of its values."""
    from ludic.runs.reward_model import CRITERIA

    sentences = []
    for name, (rule, value_of, holds) in CRITERIA.items():
        values = [value_of(summary) for summary in summaries]
        verdict = "holds" if all(holds(value) for value in values) else "BROKEN"
        sentences.append(f"{name} {rule}: {verdict} ({min(values):.4f} to {max(values):.4f})")
    return "; ".join(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), default=(50, 54))
    options, settings = parser.parse_known_args()
    print(f"| seed | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    summaries = []
    with tempfile.TemporaryDirectory() as output:
        for seed in range(options.seeds[0], options.seeds[1] + 1):
            summaries.append(run(seed, settings, output))
            print(f"| {seed} | {' | '.join(cell(summaries[-1]) for cell in COLUMNS.values())} |", flush=True)
    accuracy = sum(summary["eval_pairwise_accuracy"] for summary in summaries) / len(summaries)
    print(f"\nMean accuracy {accuracy:.4f}. {describe_criteria(summaries)}")


if __name__ == "__main__":
    main()
