"""Mini-batches whose samples share prefixes: rows of prefix trees (`models.prefix_trees`).

The samples of a group begin with the same prompt, and the samples of an episode with its earlier
turns. In a tree each of these tokens is computed once. Only the model sees trees: the columns of a
micro-batch are the columns of its samples, concatenated without padding, so that losses, weights
and normalizers are the same as for separate rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.models.images.rows import IMAGES
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.training.batching.mini_batches import MiniBatch
from ludic.training.batching.packing import MicroBatch, Packing, Rows, plan_lines
from ludic.training.batching.pair_batches import PreferenceMiniBatch, SampleMiniBatch, join_plans
from ludic.training.batching.rank_plans import PlannedAtoms, plan_atoms
from ludic.training.batching.routes import restore_ids

MIN_SHARED = 8
"""A shorter common prefix is computed for each sample: a branch costs a little, too."""
PAYS_BELOW = 0.9
"""`prefix_sharing="auto"` shares prefixes if trees have at most this fraction of the tokens that
rows of their own have."""

TreePlan = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""(order, shared, bounds, tokens) of `SampleTable.plan_trees`."""


class TreeMiniBatch(MiniBatch):
    """The micro-batches of one optimizer step, as rows of prefix trees if that pays, or if
    `prefix_sharing="tree"`; otherwise the micro-batches of `MiniBatch`.

    A line is a tree, or a part of one that is too large for the token budget; what it computes
    counts for the budget and the cost.
    """

    _shared: NDArray[np.int64] | None = None
    """[N of the macro-batch] how many tokens each sample shares with the one before it in the
    trees. None means no trees."""
    _places: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    """[N of the macro-batch] the place of each sample in the order of the trees."""
    _unshared: NDArray[np.int32] | None = None

    @property
    def has_trees(self) -> bool:
        """Whether the micro-batches are rows of prefix trees."""
        return self._shared is not None

    def _find_lines(self) -> None:
        super()._find_lines()
        table = self.batch.table
        if self.cfg.prefix_sharing == "off" or table.has_partial_attention or not len(self.rows):
            return
        always = self.cfg.prefix_sharing == "tree"
        if self.batch.has_candidates and not always:  # they need whole logits
            return
        order, shared, bounds, tokens = self._plan_trees()
        if not always and tokens.sum(dtype=np.int64) > PAYS_BELOW * self.lengths.sum(dtype=np.int64):
            return
        self._unshared = self.lengths
        self._shared, self._places = np.zeros((2, len(table)), dtype=np.int64)
        self._shared[order], self._places[order] = shared, np.arange(len(order))
        self.rows, self.line_bounds, self.lengths = self._arrange(order, bounds), bounds, tokens
        self.packing = "padding_free"

    def _plan_trees(self) -> TreePlan:
        return self.batch.table.plan_trees(self.rows, self.cfg.micro_token_budget, MIN_SHARED)

    def _arrange(self, order: Rows, bounds: Rows) -> Rows:
        """The samples of each line in the order in which micro-batches have them, from the order of
        the trees."""
        return order

    @property
    def unshared_lengths(self) -> NDArray[np.int32]:
        return self.lengths if self._unshared is None else self._unshared

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        micro_batch = super()._micro_batch(rows)
        if self._shared is not None:
            table, tensors = self.batch.table, micro_batch.tensors
            assert "turns" not in tensors  # a sample comes before those that it continues
            order = np.argsort(self._places[rows])
            by_tree = rows[order]
            shared = self._shared[by_tree]
            shared[0] = 0  # as it is, unless the row stands for no sample (`MiniBatch._collate`)
            arrays, device = table.collate_trees(by_tree, shared), self.cfg.model_device
            if self.batch.routed is not None:
                restore_ids(arrays, self.batch.routed)
            if self.batch.images is not None:
                self.batch.images.restore(arrays)
                tensors[IMAGES] = self.batch.images.of_trees(by_tree, shared, order)
            tensors[PREFIX_TREES] = PrefixTrees.from_arrays(arrays, table.lengths[by_tree], shared, device, order)
        return micro_batch


class SampleTreeMiniBatch(TreeMiniBatch, SampleMiniBatch):
    """`SampleMiniBatch` as rows of prefix trees."""


class PairTreeMiniBatch(TreeMiniBatch, PreferenceMiniBatch):
    """`PreferenceMiniBatch` as rows of prefix trees: a line has whole pairs, whose samples share
    their prompt, or samples without a partner.

    The samples of a micro-batch are in the order of `PreferenceMiniBatch`, chosen before rejected,
    whatever the order of the trees.
    """

    _num_pair_lines = 0
    """Number of lines of pairs, which come first."""

    def _plan_trees(self) -> TreePlan:
        table, budget = self.batch.table, self.cfg.micro_token_budget
        pairs = table.plan_trees(self.rows[self._in_pairs], budget, MIN_SHARED, paired=True)
        lone = table.plan_trees(self.rows[~self._in_pairs], budget, MIN_SHARED)
        self._num_pair_lines = len(pairs[3])
        bounds = np.concatenate([pairs[2], pairs[2][-1] + lone[2][1:]])
        return (
            np.concatenate([pairs[0], lone[0]]),
            np.concatenate([pairs[1], lone[1]]),
            bounds,
            np.concatenate([pairs[3], lone[3]]),
        )

    def _arrange(self, order: Rows, bounds: Rows) -> Rows:
        return np.concatenate([np.sort(line) for line in np.split(order, bounds[1:-1])])  # a pair is at rows 2i and 2i + 1

    def _plan_lines(self) -> Packing | _core.Plan:
        if not self.has_trees:
            return super()._plan_lines()
        pairs, lone = self._divide_lines()
        plan = plan_lines(self.lengths[pairs], self.cfg, self.packing)
        return join_plans(plan, plan_lines(self.lengths[lone], self.cfg, self.packing), lone) if len(lone) else plan

    def _plan_ranks(self, world: int) -> list[PlannedAtoms]:
        if not self.has_trees:
            return super()._plan_ranks(world)
        parts = [lines for lines in self._divide_lines() if len(lines)]
        return [plan_atoms(lines[:, None], self.lengths[lines], self.cfg, world, self.packing) for lines in parts]

    def _divide_lines(self) -> tuple[Rows, Rows]:
        """The lines of pairs, and the lines of samples without a partner."""
        first, second = np.split(np.arange(len(self.lengths)), [self._num_pair_lines])
        return first, second
