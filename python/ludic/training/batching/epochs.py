"""Batches of existing samples, epoch after epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.columns import mean_or_zero
from ludic.data.passes import Passes
from ludic.errors import ConfigError, check_value
from ludic.training import ranks
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import stored


class ItemBatchSource(BatchSourceBase):
    """Returns batches of `items`, pass after pass. The order of pass k depends only on `seed` and
    k, so the position is the whole state, and a resumed run continues with the next sample.

    With several ranks, the samples of a pass are divided among them. All ranks get the same number
    of samples: to this end the first samples of the pass are repeated, or with `drop_last` the last
    ones left out. `batch_size` is per rank. In `SharedBatches` it is the size over all ranks, and
    the batches equal the batches of one process.

    Example: 5 samples on 2 ranks, not shuffled. The order 0 1 2 3 4 is extended to 0 1 2 3 4 0;
    rank 0 gets 0 2 4, rank 1 gets 1 3 0. With `drop_last` they get 0 2 and 1 3.
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
        """`drop_last`: leave out the last batch of a pass unless it is full. `name`: the value of
        `source` in the batches' meta. `unit`: how many consecutive items form one sample, which is
        never divided, for example 2 for preference pairs; a sequence has one number per sample.
        Example: units [2, 1] are a sample of items 0 and 1, and a sample of item 2."""
        if not items:
            raise ConfigError("items is empty; a batch source needs at least one sample")
        sizes = [unit] * -(-len(items) // unit) if isinstance(unit, int) else unit
        if sum(sizes) != len(items) or min(sizes) < 1:
            raise ConfigError(f"{len(items)} items cannot be divided into whole samples of {unit} items each")
        check_value("batch_size", batch_size, above=0)
        self.items, self.batch_size, self.shuffle, self.seed, self.drop_last = items, batch_size, shuffle, seed, drop_last
        self._name, self._bounds = name, np.concatenate([[0], np.cumsum(sizes)])
        self._digest: str | None = None
        self._divide(ranks.rank(), ranks.world_size())
        self.batches = 0
        """Number of batches returned so far."""

    def _divide(self, rank: int, world: int) -> None:
        """Return the part of rank `rank` of `world` of each pass."""
        self._rank, self._world = rank, world
        if self.drop_last and self._samples_per_rank < self.batch_size:
            batches = f"{len(self)} samples on {world} ranks leaves no batch"
            raise ConfigError(f"drop_last of {batches}; lower batch_size ({self.batch_size})")
        self._passes = Passes(self._samples_per_rank, self._draw_order)

    def unshard(self) -> None:
        """Return the batches of one process from now on."""
        self._divide(0, 1)
        self.shards_across_ranks = False

    async def next_batch(self) -> SAWBatch:
        """Return the next batch. After the last batch of a pass, the next pass begins."""
        return self._next()

    def iter_epoch(self) -> Iterator[SAWBatch]:
        """Iterate over the remaining batches of the current pass."""
        last = (self.epoch + 1) * self.num_batches_per_epoch
        while self.batches < last:
            yield self._next()

    def __len__(self) -> int:
        """Number of samples in a pass, over all ranks."""
        return len(self._bounds) - 1

    @property
    def num_batches_per_epoch(self) -> int:
        """Number of batches in a pass, on each rank."""
        return self._samples_per_rank // self.batch_size if self.drop_last else -(-self._samples_per_rank // self.batch_size)

    @property
    def epoch(self) -> int:
        """Index of the pass that the next batch belongs to, from 0."""
        return self.batches // self.num_batches_per_epoch

    @property
    def _samples_per_rank(self) -> int:
        """Number of samples of each rank in a pass. Example: 5 samples on 2 ranks are 3 each, or 2
        with `drop_last`."""
        return len(self) // self._world if self.drop_last else -(-len(self) // self._world)

    def _next(self) -> SAWBatch:
        """The next batch. Example: passes of 5 samples in batches of 2 have the offsets 0 1, 2 3
        and 4; batch 4 is the second of pass 1, and has the positions 5 + 2 and 5 + 3."""
        number, index = divmod(self.batches, self.num_batches_per_epoch)
        offsets = range(self._samples_per_rank)[index * self.batch_size : (index + 1) * self.batch_size]
        samples = [self._passes.at(number * self._samples_per_rank + offset) for offset in offsets]
        # Units [2, 1, 1] have the bounds [0, 2, 3, 4]: sample 1 is index 2.
        items = [self.items[row] for sample in samples for row in range(self._bounds[sample], self._bounds[sample + 1])]
        self.batches += 1
        return SAWBatch(items, batch_meta(items, epoch=number, source=self._name))

    def _draw_order(self, number: int) -> Any:
        """Return this rank's samples of a pass, in order. Example: order [2, 0, 1] on 2 ranks, 2
        samples each, is extended to [2, 0, 1, 2]; rank 1 gets every second from index 1 on:
        [0, 2]."""
        count = len(self)
        order = np.random.default_rng([self.seed, number]).permutation(count) if self.shuffle else np.arange(count)
        return np.resize(order, self._samples_per_rank * self._world)[self._rank :: self._world]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings and data digest that it is valid for."""
        return {"batches": self.batches, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`. Raises ConfigError if the samples, the settings
        or the number of ranks differ, since the batches would differ."""
        for name, own in self._identity().items():
            if state.get(name, own) != own:
                raise ConfigError(f"the saved {name} is {state[name]}, here it is {own}; use the same data and settings")
        self.batches = int(state["batches"])

    def _identity(self) -> dict[str, Any]:
        if self._digest is None:
            self._digest = _digest(self.items)
        settings = {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last}
        return {"num_samples": len(self), **settings, "world_size": self._world, "digest": self._digest}


def _digest(items: Sequence[SAWItem]) -> str:
    """Return 16 hex digits that depend on the tokens, images, masks, weights and pair metadata of
    all samples."""
    digest = hashlib.blake2b(digest_size=8)
    for item in items:
        digest.update(np.asarray(stored(item, "input_ids"), dtype=np.int64).tobytes())
        digest.update(np.asarray(stored(item, "action_mask"), dtype=np.uint8).tobytes())
        digest.update(np.float64(item.weight).tobytes())
        for span in item.images:
            digest.update(f"{span.digest} {span.start}".encode())
        if item.attachments.action_fractions is not None:
            digest.update(np.asarray(item.attachments.action_fractions, dtype=np.float64).tobytes())
        for name, values in sorted(item.attachments.token_columns.items()):
            digest.update(name.encode() + np.asarray(values, dtype=np.float64).tobytes())
        if "pair_id" in item.meta:
            digest.update(repr([item.meta.get(key) for key in ("pair_id", "role", "label")]).encode())
    return digest.hexdigest()


def batch_meta(items: Sequence[SAWItem], *, epoch: int, source: str) -> dict[str, Any]:
    """Return statistics of a batch. `target_rollouts` is its number of distinct rollouts; the mean
    reward is included only if every rollout has a reward."""
    rewards = {item.meta.get("rollout_id", row): item.meta.get("total_reward") for row, item in enumerate(items)}
    meta: dict[str, Any] = {
        "num_samples": len(items),
        "target_rollouts": len(rewards),
        "epoch": epoch,
        "avg_completion_length": mean_or_zero([item.meta.get("completion_length", 0) for item in items]),
        "avg_prompt_length": mean_or_zero([item.meta.get("prompt_length", 0) for item in items]),
        "source": source,
    }
    numbers = [float(reward) for reward in rewards.values() if reward is not None]
    if len(numbers) == len(rewards):
        meta["avg_total_reward"] = mean_or_zero(numbers)
    return meta
