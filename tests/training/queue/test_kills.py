"""Real processes over a SQLite file, killed at random moments. `tests/support/queue_kills.py` runs
as many kills as it is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("order", "wipes"), [("exact", 0), ("arrival", 0), ("exact", 3)])
def test_killed_processes_lose_and_double_nothing(order, wipes):
    command = [sys.executable, str(SUPPORT / "queue_kills.py"), order, "--steps", "80", "--kills", "20", "--wipes", str(wipes)]
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["kills"] == 20
    assert (result["lost"], result["doubled"], result["redone_otherwise"]) == (0, 0, 0)
    assert result["errors"] == 0, done.stderr[-3000:]
    if order == "exact":
        assert result["equals_undisturbed"]
