"""`RMTrainerConfig`: every setting of the reward-model trainer, checked when it is built."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ludic.errors import BudgetError, ConfigError
from ludic.training.config import TrainerConfig, config_dataclass
from ludic.training.samples.pair_facts import PREFERENCE_KEYS


@config_dataclass
class RMTrainerConfig(TrainerConfig):
    """Settings of `RMTrainer`.

    >>> cfg = RMTrainerConfig(lr=5e-6, max_seq_len=1024, pad_token_id=model.config.pad_token_id)
    """

    rm_pair_aware: bool = True
    """The two samples of a pair go through the model together, and two rows of `max_seq_len`
    must fit into `micro_token_budget`. Off: each sample stands alone, for a loss that does not
    compare."""
    rm_require_complete_pairs: bool = True
    """Off: a sample without its partner is trained too, for losses that can use it. An
    evaluation drops it."""
    rm_drop_incomplete_pairs: bool = True
    """Incomplete pairs are dropped, counted and warned of, in training and in evaluation. Off:
    they are an error."""
    rm_calibration_bins: int = 10
    rm_eval_thresholds: Sequence[float] | None = (0.5,)
    """Where the evaluation computes FPR and FNR; None: nowhere."""
    rm_log_per_response_metrics: bool = True
    """Thresholds classify the scores of single responses, chosen against rejected. Off: the
    probability of each pair, against its label."""
    rm_meta_keys: Sequence[str] = PREFERENCE_KEYS
    """Keys of the samples' metadata that the loss is given."""
    use_differential_lr: bool = False
    """The head learns at `lr`, everything else at `backbone_lr_mult` times that."""
    backbone_lr_mult: float = 0.1
    head_only_weight_decay: bool = False
    """`weight_decay` holds for the head alone."""

    def validate(self) -> None:
        """Raise `ConfigError` where a value or a combination is wrong."""
        super().validate()
        if self.rm_pair_aware and self.micro_token_budget < 2 * self.max_seq_len:
            raise BudgetError(
                f"micro_token_budget ({self.micro_token_budget}) must be >= 2 * max_seq_len ({self.max_seq_len}): a pair is two rows; "
                "raise the budget or lower max_seq_len"
            )
        if self.packing == "padding_free":
            raise ConfigError(
                "packing=padding_free gives a reward model one score for all samples of a row; use optimal or greedy"
            )
        missing = [key for key in PREFERENCE_KEYS if key not in self.rm_meta_keys]
        if self.rm_pair_aware and missing:
            raise ConfigError(f"rm_meta_keys {tuple(self.rm_meta_keys)} must have {', '.join(missing)}; pairs are found by them")
        if self.rm_calibration_bins < 1:
            raise ConfigError(f"rm_calibration_bins ({self.rm_calibration_bins}) must be >= 1")
        if not (math.isfinite(self.backbone_lr_mult) and self.backbone_lr_mult >= 0):
            raise ConfigError(f"backbone_lr_mult ({self.backbone_lr_mult}) must be a finite number >= 0; 1.0 is the head's rate")
