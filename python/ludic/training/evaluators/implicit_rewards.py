"""The implicit rewards of held-out pairs: an evaluator for direct preference optimization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ludic.training.backend.forward import forward_action_logprobs
from ludic.training.backend.protocol import ForwardPasses
from ludic.training.batching.pair_batches import DROP_REASONS
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.preferences import PreferenceEvaluator
from ludic.training.loss.dpo import TIE, DPOLoss
from ludic.training.reference import PrecomputedReference, computes_trees, score_actions
from ludic.training.types import SAWItem

MEASURED = (
    *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"),
    *("ece", "negative_margin_rate", "margin_p5", "margin_p25", "margin_p50", "margin_p75", "margin_p95", "num_pairs"),
)
"""The metrics, besides the numbers of dropped pairs."""


class ImplicitRewardEvaluator(PreferenceEvaluator):
    """Measures pairs by the implicit reward of each response, beta (log pi - log pi_ref) summed
    over its action tokens (Rafailov et al. 2023, eq. 5), by TRL's names. As the evaluator of a
    `Trainer` it logs `eval/rewards/accuracies` and so on.

    `loss` is that of the training, with its label smoothing and without `nll_coeff`. `ece` and the
    percentiles of the margins are those of `PreferenceMetrics` for the probability sigmoid(margin),
    which is what the sigmoid loss fits. With several ranks each scores its share, and all get the
    metrics.
    """

    def __init__(
        self,
        model: nn.Module | ForwardPasses,
        items: Sequence[SAWItem],
        cfg: TrainerConfig,
        *,
        loss: DPOLoss,
        reference: PrecomputedReference,
    ) -> None:
        """`model`: a model in this process, or the backend that has it. `reference` has the samples
        of `items`."""
        metrics = PreferenceMetrics(both_orders=True, thresholds=None)
        super().__init__(model, items, cfg, metrics=metrics, score_type=loss.score_type)
        self._loss, self._reference = loss, reference

    def measure(self) -> dict[str, float]:
        """`MEASURED`, and the number of dropped pairs by `DROP_REASONS`. Before training all
        margins are 0, and no pair is right."""
        logps, ratios, lengths = self._sums()
        labels = np.array([float(item.meta["label"]) for item in self.batch.items[::2]])
        rewards = self._loss.beta * ratios
        chosen, rejected = rewards[::2], rewards[1::2]
        tie = np.abs(ratios[::2] - ratios[1::2]) <= TIE * (np.abs(logps[::2]) + np.abs(logps[1::2]))
        self.metrics.reset()
        self.metrics.update(chosen, np.where(tie, chosen, rejected), labels)
        computed = self.metrics.compute()
        counts = self.batch.counts()
        return {
            "loss": self._mean_loss(ratios / lengths if self._loss.divides_by_length else ratios, labels),
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float((chosen - rejected).mean()),
            "rewards/accuracies": computed["pairwise_accuracy"],
            "logps/chosen": float(logps[::2].mean()),
            "logps/rejected": float(logps[1::2].mean()),
            **{name: computed[name] for name in MEASURED if name in computed},
            "num_pairs": float(self.num_pairs),
            **{name: counts[name] for name in DROP_REASONS},
        }

    def _mean_loss(self, ratios: np.ndarray, labels: np.ndarray) -> float:
        differences = torch.from_numpy(ratios[::2] - ratios[1::2])
        return float(self._loss.of_differences(differences, torch.from_numpy(labels)).mean())

    def _sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[N] float64 sums of the log-probabilities and of the log-ratios of each sample, and its
        number of action tokens."""
        own = score_actions(
            self.batch,
            self._cfg,
            lambda batch: forward_action_logprobs(self._passes, batch).wait(),
            trees=computes_trees(self._passes),
        )
        known = [self._reference.of_item(item) for item in self.batch.items]
        ratios = [_sum(logps.double() - before.double()) for logps, before in zip(own, known, strict=True)]
        return np.array([_sum(logps.double()) for logps in own]), np.array(ratios), np.array([max(1, len(each)) for each in own])


def _sum(values: Tensor) -> float:
    return float(values.sum())
