"""One rank of bfloat16 training on two ranks: `python two_ranks_half.py RANK STORE OUT WRAPPING`.
Rank 0 writes its results as JSON."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training_samples import ListSource, cpu_config, sorting_items, tiny_model
from two_ranks import ALGO, wrap

from ludic.training import CheckpointConfig, Trainer


def make_trainer(items, wrapping, folder, *, seed=0, **options):
    return Trainer(
        model=wrap(tiny_model(seed).bfloat16(), wrapping),
        algo=ALGO,
        batch_source=ListSource(items),
        cfg=cpu_config(lr=1e-5),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1),
        **options,
    )


def optimizer_tensors(trainer):
    """Full copies of the tensors that the optimizer steps."""
    tensors = [parameter.detach() for group in trainer.optimizer.param_groups for parameter in group["params"]]
    return [(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone() for tensor in tensors]


def main(rank, store, out, wrapping):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    items = sorting_items(12, seed=3)
    rank_items, folder = (items[:3] if rank == 0 else items[3:]), Path(out).parent / "checkpoints"
    trainer = make_trainer(rank_items, wrapping, folder)
    before = optimizer_tensors(trainer)
    trainer.train_sync(2)
    after = optimizer_tensors(trainer)
    resumed = make_trainer(rank_items, wrapping, folder, seed=1, resume_from=1)
    resumed.train_sync(1)
    results = {
        "dtypes": sorted({str(tensor.dtype) for tensor in after}),
        "moved": sum((a != b).sum().item() for a, b in zip(before, after, strict=True)) / sum(t.numel() for t in after),
        "resumed": all(map(torch.equal, optimizer_tensors(resumed), after)),
    }
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    del trainer, resumed  # DDP refers to the process group, so it must go first
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
