"""The scores of held-out pairs and their metrics: an evaluator for reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ludic.errors import ConfigError
from ludic.training import ranks
from ludic.training.backend.forward import as_forward_passes
from ludic.training.backend.protocol import ForwardPasses
from ludic.training.batching.mini_batches import MiniBatch
from ludic.training.batching.pair_batches import DROP_REASONS, PreferenceMacroBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.classification_metrics import Floats, PreferenceMetrics, preference_loss
from ludic.training.config import TrainerConfig
from ludic.training.loss.base import ScoreType
from ludic.training.reference import computes_trees
from ludic.training.rm_config import RMTrainerConfig
from ludic.training.types import SAWItem


class PreferenceEvaluator:
    """Scores every response of the pairs in `items` and computes all metrics from these scores;
    packing does not change them. As the evaluator of a `Trainer` it logs `eval/pairwise_accuracy`,
    `eval/loss` and so on.

    Samples longer than `max_seq_len` are truncated as in training, and pairs are dropped, or raise,
    for the same reasons. `loss` is the Bradley-Terry loss at `metrics.beta`, without label
    smoothing and regularisation, so that runs with different ones can be compared. With several
    ranks each scores its share, and all get the metrics.
    """

    on_all_ranks: bool = True

    def __init__(
        self,
        model: nn.Module | ForwardPasses,
        items: Sequence[SAWItem],
        cfg: TrainerConfig,
        *,
        metrics: PreferenceMetrics | None = None,
        score_type: ScoreType = "reward",
    ) -> None:
        """`model`: a model in this process, or the backend that has it. `metrics` computes the
        metrics; every evaluation resets it. An incomplete pair raises DataError if the
        `RMTrainerConfig` requires complete pairs, else it is dropped with a warning."""
        self._passes, self._cfg, self._score_type = as_forward_passes(model, cfg), cfg, score_type
        self.metrics = metrics or PreferenceMetrics(both_orders=True, thresholds_on="responses")
        """Has the scores of the last evaluation, for plots."""
        requires_pairs = isinstance(cfg, RMTrainerConfig) and cfg.rm_require_complete_pairs and not cfg.rm_drop_incomplete_pairs
        self.batch = PreferenceMacroBatch.ingest_pairs(items, cfg.max_seq_len, drop_incomplete=not requires_pairs)
        if not self.batch.num_pairs:
            raise ConfigError(
                f"none of the {len(items)} samples to evaluate is in a complete pair within max_seq_len ({cfg.max_seq_len})"
            )

    @property
    def num_pairs(self) -> int:
        """The number of scored pairs."""
        return self.batch.num_pairs

    def measure(self) -> dict[str, float]:
        """`loss`, the metrics of `PreferenceMetrics.compute`, `num_pairs`, and the number of
        dropped pairs by `DROP_REASONS`."""
        scores = self._scores()
        chosen, rejected = scores[::2], scores[1::2]
        labels = np.array([float(item.meta["label"]) for item in self.batch.items[::2]])
        self.metrics.reset()
        self.metrics.update(chosen, rejected, labels)
        loss = preference_loss(chosen, rejected, labels, self.metrics.beta)
        counts = self.batch.counts()
        dropped = {name: counts[name] for name in DROP_REASONS}
        return {"loss": loss, **self.metrics.compute(), "num_pairs": float(self.num_pairs), **dropped}

    async def eval(self, **_: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(no records, metrics). Reducers and limits have no effect."""
        return [], self.measure()

    def _scores(self) -> Floats:
        """[N] score of each sample. All ranks must call this; each computes its share."""
        pairs = np.arange(len(self.batch.items)).reshape(-1, 2)  # lone samples are not scored
        kind = TreeMiniBatch if computes_trees(self._passes) else MiniBatch
        mini_batch = kind(self.batch, pairs[ranks.rank() :: ranks.world_size()].reshape(-1), self._cfg)
        scores = np.zeros(len(self.batch.items))
        for index, micro_batch in enumerate(mini_batch):
            rows = mini_batch.micro_batch_rows(index)
            row_scores = self._passes.forward_scores(micro_batch, score_type=self._score_type).wait()
            scores[rows] = row_scores[: len(rows)].double().cpu().numpy()  # padding rows come last
        return np.array(ranks.sum_over_ranks(scores.tolist(), self._cfg.model_device))
