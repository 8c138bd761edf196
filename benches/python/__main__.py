"""`python -m benches.python`: every comparison, as markdown.

One process, one thread, contenders interleaved round by round: the speed is the median of the ratios to the reference
within each round.
"""

from __future__ import annotations

import argparse
import importlib
import platform

import numpy as np
import torch
from benches.python.contest import hold, markdown

SUBJECTS = ["collation", "planning", "reduction", "loss_memory"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python", description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", help=f"some of {', '.join(SUBJECTS)}; all when absent")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"CPython {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}, one thread\n")
    for subject in options.subjects or SUBJECTS:
        module = importlib.import_module(f"benches.python.{subject}")
        for contest in module.contests():
            print(markdown(contest, hold(contest, options.rounds)), flush=True)
        if hasattr(module, "report"):
            print(module.report(), flush=True)


if __name__ == "__main__":
    main()
