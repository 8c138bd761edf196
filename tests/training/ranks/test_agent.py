"""The agent of torchrun that ends with the status of its ranks. The agent is forked from a server
that has imported it, and its ranks are small scripts."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
from forked_run import wait_until_exists
from processes import is_running

pytestmark = pytest.mark.integration
_CONTEXT = multiprocessing.get_context("forkserver")
RANK = """
import os, signal, sys, time
from pathlib import Path
from ludic.launch.rank_environment import tell_status

here, rank = Path(sys.argv[1]), os.environ["RANK"]

def end(code):
    tell_status(code)
    os._exit(code)

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

signal.signal(signal.SIGTERM, lambda number, _: end(STOPPED[rank]))
(here / f"pid{rank}").write_text(str(os.getpid()))
(here / f"pid{rank}").rename(here / f"ready{rank}")
"""
IDLE = "\nwhile True:\n    time.sleep(0.01)\n"
SAVED = {"0": 143, "1": 143}


def run_agent_to_its_end(arguments):
    from ludic.training.ranks.agent import run_agent

    sys.exit(run_agent(arguments))


class Agent:
    """`run_agent` in a process of its own, with two ranks that run `RANK` and then `work`."""

    def __init__(self, folder: Path, work: str, stopped=SAVED) -> None:
        self.folder = folder
        script = folder / "rank.py"
        script.write_text(f"STOPPED = {stopped}\n{RANK}{work}")
        arguments = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", str(script), str(folder)]
        self.process = _CONTEXT.Process(target=run_agent_to_its_end, args=(arguments,))
        self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def pid_of(self, rank: int) -> int:
        path = self.folder / f"ready{rank}"
        wait_until_exists(path)
        return int(path.read_text())

    def end(self) -> int | None:
        self.process.join(timeout=600)
        return self.process.exitcode


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("end(0)", 0),
        ('wait_for(here / ("ready0" if rank == "1" else "never"))\nend(75)', 75),
        ('wait_for(here / ("ready0" if rank == "1" else "never"))\nos.kill(os.getpid(), 9)', 137),
    ],
    ids=["done", "try again", "killed"],
)
def test_the_status_of_a_rank_is_that_of_the_agent(tmp_path, work, status):
    with Agent(tmp_path, work) as agent:
        assert agent.end() == status


def test_a_rank_that_cannot_be_helped_by_a_new_start_has_the_last_word(tmp_path):
    """Rank 1 fails first, and rank 0 finds at its end that the disk is full."""
    work = f'wait_for(here / "ready0")\nend(75) if rank == "1" else None{IDLE}'
    with Agent(tmp_path, work, stopped={"0": 78, "1": 0}) as agent:
        assert agent.end() == 78


@pytest.mark.parametrize(("stopped", "status"), [(SAVED, 143), ({"0": 143, "1": 78}, 78)], ids=["saved", "disk full"])
def test_a_signal_to_the_agent_reaches_the_ranks_which_end_in_their_own_way(tmp_path, stopped, status):
    with Agent(tmp_path, IDLE, stopped) as agent:
        pids = [agent.pid_of(rank) for rank in range(2)]
        agent.process.terminate()
        assert agent.end() == status
        assert not any(is_running(pid) for pid in pids)


def test_a_signal_to_one_rank_ends_both(tmp_path):
    with Agent(tmp_path, IDLE) as agent:
        pids = [agent.pid_of(rank) for rank in range(2)]
        os.kill(pids[1], signal.SIGTERM)
        assert agent.end() == 143
        assert not any(is_running(pid) for pid in pids)
