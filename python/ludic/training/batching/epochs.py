"""Samples that are there already, in batches, pass after pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.errors import ConfigError
from ludic.training import ranks
from ludic.training.averages import mean_or_zero
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import SAWBatch, SAWItem


class ItemBatchSource(BatchSourceBase):
    """Goes through `items` again and again. Pass `k` has the order that `seed` and `k` give, so
    that the position is the whole state and a resumed run goes on with the sample after the last
    one.

    Over several ranks each takes its share of every pass: all have the same number of samples, for
    which the last ones may be given twice (or left out, with `drop_last`). `batch_size` is that of
    one rank.
    """

    shards_across_ranks = True

    def __init__(
        self,
        items: Sequence[SAWItem],
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = False,
        name: str = "offline",
        unit: int | Sequence[int] = 1,
    ) -> None:
        """`drop_last` leaves the last batch of a pass out where it is not full. `name` is the
        batches' `source`. `unit` neighbouring items are one sample, which stays whole: 2 for
        preference pairs; a sequence has one number for each sample."""
        if not items:
            raise ConfigError("there are no samples to make batches of")
        sizes = [unit] * -(-len(items) // unit) if isinstance(unit, int) else unit
        if sum(sizes) != len(items) or min(sizes) < 1:
            raise ConfigError(f"{len(items)} items are no whole number of samples of {unit} items each")
        if batch_size <= 0:
            raise ConfigError(f"batch_size ({batch_size}) must be positive")
        self.items, self.batch_size, self.shuffle, self.seed, self.drop_last = items, batch_size, shuffle, seed, drop_last
        self._name, self._ends = name, np.cumsum(sizes)
        self._world, self._rank = ranks.world_size(), ranks.rank()
        if drop_last and self._share < batch_size:
            raise ConfigError(
                f"drop_last with {len(self)} samples over {self._world} rank(s) leaves no batch of batch_size ({batch_size}); "
                "lower batch_size or keep the last batch"
            )
        self._digest: str | None = None
        self._pass, self._order = -1, np.arange(0)
        self.batches = 0
        """Batches given so far."""

    async def next_batch(self) -> SAWBatch:
        """The next batch; after the last of a pass comes the first of the next."""
        return self._next()

    def iter_epoch(self) -> Iterator[SAWBatch]:
        """What is left of the present pass, batch by batch."""
        last = (self.epoch + 1) * self.num_batches_per_epoch
        while self.batches < last:
            yield self._next()

    def __len__(self) -> int:
        """Samples of one pass, over all ranks."""
        return len(self._ends)

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches of one pass on each rank."""
        return self._share // self.batch_size if self.drop_last else -(-self._share // self.batch_size)

    @property
    def epoch(self) -> int:
        """The pass that the next batch belongs to, from 0."""
        return self.batches // self.num_batches_per_epoch

    @property
    def _share(self) -> int:
        """Samples of each rank in one pass."""
        return len(self) // self._world if self.drop_last else -(-len(self) // self._world)

    def _next(self) -> SAWBatch:
        number, index = divmod(self.batches, self.num_batches_per_epoch)
        order = self._order_of(number)
        samples = order[index * self.batch_size : (index + 1) * self.batch_size]
        chosen = [self.items[row] for sample in samples for row in self._rows_of(sample)]
        self.batches += 1
        return SAWBatch(chosen, _meta(chosen, epoch=number, source=self._name))

    def _rows_of(self, sample: int) -> range:
        return range(self._ends[sample - 1] if sample else 0, self._ends[sample])

    def _order_of(self, number: int) -> Any:
        if number != self._pass:
            count = len(self)
            whole = np.random.default_rng([self.seed, number]).permutation(count) if self.shuffle else np.arange(count)
            self._order = np.resize(whole, self._share * self._world)[self._rank :: self._world]
            self._pass = number
        return self._order

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises ConfigError where samples, seed or sizes are
        others: the order would be another."""
        for name, own in self._identity().items():
            if state.get(name, own) != own:
                raise ConfigError(
                    f"the saved position belongs to {name}={state[name]}, here it is {own}: the batches would not be those of the run "
                    "that is resumed; give the same data and settings, or begin a new run"
                )
        self.batches = int(state["batches"])

    def _identity(self) -> dict[str, Any]:
        if self._digest is None:
            self._digest = _digest(self.items)
        settings = {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last}
        return {"num_samples": len(self), **settings, "world_size": self._world, "digest": self._digest}


def _digest(items: Sequence[SAWItem]) -> str:
    """16 hex digits over the tokens, masks and weights of all samples, and what makes pairs of
    them."""
    digest = hashlib.blake2b(digest_size=8)
    for item in items:
        digest.update(np.asarray(item.input_ids, dtype=np.int64).tobytes())
        digest.update(np.asarray(item.action_mask, dtype=np.uint8).tobytes())
        digest.update(np.float64(item.weight).tobytes())
        if "pair_id" in item.meta:
            digest.update(repr([item.meta.get(key) for key in ("pair_id", "role", "label")]).encode())
    return digest.hexdigest()


def _meta(items: Sequence[SAWItem], *, epoch: int, source: str) -> dict[str, Any]:
    """Facts of a batch. `target_rollouts` are the distinct rollouts in it; the mean reward is
    there if every sample has one."""
    rewards = {item.meta.get("rollout_id", row): item.meta.get("total_reward") for row, item in enumerate(items)}
    meta: dict[str, Any] = {
        "num_samples": len(items),
        "target_rollouts": len(rewards),
        "epoch": epoch,
        "avg_completion_length": mean_or_zero([item.meta.get("completion_length", 0) for item in items]),
        "avg_prompt_length": mean_or_zero([item.meta.get("prompt_length", 0) for item in items]),
        "source": source,
    }
    known = [float(reward) for reward in rewards.values() if reward is not None]
    if len(known) == len(rewards):
        meta["avg_total_reward"] = mean_or_zero(known)
    return meta
