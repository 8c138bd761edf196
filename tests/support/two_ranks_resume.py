"""One rank of a run on two that is resumed, and one whose disk is full: `python
two_ranks_resume.py RANK STORE OUT`. Rank 0 writes what it found as JSON."""

import errno
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training_samples import cpu_config, sorting_items, tiny_model

from ludic.errors import LudicError
from ludic.training import CheckpointConfig, Trainer, checkpoint, make_sft, ranks
from ludic.training.backend import saving
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import SAWBatch

ITEMS = sorting_items(16, seed=3)


class OwnSource(BatchSourceBase):
    """Different samples on each rank, at a position of its own; noise from the generators."""

    shards_across_ranks = True

    def __init__(self, rank):
        self.position, self.drawn = 5 * rank, []

    async def next_batch(self):
        items = [ITEMS[(self.position + k) % len(ITEMS)] for k in range(2)]
        self.position += 2
        self.drawn.append([self.position, float(torch.rand(()))])
        return SAWBatch(items, {})

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def trainer_of(folder, source, seed=0, **options):
    return Trainer(
        model=tiny_model(seed),
        algo=make_sft(),
        batch_source=source,
        cfg=cpu_config(),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=9),
        **options,
    )


def drawn_after_resume(folder, rank):
    """What the source drew in steps 2 and 3 of a whole run, and of one resumed after step 1."""
    torch.manual_seed(100 + rank)
    whole = OwnSource(rank)
    trainer_of(folder, whole).train_sync(3)
    torch.manual_seed(0)
    again = OwnSource(rank)
    trainer_of(folder, again, seed=1, resume_from=1).train_sync(2)
    return whole.drawn[1:], again.drawn


def error_of_a_full_disk(folder, rank, fails):
    """The error of this rank where rank 0's disk is full."""
    trainer = trainer_of(folder, OwnSource(rank))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    module = {"replace_folder": saving, "write_json": checkpoint}[fails]
    original = getattr(module, fails)
    if rank == 0:
        setattr(module, fails, full)
    try:
        trainer.save_checkpoint()
    except (OSError, LudicError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(module, fails, original)
    return "nothing"


def main(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    folder = Path(out).parent
    drawn = drawn_after_resume(folder / "run", rank)
    errors = {fails: error_of_a_full_disk(folder / "full", rank, fails) for fails in ("replace_folder", "write_json")}
    found = {"drawn": ranks.gather_json(drawn), "errors": ranks.gather_json(errors)}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
