"""A macro-batch as the trainer runs it: ingested once, cut, divided into mini-batches, each planned
into micro-batches.

A **mini-batch** is what one optimizer step sees; groups and pairs are never divided between two. A
**micro-batch** is what goes through the model at once; it is collated when it is asked for, so that
only one of them exists at a time.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic import _core
from ludic.training import ranks
from ludic.training.batching.micro_batching import MicroBatch, cut_item, to_tensors
from ludic.training.config import TrainerConfig
from ludic.training.loss import BatchTotals
from ludic.training.loss.context import collate_actions
from ludic.training.types import SAWItem
from ludic.types import group_of

Rows = NDArray[np.int64]
"""Indices of samples."""


@dataclass(frozen=True)
class MacroBatch:
    """Samples of one batch that have something to train, as items for the metadata and as columns
    for the numbers.

    >>> batch = MacroBatch.ingest(items, max_seq_len=1024)
    >>> [rows] = batch.divide(1, seed=0, step=0, epoch=0)
    """

    items: list[SAWItem]
    """Cut to the limit, their metadata saying whether they were."""
    table: _core.SampleTable
    """The same samples, row by row."""
    truncated_empty: int
    """Samples dropped because the cut left no action token to predict."""
    without_actions: int
    """Samples dropped because they never had one."""
    dropped: list[SAWItem] = field(default_factory=list)
    """Those samples, as they were cut: what reducers say of a step, such as how often samples
    were cut, is said of them too."""
    proximal: Mapping[int, Tensor] | None = None
    """By row: log-probabilities [A] of the sample's action tokens under the weights that the
    step began with. Known where a correction needs them in more than one optimizer step."""

    @classmethod
    def ingest(cls, items: Sequence[SAWItem], max_seq_len: int, *, merge_turns: bool = False) -> MacroBatch:
        """Read the items once, cut them, and drop those with no action token that a model could
        predict. With `merge_turns`, items that continue the item before them will share its row."""
        table = _core.SampleTable.from_items(items)
        table = (table.chained() if merge_turns else table).truncate(max_seq_len)
        cut = np.asarray(table.original_lengths > table.lengths)
        kept = [cut_item(item, max_seq_len) for item in items]
        trained = np.asarray(table.target_counts > 0)
        dropped: list[SAWItem] = []
        if not trained.all():
            rows = np.flatnonzero(trained)
            dropped = [kept[index] for index in np.flatnonzero(~trained)]
            kept, table = [kept[index] for index in rows], table.select(rows)
        return cls(kept, table, int((cut & ~trained).sum()), int((~cut & ~trained).sum()), dropped)

    def counts(self) -> dict[str, float]:
        """What was dropped on the way in, by the key that is logged."""
        return {"seq_len_truncated_empty": float(self.truncated_empty), "samples_without_actions": float(self.without_actions)}

    def groups(self) -> list[list[int]]:
        """Rows that belong together, in order of first appearance: a group, a pair, or the steps
        of one rollout."""
        return grouped(atom(item, row) for row, item in enumerate(self.items))

    def divide(self, count: int, *, seed: int, step: int, epoch: int) -> list[Rows]:
        """Rows of each of `count` mini-batches, of as equal size as whole groups allow.

        The order of groups is drawn from (seed, step, epoch) alone. One mini-batch keeps the order
        of the batch. With fewer groups than mini-batches some are empty.
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

    def name(self, row: int) -> str:
        """`rollout_id/step_index` of a sample."""
        meta = self.items[row].meta
        return f"{meta.get('rollout_id', f'sample {row}')}/{meta.get('step_index', 0)}"


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """Rows with one key, in order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def atom(item: SAWItem, row: int) -> tuple[str, Any]:
    """What `item` belongs to."""
    group = group_of(item.meta)
    if group is not None:
        return "group", group
    for key in ("pair_id", "rollout_id"):
        if item.meta.get(key) is not None:
            return key, item.meta[key]
    return "row", row


class Packing(Protocol):
    """Which samples go through the model together. `_core.Plan` is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Rows: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def padded_tokens(self) -> int: ...


class DearestFirst:
    """The micro-batches of a plan in falling order of `costs`, the earlier of equal ones first:
    what does not fit into memory shows in the first pass, and ranks that wait for each other
    pass by pass have alike ones at once."""

    def __init__(self, plan: Packing, costs: Sequence[tuple[int, ...]]) -> None:
        self._plan = plan
        self._order = sorted(range(len(plan)), key=costs.__getitem__, reverse=True)

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int, /) -> Rows:
        return self._plan[self._order[index]]

    @property
    def num_tokens(self) -> int:
        return self._plan.num_tokens

    @property
    def padded_tokens(self) -> int:
        return self._plan.padded_tokens


class MiniBatch:
    """The micro-batches of one optimizer step, the dearest first. It can be run through more than
    once.

    >>> for micro_batch in MiniBatch(batch, rows, cfg):
    ...     loss, stats = algo.compute_loss(model, micro_batch.tensors, totals=mini_batch.totals)
    """

    def __init__(self, batch: MacroBatch, rows: Rows, cfg: TrainerConfig, *, skip_zero_weight: bool = False) -> None:
        self.batch, self.cfg = batch, cfg
        self.rows = rows[batch.table.weights[rows] != 0] if skip_zero_weight else rows
        """Samples that go through the model."""
        self.num_skipped = len(rows) - len(self.rows)
        """Samples of weight zero that do not."""
        self.skipped_tokens = int(batch.table.target_counts[rows].sum() - batch.table.target_counts[self.rows].sum())
        """Their action tokens."""
        self.totals = self._totals(rows)
        """Of all samples, the skipped ones and other ranks' among them."""
        self.collate_s = 0.0
        """Seconds spent on collation so far."""
        self.lines = _lines(batch.table.chains[self.rows])
        """Where each row of the model begins in `rows`, and the end of the last."""
        self.lengths = np.ascontiguousarray(batch.table.lengths[self.rows[self.lines[1:] - 1]])
        """Tokens of each row of the model: those of its last sample."""
        self.plan: Packing | None = self._ordered(self._planned()) if len(self.rows) else None
        # Where every sample weighs zero and is left out, one weightless row stands for them: the
        # optimizer steps as it would.
        own = len(self.plan) if self.plan is not None else min(1, len(rows))
        self.num_micro_batches = int(ranks.max_over_ranks([own], cfg.model_device)[0])
        """The same on every rank; a rank with fewer fills up with rows that weigh nothing."""

    def __len__(self) -> int:
        return self.num_micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        for index in range(self.num_micro_batches):
            started = time.perf_counter()
            micro_batch = self._collate(index)
            self.collate_s += time.perf_counter() - started
            yield micro_batch

    def rows_of(self, index: int) -> Rows:
        """The samples of a micro-batch, in its order; none for one that only keeps this rank in
        step."""
        if self.plan is None or index >= len(self.plan):
            return np.zeros(0, dtype=np.int64)
        begins = self.lines[self.plan[index]]
        counts = self.lines[self.plan[index] + 1] - begins
        return self.rows[np.arange(counts.sum()) + np.repeat(begins - (counts.cumsum() - counts), counts)]

    def _totals(self, rows: Rows) -> BatchTotals:
        return batch_totals(self.batch.table, rows, self.cfg.model_device)

    def _ordered(self, plan: Packing) -> DearestFirst:
        """By computed tokens, then by the longest row, to which attention is quadratic."""
        rows = [self.lengths[plan[index]] for index in range(len(plan))]
        padded = self.cfg.packing != "padding_free"
        computed = [int(lengths.max()) * len(lengths) if padded else int(lengths.sum()) for lengths in rows]
        return DearestFirst(plan, [(tokens, int(lengths.max())) for tokens, lengths in zip(computed, rows, strict=True)])

    def _planned(self) -> Packing:
        """How the rows of the model are packed."""
        return plan(self.lengths, self.cfg)

    def _planned_greedily(self) -> Packing:
        """For comparison."""
        return _core.plan_greedy(self.lengths, self.cfg.micro_token_budget)

    def _collate(self, index: int) -> MicroBatch:
        rows = self.rows_of(index)
        return self._micro_batch(rows) if len(rows) else _weightless(self._micro_batch(np.zeros(1, dtype=np.int64)))

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        table = self.batch.table
        if self.cfg.packing == "padding_free":
            columns = table.collate_padding_free(rows)
        else:
            columns = table.collate(rows, self.cfg.pad_token_id)
        names = tuple(self.batch.name(row) for row in rows)
        tensors = to_tensors(columns, self.cfg.model_device)
        if self.batch.proximal is not None:
            tensors["proximal_logps"] = collate_actions([self.batch.proximal.get(int(row)) for row in rows], tensors)
        return MicroBatch(tensors, len(rows), names)

    def padding(self) -> dict[str, float]:
        """Tokens: real ones, computed ones, and what would be computed by the greedy plan and by
        padding all to the longest."""
        if self.plan is None:
            return dict.fromkeys(PADDING_KEYS, 0.0)
        greedy = self._planned_greedily()
        unpacked = len(self.lengths) * int(self.lengths.max())
        counts = (self.plan.num_tokens, self.plan.padded_tokens, greedy.padded_tokens, unpacked, len(self.plan))
        return dict(zip(PADDING_KEYS, map(float, counts), strict=True))


def _lines(chains: NDArray[np.int32]) -> Rows:
    """Bounds of the runs of one chain; a sample outside any chain is a run of its own."""
    begins = np.flatnonzero((chains[1:] != chains[:-1]) | (chains[1:] < 0)) + 1
    return np.concatenate([[0], begins, [len(chains)]]) if len(chains) else np.zeros(1, dtype=np.int64)


PADDING_KEYS = (
    "perf/real_tokens",
    "perf/padded_tokens",
    "perf/padded_tokens_greedy",
    "perf/padded_tokens_unpacked",
    "perf/micro_batches",
)


def plan(lengths: NDArray[np.int32], cfg: TrainerConfig) -> _core.Plan:
    """The configured packing of samples of these lengths."""
    if cfg.packing == "padding_free":
        return _core.plan_padding_free(lengths, cfg.micro_token_budget)
    if cfg.packing == "greedy":
        return _core.plan_greedy(lengths, cfg.micro_token_budget)
    return _core.plan_optimal(lengths, cfg.micro_token_budget, cfg.overhead_tokens)


def batch_totals(
    table: _core.SampleTable, rows: Rows, device: torch.device | str, *, num_pairs: float | None = None
) -> BatchTotals:
    """Totals of the samples at `rows`, summed over ranks. Without `num_pairs` two samples are
    one."""
    pairs = len(rows) / 2 if num_pairs is None else num_pairs
    weights, targets = table.weights[rows], table.target_counts[rows]
    if not ranks.is_distributed():
        return BatchTotals.from_columns(weights, targets, num_pairs=pairs)
    wide = weights.astype(np.float64)
    sums = ranks.sum_over_ranks([len(rows), float(targets.sum()), float(wide.sum()), pairs], device)
    mean = sums[2] / max(sums[0], 1.0)
    [squares] = ranks.sum_over_ranks([float(((wide - mean) ** 2).sum())], device)
    deviation = float(np.sqrt(squares / max(sums[0], 1.0)))
    return BatchTotals(sums[0], sums[1], weight_mean=mean, weight_std=deviation, num_pairs=sums[3])


def _weightless(micro_batch: MicroBatch) -> MicroBatch:
    """A row that keeps this rank in step and adds nothing: no action, no weight, and no item in
    any count."""
    silent = {"action_mask", "weight", "actor_logps", "old_logp_action"}
    tensors: dict[str, Any] = {
        name: torch.zeros_like(value) if name in silent else value for name, value in micro_batch.tensors.items()
    }
    return MicroBatch(tensors, 0, micro_batch.sample_names)
