"""When a run stops early, in which direction its metric improves, and that it ends with its best
weights."""

import math
import random

import pytest
import torch
from training_samples import DrawingSource, assert_same_tensors, cpu_config, tiny_model, weights_of

from ludic.errors import ConfigError
from ludic.training import CheckpointConfig, LoraSettings, Trainer, make_grpo
from ludic.training.backend.torch import TorchBackend
from ludic.training.loop.early_stopping import BestWeights, EarlyStopping, metric_direction


class ScriptedEvaluator:
    """One evaluation per step with these losses. Records the weights at each."""

    def __init__(self, *losses):
        self.losses, self.trainer, self.weights = losses, None, {}

    async def eval(self, **_):
        step = self.trainer.current_step
        self.weights[step] = {name: tensor.clone() for name, tensor in weights_of(self.trainer.model).items()}
        return [], {"loss": self.losses[step - 1]}


LOSSES = (0.9, 0.5, 0.6, 0.7, 0.1, 0.2)
"""The second loss is the best. With a patience of 2, the run ends after step 4."""


def run(*losses, folder=None, steps=6, patience=2, resume=None, **options):
    evaluator = ScriptedEvaluator(*(losses or LOSSES))
    torch.manual_seed(3), random.seed(3)
    trainer = Trainer(
        model=tiny_model(attention_dropout=0.1),
        algo=make_grpo(group_size=4),
        batch_source=DrawingSource(),
        cfg=cpu_config(lr=1e-2, eval_every_n_steps=1, early_stopping_patience=patience),
        checkpoint_config=None if folder is None else CheckpointConfig(folder, every_n_steps=1, max_to_keep=1),
        resume_from=resume,
        evaluator=evaluator,
        total_training_steps=6,
        **options,
    )
    evaluator.trainer = trainer
    trainer.train_sync(steps)
    return trainer, evaluator


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_that_stops_early_ends_with_its_best_weights(tmp_path, on_disk, lora):
    trainer, evaluator = run(folder=tmp_path if on_disk else None, lora_config=lora)
    assert (trainer.current_step, trainer.early_stopping.best_step) == (4, 2)
    assert_same_tensors(weights_of(trainer.model), evaluator.weights[2])
    different = [name for name, tensor in evaluator.weights[4].items() if not torch.equal(tensor, evaluator.weights[2][name])]
    assert different  # the best weights differ from the last ones


def test_a_run_that_reaches_its_end_can_restore_its_best_weights():
    trainer, evaluator = run(patience=9, steps=4)
    assert_same_tensors(weights_of(trainer.model), evaluator.weights[4])
    assert trainer.restore_best() == 2
    assert_same_tensors(weights_of(trainer.model), evaluator.weights[2])


def test_a_run_that_stopped_early_resumes_to_the_same_weights(tmp_path):
    ended, evaluator = run(folder=tmp_path)
    ended.save_checkpoint()  # still the state of the last step
    resumed, _ = run(folder=tmp_path, resume=4)
    assert resumed.current_step == 4
    assert_same_tensors(weights_of(resumed.model), evaluator.weights[2])
    last, _ = run(folder=tmp_path, resume=4, steps=0, patience=3)
    assert_same_tensors(weights_of(last.model), evaluator.weights[4])


def test_with_more_patience_a_stopped_run_continues_as_if_it_had_not_stopped(tmp_path):
    whole, _ = run(folder=tmp_path / "whole", patience=3)
    ended, _ = run(folder=tmp_path / "ended")
    ended.cfg.early_stopping_patience = 3
    ended.train_sync(2)
    assert (whole.current_step, ended.current_step) == (6, 6)
    assert_same_tensors(weights_of(ended.model), weights_of(whole.model))


def test_missing_best_weights_are_reported(tmp_path, caplog):
    trainer, evaluator = run(folder=tmp_path, patience=9, steps=4)
    trainer.early_stopping.best_step = 1
    assert trainer.restore_best() is None
    assert "best weights, of step 1, are missing" in caplog.text
    assert_same_tensors(weights_of(trainer.model), evaluator.weights[4])


@pytest.mark.parametrize("on_disk", [False, True])
def test_saved_best_weights_are_restored_only_for_their_step(tmp_path, on_disk):
    model = tiny_model()
    backend = TorchBackend(model, cpu_config(), algo=make_grpo(group_size=4))
    best = BestWeights(backend, tmp_path if on_disk else None)
    assert not best.restore(1)
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    best.keep(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert not best.restore(2)
    assert best.restore(1)
    assert_same_tensors(weights_of(model), before)


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("eval_loss", "min"),
        ("loss", "min"),
        ("eval_ece", "min"),
        ("eval/negative_margin_rate", "min"),
        ("eval_fpr@0.5", "min"),
        ("eval_pairwise_accuracy", "max"),
        ("greedy_accuracy", "max"),
        ("eval_sampled_reward", "max"),
        ("eval_roc_auc", "max"),
        ("eval_margin_p50", "max"),
        ("pass@4", "max"),
    ],
)
def test_the_direction_follows_from_the_metric_unless_the_mode_is_explicit(metric, better):
    wrong = {"min": "max", "max": "min"}[better]
    assert metric_direction(cpu_config(early_stopping_metric=metric)) == better
    assert metric_direction(cpu_config(early_stopping_metric=metric, early_stopping_mode=better)) == better
    with pytest.raises(ConfigError, match=f"set {better}, or leave it out"):
        metric_direction(cpu_config(early_stopping_metric=metric, early_stopping_mode=wrong))


def test_a_metric_of_unknown_direction_needs_a_mode():
    with pytest.raises(ConfigError, match=r"early_stopping_metric \(frobs\) .*early_stopping_mode .*min or max"):
        metric_direction(cpu_config(early_stopping_metric="frobs"))
    assert metric_direction(cpu_config(early_stopping_metric="frobs", early_stopping_mode="max")) == "max"


def test_a_patience_without_evaluations_is_refused():
    with pytest.raises(ConfigError, match=r"early_stopping_patience \(2\) needs evaluations"):
        Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(),
            cfg=cpu_config(early_stopping_patience=2),
        )


def test_a_first_value_of_nan_does_not_stay_the_best():
    stopping = EarlyStopping(cpu_config(early_stopping_patience=2, eval_every_n_steps=1))
    found = [stopping.update(value) for value in (math.nan, 0.5, math.nan, 0.4)]
    assert found == [(False, True), (False, True), (False, False), (False, True)]
