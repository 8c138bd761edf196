"""One plan for all ranks. Every rank has the whole batch, makes the same plan of it, and takes its
own part; nothing is exchanged.

Ranks wait for each other after each micro-batch or at least after each optimizer step, so the core
plans all of them together (`_core.plan_ranks`): the same number of micro-batches for each, of
similar cost at the same time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ludic import _core
from ludic.errors import RankError
from ludic.models.context_parallel import CONTEXT, ContextGroup
from ludic.training import ranks
from ludic.training.batching.packing import Rows
from ludic.training.config import Packing as PackingName, TrainerConfig

_PRICES = inspect.signature(_core.plan_ranks).parameters
LINEAR, QUADRATIC = int(_PRICES["linear"].default), int(_PRICES["quadratic"].default)
"""A line of n tokens costs `LINEAR * n + QUADRATIC * n**2`; the core has the values."""


@dataclass(frozen=True)
class RankShare:
    """Says that all ranks have the same batch, and which of them this is. `RankShare(0, 1)`: this
    rank alone has it, and others have no part in it."""

    rank: int
    world: int
    context: ContextGroup | None = None
    """The ranks that have the same share, and compute slices of its rows. Ranks 0 to 3 in groups of
    two have the shares 0, 0, 1 and 1 of 2."""

    @classmethod
    def of_this_rank(cls) -> RankShare:
        context = ranks.context()
        size = 1 if context is None else context.size
        return cls(ranks.rank() // size, ranks.world_size() // size, context)

    @property
    def columns(self) -> dict[str, ContextGroup]:
        """What each micro-batch of the share has besides its tensors."""
        return {} if self.context is None else {CONTEXT: self.context}


@dataclass(frozen=True)
class PlannedAtoms:
    """The plans of all ranks for atoms of equally many lines, which are never divided."""

    plans: Sequence[_core.RankPlan]
    """The micro-batches of each rank, as indices of atoms; equally many for each."""
    lines: Rows
    """[A, W] the lines of each atom. Example: the pairs (0, 1) and (4, 2) are [[0, 1], [4, 2]]."""

    def __len__(self) -> int:
        return len(self.plans[0])

    def __getitem__(self, place: tuple[int, int]) -> Rows:
        """The lines of a micro-batch, by (rank, number). Example: atoms [1, 0] of the lines above
        are [4, 2, 0, 1]."""
        rank, number = place
        return self.lines[self.plans[rank][number]].reshape(-1)


def plan_atoms(
    lines: Rows, lengths: NDArray[np.int32], cfg: TrainerConfig, world: int, packing: PackingName | None = None
) -> PlannedAtoms:
    """Plan the atoms `lines` [A, W], whose longest lines have `lengths` [A] tokens, for `world`
    ranks, with the algorithm `packing`. None means `cfg`'s.

    W lines of one atom, which are padded to the same length, cost W times one of them: the budget
    and the overhead of a micro-batch are divided by W instead.
    """
    width = lines.shape[1]
    budget, overhead = cfg.micro_token_budget // width, cfg.overhead_tokens // width
    plans = _core.plan_ranks(np.ascontiguousarray(lengths), budget, world, packing or cfg.packing, overhead)
    return PlannedAtoms(plans, lines)


class RankPlans:
    """The micro-batches of this rank, and the totals of all ranks.

    Some parts follow each other, such as the micro-batches of pairs and of samples without a
    partner. Each has the same number of micro-batches on every rank, the heaviest first.
    """

    def __init__(
        self, parts: Sequence[PlannedAtoms], lengths: NDArray[np.int32], share: RankShare, *, padding_free: bool
    ) -> None:
        """`lengths` [L]: tokens of each line."""
        self._parts, self._lengths, self._share, self._padding_free = parts, lengths, share, padding_free
        self._places = [(part, number) for part in parts for number in range(len(part))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int, /) -> Rows:
        part, number = self._places[index]
        return part[self._share.rank, number]

    @property
    def num_tokens(self) -> int:
        """Real tokens, of all ranks."""
        return int(self._lengths.sum(dtype=np.int64))

    @property
    def padded_tokens(self) -> int:
        """Computed tokens, of all ranks."""
        return sum(part.lines.shape[1] * plan.padded_tokens for part in self._parts for plan in part.plans)

    def lockstep(self) -> tuple[float, float]:
        """(cost of the lines, cost of the time that all ranks take for them together, each waiting
        for the slowest after every micro-batch). Their quotient is the planned efficiency.

        Example: costs 9 and 7 at the same time, then 4 and 1: 9 + 7 + 4 + 1 = 21 of
        2 * (9 + 4) = 26.
        """
        slowest = sum(self._slowest(part, number) for part, number in self._places)
        return float(_price(self._lengths).sum()), float(self._share.world * slowest)

    def _slowest(self, part: PlannedAtoms, number: int) -> int:
        """The cost of the costliest micro-batch of that number. A padded one costs its number of
        lines times the price of the longest.

        Example: micro-batches [2, 0], [] and [1] of three ranks are the atoms [2, 0, 1], which
        begin at 0 and 2 where there are any.
        """
        atoms = [plan[number] for plan in part.plans]
        counts = np.array([len(each) for each in atoms])
        prices = _price(self._lengths[part.lines[np.concatenate(atoms)]])  # [A, W]
        begins = (counts.cumsum() - counts)[counts > 0]
        if self._padding_free:
            return int(np.add.reduceat(prices.sum(axis=1), begins).max())
        longest = np.maximum.reduceat(prices.max(axis=1), begins)
        return int((longest * counts[counts > 0] * part.lines.shape[1]).max())


def _price(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    wide = lengths.astype(np.int64)
    return LINEAR * wide + QUADRATIC * wide**2


SAME_BATCH = 0
"""The digest of samples that cannot differ between the ranks."""


def all_have_samples(digest: int | None, device: torch.device | str) -> bool:
    """Whether every rank has prepared its samples. `digest`: `MacroBatch.digest`, below 2**53, or
    `SAME_BATCH`; None where the preparation failed. One exchange of three numbers. Raises RankError
    on all ranks unless all have the same samples: each would make another plan, and they would wait
    for each other without end."""
    number = float(digest or 0)
    failed, largest, smallest = ranks.max_over_ranks([float(digest is None), number, -number], device)
    if not failed and largest != -smallest:
        raise RankError("preprocessing gave the ranks different samples; it must not depend on the rank, chance or set order")
    return not failed
