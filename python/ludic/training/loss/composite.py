"""A weighted sum of losses on one forward pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ludic.errors import ConfigError
from ludic.training.loss.base import Loss, adapted_loss, compute_and_check
from ludic.training.loss.batch import Batch, Stats
from ludic.training.loss.context import SharedContext

logger = logging.getLogger(__name__)


@dataclass
class LossTerm:
    """One term of a `CompositeLoss`."""

    name: str
    """Prefix of the term's statistics."""
    loss: Loss
    """A `Loss`, an object with `compute`, or a function."""
    weight: float = 1.0
    """Factor of the term."""

    def __post_init__(self) -> None:
        adapted_loss(self, required=True)


def _if_all(flag: str) -> Any:
    """A flag that is true if it holds for every term."""
    return property(lambda self: all(getattr(adapted_loss(term), flag) for term in self.terms))


def _if_any(flag: str) -> Any:
    """A flag that is true if it holds for any term."""
    return property(lambda self: any(getattr(adapted_loss(term), flag) for term in self.terms))


@dataclass
class CompositeLoss(Loss):
    """L = sum_k weight_k L_k. All terms read the same log-probabilities, which are computed once.
    Each term is scaled by the micro-batch's share under its own normalizer, so terms that are means
    over samples and terms that are means over tokens can be added. A warning names terms of which
    one is a sum over each sample's tokens and another a mean: their ratio changes with the length.

    Statistics: `loss` (the total); for each term `{name}/loss` (its unweighted value),
    `{name}/weight`, and its other statistics as `{name}/...`.
    """

    terms: Sequence[LossTerm]

    scales_itself = True

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("CompositeLoss needs at least one LossTerm")
        losses = {term.name: term.loss for term in self.terms if hasattr(term.loss, "length_normalize")}
        sums = [name for name, loss in losses.items() if loss.normalizer == "samples" and not loss.length_normalize]
        if sums and len(sums) < len(losses):
            logger.warning(
                "the loss of %s is a sum over an answer's tokens, of %s a mean: the longer the answers, the less the mean weighs; "
                "give the terms the same length_normalize and normalizer",
                ", ".join(sums),
                ", ".join(name for name in losses if name not in sums),
            )

    zero_weight_is_zero_gradient = _if_all("zero_weight_is_zero_gradient")
    reads_shared_only = _if_all("reads_shared_only")
    reads_actions_only = _if_all("reads_actions_only")
    reads_scores_only = _if_all("reads_scores_only")
    reads_entropy = _if_any("reads_entropy")
    reads_reference = _if_any("reads_reference")
    reads_teacher = _if_any("reads_teacher")
    reads_hidden = _if_any("reads_hidden")
    weighs_answers = _if_any("weighs_answers")
    needs_first_pass = _if_any("needs_first_pass")

    @property
    def gathers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of all terms. A name that several terms use must mean the same rows."""
        return tuple(dict.fromkeys(name for term in self.terms for name in adapted_loss(term).gathers))

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the sums of all terms. A name that several terms use must mean the same sum."""
        sums: dict[str, Tensor] = {}
        for term in self.terms:
            if adapted_loss(term).needs_first_pass:
                sums |= adapted_loss(term).first_pass(logits, batch)
        return sums

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        total: Tensor | None = None
        stats: Stats = {}
        samples = shared.mini_batch_share("samples")
        for term in self.terms:
            loss = adapted_loss(term)
            value, term_stats = compute_and_check(loss, shared.logits, shared.batch, shared)
            share = 1.0 if loss.scales_itself else shared.mini_batch_share(loss.normalizer)
            scaled = term.weight * share * value
            total = scaled if total is None else total + scaled
            stats.update({f"{term.name}/{key}": stat for key, stat in term_stats.items()})
            # Statistics are averaged over micro-batches by samples. Example: micro-batches of 1 and
            # 3 samples have 2 and 2 of the tokens, and means 4 and 8 over these. 1/4 (2 x 4) +
            # 3/4 (2/3 x 8) = 6 is the mean over all tokens. Skipped samples of weight 0 are not in
            # the averages.
            factor = 1.0 if self.zero_weight_is_zero_gradient or not samples else share / samples
            stats[f"{term.name}/loss"] = value.detach() * factor
            stats[f"{term.name}/weight"] = term.weight
        assert total is not None
        return total, {"loss": total.detach(), **stats}
