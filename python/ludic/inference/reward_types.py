"""Requests to a reward model, and its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ludic.errors import ConfigError, DataTypeError

ScoringInput = str | tuple[int, ...]
"""A text, or its token ids."""


class PoolingType(StrEnum):
    """The hidden state of a sequence from which its score is computed."""

    LAST = "last"
    """Of the last token: decoders."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLS = "cls"
    """Of the first token: encoders."""
    STEP = "step"
    """One score for each step of reasoning. Reserved: nothing computes it yet."""


class RewardModelTrainingMode(StrEnum):
    """Which weights of a reward model are trained and published."""

    HEAD_ONLY = "head_only"
    LORA = "lora"
    FULL = "full"


@dataclass(frozen=True)
class ScoringRequest:
    """Sequences to score. Example: `ScoringRequest.from_list("rm", ["2+2=4", [53, 46, 53, 64,
    55, 2]])`."""

    model: str
    """The model's name at the server. `default` is the model that it serves."""
    inputs: tuple[ScoringInput, ...]
    pooling_type: PoolingType = PoolingType.LAST
    normalize: bool = True
    """Whether to apply the logistic function to a single score, which is then in (0, 1), or the
    softmax to several. Otherwise scores are the model's logits."""
    n_labels: int = 1
    """The number of logits that the model returns for a sequence."""

    def __post_init__(self) -> None:
        if self.n_labels < 1:
            raise ConfigError(f"n_labels ({self.n_labels}) must be >= 1")
        object.__setattr__(self, "inputs", tuple(map(as_scoring_input, self.inputs)))
        object.__setattr__(self, "pooling_type", PoolingType(self.pooling_type))

    @classmethod
    def from_list(
        cls,
        model: str,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling_type: PoolingType = PoolingType.LAST,
        normalize: bool = True,
        n_labels: int = 1,
    ) -> ScoringRequest:
        return cls(
            model=model,
            inputs=tuple(map(as_scoring_input, inputs)),
            pooling_type=pooling_type,
            normalize=normalize,
            n_labels=n_labels,
        )


@dataclass
class ScoringResponse:
    """The scores, in the order of the inputs."""

    scores: list[Any]
    """[N] floats, or lists [N, L] if the model has several labels."""
    model: str
    usage: dict[str, int] = field(default_factory=dict)
    """`prompt_tokens` and the like."""
    metadata: dict[str, Any] = field(default_factory=dict)


def as_scoring_input(value: str | Sequence[int]) -> ScoringInput:
    """A text unchanged, token ids as a tuple. Raises DataTypeError for anything else."""
    if isinstance(value, str):
        return value
    ids = tuple(value)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise DataTypeError(
            f"an input to score must be text or a list of token ids, got a {type(value).__name__} with other elements"
        )
    return ids


def check_one_label(n_labels: int) -> None:
    """Raise ConfigError unless a model returns one number for a sequence, as a reward must be."""
    if n_labels != 1:
        raise ConfigError(f"n_labels ({n_labels}) must be 1, because a reward is one number; use `score` for several")
