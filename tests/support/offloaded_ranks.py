"""Sharded models that leave the device at each step: `python offloaded_ranks.py` prints, for each
kind, whether two ranks end with the weights, losses and published weights of a run that stays, and
how many of a rank's tensors were on the device while it published."""

import json

import torch
from fake_card import FakeCard, held_tensors
from forked_ranks import run_ranks
from training_samples import ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model

from ludic.inference.client import Publisher
from ludic.models.byte_tokenizer import VOCAB_SIZE
from ludic.models.sharding import ShardingSettings, gather_tensor, make_mesh, shard_model
from ludic.training import LoraSettings, Trainer, apply_lora, make_grpo


class Watching(Publisher):
    def __init__(self):
        self.published = {}

    def publish(self, state_dict, version=None):
        self.published = {name: value.clone() for name, value in state_dict.items()}


def make_model(kind):
    model = tiny_model() if kind == "uneven" else tiny_model(vocab_size=VOCAB_SIZE + VOCAB_SIZE % 2)
    if kind == "half":
        return model.bfloat16()
    return apply_lora(model, LoraSettings(rank=2)) if kind == "lora" else model


class Counting(Trainer):
    """Notes how many tensors this rank has on the device when it publishes."""

    card, left = None, ()

    async def offload(self):
        await super().offload()
        held = held_tensors(self.backend.model, self.backend.optimizer)
        self.left = [*self.left, sum(map(self.card.holds, held))]


def train(rank, world, kind, offload):
    model, settings = make_model(kind), ShardingSettings("full")
    shard_model(model, settings, make_mesh(settings, "cpu"))
    items = sorting_items(16)
    with FakeCard() as card:
        trainer = Counting(
            model=model,
            algo=make_grpo(group_size=4),
            batch_source=ListSource(items[rank * 8 : (rank + 1) * 8]),
            cfg=cpu_config(offload=offload, lr=1e-2),
            publisher=Watching(),
        )
        trainer.card = card
        lines = []
        trainer.train_sync(4, log_fn=lambda stats: lines.append([stats["train/loss"], stats["train/grad_norm"]]))
        weights = {name: gather_tensor(value.detach()).clone() for name, value in model.named_parameters()}
    return trainer, lines, weights


def compare(rank, world, kind):
    stays, lines, expected = train(rank, world, kind, None)
    leaves, own, weights = train(rank, world, kind, True)
    assert_same_tensors(weights, expected)
    assert own == lines
    assert_same_tensors(leaves.publisher.published, stays.publisher.published)
    return {"left": list(leaves.left), "stayed": list(stays.left), "published": len(leaves.publisher.published)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({kind: run_ranks(2, compare, kind) for kind in ("uneven", "half", "lora")}))
