"""The learning rate at each step, by hand."""

import math

import pytest
from training_samples import cpu_config

from ludic.errors import ConfigError
from ludic.training import LearningRateSchedule, TrainerConfig
from ludic.training.loop.schedule import RunSchedule


def factors(steps, **options):
    schedule = LearningRateSchedule(**options)
    return [schedule.factor(step) for step in range(steps)]


def test_without_a_scheduler_type_the_learning_rate_is_constant():
    assert factors(3) == [1.0, 1.0, 1.0]


def test_warm_up_starts_above_zero_and_ends_at_one():
    assert factors(5, kind="constant_with_warmup", warmup_steps=4, total_steps=10) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(5, kind="constant", warmup_steps=4, total_steps=10) == [1.0] * 5


def test_linear_falls_to_the_floor_and_stays():
    # after 2 of 6 steps: p = 0, 1/4, 2/4, 3/4, 1, 1; 0.2 + 0.8 * (1 - p)
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert factors(8, kind="linear", warmup_steps=2, total_steps=6, min_ratio=0.2) == pytest.approx(expected)


def test_cosine_is_halfway_down_at_half_time():
    # p = 0, 1/4, 1/2, 3/4, 1: (1 + cos(pi p)) / 2
    root = math.sqrt(0.5)
    expected = [1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0]
    assert factors(5, kind="cosine", total_steps=4) == pytest.approx(expected)


def test_wsd_is_stable_until_its_last_steps():
    # 8 of 10 steps at 1, then p = 0, 1/2, 1: 0.2 + 0.8 * (1 - p)
    expected = [0.5, *[1.0] * 8, 0.6, 0.2, 0.2]
    options = {"kind": "wsd", "warmup_steps": 2, "total_steps": 10, "min_ratio": 0.2}
    assert factors(12, **options, decay_ratio=0.2) == pytest.approx(expected)
    assert factors(12, **options, decay_ratio=1.0) == factors(12, **{**options, "kind": "linear"})  # nothing is stable
    cfg = TrainerConfig(lr_scheduler_type="wsd", decay_ratio=0.3)
    assert LearningRateSchedule.from_config(cfg, 10).factor(8) == pytest.approx(2 / 3)  # p = 1/3


def test_warmup_steps_override_warmup_ratio():
    cfg = TrainerConfig(lr_scheduler_type="linear", warmup_ratio=0.5)
    assert LearningRateSchedule.from_config(cfg, 10).warmup_steps == 5
    cfg = TrainerConfig(lr_scheduler_type="linear", warmup_ratio=0.5, warmup_steps=2)
    assert LearningRateSchedule.from_config(cfg, 10).warmup_steps == 2
    assert LearningRateSchedule.from_config(cfg, None).total_steps == 1_000_000


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="lr_scheduler_type"):
        LearningRateSchedule("step")
    with pytest.raises(ConfigError, match="total_training_steps"):
        LearningRateSchedule("linear", total_steps=0)


def test_the_first_train_call_sets_the_length_of_a_run_without_one():
    schedule = RunSchedule(cpu_config(lr_scheduler_type="linear"), None)
    schedule.begin(4)
    schedule.begin(100)
    assert [schedule.factor(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_an_explicit_or_resumed_length_does_not_change():
    explicit = RunSchedule(cpu_config(lr_scheduler_type="linear"), 4)
    explicit.begin(100)
    resumed = RunSchedule(cpu_config(lr_scheduler_type="linear"), None)
    resumed.resume(4)
    resumed.begin(100)
    assert explicit.factor(1) == resumed.factor(1) == 0.75
    assert resumed.state_dict(1) == {"last_step": 1, "total_steps": 4, "warmup_steps": 0}
