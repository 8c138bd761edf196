"""Warns once where the rewards teach nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

PATIENCE = 10
"""Batches in a row without a signal before the warning: easy and hard problems give some."""


class SignalWatch:
    """Counts the batches in a row whose samples all have weight 0, and warns once of `PATIENCE`
    of them."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count_batch(self, items: Sequence[SAWItem]) -> None:
        """Count a batch that is about to be trained."""
        self.in_a_row = 0 if any(item.weight for item in items) else self.in_a_row + 1
        if self.in_a_row == PATIENCE:
            logger.warning(
                "all samples of %d batches in a row have weight 0: the rewards teach nothing. Members of a group that earn the same "
                "have no advantage; look at the rewards, at answers that are cut off, at group_size and at the temperature",
                PATIENCE,
            )
