"""Processes that are the ranks of one world."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent


def on_two_ranks(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 of `tests/support/SCRIPT` wrote as JSON into `folder`. Both ranks are called
    with RANK STORE OUT and the arguments, and must end well within three minutes."""
    out = folder / "result.json"
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / script), str(rank), str(folder / "store"), str(out), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    result: dict[str, Any] = json.loads(out.read_text())
    return result
