"""What a callback gets, and what it may ask of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.training.loop.state import TrainerState
from ludic.training.types import SAWBatch


@dataclass(frozen=True, eq=False)
class TrainingEvent:
    """A step, an evaluation, a checkpoint, or the end of `Trainer.train`."""

    step: int
    """Number of steps taken."""
    trainer: TrainerState
    """The trainer. Do not train, publish or save with it here: the other ranks do not."""
    stop: Callable[[str], None]
    """Ends the run after this step, for the reason given: a sentence. A checkpoint is saved. The
    first callback that asks decides. Raises ConfigError at the end."""
    save_checkpoint: Callable[[], None]
    """Has a checkpoint of this step saved after all callbacks were called. Raises ConfigError
    without a checkpointer, and at the end."""
    stats: Mapping[str, float]
    """Of a step, what was logged of it, with prefixed keys such as `train/loss`; only `train/step`
    if it is not logged (`log_every`). Of an evaluation, its metrics: `eval/loss`. Else empty."""
    batch: SAWBatch | None = None
    """Of a step, the batch of this rank."""
    checkpoint: Path | None = None
    """Of a checkpoint, its folder."""
    reason: str = ""
    """Of the end, why: a sentence."""
    is_interrupted: bool = False
    """Of the end, whether an error or a request to stop, such as Ctrl-C, is its cause. The process
    may be killed soon: wait for nothing."""


class Callback:
    """Base class. A subclass overrides what it needs; each method may be a coroutine function.

    With several ranks, rank 0 alone calls it, and what it asks for holds for all of them. A
    callback that raises is logged with its traceback, and the run goes on. Random generators keep
    their state, so that a callback does not change the samples; tasks that it starts may.

    >>> class Alarm(Callback):
    ...     def on_step(self, event):
    ...         if event.stats.get("train/kl_actor_policy", 0.0) > 0.5:
    ...             event.stop("the policy is far from the sampler")
    """

    needs_checkpoints = False
    """Whether a trainer without a checkpointer is refused."""
    needs_full_checkpoints = False
    """Whether one whose checkpoints have the layout `shallow` is refused too."""

    @property
    def watched_metric(self) -> str | None:
        """The metric of evaluations without which it does nothing, so that a run without it is
        refused. None if it needs none."""
        return None

    @property
    def name(self) -> str:
        """Under which a checkpoint has its state. Two callbacks of a trainer have two names."""
        return type(self).__name__

    @property
    def kept_steps(self) -> Collection[int]:
        """Steps whose checkpoints must not be deleted. They do not count as `max_to_keep`."""
        return ()

    def on_step(self, event: TrainingEvent) -> Any:
        """Called after each training step, before its checkpoint."""

    def on_evaluation(self, event: TrainingEvent) -> Any:
        """Called after each evaluation of the training loop."""

    def on_checkpoint(self, event: TrainingEvent) -> Any:
        """Called after each checkpoint that the training loop saved."""

    def on_end(self, event: TrainingEvent) -> Any:
        """Called when `Trainer.train` returns or fails. If there is a checkpointer, a checkpoint of
        the last step is saved before, unless an error ended the run."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next calls depend on, as JSON. It is saved in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
