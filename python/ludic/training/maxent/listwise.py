"""Listwise weights of MaxEnt-GRPO: a distribution over the answers to a prompt, in closed form.

Utilities u of a group of K candidates become q, a softmax mixed with the uniform distribution.
The weights w maximise, over the simplex, a function that is strictly concave for tau + beta > 0:

    sum_i w_i log q_i + tau H(w) - beta KL(w || softmax(r))        r: reference log-probabilities

    w = softmax((log q + beta r) / (tau + beta))

Source: liv-daliberti/maxent-grpo, `docs/guides/training.rst` (2026). Limits: for tau -> inf the
weights are uniform; for tau, beta -> 0 the best candidates share everything; for beta -> inf they
are softmax(r); with tau = T_q = 1 and beta = 0 they are q.

Everything is float64 numpy on ragged groups: [C] columns of candidates, one group after another,
with `offsets` [G + 1]. None means that all candidates are one group.

    offsets [0, 3, 5]: candidates 0, 1, 2 are one group, 3 and 4 another
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ludic.errors import ConfigError, DataError, check_value

Column = NDArray[np.float64]
Offsets = NDArray[np.int64]


def listwise_q(
    utilities: ArrayLike, offsets: ArrayLike | None = None, *, temperature: float = 1.0, epsilon: float = 1e-6
) -> Column:
    """[C] q = p (1 - epsilon K) + epsilon, where p = softmax(u / temperature) in each group of K.

    Every q is at least epsilon, and the sum over a group is 1. Raises ConfigError unless
    temperature > 0, epsilon > 0 and epsilon K < 1, DataError for utilities that are not finite.

    Example: utilities [1, 0] give p = [.7311, .2689].
    """
    values, bounds = _read(utilities, offsets, "utilities")
    sizes = np.diff(bounds)
    check_q(temperature, epsilon, int(sizes.max(initial=1)))
    p = softmax(values / temperature, bounds)
    return p * (1.0 - epsilon * spread(sizes, bounds)) + epsilon


def listwise_weights(
    q: ArrayLike,
    reference_logp: ArrayLike | None = None,
    offsets: ArrayLike | None = None,
    *,
    tau: float,
    beta: float = 0.0,
    token_counts: ArrayLike | None = None,
) -> Column:
    """[C] w = softmax((log q + beta r) / (tau + beta)) in each group; r is `reference_logp`.

    With `token_counts`, w is multiplied by them and normalised again: the document's rule where r
    is a sum over tokens instead of their mean. Raises ConfigError unless tau, beta >= 0 and
    tau + beta > 0, DataError for beta > 0 without finite reference log-probabilities, and for q
    that is not positive.
    """
    values, bounds = _read(q, offsets, "q")
    check_tau_beta(tau, beta)
    if not (values > 0).all():
        raise DataError(f"q has the value {values.min()}; every entry must be positive, as listwise_q makes it")
    score = np.log(values)
    if beta > 0:
        if reference_logp is None:
            raise DataError(f"beta ({beta}) > 0 reads the log-probabilities of a reference; pass reference_logp, or beta=0")
        score = score + beta * _column(reference_logp, "reference_logp", len(values))
    weights = softmax(score / (tau + beta), bounds)
    if token_counts is None:
        return weights
    counts = _column(token_counts, "token_counts", len(values))
    if not (counts >= 1).all():
        raise DataError(f"token_counts has the value {counts.min()}; a candidate has at least one token")
    return _normalize(weights * counts, bounds)


def share_among_best(
    weights: ArrayLike,
    utilities: ArrayLike,
    behaviour_logp: ArrayLike,
    offsets: ArrayLike | None = None,
    *,
    exponent: float = 1.0,
) -> Column:
    """[C] the weights, with the weight of the best candidates shared anew: among the candidates
    above the mean utility of their group, w is multiplied by exp(-exponent b), and rescaled so that
    their sum stays.

    Candidates come from the policy, so each answer's expected weight is its probability times w:
    repeated steps would concentrate on the best answers that were likely before. b, the
    log-probability under the policy that sampled, takes this factor out among right answers;
    wrong ones are untouched. Groups of equal utilities are unchanged. Exponent 0 is the
    document's form.

    Example: w [.4, .4, .2], u [1, 1, 0], b [log .5, log .1, -1] and exponent 1: the right ones
    have .8 to share in the ratio 1/.5 : 1/.1, so w = [.1333, .6667, .2].
    """
    w, bounds = _read(weights, offsets, "weights")
    u = _column(utilities, "utilities", len(w))
    b = _column(behaviour_logp, "behaviour_logp", len(w))
    check_value("exponent", exponent, "0 leaves the weights as they are", least=0, below=math.inf)
    if exponent == 0 or not len(w):
        return w.copy()
    spread_of_u = reduce_groups(np.maximum, u, bounds) - reduce_groups(np.minimum, u, bounds)
    means = group_sums(u, bounds) / np.diff(bounds)
    best = (u > spread(means, bounds)) & (spread(spread_of_u, bounds) > 0) & (w > 0)
    score = np.where(best, np.log(np.where(best, w, 1.0)) - exponent * b, -np.inf)
    top = reduce_groups(np.maximum, score, bounds)
    tilt = np.where(best, np.exp(score - spread(np.where(np.isfinite(top), top, 0.0), bounds)), 0.0)
    total = spread(group_sums(tilt, bounds), bounds)
    mass = spread(group_sums(np.where(best, w, 0.0), bounds), bounds)
    return np.where(best, mass * tilt / np.where(total > 0, total, 1.0), w)


def weight_entropy(weights: ArrayLike, offsets: ArrayLike | None = None) -> Column:
    """[G] entropy of each group's weights in nats, between 0 and log K; 0 log 0 is 0."""
    w, bounds = _read(weights, offsets, "weights")
    return -group_sums(w * np.log(np.where(w > 0, w, 1.0)), bounds)


def check_q(temperature: float, epsilon: float, size: int) -> None:
    """Raise ConfigError unless `listwise_q` of groups of up to `size` candidates is a
    distribution."""
    check_value("q_temperature", temperature, "utilities are divided by it", above=0, below=math.inf)
    check_value("q_epsilon", epsilon, f"the least q in groups of {size}, whose sum is 1", above=0, below=1 / size)


def check_tau_beta(tau: float, beta: float) -> None:
    """Raise ConfigError unless the weights of tau and beta are unique."""
    for name, value in (("tau", tau), ("beta", beta)):
        check_value(name, value, least=0, below=math.inf)
    if tau + beta == 0:
        raise ConfigError("tau and beta are both 0, and weights are divided by their sum; raise tau, for example to 1e-6")


def softmax(values: Column, offsets: Offsets) -> Column:
    """[C] softmax in each group. Equal values get exactly equal shares."""
    return _normalize(np.exp(values - spread(reduce_groups(np.maximum, values, offsets), offsets)), offsets)


def group_sums(values: Column, offsets: Offsets) -> Column:
    """[G] sum of each group. Example: [1, 2, 3] with offsets [0, 2, 3] are [3, 3]."""
    return reduce_groups(np.add, values, offsets)


def reduce_groups(operation: np.ufunc, values: Column, offsets: Offsets) -> Column:
    """[G] `operation`, such as `np.maximum`, over each group."""
    reduced: Column = operation.reduceat(values, offsets[:-1]) if len(values) else np.zeros(0)
    return reduced


def spread(per_group: NDArray[np.generic], offsets: Offsets) -> NDArray[np.float64]:
    """[C] each group's number at all of its candidates. Example: [7, 8] with offsets [0, 2, 3] are
    [7, 7, 8]."""
    return np.repeat(np.asarray(per_group, dtype=np.float64), np.diff(offsets))


def _normalize(values: Column, offsets: Offsets) -> Column:
    return values / spread(group_sums(values, offsets), offsets)


def _read(values: ArrayLike, offsets: ArrayLike | None, name: str) -> tuple[Column, Offsets]:
    """The values and the offsets of their groups, checked."""
    column = _column(values, name)
    if offsets is None:
        return column, np.array([0, len(column)] if len(column) else [0], dtype=np.int64)
    bounds = np.asarray(offsets, dtype=np.int64)
    if bounds.ndim != 1 or not len(bounds) or bounds[0] != 0 or bounds[-1] != len(column) or (np.diff(bounds) <= 0).any():
        raise DataError(f"offsets {bounds.tolist()} must rise from 0 to the number of candidates ({len(column)})")
    return column, bounds


def _column(values: ArrayLike, name: str, length: int | None = None) -> Column:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or (length is not None and len(column) != length):
        raise DataError(f"{name} has the shape {column.shape}; it must be one number for each candidate ({length})")
    if not np.isfinite(column).all():
        raise DataError(f"{name} has the value {column[~np.isfinite(column)][0]}; every entry must be finite")
    return column
