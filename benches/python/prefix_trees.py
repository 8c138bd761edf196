"""Forward and backward passes of GRPO over groups that share a prompt: rows of their own, and rows
of prefix trees; and samples that share nothing."""

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
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import TokenClippedSurrogateLoss
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

PROMPT, ANSWER, GROUP, GROUPS = 512, 128, 8, 2
BUDGET = 8192
VOCABULARY = 259


def small_llama(attention: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=PROMPT + ANSWER,
    )
    model = LlamaForCausalLM(config)
    set_attention(model, attention)
    return model


def draw_samples(*, share: bool) -> list[SAWItem]:
    """Groups with one prompt each, or with a prompt for each answer."""
    draw, items = np.random.default_rng(0), []
    for _ in range(GROUPS):
        prompt = draw.integers(0, VOCABULARY, PROMPT)
        for _ in range(GROUP):
            prompt = prompt if share else draw.integers(0, VOCABULARY, PROMPT)
            ids = np.concatenate([prompt, draw.integers(0, VOCABULARY, ANSWER)]).astype(np.int32)
            actions = np.concatenate([np.zeros(PROMPT, np.uint8), np.ones(ANSWER, np.uint8)])
            logps = SampleAttachments(ActorTokenLogps(np.full(ANSWER, -5.5, np.float32)))
            items.append(SAWItem(ids, np.ones_like(actions), actions, float(draw.normal()), attachments=logps))
    return items


def make_passes(items: list[SAWItem], kind: type[MiniBatch], packing: Any, attention: str) -> Callable[[], float]:
    """Forward and backward passes over all samples, which return the norm of the gradient."""
    model = small_llama(attention)
    settings: Any = {"packing": packing, "prefix_sharing": "auto"}
    cfg = TrainerConfig(model_device="cpu", max_seq_len=PROMPT + ANSWER, micro_token_budget=BUDGET, **settings)
    batch = MacroBatch.ingest(items, cfg.max_seq_len)
    algo = RLAlgorithm("grpo", ConstantCredit(1.0), TokenClippedSurrogateLoss())

    def run() -> float:
        model.zero_grad(set_to_none=True)
        mini_batch = kind(batch, np.arange(len(batch.items)), cfg)
        for micro_batch in mini_batch:
            loss, _ = algo.compute_loss(model, micro_batch.tensors, totals=mini_batch.totals)
            loss.backward()  # type: ignore[no-untyped-call]
        return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    return run


def assert_same_norm(got: float, want: float) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-3)


def contests() -> Iterator[Contest]:
    for share in (True, False):
        items = draw_samples(share=share)
        tokens = sum(len(item.input_ids) for item in items)
        added = GROUPS * (PROMPT + GROUP * ANSWER) if share else tokens
        contenders = [
            Contender("rows of their own, padded", make_passes(items, MiniBatch, "optimal", "sdpa")),
            Contender("rows of their own, padding-free", make_passes(items, MiniBatch, "padding_free", PACKED), assert_same_norm),
            Contender("`prefix_sharing=auto`", make_passes(items, TreeMiniBatch, "optimal", PACKED), assert_same_norm),
        ]
        name = f"groups of {GROUP} with one prompt" if share else "a prompt for each sample"
        title = f"Prompts of {PROMPT} and answers of {ANSWER} tokens, {name}: {tokens:,} tokens, {added:,} to compute"
        yield Contest(title, tokens, "token", contenders)
