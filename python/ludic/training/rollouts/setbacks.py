"""Rejections and losses since the last batch, and when they are too many."""

from __future__ import annotations

from collections import Counter

from ludic.errors import RolloutError
from ludic.interaction.containment import describe_error

SHOWN_REASONS = 5
"""How many reasons of rejections an error shows."""


class Setbacks:
    """Counts rejected groups by reason, and groups that were lost one after another."""

    def __init__(self, *, max_rejections: int, max_losses: int) -> None:
        self._max_rejections, self._max_losses = max_rejections, max_losses
        self._reasons: Counter[str] = Counter()
        self._losses = 0
        self._last_error: Exception | None = None

    @property
    def is_out_of_patience(self) -> bool:
        """Whether more groups were rejected than a batch may cost."""
        return self._reasons.total() > self._max_rejections

    @property
    def is_losing(self) -> bool:
        """Whether so many groups were lost in a row that something is broken."""
        return self._losses >= self._max_losses

    @property
    def is_over(self) -> bool:
        """Whether no more groups should be admitted for now."""
        return self.is_losing or self.is_out_of_patience

    def reject(self, reason: str) -> None:
        """The filter has refused a group."""
        self._reasons[reason] += 1

    def lose(self, error: Exception) -> bool:
        """A group is lost. Returns whether it is the first one in a row."""
        self._losses += 1
        self._last_error = error
        return self._losses == 1

    def end_losses(self) -> None:
        """A group is whole: the losses before it were not in a row with those after it."""
        self._losses = 0

    def reset(self) -> None:
        """Begin anew, with the next batch or after an error."""
        self._reasons.clear()
        self._losses, self._last_error = 0, None

    def make_error(self) -> RolloutError:
        """The error of too many losses or rejections, with their causes."""
        if self.is_losing:
            error = RolloutError(
                f"{self._losses} groups were lost one after another, the last one to "
                f"{describe_error(self._last_error)}; mend the cause, then ask for the batch again"
            )
            error.__cause__ = self._last_error
            return error
        number = self._reasons.total()
        shown = [f"{times} x {reason}" for reason, times in self._reasons.most_common(SHOWN_REASONS) if reason]
        more = len(self._reasons) - len(shown) if shown else 0
        listed = f" ({'; '.join(shown)}{f'; and {more} other reasons' if more else ''})" if shown else ""
        return RolloutError(
            f"the filter rejected {number} groups for one batch, more than patience * groups_per_batch ({self._max_rejections}){listed}; "
            "relax the filter, use prompts of other difficulty, raise patience, or set on_exhausted='short' for smaller batches"
        )
