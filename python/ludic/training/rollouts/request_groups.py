"""Request strategies: expand a list of requests into groups, or leave it unchanged."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ludic.errors import ConfigError
from ludic.training.types import RolloutRequest


class RequestStrategy(Protocol):
    """Expands requests."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests to play."""
        ...


@dataclass
class IdentityStrategy:
    """Leaves the requests unchanged."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests unchanged."""
        return list(requests)


@dataclass
class GRPORequestStrategy:
    """Expands every request to `group_size` requests for the same problem: the same environment
    seed, consecutive sampling seeds, the same `group_id`.

    Example, `group_size=3`: a request with `env_seed` 7 and `sampling_seed` 100 becomes three with
    `env_seed` 7 and `sampling_seed` 100, 101, 102.

    Seeds that are None in a request, and the group's id, are drawn from Python's global random
    generator, whose state checkpoints save.
    """

    group_size: int

    def __post_init__(self) -> None:
        if self.group_size <= 0:
            raise ConfigError(f"group_size must be positive, got {self.group_size}")

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the members of each request's group, group after group."""
        return [member for request in requests for member in self._group(request)]

    def _group(self, request: RolloutRequest) -> list[RolloutRequest]:
        env_seed = random.getrandbits(32) if request.env_seed is None else request.env_seed
        sampling_seed = random.getrandbits(32) if request.sampling_seed is None else request.sampling_seed
        group_id = str(uuid.UUID(int=random.getrandbits(128), version=4))
        return [
            replace(
                request,
                env_seed=env_seed,
                sampling_seed=sampling_seed + member,
                num_episodes=1,
                meta={**request.meta, "group_id": group_id},
            )
            for member in range(self.group_size)
        ]
