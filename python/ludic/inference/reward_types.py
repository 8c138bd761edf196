"""Requests to a reward model, its responses, and the weights of it that are published.

The sender selects these weights, because a receiver that skipped a tensor that is sent would wait
forever, and so would the sender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from ludic.errors import ConfigError, DataTypeError, check_value
from ludic.models.names import HEAD_NAMES, MERGED_PART, REPLACED_PART, is_adapter, strip_peft_parts
from ludic.types import ImageSpan

ScoringInput = str | tuple[int, ...]
"""A text, or its token ids."""


@dataclass(frozen=True)
class ImageTokens:
    """Token ids with images, for a client with `reads_images`."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]

    def __len__(self) -> int:
        return len(self.ids)


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
        check_value("n_labels", self.n_labels, least=1)
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
        return cls(model, tuple(map(as_scoring_input, inputs)), pooling_type, normalize, n_labels)


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
        raise DataTypeError(f"an input must be text or a list of token ids, got a {type(value).__name__} with other elements")
    return ids


def check_one_label(n_labels: int) -> None:
    """Raise ConfigError unless a model returns one number for a sequence, as a reward must be."""
    if n_labels != 1:
        raise ConfigError(f"n_labels ({n_labels}) must be 1, because a reward is one number; use `score` for several")


HEAD_PARTS = tuple(f"{name}." for name in HEAD_NAMES)
"""Parts that occur in the names of head weights."""
BESIDE_HEAD = ("head.", "pooler.")
"""Prefixes of the names of layers between the backbone and the classifier, in ModernBERT and
DeBERTa-v2."""
T = TypeVar("T")


def select_trained_weights(params: Mapping[str, T], training_mode: RewardModelTrainingMode | str) -> dict[str, T]:
    """The weights that this training mode changes, under their names in the model without adapters.

    - `head_only`: the head.
    - `full`: everything except adapters, which are already merged.
    - `lora`: the head and the weights that adapters are merged into. If there are no such weights,
      the head and the adapters; if there are no adapters either, everything.

    Selecting from a selection changes nothing. Raises ConfigError if no weight is selected, because
    the push would silently change nothing.
    """
    mode = RewardModelTrainingMode(training_mode)
    selected = {strip_peft_parts(name): weight for name, weight in params.items() if _is_sent(name, mode, params)}
    if not selected:
        raise ConfigError(
            f"training_mode={mode.value} changes none of the {len(params)} weights; heads have {' or '.join(HEAD_PARTS)} in their names"
        )
    return selected


def _is_sent(name: str, mode: RewardModelTrainingMode, params: Mapping[str, object]) -> bool:
    if REPLACED_PART in name:
        return False
    is_head = (any(part in name for part in HEAD_PARTS) or strip_peft_parts(name).startswith(BESIDE_HEAD)) and not is_adapter(
        name
    )
    if mode is RewardModelTrainingMode.HEAD_ONLY:
        return is_head
    if mode is RewardModelTrainingMode.FULL:
        return not is_adapter(name)
    if any(MERGED_PART in other for other in params):
        return (is_head or MERGED_PART in name) and not is_adapter(name)
    return is_head or is_adapter(name) or not any(map(is_adapter, params))
