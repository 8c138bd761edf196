"""Kills runs with SIGKILL, at random moments and at each change to their files, and compares what
the resumed runs end with.

`python -m benches.python.kills` prints the table of docs/reliability.md. A run must end as the
uninterrupted one does, bit for bit: losses, gradient norms and all other metrics but times,
rollouts, the model's files and the summary; each step and each episode once.

Every life of a run is a fork of this process, which has imported everything. `file_events.c`,
loaded with LD_PRELOAD, ends a life at a change to its files: in the middle of a write, before any
other.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
_TINY = ["threads=1", "checkpoint.every_n_steps=1", "checkpoint.max_to_keep=2", *_NETWORK]
_REINFORCE = [
    *("train", *_TINY, "warmup.steps=2", "warmup.batch_size=4", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=2", "evaluation.samples_per_prompt=2", "trainer.eval_every_n_steps=2"),
]
KINDS: dict[str, list[str]] = {
    "sort": _REINFORCE,
    "LoRA": [*_REINFORCE, "lora.rank=2", "lora.dropout=0.3", "trainer.lr=0.01"],
    "ahead": [*_REINFORCE, "inference.batches_ahead=1"],
    "SFT": ["sft", *_TINY, "rows=32", "batch_size=8", "heldout=0.1", "epochs=1"],
    "RM": ["train-rm", *_TINY, "pairs=16", "batch_size=4", "epochs=1", "task.args.num_heldout=4"],
}
"""Name -> command and settings. Each run has three or four steps, with a checkpoint after each."""

NOT_COMPARED = {"id", "ts_ns", "memory", "phases_s", "overlap", "weight_sync", "mismatch", "wall_s", "pairs_per_s"}
"""Keys of times, memory and random names, which differ between two uninterrupted runs too, as do
all keys that end with `_s`; and of the check before the first step, which each life makes anew."""
_MOST_LIVES = 12
_LONGEST_LIFE_S = 300
_FOLDER = "LUDIC_KILLS_FOLDER"
"""The variable with the folder of all runs, set in the process that has the library loaded."""
_IMPORTS = [
    *("ludic.cli.app", "ludic.cli.train", "ludic.runs.reinforce", "ludic.runs.sft", "ludic.runs.reward_model"),
    *("transformers.models.qwen2.modeling_qwen2", "peft", "matplotlib.backends.backend_agg"),
]


@dataclass(frozen=True)
class Case:
    """A run to be killed."""

    kind: str
    number: int
    change: int | None
    """The change to its files at which it is killed; None for random moments, some in later lives
    too."""


@dataclass
class Ended:
    """How a case ended."""

    kind: str
    change: int | None
    kills: int
    differences: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)


@dataclass
class Whole:
    """The uninterrupted run of a kind."""

    folder: Path
    changes: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--moments", type=int, default=50, help="runs of each kind that are killed at random moments")
    parser.add_argument("--changes", type=int, help="the number of changes to files at which to kill; default: every one")
    parser.add_argument("--at", nargs="+", type=int, default=[], help="kill at these changes instead, counted from 1")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if _FOLDER not in os.environ:
        command = [sys.executable, "-m", "benches.python.kills", *sys.argv[1:]]
        os.execve(sys.executable, command, _preloading(Path(tempfile.mkdtemp(prefix="kills-"))))
    folder = Path(os.environ[_FOLDER])
    for name in _IMPORTS:
        importlib.import_module(name)
    wholes = {kind: _run_whole(kind, folder) for kind in options.kinds}
    cases = [case for kind in options.kinds for case in _cases(kind, wholes[kind].changes, options)]
    random.Random(options.seed).shuffle(cases)
    ended = list(_play_all(cases, wholes, folder, options.jobs, options.seed))
    print(_format_table(wholes, ended))
    failed = [case for case in ended if case.differences]
    for case in failed:
        print(json.dumps(asdict(case), indent=2))
    if failed:
        raise SystemExit(f"{len(failed)} runs differ; their folders are in {folder}")
    shutil.rmtree(folder)


def _preloading(folder: Path) -> dict[str, str]:
    """The environment of a process that counts the changes to its files."""
    library = folder / "file_events.so"
    source = Path(__file__).with_name("file_events.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        _FOLDER: str(folder),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _cases(kind: str, changes: int, options: argparse.Namespace) -> Iterator[Case]:
    yield from (Case(kind, number, None) for number in range(options.moments))
    count = changes if options.changes is None else min(options.changes, changes)
    # Evenly spaced: 3 of 9 changes are 3, 6 and 9.
    numbers = options.at or [(number + 1) * changes // count for number in range(count)]
    yield from (Case(kind, options.moments + place, number) for place, number in enumerate(numbers))


def _run_whole(kind: str, folder: Path) -> Whole:
    """Run a kind to its end, twice: the second run has what the first imported, and both must be
    equal."""
    first, second = folder / kind / "first", folder / kind / "whole"
    for run in (first, second):
        run.parent.mkdir(exist_ok=True)
        begin = time.perf_counter()
        facts = run.parent / "facts.json"
        status = _wait(_start(KINDS[kind], run, facts=facts))
        if status != 0:
            raise SystemExit(f"the uninterrupted run of {kind} failed: see {run}.log")
        known = json.loads(facts.read_text())
        for name in known["modules"]:
            with suppress(Exception):  # some modules are imported by nothing but a part of themselves
                importlib.import_module(name)
    if differences := compare(second, first):
        raise SystemExit(f"two uninterrupted runs of {kind} differ: {differences}")
    return Whole(second, known["changes"], time.perf_counter() - begin)


def _start(arguments: list[str], run: Path, *, change: int = 0, facts: Path | None = None) -> int:
    """Start a life of `run` in a fork, which is killed at `change`. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        log = os.open(f"{run}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = _live(arguments, run, change, facts)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _live(arguments: list[str], run: Path, change: int, facts: Path | None) -> int:
    from ludic.cli.app import main

    before = set(sys.modules)
    # A run whose folder has its settings is resumed; before that, it is started again.
    is_begun = (run / "config.yaml").exists()
    target = ["--resume", str(run)] if is_begun else [*arguments[1:], f"output={run.parent}", f"name={run.name}"]
    sys.argv = ["ludic", arguments[0], *target]
    events = ctypes.CDLL(None)
    events.watch_files(str(run.parent / run.name).encode(), ctypes.c_long(change))
    try:
        main()
    except SystemExit as ended:
        if facts is not None:
            new = sorted(set(sys.modules) - before)
            facts.write_text(json.dumps({"changes": events.count_file_events(), "modules": new}))
        return int(ended.code or 0)
    return 0


def _wait(pid: int, seconds: float | None = None) -> int:
    """Wait for a process, and kill it after `seconds`. Returns its exit status, negative for a
    signal. Raises TimeoutError for a process that hangs."""
    end = time.perf_counter() + (_LONGEST_LIFE_S if seconds is None else seconds)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.perf_counter() >= end:
            os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if seconds is None:
                raise TimeoutError(f"a life was not over after {_LONGEST_LIFE_S} s")
            return status
        time.sleep(0.001)


def _play_all(cases: list[Case], wholes: dict[str, Whole], folder: Path, jobs: int, seed: int) -> Iterator[Ended]:
    """Play all cases in `jobs` processes."""
    results = [folder / f"results_{job}.jsonl" for job in range(jobs)]
    workers = []
    for job, result in enumerate(results):
        pid = os.fork()
        if pid == 0:
            with suppress(KeyboardInterrupt):
                _play_share(cases[job::jobs], wholes, folder, result, seed)
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)
    for result in results:
        yield from (Ended(**json.loads(line)) for line in result.read_text().splitlines())


def _play_share(cases: list[Case], wholes: dict[str, Whole], folder: Path, result: Path, seed: int) -> None:
    with result.open("w") as file:
        for case in cases:
            try:
                ended = _play(case, wholes[case.kind], folder, random.Random(f"{seed} {case.kind} {case.number}"))
            except Exception as error:
                ended = Ended(case.kind, case.change, 0, [f"not compared: {error!r}"])
            file.write(json.dumps(asdict(ended)) + "\n")
            file.flush()
            if ended.differences:
                print(json.dumps(asdict(ended)), flush=True)


def _play(case: Case, whole: Whole, folder: Path, rng: random.Random) -> Ended:
    """Kill a run, resume it to its end, and compare it with the whole one. At random moments, a
    resumed run is killed again with a probability of 1/2."""
    run = folder / case.kind / f"run_{case.number}"
    ended = Ended(case.kind, case.change, 0)
    for life in range(_MOST_LIVES):
        killed_at = rng.uniform(0, whole.seconds) if case.change is None and (life == 0 or rng.random() < 0.5) else None
        change = case.change or 0 if life == 0 else 0
        status = _wait(_start(KINDS[case.kind], run, change=change), killed_at)
        if status == -signal.SIGKILL:
            ended.kills += 1
            ended.killed.append(f"change {change}" if change else f"{killed_at:.3f} s")
            continue
        if status != 0:
            ended.differences.append(f"life {life + 1} ended with status {status}: see {run}.log")
        break
    else:
        ended.differences.append(f"not at its end after {_MOST_LIVES} lives")
    ended.differences = ended.differences or compare(run, whole.folder)
    if not ended.differences:
        shutil.rmtree(run)
        Path(f"{run}.log").unlink()
    return ended


def compare(run: Path, whole: Path) -> list[str]:
    """What differs between a run and the uninterrupted one, beside times and random names."""
    differences = []
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        found, wanted = _lines(run / name), _lines(whole / name)
        if found != wanted:
            first = next(
                (n for n, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
                min(map(len, (found, wanted))),
            )
            differences.append(f"{name}: {len(found)} lines for {len(wanted)}; line {first + 1} is the first that differs")
    differences += _repeated(run)
    if _plain(json.loads((run / "summary.json").read_text())) != _plain(json.loads((whole / "summary.json").read_text())):
        differences.append("summary.json")
    files = [{path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in (run, whole)]
    # A run that is killed before it deletes an older checkpoint, and has no more to save, keeps it.
    added = [path for path in files[0] - files[1] if path.parts[0] != "checkpoints" or any(part[0] == "." for part in path.parts)]
    differences += [f"only in one of the two: {path}" for path in sorted([*added, *(files[1] - files[0])])]
    weights = [path for path in files[0] & files[1] if path.parts[0] in ("model", "adapter", "base", "best")]
    differences += [f"content of {path}" for path in weights if _content(run, path) != _content(whole, path)]
    return differences


def _content(run: Path, path: Path) -> bytes:
    """The file without the place of the run, which an adapter names."""
    return (run / path).read_bytes().replace(str(run).encode(), b"RUN")


def _repeated(run: Path) -> list[str]:
    """Steps and episodes that stand twice in the logs of a run."""
    steps = Counter((line["phase"], line["step"]) for line in _lines(run / "metrics.jsonl") if "train/loss" in line)
    engines = (line["meta"]["engine"] for line in _lines(run / "rollouts.jsonl"))
    episodes = Counter(engine["sampling_seed"] for engine in engines)
    return [f"{what} stands {count} times" for what, count in [*steps.items(), *episodes.items()] if count > 1]


def _lines(path: Path) -> list[Any]:
    return [_plain(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _plain(value: Any) -> Any:
    """The value as text that tells every float apart, without what is not compared."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key not in NOT_COMPARED and not key.endswith("_s")}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return repr(value) if isinstance(value, float) else value


def _format_table(wholes: dict[str, Whole], ended: list[Ended]) -> str:
    head = [
        "| run | random moments: runs, kills | changes to files | killed at | resumed runs that differ |",
        "|---|---|---|---|---|",
    ]
    rows = []
    for kind, whole in wholes.items():
        by_moment = [case for case in ended if case.kind == kind and case.change is None]
        by_change = [case for case in ended if case.kind == kind and case.change is not None]
        moments = f"{len(by_moment)}, {sum(case.kills for case in by_moment)}"
        differing = sum(bool(case.differences) for case in [*by_moment, *by_change])
        rows.append(f"| {kind} | {moments} | {whole.changes} | {sum(case.kills for case in by_change)} | {differing} |")
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    main()
