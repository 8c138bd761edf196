"""Rollouts as lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ludic.types import Rollout

_ENCODER = msgspec.json.Encoder(enc_hook=str)


def append_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Append one line a rollout: `id`, `meta`, `steps` (token traces included), `total_reward`, `length`, `duration_ns`."""
    lines = b"".join(_ENCODER.encode(rollout_record(rollout)) + b"\n" for rollout in rollouts)
    with path.open("ab") as file:
        file.write(lines)


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """What is written of a rollout. Values that JSON has no form for are written as text."""
    return {
        "id": rollout.id,
        "meta": rollout.meta,
        "steps": rollout.steps,
        "total_reward": rollout.total_reward,
        "length": rollout.length,
        "duration_ns": rollout.duration_ns,
    }
