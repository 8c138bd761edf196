import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.training.coefficients import Coefficient
from ludic.training.controllers import EntropySchedule, MetaController, Observation
from ludic.training.controllers.meta import Moments, descend
from ludic.training.controllers.meta_gradient import potential_gradient, tracking_gradient
from ludic.training.types import CandidateGroups

GROUPS = CandidateGroups(
    np.array([0, 4, 7]),
    np.array([0.4, 0.1, 0.1, 0.4, 0.2, 0.3, 0.5]),
    np.array([-0.8, -1.2, -0.5, -1.0, -0.6, -0.9, -0.7]),
    np.array([-0.9, -1.1, -0.7, -1.0, -0.5, -1.0, -0.8]),
)


def seen(step=0, **facts):
    return Observation(step=step, **{"groups": GROUPS, "kl": 0.3, **facts})


def meta(tau=0.3, beta=0.1, **settings):
    """A controller with both targets; its coefficients are `controller.coefficients`."""
    defaults = {"entropy_target": 1.0, "kl_target": 0.1, "lr": 0.02}
    return MetaController(Coefficient(tau), Coefficient(beta), **{**defaults, **settings})


def values_of(controller):
    return {name: float(coefficient) for name, coefficient in controller.coefficients.items()}


@pytest.mark.parametrize(
    ("name", "optimizer"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_the_optimizers_take_the_steps_of_pytorch(name, optimizer):
    theirs = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    of_torch, moments, ours = optimizer([theirs], lr=0.05), Moments(), 0.7
    for gradient in np.random.default_rng(0).normal(size=20):
        theirs.grad = torch.tensor([gradient])
        of_torch.step()
        ours = descend(name, moments, ours, float(gradient), 0.05)
        assert ours == pytest.approx(theirs.item(), abs=1e-14)


@pytest.mark.parametrize(
    ("method", "gradient", "settings"),
    [
        ("analytic", potential_gradient, {}),
        ("first_order", tracking_gradient, {}),
        ("truncated_backprop", tracking_gradient, {"steps": 4, "use_hessian": True}),
    ],
)
def test_each_method_descends_on_its_gradient(method, gradient, settings):
    expected = gradient(GROUPS, 0.3, 0.1, entropy_target=1.0, kl_target=0.1, **settings)
    controller = meta(method=method, kl_signal="weights", truncation_steps=4, use_hessian=True, tau_lr=0.05)
    stats = controller.update(seen(lr_factor=0.5))
    assert values_of(controller) == pytest.approx({"tau": 0.3 - 0.025 * expected.tau, "beta": 0.1 - 0.01 * expected.beta})
    assert stats == {
        "meta/loss": expected.loss,
        "meta/tau_grad": expected.tau,
        "meta/beta_grad": expected.beta,
        "meta/tau_projected": 0.0,
        "meta/beta_projected": 0.0,
        "meta/tau_lr": 0.025,
        "meta/beta_lr": 0.01,
        "meta/update_interval": 1.0,
        "meta/truncation_steps": 4.0,
        "meta/use_hessian": 1.0,
    }


@pytest.mark.parametrize("method", ["analytic", "first_order", "truncated_backprop"])
def test_the_measured_entropy_stands_in_for_that_of_the_weights(method):
    """It is that of the weights as they were used: after `sampler_exponent` has shared them."""
    tau = Coefficient(0.3)
    controller = MetaController(tau, Coefficient(0.1), entropy_target=1.2, method=method, lr=0.1)
    stats = controller.update(seen(entropy=1.2))
    assert (stats["meta/loss"], stats["meta/tau_grad"], float(tau)) == (0.0, 0.0, 0.3)
    stats = controller.update(seen(entropy=1.0))
    assert stats["meta/loss"] == pytest.approx(0.02)
    assert float(tau) > 0.3


def test_the_measured_kl_stands_in_for_that_of_the_weights():
    controller = meta(tau_lr=0.0)
    controller.update(seen(kl=0.3))
    assert values_of(controller) == {"beta": pytest.approx(0.1 + 0.02 * (0.3 - 0.1))}


@pytest.mark.parametrize("kl", [None, math.nan])
def test_an_unknown_kl_leaves_beta_as_it_is(kl):
    controller = meta()
    controller.update(seen(kl=kl))
    assert float(controller.coefficients["beta"]) == 0.1
    assert float(controller.coefficients["tau"]) != 0.3


def test_it_runs_every_so_many_steps():
    controller = meta(update_interval=3)
    assert [bool(controller.update(seen(step))) for step in range(7)] == [False, False, True, False, False, True, False]


def test_the_gradient_of_beta_is_clipped():
    controller = meta(beta_grad_clip=0.05)
    assert controller.update(seen(kl=10.0))["meta/beta_grad"] == pytest.approx(-9.9)
    assert float(controller.coefficients["beta"]) == pytest.approx(0.1 + 0.02 * 0.05)


def test_the_entropy_target_may_be_a_schedule():
    found = [
        meta(entropy_target=EntropySchedule(None, start=0.5, final=1.0, horizon=10)).update(seen(step)) for step in (0, 5, 20)
    ]
    errors = [stats["meta/tau_grad"] for stats in found]
    assert np.diff(errors) == pytest.approx([-0.25, -0.25])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_at_a_bound_a_gradient_outwards_clears_the_moments_and_one_inwards_leaves_it(optimizer):
    """The entropy of the weights is above the target at tau's lower bound, so tau stays there; with
    a target above the entropy tau grows by a step that no earlier gradient changes."""
    controller = meta(entropy_target=0.0, tau_least=0.25, tau=0.26, lr=0.1, optimizer=optimizer)
    stats = [controller.update(seen(step)) for step in range(4)]
    assert [each["meta/tau_projected"] for each in stats] == [1.0, 1.0, 1.0, 1.0]
    assert float(controller.coefficients["tau"]) == 0.25
    assert controller.state_dict()["moments"]["tau"] == {"first": 0.0, "second": 0.0, "steps": 0}
    controller.entropy_target = EntropySchedule(1.3)
    fresh = meta(
        entropy_target=1.3, tau_least=0.25, tau=0.25, lr=0.1, optimizer=optimizer, beta=float(controller.coefficients["beta"])
    )
    controller.update(seen(9)), fresh.update(seen(9))
    assert float(controller.coefficients["tau"]) == float(fresh.coefficients["tau"]) > 0.25


def test_beta_does_not_fall_below_0():
    controller = meta(lr=5.0, tau_lr=0.0)
    assert controller.update(seen(kl=0.0))["meta/beta_projected"] == 1.0
    assert float(controller.coefficients["beta"]) == 0.0


def test_upper_bounds_are_those_of_controller_and_coefficient():
    beta = Coefficient(0.1, most=0.15)
    MetaController(Coefficient(0.3), beta, kl_target=0.1, lr=5.0, beta_most=0.2).update(seen(kl=3.0))
    assert float(beta) == 0.15
    controller = meta(lr=5.0, beta_most=0.12, tau_most=0)
    controller.update(seen(kl=3.0))
    assert float(controller.coefficients["beta"]) == 0.12


@given(st.integers(0, 11), st.sampled_from(["sgd", "adam", "adamw"]), st.sampled_from(["analytic", "truncated_backprop"]))
def test_a_run_continues_bit_for_bit_from_its_state(killed_at, optimizer, method):
    settings = {"optimizer": optimizer, "method": method, "tau_least": 0.29, "update_interval": 2}
    whole = meta(**settings)
    path = []
    for step in range(12):
        if step == killed_at:
            state = whole.state_dict()
        whole.update(seen(step, kl=0.05 * step))
        path.append(values_of(whole))
    resumed = meta(tau=0.5, beta=0.9, **settings)
    resumed.load_state_dict(state)
    for step in range(killed_at, 12):
        resumed.update(seen(step, kl=0.05 * step))
        assert values_of(resumed) == path[step]
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("alias", "method"),
    [
        ("analytic_grad", "analytic"),
        ("potential", "analytic"),
        ("truncated", "truncated_backprop"),
        ("backprop", "truncated_backprop"),
    ],
)
def test_methods_have_aliases(alias, method):
    assert meta(method=alias).method == method


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method .'magic'. .*one of analytic"),
        ({"optimizer": "lion"}, "optimizer .'lion'. .* one of sgd, adam, adamw"),
        ({"kl_signal": "both"}, "kl_signal"),
        ({"lr": 0.0}, "learning rates of the meta-controller are 0"),
        ({"lr": -1.0}, r"lr \(-1.0\) must be at least 0"),
        ({"tau_lr": math.nan}, "tau_lr"),
        ({"update_interval": 0}, "update_interval"),
        ({"truncation_steps": 0}, "truncation_steps"),
        ({"inner_lr": 0.0}, "inner_lr"),
        ({"tau_least": 0.0}, "tau_least"),
        ({"kl_target": -0.1}, "kl_target"),
        ({"entropy_target": None, "kl_target": None}, "nothing to aim at"),
        ({"tau_most": 0.2}, r"tau \(0.3\) .*at most 0.2; .*bounds"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        meta(**settings)


def test_without_tau_it_steers_beta_by_the_measured_kl():
    beta = Coefficient(0.1)
    controller = MetaController(None, beta, kl_target=0.1, lr=0.02)
    assert controller.reads_kl
    assert set(controller.update(seen(groups=None))) >= {"meta/loss", "meta/beta_projected"}
    assert float(beta) == pytest.approx(0.1 + 0.02 * 0.2)
    with pytest.raises(ConfigError, match="without tau, only beta can be steered"):
        MetaController(None, beta, kl_target=0.1, lr=0.02, method="first_order")
