"""Kills the trainer, the actor and the servers of one run that trains, each `--rounds` times, and
compares what the run ends with.

`python -m benches.python.killed_roles` prints a row of benches/results/reliability.md. In each
round each role gets SIGKILL once, in random order and at a random moment, also while another
process starts again; the next round begins once the run has taken a step. The run must end with
status 0 and the weights, losses, gradient norms, rewards and rollouts of the run that nothing
disturbed, bit for bit, and no server may have answered with two sets of weights under one version.

The servers are the fakes of `tests/support/policy_vllm.py`: processes that load the policy, take
the versions that the trainer publishes, and sample from what they hold. Arguments that are no
options are settings of the killed run, such as `place=ray place.address=local`; Ray must be run as
benches/results/reliability.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.python.equal_runs import check_learning, compare_training
from benches.python.id_reward import write_problems

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
_NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
_RUN = [
    *("train", "threads=1", "checkpoint.every_n_steps=1", "checkpoint.max_to_keep=2", *_NETWORK, "warmup.steps=2"),
    *("warmup.batch_size=4", "rollout.prompts=4", "rollout.group_size=4", "rollout.log_every=1", "evaluation.prompts=2"),
    *("evaluation.samples_per_prompt=2", "queue.lease_s=2", "place.restarts=1000", "trainer.model_device=cpu"),
    *("place.actors=1", "place.servers=1", "place.trainer_cpus=0.2", "place.actor_cpus=0.2", "place.server_cpus=0.2"),
]
_LONGEST_ROUND_S = 600.0
_POLL_S = 0.02


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.killed_roles", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="kills of each role")
    parser.add_argument("--steps", type=int, default=0, help="steps of the run; by default twice the rounds")
    parser.add_argument("--seed", type=int, default=0)
    options, settings = parser.parse_known_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="killed-roles-"))
    steps = options.steps or 2 * options.rounds
    whole, run = folder / "whole", folder / "killed"
    if _start(folder, whole, steps, []).wait() != 0:
        raise SystemExit(f"the undisturbed run failed: see {whole}.log")
    check_learning(whole)
    rng, kills = random.Random(options.seed), Counter[str]()
    began = time.monotonic()
    with _start(folder, run, steps, settings) as command:
        for _ in range(options.rounds):
            kills += _play_round(command, run, rng)
        status = command.wait(timeout=_LONGEST_ROUND_S)
    differences = compare_training(run, whole)
    mixed = [version for version, weights in _answers(run).items() if len(weights) > 1]
    place = json.loads((run / "launch.json").read_text())["place"]
    counts = " | ".join(str(kills[role]) for role in ("trainer", "actor", "server"))
    print("| place | trainer | an actor | a server | status | restarts | versions of two weights | other weights or logs |")
    print(f"| {place} | {counts} | {status} | {_restarts(run)} | {len(mixed)} | {len(differences)} |")
    print(f"{time.monotonic() - began:.0f} s; answers of servers without a version, none of them taken: {_unpublished(run)}")
    if status or differences or mixed:
        raise SystemExit(f"{differences} {mixed}; see {folder}")


def _start(folder: Path, run: Path, steps: int, settings: list[str]) -> subprocess.Popen[bytes]:
    """The command of the run, which writes to a log beside its folder."""
    sys.path.insert(0, str(SUPPORT))
    import fake_vllm
    import policy_vllm

    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        fake_vllm.install(folder / "venv", cpu=False, script=policy_vllm.__file__)
    given = [*_RUN, *write_problems(folder / "rows.jsonl"), f"steps={steps}", f"inference.python={python}", *settings]
    variables = {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "SAMPLED": str(run.with_suffix(".sampled")), "OMP_NUM_THREADS": "1"}
    with open(run.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ludic.cli", *given, f"output={folder}", f"name={run.name}"],
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _play_round(command: subprocess.Popen[bytes], run: Path, rng: random.Random) -> Counter[str]:
    """Kill each role once, and wait for a step. Returns the kills by role."""
    step = _last_step(run)
    kills = Counter[str]()
    roles = ["trainer", "actor", "server"]
    rng.shuffle(roles)
    for role in roles:
        due, deadline = time.monotonic() + rng.uniform(0.0, 2.0), time.monotonic() + _LONGEST_ROUND_S
        while time.monotonic() < due or (pid := _find(run, role)) is None:
            _check(command, deadline, f"no {role} runs")
        os.kill(pid, signal.SIGKILL)
        kills[role] += 1
    deadline = time.monotonic() + _LONGEST_ROUND_S
    while _last_step(run) <= step:
        _check(command, deadline, f"no step after {step}")
    return kills


def _check(command: subprocess.Popen[bytes], deadline: float, what: str) -> None:
    if command.poll() is not None:
        raise SystemExit(f"the run ended with status {command.returncode} before all were killed")
    if time.monotonic() > deadline:
        raise SystemExit(f"{what} after {_LONGEST_ROUND_S:g} s")
    time.sleep(_POLL_S)


def _find(run: Path, role: str) -> int | None:
    """The process of a role, if the supervisor says that it runs. Nothing is killed before the run
    samples."""
    try:
        processes: list[dict[str, Any]] = json.loads((run / "launch.json").read_text())["processes"]
    except FileNotFoundError:
        return None
    if not run.with_suffix(".sampled").exists():
        return None
    return next((process["pid"] for process in processes if process["role"] == role and process["state"] == "running"), None)


def _last_step(run: Path) -> int:
    """The last step of the reinforcement that is logged; a killed trainer may take it again."""
    path = run / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"reinforce"' in line] if path.exists() else []
    return max((int(json.loads(line)["step"]) for line in lines if line.endswith("}")), default=0)


def _answers(run: Path) -> dict[str, set[str]]:
    """Version -> fingerprints of the weights that servers answered with under it."""
    answers: dict[str, set[str]] = {}
    for line in run.with_suffix(".sampled").read_text().splitlines():
        version, _, weights = line.partition(" ")
        answers.setdefault(version, set()).add(weights)
    return answers


def _unpublished(run: Path) -> int:
    return sum(line.startswith("default ") for line in run.with_suffix(".sampled").read_text().splitlines())


def _restarts(run: Path) -> int:
    return sum(json.loads(line)["event"] == "restart" for line in (run / "events.jsonl").read_text().splitlines())


if __name__ == "__main__":
    main()
