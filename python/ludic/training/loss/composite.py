"""A weighted sum of losses on one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ludic.errors import ConfigError
from ludic.training.loss.base import (
    Batch,
    Loss,
    SharedContext,
    Stats,
    call_loss,
    needs_first_pass,
    normalizer_of,
    reads_entropy,
    reads_shared_only,
    zero_weight_is_zero_gradient,
)


@dataclass
class LossTerm:
    """One part of a composite; `name` prefixes its statistics."""

    name: str
    loss: Loss
    weight: float = 1.0


@dataclass
class CompositeLoss:
    """L = sum_k weight_k L_k. Every term sees the same log-probabilities, computed once, and is
    scaled by its own normalizer's share of the mini-batch, so that means over samples and means
    over tokens can stand in one sum.

    Statistics: `loss` (the total), and for each term `{name}/loss` (its own value), `{name}/weight`
    and its other statistics.
    """

    terms: Sequence[LossTerm]

    scales_itself = True
    """`scaled_loss` leaves the result as it is."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("CompositeLoss needs at least one LossTerm")

    @property
    def zero_weight_is_zero_gradient(self) -> bool:
        """Only if that holds for every term."""
        return all(zero_weight_is_zero_gradient(term.loss) for term in self.terms)

    @property
    def reads_shared_only(self) -> bool:
        """Only if that holds for every term."""
        return all(reads_shared_only(term.loss) for term in self.terms)

    @property
    def reads_entropy(self) -> bool:
        """If any term does."""
        return any(reads_entropy(term.loss) for term in self.terms)

    @property
    def needs_first_pass(self) -> bool:
        """If any term does."""
        return any(needs_first_pass(term.loss) for term in self.terms)

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """What all terms measure; one name is one quantity."""
        sums: dict[str, Tensor] = {}
        for term in self.terms:
            if needs_first_pass(term.loss):
                measuring: Any = term.loss
                sums |= measuring.first_pass(logits, batch)
        return sums

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        shared = shared or SharedContext(logits, batch, with_entropy=self.reads_entropy)
        total: Tensor | None = None
        stats: Stats = {}
        for term in self.terms:
            value, term_stats = call_loss(term.loss, logits, batch, shared)
            share = 1.0 if getattr(term.loss, "scales_itself", False) else shared.share(normalizer_of(term.loss))
            scaled = term.weight * share * value
            total = scaled if total is None else total + scaled
            stats.update({f"{term.name}/{key}": stat for key, stat in term_stats.items()})
            stats[f"{term.name}/loss"] = value.detach()
            stats[f"{term.name}/weight"] = term.weight
        assert total is not None
        return total, {"loss": total.detach(), **stats}
