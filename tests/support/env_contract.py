"""The contract that every environment must satisfy: test cases, and functions that play an
environment without a protocol."""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ludic.envs import LudicEnv
from ludic.types import StepOutcome

SEED = 5


@dataclass(frozen=True)
class Case:
    """An environment and the actions of one episode."""

    name: str
    make: Callable[[], LudicEnv]
    moves: Sequence[str]
    """After `reset(seed=SEED)`, the last of these actions ends the episode, and no earlier one
    does."""
    ends: Literal["terminated", "truncated"] = "terminated"
    garbage: Sequence[str] = ("", "?", "\x00", "no such thing", "[99]", "１", "9" * 5000, "\ud800", "<think>")
    seeds_matter: bool = True
    """Whether different seeds can give different episodes."""


async def await_values(value: Any) -> Any:
    """Await what `reset` or `step` returned. Asynchronous environments return one awaitable per
    agent."""
    value = await value if inspect.isawaitable(value) else value
    if not isinstance(value, dict):
        return value
    return {agent: await agent_value if inspect.isawaitable(agent_value) else agent_value for agent, agent_value in value.items()}


async def reset(env: LudicEnv, seed: int | None = SEED) -> dict[str, tuple[str, dict]]:
    return await await_values(env.reset(seed=seed))


async def step(env: LudicEnv, action: str) -> dict[str, StepOutcome]:
    """Step the active agent."""
    (agent,) = env.active_agents
    return await await_values(env.step({agent: action}))


async def close(env: LudicEnv) -> None:
    if hasattr(env, "close"):
        await await_values(env.close())


async def transcript(env: LudicEnv, moves: Sequence[str], seed: int | None = SEED) -> list[Any]:
    """Observations and outcomes of one episode, until it ends or the actions run out."""
    steps: list[Any] = [await reset(env, seed)]
    for move in moves:
        outcomes = await step(env, move)
        steps.append(outcomes)
        if is_over(outcomes):
            break
    return steps


def is_over(outcomes: dict[str, StepOutcome]) -> bool:
    return any(outcome.terminated or outcome.truncated for outcome in outcomes.values())


def check_outcome(outcome: StepOutcome) -> None:
    """Check the types and rules that StepOutcome documents."""
    assert isinstance(outcome, StepOutcome)
    assert isinstance(outcome.obs, str)
    assert type(outcome.reward) is float
    assert math.isfinite(outcome.reward)
    assert type(outcome.terminated) is type(outcome.truncated) is bool
    assert not (outcome.terminated and outcome.truncated)
    check_info(outcome.info)


def check_info(info: dict) -> None:
    assert type(info) is dict
    assert json.loads(json.dumps(info, allow_nan=False)) == info
