"""The settings of a pool of groups, checked, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ludic.errors import ConfigError
from ludic.training.rollouts.hand_over import ArrivalOrder, HandOver, SubmissionOrder, choose_max_lag
from ludic.training.rollouts.setbacks import Setbacks

ORDERS = ("arrival", "submission")
ON_EXHAUSTED = ("error", "short")


@dataclass(frozen=True)
class PoolSettings:
    """`GroupPool` says what each setting does. Raises ConfigError for one that is out of range."""

    groups_per_batch: int
    members_per_group: int
    over_sampling_factor: float
    max_lag: int | None
    order: str
    max_retries: int
    max_concurrency: int | None
    patience: int
    outage_patience_s: float
    on_exhausted: str
    close_timeout_s: float

    def __post_init__(self) -> None:
        least = {"groups_per_batch": 1, "members_per_group": 1, "patience": 1, "max_concurrency": 1, "max_retries": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name} ({value}) must be >= {lowest}")
        if not self.close_timeout_s > 0:
            raise ConfigError(f"close_timeout_s ({self.close_timeout_s}) must be > 0 seconds")
        if not 0 <= self.outage_patience_s < math.inf:
            raise ConfigError(f"outage_patience_s ({self.outage_patience_s}) must be >= 0 seconds, and finite")
        for name, choices in {"order": ORDERS, "on_exhausted": ON_EXHAUSTED}.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} ({getattr(self, name)!r}) must be {' or '.join(map(repr, choices))}")
        choose_max_lag(self.over_sampling_factor, self.max_lag)

    @property
    def lag(self) -> int:
        """K: how many batches after its admission a group is given at the latest."""
        return choose_max_lag(self.over_sampling_factor, self.max_lag)

    @property
    def max_kept(self) -> int:
        """How many groups are kept."""
        return math.ceil(self.groups_per_batch * self.over_sampling_factor - 1e-9)  # 10 * 1.1 is 11.000000000000002

    @property
    def is_short_allowed(self) -> bool:
        """Whether a batch may be short after too many rejections."""
        return self.on_exhausted == "short"

    def capacity(self, batches_left: int | None, *, is_waiting: bool) -> int:
        """How many groups may be kept when `batches_left` more are needed. Between two batches
        groups are admitted with the weights of the batch before, so that all kept ones must leave
        within the next K batches, not K + 1."""
        size = self.groups_per_batch
        left = self.max_kept if batches_left is None else size * max(int(is_waiting), batches_left)
        return min(self.max_kept, left, size * (self.lag + int(is_waiting)))

    def make_hand_over(self) -> HandOver:
        """The rule by which groups leave."""
        return ArrivalOrder(self.groups_per_batch, self.lag) if self.order == "arrival" else SubmissionOrder()

    def make_setbacks(self) -> Setbacks:
        """The counter of rejections and losses."""
        return Setbacks(max_rejections=self.patience * self.groups_per_batch, max_losses=2 * self.max_kept)
