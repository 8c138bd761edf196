"""`RMTrainerConfig` and `DPOTrainerConfig`: all settings of the trainers of pairs, checked in the
constructor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ludic.errors import BudgetError, ConfigError, check_value
from ludic.training.config import TrainerConfig, config_dataclass
from ludic.training.samples.preference import PREFERENCE_KEYS


@config_dataclass
class RMTrainerConfig(TrainerConfig):
    """Settings of `RMTrainer`.

    >>> cfg = RMTrainerConfig(lr=5e-6, max_seq_len=1024, pad_token_id=model.config.pad_token_id)
    """

    rm_pair_aware: bool = True
    """The two samples of a pair are in the same micro-batch; two rows of `max_seq_len` must fit
    into `micro_token_budget`. False: samples are independent, for a loss that does not compare
    them."""
    rm_require_complete_pairs: bool = True
    """False: train also on samples without a partner, for losses that can use them. An evaluation
    drops them."""
    rm_drop_incomplete_pairs: bool = True
    """Drop incomplete pairs, in training and in evaluation, with a count and a warning. False: they
    are an error."""
    rm_calibration_bins: int = 10
    """Number of bins of the calibration error in evaluations."""
    rm_eval_thresholds: Sequence[float] | None = (0.5,)
    """Thresholds at which the evaluation computes FPR and FNR. None means no thresholds."""
    rm_log_per_response_metrics: bool = True
    """Thresholds classify the scores of single responses as chosen or rejected. False: they
    classify the probability of each pair, compared with its label."""
    rm_meta_keys: Sequence[str] = PREFERENCE_KEYS
    """Keys of the samples' metadata that the loss reads."""
    use_differential_lr: bool = False
    """Train the head at `lr` and all other parameters at `backbone_lr_mult * lr`."""
    backbone_lr_mult: float = 0.1
    """Factor of the learning rate for all parameters but the head; see `use_differential_lr`."""
    head_only_weight_decay: bool = False
    """Apply `weight_decay` only to the head."""

    def validate(self) -> None:
        """Raise `ConfigError` for an invalid value or combination."""
        super().validate()
        if self.rm_pair_aware:
            check_pair_budget(self)
        if self.packing == "padding_free":
            raise ConfigError("packing=padding_free gives a reward model one score for all samples; use optimal or greedy")
        missing = [key for key in PREFERENCE_KEYS if key not in self.rm_meta_keys]
        if self.rm_pair_aware and missing:
            raise ConfigError(f"rm_meta_keys {tuple(self.rm_meta_keys)} must have {', '.join(missing)}; pairs are found by them")
        check_value("rm_calibration_bins", self.rm_calibration_bins, least=1)
        check_value("backbone_lr_mult", self.backbone_lr_mult, "1.0 is the head's rate", least=0, below=math.inf)


@config_dataclass
class DPOTrainerConfig(TrainerConfig):
    """Settings of `DPOTrainer`: `TrainerConfig`, with a budget that has room for a pair.

    >>> cfg = DPOTrainerConfig(lr=1e-6, max_seq_len=1024, micro_token_budget=8192)
    """

    def validate(self) -> None:
        """Raise `ConfigError` for an invalid value or combination."""
        super().validate()
        check_pair_budget(self)
        if self.packing == "padding_free":
            raise ConfigError("packing=padding_free has no rows of pairs, and DPO compares two; use optimal or greedy")


def check_pair_budget(cfg: TrainerConfig) -> None:
    """Raise `BudgetError` unless two rows of `max_seq_len` tokens fit into the budget."""
    if cfg.micro_token_budget < 2 * cfg.max_seq_len:
        raise BudgetError(f"micro_token_budget ({cfg.micro_token_budget}) must be >= 2 * max_seq_len ({cfg.max_seq_len})")
