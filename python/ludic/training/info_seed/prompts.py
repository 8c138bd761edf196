"""Requests with seeds: groups of plain and of seeded completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError
from ludic.training.info_seed.settings import InfoSeed
from ludic.training.info_seed.tagged_env import SeedTaggedEnv
from ludic.training.info_seed.untagged import SEED_ID
from ludic.training.rollouts.request_groups import GRPORequestStrategy
from ludic.training.types import RolloutRequest


@dataclass
class SeedPrompts:
    """A request strategy: each request becomes `group_size` plain ones and one for each seed, all
    of one group. Credit therefore compares `group_size + num_seeds` completions.

    Example, `group_size=2` and two seeds: a request with `sampling_seed` 100 becomes plain ones
    with 100 and 101, and seeded ones with 102 (seed 1) and 103 (seed 2).

    A seeded request has `seed_id` in its meta and in the keywords of its environment, whose factory
    must be `seed_tagged`.
    """

    group_size: int
    """Plain completions of each prompt; at least one, whose prompt the seeded ones are trained
    on."""
    info_seed: InfoSeed

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size ({self.group_size}) must be >= 1: seeded completions need the prompt of a plain one")

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the members of each request's group, group after group, the seeded ones last."""
        size = self.group_size + self.info_seed.num_seeds
        members = GRPORequestStrategy(size).expand(requests)
        return [self._with_seed(member, index % size - self.group_size + 1) for index, member in enumerate(members)]

    def _with_seed(self, request: RolloutRequest, seed_id: int) -> RolloutRequest:
        if seed_id < 1:
            return request
        env = replace(request.env, kwargs={**request.env.kwargs, SEED_ID: seed_id})
        return replace(request, env=env, meta={**request.meta, SEED_ID: seed_id})


def seed_tagged(factory: Callable[..., LudicEnv[str, str, str]], info_seed: InfoSeed) -> Callable[..., LudicEnv[str, str, str]]:
    """A factory for the engine's registry: an environment of `factory`, which tags its prompt if
    the request has a seed."""

    def make(*, seed_id: int | None = None, **kwargs: Any) -> LudicEnv[str, str, str]:
        env = factory(**kwargs)
        return env if seed_id is None else SeedTaggedEnv(env, seed_id, info_seed.template)

    return make
