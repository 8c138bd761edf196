"""Selects the weights of a reward model that are published. The sender selects them, because a
receiver that skipped a tensor that is sent would wait forever, and so would the sender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ludic.errors import ConfigError
from ludic.inference.reward_types import RewardModelTrainingMode
from ludic.models.names import HEAD_NAMES, MERGED_PART, REPLACED_PART, is_adapter, strip_peft_parts

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
            f"training_mode={mode.value} changes none of the {len(params)} weights; the names of head weights contain "
            f"{' or '.join(HEAD_PARTS)}"
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
