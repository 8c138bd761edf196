"""Divides a macro-batch into mini-batches, and each mini-batch into micro-batches.

- A **macro-batch** has the samples of one training step. They are read once and truncated.
- A **mini-batch** has the samples of one optimizer step. A group or pair is never divided.
- A **micro-batch** has the samples of one forward pass (gradient accumulation). It is collated when
  the loop reaches it, so only one is in memory at a time.
- A **line** is one sequence in a micro-batch: a sample, or the turns of one episode that share
  their prefix (`merge_turns`).
- **Rows** are indices of samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ludic import _core
from ludic.training import ranks
from ludic.training.batching.candidates import collate_candidates
from ludic.training.batching.image_keys import SampleImages
from ludic.training.batching.packing import (
    MicroBatch,
    Packing,
    Rows,
    collate_rows,
    find_line_bounds,
    plan_lines,
    read_table,
    to_tensors,
    token_lengths,
)
from ludic.training.batching.rank_plans import PlannedAtoms, RankPlans, RankShare, plan_atoms
from ludic.training.batching.routes import collate_routes
from ludic.training.batching.token_columns import count_tokens, row_starts
from ludic.training.config import Packing as PackingName, TrainerConfig
from ludic.training.loss.actions import collate_actions
from ludic.training.loss.batch import CANDIDATES, BatchTotals
from ludic.training.types import TOKEN_WEIGHT, SAWItem
from ludic.types import group_of


@dataclass(frozen=True)
class MacroBatch:
    """The samples of a batch with at least one token to train on: as items for their metadata, and
    as a table for their numbers.

    >>> batch = MacroBatch.ingest(items, max_seq_len=1024)
    >>> [rows] = batch.divide(1, seed=0, step=0, epoch=0)
    """

    items: list[SAWItem]
    """The truncated samples; `seq_len_truncated` in their metadata says whether they were cut."""
    table: _core.SampleTable
    """The same samples in the same order, with their token columns. Samples with images have keyed
    ids in it (`image_keys`)."""
    truncated_empty: int
    """Number of samples dropped because no predicted action token was left after truncation."""
    without_actions: int
    """Number of samples dropped because they had no predicted action token before truncation."""
    dropped: list[SAWItem] = field(default_factory=list)
    """The dropped samples, truncated. Reducers count them too, for example in the rate of truncated
    samples."""
    token_columns: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    """Name -> row -> [A] values of the sample's action tokens, which micro-batches have in the
    layout of `input_ids`: `proximal_logps` and `reference_logps` (`training.preparation`)."""
    sample_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Name -> [N] values of the samples, which micro-batches have as [B] tensors in float32: the
    columns of the algorithm's batch credit."""
    share: RankShare | None = None
    """Set if all ranks have this batch: each of its mini-batches is divided over them. None means
    that these are the samples of this rank alone, and other ranks have others."""
    images: SampleImages | None = None
    """None if no sample has images."""
    routed: NDArray[np.int32] | None = None
    """The ids of `key_routes`."""

    @classmethod
    def ingest(cls, items: Sequence[SAWItem], max_seq_len: int, *, merge_turns: bool = False) -> MacroBatch:
        """Read the items once, truncate them, and drop those without a predicted action token. With
        `merge_turns`, an item that continues the item before it shares its line."""
        table, retained, images, routed = read_table(items, max_seq_len, merge_turns=merge_turns)
        original = table.original_lengths if images is None else token_lengths(items)
        truncated = np.asarray(original > table.lengths)
        trained = np.asarray(table.target_counts > 0)
        dropped: list[SAWItem] = []
        if not trained.all():
            rows = np.flatnonzero(trained)
            dropped = [retained[row] for row in np.flatnonzero(~trained)]
            retained, table = [retained[row] for row in rows], table.select(rows)
            images = None if images is None else images.select(rows)
        empty, without = int((truncated & ~trained).sum()), int((~truncated & ~trained).sum())
        return cls(retained, table, empty, without, dropped, images=images, routed=routed)

    @cached_property
    def has_candidates(self) -> bool:
        """Whether any sample has candidates (`batching.candidates`)."""
        return any(item.attachments.candidates is not None for item in self.items)

    @cached_property
    def has_weight(self) -> NDArray[np.bool_]:
        """[N] whether any token of the sample has credit."""
        if not len(self.table):
            return np.zeros(0, dtype=bool)
        if TOKEN_WEIGHT in self.token_columns:
            counts, by_row = self.table.target_counts.astype(np.int64), self.token_columns[TOKEN_WEIGHT]
            values, starts = torch.cat([by_row[row] for row in range(len(counts))]).cpu().numpy(), counts.cumsum() - counts
        elif TOKEN_WEIGHT in self.table.token_columns:
            values, starts = self.table.token_column(TOKEN_WEIGHT), row_starts(self.table)
        else:
            return np.asarray(self.table.weights != 0)
        return np.asarray(np.maximum.reduceat(np.abs(values), starts) > 0)

    def with_token_weights(
        self, weights: Sequence[NDArray[np.float64]], device: torch.device | str, **columns: Sequence[NDArray[np.float64]]
    ) -> MacroBatch:
        """The batch with other credit, [A] for the predicted action tokens of each row; the weight
        of a sample is its mean. `columns`: more token columns, in the same form."""
        columns[TOKEN_WEIGHT] = weights
        by_name = {
            name: {row: torch.from_numpy(each.astype(np.float32)).to(device) for row, each in enumerate(rows)}
            for name, rows in columns.items()
        }
        table = self.table.with_weights(np.array([each.mean() for each in weights]))
        return replace(self, table=table, token_columns={**self.token_columns, **by_name})

    def counts(self) -> dict[str, float]:
        """Return the numbers of samples that `ingest` dropped, by the key in the log."""
        return {"seq_len_truncated_empty": float(self.truncated_empty), "samples_without_actions": float(self.without_actions)}

    def groups(self) -> list[list[int]]:
        """Return the rows that must stay together (a group, a pair, or the steps of one
        rollout), in order of first appearance."""
        return rows_by_key(unit_key(item, row) for row, item in enumerate(self.items))

    def digest(self) -> int:
        """A number below 2**53, which a float64 holds exactly: equal on ranks that have the same
        samples and divide them in the same way.

        Every column of the table counts, and of the metadata which samples are one unit, their role
        and label in a pair, and how many were dropped: [[0, 1], [2]] and [[0], [1, 2]] differ,
        other names of the same groups do not. About 3 ms for a million tokens.
        """
        halves = []
        for meta in (item.meta for item in self.items):  # other values of these names are the user's own
            role, label = meta.get("role"), meta.get("label")
            shown = float(label) if isinstance(label, int | float | np.number) else None
            halves.append([role if isinstance(role, str) else None, shown])
        hashed = xxhash.xxh3_64(self.table.to_bytes())
        digests = () if self.images is None else self.images.digests
        hashed.update(json.dumps([self.groups(), self.counts(), halves, *digests]).encode())
        return hashed.intdigest() >> 11

    def divide(self, count: int, *, seed: int, step: int, epoch: int) -> list[Rows]:
        """Return the rows of `count` mini-batches of nearly equal size; groups are not divided.

        The order of groups depends only on (seed, step, epoch); a single mini-batch keeps the order
        of the batch. With fewer groups than mini-batches, some mini-batches are empty.

        Example, `count=2`: groups [0, 1], [2], [3] of 4 samples in the random order [2], [0, 1],
        [3]. Before each of them, 0, 1 and 3 samples have been placed, so they go to mini-batches
        0*2//4 = 0, 1*2//4 = 0 and 3*2//4 = 1: [2, 0, 1] and [3].
        """
        if count == 1:
            return [np.arange(len(self.items))]
        groups = self.groups()
        order = np.random.default_rng([seed, step, epoch]).permutation(len(groups))
        parts: list[list[int]] = [[] for _ in range(count)]
        placed = 0
        for group in order:
            parts[placed * count // len(self.items)].extend(groups[group])
            placed += len(groups[group])
        return [np.array(part, dtype=np.int64) for part in parts]

    def sum_over_ranks(self, values: list[float], device: torch.device | str) -> list[float]:
        """The sums; of a batch that all ranks have, the values of one rank."""
        return values if self.share is not None else ranks.sum_over_ranks(values, device)

    def name(self, row: int) -> str:
        """`rollout_id/step_index` of a sample."""
        meta = self.items[row].meta
        return f"{meta.get('rollout_id', f'sample {row}')}/{meta.get('step_index', 0)}"


def rows_by_key(keys: Iterable[Hashable]) -> list[list[int]]:
    """Group the rows with the same key, in order of first appearance. Example: keys a b a give
    [[0, 2], [1]]."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def unit_key(item: SAWItem, row: int) -> tuple[str, Any]:
    """Return the key of the unit that `item` belongs to and that must not be divided: its group,
    pair or rollout, or the sample itself."""
    group = group_of(item.meta)
    if group is not None:
        return "group", group
    for key in ("pair_id", "rollout_id"):
        if item.meta.get(key) is not None:
            return key, item.meta[key]
    return "row", row


class MiniBatch:
    """The micro-batches of one optimizer step, the most expensive first. It can be iterated more
    than once.

    >>> for micro_batch in MiniBatch(batch, rows, cfg):
    ...     loss, stats = algo.compute_loss(model, micro_batch.tensors, totals=mini_batch.totals)
    """

    def __init__(
        self, batch: MacroBatch, rows: Rows, cfg: TrainerConfig, *, skip_zero_weight: bool = False, with_positions: bool = False
    ) -> None:
        self.batch, self.cfg = batch, cfg
        self.packing: PackingName = cfg.packing
        """How lines are planned and laid out. A subclass may change it in `_find_lines`."""
        self._positions = self._number(rows) if with_positions else None
        self.rows = rows[batch.has_weight[rows]] if skip_zero_weight else rows
        """Samples that go through the model."""
        self.num_skipped = len(rows) - len(self.rows)
        """Number of samples with weight 0 that do not go through the model."""
        tokens = count_tokens(batch.table)
        self.skipped_tokens = float(tokens[rows].sum() - tokens[self.rows].sum())
        """Action tokens of the skipped samples."""
        self.totals = self._totals(rows)
        """Totals over all samples, including skipped ones and the ones of other ranks."""
        self.collate_s = 0.0
        """Seconds spent on collation so far."""
        self._find_lines()
        self.plan: Packing | RankPlans | None = self._make_plan() if len(self.rows) else None
        # If all samples have weight 0 and are skipped, one row without weight replaces them, so
        # that the optimizer still takes its step.
        own = len(self.plan) if self.plan is not None else min(1, len(rows))
        self.num_micro_batches = own if batch.share is not None else int(ranks.max_over_ranks([own], cfg.model_device)[0])
        """The same on all ranks: a rank with fewer micro-batches adds some without weight."""

    def _find_lines(self) -> None:
        """Divide the samples into lines. A subclass may order them first."""
        self.line_bounds = find_line_bounds(self.batch.table.chains[self.rows])
        """[L + 1] index in `rows` at which each line begins, and the end of the last line. Example:
        two lines of 2 samples and 1 sample have [0, 2, 3]."""
        self.lengths = np.ascontiguousarray(self.batch.table.lengths[self.rows[self.line_bounds[1:] - 1]])
        """[L] number of tokens of each line, which is the length of its last sample: it contains
        the others."""

    @property
    def unshared_lengths(self) -> NDArray[np.int32]:
        """[L'] number of tokens of each line as it would be without prefix trees."""
        return self.lengths

    def __len__(self) -> int:
        return self.num_micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        for index in range(self.num_micro_batches):
            started = time.perf_counter()
            micro_batch = self._collate(index)
            micro_batch.tensors.update({} if self.batch.share is None else self.batch.share.columns)
            self.collate_s += time.perf_counter() - started
            yield micro_batch

    def micro_batch_rows(self, index: int) -> Rows:
        """Return the rows of a micro-batch, in its order; none for a micro-batch without weight.

        Example: `rows` [7, 8, 9] with `line_bounds` [0, 2, 3] have the lines [7, 8] and [9]. A
        micro-batch of lines 1 and 0 has begins [2, 0] and counts [1, 2]. Indices [0, 1, 2] shifted
        by [2 - 0, 0 - 1, 0 - 1] are [2, 0, 1], so the result is [9, 7, 8].
        """
        if self.plan is None or index >= len(self.plan):
            return np.zeros(0, dtype=np.int64)
        begins = self.line_bounds[self.plan[index]]
        counts = self.line_bounds[self.plan[index] + 1] - begins
        return self.rows[np.arange(counts.sum()) + np.repeat(begins - (counts.cumsum() - counts), counts)]

    def _number(self, rows: Rows) -> Rows:
        """[N of the macro-batch] index of each sample in the mini-batch of all ranks. Example: rank
        0 has 3 samples and rank 1 the samples [5, 2]: 5 is number 3, and 2 is number 4."""
        before = 0 if self.batch.share is not None else sum(ranks.gather_json(len(rows))[: ranks.rank()])
        positions = np.zeros(len(self.batch.items), dtype=np.int64)
        positions[rows] = before + np.arange(len(rows))
        return positions

    def _totals(self, rows: Rows) -> BatchTotals:
        return batch_totals(self.batch, rows, self.cfg.model_device)

    def _make_plan(self) -> Packing | RankPlans:
        share = self.batch.share
        if share is not None and share.world > 1:
            padding_free = self.packing == "padding_free"
            return RankPlans(self._plan_ranks(share.world), self.lengths, share, padding_free=padding_free)
        plan = self._plan_lines()
        costliest_first = sorted((plan[index] for index in range(len(plan))), key=self._cost, reverse=True)
        return Packing(costliest_first, plan.num_tokens, plan.padded_tokens)

    def _plan_ranks(self, world: int) -> list[PlannedAtoms]:
        """Plan the lines for all ranks. A subclass may plan several lines as one atom, which stays
        on one rank."""
        return [plan_atoms(np.arange(len(self.lengths))[:, None], self.lengths, self.cfg, world, self.packing)]

    def _cost(self, lines: Rows) -> tuple[int, int]:
        """Computed tokens of a micro-batch, then its longest line (attention is quadratic in its
        length). Example: lines of 2 and 3 tokens compute 3*2 = 6 tokens with padding, 2+3 = 5
        without.

        The costliest comes first: one that does not fit into memory then fails in the first pass,
        and ranks that synchronise after every pass run similar costs at the same time."""
        lengths = self.lengths[lines]
        longest = int(lengths.max())
        return int(lengths.sum()) if self.packing == "padding_free" else longest * len(lengths), longest

    def _plan_lines(self) -> Packing | _core.Plan:
        return plan_lines(self.lengths, self.cfg, self.packing)

    def _plan_lines_greedily(self) -> Packing | _core.Plan:
        return _core.plan_greedy(self.unshared_lengths, self.cfg.micro_token_budget)

    @property
    def stand_in(self) -> Rows:
        """The row that stands for no sample: the shortest of a shared batch: no rank waits."""
        return np.array([0 if self.batch.share is None else self.batch.table.lengths.argmin()])

    def _collate(self, index: int) -> MicroBatch:
        rows = self.micro_batch_rows(index)
        if len(rows):
            return self._micro_batch(rows)
        # Other ranks have more micro-batches. This one adds nothing to losses and counts.
        micro_batch = self._micro_batch(self.stand_in)
        columns = {*self.batch.table.token_columns, *self.batch.token_columns, *self.batch.sample_columns}
        zeroed = {"action_mask", "weight", "actor_logps", "old_logp_action", CANDIDATES, *columns}
        tensors = {name: torch.zeros_like(value) if name in zeroed else value for name, value in micro_batch.tensors.items()}
        return MicroBatch(tensors, 0, micro_batch.sample_names)

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        pad_token_id = None if self.packing == "padding_free" else self.cfg.pad_token_id
        table, images, device, routed = self.batch.table, self.batch.images, self.cfg.model_device, self.batch.routed
        tensors = collate_rows(table, images, rows, device, pad_token_id=pad_token_id, routed=routed)
        for name, by_row in self.batch.token_columns.items():
            tensors[name] = collate_actions([by_row.get(int(row)) for row in rows], tensors)
        if self.batch.has_candidates:
            tensors |= collate_candidates([self.batch.items[row] for row in rows], tensors)
        if self.cfg.replay_routing:
            tensors |= collate_routes([self.batch.items[row] for row in rows], tensors)
        tensors |= to_tensors(
            {name: column[rows].astype(np.float32) for name, column in self.batch.sample_columns.items()}, self.cfg.model_device
        )
        if self._positions is not None:
            tensors |= to_tensors({"position": self._positions[rows]}, self.cfg.model_device)
        return MicroBatch(tensors, len(rows), tuple(self.batch.name(row) for row in rows))

    def lockstep(self) -> tuple[float, float]:
        """`RankPlans.lockstep`; zeros if the batch is not divided over ranks."""
        return self.plan.lockstep() if isinstance(self.plan, RankPlans) else (0.0, 0.0)

    def padding(self) -> dict[str, float]:
        """Return `PADDING_KEYS`: real tokens; shared ones, computed once; computed ones, padding
        included; those under the greedy plan, and with all samples padded to the longest, both
        without trees; and the number of micro-batches. Of a shared batch, over all ranks."""
        if self.plan is None:
            return dict.fromkeys(PADDING_KEYS, 0.0)
        greedy = self._plan_lines_greedily()
        unpacked = len(self.unshared_lengths) * int(self.unshared_lengths.max())
        shared = int(self.batch.table.lengths[self.rows].sum(dtype=np.int64)) - self.plan.num_tokens
        counts = (self.plan.num_tokens, shared, self.plan.padded_tokens, greedy.padded_tokens, unpacked, len(self.plan))
        return dict(zip(PADDING_KEYS, map(float, counts), strict=True))


PADDING_KEYS = (
    "perf/real_tokens",
    "perf/shared_tokens",
    "perf/padded_tokens",
    "perf/padded_tokens_greedy",
    "perf/padded_tokens_unpacked",
    "perf/micro_batches",
)


def batch_totals(batch: MacroBatch, rows: Rows, device: torch.device | str, *, num_pairs: float | None = None) -> BatchTotals:
    """The totals of the samples at `rows`, over all ranks; by default half as many pairs."""
    pairs = len(rows) / 2 if num_pairs is None else num_pairs
    weights, targets = batch.table.weights[rows], count_tokens(batch.table)[rows]
    if batch.share is not None or not ranks.is_distributed():
        return BatchTotals.from_columns(weights, targets, num_pairs=pairs)
    wide = weights.astype(np.float64)
    sums = ranks.sum_over_ranks([len(rows), float(targets.sum()), float(wide.sum()), pairs], device)
    mean = sums[2] / max(sums[0], 1.0)
    [squares] = ranks.sum_over_ranks([float(((wide - mean) ** 2).sum())], device)
    deviation = float(np.sqrt(squares / max(sums[0], 1.0)))
    return BatchTotals(sums[0], sums[1], weight_mean=mean, weight_std=deviation, num_pairs=sums[3])
