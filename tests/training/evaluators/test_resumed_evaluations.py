"""A run that was killed around an evaluation, or stopped by one, resumes to the same evaluations,
the same end and the same weights."""

import random

import pytest
import torch
from training_samples import DrawingSource, assert_same_tensors, cpu_config, tiny_model, weights_of

from ludic.training import CheckpointConfig, CheckpointManager, Trainer, make_grpo

STEPS, EVERY, END = 10, 2, 8
LOSSES = {0: 2.0, 2: 1.0, 4: 0.5, 6: 0.7, 8: 0.6, 10: 0.1}
"""By step. The second evaluation in a row without improvement, at step 8, is the last."""


class Killed(BaseException):
    """Like SIGKILL, it is not caught by anything."""


class ScriptedEvaluator:
    """Evaluations with the losses above and a checksum of the weights. Also draws from the random
    generators."""

    def __init__(self, kill_at=None):
        self.trainer, self.kill_at, self.evaluations = None, kill_at, {}

    async def eval(self, **_):
        step = self.trainer.current_step
        if step == self.kill_at:
            raise Killed
        torch.rand(3), random.random()
        weights = sum(float(weight.double().sum()) for weight in weights_of(self.trainer.model).values())
        self.evaluations[step] = {"loss": LOSSES[step], "weights": weights}
        return [], self.evaluations[step]


class KilledManager(CheckpointManager):
    """The process dies after the checkpoint of a step is on disk."""

    kill_at = None

    def save_backend(self, *args, step, **options):
        super().save_backend(*args, step=step, **options)
        if step == self.kill_at:
            raise Killed


def run(folder, every_checkpoint, *, kill=None, at=None, resumed=False):
    """(trainer, evaluations by step). `kill` is the point in step `at` at which the process
    dies."""
    evaluator = ScriptedEvaluator(kill_at=at if kill == "before the evaluation" else None)
    manager = KilledManager(CheckpointConfig(folder, every_n_steps=every_checkpoint))
    manager.kill_at = at if kill == "after the checkpoint" else None
    has_checkpoint = resumed and any(folder.glob("step_*"))
    torch.manual_seed(99 if has_checkpoint else 7)
    random.seed(99 if has_checkpoint else 7)
    trainer = Trainer(
        model=tiny_model(1 if has_checkpoint else 0, attention_dropout=0.2),
        algo=make_grpo(group_size=4),
        batch_source=DrawingSource(),
        cfg=cpu_config(eval_every_n_steps=EVERY, early_stopping_patience=2, lr_scheduler_type="cosine"),
        checkpointer=manager,
        resume_from=manager.find() if has_checkpoint else None,
        evaluator=evaluator,
        total_training_steps=STEPS,
    )
    evaluator.trainer = trainer
    torch.manual_seed(7) if not has_checkpoint else None

    def after_evaluation(stats):
        if kill == "after the evaluation" and stats["eval/step"] == at:
            raise Killed

    try:
        trainer.train_sync(STEPS - trainer.current_step, eval_log_fn=after_evaluation)
    except Killed:
        return None, evaluator.evaluations
    return trainer, evaluator.evaluations


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    trainer, evaluations = run(tmp_path_factory.mktemp("whole"), 1)
    assert trainer.current_step == END
    assert list(evaluations) == [2, 4, 6, 8]
    return evaluations, weights_of(trainer.model)


KILLS = [
    *(("after the checkpoint", step) for step in (1, 2, 6, 7, 8)),
    *((kill, step) for kill in ("before the evaluation", "after the evaluation") for step in (2, 6, 8)),
    ("never, the end was the evaluation's", None),
]


@pytest.mark.parametrize("every_checkpoint", [1, 3, 4])
@pytest.mark.parametrize(("kill", "at"), KILLS)
def test_a_run_killed_around_an_evaluation_resumes_to_the_same_run(whole_run, tmp_path, kill, at, every_checkpoint):
    evaluations, weights = whole_run
    trainer, before = run(tmp_path, every_checkpoint, kill=kill, at=at)
    written = at is not None and (
        at % every_checkpoint == 0 or at == END
    )  # a run that ends by early stopping writes a checkpoint
    assert (trainer is None) == (at is not None and (kill != "after the checkpoint" or written))
    trainer, after = run(tmp_path, every_checkpoint, resumed=True)
    assert trainer.current_step == END
    assert before.items() <= evaluations.items()  # with equal weights
    assert after.items() <= evaluations.items()
    assert before | after == evaluations
    repeated = [step for step in before.keys() & after.keys() if step % every_checkpoint == 0]
    assert repeated == ([at] if kill == "after the evaluation" and at % every_checkpoint == 0 else [])
    assert_same_tensors(weights_of(trainer.model), weights)


def test_without_a_kill_each_step_is_evaluated_once(tmp_path):
    """Neither training in several calls nor resuming from a checkpoint written after the evaluation
    repeats an evaluation."""
    trainer, _ = run(tmp_path, 0)
    trainer.save_checkpoint()
    trainer.evaluator.evaluations.clear()
    trainer.train_sync(1)
    resumed, after = run(tmp_path, 0, resumed=True)
    assert (trainer.evaluator.evaluations, after) == ({}, {})
    assert (trainer.current_step, resumed.current_step) == (END, END)


def test_a_stopped_run_continues_with_more_patience(tmp_path):
    trainer, _ = run(tmp_path, 0)
    trainer.cfg.early_stopping_patience = 3
    trainer.train_sync(2)
    assert trainer.current_step == STEPS
    assert trainer.early_stopping.stale == 0


def test_the_evaluation_at_the_start_is_not_repeated_on_resumption(tmp_path):
    def trainer_of(**options):
        evaluator = ScriptedEvaluator()
        trainer = Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(),
            cfg=cpu_config(eval_at_start=True),
            checkpoint_config=CheckpointConfig(tmp_path),
            evaluator=evaluator,
            **options,
        )
        evaluator.trainer = trainer
        return trainer

    trainer = trainer_of()
    trainer.train_sync(0)
    trainer.save_checkpoint()
    resumed = trainer_of(resume_from=0)
    resumed.train_sync(0)
    assert (list(trainer.evaluator.evaluations), list(resumed.evaluator.evaluations)) == ([0], [])
