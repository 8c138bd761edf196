"""The trainer of direct preference optimization: whole pairs, a reference that is scored once, and
everything that its base class does."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from preference_samples import dpo_config, pair, sorted_pairs
from training_samples import ListSource, assert_same_tensors, gradients_of, tiny_model, weights_of

from ludic.errors import BudgetError, CheckpointError, ConfigError, ConfigTypeError, DataError
from ludic.training import (
    CheckpointConfig,
    DPOTrainer,
    FrozenModel,
    LoraSettings,
    PrecomputedReference,
    Trainer,
    TrainerConfig,
    collate_saw_items,
    make_bradley_terry,
    make_dpo,
    make_kto,
    preference_batches,
)
from ludic.training.batching.pair_batches import PreferenceMacroBatch
from ludic.training.batching.preference import collate_preference_items
from ludic.training.loss.context import SharedContext
from ludic.training.reference import item_key


def trainer_of(items=None, *, model=None, algo=None, config=None, source=None, kind=DPOTrainer, **options):
    items = sorted_pairs(8) if items is None else items
    return kind(
        model=model or tiny_model(),
        algo=algo or make_dpo(beta=0.5),
        batch_source=source or ListSource(items),
        pairs=items if source is None else None,
        cfg=dpo_config(**(config or {})),
        **options,
    )


class DescentTrainer(DPOTrainer):
    """Gradient descent with learning rate 1, so the step is the gradient."""

    def initialize_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1.0)


def logp_of(model, item):
    """[A] log-probabilities of one sample alone, without padding."""
    batch = collate_saw_items([item], pad_token_id=0, device="cpu")
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits
    shared = SharedContext(logits, batch)
    return shared.token_logp[0][shared.token_mask[0].bool()]


ITEMS = sorted_pairs(9, seed=4)
ALGORITHMS = {
    "sigmoid": make_dpo(beta=0.5, label_smoothing=0.1),
    "ipo": make_dpo(beta=0.2, loss_type="ipo"),
    "robust": make_dpo(beta=0.5, loss_type="robust", label_smoothing=0.2),
    "cpo": make_dpo(beta=0.3, loss_type="cpo"),
    "simpo": make_dpo(beta=2.0, loss_type="simpo", cpo_alpha=0.5),
    "orpo": make_dpo(beta=0.5, loss_type="orpo"),
}


def whole_gradient(algo):
    """The gradient of all pairs in one batch, with a reference of another seed."""
    model, other = tiny_model(), tiny_model(seed=1)
    batch = collate_preference_items(ITEMS, pad_token_id=0, device="cpu")
    reference = torch.zeros(batch["input_ids"].shape)
    for row, item in enumerate(ITEMS):
        reference[row, batch["action_mask"][row].bool()] = logp_of(other, item)
    loss, _ = algo.compute_loss(model, {**batch, "reference_logps": reference})
    loss.backward()
    return gradients_of(model), loss.item()


WHOLE = {name: whole_gradient(algo) for name, algo in ALGORITHMS.items()}


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(
    order=st.permutations(range(len(ITEMS))),
    budget=st.integers(64, 700),
    packing=st.sampled_from(["optimal", "greedy"]),
    overhead=st.sampled_from([0, 64]),
    logits=st.sampled_from(["full", "chunked"]),
)
def test_the_step_is_the_gradient_of_all_pairs_however_they_are_divided(name, order, budget, packing, overhead, logits):
    expected, loss = WHOLE[name]
    shuffled = [ITEMS[row] for row in order]
    config = {"micro_token_budget": budget, "packing": packing, "overhead_tokens": overhead, "logits": logits}
    reference = FrozenModel(tiny_model(seed=1), dpo_config()) if ALGORITHMS[name].reads_reference else None
    trainer = trainer_of(
        shuffled, algo=ALGORITHMS[name], config={**config, "max_grad_norm": None}, reference=reference, kind=DescentTrainer
    )
    before = weights_of(trainer.model)
    stats = trainer.train_step_sync()
    moved = {key: before[key] - weight for key, weight in weights_of(trainer.model).items()}
    largest = max(1.0, *(value.abs().max().item() for value in expected.values()))
    assert_same_tensors({key: moved[key] for key in expected}, expected, atol=2e-6 * largest)
    assert stats["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert stats["train/total_pairs"] == stats["train/num_pairs"] == 9


def test_the_reference_is_the_model_before_the_first_step_and_is_scored_once():
    model = tiny_model()
    items = sorted_pairs(8)
    expected = {item_key(item): logp_of(model, item) for item in items}
    trainer = trainer_of(items, model=model, config={"prefix_sharing": "off"})  # which would compare trees first
    calls = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    stats = [trainer.train_step_sync() for _ in range(3)]
    assert all(calls), "every pass of a step has gradient: none scores the reference"
    assert stats[0]["train/rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert stats[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert stats[2]["train/loss"] < stats[0]["train/loss"]
    for item in items:
        torch.testing.assert_close(trainer.reference_logps.of_item(item), expected[item_key(item)], atol=1e-5, rtol=1e-5)


def test_a_policy_learns_which_answer_is_sorted():
    trainer = trainer_of(
        source=preference_batches(sorted_pairs(128), batch_size=16),
        config={"micro_token_budget": 512, "lr_scheduler_type": "cosine", "warmup_steps": 5, "lr": 1e-2},
        eval_items=sorted_pairs(64, seed=9),
    )
    before = trainer.evaluate()
    assert abs(before["eval_rewards/margins"]) < 1e-4
    trainer.train_sync(40)
    after = trainer.evaluate()
    assert after["eval_rewards/accuracies"] > 0.85
    assert after["eval_loss"] < 0.6 < before["eval_loss"]


def test_an_evaluation_is_that_of_single_samples():
    model, other, items = tiny_model(), tiny_model(seed=1), sorted_pairs(12, seed=6)
    cfg = dpo_config()
    trainer = trainer_of(sorted_pairs(4), model=model, eval_items=items, reference=FrozenModel(other, cfg))
    measured = trainer.evaluate()
    logps = np.array([float(logp_of(model, item).double().sum()) for item in items])
    rewards = 0.5 * (logps - np.array([float(logp_of(other, item).double().sum()) for item in items]))
    labels = np.array([item.meta["label"] for item in items[::2]])
    margins = rewards[::2] - rewards[1::2]
    losses = labels * np.logaddexp(0, -margins) + (1 - labels) * np.logaddexp(0, margins)
    assert measured["eval_rewards/accuracies"] == np.mean(margins > 0)
    expected = {
        "eval_loss": losses.mean(),
        "eval_rewards/chosen": rewards[::2].mean(),
        "eval_rewards/rejected": rewards[1::2].mean(),
        "eval_rewards/margins": margins.mean(),
        "eval_logps/chosen": logps[::2].mean(),
        "eval_logps/rejected": logps[1::2].mean(),
        "eval_num_pairs": 12,
    }
    assert {name: measured[name] for name in expected} == pytest.approx(expected, abs=1e-4)


def test_with_adapters_the_reference_is_the_model_without_them():
    model = tiny_model()
    items = sorted_pairs(6)
    expected = [logp_of(model, item) for item in items]
    trainer = trainer_of(items, model=model, lora_config=LoraSettings(rank=4))
    for item, logps in zip(items, expected, strict=True):
        torch.testing.assert_close(trainer.reference_logps.of_item(item), logps, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    again = trainer_of(items, model=trainer.model)  # trained adapters, and still the base
    torch.testing.assert_close(again.reference_logps.of_item(items[0]), expected[0], atol=1e-5, rtol=1e-5)


def run(folder, steps, *, resume=False, file=None):
    items = sorted_pairs(20, seed=2)
    trainer = trainer_of(
        source=preference_batches(items, batch_size=4, seed=3),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=3),
        resume_from=6 if resume else None,
        reference_file=file,
        total_training_steps=12,
    )
    trainer.train_sync(steps - trainer.current_step)
    return weights_of(trainer.model)


@pytest.mark.parametrize("keeps_file", [True, False])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, keeps_file, monkeypatch):
    whole = run(tmp_path / "whole", 12)
    file = tmp_path / "reference.logps" if keeps_file else None
    run(tmp_path / "parts", 6, file=file)
    if keeps_file:  # the reference is read, and not scored again
        assert len(PrecomputedReference.load(file)) == 40
        monkeypatch.delattr(PrecomputedReference, "score")
    parts = run(tmp_path / "parts", 12, resume=True, file=file)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_loss_without_a_reference_scores_nothing(tmp_path, monkeypatch):
    model, items = tiny_model(), sorted_pairs(6)
    monkeypatch.delattr(PrecomputedReference, "score")
    options = {"config": {"prefix_sharing": "off"}, "reference_file": tmp_path / "kept"}
    trainer = trainer_of(items, model=model, algo=make_dpo(loss_type="simpo"), eval_items=items, **options)
    assert trainer.reference_logps is None
    calls = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    stats = trainer.train_step_sync()
    assert all(calls)
    assert not (tmp_path / "kept").exists()
    assert "train/reference/kl" not in stats
    measured = trainer.evaluate()
    logps = np.array([float(logp_of(model, item).double().mean()) for item in items])
    assert measured["eval_rewards/chosen"] == pytest.approx(0.1 * logps[::2].mean(), abs=1e-5)
    assert measured["eval_rewards/accuracies"] == np.mean(logps[::2] > logps[1::2])


# --- answers that are desirable or not


ANSWERS = [
    replace(item, meta={**item.meta, "pair_id": f"a{row}", "label": 1.0})
    for row, item in enumerate(sorted_pairs(9, seed=4))
    if row % 3
]


def kto_by_hand(items, beta, desirable_weight):
    """Value, gradient and z_0 from single samples; each prompt with the answer before it."""
    model, other = tiny_model(), tiny_model(seed=1)

    def ratio(item):
        batch = collate_saw_items([item], pad_token_id=0, device="cpu")
        shared = SharedContext(model(input_ids=batch["input_ids"]).logits, batch)
        return (shared.token_logp * shared.token_mask).sum() - logp_of(other, item).sum()

    paired = len({item.meta["pair_id"] for item in items}) < len(items)
    ordered = sorted(items, key=lambda item: paired and item.meta["role"] == "rejected")
    mismatched = []
    for item, before in zip(ordered, [ordered[-1], *ordered[:-1]], strict=True):
        a, b = item.action_mask.index(1), before.action_mask.index(1)
        ids, mask = item.input_ids[:a] + before.input_ids[b:], item.action_mask[:a] + before.action_mask[b:]
        mismatched.append(replace(item, input_ids=ids, attention_mask=[1] * len(ids), action_mask=mask))
    kl = max(0.0, float(torch.stack([ratio(item).detach() for item in mismatched]).mean()))
    losses = []
    for item in items:
        z, y = beta * (ratio(item) - kl), item.meta["label"] if item.meta["role"] == "chosen" else 1 - item.meta["label"]
        losses.append(y * desirable_weight * torch.sigmoid(-z) + (1 - y) * torch.sigmoid(z))
    loss = torch.stack(losses).mean()
    loss.backward()
    return gradients_of(model), loss.item(), kl


KTO_ITEMS = {"answers": ANSWERS, "pairs": sorted_pairs(6, seed=4)}
BY_HAND = {name: kto_by_hand(items, 0.5, 1.5) for name, items in KTO_ITEMS.items()}


@pytest.mark.parametrize("name", KTO_ITEMS)
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(budget=st.integers(64, 700), packing=st.sampled_from(["optimal", "greedy"]), seed=st.integers(0, 9))
def test_the_step_of_kto_is_the_gradient_of_all_answers_however_they_are_divided(name, budget, packing, seed):
    expected, loss, kl = BY_HAND[name]
    items = KTO_ITEMS[name]
    shuffled = random.Random(seed).sample(items, len(items))
    trainer = DescentTrainer(
        model=tiny_model(),
        algo=make_kto(beta=0.5, desirable_weight=1.5),
        batch_source=ListSource(shuffled),
        pairs=items,
        cfg=dpo_config(micro_token_budget=budget, packing=packing, max_grad_norm=None),
        reference=FrozenModel(tiny_model(seed=1), dpo_config()),
    )
    before = weights_of(trainer.model)
    stats = trainer.train_step_sync()
    moved = {key: before[key] - weight for key, weight in weights_of(trainer.model).items()}
    largest = max(1.0, *(value.abs().max().item() for value in expected.values()))
    assert_same_tensors({key: moved[key] for key in expected}, expected, atol=2e-6 * largest)
    assert stats["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert stats["train/kl"] == pytest.approx(kl, rel=1e-4, abs=1e-5)
    chosen = [item for item in items if item.meta["role"] == "chosen" and item.meta["label"] > 0.5]
    rewards = [0.5 * float((logp_of(tiny_model(), item) - logp_of(tiny_model(seed=1), item)).sum()) for item in chosen]
    assert stats["train/rewards/chosen"] == pytest.approx(np.mean(rewards), abs=1e-4)


def test_an_evaluation_of_kto_estimates_the_kl_divergence_of_the_measured_samples():
    items = KTO_ITEMS["pairs"]
    options = {"algo": make_kto(beta=0.5, desirable_weight=1.5), "reference": FrozenModel(tiny_model(seed=1), dpo_config())}
    trainer = trainer_of(sorted_pairs(3), eval_items=items, **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(BY_HAND["pairs"][1], rel=1e-5)


# --- the log-probabilities as an object and a file


def reference_of(items, model=None):
    model, cfg = model or tiny_model(), dpo_config()
    frozen = FrozenModel(model, cfg)
    batch = PreferenceMacroBatch.ingest_pairs(items, cfg.max_seq_len)
    return PrecomputedReference.score([batch], cfg, lambda micro: frozen.logps(micro).wait())


def test_a_file_gives_back_every_value(tmp_path):
    items = sorted_pairs(7)
    kept = reference_of(items)
    kept.save(tmp_path / "kept")
    loaded = PrecomputedReference.load(tmp_path / "kept")
    assert len(loaded) == len(kept) == len({item_key(item) for item in items})
    assert all(torch.equal(loaded.of_item(item), kept.of_item(item)) for item in items)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_values_do_not_depend_on_order_padding_or_batch():
    items = random.Random(0).sample(sorted_pairs(7), 14)
    kept = reference_of(sorted_pairs(7))
    batch = collate_saw_items(items[:5], pad_token_id=0, device="cpu")
    names = tuple(item.meta["pair_id"] for item in items[:5])

    class Micro:
        tensors, sample_names = batch, names

    placed = kept.logps(Micro())
    mask = SharedContext(batch["input_ids"], batch).token_mask.bool()
    for row, item in enumerate(items[:5]):
        assert torch.equal(placed[row][mask[row]], kept.of_item(item))
    assert placed[~mask].abs().sum() == 0


def test_unknown_samples_and_damaged_files_are_refused(tmp_path):
    kept = reference_of(sorted_pairs(3))
    with pytest.raises(DataError, match="no reference log-probabilities of pair new"):
        kept.of_item(pair("new", "q>", "1", "2")[0])
    known, unknown = (trainer_of(items, reference=kept) for items in (sorted_pairs(3), pair("new", "q>", "1", "2")))
    known.train_step_sync()
    before = weights_of(unknown.model)
    with pytest.raises(DataError, match=r"no reference log-probabilities of .*max_seq_len"):
        unknown.train_step_sync()
    assert_same_tensors(weights_of(unknown.model), before, atol=0.0)
    with pytest.raises(DataError, match="no reference log-probabilities of pair new"):
        known.evaluate(pair("new", "q>", "1", "2"))
    path = tmp_path / "kept"
    kept.save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        PrecomputedReference.load(path)
    from safetensors.torch import save_file

    save_file({"keys": torch.zeros(2, 16, dtype=torch.uint8), "counts": torch.tensor([1, 9]), "logps": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="delete it"):
        PrecomputedReference.load(path)


# --- errors


def test_wrong_parts_are_refused():
    items = sorted_pairs(4)
    with pytest.raises(ConfigTypeError, match="DPOTrainerConfig"):
        DPOTrainer(model=tiny_model(), algo=make_dpo(), batch_source=ListSource(items), cfg=TrainerConfig(model_device="cpu"))
    with pytest.raises(ConfigError, match="use make_dpo"):
        trainer_of(items, algo=make_bradley_terry(score_type="logprob"))
    with pytest.raises(ConfigError, match="pass them as pairs="):
        DPOTrainer(model=tiny_model(), algo=make_dpo(), batch_source=ListSource(items), cfg=dpo_config())
    with pytest.raises(BudgetError, match=r"micro_token_budget \(63\) must be >= 2 \* max_seq_len"):
        dpo_config(micro_token_budget=63)
    with pytest.raises(ConfigError, match="padding_free"):
        dpo_config(packing="padding_free")
    with pytest.raises(ConfigError, match="no pairs to evaluate"):
        trainer_of(items).evaluate()
    with pytest.raises(ConfigError, match="both say what to evaluate"):
        trainer_of(items, eval_items=items, evaluator=object())


def test_a_plain_trainer_without_reference_says_what_is_missing():
    with pytest.raises(ConfigError, match="dpo reads a reference"):
        Trainer(model=tiny_model(), algo=make_dpo(), batch_source=ListSource(sorted_pairs(2)), cfg=dpo_config())


def test_a_reference_that_is_not_finite_is_refused():
    broken = tiny_model(seed=1)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DataError, match="not all finite"):
        trainer_of(reference=FrozenModel(broken, dpo_config()))


def test_a_reference_that_must_be_awaited_is_refused():
    class Slow:
        async def logps(self, micro_batch):
            raise AssertionError

    with pytest.raises(ConfigTypeError, match="must return a tensor or a TrainFuture"):
        trainer_of(reference=Slow())
