"""The credit of MaxEnt-GRPO: one weight for each sample of a macro-batch, from listwise weights."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError, check_value
from ludic.training.coefficients import Coefficient, as_coefficient
from ludic.training.maxent.listwise import (
    Column,
    Offsets,
    check_q,
    check_tau_beta,
    listwise_q,
    listwise_weights,
    reduce_groups,
    share_among_best,
    spread,
    weight_entropy,
)
from ludic.training.types import CandidateGroups, Candidates, Weighed

Baseline = Literal["uniform", "none"]
Scale = Literal["weights", "tempered"]


class ListwiseCredit:
    """A_i = (C/G) (w_i - 1/K) for every step of candidate i, where w are the listwise weights of
    its group of K, and the macro-batch has C candidates in G groups, over all ranks.

    A candidate is a rollout; candidates of one group answer the same prompt. A group of equal
    utilities has weights 1/K at beta = 0, so its credit is exactly 0. With
    `baseline="none"` the 1/K is not subtracted, as in the document; equal weights then shorten
    answers whatever the reward, if the loss takes means over their tokens. `scale="tempered"`:
    A_i = K (tau + beta) T_q (w_i - 1/K), which for tau -> inf and beta = 0 is u_i - mean(u), the
    advantage of Dr. GRPO (arXiv:2503.20783).

    `tau` and `beta` are numbers or `Coefficient`s, read at each batch. `length_normalize_reference`
    False: r is a sum over tokens, and the weights are multiplied by token counts and normalised.
    `sampler_exponent` above 0: `share_among_best` with mean log-probabilities of the sampler.

    Columns for losses, [N] each: `row_share`, the row's part of its candidate's tokens times the
    mean number of rows of a candidate (1 if each has one); `candidate_tokens`; `listwise_weight`
    w_i; `uniform_weight` 1/K; `candidates_per_group` C/G.
    """

    def __init__(
        self,
        *,
        group_size: int,
        tau: float | Coefficient = 0.1,
        beta: float | Coefficient = 0.0,
        q_temperature: float = 1.0,
        q_epsilon: float = 1e-6,
        length_normalize_reference: bool = True,
        sampler_exponent: float = 1.0,
        baseline: Baseline = "uniform",
        scale: Scale = "weights",
        allow_partial: bool = False,
    ) -> None:
        self._reads_reference = isinstance(beta, Coefficient) or beta > 0
        self.group_size, self.allow_partial = group_size, allow_partial
        self.tau, self.beta = as_coefficient(tau), as_coefficient(beta)
        self.q_temperature, self.q_epsilon = q_temperature, q_epsilon
        self.length_normalize_reference, self.sampler_exponent = length_normalize_reference, sampler_exponent
        self.baseline, self.scale = baseline, scale
        check_value("group_size", group_size, "candidates are weighed against each other", least=2)
        check_value("sampler_exponent", sampler_exponent, "0 leaves the weights as they are", least=0)
        check_value("baseline", baseline, choices=get_args(Baseline))
        check_value("scale", scale, choices=get_args(Scale))
        check_q(q_temperature, q_epsilon, group_size)
        check_tau_beta(float(self.tau), float(self.beta))

    @property
    def reads_reference(self) -> bool:
        """Whether the weights depend on the reference: beta is above 0, or a controller sets it."""
        return self._reads_reference

    def weigh(self, candidates: Candidates) -> Weighed:
        """Raises DataError for groups of another size than `group_size` (smaller ones are fine with
        `allow_partial`, since samples may be dropped after their credit was computed), for rows of
        a candidate with different utilities, and without the log-probabilities that the weights
        read."""
        rows = _order(candidates)
        sizes = np.diff(rows.offsets)
        wrong = sizes > self.group_size if self.allow_partial else sizes != self.group_size
        if wrong.any():
            raise DataError(f"Group size mismatch: a group has {sizes[wrong][0]} rollouts, group_size is {self.group_size}")
        groups = self._groups(candidates, rows)
        utility = candidates.utility[rows.first]
        weights = self._weights(groups, rows, utility)
        total_rows, total, total_groups = candidates.sum_over_ranks([len(candidates.utility), len(rows.first), len(sizes)])
        uniform = spread(1.0 / sizes, rows.offsets)
        scale = total / max(total_groups, 1.0)
        centred = weights - uniform if self.baseline == "uniform" else weights
        if self.scale == "tempered":
            factor = spread(sizes * (float(self.tau) + float(self.beta)) * self.q_temperature, rows.offsets)
        else:
            factor = np.full(len(weights), scale)
        tokens = rows.tokens[rows.candidate]
        columns = {
            "row_share": candidates.token_count / tokens * (total_rows / max(total, 1.0)),
            "candidate_tokens": tokens,
            "listwise_weight": weights[rows.candidate],
            "uniform_weight": uniform[rows.candidate],
            "candidates_per_group": np.full(len(tokens), scale),
        }
        return Weighed((factor * centred)[rows.candidate], columns, self._stats(candidates, groups, weights, utility), groups)

    def _groups(self, candidates: Candidates, rows: _Rows) -> CandidateGroups:
        """What the weights are computed from."""
        q = listwise_q(candidates.utility[rows.first], rows.offsets, temperature=self.q_temperature, epsilon=self.q_epsilon)
        reference = _candidate_sums(candidates.reference_logp, rows)
        behaviour = _candidate_sums(candidates.behaviour_logp, rows)
        if reference is not None and self.length_normalize_reference:
            reference = reference / rows.tokens
        return CandidateGroups(rows.offsets, q, reference, None if behaviour is None else behaviour / rows.tokens)

    def _weights(self, groups: CandidateGroups, rows: _Rows, utility: Column) -> Column:
        """[C] weights of the candidates."""
        beta = float(self.beta)
        reference = groups.reference_logp if beta > 0 else None
        counts = None if self.length_normalize_reference else rows.tokens
        weights = listwise_weights(groups.q, reference, rows.offsets, tau=float(self.tau), beta=beta, token_counts=counts)
        if self.sampler_exponent == 0:
            return weights
        if groups.behaviour_logp is None:
            raise DataError(f"sampler_exponent ({self.sampler_exponent}) needs actor_logps; sample with ReturnSpec.for_rl()")
        return share_among_best(weights, utility, groups.behaviour_logp, rows.offsets, exponent=self.sampler_exponent)

    def _stats(self, candidates: Candidates, groups: CandidateGroups, weights: Column, utility: Column) -> dict[str, float]:
        """Statistics over the groups of all ranks; docs/metrics.md has their keys."""
        offsets = groups.offsets
        uniform = spread(1.0 / np.diff(offsets), offsets)
        w, q = weight_entropy(weights, offsets), weight_entropy(groups.q, offsets)
        a = weights - uniform
        flat = reduce_groups(np.maximum, utility, offsets) == reduce_groups(np.minimum, utility, offsets)
        sums = candidates.sum_over_ranks([len(w), w.sum(), q.sum(), (q**2).sum(), flat.sum(), len(a), a.sum(), (a**2).sum()])
        ends = [end for column in (w, q) for end in (column.max(initial=-np.inf), -column.min(initial=np.inf))]
        extremes = candidates.max_over_ranks(ends)
        number, total = max(sums[0], 1.0), max(sums[5], 1.0)
        q_mean, a_mean = sums[2] / number, sums[6] / total
        return {
            "tau": float(self.tau),
            "beta": float(self.beta),
            "weight_entropy": sums[1] / number,
            "weight_entropy_min": -extremes[1],
            "weight_entropy_max": extremes[0],
            "q_entropy_mean": q_mean,
            "q_entropy_std": max(sums[3] / number - q_mean**2, 0.0) ** 0.5,
            "q_entropy_min": -extremes[3],
            "q_entropy_max": extremes[2],
            "advantage_entropy_mean": a_mean,
            "advantage_entropy_std": max(sums[7] / total - a_mean**2, 0.0) ** 0.5,
            "frac_zero_signal": sums[4] / number,
        }


class _Rows(NamedTuple):
    """How N rows make C candidates in G groups.

    Example: rows of the candidates 1 0 1 in one group have candidate [0, 1, 0] in the order of
    first appearance, and first [0, 1].
    """

    candidate: NDArray[np.int64]
    """[N] the candidate of each row; candidates are numbered group after group."""
    first: NDArray[np.int64]
    """[C] the first row of each candidate."""
    offsets: Offsets
    """[G + 1] the first candidate of each group, and C."""
    tokens: Column
    """[C] action tokens of each candidate, over all of its rows."""


def _order(candidates: Candidates) -> _Rows:
    """Raises DataError for a candidate whose rows have different utilities or groups."""
    pairs = np.stack([candidates.group, candidates.rollout], axis=1)
    _, first, candidate = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    candidate = candidate.reshape(-1)
    group = candidates.group[first]
    offsets = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(group)]]) if len(group) else np.zeros(1)
    wrong = candidates.utility != candidates.utility[first][candidate]
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        one, other = candidates.utility[row], candidates.utility[first[candidate[row]]]
        raise DataError(f"the rows of one rollout have different utilities ({one} and {other}); use EpisodicReturn")
    tokens = np.bincount(candidate, weights=candidates.token_count, minlength=len(first)).astype(np.float64)
    return _Rows(candidate, first, offsets.astype(np.int64), tokens)


def _candidate_sums(column: Column | None, rows: _Rows) -> Column | None:
    """[C] sums over the rows of each candidate; None without a column."""
    if column is None:
        return None
    return np.bincount(rows.candidate, weights=column, minlength=len(rows.first)).astype(np.float64)
