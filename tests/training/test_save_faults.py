"""A few of the faults inside saves of two ranks that `benches.python.save_faults` makes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = ("kill", "full disk", "short write")


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="the faults are made with LD_PRELOAD")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_saves_of_two_ranks_survive_kills_and_a_full_disk():
    command = [sys.executable, "-m", "benches.python.save_faults", "--models", "policy", "--every", "60", "--kill-every", "120"]
    finished = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, (finished.stdout, finished.stderr)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in finished.stdout.splitlines() if line.startswith("| policy")
    ]
    assert sorted(row[1] for row in rows) == sorted(FAULTS)
    for _, _, on_ranks, left, not_survived, _ in rows:
        faults = [int(number) for number in on_ranks.split(", ")]
        assert min(faults) >= 1  # on each rank
        assert sum(map(int, left.split(", "))) == sum(faults)
        assert not_survived == "0"
