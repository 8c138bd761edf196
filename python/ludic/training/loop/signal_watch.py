"""Warns once if the rewards give no training signal."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

PATIENCE = 10
"""Batches without a signal in a row before the warning. A few are normal: problems may be too
easy or too hard."""


class SignalWatch:
    """Counts batches in a row in which all samples have weight 0, and warns once, after
    `PATIENCE` of them."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count_batch(self, items: Sequence[SAWItem]) -> None:
        """Count a batch to train on."""
        self.in_a_row = 0 if any(item.weight for item in items) else self.in_a_row + 1
        if self.in_a_row == PATIENCE:
            logger.warning(
                "all samples of %d batches in a row have weight 0: the rewards teach nothing. Members of a group that earn the same "
                "have no advantage; look at the rewards, at answers that are cut off, at group_size and at the temperature",
                PATIENCE,
            )
