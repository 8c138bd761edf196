"""pass@k: the probability that at least one of k answers is right; and how many different answers a
policy gives: distinct answers of k samples, and their entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import comb

from ludic.errors import ConfigError


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The unbiased estimate for one problem, from `answers` answers of which `right` are right
    (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k): the share of the sets of k out of n answers that contain a right one.
    It is 1 or 0 at k = n and c / n at k = 1. Exact for any size: integers are divided last.
    """
    if not 0 <= right <= answers:
        raise ConfigError(f"right ({right}) must be between 0 and the number of answers ({answers})")
    if not 1 <= k <= answers:
        raise ConfigError(f"k ({k}) must be between 1 and the number of answers ({answers}); sample more to estimate a larger k")
    return (comb(answers, k) - comb(answers - right, k)) / comb(answers, k)


def curve_points(most: int) -> list[int]:
    """The values of k to report: the powers of two up to `most`, and `most`. Example:
    `curve_points(6)` is `[1, 2, 4, 6]`."""
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})


def distinct_at_k(counts: Iterable[int], answers: int, k: int) -> float:
    """The expected number of distinct answers among `k` of the `answers` samples, drawn without
    replacement: an unbiased estimate of the number for k new samples.

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

    It is the entropy of the observed shares, on average below the policy's entropy by about
    (number of answers - 1) / (2 * samples).

    >>> entropy_of_answers([3, 3]) == math.log(2)
    True
    """
    seen = [count for count in counts if count > 0]
    total = sum(seen)
    return math.fsum(count / total * math.log(total / count) for count in seen)
