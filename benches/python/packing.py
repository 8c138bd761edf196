"""Forward and backward passes over one budget of tokens: padded, and padding-free with two kinds of
attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from benches.python.contest import Contender, Contest
from transformers import LlamaConfig, LlamaForCausalLM

from ludic.models.packed_attention import PACKED, set_attention
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import MaskedCausalLMCrossEntropyLoss
from ludic.training.types import SAWItem

BUDGETS = (2048, 8192, 16384)
DENSE_UP_TO = 8192
"""Above this budget, a round with the dense mask takes most of a minute."""
LONGEST = 1024


def small_llama(attention: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=LONGEST,
    )
    model = LlamaForCausalLM(config)
    set_attention(model, attention)
    return model


def draw_samples(tokens: int) -> list[SAWItem]:
    """Samples with `tokens` tokens in all. Their lengths are lognormal with median 200."""
    draw = np.random.default_rng(0)
    items: list[SAWItem] = []
    while tokens > 0:
        length = int(min(LONGEST, max(16, draw.lognormal(np.log(200), 0.8)), max(tokens, 2)))
        ids = draw.integers(0, 259, length).tolist()
        items.append(SAWItem(ids, [1] * length, [0] * (length // 4) + [1] * (length - length // 4), 1.0))
        tokens -= length
    return items


def make_passes(budget: int, packing: Any, attention: str) -> Callable[[], float]:
    """A run of forward and backward passes over all samples; it returns their loss."""
    model = small_llama(attention)
    cfg = TrainerConfig(model_device="cpu", max_seq_len=LONGEST, micro_token_budget=budget, packing=packing)
    batch = MacroBatch.ingest(draw_samples(budget), LONGEST)
    algo = RLAlgorithm("supervised", ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss())

    def run() -> float:
        model.zero_grad(set_to_none=True)
        mini_batch, total = MiniBatch(batch, np.arange(len(batch.items)), cfg), 0.0
        for micro_batch in mini_batch:
            loss, _ = algo.compute_loss(model, micro_batch.tensors, totals=mini_batch.totals)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    return run


def assert_same_loss(got: float, want: float) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4)


def contests() -> Iterator[Contest]:
    for budget in BUDGETS:
        contenders = [
            Contender("padded, optimal", make_passes(budget, "optimal", "sdpa")),
            Contender(
                "padding-free, sequences of similar length together",
                make_passes(budget, "padding_free", PACKED),
                assert_same_loss,
            ),
        ]
        if budget <= DENSE_UP_TO:
            contenders.append(
                Contender("padding-free, a mask of the whole row", make_passes(budget, "padding_free", "sdpa"), assert_same_loss)
            )
        tokens = sum(len(item.input_ids) for item in draw_samples(budget))
        yield Contest(f"Forward and backward, {tokens} tokens of a Llama of 0.1 M parameters", tokens, "token", contenders)
