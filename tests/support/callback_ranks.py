"""Two ranks with callbacks: `python callback_ranks.py FOLDER` writes, for each rank, where the run
ended, why, and which calls its callback saw."""

import json
import sys

from forked_ranks import run_ranks
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import LudicError
from ludic.training import Callback, CheckpointConfig, KeepBest, StopOnMetric, Trainer, make_sft
from ludic.training.batching.shared_batches import SharedBatches

LOSSES = [0.5, 0.4, 0.6, 0.7, 0.1]


class Failing(Callback):
    """Sees everything, and fails at each step."""

    def __init__(self):
        self.seen = []

    def on_step(self, event):
        self.seen.append(event.step)
        raise RuntimeError("the pager is empty")


class Evaluator:
    def __init__(self):
        self.calls = 0

    async def eval(self, **_):
        self.calls += 1
        return [], {"loss": LOSSES[self.calls - 1]}


def run(rank, world, folder, resume_from=None):
    failing = Failing()
    trainer = Trainer(
        model=tiny_model(),
        algo=make_sft(),
        batch_source=SharedBatches(ListSource(sorting_items(4)) if rank == 0 else None),
        cfg=cpu_config(eval_every_n_steps=1),
        checkpoint_config=CheckpointConfig(folder, max_to_keep=1),
        resume_from=resume_from,
        evaluator=Evaluator(),
        callbacks=[failing, KeepBest("loss"), StopOnMetric("loss", patience=2)],
    )
    trainer.train_sync(5 - trainer.current_step)
    stop = trainer.callbacks.stop
    return {"step": trainer.current_step, "stop": None if stop is None else stop.reason, "seen": failing.seen}


def run_unequal(rank, world):
    """The error that a rank raises if rank 0 alone has a callback."""
    try:
        Trainer(
            model=tiny_model(),
            algo=make_sft(),
            batch_source=SharedBatches(ListSource(sorting_items(4)) if rank == 0 else None),
            cfg=cpu_config(),
            callbacks=[Failing()] if rank == 0 else [],
        )
    except LudicError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    whole = run_ranks(2, run, sys.argv[1])
    resumed = run_ranks(2, run, sys.argv[1], 4)
    print(json.dumps({"whole": whole, "resumed": resumed, "unequal": run_ranks(2, run_unequal)}))
