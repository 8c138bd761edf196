"""Keeping the best checkpoint and stopping by a metric, in runs that are killed and resumed."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from training_samples import DrawingSource, ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError
from ludic.training import CheckpointConfig, KeepBest, OffPolicyGuard, StopOnMetric, Trainer, make_grpo, make_sft
from ludic.training.backend.protocol import BackendBase
from ludic.training.callbacks.by_metric import Metric

LOSSES = {2: 1.0, 4: 0.5, 6: 0.7, 8: 0.6, 10: 0.55, 12: 0.1}
"""By step. The third evaluation in a row that is not better, at step 10, is the last."""
END, BEST = 10, 4


class Killed(BaseException):
    """Like SIGKILL, it is not caught by anything."""


class Evaluator:
    def __init__(self, kill_at):
        self.trainer, self.kill_at = None, kill_at

    async def eval(self, **_):
        if self.trainer.current_step == self.kill_at:
            raise Killed
        return [], {"loss": LOSSES[self.trainer.current_step]}


def run(folder, every, *, kill_at=None, resumed=False):
    torch.manual_seed(99 if resumed else 7)
    evaluator = Evaluator(kill_at)
    callbacks = [KeepBest("loss"), StopOnMetric("eval_loss", patience=3)]
    trainer = Trainer(
        model=tiny_model(int(resumed), attention_dropout=0.2),
        algo=make_grpo(group_size=4),
        batch_source=DrawingSource(4),
        cfg=cpu_config(eval_every_n_steps=2, lr_scheduler_type="cosine"),
        checkpoint_config=CheckpointConfig(folder, every_n_steps=every, max_to_keep=1),
        resume_from=max(folder.glob("step_*")) if resumed else None,
        evaluator=evaluator,
        total_training_steps=12,
        callbacks=callbacks,
    )
    evaluator.trainer = trainer
    if not resumed:
        torch.manual_seed(7)
        __import__("random").seed(7)
    try:
        trainer.train_sync(12 - trainer.current_step)
    except Killed:
        return None, callbacks
    return trainer, callbacks


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(folder, 2)


def states(callbacks):
    return [callback.state_dict() for callback in callbacks]


def test_the_run_ends_by_patience_and_keeps_the_best_checkpoint_and_the_last(whole):
    folder, trainer, callbacks = whole
    assert trainer.current_step == END
    assert re.search(r"eval/loss .*0\.5 for 3 evaluations", trainer.callbacks.stop.reason)
    assert states(callbacks) == [{"best": 0.5, "best_step": BEST}, {"best": 0.5, "stale": 3}]
    assert sorted(path.name for path in folder.glob("step_*")) == [f"step_{step:06d}" for step in (BEST, END)]
    named = json.loads((folder / "best.json").read_text())
    assert named == {"step": BEST, "checkpoint": "step_000004", "metric": "eval/loss", "value": 0.5}


@pytest.mark.parametrize(("every", "kill_at"), [(2, 6), (2, 10), (5, 6), (5, 10)])
def test_a_killed_run_resumes_to_the_same_end_bit_for_bit(whole, tmp_path, every, kill_at):
    _, uninterrupted, callbacks = whole
    assert run(tmp_path, every, kill_at=kill_at)[0] is None
    trainer, again = run(tmp_path, every, resumed=True)
    assert trainer.current_step == END
    assert trainer.callbacks.stop == uninterrupted.callbacks.stop
    assert states(again) == states(callbacks)
    assert_same_tensors(weights_of(trainer.model), weights_of(uninterrupted.model))
    assert {"step_000004", "step_000010"} <= {path.name for path in tmp_path.glob("step_*")}
    resumed, _ = run(tmp_path, every, resumed=True)
    assert resumed.current_step == END


def test_a_best_whose_checkpoint_is_gone_is_forgotten(tmp_path, caplog):
    """As after a fall back to a checkpoint before the one for which the best was deleted."""
    assert run(tmp_path, 2, kill_at=8)[0] is None
    shutil.rmtree(tmp_path / "step_000004")
    _, (keep, _) = run(tmp_path, 2, resumed=True)
    assert re.search("checkpoint, of step 4, .*damaged", caplog.text)
    assert (keep.best, keep.best_step) == (0.55, 10)
    named = json.loads((tmp_path / "best.json").read_text())
    assert named["checkpoint"] == "step_000010"
    assert (tmp_path / "step_000010").is_dir()


def values_until_stop(callback, values):
    """How many values it saw until it asked to stop, and what for; None if it did not."""
    from types import SimpleNamespace

    for number, value in enumerate(values, start=1):
        asked = []
        stats = {callback.metric.key: value}
        event = SimpleNamespace(step=number, stats=stats, stop=asked.append)
        (callback.on_step if callback.metric.is_of_steps else callback.on_evaluation)(event)
        if asked:
            return number, asked[0]
    return None


def test_a_threshold_stops_where_it_is_reached():
    assert values_until_stop(StopOnMetric("sampled_reward", at=0.9), [0.5, 0.89, 0.9]) == (
        3,
        "eval/sampled_reward (0.9) reached 0.9",
    )
    assert values_until_stop(StopOnMetric("train/loss", at=0.1), [0.5, 0.2, 0.05])[0] == 3
    assert values_until_stop(StopOnMetric("train/loss", at=0.1), [float("nan")] * 4) is None


def test_patience_counts_values_that_are_not_better_by_min_delta():
    gains = [1.0, 0.996, 0.992, 0.988]  # each 0.004 better than the one before
    assert values_until_stop(StopOnMetric("loss", patience=2), gains) is None
    assert values_until_stop(StopOnMetric("loss", patience=2, min_delta=0.01), gains)[0] == 3
    assert values_until_stop(StopOnMetric("loss", patience=2), [float("nan")] * 2)[1].startswith("eval/loss was never a number")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StopOnMetric("loss"), "never stops"),
        (lambda: StopOnMetric("loss", patience=0), r"patience \(0\)"),
        (lambda: StopOnMetric("loss", at=1, min_delta=-1), r"min_delta \(-1\)"),
        (lambda: StopOnMetric("length", patience=1), "set mode to min or max"),
        (lambda: KeepBest("loss", mode="max"), r"mode \(max\)"),
        (lambda: KeepBest("loss", mode="best"), r"mode \('best'\)"),
        (lambda: KeepBest("train/loss"), "compares evaluations"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("name", ["eval_seed/pass_at_n", "eval_seed/pred_acc"])
def test_the_metrics_of_seeds_are_read_under_their_own_prefix(name):
    """Regression test: they were looked for as eval/seed/..., so that every evaluation failed."""
    metric = Metric(name)
    assert (metric.key, metric.smaller_is_better) == (name, False)
    assert metric.read({name: 0.25, "eval/loss": 1.0}) == 0.25


@pytest.mark.parametrize(("every", "has_evaluator"), [(None, True), (2, False)])
@pytest.mark.parametrize("callback", [KeepBest("loss"), StopOnMetric("eval/loss", patience=1)])
def test_a_metric_of_evaluations_is_refused_where_there_are_none(tmp_path, callback, every, has_evaluator):
    """Regression test: the callback did nothing, and nothing said so."""
    with pytest.raises(ConfigError, match=r"'.* eval/loss' reads (eval/)?loss; set trainer.eval_every_n_steps"):
        Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(4),
            cfg=cpu_config(eval_every_n_steps=every),
            checkpoint_config=CheckpointConfig(tmp_path),
            evaluator=Evaluator(None) if has_evaluator else None,
            callbacks=[callback],
        )
    StopOnMetric("train/loss", at=0.0)  # of steps, which are always there


def test_a_metric_that_the_evaluation_lacks_is_an_error_with_those_that_it_has():
    with pytest.raises(ConfigError, match="must be one of the evaluation's: eval/loss"):
        Metric("accuracy").read({"eval/loss": 1.0})
    assert Metric("train/loss").read({"train/step": 1.0}) is None


def guarded(*callbacks, steps=3, folder=None, resume=None, algo=None, source=None, **config):
    """A trainer and the statistics of its steps, on samples whose log-probabilities are made up, so
    that `mismatch/ess` is far below 1."""
    torch.manual_seed(7)
    __import__("random").seed(7)
    stats = []
    trainer = Trainer(
        model=tiny_model(),
        algo=algo or make_grpo(group_size=4),
        batch_source=source or DrawingSource(8),
        cfg=cpu_config(**config),
        checkpoint_config=None if folder is None else CheckpointConfig(folder, every_n_steps=1, max_to_keep=9),
        resume_from=resume,
        callbacks=callbacks,
    )
    trainer.train_sync(steps - trainer.current_step, log_fn=stats.append)
    return trainer, stats


def test_a_skipped_batch_changes_neither_weights_nor_optimizer_and_is_counted():
    trainer, stats = guarded(OffPolicyGuard(1.0, action="skip"), minibatches_per_batch=2)
    assert_same_tensors(weights_of(trainer.model), weights_of(tiny_model()))
    assert not trainer.optimizer.state
    assert [each["guard/skipped"] for each in stats] == [1, 2, 3]
    assert [(each["guard/rate"], each["train/optimizer_steps"], each["train/grad_norm"]) for each in stats] == [(0, 0, 0)] * 3
    assert all(0 < each["mismatch/ess"] < 1 and "train/lr" not in each for each in stats)


def test_a_guard_below_every_batch_changes_nothing():
    (free, plain), (held, stats) = guarded(), guarded(OffPolicyGuard(1e-9))
    assert_same_tensors(weights_of(held.model), weights_of(free.model))
    assert [each["train/loss"] for each in stats] == [each["train/loss"] for each in plain]
    assert (stats[-1]["guard/rate"], stats[-1]["guard/lowered"]) == (1, 0)


def test_a_lowered_rate_is_that_of_the_schedule_times_the_share_of_the_threshold():
    _, stats = guarded(OffPolicyGuard(0.9), lr=1e-2)
    assert all(each["mismatch/ess"] < 0.9 for each in stats)
    assert [each["train/lr"] for each in stats] == pytest.approx([1e-2 * each["mismatch/ess"] / 0.9 for each in stats])
    assert stats[-1]["guard/lowered"] == 3


@pytest.mark.parametrize("config", [{"micro_token_budget": 64}, {"packing": "padding_free"}, {"prefix_sharing": "off"}])
def test_the_guard_sees_the_same_however_the_batch_is_divided(config):
    (_, whole), (_, split) = (guarded(OffPolicyGuard(0.9), steps=1, **each) for each in ({"micro_token_budget": 512}, config))
    assert split[0]["guard/rate"] == pytest.approx(whole[0]["guard/rate"], rel=1e-4)
    assert 0 < whole[0]["guard/rate"] < 1


def test_low_batches_in_a_row_end_the_run_also_across_a_resume(tmp_path):
    trainer, _ = guarded(OffPolicyGuard(1.0, action="stop", patience=2), steps=5, folder=tmp_path)
    assert trainer.current_step == 2
    assert re.search(r"mismatch/ess .*below 1 for 2 batches", trainer.callbacks.stop.reason)
    callback = OffPolicyGuard(1.0, action="stop", patience=2)
    resumed, stats = guarded(callback, steps=5, folder=tmp_path, resume=tmp_path / "step_000001")
    assert resumed.current_step == 2
    assert stats[0]["guard/skipped"] == 2
    assert_same_tensors(weights_of(resumed.model), weights_of(trainer.model))


def test_a_guard_without_anything_to_read_ends_the_run():
    items = [replace(item, attachments=replace(item.attachments, actor_logps=None)) for item in sorting_items(4)]
    trainer, _ = guarded(OffPolicyGuard(0.5), algo=make_sft(), source=ListSource(items))
    assert trainer.current_step == 1
    assert "no log-probabilities of the sampler" in trainer.callbacks.stop.reason
    with pytest.raises(ConfigError, match="BackendBase cannot skip a batch"):
        BackendBase().drop_gradient()


@pytest.mark.parametrize("wrong", [{"ess": 0.0}, {"ess": 1.5}, {"action": "wait"}, {"patience": 0}])
def test_settings_of_a_guard_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OffPolicyGuard(**{"ess": 0.5, **wrong})
