"""torchrun for the ranks of `ludic`: the same options, but it ends with the status of its ranks.

    python -m ludic.training.ranks.agent --standalone --nproc-per-node 2 -m ludic.cli train sort

torchrun ends with status 1 however a rank ended. Whoever starts this agent decides by its status
whether to start again (`ludic.errors`):

| end | status |
|---|---|
| all ranks with 0 | 0 |
| a rank with 78, first or later | 78 |
| another failure | the status of the first rank that failed; 128 + n if signal n ended it |
| a signal to the agent, which passes it on | 128 + n, unless a rank said 78 |
| the agents of other machines do not come, or are gone | 75 |
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from ludic.errors import DO_NOT_RETRY, TRY_AGAIN
from ludic.launch.rank_environment import STATUS_FOLDER


def run_agent(arguments: Sequence[str]) -> int:
    """Run the ranks to their end, and return the exit status. `arguments` are arguments of
    torchrun."""
    options = parse_args(list(arguments))
    if options.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, which says so at length
    with tempfile.TemporaryDirectory(prefix="ludic-ranks-") as folder:
        os.environ[STATUS_FOLDER] = folder
        try:
            run(options)
            return 0
        except ChildFailedError as error:
            if DO_NOT_RETRY in _read_statuses(Path(folder)).values():
                return DO_NOT_RETRY
            # Of a rank that was killed (-9) and one that noticed it a second later (75), 137.
            code = int(min(error.failures.values(), key=lambda failure: failure.timestamp).exitcode)
            return code if code > 0 else 128 - code
        except SignalException as stopped:
            said = _read_statuses(Path(folder))
            return DO_NOT_RETRY if DO_NOT_RETRY in said.values() else 128 + int(stopped.sigval)
        except RendezvousError as error:
            print(f"ludic: the agents of the ranks did not meet: {error}", file=sys.stderr)
            return TRY_AGAIN


def _read_statuses(folder: Path) -> dict[int, int]:
    """Rank -> the status with which it ended by itself, of those that came so far."""
    found = {}
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name)] = int(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # before there are ranks
    sys.exit(run_agent(sys.argv[1:]))
