"""Faults inside a save of a sharded model over two ranks: at each change to its files, on either
rank, SIGKILL, a full disk, or a disk that is full in the middle of a write.

`python -m benches.python.save_faults` prints the table of benches/results/reliability.md. After
each fault there must be a verified checkpoint with the weights of the undisturbed run. After a full
disk, both ranks must have raised, one with the error and the other with one line that names it, and
the same save must succeed once there is room again.

Each rank is a fork of this process, which has imported everything. `save_faults.c`, loaded with
LD_PRELOAD, makes the faults.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benches.python.random_models import make_qwen2

from ludic.launch.rank_environment import RankEnvironment
from ludic.models.byte_tokenizer import VOCAB_SIZE
from ludic.models.sharding import ShardingSettings, make_mesh, shard_model
from ludic.models.tensor_files import StoredTensors
from ludic.training import CheckpointConfig, LoraSettings, SAWItem, Trainer, TrainerConfig, apply_lora, make_sft, ranks
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.shared_batches import SharedBatches
from ludic.training.checkpoint import CheckpointManager

FOLDER = "LUDIC_SAVE_FAULTS_FOLDER"
"""The variable with the folder of all runs, set in the process that has the library loaded."""
WORLD = 2
MODELS = ("policy", "adapters")
FAULTS = ("kill", "full disk", "short write")
GRACE_S = 0.5
"""How long the other rank goes on after one was killed, as under torchrun, which ends it."""
DEADLINE_S, CASE_S = 300.0, 10.0
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where the runs are: a real disk only makes them slower, since power is not cut."""


@dataclass(frozen=True)
class Case:
    """A fault at one change to files, counted from 1, of one rank."""

    fault: str
    rank: int
    change: int


@dataclass
class Ended:
    model: str
    case: Case
    kept: str
    """Which checkpoint is found after the fault: `old` or `new`."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Until both ranks had raised."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.python.save_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--every", type=int, default=1, help="fill the disk only at every so many changes")
    parser.add_argument("--kill-every", type=int, default=8, help="kill only at every so many changes")
    options = parser.parse_args()
    if FOLDER not in os.environ:
        command = [sys.executable, "-m", "benches.python.save_faults", *sys.argv[1:]]
        os.execve(sys.executable, command, preloading(Path(tempfile.mkdtemp(prefix="save-faults-", dir=_MEMORY))))
    folder = Path(os.environ[FOLDER])
    _import_everything(folder)
    ended = list(play_all(options, folder))
    print(format_table(ended))
    failed = [case for case in ended if case.wrong]
    for each in failed:
        print(f"{each.model}, {each.case}: {'; '.join(each.wrong)}")
    shutil.rmtree(folder)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(ended)} faults were not survived")


def preloading(folder: Path) -> dict[str, str]:
    """The environment of a process whose changes to files can fail."""
    library, source = folder / "save_faults.so", Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), FOLDER: str(folder), "OMP_NUM_THREADS": "1"}


def _import_everything(folder: Path) -> None:
    """Train and save in this process, so that no fork imports anything."""
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a killed rank is no news
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh"):
        importlib.import_module(name)
    for model in MODELS:
        alone = _make_trainer(_make_model(model), folder / f"{model}-alone")
        alone.train_step_sync()
        alone.save_checkpoint()


def play_all(options: argparse.Namespace, folder: Path) -> Iterator[Ended]:
    for model in options.models:
        whole = folder / f"{model}-whole"
        counts = [results[0]["changes"] for results in _run(model, whole, [None])]
        every = {"kill": options.kill_every}
        cases = [
            Case(fault, rank, change)
            for fault in options.faults
            for rank in range(WORLD)
            for change in range(1, counts[rank] + 1, every.get(fault, options.every))
        ]
        for case in cases:
            if case.fault == "kill":
                yield _play_kill(model, case, whole, folder / "run")
        yield from _play_full_disks(model, [case for case in cases if case.fault != "kill"], folder / "run")


def _play_kill(model: str, case: Case, whole: Path, run: Path) -> Ended:
    shutil.rmtree(run, ignore_errors=True)
    _run(model, run, [case])
    try:
        found = CheckpointManager(CheckpointConfig(run)).find()
    except Exception as error:
        return Ended(model, case, "none", [f"no checkpoint is left: {error}"])
    ended = Ended(model, case, {"step_000001": "old", "step_000002": "new"}[found.name])
    if _read_weights(found) != _read_weights(_first(whole) if ended.kept == "old" else whole / found.name):
        ended.wrong.append(f"{found.name} has other weights")
    return ended


def _play_full_disks(model: str, cases: list[Case], run: Path) -> Iterator[Ended]:
    """All in one life of the ranks, which go on after each."""
    if not cases:
        return
    shutil.rmtree(run, ignore_errors=True)
    for case, *results in zip(cases, *_run(model, run, cases), strict=True):
        if all(result["unmet"] for result in results):  # fewer changes than in the first save
            continue
        kept = results[0]["found"]
        wrong = [] if kept in ("old", "new") else [f"the checkpoint that is found: {kept}"]
        yield Ended(model, case, kept, [*wrong, *_check_errors(results, case)], max(each["seconds"] for each in results))


def _check_errors(results: list[dict[str, Any]], case: Case) -> Iterator[str]:
    """What is wrong with what the ranks raised on a full disk, which a deletion does not need room
    on."""
    errors = [result["error"] for result in results]
    if all(error is None for error in errors):
        if not results[case.rank]["needed_no_room"]:
            yield "a full disk was not noticed"
    elif None in errors:
        yield f"one rank raised, and the other did not: {errors}"
    else:
        told = [
            error for error in errors if error.startswith("RankError: ") and f"failed on rank {case.rank} of {WORLD}" in error
        ]
        if len(told) != WORLD - 1 or any("No space left on device" not in error or "\n" in error for error in errors):
            yield f"the errors are {errors}"
    if any(result["again"] is not None for result in results):
        yield f"the next save failed: {[result['again'] for result in results]}"


def _read_weights(folder: Path) -> dict[str, Any]:
    """Name -> the numbers, of all weights and of AdamW's state."""
    with StoredTensors(sorted(folder.glob("*.safetensors"))) as stored:
        return {name: stored.read(name).tolist() for name in stored.describe()}


def _run(model: str, folder: Path, cases: Sequence[Case | None]) -> list[Any]:
    """What each rank found in each case. Once a rank is killed, the other one is killed too, and
    there are no results."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pids = [_start(RankEnvironment(rank, WORLD, rank, "127.0.0.1", port), model, folder, cases) for rank in range(WORLD)]
    statuses = _wait(pids, DEADLINE_S + CASE_S * len(cases))
    if any(status < 0 for status in statuses):
        return []
    if any(statuses):
        raise SystemExit(f"the ranks ended with {statuses}")
    return [json.loads(_result_path(folder, rank).read_text()) for rank in range(WORLD)]


def _result_path(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}-rank{rank}.json")


def _first(folder: Path) -> Path:
    """A copy of the first checkpoint of the undisturbed run."""
    return folder.with_name(f"{folder.name}-first")


def _wait(pids: list[int], deadline_s: float) -> list[int]:
    """The exit statuses, negative for a signal."""
    statuses: dict[int, int] = {}
    ends = time.monotonic() + deadline_s
    while len(statuses) < len(pids):
        for pid in [pid for pid in pids if pid not in statuses]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] < 0:
                    ends = min(ends, time.monotonic() + GRACE_S)
        if time.monotonic() > ends:
            for pid in [pid for pid in pids if pid not in statuses]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ends += deadline_s
        time.sleep(0.002)
    return [statuses[pid] for pid in pids]


def _start(environment: RankEnvironment, model: str, folder: Path, cases: Sequence[Case | None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        with ranks.joined(environment, timeout_s=60.0):
            results = _save_often(environment.rank, model, folder, cases)
            _result_path(folder, environment.rank).write_text(json.dumps(results))
        status = 0
    except BaseException:
        if not any(case is not None and case.fault == "kill" for case in cases):  # which ends the others
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _save_often(rank: int, model: str, folder: Path, cases: Sequence[Case | None]) -> list[dict[str, Any]]:
    """Train a step and save. For each case: train a step, save with the fault, and save again."""
    settings = ShardingSettings("full")
    trainer = _make_trainer(shard_model(_make_model(model), settings, make_mesh(settings, "cpu")), folder)
    trainer.train_step_sync()
    trainer.save_checkpoint()
    if rank == 0 and list(cases) == [None]:
        shutil.copytree(folder / "step_000001", _first(folder))  # the second save deletes it
    results = []
    for case in cases:
        trainer.train_step_sync()
        ranks.barrier()
        results.append(_save_with_fault(trainer, folder, case if case is not None and case.rank == rank else None))
    return results


def _save_with_fault(trainer: Trainer, folder: Path, case: Case | None) -> dict[str, Any]:
    events = ctypes.CDLL(None)
    place, change = str(folder).encode(), ctypes.c_long(0 if case is None else case.change)
    if case is None or case.fault == "kill":
        events.watch_files(place, change)
    else:
        events.fill_disk(place, change, int(case.fault == "short write"))
    started = time.perf_counter()
    error = _try_to_save(trainer)
    result = {"error": error, "seconds": time.perf_counter() - started, "changes": events.count_file_events()}
    result |= {"needed_no_room": bool(events.was_never_short()), "unmet": case is None or result["changes"] < case.change}
    events.watch_files(b"", ctypes.c_long(0))
    ranks.barrier()
    result["found"] = _find(folder, trainer.current_step)
    result["again"] = _try_to_save(trainer)
    return result


def _find(folder: Path, step: int) -> str:
    """Whether the newest verified checkpoint is the one that was being saved, or the one before. On
    rank 0, while the other waits in the next save."""
    if ranks.rank() > 0:
        return ""
    try:
        found = CheckpointManager(CheckpointConfig(folder)).find().name
    except Exception as error:
        return f"none: {error}"
    return {f"step_{step:06d}": "new", f"step_{step - 1:06d}": "old"}.get(found, found)


def _try_to_save(trainer: Trainer) -> str | None:
    try:
        trainer.save_checkpoint()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _make_model(model: str) -> Any:
    sizes = {"width": 32, "inner": 32, "layers": 2, "heads": 2, "key_value_heads": 1}
    made = make_qwen2(VOCAB_SIZE, **sizes, max_position_embeddings=64)
    if model == "adapters":
        made = apply_lora(made, LoraSettings(rank=2))
    return made


def _make_trainer(model: Any, folder: Path) -> Trainer:
    items = [SAWItem([5 + number, 6, 7, 8], [1] * 4, [0, 1, 1, 1], weight=1.0, meta={}) for number in range(8)]
    source = ItemBatchSource(items, batch_size=4)
    source.unshard()
    return Trainer(
        model=model,
        algo=make_sft(),
        batch_source=SharedBatches(source),
        cfg=TrainerConfig(model_device="cpu", max_seq_len=8, micro_token_budget=32, lr=0.01, pad_token_id=0),
        checkpoint_config=CheckpointConfig(folder, max_to_keep=1),
    )


def format_table(ended: list[Ended]) -> str:
    lines = [
        "| model | fault | on rank 0, 1 | left: the checkpoint before, the new one | not survived | save ended after at most |",
        "|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(each.model for each in ended):
        for fault in FAULTS:
            these = [each for each in ended if each.model == model and each.case.fault == fault]
            if these:
                on = ", ".join(str(sum(each.case.rank == rank for each in these)) for rank in range(WORLD))
                slowest = "" if fault == "kill" else f"{max(each.seconds for each in these):.1f} s"
                left = ", ".join(str(sum(each.kept == which for each in these)) for which in ("old", "new"))
                lines.append(f"| {model} | {fault} | {on} | {left} | {sum(bool(each.wrong) for each in these)} | {slowest} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
