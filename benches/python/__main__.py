"""`python -m benches.python`: runs every comparison and prints it as markdown; with `--everything`
also the programs of benches/results/speed.md that have options of their own.

Each subject runs on one thread in a process of its own, so that memory which an earlier subject
allocated does not help it: fresh pages cost as much as a plan. Within a subject the contenders take
turns; the speed is the median over rounds of the ratio to the reference.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import subprocess
import sys

import numpy as np
import torch
from benches.python.contest import format_table, run_contest

SUBJECTS = [
    "collation",
    "planning",
    "reduction",
    "loss_memory",
    "packing",
    "prefix_trees",
    "table_bytes",
    "rollout_ingest",
    "lockstep",
    "growth",
]
PROGRAMS = {
    "queue_cost": (),
    "queue_speed": (),
    "token_scores": ("trl_python",),
    "sampling_speed": ("trl_python", "vllm_python"),
    "programs": (),
}
"""Further measures, and which interpreters of peers each takes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python", description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", help=f"any of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--everything", action="store_true", help=f"all subjects, then {', '.join(PROGRAMS)}")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL, for --everything")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM, for --everything")
    options = parser.parse_args()
    if len(options.subjects) == 1:
        run_subject(options.subjects[0], options.rounds)
        return
    print(f"CPython {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}, one thread\n", flush=True)
    for subject in options.subjects or SUBJECTS:
        subprocess.run([sys.executable, "-m", "benches.python", subject, "--rounds", str(options.rounds)], check=True)
    if options.everything:
        failed = [program for program in PROGRAMS if subprocess.run(command_of(program, options), check=False).returncode]
        if failed:
            sys.exit(f"these programs failed: {', '.join(failed)}")


def command_of(program: str, options: argparse.Namespace) -> list[str]:
    """The command of one of `PROGRAMS`, with the interpreters that are given."""
    given = {name: getattr(options, name) for name in PROGRAMS[program]}
    words = [word for name, python in given.items() if python for word in (f"--{name.replace('_', '-')}", python)]
    return [sys.executable, "-m", f"benches.python.{program}", *words]


def run_subject(subject: str, rounds: int) -> None:
    """Run the contests of one subject in this process and print them."""
    torch.set_num_threads(1)
    module = importlib.import_module(f"benches.python.{subject}")
    for contest in module.contests():
        print(format_table(contest, run_contest(contest, rounds)), flush=True)
    if hasattr(module, "report"):
        print(module.report(), flush=True)


if __name__ == "__main__":
    main()
