"""The two laws, one update at a time: numbers by hand, and what they promise at every input."""

import math

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.training.coefficients import Coefficient
from ludic.training.controllers import EntropyController, EntropySchedule, KLController, Observation
from ludic.training.controllers.entropy import check_reachable


def test_beta_follows_the_relative_distance_from_the_target():
    """KL .14 is twice the target: err = 1, beta = .1 (1 + 1 / 500). The second from the worked
    example: KL .00611612 of target .004 is err .52903089."""
    beta = Coefficient(0.1)
    KLController(beta, target=0.07, horizon=500).update(Observation(step=0, kl=0.14))
    assert float(beta) == pytest.approx(0.1002, abs=1e-15)
    beta.set(0.1)
    KLController(beta, target=0.004, horizon=500).update(Observation(step=0, kl=0.0061161235530306))
    assert float(beta) == pytest.approx(0.10010580617765152, abs=1e-15)


@given(st.floats(0, 1e6), st.floats(1e-3, 1), st.floats(1, 1000), st.floats(0.01, 2))
def test_beta_moves_towards_less_kl_above_the_target_and_by_at_most_a_step(kl, target, horizon, step_size):
    beta = Coefficient(0.5)
    KLController(beta, target=target, horizon=horizon, step_size=step_size).update(Observation(step=0, kl=kl))
    assert float(beta) > 0
    assert (float(beta) - 0.5) * (kl - target) >= 0
    assert abs(float(beta) / 0.5 - 1) <= step_size / horizon + 1e-12


@pytest.mark.parametrize("kl", [None, math.nan, math.inf])
def test_an_unknown_kl_changes_nothing(kl):
    beta = Coefficient(0.1)
    KLController(beta, target=0.07, horizon=1).update(Observation(step=0, kl=kl))
    assert float(beta) == 0.1


@pytest.mark.parametrize("off", ["target", "horizon", "step_size"])
def test_a_setting_of_0_turns_the_kl_controller_off(off):
    beta = Coefficient(0.0)
    controller = KLController(beta, **{"target": 0.1, "horizon": 10, "step_size": 1.0, off: 0})
    assert not controller.reads_kl
    controller.update(Observation(step=0, kl=3.0))
    assert float(beta) == 0


def test_settings_of_the_kl_controller_are_checked():
    with pytest.raises(ConfigError, match=r"beta \(0\) cannot leave 0"):
        KLController(Coefficient(0.0), target=0.1, horizon=10)
    for name, value in {"target": -1.0, "horizon": math.nan, "step_size": math.inf}.items():
        with pytest.raises(ConfigError, match=rf"{name} \({value}\) must be at least 0 and finite"):
            KLController(Coefficient(0.1), **{"target": 0.1, "horizon": 10, name: value})


def entropy_controller(tau, **settings):
    return EntropyController(tau, **{"target": 1.3, "lr": 0.01, "warmup_steps": 0, **settings})


def test_tau_follows_the_moving_average_of_the_entropy():
    """ema .9 * 1 + .1 * 1.2 = 1.02, log tau = log .3 + .01 (1.3 - 1.02) = log .3 + .0028."""
    tau = Coefficient(0.3)
    controller = entropy_controller(tau)
    controller.load_state_dict({"tau": 0.3, "log_tau": math.log(0.3), "ema": 1.0})
    stats = controller.update(Observation(step=1, entropy=1.2))
    assert float(tau) == pytest.approx(0.30084118, abs=1e-8)
    assert stats == pytest.approx({"weight_entropy_ema": 1.02, "weight_entropy_error": 0.28})


def test_the_worked_example_of_tau():
    """H .94954635 after an average of 1, target 1.2: .99495463 and tau .30061577."""
    tau = Coefficient(0.3)
    controller = entropy_controller(tau, target=1.2)
    controller.load_state_dict({"tau": 0.3, "log_tau": math.log(0.3), "ema": 1.0})
    stats = controller.update(Observation(step=1, entropy=0.9495463465221288))
    assert stats["weight_entropy_ema"] == pytest.approx(0.9949546346522129, abs=1e-15)
    assert float(tau) == pytest.approx(0.30061576718133437, abs=1e-15)


def test_the_first_entropy_is_the_average_and_the_schedule_scales_the_rate():
    tau = Coefficient(0.3)
    stats = entropy_controller(tau).update(Observation(step=1, entropy=1.2, lr_factor=0.5))
    assert stats["weight_entropy_ema"] == 1.2
    assert math.log(float(tau) / 0.3) == pytest.approx(0.5 * 0.01 * 0.1)


@given(st.floats(0, 2), st.integers(1, 300))
def test_tau_leaves_a_bound_at_once_when_the_error_turns(high, steps_at_the_bound):
    tau = Coefficient(0.9)
    controller = entropy_controller(tau, target=1.0, lr=0.5, most=1.0, ema_decay=0.0)
    for step in range(1, 1 + steps_at_the_bound):
        controller.update(Observation(step=step, entropy=0.0))
    assert float(tau) == 1.0
    controller.update(Observation(step=1000, entropy=1.0 + high))
    assert float(tau) == pytest.approx(math.exp(-0.5 * high))


@given(st.lists(st.floats(0, 3), min_size=1, max_size=30))
def test_tau_stays_within_its_bounds(entropies):
    tau = Coefficient(0.3)
    controller = entropy_controller(tau, lr=2.0, least=0.1, most=0.7)
    for step, entropy in enumerate(entropies):
        controller.update(Observation(step=step, entropy=entropy))
        assert 0.1 <= float(tau) <= 0.7


@pytest.mark.parametrize(("own", "of_schedule", "first"), [(-1, 3, 4), (2, 3, 3), (0, 3, 1), (-1, 0, 1)])
def test_nothing_happens_during_the_warm_up(own, of_schedule, first):
    tau = Coefficient(0.3)
    controller = entropy_controller(tau, warmup_steps=own)
    updated = [bool(controller.update(Observation(step=s, entropy=1.0, warmup_steps=of_schedule))) for s in range(6)]
    assert updated == [step >= first for step in range(6)]
    assert entropy_controller(Coefficient(0.3)).state_dict()["ema"] is None


@pytest.mark.parametrize("entropy", [None, math.nan, math.inf])
def test_an_unknown_entropy_changes_nothing(entropy):
    tau = Coefficient(0.3)
    controller = entropy_controller(tau)
    before = controller.state_dict()
    assert controller.update(Observation(step=5, entropy=entropy)) == {}
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, r"lr \(0.0\) must be above 0"),
        ({"least": 0.0}, r"least \(0.0\) must be above 0"),
        ({"least": 0.5}, r"tau \(0.3\) must be at least .*bounds"),
        ({"most": 0.2}, r"tau \(0.3\) must be at least .*bounds"),
        ({"least": 0.2, "most": 0.1}, r"least \(0.2\) .*at most 0.1"),
        ({"most": float("nan")}, r"most \(nan\) must be finite"),
        ({"warmup_steps": -2}, "warmup_steps"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"target": -0.1}, "target"),
    ],
)
def test_settings_of_the_entropy_controller_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        entropy_controller(Coefficient(0.3), **settings)


@pytest.mark.parametrize("most", [None, 0, 0.0])
def test_no_upper_bound_can_be_said_in_two_ways(most):
    tau = Coefficient(0.3)
    entropy_controller(tau, most=most, lr=10.0).update(Observation(step=1, entropy=0.0))
    assert float(tau) == pytest.approx(0.3 * math.exp(13.0))


def test_a_schedule_is_a_line_between_two_targets():
    line = EntropySchedule(None, start=1.2, final=2.2, horizon=2000)
    assert [line.at(step) for step in (-5, 0, 1000, 2000, 9000)] == pytest.approx([1.2, 1.2, 1.7, 2.2, 2.2])
    assert EntropySchedule(1.5).at(7) == 1.5
    assert EntropySchedule(1.5, start=1.0, horizon=10).at(5) == 1.25
    assert EntropySchedule(1.5, final=2.0, horizon=10).at(5) == 1.75
    assert EntropySchedule(1.5, start=1.0, final=2.0).at(0) == 2.0
    with pytest.raises(ConfigError, match="needs target, or both start and final"):
        EntropySchedule(None, start=1.0)


def test_a_target_above_the_entropy_of_equal_weights_is_refused():
    check_reachable(EntropySchedule(math.log(8)), 8)
    check_reachable(EntropySchedule(None, start=1.0, final=2.0, horizon=5), 8)
    with pytest.raises(ConfigError, match=r"must be at most 2.0794.* log\(8\)"):
        check_reachable(EntropySchedule(2.08), 8)
    with pytest.raises(ConfigError, match=r"target \(2.2\) must be at most 2.0794"):
        check_reachable(EntropySchedule(None, start=2.2, final=1.0, horizon=5), 8)


def test_a_target_that_changes_while_training_switches_the_controller_off_and_on():
    beta = Coefficient(0.1)
    controller = KLController(beta, target=0.07, horizon=500)
    controller.target = 0.0
    assert not controller.reads_kl
    controller.update(Observation(step=0, kl=0.14))
    assert float(beta) == 0.1
    controller.target = 0.07
    assert controller.reads_kl
    controller.update(Observation(step=0, kl=0.14))
    assert float(beta) == pytest.approx(0.1002)
