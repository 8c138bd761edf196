"""Forward passes score the tokens that are asked for, and compute no logits of others."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from preference_samples import sorted_pairs
from training_samples import ListSource, cpu_config, dialogues, sorting_items, tiny_model

from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.output_layer import OutputLayer
from ludic.training import RLAlgorithm, RMTrainerConfig, Trainer
from ludic.training.backend.forward import ModelPasses, forward_action_logprobs
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.evaluators.held_out import HeldOutLoss, PreferenceEvaluator
from ludic.training.loss import CompositeLoss, LossTerm, SharedContext, TokenClippedSurrogateLoss
from ludic.training.loss.correction import TruncatedImportanceSampling
from ludic.training.loss.reference_kl import ReferenceKLLoss
from ludic.training.preflight.comparison import compare


@contextmanager
def scored_positions():
    """A list that gets at how many positions the output layer is computed in chunks, by pass."""
    seen, products = [], OutputLayer.products

    def count(self, hidden):
        seen.append(len(hidden))
        return products(self, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputLayer, "products", count)
        yield seen


def actions_of(micro_batches):
    """The number of predicted action tokens of each micro-batch."""
    return [int((micro.tensors["action_mask"][:, 1:] != 0).sum()) for micro in micro_batches]


@pytest.mark.parametrize("layout", ["padded", "padding-free", "turns", "padding-free turns"])
def test_action_tokens_alone_have_the_same_log_probabilities_in_every_layout(layout):
    model, turns = tiny_model(), "turns" in layout
    cfg = cpu_config(
        max_seq_len=70, micro_token_budget=140, packing="padding_free" if "free" in layout else "optimal", logits="chunked"
    )
    full, chunked = ModelPasses(model, replace(cfg, logits="full")), ModelPasses(model, cfg)
    assert (full.skips_logits, chunked.skips_logits) == (False, True)
    micro_batches = list(mini_batch_of(dialogues((3, 1, 2), seed=5), cfg, merge_turns=turns))
    assert any(("turns" in micro.tensors) for micro in micro_batches) == turns
    for micro, actions in zip(micro_batches, actions_of(micro_batches), strict=True):
        for options in ({}, {"temperature": 0.5}, {"top_p": 0.7}):
            every = full.forward_logprobs(micro, **options).wait()
            mask = SharedContext(micro.tensors["input_ids"], micro.tensors).token_mask > 0
            assert every[~mask].min() < -0.1
            for passes in (full, chunked):
                with scored_positions() as seen:
                    got = passes.forward_logprobs(micro, **options, actions_only=True).wait()
                assert seen == ([actions] if passes is chunked and "top_p" not in options else [])
                torch.testing.assert_close(got, torch.where(mask, every, 0.0), rtol=1e-5, atol=1e-5)
            if "top_p" not in options:
                torch.testing.assert_close(chunked.forward_logprobs(micro, **options).wait(), every, rtol=1e-5, atol=1e-5)


def algorithm(*losses, **settings):
    terms = [LossTerm(str(number), loss) for number, loss in enumerate([TokenClippedSurrogateLoss(), *losses])]
    return RLAlgorithm("test", ConstantCredit(1.0), CompositeLoss(terms), **settings)


def mini_batch_of(samples, cfg, *, merge_turns=False):
    macro = MacroBatch.ingest(list(samples), cfg.max_seq_len, merge_turns=merge_turns)
    return MiniBatch(macro, np.arange(len(samples)), cfg)


def test_references_corrections_and_evaluations_score_action_tokens_alone():
    cfg = cpu_config(logits="chunked", minibatches_per_batch=2)
    samples, model = sorting_items(6, seed=3), apply_lora(tiny_model(), LoraSettings(rank=2))
    actions = sum(actions_of(mini_batch_of(samples, cfg)))
    evaluator = HeldOutLoss(tiny_model(), samples, cfg)
    algo = algorithm(ReferenceKLLoss(0.1), correction=TruncatedImportanceSampling(2.0))
    trainer = Trainer(model=model, algo=algo, batch_source=ListSource(samples), cfg=cfg)
    evaluator.measure()
    assert trainer.backend.skips_logits  # the checks run the models, too
    with scored_positions() as seen:
        trainer.train_step_sync()
    assert sum(seen) == 3 * actions  # the reference, the weights before the step, and the step
    with scored_positions() as seen:
        evaluator.measure()
    assert sum(seen) == actions
    pairs = PreferenceEvaluator(
        tiny_model(),
        sorted_pairs(3),
        RMTrainerConfig(model_device="cpu", max_seq_len=23, micro_token_budget=60, logits="chunked"),
        score_type="logprob",
    )
    pairs.measure()
    with scored_positions() as seen:
        pairs.measure()
    assert sum(seen) == sum(int(np.sum(item.action_mask[1:])) for item in pairs.batch.items)


def test_the_check_before_the_first_step_scores_actions_and_the_tokens_next_to_them():
    samples = sorting_items(6, seed=3)
    full, chunked = (TorchBackend(tiny_model(), cpu_config(logits=path), algo=algorithm()) for path in ("full", "chunked"))
    assert chunked.skips_logits
    with scored_positions() as seen:
        got = asyncio.run(compare(chunked, chunked.cfg, samples))
    want = asyncio.run(compare(full, full.cfg, samples))
    rows = [np.flatnonzero(item.action_mask) for item in samples]
    near = [
        {p + by for p in row for by in (-1, 0, 1)} & set(range(1, len(item.input_ids)))
        for row, item in zip(rows, samples, strict=True)
    ]
    # behind the last action of a row is padding, if the row is not the longest
    width = max(len(item.input_ids) for item in samples)
    behind = [int(row[-1] + 1 == len(item.input_ids) < width) for row, item in zip(rows, samples, strict=True)]
    assert seen == [sum(map(len, near)) + sum(behind)]
    for name in ("trainer_logps", "all_trainer_logps"):
        for ours, theirs in zip(getattr(got, name), getattr(want, name), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for logps, positions in zip(got.all_trainer_logps, near, strict=True):
        assert {int(index) + 1 for index in np.flatnonzero(logps)} == positions


def test_passes_without_the_argument_score_all_tokens():
    class Older:
        def forward_logprobs(self, batch, *, temperature=None):
            return temperature

    assert forward_action_logprobs(Older(), None, temperature=2.0) == 2.0


def test_passes_get_what_differs_from_the_defaults():
    class Passes:
        def forward_logprobs(self, batch, **arguments):
            return arguments

    assert forward_action_logprobs(Passes(), None) == {"actions_only": True}
    every = {"temperature": 0.5, "top_p": 0.9, "adapters": False}
    assert forward_action_logprobs(Passes(), None, **every) == {"actions_only": True, **every}
