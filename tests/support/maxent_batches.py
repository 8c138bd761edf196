"""Batches for MaxEnt-GRPO and references: groups of episodes with equal utilities at all turns, and
what a step computes on them, by hand and by a trainer."""

import asyncio
from dataclasses import replace

import numpy as np
import torch
from training_samples import ListSource, cpu_config, dialogues, gradients_of, sorting_items

from ludic.training import Trainer, collate_saw_items
from ludic.training.algorithm import forward_logits
from ludic.training.loss import SharedContext
from ludic.training.preparation import prepare
from ludic.training.types import Candidates

GROUP_SIZE = 4


def episodes(turns=(1,) * 8, seed=0, sizes=None):
    """One episode per entry of `turns`; groups of four, or of these sizes. Utilities are 0, .5 or
    1, at least two of them in a group."""
    made = dialogues(turns, seed=seed) if max(turns) > 1 else sorting_items(len(turns), seed=seed)
    draw = np.random.default_rng(seed)
    sizes = sizes or (GROUP_SIZE,) * (len(turns) // GROUP_SIZE)
    group_of_episode = np.repeat(np.arange(len(sizes)), sizes)
    utilities = draw.choice([0.0, 0.5, 1.0], len(turns))
    utilities[np.concatenate([[0], np.cumsum(sizes)[:-1]])], utilities[np.cumsum(sizes) - 1] = 1.0, 0.0
    items = []
    for item in made:
        episode = int(item.meta["rollout_id"][1:])
        meta = {**item.meta, "request_meta": {"group_id": int(group_of_episode[episode])}}
        items.append(replace(item, weight=float(utilities[episode]), meta=meta))
    return items


def gradient_of_the_trainer(algo, items, model, *, reference=None, share=None, **config):
    """The gradient of one mini-batch of all samples, and what was prepared for it. `share`: the
    part of this rank, of a batch that all ranks have."""
    cfg = cpu_config(**{"max_seq_len": 120, "micro_token_budget": 4096, **config})
    trainer = Trainer(model=model, algo=algo, batch_source=ListSource(items), cfg=cfg, reference=reference)
    prepared = asyncio.run(prepare(trainer, replace(trainer._ingest(items), share=share)))
    [rows] = prepared.macro.divide(1, seed=0, step=0, epoch=0)
    mini_batch = trainer._make_mini_batch(prepared.macro, rows)
    model.zero_grad(set_to_none=True)
    asyncio.run(trainer.backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    return gradients_of(model), prepared


def gradient_by_hand(algo, items, model, reference_model=None):
    """The same from one padded batch: no plan, no totals, no trainer."""
    batch = dict(collate_saw_items(items, pad_token_id=0, device="cpu"))
    counts = [int(sum(item.action_mask[1:])) for item in items]
    logps = None
    if reference_model is not None:
        with torch.no_grad():
            scored = SharedContext(forward_logits(reference_model, batch), batch).token_logp
        batch["reference_logps"] = torch.nn.functional.pad(scored, (1, 0)) * batch["action_mask"]
        logps = batch["reference_logps"].sum(dim=1).double().numpy()
    if algo.batch_credit is not None:
        groups = [item.meta["request_meta"]["group_id"] for item in items]
        rollouts = [int(item.meta["rollout_id"][1:]) for item in items]
        weighed = algo.batch_credit.weigh(
            Candidates(
                np.array([item.weight for item in items]),
                np.unique(groups, return_inverse=True)[1],
                np.array(rollouts),
                np.array(counts),
                logps,
                np.array([sum(item.actor_logps.token_logps) for item in items]),
            )
        )
        batch["weight"] = torch.tensor(weighed.weights).float()
        batch |= {name: torch.tensor(column).float() for name, column in weighed.columns.items()}
    batch |= {name: torch.tensor([read(item) for item in items]) for name, read in algo.sample_columns.items()}
    model.zero_grad(set_to_none=True)
    algo.compute_loss(model, batch)[0].backward()
    return gradients_of(model)
