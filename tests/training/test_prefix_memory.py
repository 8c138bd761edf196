"""The token budget bounds the memory of prefix trees as it bounds that of rows of their own."""

import asyncio

import numpy as np
import pytest
import torch
from benches.python.peak_bytes import PeakBytes
from training_samples import cpu_config, gradients_of, tiny_model

from ludic.training import SAWItem, make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.types import ActorTokenLogps, SampleAttachments

BUDGET = 3000


def answers_to_one_prompt(count, prompt, answer):
    draw = np.random.default_rng(0)
    first = draw.integers(1, 60, prompt)
    items = []
    for number in range(count):
        ids = [*first.tolist(), *draw.integers(1, 60, answer).tolist()]
        logps = SampleAttachments(ActorTokenLogps([-4.0] * answer))
        mask = [0] * prompt + [1] * answer
        items.append(SAWItem(ids, [1] * len(ids), mask, (-1.0) ** number, {"rollout_id": str(number)}, logps))
    return items


def peak_of(items, **options):
    """The most bytes in use in forward and backward passes, and the tokens of each micro-batch."""
    longest = max(len(item.input_ids) for item in items)
    cfg = cpu_config(max_seq_len=longest, micro_token_budget=BUDGET, **options)
    model = tiny_model(hidden_size=64, intermediate_size=128, num_attention_heads=4, max_position_embeddings=BUDGET)
    backend = TorchBackend(model, cfg, algo=make_grpo(group_size=4))
    assert backend.shares_prefixes == (cfg.prefix_sharing != "off")
    mini_batch = TreeMiniBatch(MacroBatch.ingest(items, longest), np.arange(len(items)), cfg)
    with PeakBytes() as in_use:
        asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    assert all(torch.isfinite(each).all() for each in gradients_of(model).values())
    return in_use.peak, mini_batch.padding()["perf/real_tokens"] / len(mini_batch)


@pytest.mark.parametrize(("prompt", "answer"), [(1000, 10), (1000, 60), (200, 8), (60, 6), (20, 200)])
def test_trees_that_fill_the_budget_take_little_more_memory_than_rows_that_fill_it(prompt, answer):
    count = (BUDGET - prompt) // answer
    peak, tokens = peak_of(answers_to_one_prompt(count, prompt, answer), prefix_sharing="tree")
    assert tokens > 0.8 * BUDGET
    rows = BUDGET // (prompt + answer)
    want, _ = peak_of(answers_to_one_prompt(rows, prompt, answer), prefix_sharing="off", packing="padding_free")
    assert peak < 1.25 * want
