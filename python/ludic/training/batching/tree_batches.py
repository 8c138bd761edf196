"""Mini-batches whose samples share prefixes: rows of prefix trees (`models.prefix_trees`).

The samples of a group begin with the same prompt, and those of an episode with its earlier turns.
In a tree each of these tokens is computed once. Only the model sees trees: the columns of a
micro-batch are those of its samples, concatenated without padding, so that losses, weights and
normalizers are those of separate rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.batching.mini_batches import MiniBatch
from ludic.training.batching.packing import Rows

MIN_SHARED = 8
"""A shorter common prefix is computed for each sample: a branch costs a little, too."""
PAYS_BELOW = 0.9
"""`prefix_sharing="auto"` shares prefixes if trees have at most this fraction of the tokens that
rows of their own have."""


class TreeMiniBatch(MiniBatch):
    """The micro-batches of one optimizer step, as rows of prefix trees if that pays, or if
    `prefix_sharing="tree"`; otherwise those of `MiniBatch`.

    A line is a tree, or a part of one that is too large for the token budget; what it computes
    counts for the budget and the cost.
    """

    _shared: NDArray[np.int64] | None = None
    """[N of the macro-batch] how many tokens each sample shares with the one before it. None: no
    trees."""
    _unshared: NDArray[np.int32] | None = None

    def _find_lines(self) -> None:
        super()._find_lines()
        table = self.batch.table
        if self.cfg.prefix_sharing == "off" or table.has_partial_attention or not len(self.rows):
            return
        order, shared, bounds, tokens = table.plan_trees(self.rows, self.cfg.micro_token_budget, MIN_SHARED)
        always = self.cfg.prefix_sharing == "tree"
        if not always and tokens.sum(dtype=np.int64) > PAYS_BELOW * self.lengths.sum(dtype=np.int64):
            return
        self._unshared = self.lengths
        self._shared = np.zeros(len(table), dtype=np.int64)
        self._shared[order] = shared
        self.rows, self.line_bounds, self.lengths = order, bounds, tokens
        self.packing = "padding_free"

    @property
    def unshared_lengths(self) -> NDArray[np.int32]:
        return self.lengths if self._unshared is None else self._unshared

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        micro_batch = super()._micro_batch(rows)
        if self._shared is not None:
            table, tensors = self.batch.table, micro_batch.tensors
            assert "turns" not in tensors  # a sample comes before those that it continues
            shared = self._shared[rows]
            shared[0] = 0  # as it is, unless the row stands for no sample (`_weightless_row`)
            arrays = table.collate_trees(rows, shared)
            tensors[PREFIX_TREES] = PrefixTrees.from_arrays(arrays, table.lengths[rows], shared, self.cfg.model_device)
        return micro_batch
