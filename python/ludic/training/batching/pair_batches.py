"""A macro-batch of preference pairs as the trainer runs it: pairs are atoms, from the first cut
to the last micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.micro_batching import MicroBatch, cut_item
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch, Packing, Rows, atom, batch_totals, grouped
from ludic.training.batching.preference import PREFERENCE_KEYS, collate_meta, pairs_of, shortened, validate_preference_batch
from ludic.training.config import TrainerConfig
from ludic.training.loss import BatchTotals
from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

LEFT_OUT = ("pairs_incomplete", "pairs_truncated_empty", "pairs_truncated_equal")
"""Why pairs are dropped."""
PAIR_KEYS = ("total_pairs", *LEFT_OUT, "pairs_identical")
"""What a step counts of its pairs: those that were trained, those that were dropped, by reason,
and those of the first that have twice the same tokens and so move nothing."""


@dataclass(frozen=True)
class PreferenceMacroBatch(MacroBatch):
    """Pairs of one batch, (chosen, rejected) at rows (0, 1), (2, 3) and so on; after them the
    samples that are alone.

    >>> batch = PreferenceMacroBatch.of_pairs(items, max_seq_len=1024)
    """

    num_pairs: int = 0
    found: Mapping[str, int] | None = None
    """The keys of `PAIR_KEYS` after the first."""

    @classmethod
    def of_pairs(
        cls, items: Sequence[SAWItem], max_seq_len: int, *, require_complete: bool = True, drop_incomplete: bool = True
    ) -> PreferenceMacroBatch:
        """Read the items once, pair them (see `group_preference_pairs`), cut them, and drop the
        pairs that the cut made say nothing: one of the samples lost its whole answer (without
        `require_complete` the other stays), or both now have the same tokens. Pairs that were
        identical from the start stay, and are counted."""
        validate_preference_batch(items)
        pairs, lone = pairs_of(items, require_complete=require_complete, drop_incomplete=drop_incomplete)
        whole = _core.SampleTable.from_items(items)
        table = whole.truncate(max_seq_len)
        lost = (table.lengths == 0) | ((table.action_counts == 0) & (whole.action_counts > 0))
        half_lost = lost[pairs].any(axis=1)
        survivors = pairs[half_lost].reshape(-1)
        alone = lone if require_complete else np.concatenate([lone, survivors])
        alone = alone[~lost[alone]]
        equal, cut = _equal_within(items, pairs, table), np.asarray(whole.lengths > table.lengths)
        made_equal = equal & ~half_lost & cut[pairs].any(axis=1)
        gone = half_lost | made_equal
        counts = {
            "pairs_incomplete": 0 if not require_complete else (len(items) - pairs.size),
            "pairs_truncated_empty": int(half_lost.sum()),
            "pairs_truncated_equal": int(made_equal.sum()),
            "pairs_identical": int((equal & ~gone).sum()),
        }
        _warn(counts, items, pairs[gone], max_seq_len)
        rows = np.concatenate([pairs[~gone].reshape(-1), alone])
        every = [cut_item(item, max_seq_len) for item in items]
        taken = set(rows.tolist())
        kept, dropped = [every[row] for row in rows], [item for row, item in enumerate(every) if row not in taken]
        return cls(kept, table.select(rows), 0, 0, dropped, num_pairs=int((~gone).sum()), found=counts)

    def counts(self) -> dict[str, float]:
        """`PAIR_KEYS`."""
        return {"total_pairs": float(self.num_pairs), **{key: float(count) for key, count in (self.found or {}).items()}}

    def groups(self) -> list[list[int]]:
        """Both rows of a pair belong where its chosen sample does."""
        firsts = (row - row % 2 if row < 2 * self.num_pairs else row for row in range(len(self.items)))
        return grouped(atom(self.items[first], first) for first in firsts)

    def name(self, row: int) -> str:
        """`pair PAIR_ID` of a sample."""
        return f"pair {self.items[row].meta['pair_id']}"


def _equal_within(items: Sequence[SAWItem], pairs: NDArray[np.int64], table: _core.SampleTable) -> NDArray[np.bool]:
    """[P] whether the samples of each pair have the same tokens after the cut."""
    lengths = table.lengths
    return np.array(
        [
            lengths[a] == lengths[b] and np.array_equal(items[a].input_ids[: lengths[a]], items[b].input_ids[: lengths[b]])
            for a, b in pairs
        ],
        dtype=bool,
    )


def _warn(counts: Mapping[str, int], items: Sequence[SAWItem], gone: NDArray[np.int64], max_seq_len: int) -> None:
    """Incomplete pairs have been warned of by the one who found them."""
    if len(gone):
        names = shortened([items[chosen].meta["pair_id"] for chosen, _ in gone])
        logger.warning(
            "dropped %d preference pairs: max_seq_len (%d) cut the whole answer of %d and all that tells the samples apart of %d: %s",
            len(gone),
            max_seq_len,
            counts["pairs_truncated_empty"],
            counts["pairs_truncated_equal"],
            names,
        )


class SampleMiniBatch(MiniBatch):
    """The micro-batches of one optimizer step, of samples that stand alone, with their metadata."""

    def __init__(self, batch: MacroBatch, rows: Rows, cfg: TrainerConfig, *, meta_keys: Sequence[str] = PREFERENCE_KEYS) -> None:
        """`meta_keys`: what of the samples' metadata the loss is given."""
        self._meta_keys = meta_keys
        super().__init__(batch, rows, cfg)

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        plain = super()._micro_batch(rows)
        meta = collate_meta([self.batch.items[row] for row in rows.tolist()], self._meta_keys)
        return PreferenceMicroBatch({**plain.tensors, "meta": meta}, plain.num_items, plain.sample_names)


class PreferenceMiniBatch(SampleMiniBatch):
    """The micro-batches of one optimizer step. No pair is ever in two of them: `2 * longest *
    pairs <= micro_token_budget`."""

    batch: PreferenceMacroBatch

    def __init__(
        self, batch: PreferenceMacroBatch, rows: Rows, cfg: TrainerConfig, *, meta_keys: Sequence[str] = PREFERENCE_KEYS
    ) -> None:
        self._in_pairs = rows < 2 * batch.num_pairs
        super().__init__(batch, rows, cfg, meta_keys=meta_keys)

    def _totals(self, rows: Rows) -> BatchTotals:
        return batch_totals(self.batch.table, rows, self.cfg.model_device, num_pairs=float(self._in_pairs.sum()) / 2)

    def _planned(self) -> Packing:
        greedy = self.cfg.packing == "greedy"
        return self._pair_plan(None if greedy else self.cfg.overhead_tokens)

    def _planned_greedily(self) -> Packing:
        return self._pair_plan(None)

    def _pair_plan(self, overhead_tokens: int | None) -> Packing:
        pairs, lone = np.flatnonzero(self._in_pairs), np.flatnonzero(~self._in_pairs)
        budget = self.cfg.micro_token_budget
        plan = _core.plan_pairs(self.lengths, pairs.reshape(-1, 2), budget, overhead_tokens)
        if not len(lone):
            return plan
        lengths = np.ascontiguousarray(self.lengths[lone])
        apart = (
            _core.plan_greedy(lengths, budget)
            if overhead_tokens is None
            else _core.plan_optimal(lengths, budget, overhead_tokens)
        )
        return _PairsThenLone(plan, apart, lone)


@dataclass(frozen=True)
class _PairsThenLone:
    """Micro-batches of pairs, then those of samples that are alone."""

    pairs: _core.Plan
    apart: _core.Plan
    lone: Rows
    """[L] where in the mini-batch those samples are."""

    def __len__(self) -> int:
        return len(self.pairs) + len(self.apart)

    def __getitem__(self, index: int, /) -> Rows:
        return self.pairs[index] if index < len(self.pairs) else self.lone[self.apart[index - len(self.pairs)]]

    @property
    def num_tokens(self) -> int:
        return self.pairs.num_tokens + self.apart.num_tokens

    @property
    def padded_tokens(self) -> int:
        return self.pairs.padded_tokens + self.apart.padded_tokens


class PreferenceMicroBatch(MicroBatch):
    """Samples with their `meta`: pairs, chosen and rejected being neighbours, or samples that
    are alone."""

    def parts(self) -> Iterator[MicroBatch]:
        """Each pair, or each sample that is alone."""
        meta = self.tensors["meta"]
        ids, roles = meta.get("pair_id", []), meta.get("role", [])
        paired = roles[:2] == ["chosen", "rejected"] and ids[0] == ids[1]
        step = 2 if paired else 1
        return (self._between(start, start + step) for start in range(0, self.num_items, step))

    def row(self, index: int) -> MicroBatch:
        return self._between(index, index + 1)

    def _between(self, start: int, end: int) -> MicroBatch:
        tensors: dict[str, Any] = {name: value[start:end] for name, value in self.tensors.items() if name != "meta"}
        meta = {key: values[start:end] for key, values in self.tensors["meta"].items()}
        return PreferenceMicroBatch({**tensors, "meta": meta}, end - start, self.sample_names[start:end])


class PreferenceBatchSource(ItemBatchSource):
    """Batches of whole pairs, and of the samples that are kept without their other half."""

    pairs_incomplete: int = 0
    """Pairs that were dropped because one sample of theirs is missing."""


def preference_batches(
    items: Sequence[SAWItem],
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 42,
    drop_last: bool = False,
    require_complete: bool = True,
    drop_incomplete: bool = True,
) -> PreferenceBatchSource:
    """A batch source of `batch_size` whole pairs at a time, pass after pass; see `ItemBatchSource`.

    Incomplete pairs are dropped, refused or kept as `group_preference_pairs` does it. What is
    dropped here never reaches the trainer, which says so where its `rm_drop_incomplete_pairs` or
    `rm_require_complete_pairs` asks for something else.
    """
    pairs, lone = pairs_of(items, require_complete=require_complete, drop_incomplete=drop_incomplete)
    kept = [items[int(row)] for row in [*pairs.reshape(-1), *lone]]
    units = [2] * len(pairs) + [1] * len(lone)
    source = PreferenceBatchSource(
        kept, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, name="preference", unit=units
    )
    source.pairs_incomplete = len(items) - len(kept)
    return source
