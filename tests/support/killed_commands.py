"""Run commands that are killed with SIGKILL just before a change to the files of a run.

Each command runs in its own process, forked from a server that has already imported everything a
run needs.
"""

import os
import signal
import sys
from pathlib import Path

from forkserver import FORKSERVER


def killed_at(moment, command, *arguments):
    """Run the command and kill it just before change number `moment`, or before the first change
    that `list_changes` would name so, such as "line reinforce 2". Returns whether it got that far.
    The command must not fail."""
    return _run(moment, [command, *arguments]) == -signal.SIGKILL


def run_to_end(command, *arguments):
    """Run the command to its end. It must succeed."""
    assert _run(None, [command, *arguments]) == 0


def list_changes(command, *arguments):
    """The changes that the command makes, in order."""
    receiver, sender = FORKSERVER.Pipe(duplex=False)
    assert _run(None, [command, *arguments], sender) == 0
    return receiver.recv()


def _run(moment, arguments, sender=None):
    process = FORKSERVER.Process(target=_command, args=(moment, arguments, sender))
    process.start()
    process.join(timeout=600)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode


def _command(moment, arguments, sender):
    from ludic.cli.app import main

    changes = []

    def before_change(name):
        changes.append(name)
        if moment in (len(changes), name):
            os.kill(os.getpid(), signal.SIGKILL)

    intercept_changes(before_change)
    sys.argv = ["ludic", *arguments]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    try:
        main()
    except SystemExit as exit_request:
        if sender is not None:
            sender.send(changes)
        os._exit(int(exit_request.code or 0))


def intercept_changes(before_change):
    """Call `before_change` before each rename, log line, rollout append and model save."""
    from ludic.training.loggers import JSONLLogger
    from ludic.training.rollouts import engine as rollout_engine

    def intercept(owner, name, label):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            before_change(label(*args))
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    intercept(os, "replace", lambda _, to: f"rename {Path(to).name}")
    intercept(JSONLLogger, "log", lambda _, step, stats: f"line {stats['phase']} {step}")
    intercept(JSONLLogger, "sync", lambda _: "sync")
    intercept(rollout_engine, "append_rollouts", lambda path, _: f"rollouts {Path(path).name}")
    from transformers import PreTrainedModel

    intercept(PreTrainedModel, "save_pretrained", lambda _, to, **__: f"weights {Path(to).name}")
