"""Action tokens that count in part: `SampleAttachments.action_fractions` in place of the ones of
the action mask.

    action_mask   0 1 0 1    action_fractions  0.5 1    in a micro-batch:  0 0.5 0 1

Sums over action tokens are then weighted, and a number of tokens is the sum of the fractions; all
losses read both from the mask. The core's table has the mask of zeros and ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import DataError
from ludic.list_fields import stored
from ludic.training.loss.context import SharedContext, collate_actions
from ludic.training.loss.logprobs import weigh_values
from ludic.training.types import SAWItem

Fractions = Mapping[int, Tensor]
"""Row -> [A] float32 fractions of the predicted action tokens. Empty if every token counts 1."""


def read_fractions(items: Sequence[SAWItem]) -> Fractions:
    """The fractions of all samples, ones for those that have none; empty if all of them are ones.
    Raises DataError for another number than a sample has action tokens, and for a number that is
    not > 0 in float32."""
    if all(item.attachments.action_fractions is None for item in items):
        return {}
    fractions = {row: _read(item, row) for row, item in enumerate(items)}
    return fractions if any(bool((values != 1).any()) for values in fractions.values()) else {}


def _read(item: SAWItem, row: int) -> Tensor:
    mask, given = np.asarray(stored(item, "action_mask")), item.attachments.action_fractions
    actions = int(np.count_nonzero(mask))
    values = np.ones(actions, np.float32) if given is None else narrow(given)
    if len(values) != actions:
        raise DataError(f"sample {row} has {len(values)} action_fractions for {actions} action tokens; there must be one each")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        raise DataError(
            f"action_fractions[{wrong[0]}] of sample {row} is {values[wrong[0]]} in float32; it must be a finite number > 0: a token "
            "that does not count has 0 in the action mask"
        )
    return torch.from_numpy(values[int(mask[:1].any()) :].copy())  # the first token of a sample has no prediction


def refuse_fractions(items: Iterable[SAWItem], because: str) -> None:
    """Raise DataError if tokens count in part."""
    if any(item.attachments.action_fractions is not None for item in items):
        raise DataError(f"{because}, in which tokens cannot count in part; leave out action_fractions, or use masks of 0 and 1")


def narrow(values: Any) -> NDArray[np.float32]:
    """`values` in float32; too large ones become inf, without a warning."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def count_tokens(fractions: Fractions, target_counts: NDArray[np.int32]) -> NDArray[Any]:
    """[N] predicted action tokens of each sample, in part where they count in part."""
    if not fractions:
        return target_counts
    return np.array([float(fractions[row].double().sum()) for row in range(len(target_counts))], dtype=np.float64)


def count_in_part(tensors: dict[str, Any], fractions: Fractions, rows: Iterable[int]) -> dict[str, Any]:
    """A micro-batch of the samples at `rows`, in any layout, with fractions in its action mask.
    `old_logp_action` then has weighted sums. Returns `tensors` as they are without fractions."""
    if not fractions:
        return tensors
    mask = collate_actions([fractions[int(row)] for row in rows], tensors)
    weighted = {**tensors, "action_mask": mask.to(tensors["action_mask"])}
    if "actor_logps" in tensors:
        shared = SharedContext(tensors["input_ids"], weighted)
        weighted["old_logp_action"] = weigh_values(shared.sampler_logp, shared.token_mask).sum(dim=1)
    return weighted
