"""What is asked of a reward model, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ludic.errors import ConfigError, DataTypeError

ScoringInput = str | tuple[int, ...]
"""A text, or its token ids."""


class PoolingType(StrEnum):
    """Which of a sequence's hidden states its score is read from."""

    LAST = "last"
    """That of the last token: decoders."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLS = "cls"
    """That of the first token: encoders."""
    STEP = "step"
    """One score a step of reasoning. Reserved: nothing here computes it yet."""


class RewardModelTrainingMode(StrEnum):
    """Which of a reward model's weights were trained, and so have to be published."""

    HEAD_ONLY = "head_only"
    LORA = "lora"
    FULL = "full"


@dataclass(frozen=True)
class ScoringRequest:
    """Sequences to score. Example: `ScoringRequest.from_list("rm", ["2+2=4", [53, 46, 53, 64,
    55, 2]])`."""

    model: str
    """Name at the server; `default`: the one that it serves."""
    inputs: tuple[ScoringInput, ...]
    pooling_type: PoolingType = PoolingType.LAST
    normalize: bool = True
    """The logistic function of the score, in (0, 1), or the softmax of several; without, the
    score as the model gives it."""
    n_labels: int = 1
    """Numbers that the model gives a sequence."""

    def __post_init__(self) -> None:
        if self.n_labels < 1:
            raise ConfigError(f"n_labels ({self.n_labels}) must be >= 1")
        object.__setattr__(self, "inputs", tuple(scoring_input(given) for given in self.inputs))
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
            inputs=tuple(scoring_input(given) for given in inputs),
            pooling_type=pooling_type,
            normalize=normalize,
            n_labels=n_labels,
        )


@dataclass
class ScoringResponse:
    """The scores, in the order of the inputs."""

    scores: list[Any]
    """[N] float, or [N][L] where the model gives several labels."""
    model: str
    usage: dict[str, int] = field(default_factory=dict)
    """`prompt_tokens` and the like."""
    metadata: dict[str, Any] = field(default_factory=dict)


def scoring_input(given: str | Sequence[int]) -> ScoringInput:
    """A text as it is, ids as a tuple. Raises DataTypeError for anything else."""
    if isinstance(given, str):
        return given
    ids = tuple(given)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise DataTypeError(
            f"an input to score must be text or a list of token ids, got a {type(given).__name__} of other things"
        )
    return ids
