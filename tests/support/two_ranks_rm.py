"""One rank of a reward-model step on two ranks: `python two_ranks_rm.py RANK STORE OUT WRAPPING`.
Rank 0 writes its results as JSON."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from preference_samples import reward_model, rm_config, sorted_pairs
from training_samples import ListSource
from two_ranks import Publisher, wrap

from ludic.training import RMTrainer, make_bradley_terry
from ludic.training.batching import collate_preference_items

ALGO = make_bradley_terry(beta=1.5, label_smoothing=0.1, lambda_regularization=0.1)


class DescentTrainer(RMTrainer):
    def initialize_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1.0)


def main(rank, store, out, wrapping):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    items = sorted_pairs(9, seed=3)
    rank_items = items[:4] if rank == 0 else items[4:]  # 2 pairs and 7 pairs
    publisher = Publisher()
    trainer = DescentTrainer(
        model=wrap(reward_model(), wrapping),
        algo=ALGO,
        batch_source=ListSource(rank_items),
        publisher=publisher,
        cfg=rm_config(micro_token_budget=70, max_grad_norm=None, reduce_stats_across_ranks=True),
        eval_items=sorted_pairs(7, seed=5),
    )
    before = trainer.eval_sync()["metrics"]
    stats = trainer.train_step_sync()
    if rank == 0:
        Path(out).write_text(json.dumps({**compare_with_one_process(items, publisher.weights), "stats": stats, "eval": before}))
    dist.barrier()
    del trainer  # DDP refers to the process group, so it must go first
    gc.collect()
    dist.destroy_process_group()


def compare_with_one_process(items, weights):
    """The largest difference between the step and the gradient of all pairs in one process, and
    their loss."""
    model = reward_model()
    loss, _ = ALGO.compute_loss(model, collate_preference_items(items, pad_token_id=0, device="cpu"))
    loss.backward()
    difference = max(
        ((parameter.detach() - weights[name]) - parameter.grad).abs().max().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    )
    return {"difference": difference, "loss": loss.item()}


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
