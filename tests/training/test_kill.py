"""A process that is killed during training and started again ends with the weights of an
uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_8BIT = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
SCRIPT = Path(__file__).parents[1] / "support" / "killed_run.py"


def start(folder, *options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *options], stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [
        *(["off", "grpo"], ["auto", "grpo"], ["off", "ppo"], ["auto", "ppo-model"]),
        *(["off", "grpo", "muon"], ["off", "grpo", "adafactor"], pytest.param(["off", "grpo", "adamw8bit"], marks=HAS_8BIT)),
    ],
    ids=" ".join,
)
def test_a_run_killed_twice_ends_where_the_uninterrupted_run_ends(tmp_path, options):
    whole, _ = start(tmp_path / "whole", *options).communicate(timeout=600)
    *losses, digest = map(json.loads, whole.splitlines())
    loss_by_step = {}
    for lines_before_the_kill in (3, 2):
        process = start(tmp_path / "killed", *options)
        for _ in range(lines_before_the_kill):
            step, loss = json.loads(process.stdout.readline())
            assert loss_by_step.setdefault(step, loss) == loss
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=600)
    rest, _ = start(tmp_path / "killed", *options).communicate(timeout=600)
    *tail, resumed_digest = map(json.loads, rest.splitlines())
    for step, loss in tail:
        assert loss_by_step.setdefault(step, loss) == loss
    assert 0 < len(tail) < len(losses)
    assert all(loss_by_step.get(step, loss) == loss for step, loss in losses)
    assert resumed_digest == digest
