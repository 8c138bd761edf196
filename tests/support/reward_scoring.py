"""Answers, and what reward functions make of them."""

import asyncio

from ludic.training.reward_functions import RewardFunctions
from ludic.types import Rollout, Step, TokenTrace


def rollout(text, group="g", reward=0.0, **row):
    """One answer to `row`. The prompt is text unless set otherwise."""
    row = {"prompt": "2+2=", **row}
    trace = TokenTrace([1], list(text.encode()))
    step = Step(0, "2+2=", text, None, reward, False, True, {"row": row}, trace)
    return Rollout(steps=[step], meta={"request_meta": {"group_id": group}})


def score(functions, *rollouts, weights=None, **settings):
    """(rewards, errors), each in the order of the rollouts."""
    scorer = RewardFunctions(functions, weights, **settings)
    errors = asyncio.run(scorer.score(rollouts))
    assert set(errors) <= {r.id for r in rollouts}
    return [r.total_reward for r in rollouts], [errors.get(r.id) for r in rollouts]
