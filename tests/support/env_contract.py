"""What every environment keeps to, whoever wrote it: a case to test, and how it is played
without a protocol."""

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
    """An environment and one episode of it."""

    name: str
    make: Callable[[], LudicEnv]
    moves: Sequence[str]
    """From `reset(seed=SEED)` on, these end the episode, the last one and no earlier."""
    ends: Literal["terminated", "truncated"] = "terminated"
    garbage: Sequence[str] = ("", "?", "\x00", "no such thing", "[99]", "１", "9" * 5000, "\ud800", "<think>")
    seeds_matter: bool = True
    """Whether another seed can give another episode."""


async def settled(value: Any) -> Any:
    """`reset` and `step` of environments with coroutines hand over awaitables by agent."""
    value = await value if inspect.isawaitable(value) else value
    if not isinstance(value, dict):
        return value
    return {agent: await own if inspect.isawaitable(own) else own for agent, own in value.items()}


async def reset(env: LudicEnv, seed: int | None = SEED) -> dict[str, tuple[str, dict]]:
    return await settled(env.reset(seed=seed))


async def step(env: LudicEnv, action: str) -> dict[str, StepOutcome]:
    """The active agent acts."""
    (agent,) = env.active_agents
    return await settled(env.step({agent: action}))


async def close(env: LudicEnv) -> None:
    if hasattr(env, "close"):
        await settled(env.close())


async def transcript(env: LudicEnv, moves: Sequence[str], seed: int | None = SEED) -> list[Any]:
    """What is seen and earned in one episode, until it ends or the moves do."""
    seen: list[Any] = [await reset(env, seed)]
    for move in moves:
        outcomes = await step(env, move)
        seen.append(outcomes)
        if over(outcomes):
            break
    return seen


def over(outcomes: dict[str, StepOutcome]) -> bool:
    return any(outcome.terminated or outcome.truncated for outcome in outcomes.values())


def check_outcome(outcome: StepOutcome) -> None:
    """The types and rules that StepOutcome documents."""
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
