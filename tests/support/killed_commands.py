"""Commands that are killed, by a real SIGKILL, at the n-th of the moments at which a run changes
what is on disk.

Each runs in a process of its own, forked from one that has loaded everything that a run imports.
"""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("ludic.cli.app", "ludic.cli.train", "ludic.runs.reinforce", "ludic.runs.sft"),
        *("transformers.models.qwen2.modeling_qwen2", "peft", "matplotlib.backends.backend_agg"),
    ]
)


def killed_at(moment, command, *arguments):
    """Run the command until just before its `moment`-th change; whether it came so far. It must
    not fail."""
    return _run(moment, [command, *arguments]) == -signal.SIGKILL


def finished(command, *arguments):
    """Run the command to its end, which must be a good one."""
    assert _run(None, [command, *arguments]) == 0


def changes(command, *arguments):
    """The changes that the command makes, in their order."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    assert _run(None, [command, *arguments], theirs) == 0
    return ours.recv()


def _run(moment, arguments, seen_by=None):
    process = _CONTEXT.Process(target=_command, args=(moment, arguments, seen_by))
    process.start()
    process.join(timeout=300)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode


def _command(moment, arguments, seen_by):
    from ludic.cli.app import main

    seen = []

    def happens(name):
        seen.append(name)
        if len(seen) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(happens)
    sys.argv = ["ludic", *arguments]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    try:
        main()
    except SystemExit as ended:
        if seen_by is not None:
            seen_by.send(seen)
        os._exit(int(ended.code or 0))


def _watch(happens):
    """Call `happens` before each change: of a name, of a log, of a model's weights."""
    from ludic.training.loggers import JSONLLogger
    from ludic.training.rollouts import engine as rollout_engine

    def told(owner, name, label):
        original = getattr(owner, name)

        def then(*args, **kwargs):
            happens(label(*args))
            return original(*args, **kwargs)

        setattr(owner, name, then)

    told(os, "replace", lambda _, to: f"rename {Path(to).name}")
    told(JSONLLogger, "log", lambda _, step, stats: f"line {stats['phase']} {step}")
    told(JSONLLogger, "sync", lambda _: "sync")
    told(rollout_engine, "append_rollouts", lambda path, _: f"rollouts {Path(path).name}")
    from transformers import PreTrainedModel

    told(PreTrainedModel, "save_pretrained", lambda _, to, **__: f"weights {Path(to).name}")
