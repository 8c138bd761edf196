"""The gradients of both objectives against central differences of the objectives, written as loops
over the groups, and against the numbers of one worked example."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.training.controllers.meta_gradient import MetaGradient, potential_gradient, tracking_gradient
from ludic.training.types import CandidateGroups

UTILITY = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5, 1.0]]
REFERENCE = [[-0.8, -1.2, -0.5, -1.0], [-0.6, -0.9, -0.7, -1.1]]
START = [[-0.9, -1.1, -0.7, -1.0], [-0.5, -1.0, -0.8, -0.9]]
TAU, BETA, TARGETS = 0.3, 0.1, {"entropy_target": 1.2, "kl_target": 0.004}
"""Two prompts with four candidates each, of which one begins at its own log-probabilities."""


def softmax(values):
    exp = np.exp(np.asarray(values) - np.max(values))
    return exp / exp.sum()


def listwise_q(utilities, epsilon=1e-6):
    return softmax(utilities) * (1 - epsilon * len(utilities)) + epsilon


def groups_of(q, r=None, start=None):
    def side_by_side(rows):
        return None if rows is None else np.concatenate([np.zeros(0), *(np.asarray(row, dtype=float) for row in rows)])

    offsets = np.cumsum([0, *(len(row) for row in q)])
    return CandidateGroups(offsets, side_by_side(q), side_by_side(r), side_by_side(start))


EXAMPLE = groups_of([listwise_q(u) for u in UTILITY], REFERENCE, START)


def rows_of(groups):
    bounds = list(zip(groups.offsets[:-1], groups.offsets[1:], strict=True))
    return [(groups.q[a:b], groups.reference_logp[a:b], groups.behaviour_logp[a:b]) for a, b in bounds]


def weights(q, r, tau, beta):
    return softmax((np.log(q) + beta * r) / (tau + beta))


def entropy(w):
    return -float(np.sum(w * np.log(w)))


def kl(p, rho):
    return float(np.sum(p * (np.log(p) - np.log(rho))))


def potential(groups, tau, beta, entropy_target, kl_target):
    """mean J* - tau H* + beta KL*, with J* from the problem that the weights solve."""
    values = []
    for q, r, _ in rows_of(groups):
        w = weights(q, r, tau, beta)
        values.append(float(w @ np.log(q)) + tau * entropy(w) - beta * kl(w, softmax(r)))
    return np.mean(values) - tau * entropy_target + beta * kl_target


def inner_step(z, w, r, beta):
    """The gradient of -sum w log softmax(z) + beta KL(softmax(z) || softmax(r))."""
    pi, rho = softmax(z), softmax(r)
    return pi - w + beta * pi * (np.log(pi) - np.log(rho) - kl(pi, rho))


def unrolled(z, w, r, beta, steps, rate, path=None):
    """z after the steps; with `path`, their gradients are taken at the path's points instead."""
    points = []
    for step in range(steps):
        points.append(z if path is None else path[step])
        z = z - rate * inner_step(points[-1], w, r, beta)
    return z, points


def tracking(groups, tau, beta, entropy_target, kl_target, steps, rate, paths=None):
    entropies, kls = [], []
    for number, (q, r, z) in enumerate(rows_of(groups)):
        w = weights(q, r, tau, beta)
        end, _ = unrolled(z, w, r, beta, steps, rate, None if paths is None else paths[number])
        entropies.append(entropy(w))
        kls.append(kl(softmax(end), softmax(r)))
    return (np.mean(entropies) - entropy_target) ** 2 / 2 + (np.mean(kls) - kl_target) ** 2 / 2


def central(function, tau, beta, h=1e-5):
    """Five-point central differences, whose error is of order h^4."""

    def slope(move):
        near = function(*move(h)) - function(*move(-h))
        far = function(*move(2 * h)) - function(*move(-2 * h))
        return (8 * near - far) / (12 * h)

    return slope(lambda d: (tau + d, beta)), slope(lambda d: (tau, beta + d))


LOGPS = st.lists(st.floats(-2.5, 0.0), min_size=6, max_size=6)


@st.composite
def drawn_groups(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    q, r, start = [], [], []
    for size in sizes:
        q.append(listwise_q(draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=size, max_size=size))))
        r.append(np.array(draw(LOGPS)[:size]))
        start.append(np.array(draw(LOGPS)[:size]))
    return groups_of(q, r, start)


TAUS, BETAS = st.floats(0.1, 2.0), st.floats(0.05, 1.0)


@given(drawn_groups(), TAUS, BETAS)
def test_the_analytic_gradient_is_that_of_the_dual_potential(groups, tau, beta):
    found = potential_gradient(groups, tau, beta, entropy_target=1.1, kl_target=0.02)
    assert (found.tau, found.beta) == pytest.approx(central(lambda t, b: potential(groups, t, b, 1.1, 0.02), tau, beta), abs=1e-7)


@settings(max_examples=settings.default.max_examples // 2)
@given(drawn_groups(), TAUS, BETAS, st.integers(1, 4))
def test_the_tracking_gradient_with_hessian_is_that_of_the_squared_distances(groups, tau, beta, steps):
    found = tracking_gradient(groups, tau, beta, entropy_target=1.1, kl_target=0.02, steps=steps, use_hessian=True)

    def loss(t, b):
        return tracking(groups, t, b, 1.1, 0.02, steps, 0.5)

    assert found.loss == pytest.approx(loss(tau, beta), abs=1e-12)
    assert (found.tau, found.beta) == pytest.approx(central(loss, tau, beta), abs=1e-7)


@settings(max_examples=settings.default.max_examples // 2)
@given(drawn_groups(), TAUS, BETAS, st.integers(1, 4))
def test_without_hessian_the_points_of_the_inner_steps_count_as_constant(groups, tau, beta, steps):
    paths = [unrolled(z, weights(q, r, tau, beta), r, beta, steps, 0.5)[1] for q, r, z in rows_of(groups)]
    found = tracking_gradient(groups, tau, beta, entropy_target=1.1, kl_target=0.02, steps=steps)
    expected = central(lambda t, b: tracking(groups, t, b, 1.1, 0.02, steps, 0.5, paths), tau, beta)
    assert (found.tau, found.beta) == pytest.approx(expected, abs=1e-7)


@given(drawn_groups(), TAUS, BETAS)
def test_with_one_step_the_hessian_changes_nothing(groups, tau, beta):
    both = [tracking_gradient(groups, tau, beta, **TARGETS, use_hessian=use) for use in (False, True)]
    assert both[0] == pytest.approx(both[1], abs=1e-14)


def test_the_worked_example():
    """Two groups of four; KL as the step measured it."""
    analytic = potential_gradient(EXAMPLE, TAU, BETA, **TARGETS, kl=0.0061161235530306)
    assert (analytic.tau, analytic.beta) == pytest.approx((-0.2504536534778712, -0.0021161235530306), abs=1e-12)
    first_order = tracking_gradient(EXAMPLE, TAU, BETA, **TARGETS)
    assert first_order == pytest.approx((0.03150525982186967, -0.3549719139956386, -0.39924728293520145), abs=1e-12)
    truncated = tracking_gradient(EXAMPLE, TAU, BETA, **TARGETS, steps=3)
    assert truncated == pytest.approx((0.03420655112896328, -0.3734465930991505, -0.4242096748819217), abs=1e-12)
    whole = tracking_gradient(EXAMPLE, TAU, BETA, **TARGETS, steps=3, use_hessian=True)
    assert whole == pytest.approx((0.03420655112896328, -0.3705831528898305, -0.4204942773562559), abs=1e-12)


class TwoRanks:
    """Adds the sums of two calls, as if two ranks made them at once."""

    def __init__(self):
        self.seen = []

    def collect(self, sums):
        self.seen.append(np.array(sums))
        return sums

    def total(self, sums):
        return sum(self.seen)


@pytest.mark.parametrize("gradient", [potential_gradient, tracking_gradient])
def test_the_sums_of_two_ranks_give_the_gradient_of_all_groups(gradient):
    first, second = (groups_of([q], [r], [z]) for q, r, z in rows_of(EXAMPLE))
    ranks = TwoRanks()
    for groups in (first, second):
        gradient(groups, TAU, BETA, **TARGETS, sum_over_ranks=ranks.collect)
    of_ranks = [gradient(groups, TAU, BETA, **TARGETS, sum_over_ranks=ranks.total) for groups in (first, second)]
    assert of_ranks[0] == of_ranks[1] == pytest.approx(gradient(EXAMPLE, TAU, BETA, **TARGETS), abs=1e-15)


@pytest.mark.parametrize("gradient", [potential_gradient, tracking_gradient])
def test_a_rank_without_groups_takes_part(gradient):
    whole = gradient(EXAMPLE, TAU, BETA, **TARGETS)
    ranks = TwoRanks()
    gradient(EXAMPLE, TAU, BETA, **TARGETS, sum_over_ranks=ranks.collect)
    empty = groups_of([])
    assert gradient(None, TAU, BETA, **TARGETS, sum_over_ranks=ranks.total) == whole
    assert gradient(empty, TAU, BETA, **TARGETS, sum_over_ranks=ranks.total) == whole
    with pytest.raises(DataError, match="at least one group"):
        gradient(None, TAU, BETA, **TARGETS)


def test_a_term_without_a_target_is_left_out():
    entropy_alone = potential_gradient(EXAMPLE, TAU, BETA, entropy_target=1.2, kl_target=None)
    assert entropy_alone.beta == 0
    assert entropy_alone.tau == pytest.approx(0.9495463465221288 - 1.2)
    assert entropy_alone.loss == pytest.approx((0.9495463465221288 - 1.2) ** 2 / 2)
    kl_alone = potential_gradient(None, TAU, BETA, entropy_target=None, kl_target=0.004, kl=0.006)
    assert kl_alone == pytest.approx(MetaGradient(0.002**2 / 2, 0.0, -0.002))
    both = tracking_gradient(EXAMPLE, TAU, BETA, **TARGETS)
    parts = [tracking_gradient(EXAMPLE, TAU, BETA, **{**TARGETS, left_out: None}) for left_out in TARGETS]
    assert tuple(map(sum, zip(*parts, strict=True))) == pytest.approx(both, abs=1e-15)


def test_groups_without_a_reference_have_a_gradient_in_tau_while_beta_is_0():
    bare = groups_of([listwise_q(u) for u in UTILITY])
    scored = potential_gradient(EXAMPLE, TAU, 0.0, entropy_target=1.2, kl_target=None)
    assert potential_gradient(bare, TAU, 0.0, entropy_target=1.2, kl_target=None) == scored
    tracked = tracking_gradient(bare, TAU, 0.0, entropy_target=1.2, kl_target=None)
    assert tracked.tau == tracking_gradient(EXAMPLE, TAU, 0.0, entropy_target=1.2, kl_target=None).tau
    assert tracked.beta == 0
    with pytest.raises(DataError, match="no reference_logp"):
        potential_gradient(bare, TAU, BETA, entropy_target=1.2, kl_target=None)
    with pytest.raises(DataError, match="no reference_logp"):
        tracking_gradient(bare, TAU, 0.0, **TARGETS)


def test_what_cannot_be_computed_is_an_error():
    with pytest.raises(DataError, match="no behaviour_logp"):
        tracking_gradient(groups_of([listwise_q(u) for u in UTILITY], REFERENCE), TAU, BETA, **TARGETS)
    with pytest.raises(ConfigError, match=r"tau \+ beta \(0.0\) must be above 0"):
        potential_gradient(EXAMPLE, 0.0, 0.0, **TARGETS)
    with pytest.raises(ConfigError, match=r"steps \(0\) must be at least 1"):
        tracking_gradient(EXAMPLE, TAU, BETA, **TARGETS, steps=0)


def test_a_group_of_one_candidate_has_no_entropy_and_no_slope():
    one = groups_of([[1.0]], [[-0.5]], [[-0.5]])
    found = tracking_gradient(one, TAU, BETA, **TARGETS, steps=2, use_hessian=True)
    assert (found.tau, found.beta) == (0.0, 0.0)
    assert found.loss == pytest.approx((1.2**2 + 0.004**2) / 2)
    assert math.isfinite(found.loss)
