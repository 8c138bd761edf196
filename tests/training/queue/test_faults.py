"""Runs whose processes are killed (`benches.python.faults`): its counts find every fault, and short
runs have none. benches/results/reliability.md has the long ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benches.python.fault_roles import Plan, sample, trained_weights, undisturbed_weights
from benches.python.faults import count_faults
from real_redis import redis_program_or_skip

FACTS = {"queue/duplicates": 0}


def group(number, weights=""):
    return [number, [sample(number, member, weights) for member in range(2)]]


def journal(folder, *steps, protocol="exact", total=2):
    """Two steps of four groups each, all sampled with the first weights, as the first two are."""
    plan = Plan(folder, None, protocol, total, step_s=0.0)
    weights = {0: ""}
    for step, groups in steps:
        weights[step] = trained_weights(weights[step - 1], [(number, members) for number, members in groups])
        plan.append("journal", [step, groups, weights[step], FACTS])
    return plan


FIRST, SECOND = (1, [group(number) for number in range(4)]), (2, [group(number) for number in range(4, 8)])


def faults(plan):
    counts = count_faults(plan)
    return {name: counts[name] for name in ("lost", "doubled", "split", "redone", "differ", "equal") if counts[name]}


def test_an_undisturbed_run_has_no_faults(tmp_path):
    plan = journal(tmp_path, FIRST, SECOND)
    assert faults(plan) == {"equal": True}
    assert plan.read("journal")[-1][2] == undisturbed_weights(2)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([FIRST], {"lost": 4}),
        ([FIRST, (2, [group(number) for number in (4, 5, 6, 3)])], {"lost": 1, "doubled": 1}),
        ([FIRST, (2, [*SECOND[1][:3], [7, group(7)[1][:1]]])], {"split": 1}),
        ([FIRST, (2, [*SECOND[1][:3], group(7, "other weights")])], {}),
        ([FIRST, (2, list(reversed(SECOND[1])))], {}),
        ([FIRST, SECOND, SECOND], {"redone": 1, "equal": True}),
        ([FIRST, (2, [group(number) for number in (4, 5, 6, 8)]), SECOND], {"redone": 1, "differ": 1, "equal": True}),
    ],
    ids=["lost", "doubled", "split", "weights", "order", "redone", "differ"],
)
def test_each_fault_is_counted(tmp_path, steps, found):
    assert faults(journal(tmp_path, *steps)) == found


def test_what_producers_sent_must_be_trained_or_still_be_in_the_queue(tmp_path):
    plan = journal(tmp_path, (1, [["a-0", ["", ""]], ["b-0", ["", ""]]]), protocol="samples", total=1)
    for name in ("a-0", "a-1", "b-0", "b-1"):
        plan.append("acknowledged", [name, 0.0])
    plan.append("untrained", "a-1")
    assert faults(plan) == {"lost": 1}


@pytest.mark.integration
@pytest.mark.parametrize(
    "settings",
    [
        ["--queue", "redis", "--wipes", "1"],
        ["--queue", "sqlite", "--wipes", "1"],
        ["--queue", "sqlite", "--protocol", "arrival", "--wipes", "0"],
        ["--queue", "redis", "--protocol", "samples", "--wipes", "0", "--fsync", "always"],
    ],
    ids=["redis", "sqlite", "arrival", "samples"],
)
def test_kills_lose_nothing_and_change_nothing(settings):
    if "redis" in settings:
        redis_program_or_skip()
    command = [sys.executable, "-m", "benches.python.faults", "--kills", "8", "--seconds", "7", *settings]
    finished = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300)
    result = json.loads(finished.stdout)
    assert result["ok"], (result, finished.stderr)
    assert result["kills"] >= 6
