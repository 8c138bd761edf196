"""Evaluators of held-out samples: by the loss, for supervised fine-tuning; of pairs by the scores
of a reward model, or by the implicit rewards of direct preference optimization."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.training import ranks
from ludic.training.backend.forward import as_forward_passes, forward_action_logprobs
from ludic.training.backend.protocol import ForwardPasses
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.pair_batches import DROP_REASONS, PreferenceMacroBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.classification_metrics import Floats, PreferenceMetrics, preference_loss
from ludic.training.config import TrainerConfig
from ludic.training.loss.base import ScoreType
from ludic.training.loss.context import SharedContext
from ludic.training.loss.dpo import TIE, DPOLoss
from ludic.training.loss.kto import KTOLoss
from ludic.training.loss.logprobs import weigh_values
from ludic.training.preflight.layouts import with_right_layout
from ludic.training.reference import PrecomputedReference, computes_trees, item_key, score_actions
from ludic.training.rm_config import RMTrainerConfig
from ludic.training.types import SAWItem


class HeldOutLoss:
    """Mean of -log pi over all action tokens of `items`, in nats; packing does not change it.
    Samples longer than `max_seq_len` are truncated as in training. As the evaluator of a `Trainer`
    it logs `eval/loss` and `eval/perplexity`.

    It runs in one process. A sharded model would need all ranks.
    """

    def __init__(self, model: nn.Module | ForwardPasses, items: Sequence[SAWItem], cfg: TrainerConfig) -> None:
        """`model`: a model in this process, or the backend that has it."""
        self._model, self._cfg, self._passes = model, cfg, as_forward_passes(model, cfg)
        self._is_checked = False
        self._batch = replace(MacroBatch.ingest(items, cfg.max_seq_len), share=RankShare(0, 1))  # no other rank takes part
        if not self._batch.items:
            raise ConfigError(f"none of the {len(items)} held-out samples has a target token in max_seq_len ({cfg.max_seq_len})")

    def measure(self) -> dict[str, float]:
        """`loss`, `perplexity`, and the number of `tokens`."""
        if isinstance(self._model, nn.Module) and not self._is_checked:
            self._is_checked = True
            self._cfg = with_right_layout(self._cfg, self._model)
        total = tokens = 0.0
        for micro_batch in MiniBatch(self._batch, np.arange(len(self._batch.items)), self._cfg):
            logps = forward_action_logprobs(self._passes, micro_batch, temperature=1.0).wait()
            mask = SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).token_mask
            total -= float(weigh_values(logps.double(), mask.double()).sum())
            tokens += float(mask.sum())
        loss = total / tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}

    async def eval(self, **_: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(no records, metrics). Reducers and limits have no effect."""
        return [], self.measure()


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
            raise ConfigError(f"none of the {len(items)} samples is in a complete pair within max_seq_len ({cfg.max_seq_len})")

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
        kind = TreeMiniBatch if computes_trees(self._passes) else MiniBatch
        shared = replace(self.batch, share=RankShare.of_this_rank())
        mini_batch = kind(shared, np.arange(2 * self.batch.num_pairs), self._cfg)  # lone samples are not scored
        scores = np.zeros(len(self.batch.items))
        for index, micro_batch in enumerate(mini_batch):
            rows = mini_batch.micro_batch_rows(index)
            row_scores = self._passes.forward_scores(micro_batch, score_type=self._score_type).wait()
            scores[rows] = row_scores[: len(rows)].double().cpu().numpy()  # padding rows come last
        return np.array(ranks.sum_over_ranks(scores.tolist(), self._cfg.model_device))


MEASURED = (
    *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"),
    *("ece", "negative_margin_rate", "margin_p5", "margin_p25", "margin_p50", "margin_p75", "margin_p95", "num_pairs"),
)
"""The metrics, in addition to the numbers of dropped pairs."""


class ImplicitRewardEvaluator(PreferenceEvaluator):
    """Measures pairs by the implicit reward of each response, beta (log pi - log pi_ref) summed
    over its action tokens (Rafailov et al. 2023, eq. 5), or the one of a loss without a
    reference, by TRL's names. As the evaluator of a `Trainer` it logs `eval/rewards/accuracies` and
    so on.

    `loss` is the training's, with its label smoothing and without a likelihood term; with KTO, the
    KL divergence is estimated from the measured samples. `ece` and the percentiles of the margins
    are as in `PreferenceMetrics` for the probability sigmoid(margin), which the sigmoid loss fits.
    With several ranks each scores its share, and all get the metrics.
    """

    def __init__(
        self,
        model: nn.Module | ForwardPasses,
        items: Sequence[SAWItem],
        cfg: TrainerConfig,
        *,
        loss: DPOLoss | KTOLoss,
        reference: PrecomputedReference | None,
        mismatched: Mapping[bytes, SAWItem] | None = None,
    ) -> None:
        """`model`: a model in this process, or the backend that has it. `reference` has the samples
        of `items`, unless the loss reads none. `mismatched`: what KTO estimates the KL divergence
        from, by the `item_key` of the samples."""
        metrics = PreferenceMetrics(both_orders=True, thresholds=None)
        super().__init__(model, items, cfg, metrics=metrics, score_type=loss.score_type)
        self._loss, self._reference, self._mismatched = loss, reference, mismatched

    def measure(self) -> dict[str, float]:
        """`MEASURED`, and the number of dropped pairs by `DROP_REASONS`. Before training all
        margins are 0, and no pair is right."""
        logps, sums, lengths = self._sums(self.batch)
        kl = 0.0
        if self._mismatched:
            mismatched = [self._mismatched[item_key(item)] for item in self.batch.items]
            kl = max(0.0, float(self._sums(MacroBatch.ingest(mismatched, self._cfg.max_seq_len))[1].mean()))
        labels = np.array([float(item.meta["label"]) for item in self.batch.items[::2]])
        rewards = self._loss.rewards(sums, lengths).numpy()
        chosen, rejected = rewards[::2], rewards[1::2]
        tie = np.abs(chosen - rejected) <= self._loss.beta * TIE * (np.abs(logps[::2]) + np.abs(logps[1::2]))
        self.metrics.reset()
        self.metrics.update(chosen, np.where(tie, chosen, rejected), labels)
        rows = slice(0, None, 2), slice(1, None, 2)
        losses = self._loss.of_pairs(sums, lengths, rows, torch.from_numpy(labels), kl)
        computed = self.metrics.compute()
        counts = self.batch.counts()
        return {
            "loss": float(losses.mean()),
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

    def _sums(self, batch: MacroBatch) -> tuple[Floats, torch.Tensor, torch.Tensor]:
        """[N] float64 sums of the log-probabilities of each sample, the same or with a reference
        its log-ratio, and its number of action tokens."""
        own = score_actions(
            batch,
            self._cfg,
            lambda part: forward_action_logprobs(self._passes, part).wait(),
            trees=computes_trees(self._passes),
        )
        if (reference := self._reference) is None:
            sums = [each.double().sum() for each in own]
        else:
            sums = [(each.double() - reference.of_item(item).double()).sum() for each, item in zip(own, batch.items, strict=True)]
        logps = np.array([float(each.double().sum()) for each in own])
        return logps, torch.stack(sums), torch.tensor([max(1, len(each)) for each in own])
