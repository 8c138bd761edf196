"""Macro-batches, mini-batches and micro-batches of preference pairs, for the reward-model trainer.
A pair is never divided."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ludic import _core
from ludic.errors import shorten_names
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.image_keys import SampleImages
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch, batch_totals, rows_by_key, unit_key
from ludic.training.batching.packing import MicroBatch, Packing, Rows, select_rows, truncate_and_flag
from ludic.training.batching.preference import collate_meta, find_pair_rows, validate_preference_batch
from ludic.training.batching.rank_plans import PlannedAtoms, plan_atoms
from ludic.training.batching.token_columns import refuse_columns
from ludic.training.config import TrainerConfig
from ludic.training.loss import BatchTotals
from ludic.training.loss.batch import PREFERRED_LENGTH, PREFERRED_TOKENS
from ludic.training.samples.preference import PREFERENCE_KEYS
from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

DROP_REASONS = ("pairs_incomplete", "pairs_truncated_empty", "pairs_truncated_equal")
"""The reasons why pairs are dropped, as keys in the log."""
PAIR_COUNT_KEYS = ("total_pairs", *DROP_REASONS, "pairs_identical")
"""The counts of a step: pairs trained on, pairs dropped for each reason, and trained pairs with two
identical samples, which have no learning signal."""


@dataclass(frozen=True)
class PreferenceMacroBatch(MacroBatch):
    """The pairs of one batch: (chosen, rejected) at rows (0, 1), (2, 3) and so on, then the samples
    without a partner. Example: 1 pair and 1 lone sample are rows 0, 1 and row 2, with `num_pairs`
    1.

    >>> batch = PreferenceMacroBatch.ingest_pairs(items, max_seq_len=1024)
    """

    num_pairs: int = 0
    counts_by_reason: Mapping[str, int] | None = None
    """The counts of `PAIR_COUNT_KEYS`, except `total_pairs`."""

    @classmethod
    def ingest_pairs(
        cls, items: Sequence[SAWItem], max_seq_len: int, *, require_complete: bool = True, drop_incomplete: bool = True
    ) -> PreferenceMacroBatch:
        """Read the items once, pair them (see `group_preference_pairs`), and truncate them.

        Drops the pairs without information after truncation: one sample lost its whole answer (with
        `require_complete=False` the other sample stays), or both samples became equal. Pairs that
        were identical before are kept and counted.
        """
        validate_preference_batch(items)
        refuse_columns(items, "a preference sample has one score")
        pairs, lone = find_pair_rows(items, require_complete=require_complete, drop_incomplete=drop_incomplete)
        full = _core.SampleTable.from_items(items)
        flagged = [truncate_and_flag(item, max_seq_len) for item in items]
        images = SampleImages.of_items(flagged) if any(item.images for item in items) else None
        keyed = items if images is None else images.key(flagged)  # two images are different, whatever their size
        table = full.truncate(max_seq_len) if images is None else _core.SampleTable.from_items(keyed)
        lost_answer = (table.lengths == 0) | ((table.action_counts == 0) & (full.action_counts > 0))
        half_lost = lost_answer[pairs].any(axis=1)  # [P]: pairs [[0, 1], [2, 3]] and lost row 3 give [False, True]
        if not require_complete:
            lone = np.concatenate([lone, pairs[half_lost].reshape(-1)])
        lone = lone[~lost_answer[lone]]
        lengths, truncated = table.lengths, np.asarray(full.lengths > table.lengths)
        equal = np.array(
            [
                lengths[a] == lengths[b] and np.array_equal(keyed[a].input_ids[: lengths[a]], keyed[b].input_ids[: lengths[b]])
                for a, b in pairs
            ],
            dtype=bool,
        )
        made_equal = equal & ~half_lost & truncated[pairs].any(axis=1)
        dropped = half_lost | made_equal
        counts = {
            "pairs_incomplete": 0 if not require_complete else (len(items) - pairs.size),
            "pairs_truncated_empty": int(half_lost.sum()),
            "pairs_truncated_equal": int(made_equal.sum()),
            "pairs_identical": int((equal & ~dropped).sum()),
        }
        _warn_of_dropped(counts, items, pairs[dropped], max_seq_len)
        rows = np.concatenate([pairs[~dropped].reshape(-1), lone])
        retained = set(rows.tolist())
        dropped_items = [item for row, item in enumerate(flagged) if row not in retained]
        return cls(
            [flagged[row] for row in rows],
            table.select(rows),
            0,
            0,
            dropped_items,
            images=None if images is None else images.select(rows),
            num_pairs=int((~dropped).sum()),
            counts_by_reason=counts,
        )

    def counts(self) -> dict[str, float]:
        """`PAIR_COUNT_KEYS`."""
        reasons = {key: float(count) for key, count in (self.counts_by_reason or {}).items()}
        return {"total_pairs": float(self.num_pairs), **reasons}

    def groups(self) -> list[list[int]]:
        """Group the rows; both rows of a pair belong to the unit of its chosen sample. Example: one
        pair and one lone sample use the units of rows 0, 0 and 2."""
        firsts = (row - row % 2 if row < 2 * self.num_pairs else row for row in range(len(self.items)))
        return rows_by_key(unit_key(self.items[first], first) for first in firsts)

    def name(self, row: int) -> str:
        """`pair PAIR_ID` of a sample."""
        return f"pair {self.items[row].meta['pair_id']}"


def _warn_of_dropped(counts: Mapping[str, int], items: Sequence[SAWItem], dropped: NDArray[np.int64], max_seq_len: int) -> None:
    """Log why pairs were dropped; `find_pair_rows` has already warned about incomplete ones."""
    if len(dropped):
        names = shorten_names([items[chosen].meta["pair_id"] for chosen, _ in dropped])
        logger.warning(
            "dropped %d preference pairs: max_seq_len (%d) cut off the whole answer of %d, and the only difference between the samples "
            "of %d: %s",
            len(dropped),
            max_seq_len,
            counts["pairs_truncated_empty"],
            counts["pairs_truncated_equal"],
            names,
        )


class SampleMiniBatch(MiniBatch):
    """The micro-batches of one optimizer step, of single samples with their metadata."""

    def __init__(self, batch: MacroBatch, rows: Rows, cfg: TrainerConfig, *, meta_keys: Sequence[str] = PREFERENCE_KEYS) -> None:
        """`meta_keys`: the keys of the metadata that the loss reads."""
        self._meta_keys = meta_keys
        super().__init__(batch, rows, cfg)

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        plain = super()._micro_batch(rows)
        meta = collate_meta([self.batch.items[row] for row in rows.tolist()], self._meta_keys)
        return PreferenceMicroBatch({**plain.tensors, "meta": meta}, plain.num_items, plain.sample_names)


class PreferenceMiniBatch(SampleMiniBatch):
    """The micro-batches of one optimizer step, of whole pairs: `2 * longest * pairs <=
    micro_token_budget`."""

    batch: PreferenceMacroBatch

    def __init__(
        self, batch: PreferenceMacroBatch, rows: Rows, cfg: TrainerConfig, *, meta_keys: Sequence[str] = PREFERENCE_KEYS
    ) -> None:
        self._in_pairs = rows < 2 * batch.num_pairs  # [N] bool: with 1 pair, rows [0, 1, 2] give [True, True, False]
        super().__init__(batch, rows, cfg, meta_keys=meta_keys)

    def _totals(self, rows: Rows) -> BatchTotals:
        pairs, table = rows[self._in_pairs].reshape(-1, 2), self.batch.table
        preferred = [row + (self.batch.items[row].meta["label"] < 0.5) for row in pairs[:, 0]]  # chosen, or else rejected
        own = [float(counts[preferred].sum()) for counts in (table.target_counts, table.lengths - 1)]
        sums = self.batch.sum_over_ranks(own, self.cfg.model_device)
        measured = dict(zip((PREFERRED_TOKENS, PREFERRED_LENGTH), map(torch.tensor, sums), strict=True))
        return replace(batch_totals(self.batch, rows, self.cfg.model_device, num_pairs=float(len(pairs))), measured=measured)

    def _plan_lines(self) -> Packing | _core.Plan:
        greedy = self.cfg.packing == "greedy"
        return self._plan_pairs(None if greedy else self.cfg.overhead_tokens)

    def _plan_lines_greedily(self) -> Packing | _core.Plan:
        return self._plan_pairs(None)

    def _plan_ranks(self, world: int) -> list[PlannedAtoms]:
        """Pairs, then lone samples, each for all ranks. Example: `_in_pairs` [True, True, False]
        with lengths [4, 6, 3] is the atom [0, 1] of length 6 and the atom [2] of length 3."""
        pairs, lone = np.flatnonzero(self._in_pairs).reshape(-1, 2), np.flatnonzero(~self._in_pairs)[:, None]
        return [plan_atoms(lines, self.lengths[lines].max(axis=1), self.cfg, world) for lines in (pairs, lone) if len(lines)]

    def _plan_pairs(self, overhead_tokens: int | None) -> Packing | _core.Plan:
        """Plan pairs first, then lone samples in micro-batches without pairs. Example: `_in_pairs`
        [True, True, False] has the pair [[0, 1]] and the lone index [2]."""
        pairs, lone = np.flatnonzero(self._in_pairs), np.flatnonzero(~self._in_pairs)
        budget = self.cfg.micro_token_budget
        lengths = self.unshared_lengths
        plan = _core.plan_pairs(lengths, pairs.reshape(-1, 2), budget, overhead_tokens)
        if not len(lone):
            return plan
        left = np.ascontiguousarray(lengths[lone])
        lone_plan = (
            _core.plan_greedy(left, budget) if overhead_tokens is None else _core.plan_optimal(left, budget, overhead_tokens)
        )
        return join_plans(plan, lone_plan, lone)


def join_plans(pairs: _core.Plan, lone_plan: _core.Plan, lone: Rows) -> Packing:
    """The micro-batches of pairs, then of lone samples, whose indices are `lone` [L].

    Example: `pairs` plans [[0, 1]], `lone_plan` plans [[0]], and `lone` is [2]. Micro-batch 0 is
    positions [0, 1]; micro-batch 1 is entry 0 of `lone`, position [2].
    """
    micro_batches = [pairs[index] for index in range(len(pairs))] + [lone[lone_plan[index]] for index in range(len(lone_plan))]
    return Packing(micro_batches, pairs.num_tokens + lone_plan.num_tokens, pairs.padded_tokens + lone_plan.padded_tokens)


class PreferenceMicroBatch(MicroBatch):
    """Samples with their `meta`: pairs as neighbouring rows (chosen, rejected), or lone samples."""

    def parts(self) -> Iterator[MicroBatch]:
        """Iterate over the pairs, or over the lone samples. Example: two pairs are the slices 0:2
        and 2:4."""
        meta = self.tensors["meta"]
        ids, roles = meta.get("pair_id", []), meta.get("role", [])
        paired = roles[:2] == ["chosen", "rejected"] and ids[0] == ids[1]
        step = 2 if paired else 1
        return (self._slice(start, start + step) for start in range(0, self.num_items, step))

    def row(self, index: int) -> MicroBatch:
        return self._slice(index, index + 1)

    def _slice(self, start: int, end: int) -> MicroBatch:
        part = slice(start, end)
        tensors = select_rows({name: value for name, value in self.tensors.items() if name != "meta"}, part, part)
        meta = {key: values[part] for key, values in self.tensors["meta"].items()}
        return PreferenceMicroBatch({**tensors, "meta": meta}, end - start, self.sample_names[part])


def preference_batches(
    items: Sequence[SAWItem],
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 42,
    drop_last: bool = False,
    require_complete: bool = True,
    drop_incomplete: bool = True,
) -> ItemBatchSource:
    """Return a batch source with `batch_size` whole pairs per batch, epoch after epoch; see
    `ItemBatchSource`.

    Incomplete pairs are dropped, kept or an error as in `group_preference_pairs`. The trainer never
    sees pairs that are dropped here; it raises if its `rm_drop_incomplete_pairs` or
    `rm_require_complete_pairs` contradicts that.
    """
    pairs, lone = find_pair_rows(items, require_complete=require_complete, drop_incomplete=drop_incomplete)
    retained = [items[int(row)] for row in [*pairs.reshape(-1), *lone]]  # pairs [[2, 0]], lone [1]: items 2, 0, 1
    units = [2] * len(pairs) + [1] * len(lone)
    source = ItemBatchSource(
        retained, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, name="preference", unit=units
    )
    source.pairs_incomplete = len(items) - len(retained)
    return source
