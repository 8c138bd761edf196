"""Groups with seeded answers, and their gradient by hand."""

from dataclasses import replace

import torch
from maxent_batches import episodes, gradient_by_hand

from ludic.training import collate_saw_items
from ludic.training.algorithm import forward_logits
from ludic.training.info_seed import seed_of
from ludic.training.loss import SharedContext
from ludic.training.types import ActorTokenLogps, SAWBatch

PLAIN, SEEDS = 2, 2
"""Answers of each prompt."""
TAG = [3, 5]


def seeded_episodes(groups=3, seed=7):
    """Groups of two plain answers and of those with the seeds 1 and 2, whose prompts end with a
    tag. Their reported log-probabilities are of that prompt."""
    size = PLAIN + SEEDS
    items = []
    for index, item in enumerate(episodes((1,) * (groups * size), seed=seed, sizes=(size,) * groups)):
        seed_id = index % size - PLAIN + 1
        if seed_id < 1:
            items.append(item)
            continue
        start = list(item.action_mask).index(1)
        meta = {**item.meta, "request_meta": {**item.meta["request_meta"], "seed_id": seed_id}}
        ids, mask = list(item.input_ids), list(item.action_mask)
        items.append(
            replace(
                item,
                input_ids=ids[:start] + TAG + ids[start:],
                action_mask=mask[:start] + [0] * len(TAG) + mask[start:],
                attention_mask=[1] * (len(ids) + len(TAG)),
                meta=meta,
            )
        )
    return items


def preprocessed(algo, items):
    return algo.preprocess(SAWBatch(items=list(items), meta={})).items


def rescored_gradient(algo, items, model):
    """The gradient from one padded batch, in which each seeded sample has the log-probabilities of
    `model` itself."""
    batch = collate_saw_items(items, pad_token_id=0, device="cpu")
    with torch.no_grad():
        shared = SharedContext(forward_logits(model, batch), batch)
        logps, masks = shared.token_logp, shared.token_mask.bool()
    own = []
    for row, item in enumerate(items):
        if seed_of(item.meta):
            attached = replace(item.attachments, actor_logps=ActorTokenLogps(logps[row][masks[row]].tolist()))
            item = replace(item, attachments=attached)
        own.append(item)
    return gradient_by_hand(algo, own, model)
