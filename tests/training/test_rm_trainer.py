"""The reward-model trainer: whole pairs, metrics of single scores, and everything that its base
class does."""

import logging
import random

import numpy as np
import pytest
import torch
from preference_samples import pair, response, reward_model, rm_config, sorted_pairs
from training_samples import ListSource, assert_same_tensors, gradients_of, tiny_model, weights_of, without_times

from ludic.errors import BudgetError, ConfigError, ConfigTypeError, DataError, NonFiniteError
from ludic.training import (
    BradleyTerryLoss,
    CheckpointConfig,
    PreferenceEvaluator,
    PreferenceMetrics,
    RLAlgorithm,
    RMTrainer,
    RMTrainerConfig,
    TrainerConfig,
    make_bradley_terry,
    preference_batches,
)
from ludic.training.batching import collate_preference_items
from ludic.training.credit_assignment import ConstantCredit


def trainer_of(items=None, *, model=None, algo=None, config=None, source=None, **options):
    return RMTrainer(
        model=model or reward_model(),
        algo=algo or make_bradley_terry(),
        batch_source=source or ListSource(items if items is not None else sorted_pairs(8)),
        cfg=rm_config(**(config or {})),
        **options,
    )


def read_score(model, item):
    """The score of one sample alone, without padding."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([item.input_ids])).logits.item()


class DescentTrainer(RMTrainer):
    """Gradient descent with learning rate 1, so the step is the gradient."""

    def initialize_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1.0)


# --- training


@pytest.mark.parametrize("budget", [64, 100, 10_000])
@pytest.mark.parametrize("packing", ["optimal", "greedy"])
def test_the_step_is_the_gradient_of_all_pairs_at_once(budget, packing):
    items, algo = sorted_pairs(9), make_bradley_terry(label_smoothing=0.1, lambda_regularization=0.05)
    model = reward_model()
    loss, _ = algo.compute_loss(model, collate_preference_items(items, pad_token_id=0, device="cpu"))
    loss.backward()
    expected, before = gradients_of(model), weights_of(model)
    model.zero_grad()
    shuffled = random.Random(1).sample(items, len(items))
    cfg = rm_config(micro_token_budget=budget, packing=packing, max_grad_norm=None)
    trainer = DescentTrainer(model=model, algo=algo, batch_source=ListSource(shuffled), cfg=cfg)
    stats = trainer.train_step_sync()
    moved = {name: before[name] - weight for name, weight in weights_of(model).items()}
    assert_same_tensors({name: moved[name] for name in expected}, expected, atol=1e-5)
    assert stats["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert stats["train/total_pairs"] == stats["train/num_pairs"] == 9


def test_a_reward_model_learns_which_answer_is_sorted():
    trainer = trainer_of(
        source=preference_batches(sorted_pairs(128), batch_size=16),
        model=reward_model(initializer_range=0.02),
        config={"micro_token_budget": 512, "lr_scheduler_type": "cosine", "warmup_steps": 5},
        eval_items=sorted_pairs(64, seed=9),
    )
    before = trainer.evaluate()
    trainer.train_sync(40)
    after = trainer.evaluate()
    assert after["eval_pairwise_accuracy"] > 0.85
    assert after["eval_loss"] < 0.6 < before["eval_loss"]
    assert after["eval_margin_p50"] > 0


def test_a_label_of_zero_swaps_the_pair():
    """A pair with swapped roles and label 1 - y gives the same step."""
    turned = []
    for chosen, rejected in zip(*[iter(sorted_pairs(4))] * 2, strict=True):
        meta, label = chosen.meta, 1.0 - chosen.meta["label"]
        turned += [
            response(meta["pair_id"], "rejected", "", ""),
            response(meta["pair_id"], "chosen", "", ""),
        ]
        for item, original in zip(turned[-2:], (chosen, rejected), strict=True):
            item.input_ids, item.attention_mask, item.action_mask = (
                original.input_ids,
                original.attention_mask,
                original.action_mask,
            )
            item.meta["label"] = label
    losses = [trainer_of(items).train_step_sync()["train/loss"] for items in (sorted_pairs(4), turned)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_every_micro_batch_has_whole_pairs_within_the_budget():
    batches_seen = []

    class RecordingLoss(BradleyTerryLoss):
        def compute(self, logits, batch, *, shared=None):
            batches_seen.append((batch["input_ids"].numel(), batch["meta"]["pair_id"], batch["meta"]["role"]))
            return super().compute(logits, batch, shared=shared)

    items = random.Random(2).sample(sorted_pairs(12), 24)
    algo = RLAlgorithm("watched", ConstantCredit(1.0), RecordingLoss())
    cut = {"micro_token_budget": 90, "minibatches_per_batch": 3, "prefix_sharing": "off"}  # of padded tokens
    stats = trainer_of(items, algo=algo, config=cut).train_step_sync()
    assert len(batches_seen) == stats["perf/micro_batches"] > 3
    assert stats["train/optimizer_steps"] == 3
    for tokens, ids, roles in batches_seen:
        assert tokens <= 90
        assert ids[::2] == ids[1::2]
        assert roles == ["chosen", "rejected"] * (len(roles) // 2)
    assert sorted(name for _, ids, _ in batches_seen for name in ids[::2]) == sorted({item.meta["pair_id"] for item in items})
    assert stats["perf/padded_tokens"] == sum(tokens for tokens, _, _ in batches_seen)
    assert stats["perf/padded_tokens_greedy"] >= stats["perf/real_tokens"] == sum(len(item.input_ids) for item in items)


def test_gradient_checkpointing_changes_neither_pass():
    algo = make_bradley_terry(lambda_regularization=0.1)  # the norm needs a first pass
    config = {"micro_token_budget": 64}
    plain, checkpointed = (
        trainer_of(algo=algo, config=config, model=reward_model(attention_dropout=0.2), enable_gradient_checkpointing=on)
        for on in (False, True)
    )
    losses = []
    for trainer in (plain, checkpointed):
        torch.manual_seed(4)
        losses.append(trainer.train_step_sync()["train/loss"])
    assert losses[0] == losses[1]
    assert_same_tensors(weights_of(plain.model), weights_of(checkpointed.model), atol=1e-7)


def test_bf16_autocast_trains_and_evaluates_in_bf16():
    batches_seen = []

    class RecordingLoss(BradleyTerryLoss):
        def compute(self, logits, batch, *, shared=None):
            batches_seen.append(logits.dtype)
            return super().compute(logits, batch, shared=shared)

    config = {"mixed_precision_dtype": "bf16"}
    trainer = trainer_of(
        algo=RLAlgorithm("bf16", ConstantCredit(1.0), RecordingLoss()), config=config, eval_items=sorted_pairs(6)
    )
    exact = trainer_of(eval_items=sorted_pairs(6)).evaluate()
    eval_metrics = trainer.evaluate()
    assert eval_metrics["eval_loss"] == pytest.approx(exact["eval_loss"], rel=0.05)
    assert eval_metrics["eval_loss"] != exact["eval_loss"]
    trainer.train_step_sync()
    assert set(batches_seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


STEPS = 4


def resumable(folder, **options):
    config = {
        "minibatches_per_batch": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "eval_every_n_steps": 1,
        "early_stopping_patience": 3,
        "micro_token_budget": 70,
    }
    return trainer_of(
        model=reward_model(options.pop("model_seed", 0), attention_dropout=0.2),
        algo=make_bradley_terry(lambda_regularization=0.01, label_smoothing=0.05),
        source=preference_batches(sorted_pairs(10), batch_size=4),
        config=config,
        eval_items=sorted_pairs(5, seed=7),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=STEPS),
        total_training_steps=STEPS,
        **options,
    )


def run_to_the_end(trainer):
    stats = []
    trainer.train_sync(STEPS - trainer.current_step, log_fn=stats.append, eval_log_fn=stats.append)
    return [without_times(step_stats) for step_stats in stats]


@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_resumed_run_equals_the_uninterrupted_run_bitwise(tmp_path, killed_after):
    torch.manual_seed(5)
    whole = resumable(tmp_path)
    torch.manual_seed(5)
    stats = run_to_the_end(whole)
    torch.manual_seed(99)
    resumed = resumable(tmp_path, resume_from=killed_after, model_seed=1)
    assert run_to_the_end(resumed) == stats[2 * killed_after :]
    assert_same_tensors(weights_of(resumed.model), weights_of(whole.model))


def test_transformers_can_load_a_checkpoint(tmp_path):
    from transformers import AutoModelForSequenceClassification

    trainer = trainer_of(checkpoint_config=CheckpointConfig(tmp_path, every_n_steps=1))
    trainer.train_sync(1)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "step_000001")
    item = sorted_pairs(1)[0]
    assert read_score(loaded, item) == read_score(trainer.model, item)


# --- incomplete batches


def test_incomplete_pairs_are_dropped_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        stats = trainer_of(sorted_pairs(4)[:7]).train_step_sync()
    assert (stats["train/total_pairs"], stats["train/pairs_incomplete"]) == (3.0, 1.0)
    assert "dropped 1 incomplete preference pairs: p3" in caplog.text


def test_incomplete_pairs_are_an_error_when_they_may_not_be_dropped():
    trainer = trainer_of(sorted_pairs(4)[:7], config={"rm_drop_incomplete_pairs": False})
    with pytest.raises(DataError, match='Incomplete preference pair "p3"'):
        trainer.train_step_sync()


@pytest.mark.parametrize(
    ("setting", "argument"), [("rm_drop_incomplete_pairs", "drop_incomplete"), ("rm_require_complete_pairs", "require_complete")]
)
def test_pairs_that_the_source_drops_follow_the_same_setting(setting, argument):
    """The trainer can neither refuse nor keep what never reaches it."""
    source = preference_batches(sorted_pairs(4)[:7], batch_size=4)
    with pytest.raises(ConfigError, match=f"dropped 1 incomplete pairs, .*{setting} is off; .*{argument}=False"):
        trainer_of(source=source, config={setting: False})
    assert trainer_of(source=source).train_step_sync()["train/total_pairs"] == 3


def test_single_samples_reach_the_loss_from_the_source():
    batches_seen = []

    class RecordingLoss(BradleyTerryLoss):
        def compute(self, logits, batch, *, shared=None):
            batches_seen.extend(batch["meta"]["pair_id"])
            return super().compute(logits, batch, shared=shared)

    source = preference_batches(sorted_pairs(4)[:7], batch_size=4, require_complete=False)
    algo = RLAlgorithm("watched", ConstantCredit(1.0), RecordingLoss())
    trainer_of(source=source, algo=algo, config={"rm_require_complete_pairs": False}).train_step_sync()
    assert sorted(batches_seen) == ["p0", "p0", "p1", "p1", "p2", "p2", "p3"]


def test_an_evaluation_treats_incomplete_pairs_as_training_does(caplog):
    items = sorted_pairs(4)[:7]
    whole = trainer_of(sorted_pairs(4), eval_items=items[:6]).evaluate()
    assert whole["eval_pairs_incomplete"] == 0
    for changes in (
        {},
        {"rm_require_complete_pairs": False},
        {"rm_require_complete_pairs": False, "rm_drop_incomplete_pairs": False},
    ):
        caplog.clear()
        eval_metrics = trainer_of(sorted_pairs(4), eval_items=items, config=changes).evaluate()
        assert eval_metrics == {**whole, "eval_pairs_incomplete": 1.0}
        assert "dropped 1 incomplete preference pairs: p3" in caplog.text
    with pytest.raises(DataError, match='Incomplete preference pair "p3"'):
        trainer_of(sorted_pairs(4), eval_items=items, config={"rm_drop_incomplete_pairs": False})
    trainer = trainer_of(sorted_pairs(4), config={"rm_drop_incomplete_pairs": False})
    with pytest.raises(DataError, match='Incomplete preference pair "p3"'):
        trainer.evaluate(items)


def test_incomplete_pairs_reach_the_loss_when_completeness_is_not_required():
    """The reference implementation dropped them anyway. Bradley-Terry ignores them: its loss is
    that of the complete pairs."""
    batches_seen = []

    class RecordingLoss(BradleyTerryLoss):
        def compute(self, logits, batch, *, shared=None):
            batches_seen.extend(zip(batch["meta"]["pair_id"], batch["meta"]["role"], strict=True))
            return super().compute(logits, batch, shared=shared)

    items = sorted_pairs(4)[:7]
    algo = RLAlgorithm("watched", ConstantCredit(1.0), RecordingLoss())
    stats = trainer_of(items, algo=algo, config={"rm_require_complete_pairs": False}).train_step_sync()
    assert sorted(batches_seen) == sorted((item.meta["pair_id"], item.meta["role"]) for item in items)
    assert (stats["train/total_pairs"], stats["train/pairs_incomplete"]) == (3.0, 0.0)
    without = trainer_of(items[:6]).train_step_sync()
    assert stats["train/loss"] == pytest.approx(without["train/loss"], rel=1e-6)
    assert stats["train/grad_norm"] == pytest.approx(without["train/grad_norm"], rel=1e-5)


def test_a_batch_without_a_pair_is_skipped():
    items = sorted_pairs(4)
    trainer = trainer_of(source=ListSource(items[:1], items))
    assert trainer.train_step_sync()["train/total_pairs"] == 4


def test_pairs_that_truncation_makes_equal_are_counted():
    items = [*pair("same", "123>", "4567", "4568"), *pair("kept", "1>", "2", "3")]
    stats = trainer_of(items, config={"max_seq_len": 7}).train_step_sync()
    assert (stats["train/total_pairs"], stats["train/pairs_truncated_equal"]) == (1.0, 1.0)


# --- losses of single samples


class ScoreIsLabel:
    """A loss of single samples: squared error between score and label."""

    normalizer = "samples"

    def compute(self, logits, batch):
        target = torch.tensor([float(label) for label in batch["meta"]["label"]])
        loss = (logits.squeeze(-1) - target).square().mean()
        return loss, {"loss": loss.detach()}


def test_single_samples_are_weighted_by_their_number():
    """An odd number of samples in micro-batches of one or two. The reference implementation gave
    each half a pair's weight."""
    items = sorted_pairs(4)[:7]
    algo = RLAlgorithm("pointwise", ConstantCredit(1.0), ScoreIsLabel())
    model = reward_model()
    loss, _ = algo.compute_loss(model, collate_preference_items(items, pad_token_id=0, device="cpu"))
    loss.backward()
    expected, before = gradients_of(model), weights_of(model)
    model.zero_grad()
    cfg = rm_config(rm_pair_aware=False, micro_token_budget=33, max_seq_len=32, max_grad_norm=None)
    stats = DescentTrainer(model=model, algo=algo, batch_source=ListSource(items), cfg=cfg).train_step_sync()
    assert stats["perf/micro_batches"] > 3
    moved = {name: before[name] - weight for name, weight in weights_of(model).items()}
    assert_same_tensors({name: moved[name] for name in expected}, expected, atol=1e-5)
    assert stats["train/loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_pair_loss_refuses_incomplete_pairs():
    with pytest.raises(ConfigError, match=r"BradleyTerryLoss compares .*rm_pair_aware"):
        trainer_of(config={"rm_pair_aware": False})


# --- evaluation

KEYS = {
    "eval_loss",
    "eval_pairwise_accuracy",
    "eval_mean_margin",
    "eval_margin_std",
    "eval_negative_margin_rate",
    "eval_roc_auc",
    "eval_ece",
    "eval_fpr@0.5",
    "eval_fnr@0.5",
}


@pytest.mark.parametrize("budget", [64, 4096])
def test_the_metrics_equal_those_of_scores_computed_one_by_one(budget):
    items = sorted_pairs(20, seed=4)
    trainer = trainer_of(algo=make_bradley_terry(beta=1.5), config={"micro_token_budget": budget}, eval_items=items)
    eval_metrics = trainer.evaluate()
    scores = np.array([read_score(trainer.model, item) for item in items])
    chosen, rejected, labels = scores[::2], scores[1::2], [item.meta["label"] for item in items[::2]]
    metrics = PreferenceMetrics(10, (0.5,), 1.5, thresholds_on="responses", both_orders=True)
    metrics.update(chosen, rejected, labels)
    expected = {f"eval_{name}": value for name, value in metrics.compute().items()}
    probability = 1 / (1 + np.exp(-1.5 * (chosen - rejected)))
    expected["eval_loss"] = -np.mean(labels * np.log(probability) + (1 - np.array(labels)) * np.log(1 - probability))
    assert eval_metrics.pop("eval_num_pairs") == 20
    left_out = ("incomplete", "truncated_empty", "truncated_equal")
    assert [eval_metrics.pop(f"eval_pairs_{why}") for why in left_out] == [0, 0, 0]
    assert eval_metrics.keys() >= KEYS
    assert {f"eval_margin_p{percent}" for percent in (5, 25, 50, 75, 95)} <= eval_metrics.keys()
    assert eval_metrics == pytest.approx(expected, abs=1e-5)


def test_an_evaluation_does_not_change_the_model_or_generators():
    trainer = trainer_of(model=reward_model(attention_dropout=0.3), eval_items=sorted_pairs(4))
    trainer.model.train()
    torch.manual_seed(3)
    random_value = torch.rand(1).item()
    torch.manual_seed(3)
    assert trainer.evaluate() == trainer.evaluate()
    assert torch.rand(1).item() == random_value
    assert trainer.model.training


def test_other_pairs_can_be_evaluated_and_an_empty_list_is_an_error():
    trainer = trainer_of()
    assert trainer.evaluate(sorted_pairs(3))["eval_num_pairs"] == 3
    with pytest.raises(ConfigError, match="no pairs to evaluate"):
        trainer.evaluate()
    with pytest.raises(ConfigError, match="none of the 1 samples"):
        trainer.evaluate(sorted_pairs(1)[:1])


def test_training_evaluates_logs_and_stops_early():
    logged = []
    trainer = trainer_of(
        config={
            "lr": 0.0,
            "eval_at_start": True,
            "eval_every_n_steps": 1,
            "early_stopping_patience": 2,
            "early_stopping_metric": "eval_pairwise_accuracy",
            "early_stopping_mode": "max",
        },
        eval_items=sorted_pairs(4, seed=2),
    )
    trainer.train_sync(10, eval_log_fn=logged.append)
    # lr is 0: the first evaluation in training is the best, the next two are no better
    assert trainer.current_step == 3
    assert len(logged) == 4
    assert {name.replace("eval_", "eval/") for name in KEYS} <= logged[0].keys()
    metrics = trainer.eval_sync()["metrics"]
    assert metrics == {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}


def test_externally_computed_scores_can_be_collected():
    trainer = trainer_of(algo=make_bradley_terry(beta=2.0), config={"rm_log_per_response_metrics": False})
    trainer.update_eval_metrics([1.0], [0.0], [1.0])
    trainer.update_eval_metrics(torch.tensor([0.0]), torch.tensor([1.0]), [1.0])
    eval_metrics = trainer.compute_eval_metrics()
    assert eval_metrics["pairwise_accuracy"] == 0.5
    assert eval_metrics["fnr@0.5"] == 0.5
    assert trainer.compute_eval_metrics()["pairwise_accuracy"] == 0.0


def test_a_model_scored_by_log_probabilities_can_be_evaluated():
    items = sorted_pairs(4)
    trainer = trainer_of(items, model=tiny_model(), algo=make_bradley_terry(score_type="logprob", beta=0.1), eval_items=items)
    before = trainer.evaluate()["eval_loss"]
    trainer.train_sync(5)
    assert trainer.evaluate()["eval_loss"] < before


def test_long_pairs_are_truncated_in_evaluation_as_in_training():
    items = [*pair("same", "123>", "4567", "4568"), *pair("kept", "1>", "2", "3")]
    evaluator = PreferenceEvaluator(reward_model(), items, rm_config(max_seq_len=7))
    assert evaluator.num_pairs == 1
    assert evaluator.measure()["num_pairs"] == 1


# --- errors


def test_a_pair_with_a_score_that_is_not_finite_is_named_and_the_weights_do_not_change():
    items = sorted_pairs(3)
    model = reward_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = float("inf")
    items[2].input_ids = [200, *items[2].input_ids[1:]]
    before = weights_of(model)
    trainer = trainer_of(items, model=model)
    with pytest.raises(NonFiniteError, match="weights were not finite before"):
        trainer.train_step_sync()
    assert_same_tensors(
        {k: v for k, v in weights_of(model).items() if "embed" not in k}, {k: v for k, v in before.items() if "embed" not in k}
    )


def test_the_pair_whose_loss_is_not_finite_is_named():
    class Breaks(BradleyTerryLoss):
        def compute(self, logits, batch, *, shared=None):
            loss, stats = super().compute(logits, batch, shared=shared)
            return loss * (float("nan") if "p1" in batch["meta"]["pair_id"] else 1.0), stats

    trainer = trainer_of(sorted_pairs(3), algo=RLAlgorithm("breaks", ConstantCredit(1.0), Breaks()))
    with pytest.raises(NonFiniteError, match=r"offending samples \(rollout/step\): pair p1\. No weight"):
        trainer.train_step_sync()


def test_the_config_is_validated_when_it_is_created():
    with pytest.raises(BudgetError, match=r"micro_token_budget \(60\) .*2 \* max_seq_len \(32\)"):
        rm_config(micro_token_budget=60)
    assert rm_config(micro_token_budget=60, rm_pair_aware=False).micro_token_budget == 60
    with pytest.raises(ConfigError, match="padding_free"):
        rm_config(packing="padding_free")
    with pytest.raises(ConfigError, match=r"rm_meta_keys .* must have label"):
        rm_config(rm_meta_keys=("pair_id", "role"))
    with pytest.raises(ConfigError, match="rm_calibration_bins"):
        rm_config(rm_calibration_bins=0)
    with pytest.raises(ConfigError, match="did you mean rm_pair_aware"):
        RMTrainerConfig(rm_pairs_aware=True)
    assert RMTrainerConfig(learning_rate=2e-5, rm_eval_thresholds=[0.1, 0.9]).lr == 2e-5


def test_the_trainer_requires_its_own_config_class():
    with pytest.raises(ConfigTypeError, match="RMTrainerConfig"):
        RMTrainer(model=reward_model(), algo=make_bradley_terry(), batch_source=ListSource([]), cfg=TrainerConfig())
    with pytest.raises(ConfigError, match="evaluator and eval_items"):
        trainer_of(evaluator=object(), eval_items=sorted_pairs(1))


def test_a_model_without_a_single_score_or_with_another_pad_token_is_refused():
    with pytest.raises(ConfigError, match=r"num_labels \(2\)"):
        trainer_of(model=reward_model(num_labels=2))
    for pad in (5, None):
        with pytest.raises(ConfigError, match=rf"pad_token_id \(0\) .*config \({pad}\)"):
            trainer_of(model=reward_model(pad_token_id=pad))


def test_samples_that_end_with_padding_cause_one_warning(caplog):
    items = sorted_pairs(2)
    trainer = trainer_of(items, model=reward_model(pad_token_id=2), config={"pad_token_id": 2})  # the end token
    with caplog.at_level(logging.WARNING):
        trainer.train_sync(2)
    assert caplog.text.count("reads their score one token earlier") == 1


def test_adapters_and_the_reward_head_are_trained_together():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(lora_config=config, config={"lr": 0.05}, eval_items=sorted_pairs(4))
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train_sync(3)
    moved = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("lora_" in name for name in moved)
    assert [name for name in moved if "lora_" not in name] == ["base_model.model.score.modules_to_save.default.weight"]
    assert trainer.evaluate()["eval_num_pairs"] == 4


def test_the_head_can_have_its_own_learning_rate():
    config = {
        "lr": 0.1,
        "weight_decay": 0.5,
        "use_differential_lr": True,
        "backbone_lr_mult": 0.2,
        "head_only_weight_decay": True,
    }
    trainer = trainer_of(config=config)
    head, rest = trainer.optimizer.param_groups
    assert [tuple(parameter.shape) for parameter in head["params"]] == [(1, 16)]
    assert (head["lr"], head["weight_decay"], rest["lr"], rest["weight_decay"]) == (0.1, 0.5, pytest.approx(0.02), 0.0)
    assert trainer.train_step_sync()["train/lr"] == 0.1
    [everything] = trainer_of().optimizer.param_groups
    assert len(everything["params"]) == len(list(trainer.model.parameters()))


def test_the_documented_methods_call_the_public_functions():
    trainer = trainer_of(config={"micro_token_budget": 64})
    items = sorted_pairs(3)
    pairs = trainer._group_pairs(items)
    assert [chosen.meta["pair_id"] for chosen, _ in pairs] == ["p0", "p1", "p2"]
    assert sum(map(len, trainer._split_pairs_by_token_budget(pairs))) == 6
    assert len(trainer._split_pairs_by_token_budget(pairs, 1024, 256)) == 1
    assert len(trainer._split_pairs_by_token_budget(pairs, micro_token_budget=40, max_seq_len=20)) == 3
