"""Requests with seeds: groups of plain and of seeded completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, check_value
from ludic.images.content import is_content
from ludic.interaction.single_agent import await_results
from ludic.training.info_seed.seed_tags import SEED_ID, InfoSeed, check_template, tag_prompt
from ludic.training.rollouts.requests import GRPORequestStrategy
from ludic.training.types import RolloutRequest
from ludic.types import Info, StepOutcome


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
        check_value("group_size", self.group_size, "seeded completions need the prompt of a plain one", least=1)

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


class SeedTaggedEnv(LudicEnv[str, str, str]):
    """Plays `inner`, with the seed in the first observation and, if the info has `messages`, in the
    last message of the user. Nothing else changes.

    For environments of one turn: after another turn the conversation would still have the tag, so
    `step` raises ConfigError for an outcome that does not end the episode.
    """

    def __init__(self, inner: LudicEnv[str, str, str], seed_id: int, template: str) -> None:
        check_template(template)
        if len(inner.agent_ids) != 1:
            raise ConfigError(f"InfoSeed needs an environment with one agent; {type(inner).__name__} has {len(inner.agent_ids)}")
        self.inner, self.seed_id, self.template = inner, seed_id, template

    @property
    def agent_ids(self) -> list[str]:
        return self.inner.agent_ids

    @property
    def active_agents(self) -> list[str]:
        return self.inner.active_agents

    @property
    def suggested_sysprompt(self) -> str | None:
        return self.inner.suggested_sysprompt

    async def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:  # type: ignore[override]  # protocols await it
        started = await await_results(self.inner.reset(seed=seed))
        return {
            agent: (tag_prompt(observation, self.seed_id, self.template), self._tag_messages(info))
            for agent, (observation, info) in started.items()
        }

    async def step(self, actions: dict[str, str]) -> dict[str, StepOutcome]:  # type: ignore[override]
        outcomes: dict[str, StepOutcome] = await await_results(self.inner.step(actions))
        if not all(outcome.terminated or outcome.truncated for outcome in outcomes.values()):
            raise ConfigError(f"InfoSeed needs environments of one turn; {type(self.inner).__name__} goes on after the first")
        return outcomes

    def current_obs(self) -> dict[str, str]:
        return {agent: tag_prompt(obs, self.seed_id, self.template) for agent, obs in self.inner.current_obs().items()}

    def close(self) -> Any:
        """Close `inner`, if it can be closed."""
        close = getattr(self.inner, "close", None)
        return None if close is None else close()

    def _tag_messages(self, info: Info) -> Info:
        messages = info.get("messages")
        if not isinstance(messages, list):
            return info
        asked = [index for index, message in enumerate(messages) if message.get("role") == "user"]
        if not asked or not is_content(messages[asked[-1]].get("content")):
            raise ConfigError("InfoSeed tags the text of the user's last message, and this prompt has none")
        changed = [dict(message) for message in messages]
        changed[asked[-1]]["content"] = tag_prompt(changed[asked[-1]]["content"], self.seed_id, self.template)
        return {**info, "messages": changed}
