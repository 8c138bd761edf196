"""Gradients of two objectives in tau and beta, in closed form: numpy, float64, no autograd.

Symbols, for a group of K candidates: q the distribution made from the utilities, r the reference's
log-probability of each candidate, rho = softmax(r), z0 the sampler's log-probability. The weights
are w = softmax(v) with v = (log q + beta r) / s and s = tau + beta; H is their entropy. H* and KL*
are the targets. A bar is the mean over the groups of all ranks.

Shapes: C candidates of G groups, one group after another; a tangent has two columns, for d/dtau and
d/dbeta.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError, check_value
from ludic.training.controllers.protocol import SumOverRanks
from ludic.training.types import CandidateGroups

Array = NDArray[np.float64]


class MetaGradient(NamedTuple):
    """How far H and KL are from their targets, and the gradient to descend."""

    loss: float
    """(H - H*)^2 / 2 + (KL - KL*)^2 / 2; a term without a target is 0."""
    tau: float
    beta: float


def potential_gradient(
    groups: CandidateGroups | None,
    tau: float,
    beta: float,
    *,
    entropy_target: float | None,
    kl_target: float | None,
    kl: float | None = None,
    entropy: float | None = None,
    sum_over_ranks: SumOverRanks = tuple,
) -> MetaGradient:
    """Gradient of the convex dual potential Phi = mean J* - tau H* + beta KL*, where
    J* = s lse(v) - beta lse(r) is the value that the weights attain:

        dPhi/dtau = H - H*,   dPhi/dbeta = -(KL - KL*)

    KL is KL(w || rho), or `kl` if given; H is the entropy of w, or `entropy` if given, such as the
    entropy after `share_among_best`. Descent enforces H >= H* and KL <= KL*: it ends at the
    multipliers of these constraints, and the multiplier of a slack constraint is at its bound. A
    target of None makes the derivative 0.

    Raises DataError if the groups lack what a target needs.
    """
    reads_kl = kl_target is not None and kl is None
    mean_entropy = mean_kl = 0.0
    if reads_kl or (entropy_target is not None and entropy is None):
        own = np.zeros(3)  # number of groups, sum of H, sum of KL(w || rho)
        if groups is not None and len(groups):
            candidates = _Candidates(groups, tau, beta, reads_reference=reads_kl)
            own[:] = len(groups), candidates.entropy_sums()[0], candidates.kl_of(candidates.v) if reads_kl else 0.0
        mean_entropy, mean_kl = _mean_over_groups(own, sum_over_ranks).tolist()
    entropy_error = 0.0 if entropy_target is None else (mean_entropy if entropy is None else entropy) - entropy_target
    kl_error = 0.0 if kl_target is None else (mean_kl if kl is None else kl) - kl_target
    return MetaGradient((entropy_error**2 + kl_error**2) / 2, entropy_error, -kl_error)


def tracking_gradient(
    groups: CandidateGroups | None,
    tau: float,
    beta: float,
    *,
    entropy_target: float | None,
    kl_target: float | None,
    steps: int = 1,
    inner_lr: float = 0.5,
    use_hessian: bool = False,
    entropy: float | None = None,
    sum_over_ranks: SumOverRanks = tuple,
) -> MetaGradient:
    """Gradient of L = (mean H - H*)^2 / 2 + (mean KL(softmax z_N || rho) - KL*)^2 / 2.

    z_N is what N = `steps` gradient steps of rate `inner_lr` make of the sampler's log-probability
    z_0, on -sum w log softmax(z) + beta KL(softmax(z) || rho). Its derivative in (tau, beta) is
    carried forward through the steps. Without `use_hessian` the gradient of a step counts as
    constant in z; with one step both are the same. A term whose target is None is left out.
    `entropy` stands in for mean H, whose slopes are still computed from w.

    Raises DataError if the groups lack what a target needs.
    """
    check_value("steps", steps, least=1)
    own = np.zeros(7)
    if groups is not None and len(groups):
        candidates = _Candidates(groups, tau, beta, reads_reference=kl_target is not None)
        own[:4] = [len(groups), *candidates.entropy_sums()]
        if kl_target is not None:
            own[4:] = candidates.unrolled_kl_sums(steps, inner_lr, use_hessian=use_hessian)
    means = _mean_over_groups(own, sum_over_ranks)
    mean_entropy, *entropy_slope = means[:3]
    kl, *kl_slope = means[3:]
    entropy_error = 0.0 if entropy_target is None else (mean_entropy if entropy is None else entropy) - entropy_target
    kl_error = 0.0 if kl_target is None else kl - kl_target
    gradient = entropy_error * np.array(entropy_slope) + kl_error * np.array(kl_slope)
    return MetaGradient(float(entropy_error**2 + kl_error**2) / 2, float(gradient[0]), float(gradient[1]))


def _mean_over_groups(own: Array, sum_over_ranks: SumOverRanks) -> Array:
    """Means over the groups of all ranks, from this rank's number of groups and its sums."""
    number, *sums = sum_over_ranks(own.tolist())
    if not number:
        raise DataError("the gradient of the meta-controller needs at least one group of candidates")
    return np.array(sums) / number


class _Candidates:
    """The candidates of all groups side by side, and the weights at (tau, beta)."""

    def __init__(self, groups: CandidateGroups, tau: float, beta: float, *, reads_reference: bool) -> None:
        self.scale = tau + beta
        check_value("tau + beta", self.scale, above=0)
        if groups.reference_logp is None and (reads_reference or beta):
            raise DataError("the groups have no reference_logp, which beta and a KL target need; give the trainer a reference")
        self._starts, self._sizes = groups.offsets[:-1], np.diff(groups.offsets)
        self.beta, self._has_reference = beta, groups.reference_logp is not None
        self.reference = np.zeros(len(groups.q)) if groups.reference_logp is None else groups.reference_logp
        self.start = groups.behaviour_logp
        self.v = (np.log(groups.q) + beta * self.reference) / self.scale
        self.weights = np.exp(self.log_softmax(self.v))

    def sum(self, values: Array) -> Array:
        """[C, ...] -> [G, ...]."""
        return np.add.reduceat(values, self._starts)

    def center(self, values: Array, weights: Array) -> Array:
        """Subtract from [C] values their mean in each group under the [C] weights."""
        return values - np.repeat(self.sum(weights * values), self._sizes)

    def log_softmax(self, values: Array) -> Array:
        shifted = values - np.repeat(np.maximum.reduceat(values, self._starts), self._sizes)
        return shifted - np.repeat(np.log(self.sum(np.exp(shifted))), self._sizes)

    def kl_of(self, logits: Array) -> float:
        """Sum over groups of KL(softmax(logits) || rho)."""
        logp = self.log_softmax(logits)
        return float((np.exp(logp) * (logp - self.log_softmax(self.reference))).sum())

    def entropy_sums(self) -> list[float]:
        """Sums over groups of H, dH/dtau = Var(v) / s and dH/dbeta = (Var(v) - Cov(v, r)) / s.
        Without a reference the last is 0."""
        v, w = self.center(self.v, self.weights), self.weights
        variance, covariance = float((w * v * v).sum()), float((w * v * self.reference).sum())
        entropy = -float((w * self.log_softmax(self.v)).sum())
        return [entropy, variance / self.scale, (variance - covariance) / self.scale if self._has_reference else 0.0]

    def unrolled_kl_sums(self, steps: int, inner_lr: float, *, use_hessian: bool) -> list[float]:
        """Sums over groups of KL(softmax z_N || rho) and its derivatives in tau and beta.

        One step, with a = log pi - log rho, d = KL(pi || rho) and c = pi (a - d), the gradient of d
        in z: z <- z - eta g, g = (pi - w) + beta c. Its tangent is
        dg = -dw + [0, c] + (P + beta Q) dz, where P = diag(pi) - pi pi^T is the derivative of pi,
        and Q = diag(c) + P - c pi^T - pi c^T is the derivative of c.
        """
        if self.start is None:
            raise DataError("the groups have no behaviour_logp, from which the inner steps start; sample with log-probabilities")
        w, r, v, z = self.weights, self.reference, self.v, self.start
        dw = np.stack([w * self.center(-v, w), w * self.center(r - v, w)], axis=1) / self.scale
        log_rho, dz = self.log_softmax(r), np.zeros_like(dw)
        pi, c = self._policy(z, log_rho)
        for _ in range(steps):
            dg = -dw
            dg[:, 1] += c
            if use_hessian:
                dg = dg + self._hessian_product(pi, c, dz)
            z, dz = z - inner_lr * (pi - w + self.beta * c), dz - inner_lr * dg
            pi, c = self._policy(z, log_rho)
        return [self.kl_of(z), *(c @ dz).tolist()]

    def _policy(self, z: Array, log_rho: Array) -> tuple[Array, Array]:
        """pi = softmax(z), and c, the gradient of KL(pi || rho) in z."""
        logp = self.log_softmax(z)
        pi = np.exp(logp)
        return pi, pi * self.center(logp - log_rho, pi)

    def _hessian_product(self, pi: Array, c: Array, dz: Array) -> Array:
        """(P + beta Q) dz for both columns of dz, without the K x K matrices."""
        pi, c = pi[:, None], c[:, None]

        def spread(values: Array) -> Array:
            return np.repeat(self.sum(values), self._sizes, axis=0)

        mean = spread(pi * dz)
        p_dz = pi * (dz - mean)
        q_dz = c * dz + p_dz - c * mean - pi * spread(c * dz)
        return p_dz + self.beta * q_dz
