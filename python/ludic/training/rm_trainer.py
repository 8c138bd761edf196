"""`RMTrainer`: trains reward models on preference pairs.

It overrides the ingestion, splitting and collation of `Trainer` (`batching.pair_batches`) and the
evaluation (`evaluators.held_out`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ludic.errors import ConfigError, ConfigTypeError
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.wrappers import is_classifier, unwrap_model
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.protocol import ForwardPasses, TrainingBackend, with_defaults
from ludic.training.backend.torch import build_optimizer
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import Rows
from ludic.training.batching.pair_batches import PreferenceMacroBatch, PreferenceMiniBatch, SampleMiniBatch
from ludic.training.batching.preference import PreferencePair, group_preference_pairs, split_preference_pairs_by_token_budget
from ludic.training.batching.source import as_batch_source
from ludic.training.batching.tree_batches import PairTreeMiniBatch, SampleTreeMiniBatch
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.evaluators.held_out import PreferenceEvaluator
from ludic.training.evaluators.protocol import Evaluator
from ludic.training.loop.setup_checks import require_model
from ludic.training.loss.base import Loss, adapted_loss, loss_name
from ludic.training.rm_config import RMTrainerConfig as RMTrainerConfig
from ludic.training.trainer import Trainer
from ludic.training.types import BatchSource, SAWItem

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)


class RMTrainer(Trainer):
    """Trains a reward model on preference pairs.

    >>> trainer = RMTrainer(
    ...     model=AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1),
    ...     algo=make_bradley_terry(label_smoothing=0.05),
    ...     batch_source=preference_batches(train_items, batch_size=16),
    ...     cfg=RMTrainerConfig(lr=5e-6, eval_every_n_steps=100, early_stopping_patience=5),
    ...     eval_items=test_items,
    ... )
    >>> trainer.train_sync(1000)
    >>> trainer.evaluate()["eval_pairwise_accuracy"]
    """

    cfg: RMTrainerConfig

    def __init__(
        self,
        *,
        model: nn.Module | None,
        algo: RLAlgorithm,
        batch_source: BatchSource,
        cfg: RMTrainerConfig | None = None,
        evaluator: Evaluator | None = None,
        eval_items: Sequence[SAWItem] | None = None,
        lora_config: LoraSettings | LoraConfig | None = None,
        backend: TrainingBackend | None = None,
        **options: Any,
    ) -> None:
        """`eval_items`: the pairs for `evaluate` and `eval_every_n_steps`. `lora_config`
        (`LoraSettings`, or peft's) adds adapters to the model (`apply_lora`); the reward head is
        trained too. `options`: other arguments of `Trainer`."""
        cfg = RMTrainerConfig() if cfg is None else cfg
        if not isinstance(cfg, RMTrainerConfig):
            raise ConfigTypeError(f"RMTrainer needs an RMTrainerConfig, not a {type(cfg).__name__}")
        if evaluator is not None and eval_items is not None:
            raise ConfigError("evaluator and eval_items both say what to evaluate; give one of them")
        loss = adapted_loss(algo)
        if not cfg.rm_pair_aware and loss.normalizer == "pairs":
            raise ConfigError(f"{loss_name(loss)} compares the samples of a pair; leave rm_pair_aware on, or use another loss")
        _check_source(batch_source, cfg)
        if model is not None:
            _check_model(model, loss, cfg)
        if lora_config is not None:
            model = apply_lora(require_model(model), lora_config)
        self._padding_was_seen = False
        self.eval_metrics = _metrics(loss, cfg)
        """Has the scores that `update_eval_metrics` adds."""
        if eval_items is not None:
            evaluator = self._make_evaluator(backend or require_model(model), loss, cfg, eval_items)
        super().__init__(
            model=model, algo=algo, batch_source=batch_source, cfg=cfg, evaluator=evaluator, backend=backend, **options
        )

    def initialize_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the config; with `use_differential_lr` or
        `head_only_weight_decay` the head has its own parameter group."""
        return build_optimizer(
            self.model,
            self.cfg,
            backbone_lr_mult=self.cfg.backbone_lr_mult if self.cfg.use_differential_lr else None,
            head_only_weight_decay=self.cfg.head_only_weight_decay,
        )

    def _ingest(self, items: Sequence[SAWItem]) -> MacroBatch:
        if not self.cfg.rm_pair_aware:
            return MacroBatch.ingest(items, self.cfg.max_seq_len)
        macro = PreferenceMacroBatch.ingest_pairs(
            items,
            self.cfg.max_seq_len,
            require_complete=self.cfg.rm_require_complete_pairs,
            drop_incomplete=self.cfg.rm_drop_incomplete_pairs,
        )
        ends_as_padding = any(item.input_ids[-1] == self.cfg.pad_token_id for item in macro.items)
        if ends_as_padding and not self._padding_was_seen and self._model is not None and is_classifier(self._model):
            self._padding_was_seen = True
            logger.warning(
                "samples end with the padding token (%d), so the model reads their score one token earlier, and a server that reads the "
                "last token returns another score; pad with a token that no sample ends with, or end samples with another token",
                self.cfg.pad_token_id,
            )
        return macro

    def _group_pairs(self, items: Sequence[SAWItem]) -> list[PreferencePair]:
        """`group_preference_pairs` with the settings of the config."""
        return group_preference_pairs(
            items,
            require_complete=self.cfg.rm_require_complete_pairs,
            drop_incomplete=self.cfg.rm_drop_incomplete_pairs,
        )

    def _split_pairs_by_token_budget(
        self, pairs: Sequence[PreferencePair], micro_token_budget: int | None = None, max_seq_len: int | None = None
    ) -> list[list[SAWItem]]:
        """`split_preference_pairs_by_token_budget`, by default with the settings of the config."""
        return split_preference_pairs_by_token_budget(
            pairs,
            micro_token_budget=self.cfg.micro_token_budget if micro_token_budget is None else micro_token_budget,
            max_seq_len=self.cfg.max_seq_len if max_seq_len is None else max_seq_len,
        )

    def _make_mini_batch(self, macro: MacroBatch, rows: Rows) -> MiniBatch:
        trees, keys = with_defaults(self.backend).shares_prefixes, self.cfg.rm_meta_keys
        if isinstance(macro, PreferenceMacroBatch):
            return (PairTreeMiniBatch if trees else PreferenceMiniBatch)(macro, rows, self.cfg, meta_keys=keys)
        return (SampleTreeMiniBatch if trees else SampleMiniBatch)(macro, rows, self.cfg, meta_keys=keys)

    def evaluate(self, items: Sequence[SAWItem] | None = None) -> dict[str, float]:
        """Score the pairs of `items`, or of `eval_items`, one response at a time: `eval_loss`,
        `eval_pairwise_accuracy`, `eval_mean_margin`, `eval_margin_std`,
        `eval_negative_margin_rate`, `eval_roc_auc`, `eval_ece`, `eval_margin_p5` to
        `eval_margin_p95`, `eval_fpr@t`, `eval_fnr@t`, `eval_tpr@t`, `eval_num_pairs`, and the
        numbers of dropped pairs, such as `eval_pairs_incomplete`. `PreferenceEvaluator` and
        `PreferenceMetrics` define them.

        Calibration counts each pair in both orders. Without `items`, the scores remain available in
        `evaluator.metrics`.
        """
        evaluator = (
            self.evaluator if items is None else self._make_evaluator(self.backend, adapted_loss(self.algo), self.cfg, items)
        )
        if not isinstance(evaluator, PreferenceEvaluator):
            raise ConfigError("there are no pairs to evaluate; pass them, or eval_items= to RMTrainer")
        return {f"eval_{name}": value for name, value in evaluator.measure().items()}

    def update_eval_metrics(self, chosen_scores: Any, rejected_scores: Any, labels: Any = None) -> None:
        """Add scores that were computed elsewhere to `eval_metrics`."""
        self.eval_metrics.update(chosen_scores, rejected_scores, labels)

    def compute_eval_metrics(self) -> dict[str, float]:
        """Return the metrics of the collected scores, by the names of `PreferenceMetrics`, and
        discard the scores."""
        metrics = self.eval_metrics.compute()
        self.eval_metrics.reset()
        return metrics

    @staticmethod
    def _make_evaluator(
        model: nn.Module | ForwardPasses, loss: Loss, cfg: RMTrainerConfig, items: Sequence[SAWItem]
    ) -> PreferenceEvaluator:
        return PreferenceEvaluator(model, items, cfg, metrics=_metrics(loss, cfg), score_type=loss.score_type)


def _metrics(loss: Loss, cfg: RMTrainerConfig) -> PreferenceMetrics:
    return PreferenceMetrics(
        cfg.rm_calibration_bins,
        cfg.rm_eval_thresholds,
        loss.beta,
        thresholds_on="responses" if cfg.rm_log_per_response_metrics else "pairs",
        both_orders=True,
    )


def _check_source(source: BatchSource, cfg: RMTrainerConfig) -> None:
    """Raise ConfigError if the source has already dropped incomplete pairs that, by the config, the
    trainer should train on or report as an error."""
    dropped = as_batch_source(source).pairs_incomplete
    if not dropped or (cfg.rm_require_complete_pairs and cfg.rm_drop_incomplete_pairs):
        return
    argument = "drop_incomplete" if cfg.rm_require_complete_pairs else "require_complete"
    raise ConfigError(f"the source dropped {dropped} incomplete pairs, and rm_{argument}_pairs is off; pass it {argument}=False")


def _check_model(wrapped: nn.Module, loss: Loss, cfg: RMTrainerConfig) -> None:
    """Raise ConfigError if the model's config does not suit a reward model: a transformers
    classifier reads its score at the last token that is not padding."""
    model = unwrap_model(wrapped)
    if loss.score_type != "reward" or not is_classifier(model):
        return
    config: Any = model.config
    if config.num_labels != 1:
        raise ConfigError(f"the model has num_labels ({config.num_labels}); a reward model has 1, load it with num_labels=1")
    pad = getattr(config, "pad_token_id", None)
    if pad != cfg.pad_token_id:
        raise ConfigError(f"pad_token_id ({cfg.pad_token_id}) must be as in the model's config ({pad}); use the tokenizer's")
