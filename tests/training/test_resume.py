"""A killed and resumed run equals the uninterrupted run: same losses and weights, bit for bit."""

import copy
import json
import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from training_samples import DrawingSource, assert_same_tensors, cpu_config, tiny_model, weights_of, without_times

from ludic.training import CheckpointConfig, LoraSettings, Trainer, make_grpo
from ludic.training.rng import preserved_rng, rng_state, set_rng_state

STEPS = 5


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def trainer_of(folder, **options):
    cfg = cpu_config(
        minibatches_per_batch=2, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, **options.pop("config", {})
    )
    dtype = getattr(torch, options.pop("dtype", "float32"))
    return Trainer(
        model=tiny_model(options.pop("model_seed", 0), attention_dropout=0.2).to(dtype),
        algo=make_grpo(group_size=4),
        batch_source=DrawingSource(share=cfg.prefix_sharing != "off"),
        cfg=cfg,
        checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=STEPS),
        total_training_steps=STEPS,
        **options,
    )


def whole_run_of(folder, sharing):
    """The uninterrupted run: its checkpoints, the statistics of each step and the final weights."""
    trainer = trainer_of(folder, config={"prefix_sharing": sharing})
    seed_everything(7)
    stats = [without_times(trainer.train_step_sync()) for _ in range(STEPS)]
    return folder, stats, weights_of(trainer.model)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return whole_run_of(tmp_path_factory.mktemp("whole"), "off")


@pytest.fixture(scope="module")
def whole_run_of_trees(tmp_path_factory):
    return whole_run_of(tmp_path_factory.mktemp("trees"), "auto")


@pytest.mark.parametrize("killed_after", range(1, STEPS))
def test_resuming_after_any_step_gives_the_same_losses_and_weights(whole_run, killed_after):
    folder, stats, weights = whole_run
    seed_everything(99)  # another process has other generator states and other initial weights
    trainer = trainer_of(folder, resume_from=killed_after, model_seed=1, config={"prefix_sharing": "off"})
    assert trainer.current_step == killed_after
    rest = [without_times(trainer.train_step_sync()) for _ in range(STEPS - killed_after)]
    assert rest == stats[killed_after:]
    assert_same_tensors(weights_of(trainer.model), weights)


@pytest.mark.parametrize("killed_after", range(1, STEPS))
def test_resuming_a_run_on_prefix_trees_gives_the_same_losses_and_weights(whole_run_of_trees, killed_after):
    """Attention drops connections at random here, in trees as in rows of their own."""
    folder, stats, weights = whole_run_of_trees
    assert all(each["perf/sharing_factor"] > 1.2 for each in stats)
    seed_everything(99)
    trainer = trainer_of(folder, resume_from=killed_after, model_seed=1, config={"prefix_sharing": "auto"})
    rest = [without_times(trainer.train_step_sync()) for _ in range(STEPS - killed_after)]
    assert rest == stats[killed_after:]
    assert_same_tensors(weights_of(trainer.model), weights)


HAS_8BIT = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.mark.parametrize(
    ("optimizer", "dtype", "lora"),
    [
        ("muon", "float32", True),
        ("muon", "bfloat16", False),
        ("adafactor", "float32", False),
        ("adamw", "float16", False),  # with a scale of the loss
        ("own_optimizers:make", "float32", False),
        pytest.param("adamw8bit", "bfloat16", False, marks=HAS_8BIT),
    ],
)
def test_a_run_of_every_optimizer_resumes(optimizer, dtype, lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_optimizers.py").write_text(
        "import torch\n"
        "def make(named, cfg):\n"
        "    groups = [{'params': [p for n, p in named if n.endswith('bias') == part]} for part in (True, False)]\n"
        "    return torch.optim.RMSprop(groups, lr=cfg.lr, momentum=0.9)\n"
    )
    options = {"config": {"optimizer": optimizer}, "dtype": dtype, "lora_config": LoraSettings(rank=2) if lora else None}
    seed_everything(7)
    whole = trainer_of(tmp_path / "run", **copy.deepcopy(options))
    stats = [without_times(whole.train_step_sync()) for _ in range(4)]
    seed_everything(99)
    rest = trainer_of(tmp_path / "run", resume_from=2, model_seed=0 if lora else 1, **options)
    assert [without_times(rest.train_step_sync()) for _ in range(2)] == stats[2:]
    assert_same_tensors(weights_of(rest.model), weights_of(whole.model))


def test_the_run_depends_on_the_random_generators(whole_run, tmp_path):
    """Otherwise the test above could not fail when their state is lost."""
    _, stats, _ = whole_run
    trainer = trainer_of(tmp_path)
    seed_everything(8)
    assert without_times(trainer.train_step_sync())["train/loss"] != stats[0]["train/loss"]


def test_resume_accepts_a_step_a_string_of_digits_and_a_path(whole_run):
    folder, *_ = whole_run
    for where in (2, "2", folder / "step_000002", str(folder / "step_000002")):
        assert trainer_of(folder, resume_from=where).current_step == 2


def test_the_schedule_continues_as_in_the_uninterrupted_run(tmp_path):
    """Without a total, the first `train` call sets the length; the call after resuming must not
    stretch it."""

    def run(folder, steps, **options):
        trainer = Trainer(
            model=tiny_model(),
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(),
            cfg=cpu_config(lr_scheduler_type="linear"),
            checkpoint_config=CheckpointConfig(folder, every_n_steps=1, max_to_keep=9),
            **options,
        )
        rates = []
        trainer.train_sync(steps, log_fn=lambda stats: rates.append(stats["train/lr"]))
        return rates

    rates = run(tmp_path, 4)
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert run(tmp_path, 2, resume_from=2) == rates[2:]


def test_an_evaluation_between_two_steps_does_not_change_training(tmp_path):
    """The evaluator draws from the random generators, which must not change what training draws
    next."""

    class DrawingEvaluator:
        async def eval(self, **_):
            torch.rand(3), random.random(), np.random.rand()
            return [], {"accuracy": 0.5}

    weights = []
    for every in (None, 1):
        seed_everything(3)
        options = {"evaluator": DrawingEvaluator(), "config": {"eval_every_n_steps": every}}
        trainer = trainer_of(tmp_path / str(every), **options)
        seed_everything(3)
        trainer.train_sync(2)
        weights.append(weights_of(trainer.model))
    assert_same_tensors(*weights)


def test_generator_states_survive_json_and_are_restored():
    seed_everything(1)
    random.gauss(0, 1), np.random.randn()  # both generators cache a second value for the next call
    state = json.loads(json.dumps(rng_state()))
    values = [random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(3).tolist()]
    set_rng_state(state)
    assert [random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(3).tolist()] == values


def test_preserved_generator_states_are_restored_after_an_error():
    seed_everything(1)
    expected = torch.rand(1).item()
    seed_everything(1)
    with pytest.raises(KeyError), preserved_rng():
        {}[torch.rand(5).sum()]
    assert torch.rand(1).item() == expected
