"""Metrics under other libraries' names, in addition to ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ludic.training.loggers.base import SyncedLogger, TrainingLogger

_BUCKETS = ("0-32", "33-64", "65-128", "129-256", "257+")
"""Ranges of tokens of `reference/kl_bucket`."""
DOCUMENT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "train/beta": "train/kl_coeff",
        "reference/kl": "train/kl",
        "train/frac_zero_signal": "train/frac_reward_zero_std",
        "train/lr": "train/learning_rate",
        "train/avg_sampled_reward": "train/reward",
        "train/avg_completion_length": "train/completions/mean_length_sampled",
        "train/min_completion_length": "train/completions/min_length_sampled",
        "train/max_completion_length": "train/completions/max_length_sampled",
        "train/completion_truncated_rate": "train/completions/clipped_frac",
        "train/clip_frac": "train/clip_ratio",
        "train/seed/seeded_frac": "train/seed/seed_aug_frac",
        "train/seed/pred_acc": "train/seed/seed_pred_acc",
        "train/seed/diversity_l2": "train/seed/seed_diversity_l2",
        "train/seed/plain_entropy": "train/seed/entropy/orig",
        "train/seed/seeded_entropy": "train/seed/entropy/seed_aug",
        "eval_seed/pass_at_n": "eval_seed/pass_at_1",
        "eval/sampled_reward": "eval/mean_reward",
        "train/policy/loss": "train/loss/policy",
        "train/clip/loss": "train/loss/clip",
        "train/reference_kl/loss": "train/loss/weighted_kl",
        "train/seed/loss": "train/loss/seed",
        "reference/sequence_kl": "train/loss/kl",
        **{f"reference/kl_bucket/{tokens}": f"train/kl_per_token_bucket/{tokens}" for tokens in _BUCKETS},
    }
)
"""Our names of metrics -> names of MaxEnt-GRPO's training guide, where they differ."""


class AliasLogger:
    """Logs some metrics under a second name too. A metric that a step does not have has no alias
    in it either, and a name that the step has already is never replaced."""

    def __init__(self, inner: TrainingLogger, aliases: Mapping[str, str] = DOCUMENT_NAMES) -> None:
        """`aliases`: our name -> the other one."""
        self._inner, self._aliases = inner, dict(aliases)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        also = {other: stats[name] for name, other in self._aliases.items() if name in stats and other not in stats}
        self._inner.log(step, {**stats, **also})

    def sync(self) -> None:
        if isinstance(self._inner, SyncedLogger):
            self._inner.sync()
