"""Controllers in a closed loop: a softmax policy over twelve answers, whose groups are drawn,
weighed and learned from at each step."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from ludic.training.coefficients import Coefficient
from ludic.training.controllers import EntropyController, KLController, MetaController, Observation
from ludic.training.types import CandidateGroups

ANSWERS, GROUPS, SIZE = 12, 64, 8


def softmax(values):
    exp = np.exp(values - values.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


@dataclass
class Loop:
    """The state of a run that steers by `controllers`. `noise`: standard deviation of the part of a
    utility that the answer does not determine, so that no policy makes all utilities equal."""

    tau: Coefficient
    beta: Coefficient
    controllers: list
    noise: float = 1.0
    seed: int = 1
    seen: list = field(default_factory=list)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.z = self.rng.normal(size=ANSWERS)
        self.log_reference = np.log(softmax(self.z))
        self.value = self.rng.random(ANSWERS)

    def run(self, steps):
        """Rows of (mean entropy, KL, tau, beta), as each step used them."""
        return np.array([self.step() for _ in range(steps)])

    def step(self):
        pi, tau, beta = softmax(self.z), float(self.tau), float(self.beta)
        picks = self.rng.choice(ANSWERS, size=(GROUPS, SIZE), p=pi)
        utility = self.value[picks] + self.noise * self.rng.normal(size=picks.shape)
        q = softmax(utility) * (1 - 1e-6 * SIZE) + 1e-6
        r = self.log_reference[picks]
        w = softmax((np.log(q) + beta * r) / (tau + beta))
        entropy = -float((w * np.log(np.maximum(w, 1e-300))).sum(1).mean())
        log_ratio = np.log(pi) - self.log_reference
        kl = float(pi @ log_ratio)
        credit = np.bincount(picks.ravel(), (w - 1 / SIZE).ravel(), ANSWERS) / GROUPS
        self.z = self.z + 0.5 * (credit - credit.sum() * pi - beta * pi * (log_ratio - kl))
        groups = CandidateGroups(np.arange(0, GROUPS * SIZE + 1, SIZE), q.ravel(), r.ravel(), np.log(pi)[picks].ravel())
        observed = Observation(step=len(self.seen), entropy=entropy, kl=kl, groups=groups)
        self.seen.append({key: value for controller in self.controllers for key, value in controller.update(observed).items()})
        return entropy, kl, tau, beta


def with_laws(**settings):
    tau, beta = Coefficient(0.3), Coefficient(0.1)
    laws = [KLController(beta, target=0.25, horizon=20), EntropyController(tau, target=1.6, lr=0.05)]
    return Loop(tau, beta, laws, **settings)


def with_meta(method, **settings):
    tau, beta = Coefficient(0.3), Coefficient(0.1)
    controller = MetaController(tau, beta, entropy_target=1.6, kl_target=0.25, method=method, lr=0.05, truncation_steps=3)
    return Loop(tau, beta, [controller], **settings)


@pytest.mark.parametrize("loop", [with_laws(), with_meta("analytic")], ids=["laws", "analytic"])
def test_entropy_and_kl_settle_at_their_targets(loop):
    entropy, kl, *_ = loop.run(400)[-100:].mean(0)
    assert abs(entropy - 1.6) < 0.02
    assert abs(kl - 0.25) < 0.01


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_the_tracking_methods_approach_both_targets(method):
    loop = with_meta(method)
    entropy = loop.run(400)[-100:, 0].mean()
    losses = [stats["meta/loss"] for stats in loop.seen]
    assert abs(entropy - 1.6) < 0.02
    assert np.mean(losses[-100:]) < 0.1 * losses[0]


def test_a_constraint_that_holds_by_itself_sends_its_multiplier_to_the_bound():
    """Without noise, a policy this near the reference makes the candidates' utilities nearly equal:
    the entropy stays above 1.6 whatever tau, so tau falls to its bound; the KL is at its target."""
    rows = with_meta("analytic", noise=0.0).run(400)
    entropy, kl, tau, _ = rows[-100:].mean(0)
    assert entropy > 1.8
    assert tau == pytest.approx(1e-6)
    assert abs(kl - 0.25) < 0.01


@pytest.mark.parametrize("kind", ["laws", "analytic"])
def test_descent_from_a_state_that_was_written_as_json_is_the_same_bit_for_bit(kind):
    def build():
        return with_laws() if kind == "laws" else with_meta("analytic")

    whole = build().run(30)
    for killed_at in (0, 1, 7, 29):
        first, second = build(), build()
        before = first.run(killed_at)
        second.rng.bit_generator.state, second.z, second.seen = first.rng.bit_generator.state, first.z, first.seen
        for old, new in zip(first.controllers, second.controllers, strict=True):
            new.load_state_dict(json.loads(json.dumps(old.state_dict())))
        after = second.run(30 - killed_at)
        assert np.concatenate([before.reshape(-1, 4), after]).tolist() == whole.tolist()
