"""Weights and references on two ranks, compared with one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.integration
def test_two_ranks_have_the_gradient_of_one_process_and_fail_together():
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "maxent_ranks.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    for found in said["results"]:
        assert len(found) == 18
        for case, (largest, difference) in found.items():
            assert largest > 1e-3, case
            assert difference < 1e-6 * max(1.0, largest), case
    assert "missing group_id" in said["failed"][1]["error"]
    assert "missing group_id" in said["failed"][0]["error"]
