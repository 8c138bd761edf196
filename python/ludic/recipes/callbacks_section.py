"""The settings of callbacks: what a run does after steps, evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class StopSection:
    """Ends a run by a metric, with the weights of its last step. `trainer.early_stopping_patience`
    ends it with those of its best evaluation."""

    metric: Optional[str] = None  # noqa: UP045  OmegaConf reads these annotations at run time
    """A metric of evaluations, such as sampled_reward, or of steps, such as train/loss. Null:
    off."""
    at: Optional[float] = None  # noqa: UP045
    """The run ends when the metric is as good as this."""
    patience: Optional[int] = None  # noqa: UP045
    """It ends after so many values in a row that are not better than the best."""
    min_delta: float = 0.0
    """A value that is better by no more than this is no improvement."""
    mode: str = "auto"
    """min or max: which is better; auto: as the metric's name says."""


@dataclass
class CallbacksSection:
    """What a run does after steps, evaluations and checkpoints. The warm-up has no callbacks."""

    keep_best: Optional[str] = None  # noqa: UP045
    """A metric of evaluations, such as sampled_reward: the checkpoint of the best evaluation is not
    deleted, and `best.json` beside the checkpoints names it. Null: only the newest are kept."""
    keep_best_mode: str = "auto"
    """min or max: which is better; auto: as the metric's name says."""
    stop: StopSection = field(default_factory=StopSection)
    push_to_hub: Optional[str] = None  # noqa: UP045
    """Repository of the Hugging Face hub, as owner/name, that gets each checkpoint without the
    state of the run. `hf auth login` or HF_TOKEN logs in. Null: nothing is pushed."""
    private: bool = True
    """Whether a repository that is made is private."""
    own: Any = None
    """Your own, as `package.module:name`, or a list of these: each is a `Callback`, or a class or
    function that makes one without arguments."""


@dataclass
class RLCallbacksSection(CallbacksSection):
    """The callbacks of reinforcement, which can show sampled completions too."""

    completions_every: int = 0
    """A table of sampled completions with their rewards is printed every so many steps; 0: never.
    rollouts.jsonl has them in any case."""
    completions: int = 5
    """Rows of that table, from the best reward to the worst."""
