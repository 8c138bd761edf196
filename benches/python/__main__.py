"""`python -m benches.python`: every comparison, as markdown.

One thread, a process a subject, contenders interleaved round by round: the speed is the median of
the ratios to the reference within each round. What a subject leaves behind in the allocator (fresh
pages cost as much as a plan) is no matter of the next.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys

import numpy as np
import torch
from benches.python.contest import hold, markdown

SUBJECTS = ["collation", "planning", "reduction", "loss_memory", "packing"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python", description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", help=f"some of {', '.join(SUBJECTS)}; all when absent")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if len(options.subjects) == 1:
        compare(options.subjects[0], options.rounds)
        return
    print(f"CPython {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}, one thread\n", flush=True)
    for subject in options.subjects or SUBJECTS:
        subprocess.run([sys.executable, "-m", "benches.python", subject, "--rounds", str(options.rounds)], check=True)


def compare(subject: str, rounds: int) -> None:
    """Hold the contests of one subject in this process."""
    torch.set_num_threads(1)
    module = importlib.import_module(f"benches.python.{subject}")
    for contest in module.contests():
        print(markdown(contest, hold(contest, rounds)), flush=True)
    if hasattr(module, "report"):
        print(module.report(), flush=True)


if __name__ == "__main__":
    main()
