"""The statistics of evaluations: confidence intervals, pass@k, distinct answers of k samples, and
their entropy.

An interval says how far a measured mean may be from the mean over all problems of this kind.
Problems are independent draws; several answers to one problem are not. Every interval here
therefore takes one number per problem. Shares, between 0 and 1, get a Wilson score interval with
the effective number of answers, which follows from the spread between problems. Means of other
numbers get a Student interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ludic.errors import ConfigError, check_value


@dataclass(frozen=True)
class Interval:
    """A measured mean with the interval around it. Example: 8 of 10 right is `Interval(0.8,
    0.49, 0.943, 10)`, rounded."""

    value: float
    low: float | None
    """None for a single problem, whose spread is unknown."""
    high: float | None
    num_problems: int
    """Number of problems in the mean."""


def wilson_interval(successes: float, trials: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) of a share: the values that a score test does not reject (Wilson 1927; eq. 4 of
    Brown, Cai and DasGupta 2001).

    With z the normal quantile: (s + z^2/2 -+ z sqrt(s (n - s) / n + z^2/4)) / (n + z^2). `trials`
    may be fractional.
    """
    check_value("successes", successes, "the most is the number of trials", least=0, most=trials)
    check_value("trials", trials, above=0)
    z = _normal_quantile(confidence)
    centre = successes + z * z / 2
    spread = z * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    low, high = ((centre + sign * spread) / (trials + z * z) for sign in (-1, 1))
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


def share_interval(shares: Sequence[float], *, answers: int | None = None, confidence: float = 0.95) -> Interval:
    """The mean of one share per problem, each between 0 and 1, with a Wilson interval clustered by
    problem.

    It is the interval of n independent answers, with n chosen so that they would have the same
    standard error as the mean over problems: n = p (1 - p) / (that standard error squared), but at
    most `answers`, the number of answers (one per problem if None). With one answer per problem it
    is the plain Wilson interval. The effective sample size in Wilson's interval follows Dean and
    Pagano 2015, section 2.
    """
    return Interval(*_share_bounds(shares, answers, confidence), len(shares))


def _share_bounds(shares: Sequence[float], answers: int | None, confidence: float) -> tuple[float, float, float]:
    """(mean, low, high)."""
    count = len(shares)
    check_value("the number of problems", count, least=1)
    mean = math.fsum(shares) / count
    squared_error = math.fsum((share - mean) ** 2 for share in shares) / count**2
    most = float(max(count, answers or count))
    within = mean * (1 - mean)
    effective = float(count) if within <= 0 else most if within >= most * squared_error else within / squared_error
    return mean, *wilson_interval(min(max(mean, 0.0), 1.0) * effective, effective, confidence=confidence)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The mean of one number per problem, with Student's interval: mean -+ t s / sqrt(n), s with
    n - 1 in the denominator."""
    count = len(values)
    check_value("the number of problems", count, least=1)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    reach = student_quantile(confidence, count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - reach, mean + reach, count)


def difference_interval(
    before: Sequence[float], after: Sequence[float], *, answers: int | None = None, confidence: float = 0.95
) -> Interval:
    """The change of a mean over problems. `before` and `after` have one number per problem, for the
    same problems in the same order.

    Shares, all between 0 and 1: their two intervals (`share_interval`, each of `answers`) are
    combined by squares, d - sqrt((a - a_low)^2 + (b_high - b)^2) and d + sqrt((a_high - a)^2 + (b -
    b_low)^2), with a after, b before and d = a - b: method 10 of Newcombe 1998. It assumes
    that the two are independent. In fact they are correlated by problem, so the interval is rather
    too wide; it keeps its width if every answer is right. Other numbers: Student's interval of the
    differences, problem by problem.
    """
    if len(before) != len(after):
        raise ConfigError(f"before ({len(before)}) and after ({len(after)}) must have one number for each of the same problems")
    if not all(0 <= value <= 1 for value in (*before, *after)):
        return mean_interval([late - early for early, late in zip(before, after, strict=True)], confidence=confidence)
    (early, early_low, early_high), (late, late_low, late_high) = (
        _share_bounds(shares, answers, confidence) for shares in (before, after)
    )
    gain = late - early
    low = gain - math.hypot(late - late_low, early_high - early)
    high = gain + math.hypot(late_high - late, early - early_low)
    return Interval(gain, low, high, len(before))


def student_quantile(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's distribution: 1.96 becomes 2.26 with 9 degrees of
    freedom.

    Exact for 1 and 2 degrees; else the series in 1/freedom of Abramowitz and Stegun 26.7.5, which
    is within 0.2 % at 95 %.
    """
    z = _normal_quantile(confidence)
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _normal_quantile(confidence: float) -> float:
    check_value("confidence", confidence, "such as 0.95", above=0, below=1)
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The unbiased estimate for one problem, from `answers` answers of which `right` are right
    (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k): the share of the sets of k out of n answers that contain a right one.
    It is 1 or 0 at k = n and c / n at k = 1. Exact for any size: integers are divided last.
    """
    check_value("right", right, "the most is the number of answers", least=0, most=answers)
    check_value("k", k, "sample more answers to estimate a larger k", least=1, most=answers)
    return (math.comb(answers, k) - math.comb(answers - right, k)) / math.comb(answers, k)


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
    check_value("k", k, "sample more answers to estimate a larger k", least=1, most=answers)
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
