"""InfoSeed through the trainer: the gradient of any split is that of the whole mini-batch, and
seeded answers have ratios to the policy itself."""

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from maxent_batches import gradient_of_the_trainer
from seeded_batches import PLAIN, SEEDS, preprocessed, rescored_gradient, seeded_episodes
from training_samples import ListSource, assert_same_tensors, cpu_config, tiny_model, weights_of

from ludic.errors import ConfigError, DataError
from ludic.training import Trainer, make_grpo, make_maxent_grpo
from ludic.training.info_seed import InfoSeed, seed_of
from ludic.training.loggers.local import DOCUMENT_NAMES
from ludic.training.loss.actions import split_actions
from ludic.training.loss.context import SharedContext
from ludic.training.loss.info_seed import FixedSeedHead, seed_directions
from ludic.training.preparation import prepare
from ludic.training.presets.preprocess import add_info_seed
from ludic.training.reference import FrozenModel

SPLITS = [*product((120, 180, 250, 350, 500, 4096), ("greedy", "optimal", "padding_free"))]
QUICK = {("infonce", 120, "greedy"), ("infonce", 250, "padding_free"), ("ce", 180, "optimal")}


def make(loss="infonce", coeff=1.0, **settings):
    return make_maxent_grpo(group_size=PLAIN, info_seed=InfoSeed(SEEDS, coeff=coeff, loss=loss, temperature=0.5), **settings)


@pytest.mark.parametrize(
    ("loss", "budget", "packing"),
    [
        pytest.param(loss, *split, marks=[] if (loss, *split) in QUICK else pytest.mark.integration)
        for loss in ("infonce", "ce")
        for split in SPLITS
    ],
)
def test_the_gradient_of_any_split_is_that_of_the_whole(loss, budget, packing):
    algo, model = make(loss), tiny_model().double()
    items = preprocessed(algo, seeded_episodes())
    whole = rescored_gradient(algo, items, model)
    split, prepared = gradient_of_the_trainer(algo, items, model, micro_token_budget=budget, packing=packing)
    largest = max(float(value.abs().max()) for value in whole.values())
    assert largest > 1e-2
    assert_same_tensors(split, whole, atol=1e-6 * max(1.0, largest))
    assert len(prepared.macro.items) == len(items)


def test_the_seeds_change_the_gradient():
    """The check above would see a term that is missing."""
    items = preprocessed(make(), seeded_episodes())
    with_term, _ = gradient_of_the_trainer(make(), items, tiny_model())
    without, _ = gradient_of_the_trainer(make(coeff=0.0), items, tiny_model())
    assert max(float((with_term[name] - without[name]).abs().max()) for name in with_term) > 1e-3


@pytest.mark.parametrize("loss", ["infonce", "ce"])
def test_the_statistics_of_any_split_are_those_of_the_whole(loss):
    def measured(budget):
        cfg = cpu_config(max_seq_len=70, micro_token_budget=budget)
        trainer = Trainer(model=tiny_model(), algo=make(loss), batch_source=ListSource(seeded_episodes(seed=3)), cfg=cfg)
        stats = trainer.train_step_sync()
        return {key: value for key, value in stats.items() if key.startswith("train/seed/")}

    whole = measured(4096)
    assert "train/seed/reported_loss" not in whole  # it is the loss of the term
    for budget in (72, 90, 180):
        assert measured(budget) == pytest.approx(whole, abs=1e-5)


def test_seeded_answers_have_ratio_one_and_others_keep_what_the_sampler_said():
    items = preprocessed(make(), seeded_episodes())
    cfg = cpu_config(max_seq_len=120, micro_token_budget=4096)
    trainer = Trainer(model=tiny_model(), algo=make(), batch_source=ListSource(items), cfg=cfg)
    macro = asyncio.run(prepare(trainer, trainer._ingest(items))).macro
    mini_batch = trainer._make_mini_batch(macro, np.arange(len(items)))
    [micro_batch] = mini_batch
    now = split_actions(asyncio.run(trainer.backend.forward_logprobs(micro_batch).result()), micro_batch.tensors)
    seen = split_actions(SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).sampler_logp, micro_batch.tensors)
    for row, own, sampled in zip(mini_batch.micro_batch_rows(0), now, seen, strict=True):
        reported = torch.tensor(items[row].actor_logps.token_logps)
        assert (reported - own).abs().max() > 0.1
        torch.testing.assert_close(sampled, own if seed_of(items[row].meta) else reported, atol=1e-5, rtol=0)
        assert macro.sample_columns["old_logp_action"][row] == pytest.approx(float(sampled.double().sum()), abs=1e-5)


def test_a_step_reports_the_term_and_leaves_plain_batches_alone():
    algo = make()
    trainer = Trainer(
        model=tiny_model(),
        algo=algo,
        batch_source=ListSource(preprocessed(algo, seeded_episodes())),
        cfg=cpu_config(max_seq_len=120, minibatches_per_batch=2),
    )
    stats = trainer.train_step_sync()
    assert stats["train/seed/info_nce"] > 0
    assert stats["train/seed/weight"] == 1.0
    assert 0 <= stats["train/seed/pred_acc"] <= 1
    assert stats["train/seed/diversity_l2"] > 0
    assert stats["train/seed/seeded_frac"] == SEEDS / (PLAIN + SEEDS)
    assert stats["train/seed/without_plain"] == 0.0

    plain = [
        replace(item, meta={**item.meta, "request_meta": {"group_id": index // 4}})
        for index, item in enumerate(seeded_episodes())
    ]
    with_term, _ = gradient_of_the_trainer(algo, plain, tiny_model())
    without, _ = gradient_of_the_trainer(make_maxent_grpo(group_size=PLAIN + SEEDS), plain, tiny_model())
    assert_same_tensors(with_term, without, atol=1e-7)


@pytest.mark.parametrize("budget", [4096, 120])
def test_the_terms_of_the_loss_add_up_to_it_however_it_is_split(budget):
    """Under the document's names, too."""
    algo = make(form="likelihood", clip_coeff=1.0, beta=0.1)
    cfg = cpu_config(max_seq_len=120, micro_token_budget=budget, prefix_sharing="off")
    source, reference = ListSource(preprocessed(algo, seeded_episodes())), FrozenModel(tiny_model(1), cfg)
    stats = Trainer(model=tiny_model(), algo=algo, batch_source=source, cfg=cfg, reference=reference).train_step_sync()
    assert (stats["perf/micro_batches"] > 1) == (budget == 120)
    seen = {DOCUMENT_NAMES[name]: value for name, value in stats.items() if name in DOCUMENT_NAMES}
    parts = [seen[f"train/loss/{part}"] for part in ("policy", "clip", "weighted_kl", "seed")]
    assert stats["train/loss"] == pytest.approx(sum(parts), abs=1e-5)
    assert seen["train/loss/seed"] == pytest.approx(stats["train/seed/info_nce"], abs=1e-5)
    assert seen["train/loss/weighted_kl"] == pytest.approx(0.1 * stats["reference/kl"], abs=1e-5)


def test_the_entropy_gap_of_a_step_by_hand():
    """tau 1 and beta 0: w = q, the softmax of the utilities 1, .5 (plain) and 0, 1 (seeded), up to
    q_epsilon. Plain: e and e^.5 have the shares .62245933 and .37754067, whose logs are -.47407698
    and -.97407698: entropy .29509363 + .36775368 = .66284732. Seeded: 1 and e have .26894142 and
    .73105858, logs -1.31326169 and -.31326169: .35319047 + .22901264 = .58220311."""
    algo = make(tau=1.0, sampler_exponent=0.0, q_epsilon=1e-12)
    items = [
        replace(item, weight=weight)
        for item, weight in zip(preprocessed(algo, seeded_episodes(groups=1)), (1.0, 0.5, 0.0, 1.0), strict=True)
    ]
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cpu_config(max_seq_len=120))
    stats = asyncio.run(prepare(trainer, trainer._ingest(items))).stats
    assert stats["seed/plain_entropy"] == pytest.approx(0.66284732, abs=1e-7)
    assert stats["seed/seeded_entropy"] == pytest.approx(0.58220311, abs=1e-7)
    assert stats["seed/entropy_gap"] == pytest.approx(0.08064421, abs=1e-7)


def test_advantages_of_grpo_have_no_entropy():
    algo = add_info_seed(make_grpo(group_size=PLAIN + SEEDS), InfoSeed(SEEDS))
    items = preprocessed(algo, seeded_episodes())
    trainer = Trainer(model=tiny_model(), algo=algo, batch_source=ListSource(items), cfg=cpu_config(max_seq_len=120))
    stats = asyncio.run(prepare(trainer, trainer._ingest(items))).stats
    assert {key: value for key, value in stats.items() if key.startswith("seed/")} == {"seed/seeded_frac": 0.5}


def test_steps_repeat_bit_for_bit():
    def run():
        model, algo = tiny_model(), make("ce")
        source = ListSource(preprocessed(algo, seeded_episodes()))
        Trainer(model=model, algo=algo, batch_source=source, cfg=cpu_config(max_seq_len=120)).train_sync(2)
        return weights_of(model)

    assert_same_tensors(run(), run(), atol=0)


def test_tags_are_taken_out_before_training():
    tagged = seeded_episodes(groups=1)
    items = preprocessed(make(), tagged)
    start = [list(item.action_mask).index(1) for item in items]
    assert {tuple(item.input_ids[:at]) for item, at in zip(items[PLAIN:], start[PLAIN:], strict=True)} == {
        tuple(items[0].input_ids[: start[0]])
    }
    two_turns = [replace(item, meta={**item.meta, "step_index": 1}) for item in tagged]
    with pytest.raises(DataError, match="one turn"):
        preprocessed(make(), two_turns)


def test_the_fixed_head_has_orthonormal_directions_of_its_own():
    rows = seed_directions(3, 5)
    torch.testing.assert_close(rows @ rows.T, torch.eye(3, dtype=torch.float64))
    head = FixedSeedHead(3, temperature=0.5)
    assert not list(head.parameters())
    torch.testing.assert_close(head(4.0 * rows.float()), 2.0 * torch.eye(3))
    with pytest.raises(ConfigError, match=r"num_seeds \(6\) must be at most 5; .*width"):
        FixedSeedHead(6, 0.5)(torch.zeros(1, 5))
