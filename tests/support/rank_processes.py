"""Start the ranks of one process group as processes."""

import json
from pathlib import Path
from typing import Any

from forked_scripts import ForkedScript


def on_two_ranks(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run `tests/support/SCRIPT` on two ranks with the arguments RANK STORE OUT and `arguments`.
    Both must succeed within ten minutes. Returns the JSON that rank 0 wrote."""
    return on_ranks(2, script, folder, *arguments)


def on_ranks(count: int, script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """`on_two_ranks` on `count` ranks."""
    out = folder / "result.json"
    ranks = [
        ForkedScript(script, rank, folder / "store", out, *arguments, output=folder / f"rank{rank}.output")
        for rank in range(count)
    ]
    try:
        statuses = [rank.end() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()  # none is left if one hangs
    assert statuses == [0] * count, "\n".join(rank.said() for rank in ranks)
    result: dict[str, Any] = json.loads(out.read_text())
    return result
