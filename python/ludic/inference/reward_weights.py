"""Which of a reward model's weights are published, chosen on the side that sends: a receiver
that left out what is being sent would wait for ever, and so would the sender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ludic.errors import ConfigError
from ludic.inference.reward_types import RewardModelTrainingMode
from ludic.models.names import HEAD_NAMES, MERGED_PART, REPLACED_PART, is_adapter, unwrapped_name

HEAD_PARTS = tuple(f"{name}." for name in HEAD_NAMES)
"""In the names of a head."""
BESIDE_HEAD = ("head.", "pooler.")
"""How the names begin of what stands between the backbone and the classifier: of ModernBERT, of
DeBERTa-v2."""
T = TypeVar("T")


def select_trained_weights(params: Mapping[str, T], training_mode: RewardModelTrainingMode | str) -> dict[str, T]:
    """The weights that this kind of training changes, by the names of the model without adapters.

    `head_only`: the head. `full`: everything but adapters, which are merged already. `lora`: the
    head and what adapters are merged into; where the names show no such thing, the head and the
    adapters; where they show no adapters either, everything. Weights chosen once are chosen again.
    Raises ConfigError where none is left, which would leave the server as it was without a word.
    """
    mode = RewardModelTrainingMode(training_mode)
    chosen = {unwrapped_name(name): weight for name, weight in params.items() if _is_sent(name, mode, params)}
    if not chosen:
        raise ConfigError(
            f"none of the {len(params)} weights is one that training_mode={mode.value} changes; the name of a head has "
            f"{' or '.join(HEAD_PARTS)} in it"
        )
    return chosen


def _is_sent(name: str, mode: RewardModelTrainingMode, params: Mapping[str, object]) -> bool:
    if REPLACED_PART in name:
        return False
    is_head = (any(part in name for part in HEAD_PARTS) or unwrapped_name(name).startswith(BESIDE_HEAD)) and not is_adapter(name)
    if mode is RewardModelTrainingMode.HEAD_ONLY:
        return is_head
    if mode is RewardModelTrainingMode.FULL:
        return not is_adapter(name)
    if any(MERGED_PART in other for other in params):
        return (is_head or MERGED_PART in name) and not is_adapter(name)
    return is_head or is_adapter(name) or not any(map(is_adapter, params))
