"""Packing: divides lines into micro-batches within the token budget.

The Rust core computes the plans (`crates/ludic-core/src/plan`); `TrainerConfig.packing` selects the
algorithm. A **line** is one sequence in a micro-batch: a sample, or the turns of one episode that
share their prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.training.config import Packing as PackingName, TrainerConfig

Rows = NDArray[np.int64]
"""Indices of samples."""


def plan_lines(lengths: NDArray[np.int32], cfg: TrainerConfig, packing: PackingName | None = None) -> _core.Plan:
    """Plan micro-batches for lines of these lengths with the algorithm `packing`. None means
    `cfg`'s."""
    packing = packing or cfg.packing
    if packing == "padding_free":
        return _core.plan_padding_free(lengths, cfg.micro_token_budget)
    if packing == "greedy":
        return _core.plan_greedy(lengths, cfg.micro_token_budget)
    return _core.plan_optimal(lengths, cfg.micro_token_budget, cfg.overhead_tokens)


def find_line_bounds(chains: NDArray[np.int32]) -> Rows:
    """[L + 1] bounds of the lines: consecutive samples with the same chain number form a line; a
    sample without a chain (-1) is a line by itself. Example: chains [4, 4, -1, -1] give
    [0, 2, 3, 4]."""
    begins = np.flatnonzero((chains[1:] != chains[:-1]) | (chains[1:] < 0)) + 1
    return np.concatenate([[0], begins, [len(chains)]]) if len(chains) else np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Packing:
    """A plan: the lines of each micro-batch."""

    micro_batches: Sequence[Rows]
    num_tokens: int
    """Real tokens."""
    padded_tokens: int
    """Computed tokens."""

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int, /) -> Rows:
        return self.micro_batches[index]
