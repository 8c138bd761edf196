"""One rank of runs in which each rank has a source of its own: `python ranks_gathered.py RANK STORE
OUT`. Rank 0 writes what all ranks found as JSON."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from preference_samples import reward_model, rm_config, sorted_pairs
from shared_runs import DescentRMTrainer, DescentTrainer, policy_trainer
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError, DataError, RequestsExhausted, StopRequested
from ludic.training import CheckpointConfig, GatheredBatches, make_bradley_terry, make_sft, ranks
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import SAWBatch

STEPS = 6


class OwnSource(BatchSourceBase):
    """A part of new samples for each position: those of one rank, or of all."""

    shards_across_ranks = True

    def __init__(self, make, begin=0, end=None):
        self.make, self.begin, self.end, self.position = make, begin, end, 0

    async def next_batch(self):
        self.position += 1
        items = self.make(self.position)[self.begin : self.end]
        return SAWBatch(items, {"target_rollouts": len(items), "played_rollouts": len(items)})

    def state_dict(self):
        return {"position": self.position, "begin": self.begin}

    def load_state_dict(self, state):
        assert state["begin"] == self.begin
        self.position = state["position"]


def make_answers(position):
    """9 answers in 3 groups; positions 3 and 6 have the first group alone."""
    return sorting_items(4 if position % 3 == 0 else 9, seed=position)


def make_pairs(position):
    return sorted_pairs(7, seed=position)


def policy_run(folder, source, **options):
    return policy_trainer(folder, lambda own: own, source(make_answers), **options)


def sft_run(folder, source, **options):
    return DescentTrainer(
        model=tiny_model(),
        algo=make_sft(),
        batch_source=source(make_answers),
        cfg=cpu_config(micro_token_budget=60, max_grad_norm=None, packing="padding_free"),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=3, max_to_keep=9),
        **options,
    )


def reward_run(folder, source, **options):
    return DescentRMTrainer(
        model=reward_model(),
        algo=make_bradley_terry(beta=1.5, lambda_regularization=0.1),
        batch_source=source(make_pairs),
        cfg=rm_config(micro_token_budget=70, max_grad_norm=None),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=3, max_to_keep=9),
        **options,
    )


RUNS = {"policy": policy_run, "sft": sft_run, "reward": reward_run}


def part_of_rank(make):
    """The first group, or two pairs, on rank 0, the others on rank 1: no sample of rank 1 at some
    positions."""
    return GatheredBatches(OwnSource(make, 0, 4) if ranks.rank() == 0 else OwnSource(make, 4))


def train(folder, name, steps, **options):
    trainer = RUNS[name](folder / name, part_of_rank, **options)
    losses = []
    for _ in range(steps):
        stats = trainer.train_step_sync()
        losses.append(stats["train/loss"])
    weights = {key: weight.clone() for key, weight in trainer.model.state_dict().items()}
    return {"losses": losses, "stats": stats, "state": trainer.source.state_dict()}, weights


def resumes_exactly(folder, name, expected, weights):
    """Whether the steps after a checkpoint in the middle end at the very weights of `weights`."""
    first = 5 if name == "policy" else 3  # the interval of its checkpoints
    again, resumed = train(folder, name, STEPS - first, resume_from=first)
    same = all(torch.equal(weights[key], resumed[key]) for key in weights)
    return same and again["losses"] == expected["losses"][first:] and again["state"] == expected["state"]


class Scripted(BatchSourceBase):
    """Gives a batch, or raises, as it is told for each call."""

    overlaps = True

    def __init__(self, *answers):
        self.answers = list(answers)

    async def next_batch(self):
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def error_of(source):
    try:
        batch = asyncio.run(source.next_batch())
    except BaseException as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    return len(batch.items)


def find_errors():
    """What each call gives on this rank: the number of samples, or the error."""
    rank, items = ranks.rank(), sorting_items(8)
    own = SAWBatch(items[4 * rank : 4 * rank + 4])
    failing = RequestsExhausted("none left") if rank == 1 else own
    both = DataError(f"bad data of rank {rank}")
    same = SAWBatch(items[:4])  # the same group on both ranks
    unsendable = SAWBatch(items[:1], {"thing": object()}) if rank == 0 else own
    stopped = StopRequested("enough") if rank == 0 else own
    cancelled = asyncio.CancelledError() if rank == 0 else own
    interrupted = KeyboardInterrupt() if rank == 1 else own
    answers = (own, failing, both, same, unsendable, stopped, cancelled, interrupted, own)
    source = GatheredBatches(Scripted(*answers))
    return [error_of(source) for _ in answers]


def find_warnings():
    """What sources that do not say whose samples they give are answered with."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("ludic.training.batching.shared_batches")
    logger.addHandler(handler)
    source = GatheredBatches(Scripted(*[SAWBatch([])] * 2))
    GatheredBatches(OwnSource(make_answers))
    for _ in range(2):
        asyncio.run(source.next_batch())
    logger.removeHandler(handler)
    return records


def find_refusal():
    class SameOnAll(OwnSource):
        shards_across_ranks = False

    try:
        GatheredBatches(SameOnAll(make_answers))
    except ConfigError as error:
        return str(error)
    return None


def main(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    folder, found = Path(out).parent, {"errors": find_errors(), "refusal": find_refusal(), "warnings": find_warnings()}
    for name in RUNS:
        found[name], weights = train(folder, name, STEPS)
        found[name]["resumed"] = resumes_exactly(folder, name, found[name], weights)
    gathered = ranks.gather_json(found)
    if rank == 0:
        Path(out).write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
