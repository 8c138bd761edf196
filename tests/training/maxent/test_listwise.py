"""Laws of the listwise weights, then the worked example of two groups of four."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from maxent_example import BETA, TAU, W_BY_TOKENS, W_SHARED, W_SUMMED, B, L, N, Q, R, U, W

from ludic.errors import ConfigError, DataError
from ludic.training.maxent import listwise_q, listwise_weights, share_among_best, weight_entropy

OFFSETS = [0, 4, 8]
finite = st.floats(-3, 3)
logps = st.floats(-5, 0)


@st.composite
def ragged(draw, *columns):
    """Offsets of 1 to 4 groups of 1 to 6 candidates, and columns drawn by these strategies."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    total = sum(sizes)
    drawn = [np.array(draw(st.lists(each, min_size=total, max_size=total))) for each in columns]
    return np.cumsum([0, *sizes]), *drawn


def by_group(offsets, *columns):
    return [tuple(column[a:b] for column in columns) for a, b in pairwise(offsets)]


def naive_weights(q, r, tau, beta):
    scores = [(math.log(qi) + beta * ri) / (tau + beta) for qi, ri in zip(q, r, strict=True)]
    shares = [math.exp(score - max(scores)) for score in scores]
    return [share / math.fsum(shares) for share in shares]


def objective(w, q, r, tau, beta):
    """sum w log q + tau H(w) - beta KL(w || softmax r)."""
    w = np.maximum(w, 1e-300)
    rho = np.exp(r - np.max(r)) / np.exp(r - np.max(r)).sum()
    return float((w * np.log(q)).sum() - tau * (w * np.log(w)).sum() - beta * (w * (np.log(w) - np.log(rho))).sum())


@given(ragged(finite), st.floats(0.05, 5), st.sampled_from([1e-9, 1e-6, 0.05]))
def test_q_is_a_distribution_with_a_floor_in_the_order_of_the_utilities(drawn, temperature, epsilon):
    offsets, u = drawn
    q = listwise_q(u, offsets, temperature=temperature, epsilon=epsilon)
    for ui, qi in by_group(offsets, u, q):
        assert qi.sum() == pytest.approx(1.0, abs=1e-12)
        assert qi.min() >= epsilon * (1 - 1e-9)
        assert (np.diff(qi[np.argsort(ui)]) >= -1e-15).all()


@given(ragged(finite, logps), st.floats(0.01, 5), st.floats(0, 5))
def test_the_weights_of_ragged_groups_are_those_of_each_group_alone(drawn, tau, beta):
    offsets, u, r = drawn
    q = listwise_q(u, offsets)
    w = listwise_weights(q, r, offsets, tau=tau, beta=beta)
    for wi, qi, ri in by_group(offsets, w, q, r):
        np.testing.assert_allclose(wi, naive_weights(qi, ri, tau, beta), rtol=1e-10, atol=1e-14)


@given(ragged(finite, logps), st.floats(0.05, 3), st.floats(0, 3), st.integers(0, 2**32 - 1))
def test_no_other_point_of_the_simplex_is_better(drawn, tau, beta, seed):
    offsets, u, r = drawn
    q = listwise_q(u, offsets)
    w = listwise_weights(q, r, offsets, tau=tau, beta=beta)
    rng = np.random.default_rng(seed)
    for wi, qi, ri in by_group(offsets, w, q, r):
        best = objective(wi, qi, ri, tau, beta)
        others = [
            *rng.dirichlet(np.ones(len(wi)), 20),
            *(0.99 * wi + 0.01 * other for other in rng.dirichlet(np.ones(len(wi)), 20)),
        ]
        assert max(objective(other, qi, ri, tau, beta) for other in others) <= best + 1e-9
        # the value in closed form: s lse((log q + beta r)/s) - beta lse(r)
        s = tau + beta
        value = s * np.logaddexp.reduce((np.log(qi) + beta * ri) / s) - beta * np.logaddexp.reduce(ri)
        assert best == pytest.approx(value, abs=1e-9)


@given(ragged(finite, logps), st.floats(0.01, 3), st.floats(0, 3))
def test_a_permutation_of_candidates_permutes_the_weights(drawn, tau, beta):
    _, u, r = drawn
    order = np.arange(len(u))[::-1]
    w = listwise_weights(listwise_q(u), r, tau=tau, beta=beta)
    again = listwise_weights(listwise_q(u[order]), r[order], tau=tau, beta=beta)
    np.testing.assert_allclose(again, w[order], rtol=1e-9, atol=1e-15)


def test_the_limits():
    u, r, q = U[:4], R[:4], Q[:4]
    np.testing.assert_allclose(listwise_weights(q, r, tau=1e9, beta=0.1), [0.25] * 4, atol=1e-8)
    np.testing.assert_allclose(listwise_weights(q, tau=1e-3), [0.5, 0, 0, 0.5], atol=1e-8)
    np.testing.assert_allclose(listwise_weights(q, tau=1.0), q, atol=1e-12)
    softmax_r = np.exp(r) / np.exp(r).sum()
    np.testing.assert_allclose(listwise_weights(q, r, tau=0.3, beta=1e9), softmax_r, atol=1e-7)
    # K s T_q (w - 1/K) -> u - mean(u), Dr. GRPO's advantage
    for temperature in (1.0, 0.7):
        big = 1e6
        w = listwise_weights(listwise_q(u, temperature=temperature, epsilon=1e-12), tau=big)
        np.testing.assert_allclose(4 * big * temperature * (w - 0.25), u - u.mean(), atol=1e-5)
    # binary utilities, s -> 0: K w - 1 = (u - p)/p, the gradient of the log pass rate
    for right in (1, 2, 3):
        binary = np.array([1.0] * right + [0.0] * (4 - right))
        w = listwise_weights(listwise_q(binary), tau=1e-3)
        np.testing.assert_allclose(4 * w - 1, (binary - right / 4) / (right / 4), atol=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(1, 64), st.floats(1e-6, 10))
def test_equal_utilities_have_exactly_equal_weights(utility, size, tau):
    w = listwise_weights(listwise_q([utility] * size, epsilon=1e-3), tau=tau)
    assert (w == 1.0 / size).all()


@given(ragged(st.sampled_from([0.0, 0.1, 0.5, 1.0]), logps), st.floats(0.01, 3), st.floats(0, 3))
def test_sharing_keeps_the_sum_of_the_best_and_leaves_the_others(drawn, tau, exponent):
    offsets, u, b = drawn
    w = listwise_weights(listwise_q(u, offsets), offsets=offsets, tau=tau)
    shared = share_among_best(w, u, b, offsets, exponent=exponent)
    for wi, ui, bi, si in by_group(offsets, w, u, b, shared):
        best = ui > ui.mean() if ui.min() < ui.max() else np.zeros(len(ui), bool)
        assert (si[~best] == wi[~best]).all()
        assert si.sum() == pytest.approx(1.0, abs=1e-12)
        if best.any():
            assert si[best].sum() == pytest.approx(wi[best].sum(), rel=1e-12)
            # among the best w exp(k b) is proportional to the old weights
            ratio = si[best] * np.exp(exponent * bi[best]) / wi[best]
            np.testing.assert_allclose(ratio, ratio[0], rtol=1e-8)


def test_sharing_by_hand():
    shared = share_among_best([0.4, 0.4, 0.2], [1, 1, 0], [math.log(0.5), math.log(0.1), -1.0])
    np.testing.assert_allclose(shared, [0.8 / 6, 4.0 / 6, 0.2], atol=1e-12)


def test_sharing_survives_weights_that_underflow():
    w = listwise_weights(listwise_q([1.0, 0.9, 0.0]), tau=1e-5)
    assert w[1] == 0.0
    np.testing.assert_allclose(share_among_best(w, [1.0, 0.9, 0.0], [-1.0, -900.0, -1.0]), [1, 0, 0], atol=1e-12)


@given(ragged(st.floats(0, 1)))
def test_the_entropy_is_between_zero_and_log_k(drawn):
    offsets, u = drawn
    w = listwise_weights(listwise_q(u, offsets), offsets=offsets, tau=0.1)
    entropy = weight_entropy(w, offsets)
    assert (entropy >= -1e-12).all()
    assert (entropy <= np.log(np.diff(offsets)) + 1e-12).all()
    assert weight_entropy([1.0, 0.0]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("tau", "beta", "weights", "entropy"),
    [
        (0.5, 0.5, [0.37973001, 0.11437302, 0.16230304, 0.34359393], 1.27785807),
        (2.0, 0.0, [0.31122939, 0.18877061, 0.18877061, 0.31122939], 1.35599478),
    ],
)
def test_the_first_group_with_other_coefficients(tau, beta, weights, entropy):
    """tau 2 and beta 0 by hand: q^(1/2) of .36552883 and .13447117 are .60459 and .36670, of which
    two each sum to 1.94258: .31123 and .18877."""
    w = listwise_weights(listwise_q(U[:4]), R[:4], tau=tau, beta=beta)
    np.testing.assert_allclose(w, weights, atol=1e-8, rtol=0)
    np.testing.assert_allclose(weight_entropy(w), [entropy], atol=1e-8, rtol=0)


def test_the_worked_example_to_eight_digits():
    q = listwise_q(U, OFFSETS)
    np.testing.assert_allclose(q, Q, atol=1e-8, rtol=0)
    w = listwise_weights(q, R, OFFSETS, tau=TAU, beta=BETA)
    np.testing.assert_allclose(w, W, atol=1e-8, rtol=0)
    np.testing.assert_allclose(weight_entropy(w, OFFSETS), [0.96391859, 0.93517411], atol=1e-8, rtol=0)
    np.testing.assert_allclose(share_among_best(w, U, B, OFFSETS, exponent=0.5), W_SHARED, atol=1e-8, rtol=0)
    np.testing.assert_allclose(listwise_weights(q, R * N, OFFSETS, tau=TAU, beta=BETA), W_SUMMED, atol=1e-8, rtol=0)
    by_tokens = listwise_weights(q, R * N, OFFSETS, tau=TAU, beta=BETA, token_counts=N)
    np.testing.assert_allclose(by_tokens, W_BY_TOKENS, atol=1e-8, rtol=0)
    assert len(L) == len(w)


def test_without_candidates_there_is_nothing():
    assert listwise_q([]).tolist() == listwise_weights([], tau=1.0).tolist() == weight_entropy([]).tolist() == []
    assert share_among_best([], [], [], [0]).tolist() == []


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: listwise_q([1.0, 0.0], temperature=0.0), ConfigError, "q_temperature"),
        (lambda: listwise_q([1.0, 0.0], epsilon=0.5), ConfigError, "q_epsilon"),
        (lambda: listwise_q([1.0, 0.0], epsilon=0.0), ConfigError, "q_epsilon"),
        (lambda: listwise_q([1.0, math.nan]), DataError, "nan"),
        (lambda: listwise_q([1.0, 0.0], [0, 0, 2]), DataError, "offsets"),
        (lambda: listwise_q([1.0, 0.0], [0, 1]), DataError, "offsets"),
        (lambda: listwise_weights([0.5, 0.5], tau=0.0), ConfigError, "tau and beta are both 0"),
        (lambda: listwise_weights([0.5, 0.5], tau=-1.0), ConfigError, "tau"),
        (lambda: listwise_weights([0.5, 0.5], tau=1.0, beta=0.1), DataError, "reference"),
        (lambda: listwise_weights([0.5, 0.5], [0.0, math.nan], tau=1.0, beta=0.1), DataError, "nan"),
        (lambda: listwise_weights([0.5, 0.0], tau=1.0), DataError, "positive"),
        (lambda: listwise_weights([0.5, 0.5], tau=1.0, token_counts=[1, 0]), DataError, "at least one token"),
        (lambda: share_among_best([0.5, 0.5], [1, 0], [-1.0]), DataError, "behaviour_logp"),
        (lambda: share_among_best([0.5, 0.5], [1, 0], [-1.0, -1.0], exponent=-1.0), ConfigError, "exponent"),
    ],
)
def test_wrong_input_is_an_error_that_names_it(call, error, words):
    with pytest.raises(error, match=words):
        call()
