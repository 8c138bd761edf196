"""Which groups were trained: the truth about a run, which its checkpoint holds.

The log of groups may lose entries and repeat them. The ledger refuses what was trained, and names
what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ludic.errors import CheckpointError, DataError


class Ledger:
    """A set of numbers from 0, stored as the first number that is not in it and those above.

    Example: after 0, 1, 2 and 5 the watermark is 3, and 5 is above; after 3 and 4 the watermark is
    6, and nothing is above.
    """

    def __init__(self) -> None:
        self.watermark = 0
        """All smaller numbers are trained, and this one is not."""
        self._above: set[int] = set()

    def mark_trained(self, numbers: Iterable[int]) -> None:
        """Add numbers. Raises DataError, and adds none, if one is negative, was trained already or
        comes twice: training a group twice is the error that the ledger is there to prevent."""
        added: set[int] = set()
        for number in numbers:
            if number < 0 or number in added or self.is_trained(number):
                raise DataError(f"group {number} cannot be trained: numbers begin with 0, and each is trained once")
            added.add(number)
        self._above |= added
        while self.watermark in self._above:
            self._above.remove(self.watermark)
            self.watermark += 1

    def is_trained(self, number: int) -> bool:
        """Whether the number was added."""
        return number < self.watermark or number in self._above

    def list_missing(self, end: int) -> list[int]:
        """The numbers below `end` that are not trained, in order."""
        return [number for number in range(self.watermark, end) if number not in self._above]

    def __len__(self) -> int:
        return self.watermark + len(self._above)

    def state_dict(self) -> dict[str, Any]:
        """The content as plain JSON values."""
        return {"watermark": self.watermark, "above": sorted(self._above)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content. Raises CheckpointError for what `state_dict` does not return."""
        watermark, above = state.get("watermark"), state.get("above")
        if not (isinstance(watermark, int) and isinstance(above, list) and all(isinstance(number, int) for number in above)):
            raise CheckpointError(f"{dict(state)} is no ledger: it must have a number `watermark` and a list of numbers `above`")
        if watermark < 0 or any(number <= watermark for number in above) or len(set(above)) < len(above):
            raise CheckpointError(f"{dict(state)} is no ledger: above the watermark are different, larger numbers")
        self.watermark, self._above = watermark, set(above)
