"""A process that is killed while it trains, started again, ends with the weights of one that was
not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "killed_run.py"


def start(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(SCRIPT), str(folder)], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.integration
def test_killed_twice_it_ends_where_the_whole_run_ends(tmp_path):
    whole, _ = start(tmp_path / "whole").communicate(timeout=180)
    *losses, digest = map(json.loads, whole.splitlines())
    seen = {}
    for lines_before_the_kill in (3, 2):
        process = start(tmp_path / "killed")
        for _ in range(lines_before_the_kill):
            step, loss = json.loads(process.stdout.readline())
            assert seen.setdefault(step, loss) == loss
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    rest, _ = start(tmp_path / "killed").communicate(timeout=180)
    *tail, resumed_digest = map(json.loads, rest.splitlines())
    for step, loss in tail:
        assert seen.setdefault(step, loss) == loss
    assert 0 < len(tail) < len(losses)
    assert all(seen.get(step, loss) == loss for step, loss in losses)
    assert resumed_digest == digest
