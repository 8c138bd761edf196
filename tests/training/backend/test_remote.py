"""A backend whose model is not in the trainer's process, so that everything goes through
`TrainingBackend`."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from preference_samples import reward_model, rm_config, sorted_pairs
from training_samples import DrawingSource, ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of

from ludic.errors import ConfigError
from ludic.training import CheckpointConfig, RMTrainer, TorchBackend, Trainer, TrainFuture, make_bradley_terry, make_grpo
from ludic.training.backend import BackendBase
from ludic.training.evaluators.held_out import HeldOutLoss

ALGO = make_grpo(group_size=4)


class RemoteBackend:
    """Has exactly the members of `TrainingBackend`. Only its thread has access to the model."""

    def __init__(self, make_model, cfg, algo=ALGO):
        self._thread = ThreadPoolExecutor(1)
        self._there = self._thread.submit(lambda: TorchBackend(make_model(), cfg, algo=algo)).result()

    def _ask(self, operation, *args, **options):
        future = TrainFuture(operation)

        def answer():
            try:
                future.set_result(getattr(self._there, operation)(*args, **options).wait())
            except Exception as error:
                future.set_exception(error)

        self._thread.submit(answer)
        return future

    def forward_backward(self, batch, *, totals=None):
        return self._ask("forward_backward", batch, totals=totals)

    def optim_step(self, *, lr_factor=1.0):
        return self._ask("optim_step", lr_factor=lr_factor)

    def forward_logprobs(self, batch, *, temperature=None, top_p=1.0):
        return self._ask("forward_logprobs", batch, temperature=temperature, top_p=top_p)

    def forward_scores(self, batch, *, score_type="reward"):
        return self._ask("forward_scores", batch, score_type=score_type)

    def export_weights(self, *, param_filter=None):
        return self._ask("export_weights", param_filter=param_filter)

    def save(self, path, *, optimizer=True):
        return self._ask("save", path, optimizer=optimizer)

    def load(self, path, *, optimizer=True):
        return self._ask("load", path, optimizer=optimizer)

    def snapshot_weights(self):
        return self._ask("snapshot_weights")

    def restore_weights(self, snapshot):
        return self._ask("restore_weights", snapshot)

    def weights(self):
        """For the tests; no trainer calls it."""
        return weights_of(self._there.model)


class Publisher:
    def __init__(self):
        self.versions = {}

    def publish(self, weights, version=None):
        self.versions[version] = {name: weight.clone() for name, weight in weights.items()}


def make_trainer(model, backend, folder=None, *, source=None, resume_from=None, evaluator=None, **config):
    return Trainer(
        model=model,
        algo=ALGO,
        batch_source=source or ListSource(sorting_items(8), sorting_items(8, seed=1)),
        publisher=Publisher(),
        cfg=cpu_config(**config),
        backend=backend,
        evaluator=evaluator,
        checkpoint_config=None if folder is None else CheckpointConfig(folder, every_n_steps=1),
        resume_from=resume_from,
    )


def test_a_remote_model_learns_the_same_as_a_local_one(tmp_path):
    model = tiny_model()
    here = make_trainer(model, None, tmp_path / "here", evaluator=HeldOutLoss(model, sorting_items(4), cpu_config()))
    backend = RemoteBackend(tiny_model, cpu_config())
    there = make_trainer(None, backend, tmp_path / "there", evaluator=HeldOutLoss(backend, sorting_items(4), cpu_config()))
    for trainer in (here, there):
        trainer.train_sync(2)
    assert_same_tensors(backend.weights(), weights_of(model))
    assert there.eval_sync() == here.eval_sync()
    for version in (1, 2):
        assert_same_tensors(there.publisher.versions[version], here.publisher.versions[version])
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        folders = [tmp_path / place / "step_000002" for place in ("here", "there")]
        assert folders[0].joinpath(name).read_bytes() == folders[1].joinpath(name).read_bytes()


def test_a_run_with_a_remote_model_resumes_as_if_it_had_not_stopped(tmp_path):
    def start(seed, **options):
        random.seed(seed), torch.manual_seed(seed)
        backend = RemoteBackend(lambda: tiny_model(seed), cpu_config())
        evaluator = HeldOutLoss(backend, sorting_items(4, seed=9), cpu_config())
        trainer = make_trainer(
            None, backend, tmp_path, source=DrawingSource(), evaluator=evaluator, eval_every_n_steps=1, **options
        )
        return trainer, backend

    whole, backend = start(0)
    whole.train_sync(3)
    expected, evaluation = backend.weights(), whole.last_eval
    resumed, backend = start(1, resume_from=2)
    assert resumed.current_step == 2
    resumed.train_sync(1)
    assert_same_tensors(backend.weights(), expected)
    assert resumed.last_eval == evaluation


@pytest.mark.parametrize("on_disk", [False, True])
def test_early_stopping_restores_the_best_weights_of_a_remote_model(tmp_path, on_disk):
    backend = RemoteBackend(tiny_model, cpu_config())

    class Worsening:
        async def eval(self, **_):
            step = trainer.current_step
            weights_by_step[step] = {name: weight.clone() for name, weight in backend.weights().items()}
            return [], {"loss": float(step)}

    weights_by_step = {}
    folder = tmp_path if on_disk else None
    trainer = make_trainer(None, backend, folder, evaluator=Worsening(), eval_every_n_steps=1, early_stopping_patience=2)
    trainer.train_sync(9)
    assert trainer.current_step == 3
    assert_same_tensors(backend.weights(), weights_by_step[1])
    assert any((weights_by_step[1][name] != weight).any() for name, weight in weights_by_step[3].items())


def test_a_remote_reward_model_is_trained_and_evaluated():
    metrics = []
    for remote in (False, True):
        algo, cfg = make_bradley_terry(), rm_config(prefix_sharing="off")  # a remote backend has separate rows
        trainer = RMTrainer(
            model=None if remote else reward_model(),
            algo=algo,
            batch_source=ListSource(sorted_pairs(4)),
            cfg=cfg,
            eval_items=sorted_pairs(5, seed=2),
            backend=RemoteBackend(reward_model, cfg, algo) if remote else None,
        )
        trainer.train_sync(1)
        metrics.append((trainer.evaluate(), trainer.evaluate(sorted_pairs(3, seed=4)), trainer.eval_sync()["metrics"]))
    assert metrics[0] == metrics[1]


def test_a_backend_that_derives_from_the_base_class_is_told_of_each_step():
    class Counting(RemoteBackend, BackendBase):
        steps = ()

        def note_step(self, step):
            self.steps += (step,)

    backend = Counting(tiny_model, cpu_config())
    make_trainer(None, backend).train_sync(2)
    assert backend.steps == (1, 2)


def test_features_that_need_a_local_model_are_refused_with_a_reason():
    with pytest.raises(ConfigError, match="no model in this process; pass model="):
        make_trainer(None, None)
    trainer = make_trainer(None, RemoteBackend(tiny_model, cpu_config()))
    assert trainer.optimizer is None
    with pytest.raises(ConfigError, match="no model in this process"):
        _ = trainer.model
