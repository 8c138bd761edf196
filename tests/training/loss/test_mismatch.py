"""`mismatch/*`: exact means over the tokens of a step, from log-probabilities that the step
computes anyway."""

import asyncio
import math

import numpy as np
import pytest
import torch
from loss_batches import Bigram, padded, rows, two_token_batch
from tests.training.test_trainer import on_policy
from training_samples import ListSource, cpu_config, dialogues, sorting_items, tiny_model

from ludic.training import CISPOLoss, RLAlgorithm, Trainer, make_grpo
from ludic.training.algorithm import forward_logits
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import EntropyBonus, TruncatedImportanceSampling
from ludic.training.loss.actions import collate_actions, split_actions
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import compute_token_entropy, compute_token_logp
from ludic.training.loss.statistics import compute_mismatch, sum_mismatch
from ludic.training.scoring import add_token_column
from ludic.training.stats import aggregate_stats


def trainer_of(items, *, model=None, algo=None, config=None):
    return Trainer(
        model=model or tiny_model(),
        algo=algo or make_grpo(group_size=4),
        batch_source=ListSource(items),
        cfg=cpu_config(**(config or {})),
    )


def mismatch(stats):
    return {key.removeprefix("mismatch/"): value for key, value in stats.items() if key.startswith("mismatch/")}


def test_mismatch_statistics_by_hand():
    """Two tokens with trainer/sampler ratios 2 and 1/2: d = ln 2 and -ln 2, w = 2 and 0.5."""
    logits, batch = two_token_batch([2.0, 0.5], [1.0, 1.0])
    shared = SharedContext(logits, batch)
    _ = shared.token_logp
    stats = {key: float(value) for key, value in compute_mismatch(sum_mismatch(shared)).items()}
    ln2 = math.log(2)
    assert stats["mismatch/mean"] == pytest.approx(ln2)
    assert stats["mismatch/max"] == pytest.approx(ln2)
    # ((2 - 1 - ln 2) + (0.5 - 1 + ln 2)) / 2 = 0.25
    assert stats["mismatch/kl"] == pytest.approx(0.25)
    # (2.5)^2 / (2 * 4.25)
    assert stats["mismatch/ess"] == pytest.approx(6.25 / 8.5)
    assert stats["mismatch/tokens"] == 2


def test_mismatch_statistics_cost_no_computation():
    """A loss that does not use the log-probabilities is not made to compute them."""
    shared = SharedContext(*two_token_batch([2.0], [1.0]))
    assert sum_mismatch(shared) == {}
    _, stats = RLAlgorithm("h", ConstantCredit(), EntropyBonus()).compute_loss(Bigram(), padded(rows(3)))
    assert not mismatch(stats)


@pytest.mark.parametrize("budget", [40, 128, 1000])
def test_the_means_do_not_depend_on_the_split(budget):
    items = [item for item in sorting_items(12) if item.weight]
    stats = mismatch(trainer_of(items, config={"micro_token_budget": budget, "lr": 0.0}).train_step_sync())
    model = tiny_model()
    differences = []
    for item in items:
        with torch.no_grad():
            logp = compute_token_logp(model(input_ids=torch.tensor([item.input_ids])).logits, torch.tensor([item.input_ids]))[0]
        mask = torch.tensor(item.action_mask[1:]).bool()
        differences.append(logp[mask].numpy() - np.array(item.actor_logps.token_logps))
    d = np.concatenate(differences)
    w = np.exp(d)
    assert stats["mean"] == pytest.approx(np.abs(d).mean(), rel=1e-4)
    assert stats["max"] == pytest.approx(np.abs(d).max(), rel=1e-4)
    assert stats["kl"] == pytest.approx((w - 1 - d).mean(), rel=1e-3)
    assert stats["ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-3)
    assert stats["tokens"] == len(d)


def test_aggregate_stats_divides_the_sums():
    parts = [rows(3, seed=1), rows(5, seed=2)]
    algo = RLAlgorithm("c", ConstantCredit(), CISPOLoss())
    split = aggregate_stats([algo.compute_loss(Bigram(), padded(part))[1] for part in parts], [], micro_batch_sizes=[3, 5])
    whole = aggregate_stats([algo.compute_loss(Bigram(), padded(parts[0] + parts[1]))[1]], [])
    assert mismatch(split) == pytest.approx(mismatch(whole), rel=1e-5)


@pytest.mark.parametrize("steps", [{"minibatches_per_batch": 3}, {"epochs_per_batch": 3}])
def test_learning_within_a_step_does_not_count_as_mismatch(steps):
    """On-policy samples. From the second optimizer step on the policy has changed, so only the
    first one is measured."""
    model = tiny_model()
    items = on_policy(sorting_items(12, weight=1.0), model)
    stats = trainer_of(items, model=model, config={**steps, "lr": 0.05}).train_step_sync()
    assert stats["train/kl_actor_policy"] > 1e-2  # the loss does show that the policy moved
    assert stats["mismatch/mean"] < 1e-5


def test_with_a_correction_every_minibatch_is_measured_at_the_start_of_the_step():
    model = tiny_model()
    items = on_policy(sorting_items(12, weight=1.0), model)
    algo = make_grpo(group_size=4, correction=TruncatedImportanceSampling())
    stats = trainer_of(items, model=model, algo=algo, config={"minibatches_per_batch": 3, "lr": 0.05}).train_step_sync()
    assert stats["mismatch/mean"] < 1e-5
    assert stats["mismatch/tokens"] == sum(sum(item.action_mask) for item in items)
    assert stats["mismatch/correction_weight"] == pytest.approx(1.0, abs=1e-5)
    assert stats["mismatch/correction_kept"] == 1.0


def test_on_policy_a_correction_changes_nothing():
    weights = []
    for correction in (None, "truncated", "icepop"):
        model = tiny_model()
        items = on_policy(sorting_items(12), model)
        algo = make_grpo(group_size=4, correction=correction)
        trainer_of(items, model=model, algo=algo, config={"minibatches_per_batch": 2}).train_step_sync()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(weights[2], weights[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
@pytest.mark.parametrize("merge_turns", [False, True])
def test_initial_log_probabilities_return_to_their_tokens_in_any_layout(packing, merge_turns):
    """They are computed in one layout and used in another; each token keeps its own."""
    cfg = cpu_config(max_seq_len=70, micro_token_budget=150, packing=packing)
    backend = TorchBackend(tiny_model(), cfg, algo=make_grpo(group_size=4))
    macro = MacroBatch.ingest(dialogues((3, 1, 4, 2)), cfg.max_seq_len, merge_turns=merge_turns)

    async def forward(micro_batch):
        return await backend.forward_logprobs(micro_batch).result()

    macro = asyncio.run(add_token_column(macro, "proximal_logps", cfg, forward, skip_zero_weight=False, trees=False))
    [rows_] = macro.divide(1, seed=0, step=0, epoch=0)
    for part in (rows_[::2], rows_[1::2], rows_[::-1]):
        for micro_batch in MiniBatch(macro, np.ascontiguousarray(part), cfg):
            with torch.no_grad():
                shared = SharedContext(forward_logits(backend.model, micro_batch.tensors), micro_batch.tensors)
            mask = shared.token_mask.bool()
            assert mask.any()
            torch.testing.assert_close(shared.proximal_logp[mask], shared.token_logp[mask], rtol=0, atol=1e-5)


def test_action_values_return_to_their_positions():
    batch = padded(rows(4, seed=9))
    values = SharedContext(torch.zeros(*batch["input_ids"].shape, 3), batch).actor_logps_shifted
    laid_out = collate_actions(split_actions(values, batch), batch)
    torch.testing.assert_close(laid_out[:, 1:], batch["actor_logps"][:, 1:])
    assert laid_out[:, 0].abs().max() == 0
    assert collate_actions([None] * 4, batch).abs().max() == 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_policy_divides_the_logits_by_the_temperature(temperature):
    """Values and gradients of log-probabilities and entropy, compared with logits divided by
    hand."""
    batch = padded(rows(6, seed=2))
    results = []
    for divided in (False, True):
        model = Bigram(dtype=torch.float64)
        logits = model(batch["input_ids"])
        if divided:
            logp = compute_token_logp(logits / temperature, batch["input_ids"])
            entropy = compute_token_entropy(logits / temperature)
        else:
            shared = SharedContext(logits, batch, temperature=temperature, with_entropy=True)
            logp, entropy = shared.token_logp, shared.entropy
        (logp * 0.3 + entropy * logp.detach()).sum().backward()
        results.append((logp.detach(), entropy.detach(), model.table.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_trainers_temperature_reaches_the_loss():
    """Samples drawn at 0.5 with the log-probabilities of that distribution: on-policy for a trainer
    that knows the temperature."""
    model = tiny_model()
    cfg = cpu_config(temperature=0.5, micro_token_budget=10_000)
    macro = MacroBatch.ingest(sorting_items(8, weight=1.0), cfg.max_seq_len)
    backend = TorchBackend(model, cfg, algo=make_grpo(group_size=4))
    [micro] = MiniBatch(macro, np.arange(8), cfg)
    logps = asyncio.run(backend.forward_logprobs(micro).result())
    plain = asyncio.run(backend.forward_logprobs(micro, temperature=1.0).result())
    assert (logps - plain).abs().max() > 0.1
    logits = forward_logits(model, micro.tensors).detach()
    torch.testing.assert_close(logps, compute_token_logp(logits / 0.5, micro.tensors["input_ids"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_log_probabilities_are_renormalised_over_the_nucleus(top_p):
    model = tiny_model()
    cfg = cpu_config(micro_token_budget=10_000)
    macro = MacroBatch.ingest(sorting_items(4), cfg.max_seq_len)
    backend = TorchBackend(model, cfg, algo=make_grpo(group_size=4))
    [micro] = MiniBatch(macro, np.arange(4), cfg)
    logps = asyncio.run(backend.forward_logprobs(micro, temperature=0.7, top_p=top_p).result())
    probabilities = torch.softmax(forward_logits(model, micro.tensors).detach().double() / 0.7, dim=-1)
    ids = micro.tensors["input_ids"]
    for row, column in ((0, 0), (1, 3), (3, 2)):
        ordered = probabilities[row, column].sort(descending=True)
        nucleus_size = int((ordered.values.cumsum(0) < top_p).sum()) + 1
        inside = ordered.indices[:nucleus_size].tolist()
        token = int(ids[row, column + 1])
        expected = (
            probabilities[row, column, token] / ordered.values[:nucleus_size].sum() if token in inside else torch.tensor(0.0)
        )
        assert math.exp(logps[row, column]) == pytest.approx(expected.item(), abs=1e-5)
