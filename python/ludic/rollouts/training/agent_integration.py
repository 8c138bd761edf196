"""Episodes of agents as samples.

Tokens are those that the server returned, with their log-probabilities; text is tokenized only for
dialogues that have no tokens, such as logs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.agents import Agent
from ludic.context.strategies import FullDialog
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, DataError
from ludic.event_loop import await_if_needed
from ludic.inference.client import ChatClient
from ludic.inference.request import InferenceSpec, ReturnSpec
from ludic.interaction.single_agent import SingleAgentProtocol
from ludic.parsers import Parser, ParseResult
from ludic.rollouts.training.datasets.dataset_loaders import make_sample
from ludic.rollouts.training.samples import sample_of_rollout
from ludic.rollouts.training.types import Sample
from ludic.types import Message, Rollout

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 31
"""Dialogues are not limited in length here."""


def read_verbatim(text: str) -> ParseResult:
    """The parser for environments that read the answer as it is."""
    return ParseResult(text, 0.0, None)


@dataclass(frozen=True)
class AgentEndpoint:
    """The model that acts, and how."""

    client: ChatClient
    """A client of `ludic.inference`."""
    model: str
    """The name under which the server has it."""
    inference: InferenceSpec = field(default_factory=lambda: InferenceSpec(return_=ReturnSpec.for_rl()))
    """Sampling settings. The default asks for tokens and log-probabilities."""
    parser: Parser = read_verbatim
    """From answer to action."""


async def agent_rollout_to_sample(
    prompt: Any,
    environment_cls: Callable[[Any], LudicEnv[str, str, str]],
    endpoint: AgentEndpoint,
    tokenizer: Any,
    max_turns: int = 10,
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """Play one episode in `environment_cls(prompt)` and return it as one sample, whose reward is
    the episode's. The `tokenizer` is used only if the server returns no tokens; a warning says so.

    Raises DataError if a turn does not go on with the tokens of the turns before.
    """
    env = environment_cls(prompt)
    agent = Agent(client=endpoint.client, model=endpoint.model, ctx=FullDialog(), parser=endpoint.parser)
    try:
        [rollout] = await SingleAgentProtocol(agent).run(env=env, max_steps=max_turns, inference=endpoint.inference)
    finally:
        close = getattr(env, "close", None)
        if close is not None:
            await await_if_needed(close())
    if all(step.trace is not None for step in rollout.steps):
        sample = sample_of_rollout(rollout)
    elif tokenizer is None:
        raise DataError(f"the server returned no tokens for rollout {rollout.id}; set ReturnSpec.for_rl(), or give a tokenizer")
    else:
        logger.warning("the server returned no tokens for rollout %s; its text is tokenized anew", rollout.id)
        messages: list[Message] = []
        for step in rollout.steps:
            messages += [{"role": "user", "content": step.prev_obs}, {"role": "assistant", "content": step.action}]
        sample = make_sample(messages, tokenizer, MOST_TOKENS, f"rollout {rollout.id}")
        sample.reward, sample.metadata = rollout.total_reward, dict(rollout.meta)
    sample.prompt = prompt
    sample.metadata |= dict(metadata or {})
    return sample


async def generate_agent_samples(
    prompts: Sequence[Any],
    environment_cls: Callable[[Any], LudicEnv[str, str, str]],
    endpoint: AgentEndpoint,
    tokenizer: Any,
    max_turns: int = 10,
    metadata_list: Sequence[Mapping[str, Any]] | None = None,
) -> list[Sample]:
    """One episode for each prompt, all at the same time, in the order of the prompts. If one fails,
    the others are cancelled and its error is raised; `AsyncRolloutManager` repeats it instead."""
    metadata = [{}] * len(prompts) if metadata_list is None else metadata_list
    if len(metadata) != len(prompts):
        raise ConfigError(f"metadata_list has {len(metadata)} entries for {len(prompts)} prompts; give one for each")
    episodes = [
        asyncio.ensure_future(agent_rollout_to_sample(prompt, environment_cls, endpoint, tokenizer, max_turns, facts))
        for prompt, facts in zip(prompts, metadata, strict=True)
    ]
    try:
        return await asyncio.gather(*episodes)
    except BaseException:
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        raise


generate_rollout_batch = generate_agent_samples
"""The documented name. `rollout_gen.generate_rollout_batch` is another function, of the manager."""


def trajectory_to_sample(trajectory: Any, tokenizer: Any, metadata: Mapping[str, Any] | None = None) -> Sample:
    """A dialogue as one sample. `trajectory`: a `Rollout`, whose tokens are used as they are; or a
    list of messages `{"role": ..., "content": ...}`, or an object that has it as `messages`, whose
    text is tokenized, with mask 1 on what the assistant says.

    Raises DataError for a dialogue that does not begin with a user's message, after any system
    prompt, or in which the assistant says nothing.
    """
    if isinstance(trajectory, Rollout):
        sample = sample_of_rollout(trajectory)
        sample.metadata |= dict(metadata or {})
        return sample
    messages = trajectory if isinstance(trajectory, list) else getattr(trajectory, "messages", None)
    if inspect.ismethod(messages) or not isinstance(messages, list):
        raise DataError(f"a {type(trajectory).__name__} is no trajectory; give a Rollout, messages, or an object with messages")
    roles = [message.get("role") for message in messages if message.get("role") not in ("system", "developer")]
    if roles[:1] != ["user"]:
        raise DataError(f"the trajectory begins with {roles[0] if roles else 'nothing'}; it must begin with a user message")
    sample = make_sample(messages, tokenizer, MOST_TOKENS, "the trajectory")
    sample.metadata = dict(metadata or {})
    return sample
