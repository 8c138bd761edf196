"""How many different answers a policy gives: distinct answers of k samples, and their entropy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ludic.errors import ConfigError


def distinct_at_k(counts: Iterable[int], answers: int, k: int) -> float:
    """The expected number of distinct answers among `k` of the `answers` samples, drawn without
    replacement: an unbiased estimate of that of k new samples.

    `counts` says how often each answer that is of interest, such as a right one, occurred. An
    answer that occurred c times of n is missed with probability C(n - c, k) / C(n, k).

    >>> distinct_at_k([2, 1], answers=4, k=2)  # a a b -: of 6 pairs aa ab ab a- a- b-
    1.3333333333333335
    """
    seen = list(counts)
    if not 1 <= k <= answers:
        raise ConfigError(f"k ({k}) must be between 1 and the {answers} answers; draw more answers")
    if any(count < 0 for count in seen) or sum(seen) > answers:
        raise ConfigError(f"the counts ({sum(seen)} in all, the least {min(seen)}) must be counts of the {answers} answers")
    draws = math.comb(answers, k)
    return math.fsum(1.0 - math.comb(answers - count, k) / draws for count in seen)


def entropy_of_answers(counts: Iterable[int]) -> float:
    """The entropy in nats of how the samples are shared among the answers; 0 without samples.

    It is the entropy of the observed shares, on average below that of the policy by about
    (number of answers - 1) / (2 * samples).

    >>> entropy_of_answers([3, 3]) == math.log(2)
    True
    """
    seen = [count for count in counts if count > 0]
    total = sum(seen)
    return math.fsum(count / total * math.log(total / count) for count in seen)
