"""One rank of a training step on two ranks: `python two_ranks.py RANK STORE OUT WRAPPING SHARING`.
Rank 0 writes its results as JSON. SHARING (`prefix_sharing`) is off by default; otherwise samples
share prompts."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training_samples import ListSource, branching_items, cpu_config, sorting_items, tiny_model

from ludic.models.published import published_weights
from ludic.training import (
    CheckpointConfig,
    LoraSettings,
    ReinforceBaselineLoss,
    RLAlgorithm,
    Trainer,
    apply_lora,
    collate_saw_items,
)
from ludic.training.credit_assignment import ConstantCredit

ALGO = RLAlgorithm("baseline", ConstantCredit(1.0), ReinforceBaselineLoss(normalize=True, length_normalize=True))


class DescentTrainer(Trainer):
    def initialize_optimizer(self):
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1.0)


def make_wrapped_model(wrapping, seed=0):
    """The wrapped model. Any wrapping that ends in `lora` adds adapters that are not zero."""
    model = tiny_model(seed)
    if wrapping.endswith("lora"):
        model = apply_lora(tiny_model(), LoraSettings(rank=2))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return wrap(model, wrapping)


def wrap(model, wrapping):
    if wrapping.startswith("ddp"):
        return torch.nn.parallel.DistributedDataParallel(model)
    if wrapping.startswith("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        base = model.get_base_model() if wrapping.endswith("lora") else model
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class Publisher:
    def publish(self, state_dict, version=None):
        self.weights = {name.removeprefix("module."): tensor.clone() for name, tensor in state_dict.items()}


def main(rank, store, out, wrapping, sharing="off"):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    items = sorting_items(12, seed=3) if sharing == "off" else branching_items((5, 4, 3), seed=3)
    rank_items = items[:3] if rank == 0 else items[3:]  # 3 and 9 samples: the ranks have different numbers of micro-batches
    publisher = Publisher()
    trainer = DescentTrainer(
        model=make_wrapped_model(wrapping),
        algo=ALGO,
        batch_source=ListSource(rank_items),
        publisher=publisher,
        cfg=cpu_config(
            micro_token_budget=40,
            max_seq_len=32,
            max_grad_norm=None,
            reduce_stats_across_ranks=True,
            prefix_sharing=sharing,
        ),
        checkpoint_config=CheckpointConfig(Path(out).parent / "checkpoints", every_n_steps=1),
    )
    stats = trainer.train_step_sync()
    resumed = resumes_exactly(rank_items, wrapping, Path(out).parent / "adam", sharing)
    assert train_until_early_stop(rank_items, wrapping) == (3, True)  # on both ranks
    if rank == 0:
        comparison = compare_with_one_process(items, publisher.weights, wrapping)
        Path(out).write_text(json.dumps({**comparison, "stats": stats, "resumed": resumed}))
    dist.barrier()
    del trainer  # DDP refers to the process group, so it must go first
    gc.collect()
    dist.destroy_process_group()


def resumes_exactly(items, wrapping, folder, sharing):
    """Whether one AdamW step, a checkpoint and one more step in a new trainer end at the weights of
    two steps."""

    def trainer_of(**options):
        publisher = Publisher()
        return publisher, Trainer(
            model=make_wrapped_model(wrapping, options.pop("seed", 0)),
            algo=ALGO,
            batch_source=ListSource(items),
            publisher=publisher,
            cfg=cpu_config(weight_decay=0.1, prefix_sharing=sharing),
            checkpoint_config=CheckpointConfig(folder, every_n_steps=1),
            **options,
        )

    publisher, trainer = trainer_of()
    trainer.train_sync(2)
    second_publisher, resumed = trainer_of(seed=1, resume_from=1)
    resumed.train_step_sync()
    if dist.get_rank() != 0:
        return True
    return all(torch.equal(weight, second_publisher.weights[name]) for name, weight in publisher.weights.items())


class ConstantEvaluator:
    """Returns the same loss on every evaluation. Runs on rank 0 only."""

    async def eval(self, **_):
        assert dist.get_rank() == 0
        return [], {"loss": 1.0}


def train_until_early_stop(items, wrapping):
    """The step at which early stopping ends a run, and whether a further call trains nothing."""
    trainer = Trainer(
        model=make_wrapped_model(wrapping),
        algo=ALGO,
        batch_source=ListSource(items),
        cfg=cpu_config(eval_every_n_steps=1, early_stopping_patience=2),
        evaluator=ConstantEvaluator(),
    )
    trainer.train_sync(9)
    trainer.train_sync(1)
    return trainer.current_step, trainer.early_stopping.stopped


def compare_with_one_process(items, weights, wrapping):
    """The largest difference between the published weights and one step on all samples in one
    process, and the loss of that step."""
    model = make_wrapped_model("lora" if wrapping.endswith("lora") else "none")
    loss, _ = ALGO.compute_loss(model, collate_saw_items(items, pad_token_id=0, device="cpu"))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.sub_(parameter.grad)
    expected = published_weights(model)
    assert expected.keys() == weights.keys()
    return {"difference": max((expected[name] - weights[name]).abs().max().item() for name in expected), "loss": loss.item()}


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
