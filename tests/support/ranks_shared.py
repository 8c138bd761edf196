"""One rank of runs on shared batches: `python ranks_shared.py RANK STORE OUT WORLD RESUME`. Trains
the runs of `shared_runs` for ten steps, or five more of those under RESUME, and rank 0 writes what
it found as JSON."""

import asyncio
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shared_runs import TRAINERS, PromptSource, policy_trainer
from training_samples import sorting_items

from ludic.errors import DataError, RequestsExhausted, RowError, StopRequested
from ludic.training import SharedBatches, ranks
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import SAWBatch


class NoMoreGames(RequestsExhausted):
    """A user's own error."""


class FailingSource(BatchSourceBase):
    """Raises what it is given, one at a time."""

    overlaps, max_lag, pairs_incomplete = True, 3, 2

    def __init__(self, failures):
        self.failures = list(failures)

    async def next_batch(self):
        raise self.failures.pop(0)


class WithheldSource(BatchSourceBase):
    """Gives its first batch once the file `asked_for` is there."""

    def __init__(self, asked_for):
        self.asked_for = asked_for

    async def next_batch(self):
        while not self.asked_for.exists():
            await asyncio.sleep(0.01)
        return SAWBatch(sorting_items(2))

    async def finish_pending(self, timeout_s=0.0):
        await asyncio.sleep(0.1)


def only_on_rank_0(source):
    return source if ranks.rank() == 0 else None


def error_of(run):
    try:
        asyncio.run(run())
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def find_errors():
    """What each failure of rank 0's source is on this rank."""
    failures = [
        NoMoreGames("none left"),
        StopRequested("enough"),
        StopAsyncIteration("the end"),
        RowError("a bad row", reason="prompt_too_long"),
        OSError(28, "No space"),
        asyncio.CancelledError(),
    ]
    source = SharedBatches(only_on_rank_0(FailingSource(failures)))
    members = [source.overlaps, source.max_lag, source.pairs_incomplete]
    found = [error_of(source.next_batch) for failure in failures[:-1]]
    if ranks.rank() == 0:
        try:
            asyncio.run(source.next_batch())
        except asyncio.CancelledError:
            found.append(["CancelledError"])
    else:
        found.append(error_of(source.next_batch))
    return members, found


def find_patience(folder):
    """A batch that comes too late for the others, who then read it."""
    given_up = folder / "given_up"
    source = SharedBatches(only_on_rank_0(WithheldSource(given_up)), patience_s=0.2 if ranks.rank() else 60.0)
    error = None if ranks.rank() == 0 else error_of(source.next_batch)
    source._patience_s = 60.0
    if ranks.rank() == 1:
        given_up.touch()
    batch = asyncio.run(source.next_batch())
    asyncio.run(source.finish_pending(60.0))
    return error, len(batch.items)


def find_stop():
    """A stop that rank 1 asks for after the first batch."""
    asked = [False]
    source = SharedBatches(only_on_rank_0(PromptSource()), stop=lambda: asked[0])
    first = asyncio.run(source.next_batch())
    asked[0] = ranks.rank() == 1
    if ranks.rank() == 1:
        source._report_stop()
    dist.barrier()
    return len(first.items), error_of(source.next_batch)


def find_disorder():
    """Rank 0 gets a batch while the others wait for it to finish its pending ones."""
    source = SharedBatches(only_on_rank_0(PromptSource()))
    if ranks.rank() == 0:
        source._meeting.post(source._topic, "batch", sizes=[])
        return None
    return error_of(lambda: source.finish_pending(60.0))


def find_impure(folder):
    """The error where preprocessing drops other samples on each rank, or fails on one."""

    def impure(batch):
        return SAWBatch(batch.items[ranks.rank() :], batch.meta)

    def failing(batch):
        if ranks.rank() == 1:
            raise DataError("no such key")
        return batch

    errors = []
    for preprocess in (impure, failing):
        trainer = policy_trainer(folder, SharedBatches)
        trainer.algo.preprocess = preprocess
        errors.append(error_of(trainer.train_step))
    return errors


def train(folder, name, resume):
    """The loss of each step and the last statistics. With `resume` from step 5."""
    trainer = TRAINERS[name](folder / name, SharedBatches, **({"resume_from": 5} if resume else {}))
    losses = []
    for _ in range(5 if resume else 10):
        stats = trainer.train_step_sync()
        losses.append(stats["train/loss"])
    source = trainer.batch_source._source
    given = getattr(source, "given", None)
    return {"losses": losses, "stats": stats, "given": given, "state": trainer.source.state_dict()}


def main(rank, store, out, world, resume):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(world))
    folder = Path(out).parent if resume == "no" else Path(resume)
    runs = {name: train(folder, name, resume != "no") for name in TRAINERS}
    found = {"runs": runs}
    if resume == "no":
        members, errors = find_errors()
        found |= {"members": members, "errors": errors, "patience": find_patience(folder)}
        found |= {"disorder": find_disorder(), "impure": find_impure(folder / "impure")}
        found |= {"stop": find_stop()}  # last, since it is one of the run
    gathered = ranks.gather_json(found)
    if rank == 0:
        Path(out).write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
