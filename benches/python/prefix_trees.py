"""Forward and backward passes over rows of their own, and over rows of prefix trees: GRPO on groups
that share a prompt and on samples that share nothing, DPO and a reward model on pairs. `report`
counts the memory of many short answers to a long prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from benches.python.contest import Contender, Contest
from benches.python.peak_bytes import PeakBytes
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from ludic.models.packed_attention import PACKED, set_attention
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch
from ludic.training.batching.tree_batches import PairTreeMiniBatch, TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import BradleyTerryLoss, DPOLoss, Loss, TokenClippedSurrogateLoss
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

PROMPT, ANSWER, GROUP, GROUPS, PAIRS = 512, 128, 8, 2, 8
LENGTHS = ((1500, 8, 128), (1500, 64, 32), (PROMPT, ANSWER, GROUP))
"""Tokens of a prompt and of each answer, and the number of answers, for `report`."""
BUDGET = 8192
VOCABULARY, PAD = 259, 258


def small_llama(attention: str, *, scores: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=2048,
    )
    config.pad_token_id, config.num_labels = PAD, 1
    model: Any = LlamaForSequenceClassification(config) if scores else LlamaForCausalLM(config)
    set_attention(model, attention)
    return model


def draw_samples(
    *, share: bool, groups: int = GROUPS, group: int = GROUP, prompt_tokens: int = PROMPT, answer_tokens: int = ANSWER
) -> list[SAWItem]:
    """Groups with one prompt each, or with a prompt for each answer."""
    draw, items = np.random.default_rng(0), []
    for _ in range(groups):
        prompt = draw.integers(0, PAD, prompt_tokens)
        for _ in range(group):
            prompt = prompt if share else draw.integers(0, PAD, prompt_tokens)
            ids = np.concatenate([prompt, draw.integers(0, PAD, answer_tokens)]).astype(np.int32)
            actions = np.concatenate([np.zeros(prompt_tokens, np.uint8), np.ones(answer_tokens, np.uint8)])
            logps = SampleAttachments(ActorTokenLogps(np.full(answer_tokens, -5.5, np.float32)))
            items.append(SAWItem(ids, np.ones_like(actions), actions, float(draw.normal()), attachments=logps))
    return items


def run_passes(model: Any, algo: RLAlgorithm, divide: Callable[[], MiniBatch]) -> Callable[[], float]:
    """Forward and backward passes over a mini-batch, which return the norm of the gradient."""

    def run() -> float:
        model.zero_grad(set_to_none=True)
        mini_batch = divide()
        for micro_batch in mini_batch:
            loss, _ = algo.compute_loss(model, micro_batch.tensors, totals=mini_batch.totals)
            loss.backward()  # type: ignore[no-untyped-call]
        return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    return run


def make_passes(items: list[SAWItem], kind: type[MiniBatch], packing: Any, attention: str) -> Callable[[], float]:
    """The passes over all samples."""
    model = small_llama(attention)
    settings: Any = {"packing": packing, "prefix_sharing": "auto"}
    longest = max(len(item.input_ids) for item in items)
    cfg = TrainerConfig(model_device="cpu", max_seq_len=longest, micro_token_budget=BUDGET, **settings)
    batch = MacroBatch.ingest(items, cfg.max_seq_len)
    algo = RLAlgorithm("grpo", ConstantCredit(1.0), TokenClippedSurrogateLoss())
    return run_passes(model, algo, lambda: kind(batch, np.arange(len(batch.items)), cfg))


def draw_pairs() -> list[SAWItem]:
    """Pairs with one prompt each."""
    items = draw_samples(share=True, groups=PAIRS, group=2)
    facts = ({"pair_id": index // 2, "role": ("chosen", "rejected")[index % 2], "label": 1.0} for index in range(len(items)))
    return [replace(item, meta=meta, attachments=SampleAttachments()) for item, meta in zip(items, facts, strict=True)]


def make_pair_passes(items: list[SAWItem], loss: Loss, kind: type[PreferenceMiniBatch], attention: str) -> Callable[[], float]:
    """The same over pairs."""
    model = small_llama(attention, scores=loss.score_type == "reward")
    limits: dict[str, Any] = {"model_device": "cpu", "max_seq_len": PROMPT + ANSWER, "micro_token_budget": BUDGET}
    cfg = TrainerConfig(**limits, pad_token_id=PAD, prefix_sharing="auto")
    batch = PreferenceMacroBatch.ingest_pairs(items, cfg.max_seq_len)
    counts = batch.table.target_counts.tolist()
    batch = replace(batch, token_columns={"reference_logps": {row: torch.full((n,), -5.5) for row, n in enumerate(counts)}})
    algo = RLAlgorithm("pairs", ConstantCredit(1.0), loss)
    return run_passes(model, algo, lambda: kind(batch, np.arange(len(batch.items)), cfg))


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
    pairs = draw_pairs()
    for title, loss in (("DPO", DPOLoss()), ("reward model", BradleyTerryLoss())):
        tokens, added = PAIRS * 2 * (PROMPT + ANSWER), PAIRS * (PROMPT + 2 * ANSWER)
        contenders = [
            Contender("rows of their own, padded", make_pair_passes(pairs, loss, PreferenceMiniBatch, "sdpa")),
            Contender("`prefix_sharing=auto`", make_pair_passes(pairs, loss, PairTreeMiniBatch, PACKED), assert_same_norm),
        ]
        yield Contest(f"{title}, {PAIRS} pairs: {tokens:,} tokens, {added:,} to compute", tokens, "token", contenders)


def report() -> str:
    """A markdown table: seconds and the most bytes in use at one time, weights and optimizer
    aside."""
    head = "| prompt | answers | rows | tokens of all samples | seconds | of the first | peak MB | of the first |"
    lines = [f"### Memory, at most {BUDGET:,} tokens in a micro-batch", "", head, "|" + "---|" * 8]
    for prompt, answer, group in LENGTHS:
        items = draw_samples(share=True, groups=1, group=group, prompt_tokens=prompt, answer_tokens=answer)
        tokens = sum(len(item.input_ids) for item in items)
        ways = {
            "of their own, padding-free": make_passes(items, MiniBatch, "padding_free", PACKED),
            "prefix trees": make_passes(items, TreeMiniBatch, "optimal", PACKED),
        }
        first: tuple[float, float] | None = None
        for name, run in ways.items():
            seconds, size = _measure(run)
            first = first or (seconds, size)
            ratios = f"{seconds:.2f} | {seconds / first[0]:.2f}x | {size / 1e6:.0f} | {size / first[1]:.2f}x"
            lines.append(f"| {prompt:,} | {group} of {answer} | {name} | {tokens:,} | {ratios} |")
    return "\n".join([*lines, ""])


def _measure(run: Callable[[], float]) -> tuple[float, float]:
    """The processor time of a run, and the bytes of another one."""
    run()
    begin = time.thread_time()
    run()
    seconds = time.thread_time() - begin
    with PeakBytes() as in_use:
        run()
    return seconds, in_use.peak
