"""Rows of prefix trees, built one token at a time."""

from itertools import pairwise

import numpy as np


def common(left, right):
    """How many tokens two samples begin with in common."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def make_row(samples, least=0):
    """`lengths`, `shared`, the place of each token of each sample, and positions of the row, of
    which a common prefix shorter than `least` is computed again."""
    samples = sorted(samples)
    shared = [0] + [common(*pair) for pair in pairwise(samples)]
    shared = [count if count >= least else 0 for count in shared]
    paths, positions = [], []
    for sample, count in zip(samples, shared, strict=True):
        path = paths[-1][:count] if count else []
        path = [*path, *range(len(positions), len(positions) + len(sample) - count)]
        positions += range(count, len(sample))
        paths.append(path)
    return np.array([len(s) for s in samples]), np.array(shared), paths, np.array(positions)
