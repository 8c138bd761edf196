"""Which groups leave in which batch, and when a batch is complete.

In the order of arrival a group that was admitted at batch j leaves by batch j + K (its deadline),
and otherwise the groups that arrived first leave first. Let c(d) be the kept groups whose deadline
is at most d batches after the next one. Each of those d batches can take N of them, so that at
least c(d) - N*d of them must leave now. A batch is complete once these quotas can be met from
arrived groups, and N have arrived.

    N = 2, K = 1; batch 5 is next          a, b were admitted at batch 4: their deadline is 5
    kept     a b c d   (c(0) = 2)          c, d were admitted at batch 5: their deadline is 6
    arrived  c d b     -> waits for a, though two have arrived: c(0) - 2*0 = 2 of a, b must leave

Quotas look K batches ahead because "those that are due, then those that arrived first" is not
enough: from K = 2 on, young groups that are fast crowd out two batches of old ones, which then fall
due together.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import count

from ludic.errors import ConfigError, check_value
from ludic.training.rollouts.group_ledger import Group, GroupState


def choose_max_lag(over_sampling_factor: float, max_lag: int | None) -> int:
    """K: `max_lag`, or by default the least for the factor, which is ceil(factor - 1).

    Raises ConfigError for a factor that K does not allow: N * factor groups must leave within
    K + 1 batches of N.
    """
    check_value("over_sampling_factor", over_sampling_factor, "1 samples no more than a batch needs", least=1, below=math.inf)
    least = math.ceil(over_sampling_factor - 1 - 1e-9)
    if max_lag is not None and max_lag < least:
        raise ConfigError(f"over_sampling_factor ({over_sampling_factor}) is above 1 + max_lag ({max_lag}); set max_lag={least}")
    return least if max_lag is None else max_lag


class ArrivalOrder:
    """First come, first served, up to the deadlines: O(K) for an event. Like `SubmissionOrder`, it
    is told of every change of a kept group."""

    def __init__(self, groups_per_batch: int, max_lag: int) -> None:
        self._groups_per_batch, self._max_lag = groups_per_batch, max_lag
        self._kept: dict[int, int] = {}
        """Batch of admission -> number of kept groups."""
        self._arrived: dict[int, deque[tuple[int, Group]]] = {}
        """Batch of admission -> (number of the arrival, group), in the order of arrival."""
        self._num_arrived = 0
        self._arrivals = count()

    def admit(self, group: Group) -> None:
        """The group is kept from now on. Ordinals come in increasing order."""
        self._kept[group.admitted] = self._kept.get(group.admitted, 0) + 1
        self._arrived.setdefault(group.admitted, deque())

    def arrive(self, group: Group) -> None:
        """The group can leave."""
        self._arrived[group.admitted].append((next(self._arrivals), group))
        self._num_arrived += 1

    def drop(self, group: Group) -> None:
        """The group, which was owed, is rejected or lost."""
        self._kept[group.admitted] -= 1
        if not self._kept[group.admitted]:
            del self._kept[group.admitted], self._arrived[group.admitted]

    def is_complete(self, batch: int, size: int) -> bool:
        """Whether `take` can take `size` groups, of which no more are kept."""
        if self._num_arrived < size:
            return False
        arrived = 0
        for admitted, quota in self._quotas(batch, size):
            arrived += len(self._arrived[admitted])
            if arrived < quota:
                return False
        return True

    def take(self, batch: int, size: int) -> list[Group]:
        """Remove the groups of batch number `batch`, `size` of them. It must be complete."""
        chosen: list[tuple[int, Group]] = []
        others: list[tuple[int, Group]] = []  # arrived, and not chosen yet
        for admitted, quota in [*self._quotas(batch, size), (None, size)]:
            if admitted is not None:
                others = sorted([*others, *self._arrived[admitted]], key=lambda arrival: arrival[0])
            due = max(0, quota - len(chosen))
            chosen, others = chosen + others[:due], others[due:]
        for arrival in chosen:
            self._arrived[arrival[1].admitted].remove(arrival)
            self.drop(arrival[1])
        self._num_arrived -= len(chosen)
        return [group for _, group in chosen]

    def list_arrivals(self) -> list[Group]:
        """The arrived groups, in the order of arrival."""
        arrivals = [arrival for queue in self._arrived.values() for arrival in queue]
        return [group for _, group in sorted(arrivals, key=lambda arrival: arrival[0])]

    def _quotas(self, batch: int, size: int) -> list[tuple[int, int]]:
        """(batch of admission j, how many of the groups admitted at j or before must leave now), in
        the order of j.

        Example: N = 2, K = 1, batch 5, kept {4: 2, 5: 2} -> [(4, 2), (5, 4 - 2 * 1 = 2)]. With
        settings that changed since the groups were admitted, more can be due than a batch holds.
        """
        quotas, kept = [], 0
        for admitted in sorted(self._kept):
            kept += self._kept[admitted]
            later = max(0, admitted + self._max_lag - batch)  # d: batches after this one, up to the deadline
            quotas.append((admitted, min(size, kept - self._groups_per_batch * later)))
        return quotas


class SubmissionOrder:
    """The lowest ordinals first, however long they take: the batches do not depend on timing."""

    def __init__(self) -> None:
        self._line: deque[Group] = deque()
        """Groups in the order of ordinals, from the first that is owed on; some may be dropped."""
        self._ready: deque[Group] = deque()
        """The arrived groups before the first that is owed."""

    def admit(self, group: Group) -> None:
        self._line.append(group)

    def arrive(self, group: Group) -> None:
        """Move the groups at the head of the line that are not owed any more."""
        while self._line and self._line[0].state is not GroupState.OWED:
            first = self._line.popleft()
            if first.state is GroupState.ARRIVED:
                self._ready.append(first)

    drop = arrive

    def is_complete(self, batch: int, size: int) -> bool:
        return len(self._ready) >= size

    def take(self, batch: int, size: int) -> list[Group]:
        return [self._ready.popleft() for _ in range(size)]

    def list_arrivals(self) -> list[Group]:
        return [*self._ready, *(group for group in self._line if group.state is GroupState.ARRIVED)]
