"""Controllers on two ranks with samples of their own: `python controlled_ranks.py` writes, for each
kind and rank, the coefficients after each step as JSON."""

import json

from controlled_runs import KINDS, Batches, controlled_trainer
from forked_ranks import run_ranks

from ludic.training.batching.shared_batches import SharedBatches


class OwnBatches(Batches):
    shards_across_ranks = True


def run(rank, world):
    sources = {"own": lambda: OwnBatches(rank), "shared": lambda: SharedBatches(Batches())}
    return {f"{kind}, {how}": coefficients_of(kind, make()) for kind in KINDS for how, make in sources.items()}


def coefficients_of(kind, source):
    trainer = controlled_trainer(kind, source=source)
    path = []
    for _ in range(3):
        trainer.train_step_sync()
        path.append(trainer.control.values())
    return path


if __name__ == "__main__":
    alone = {kind: coefficients_of(kind, Batches()) for kind in KINDS}
    print(json.dumps({"ranks": run_ranks(2, run), "alone": alone}))
