"""Whether a loop or an over-sampled run that was killed and resumed lost, doubled or split nothing.

`compare_loop`          `rollout_loop` is exact: samples, losses, weights and states are equal
`compare_over_sampled`  `ludic train rollout.over_sampling_factor=1.5` is not, since which weights
                        sample a group depends on timing: the laws of groups hold
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

from benches.python.equal_runs import plain, read_lines

_TIMES = ("timestamp", "memory", "train/policy_lag")
"""Of a loop: also how many versions there were between a sample and its step, where the samples
follow from seeds alone."""


def compare_loop(run: Path, whole: Path) -> list[str]:
    """What differs between a `rollout_loop` and the uninterrupted one. Steps after a checkpoint are
    trained again when the run is resumed: all samples of a step must be equal, and its metrics must
    stand once in the log."""
    differences = []
    steps = Counter(line["step"] for line in read_lines(run / "metrics.jsonl"))
    differences += [f"step {step} stands {times} times in the log" for step, times in steps.items() if times > 1]
    for name, key in (("samples.jsonl", "batch"), ("metrics.jsonl", "step")):
        found, wanted = (_by_number(root / name, key) for root in (run, whole))
        if any(len(lines) != 1 for lines in wanted.values()):
            raise RuntimeError(f"{whole / name} has other lines for one {key}")
        differences += [f"{name}: {key} {number}" for number in sorted(found | wanted) if found.get(number) != wanted.get(number)]
    last = max(path.name for path in (whole / "checkpoints").glob("step_*"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        contents = [root / "checkpoints" / last / name for root in (run, whole)]
        if not contents[0].exists() or contents[0].read_bytes() != contents[1].read_bytes():
            differences.append(f"content of {last}/{name}")
    states = [json.loads((root / "checkpoints" / last / "trainer_state.json").read_text()) for root in (run, whole)]
    kept = states[1].keys() - {"metrics_log"}  # the size of the log, which has times
    differences += [f"{key} in the state of {last}" for key in sorted(kept) if plain(states[0].get(key)) != plain(states[1][key])]
    return differences + [f"left over: {path.name}" for path in (run / "checkpoints").glob(".*")]


def check_loop(run: Path) -> None:
    """Raise RuntimeError if a step had no gradient, or no group was refused: no kill could change
    much then."""
    steps = [line for line in read_lines(run / "metrics.jsonl") if "train/loss" in line]
    if not steps or any(float(line["train/grad_norm"]) == 0 for line in steps):
        raise RuntimeError(f"{run}: a step has no gradient")
    states = [json.loads(path.read_text())["batch_source"] for path in (run / "checkpoints").glob("step_*/trainer_state.json")]
    if not any(state["ledger"]["counts"]["rejected"] for state in states):
        raise RuntimeError(f"{run}: no group was refused")


def compare_over_sampled(run: Path, whole: Path) -> list[str]:
    """Which laws of groups a run breaks. Given groups stand in rollouts.jsonl once, whole and in
    the order of their ordinals; they are all that the ledger says; the problem of a group is that
    of the uninterrupted run; and each step stands once in metrics.jsonl."""
    differences = []
    found, wanted = (_groups_of(root) for root in (run, whole))
    ordinals = [ordinal for ordinal, _ in found]
    if ordinals != sorted(set(ordinals)):
        differences.append(f"groups {ordinals} are not in order, or there twice")
    problems = dict(wanted)
    differences += [f"problem of group {ordinal}" for ordinal, problem in found if problems.get(ordinal, problem) != problem]
    if len(found) != len(wanted):
        differences.append(f"{len(found)} groups for {len(wanted)}")
    steps = [
        Counter((line["phase"], line["step"]) for line in read_lines(root / "metrics.jsonl") if "train/loss" in line)
        for root in (run, whole)
    ]
    if steps[0] != steps[1]:
        differences.append(f"steps {steps[0] - steps[1]} more, {steps[1] - steps[0]} less")
    return differences + _broken_counts(run, len(found)) + [f"{path.name} is left over" for path in run.glob("checkpoints/*/.*")]


def _broken_counts(run: Path, given: int) -> list[str]:
    last = max(run.glob("checkpoints/reinforce/step_*"))
    pool = json.loads((last / "trainer_state.json").read_text())["batch_source"]["pool"]
    gone = {name: pool["counts"][name] for name in ("given", "rejected", "lost")}
    is_right = sum(gone.values()) + len(pool["groups"]) == pool["next_ordinal"] and gone["given"] == given and not gone["lost"]
    return [] if is_right else [f"{gone} and {len(pool['groups'])} kept, of {pool['next_ordinal']}; {given} in the log"]


def _groups_of(run: Path) -> list[tuple[int, Any]]:
    """(ordinal, problem) of each group in the log, in its order. Raises RuntimeError for a group
    that is split."""
    ordinals = {_group_id(ordinal): ordinal for ordinal in range(1000)}
    groups: dict[int, list[Any]] = {}
    order = []
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        meta = json.loads(line)["meta"]
        ordinal = ordinals[meta["request_meta"]["group_id"]]
        if not order or order[-1] != ordinal:
            order.append(ordinal)
        groups.setdefault(ordinal, []).append(meta["request_meta"].get("problem_id", meta.get("problem_id")))
    sizes = {len(problems) for problems in groups.values()}
    if len(sizes) != 1 or any(len(set(problems)) != 1 for problems in groups.values()):
        raise RuntimeError(f"{run}: groups of {sizes}")
    return [(ordinal, groups[ordinal][0]) for ordinal in order]


def _group_id(ordinal: int, seed: int = 0) -> str:
    """The id that `make_group` gives."""
    return str(UUID(int=Random(f"group {seed} {ordinal}").getrandbits(128), version=4))


def _by_number(path: Path, key: str) -> dict[int, set[str]]:
    """Number -> its lines. An unfinished last line is what a kill leaves, and is skipped."""
    lines: dict[int, set[str]] = {}
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        kept = {name: value for name, value in line.items() if name not in _TIMES}
        lines.setdefault(line[key], set()).add(json.dumps(plain(kept), sort_keys=True))
    return lines
