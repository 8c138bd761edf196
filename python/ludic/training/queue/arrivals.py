"""Which delivered groups become which batch: rules without any input or output.

With P groups in a batch, the entries of the log are taken one after another, in the order of the
log, until batch k is whole. What it consists of then depends only on the log and on what was
trained before, so that a trainer that went back to a checkpoint makes the same batches again.

- `exact`: batch k is the groups `kP .. kP+P-1`.
- `arrival`: at least P groups have come, among them all of batches up to `k - slack`. The P
  smallest numbers of them are trained. Example for P = 2 and slack 2, where groups come in the
  order 0 3 2 5 4 7 1: batches 0 and 1 are (0 3) and (2 5); batch 2 must have seen group 1, so it
  waits for it, and is (1 4). Every group is thus trained in batch `n // P + slack` at the latest.

A group that failed counts as any other, and brings no rollouts.

The ledger says which groups were trained: the truth about a run, which its checkpoint holds. The
log of groups may lose entries and repeat them; the ledger refuses trained groups, and names missing
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ludic.errors import CheckpointError, DataError, check_value
from ludic.training.queue.base import Entry
from ludic.training.queue.entries import Group
from ludic.training.rollouts.episodes import EpisodeFailure, PlayedRollouts, RolloutCounts

Order = Literal["exact", "arrival"]


class Arrivals:
    """The groups that have come and are not trained."""

    def __init__(self, *, groups_per_batch: int, order: Order = "exact", slack: int = 2, max_attempts: int = 3) -> None:
        check_value("groups_per_batch", groups_per_batch, least=1)
        check_value("order", order, choices=("exact", "arrival"))
        check_value("slack", slack, "batch k cannot need groups that are begun for batch k + 1", least=1)
        check_value("max_attempts", max_attempts, least=1)
        self.groups_per_batch, self.order, self.slack, self.max_attempts = groups_per_batch, order, slack, max_attempts
        self.ledger = Ledger()
        self.position: str | None = None
        """Position of the last entry that was taken."""
        self.duplicates = self.abandoned = 0
        """Groups that came again, and groups that were given up."""
        self._groups: dict[int, Group] = {}
        self._refused: dict[int, list[str]] = {}
        self._held: dict[int, str | None] = {}
        """Number -> the position before its first entry, in the order of the log; for numbers that
        have come and are not trained."""
        self._replay_through: str | None = None
        """After a resume: the position that was taken last before the checkpoint."""

    def __len__(self) -> int:
        return len(self._groups)

    def has(self, number: int) -> bool:
        """Whether the group needs no playing: it has come, was given up, or is trained."""
        return number in self._groups or self.ledger.is_trained(number)

    def attempts(self, number: int) -> int:
        """How many entries of the group were refused."""
        return len(self._refused.get(number, ()))

    def take(self, entry: Entry, group: Group | None) -> bool:
        """Take the next entry of the log; None is an entry without a group. Returns False for a
        group that has come before."""
        before, self.position = self.position, entry.position
        if group is None:
            return True
        if self.has(group.number):
            self.duplicates += 1
            return False
        self._held.setdefault(group.number, before)
        self._groups[group.number] = group
        self.abandoned += not group.played and group.attempt >= self.max_attempts
        return True

    def refuse(self, entry: Entry, reason: str) -> bool:
        """Take the next entry, which cannot be trained on. After `max_attempts` of them its group
        is given up, and True returned: it is now a group that failed."""
        before, self.position = self.position, entry.position
        number = entry.number
        if number is None or number < 0 or self.has(number):
            return False
        self._held.setdefault(number, before)
        reasons = self._refused.setdefault(number, [])
        reasons.append(reason)
        if len(reasons) < self.max_attempts:
            return False
        self.abandoned += 1
        self._groups[number] = failed_group("", number, 0, f"refused {len(reasons)} times; the last time: {reason}")
        return True

    def find_batch(self, batch: int) -> list[Group] | None:
        """The groups of batch `batch`, by number; None while some are missing. After a resume,
        everything that was taken before is taken first: in order `arrival`, the choice depends on
        all that has come."""
        if self._replay_through is not None and self._replay_through != self.position:
            return None
        self._replay_through = None
        size = self.groups_per_batch
        if self.order == "exact":
            numbers: Sequence[int] = range(batch * size, (batch + 1) * size)
            return [self._groups[number] for number in numbers] if all(number in self._groups for number in numbers) else None
        overdue = self.ledger.list_missing(max(0, batch - self.slack + 1) * size)
        if len(self._groups) < size or any(number not in self._groups for number in overdue):
            return None
        return [self._groups[number] for number in sorted(self._groups)[:size]]

    def mark_trained(self, numbers: Sequence[int]) -> None:
        """These groups are trained now."""
        self.ledger.mark_trained(numbers)
        for number in numbers:
            for record in (self._groups, self._refused, self._held):
                record.pop(number, None)

    @property
    def resume_position(self) -> str | None:
        """The position from which the log must be read again to have all that is here: that before
        the oldest entry that was taken and is not trained."""
        return next(iter(self._held.values()), self.position)

    def reach_end(self) -> None:
        """The log ends here. If it ends before what was taken last, its data were lost."""
        self._replay_through = None

    def state_dict(self) -> dict[str, Any]:
        """The ledger and two positions: from the first one, all that is here is in the log; through
        the second one, it was taken, also before a resume."""
        through = self.position if self._replay_through is None else self._replay_through
        return {"ledger": self.ledger.state_dict(), "position": self.resume_position, "taken_through": through}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Empty it, and begin after the position of `state`."""
        self.ledger.load_state_dict(state["ledger"])
        self._groups, self._refused, self._held = {}, {}, {}
        self.position, self._replay_through = state["position"], state["taken_through"]


def failed_group(run: str, number: int, version: int, error: str, *, attempt: int = 0, actor: str = "") -> Group:
    """A group without rollouts."""
    counts = RolloutCounts(num_failed_episodes=1, num_dropped_groups=1)
    failure = EpisodeFailure(episode_idx=number, env_kind="", env_seed=None, error=error, attempts=max(1, attempt), meta={})
    return Group(run, number, version, attempt, actor, played=PlayedRollouts([], counts, [failure], num_requested=0))


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
