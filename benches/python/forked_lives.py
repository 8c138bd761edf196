"""Liveness of runs: `ludic` commands in forks of this process, which has imported everything.

A life that ends, is killed or stops is reported to the process that started it.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

LONGEST_LIFE_S = 300.0
_IMPORTS = [
    *("ludic.cli.app", "ludic.cli.train", "ludic.runs.reinforce", "ludic.runs.sft", "ludic.runs.reward_model"),
    *("ludic.runs.actors.worker", "ludic.runs.actors.supervision"),
    *("transformers.models.qwen2.modeling_qwen2", "peft", "matplotlib.backends.backend_agg"),
]


def import_all(names: Iterable[str] = _IMPORTS) -> None:
    """Import what lives need, once for all of them."""
    for name in names:
        with suppress(Exception):  # some modules are imported by nothing but a part of themselves
            importlib.import_module(name)
    _fill_caches()
    # A collection in a fork would copy the memory that it shares with this process.
    gc.collect()
    gc.freeze()


def _fill_caches() -> None:
    """What any life computes anew of texts that never change: how settings are parsed, and the
    thousands of expressions that transformers compiles before it saves."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from ludic.recipes.compose import compose

    compose(["rollout.prompts=2", "trainer.lr=0.01"])
    get_checkpoint_conversion_mapping("qwen2")


def resumable(arguments: Sequence[str], run: Path) -> list[str]:
    """The command that begins the run, or resumes it if its folder has its settings."""
    if arguments[0] == "-m":
        return [*arguments, str(run)]  # goes on by itself
    if (run / "config.yaml").exists():
        return [arguments[0], "--resume", str(run)]
    return [*arguments, f"output={run.parent}", f"name={run.name}"]


def log_of(run: Path) -> Path:
    """The file with what all lives of a run print."""
    return run.with_name(f"{run.name}.log")


def start_life(
    command: Sequence[str], log: Path, *, prepare: Callable[[], None] = lambda: None, conclude: Callable[[], None] = lambda: None
) -> int:
    """Start a `ludic` command in a fork, which calls `prepare` before it and `conclude` after it.
    Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        prepare()
        status = run_ludic(command)
        conclude()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_ludic(command: Sequence[str]) -> int:
    """Run a `ludic` command, or `-m` and a module with a `main`, in this process. Returns its exit
    status."""
    if command[0] == "-m":
        importlib.import_module(command[1]).main(command[2:])
        return 0
    from ludic.cli.app import main

    sys.argv = ["ludic", *command]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def has_ended(pid: int) -> bool:
    """Whether a life has ended; it is still to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_life(pid: int, kill_after_s: float | None = None) -> int:
    """Wait until a life has ended, and kill it after `kill_after_s`. Returns its exit status,
    negative for a signal. Raises TimeoutError for one that does not end."""
    handle = os.pidfd_open(pid)
    try:
        ended = select.select([handle], [], [], LONGEST_LIFE_S if kill_after_s is None else kill_after_s)[0]
    finally:
        os.close(handle)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not ended and kill_after_s is None:
        raise TimeoutError(f"a life was not over after {LONGEST_LIFE_S:g} s")
    return status


def stops_of(pid: int) -> Iterator[None]:
    """Yield each time that a life stops, and let it go on; return at its end. Raises RuntimeError
    if it fails."""
    while True:
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            break
        yield
        os.kill(pid, signal.SIGCONT)
    if (code := os.waitstatus_to_exitcode(status)) != 0:
        raise RuntimeError(f"a life ended with status {code}")
