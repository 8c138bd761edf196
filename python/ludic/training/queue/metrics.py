"""What a run logs of its queue with each batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ludic.training.queue.arrivals import Arrivals
from ludic.training.queue.base import QueueStats
from ludic.training.queue.entries import Group


def measure_queue(
    stats: QueueStats, arrivals: Arrivals, groups: Sequence[Group], *, wait_s: float, aside: int
) -> dict[str, float]:
    """The statistics for the meta of the batch of `groups`, which are still among `arrivals`.

    `wait_s`: how long the trainer waited for them. `aside`: entries that this trainer set aside.
    """
    ended = [group.ended_s for group in groups if group.ended_s]
    return {
        "generation_s": max((group.generation_s for group in groups), default=0.0),
        "queue/depth": len(arrivals) - len(groups),
        "queue/outstanding": stats.outstanding,
        "queue/oldest_s": stats.oldest_s,
        "queue/age_s": max(0.0, time.time() - min(ended)) if ended else 0.0,
        "queue/wait_s": wait_s,
        "queue/claimed": stats.claimed,
        "queue/duplicates": arrivals.duplicates,
        "queue/aside": aside,
        "queue/abandoned": arrivals.abandoned,
        "queue/bytes": stats.bytes,
    }
