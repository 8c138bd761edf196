"""Gradients of one batch on a CPU or a GPU."""

import asyncio

import numpy as np
from training_samples import cpu_config, gradients_of

from ludic.training import RLAlgorithm
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit


def gradients_on(device, model, items, loss, *, algo=None, prepare=None, **options):
    """Gradients, moved to the CPU, and the loss of all `items` on a copy of the settings for
    `device`; with `prefix_sharing`, of trees. `prepare` is called with the backend's model."""
    algo = algo or RLAlgorithm("test", ConstantCredit(1.0), loss)
    longest = max(len(item.input_ids) for item in items)
    budget = {"max_seq_len": longest, "micro_token_budget": len(items) * longest}
    cfg = cpu_config(**{**budget, "model_device": device, "prefix_sharing": "off", **options})
    model = model.to(device)
    backend = TorchBackend(model, cfg, algo=algo)
    assert backend.shares_prefixes == (cfg.prefix_sharing != "off")
    if prepare is not None:
        prepare(model)
    kind = TreeMiniBatch if backend.shares_prefixes else MiniBatch
    macro = MacroBatch.ingest(items, longest)
    mini_batch = kind(macro, np.arange(len(macro.items)), cfg)
    model.zero_grad(set_to_none=True)
    result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
    return {name: gradient.cpu() for name, gradient in gradients_of(model).items()}, result.loss.item(), result.micro_stats


def largest(gradients):
    return max(gradient.abs().max().item() for gradient in gradients.values())
