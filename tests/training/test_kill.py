"""A process that is killed during training and started again ends with the weights of an
uninterrupted one."""

import json
import signal
from importlib.util import find_spec

import pytest
from forked_scripts import ForkedScript, run_script

HAS_8BIT = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
SCRIPT = "killed_run.py"


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
    *losses, digest = map(json.loads, run_script(SCRIPT, tmp_path / "whole", *options).splitlines())
    loss_by_step = {}
    for lines_before_the_kill in (3, 2):
        process = ForkedScript(SCRIPT, tmp_path / "killed", *options, output=tmp_path / f"{lines_before_the_kill} lines")
        for step, loss in map(json.loads, process.wait_for_lines(lines_before_the_kill)):
            assert loss_by_step.setdefault(step, loss) == loss
        process.kill()
        assert process.end() == -signal.SIGKILL
    *tail, resumed_digest = map(json.loads, run_script(SCRIPT, tmp_path / "killed", *options).splitlines())
    for step, loss in tail:
        assert loss_by_step.setdefault(step, loss) == loss
    assert 0 < len(tail) < len(losses)
    assert all(loss_by_step.get(step, loss) == loss for step, loss in losses)
    assert resumed_digest == digest
