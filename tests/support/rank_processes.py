"""Start the ranks of one process group as processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
PATIENCE_S = 600.0
"""A busy machine takes minutes to import torch; only a hang takes longer."""


def on_two_ranks(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run `tests/support/SCRIPT` on two ranks with the arguments RANK STORE OUT and `arguments`.
    Both must succeed within ten minutes. Returns the JSON that rank 0 wrote."""
    return on_ranks(2, script, folder, *arguments)


def on_ranks(count: int, script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """`on_two_ranks` on `count` ranks."""
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
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # none is left if one hangs
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    result: dict[str, Any] = json.loads(out.read_text())
    return result
