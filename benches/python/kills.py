"""Kills runs with SIGKILL at random moments, and resumes them from each state that their files go
through, and compares what they end with.

`python -m benches.python.kills` prints the table of benches/results/reliability.md. A run must end
as the uninterrupted one does, bit for bit: losses, gradient norms and all other metrics but times,
rollouts, the model's files and the summary; each step and each episode once. Which weights sample a
group of an over-sampled run depends on timing: there, no group may be lost, doubled or split.

`file_events.c`, loaded with LD_PRELOAD, stops a life at each change to its files, in the middle of
each write too, and its folder is read. A kill at that moment leaves the same files, since what is
written is the system's then; this is checked with real kills of lives that stand at a change.
"""

from __future__ import annotations

import argparse
import ctypes
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benches.python.equal_loops import check_loop, compare_loop, compare_over_sampled
from benches.python.equal_runs import check_learning, compare
from benches.python.folder_states import FolderState, FolderStates
from benches.python.forked_lives import import_all, log_of, resumable, start_life, stops_of, wait_for_life
from benches.python.id_reward import write_problems

_NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
_TINY = ["threads=1", "checkpoint.every_n_steps=1", "checkpoint.max_to_keep=2", *_NETWORK]
_REINFORCE = [
    *("train", *_TINY, "warmup.steps=2", "warmup.batch_size=4", "steps=3", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.log_every=1", "evaluation.prompts=2", "evaluation.samples_per_prompt=2", "trainer.eval_every_n_steps=2"),
]
_REFILL = ["rollout.group_filter=benches.python.id_reward:even_sum", "rollout.order=submission", "rollout.patience=100"]
KINDS: dict[str, list[str]] = {
    "GRPO": _REINFORCE,
    "LoRA": [*_REINFORCE, "lora.rank=2", "lora.dropout=0.3"],
    "ahead": [*_REINFORCE, "inference.batches_ahead=1"],
    "SFT": ["sft", *_TINY, "rows=32", "batch_size=8", "heldout=0.1", "epochs=1"],
    "refill": [*_REINFORCE, *_REFILL],
    "over-sampled": [*_REINFORCE, *_REFILL, "rollout.over_sampling_factor=1.5"],
    "loop": ["-m", "benches.python.rollout_loop", "--sampler", "seed", "--factor", "1.5"],
    "loop, model": ["-m", "benches.python.rollout_loop", "--sampler", "model"],
    "RM": ["train-rm", *_TINY, "pairs=16", "batch_size=4", "epochs=1", "task.args.num_heldout=4"],
}
"""Name -> command and settings; `ludic train` gets a task too. Each run has three to five steps,
with a checkpoint after each. The loops are those of `ludic.rollouts.training`."""

_MOST_LIVES = 12
_FOLDER = "LUDIC_KILLS_FOLDER"
"""The variable with the folder of all runs, set in the process that has the library loaded."""


@dataclass(frozen=True)
class Moments:
    """A run that is killed at a random moment; half of its resumed lives are killed again."""

    kind: str
    number: int


@dataclass(frozen=True)
class Changes:
    """A run that is killed at these changes to its files, one life each, counted from 1."""

    kind: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class States:
    """The run in these states of its folder, each resumed."""

    kind: str
    first_changes: tuple[int, ...]
    """The first change at which the folder is in each state."""


Share = Moments | Changes | States


@dataclass
class Ended:
    """A run that was resumed to its end."""

    kind: str
    share: str
    """Moments, Changes or States."""
    moments: list[str]
    """When it was killed, or the change that its state is of."""
    differences: list[str] = field(default_factory=list)


@dataclass
class Whole:
    """The uninterrupted run of a kind, and the states of its folder at each change to it."""

    folder: Path
    seconds: float
    states: list[FolderState]

    def first_changes(self) -> list[int]:
        """The changes at which the folder is in a state that it was not in before."""
        first: dict[FolderState, int] = {}
        for number, state in enumerate(self.states, start=1):
            first.setdefault(state, number)
        return list(first.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--moments", type=int, default=50, help="runs of each kind that are killed at random moments")
    parser.add_argument("--states", type=int, help="states of each kind to resume; default: all")
    parser.add_argument("--at", nargs="+", type=int, help="resume the states at these changes instead")
    parser.add_argument("--changes", type=int, default=20, help="runs of each kind that are killed at changes to their files")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if _FOLDER not in os.environ:
        command = [sys.executable, "-m", "benches.python.kills", *(sys.argv[1:] if arguments is None else arguments)]
        os.execve(sys.executable, command, preloading(Path(tempfile.mkdtemp(prefix="kills-"))))
    folder = Path(os.environ[_FOLDER])
    import_all()
    problems = write_problems(folder / "rows.jsonl")
    KINDS.update({kind: [command[0], *problems, *command[1:]] for kind, command in KINDS.items() if command[0] == "train"})
    contents = FolderStates()
    wholes = {kind: _run_whole(kind, folder, contents) for kind in options.kinds}
    shares = list(_shares(wholes, options))
    ended = _play_all(shares, _Player(wholes, contents, folder, options.seed), options.jobs)
    print(_format_table(wholes, ended))
    failed = [one for one in ended if one.differences]
    for one in failed:
        print(json.dumps(asdict(one), indent=2))
    if failed:
        raise SystemExit(f"{len(failed)} runs differ; their folders are in {folder}")
    shutil.rmtree(folder)


def preloading(folder: Path) -> dict[str, str]:
    """The environment of a process that can be stopped at changes to its files."""
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


def _shares(wholes: dict[str, Whole], options: argparse.Namespace) -> Iterator[Share]:
    """What is to be done, the longest first."""
    distinct = {kind: whole.first_changes() for kind, whole in wholes.items()}
    for kind, numbers in distinct.items():
        yield States(kind, tuple(options.at or _spread(numbers, options.states)))
    yield from (Changes(kind, tuple(_spread(numbers, options.changes))) for kind, numbers in distinct.items())
    yield from (Moments(kind, number) for kind in wholes for number in range(options.moments))


def _spread(numbers: Sequence[int], count: int | None) -> list[int]:
    """`count` of the numbers, evenly spaced: 3 of 1 to 9 are 3, 6 and 9; None is all."""
    count = len(numbers) if count is None else min(count, len(numbers))
    return [numbers[(place + 1) * len(numbers) // count - 1] for place in range(count)]


def _run_whole(kind: str, folder: Path, contents: FolderStates) -> Whole:
    """Run a kind to its end three times: once to import the rest of what it imports, once with
    that, and once with a stop at each change. All must be equal."""
    first, whole, stopped = folder / kind / "first", folder / kind / "whole", folder / kind / "run"
    first.parent.mkdir(exist_ok=True)
    modules = first.parent / "modules.json"
    for run in (first, whole):
        begin = time.perf_counter()
        life = start_life(resumable(KINDS[kind], run), log_of(run), conclude=lambda: _write_modules(modules))
        if wait_for_life(life) != 0:
            raise SystemExit(f"the uninterrupted run of {kind} failed: see {log_of(run)}")
        seconds = time.perf_counter() - begin
        import_all(json.loads(modules.read_text()))
    check_learning(whole) if KINDS[kind][0] != "-m" else check_loop(whole)
    states = [contents.read(stopped) for _ in stops_of(_start_stopped(kind, stopped, 0))]
    for run in (first, stopped):
        if differences := compare_kind(kind, run, whole):
            raise SystemExit(f"two uninterrupted runs of {kind} differ: {differences}")
    return Whole(whole, seconds, states)


def compare_kind(kind: str, run: Path, whole: Path) -> list[str]:
    """What differs that must not."""
    if KINDS[kind][0] == "-m":
        return compare_loop(run, whole)
    return compare_over_sampled(run, whole) if kind == "over-sampled" else compare(run, whole)


def _write_modules(path: Path) -> None:
    path.write_text(json.dumps(sorted(sys.modules)))


def _start_stopped(kind: str, run: Path, change: int) -> int:
    """Start a life that stops at this change, or at each one for 0. Returns its process id."""
    events = ctypes.CDLL(None)
    watch = (str(run).encode(), ctypes.c_long(change))
    return start_life(resumable(KINDS[kind], run), log_of(run), prepare=lambda: events.stop_at_changes(*watch))


def _play_all(shares: list[Share], player: _Player, jobs: int) -> list[Ended]:
    """Do all shares in `jobs` processes, which take them from a pipe."""
    taken, given = os.pipe()
    workers, results = [], [player.folder / f"results_{job}.jsonl" for job in range(jobs)]
    for result in results:
        pid = os.fork()
        if pid == 0:
            os.close(given)
            status = 1
            try:
                _play_given(shares, player, taken, result)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        workers.append(pid)
    for number in range(len(shares)):
        os.write(given, number.to_bytes(4))
    os.close(given)
    os.close(taken)
    statuses = [os.waitpid(pid, 0)[1] for pid in workers]
    if any(statuses):
        raise SystemExit(f"not all runs were played; their folders are in {player.folder}")
    lines = [line for result in results for line in result.read_text().splitlines()]
    return [Ended(**json.loads(line)) for line in lines]


def _play_given(shares: list[Share], player: _Player, taken: int, result: Path) -> None:
    with result.open("w") as file:
        while number := os.read(taken, 4):
            for ended in player.play(shares[int.from_bytes(number)]):
                file.write(json.dumps(asdict(ended)) + "\n")
                file.flush()
                if ended.differences:
                    print(json.dumps(asdict(ended)), flush=True)


@dataclass
class _Player:
    wholes: dict[str, Whole]
    contents: FolderStates
    folder: Path
    seed: int

    def play(self, share: Share) -> Iterator[Ended]:
        if isinstance(share, Moments):
            yield self._kill_at_random(share)
        elif isinstance(share, Changes):
            for number in share.numbers:
                yield self._kill_at(share.kind, number)
        else:
            for number in share.first_changes:
                yield self._resume_state(share.kind, number)

    def _kill_at_random(self, share: Moments) -> Ended:
        kind, run = share.kind, self.folder / share.kind / f"moment_{share.number}"
        rng = random.Random(f"{self.seed} {kind} {share.number}")
        killed: list[str] = []
        for life in range(_MOST_LIVES):
            kill_at = rng.uniform(0, self.wholes[kind].seconds) if life == 0 or rng.random() < 0.5 else None
            status = wait_for_life(start_life(resumable(KINDS[kind], run), log_of(run)), kill_at)
            if status != -signal.SIGKILL:
                return self._end(share, run, killed, status)
            killed.append(f"{kill_at:.3f} s")
        return Ended(kind, "Moments", killed, [f"not at its end after {_MOST_LIVES} lives: see {log_of(run)}"])

    def _kill_at(self, kind: str, number: int) -> Ended:
        """Kill a life that stands at this change, and resume it. The kill must leave the files that
        were read before it, and as many as the run with all stops had at this change."""
        run = self.folder / kind / "killed"
        life = _start_stopped(kind, run, number)
        next(stops_of(life))
        before = self.contents.read(run)
        os.kill(life, signal.SIGKILL)
        wait_for_life(life)
        share = Changes(kind, (number,))
        after, expected = self.contents.read(run), len(self.wholes[kind].states[number - 1])
        if after != before or len(after) != expected:
            shutil.rmtree(run)
            return Ended(kind, "Changes", [f"change {number}"], ["the kill left other files"])
        return self._resume(share, run, f"change {number}")

    def _resume_state(self, kind: str, number: int) -> Ended:
        # The folder that was read, since an adapter has the place of its run in it.
        run = self.folder / kind / "run"
        self.contents.write(self.wholes[kind].states[number - 1], run)
        return self._resume(States(kind, (number,)), run, f"change {number}")

    def _resume(self, share: Share, run: Path, moment: str) -> Ended:
        status = wait_for_life(start_life(resumable(KINDS[share.kind], run), log_of(run)))
        ended = self._end(share, run, [moment], status)
        if ended.differences:
            shutil.move(run, run.with_name(f"{run.name}_{moment.replace(' ', '_')}"))
        return ended

    def _end(self, share: Share, run: Path, moments: list[str], status: int) -> Ended:
        """Compare a run that has ended, and delete it if it is right."""
        ended = Ended(share.kind, type(share).__name__, moments)
        if status != 0:
            ended.differences.append(f"ended with status {status}: see {log_of(run)}")
        else:
            try:
                ended.differences += compare_kind(share.kind, run, self.wholes[share.kind].folder)
            except Exception as error:
                ended.differences.append(f"not compared: {error!r}")
        if not ended.differences:
            shutil.rmtree(run)
            log_of(run).unlink()
        return ended


def _format_table(wholes: dict[str, Whole], ended: list[Ended]) -> str:
    head = [
        "| run | at random: runs, kills | changes in a run | states, resumed | killed at a change | other logs or weights |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for kind, whole in wholes.items():
        of_kind = [one for one in ended if one.kind == kind]
        by_share = {name: [one for one in of_kind if one.share == name] for name in ("Moments", "States", "Changes")}
        kills = sum(len(one.moments) for one in by_share["Moments"])
        states = f"{len(whole.first_changes())}, {len(by_share['States'])}"
        differing = sum(bool(one.differences) for one in of_kind)
        moments = f"{len(by_share['Moments'])}, {kills}"
        rows.append(f"| {kind} | {moments} | {len(whole.states)} | {states} | {len(by_share['Changes'])} | {differing} |")
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    main()
