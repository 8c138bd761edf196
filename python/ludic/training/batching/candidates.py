"""Candidates: the ids that each action token was sampled among, if top-p, top-k or min-p left some
out (`SampleAttachments.candidates`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import DataError
from ludic.training.loss.actions import collate_actions
from ludic.training.loss.batch import CANDIDATES
from ludic.training.types import SAWItem
from ludic.types import stored


def check_candidates(items: Sequence[SAWItem]) -> bool:
    """Whether a sample has candidates. Raises DataError for another number of them than action
    tokens, and for a token that is not among its own."""
    found = False
    for row, item in enumerate(items):
        candidates = item.attachments.candidates
        if candidates is None:
            continue
        found, actions = True, np.asarray(stored(item, "input_ids"))[np.asarray(stored(item, "action_mask")) != 0]
        counts = np.array([len(each) for each in candidates], dtype=np.int64)
        if len(counts) != len(actions):
            raise DataError(
                f"sample {row} has candidates of {len(counts)} tokens for {len(actions)} action tokens; give them of each"
            )
        flat = np.concatenate([np.zeros(0, dtype=np.int64), *candidates])
        owners = np.repeat(np.arange(len(counts)), counts)
        if (np.bincount(owners[flat == actions[owners]], minlength=len(counts)) != (counts > 0)).any() or (flat < 0).any():
            raise DataError(f"candidates of sample {row} must be token ids, each once and with the sampled token")
    return found


def collate_candidates(items: Sequence[SAWItem], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`candidates` of the samples of a batch, as losses read them (`loss.batch`); {} if none has
    any. Example: [[4, 7], []] of two tokens are [[5, 8], [0, 0]]."""
    rows: list[Tensor | None] = []
    for item in items:
        candidates = item.attachments.candidates
        if candidates is None:
            rows.append(None)
            continue
        own = candidates[int(stored(item, "action_mask")[0] == 1) :]  # the first token of a row has no prediction
        padded = np.zeros((len(own), max([1, *map(len, own)])), dtype=np.int64)
        for row, ids in zip(padded, own, strict=True):
            row[: len(ids)] = np.asarray(ids, dtype=np.int64) + 1
        rows.append(torch.from_numpy(padded))
    return {CANDIDATES: collate_actions(rows, batch)} if any(row is not None for row in rows) else {}


def pack_candidates(candidates: Sequence[Any] | None) -> list[bytes] | None:
    """int32 ids of each token."""
    return None if candidates is None else [np.asarray(each, dtype="<i4").tobytes() for each in candidates]


def unpack_candidates(packed: list[bytes] | None) -> list[NDArray[np.int32]] | None:
    return None if packed is None else [np.frombuffer(each, dtype="<i4") for each in packed]
