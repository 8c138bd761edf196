"""pass@k: the probability that at least one of k answers is right."""

from __future__ import annotations

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
