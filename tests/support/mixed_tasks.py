"""Tasks of an environment each: one that fails, and one of as many turns as the engine allows; and
a recipe of two environments."""

from __future__ import annotations

from random import Random
from typing import Any

from ludic.envs import SingleAgentEnv
from ludic.tasks import EpisodicTask
from ludic.types import StepOutcome


class Endless(EpisodicTask):
    """Two turns, by its own word; its environment never ends."""

    max_turns = 2
    facts = {"odd": "the digit is odd"}  # noqa: RUF012

    def draw(self, rng: Random) -> dict[str, Any]:
        return {"id": str(rng.randrange(10))}

    def make_env(self, episode: Any) -> SingleAgentEnv:
        return _Endless(episode["id"])


class _Endless(SingleAgentEnv):
    def __init__(self, digit: str) -> None:
        super().__init__()
        self._digit = digit

    def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self._digit, {}

    def env_current_obs(self) -> str:
        return self._digit

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome(self._digit, len(action) / 10, False, False, {"odd": int(self._digit) % 2 == 1})


class Broken(Endless):
    """Its environments fail in training."""

    def make_env(self, episode: Any) -> SingleAgentEnv:
        raise OSError("the grader is gone")


def mixed(rows: str) -> list[str]:
    """Rows, of which each step trains, and episodes of two turns, which begin at step 2."""
    args = "task: {args: {max_new_tokens: 4, num_heldout: 3}}"
    second = "{task: {kind: 'mixed_tasks:Endless'}, weight: {0: 0, 2: 2}, rollout: {max_new_tokens: 3, group_size: 2}}"
    environments = f"{{rows: {{data: {rows}, reward: 'byte_rewards:mean_id', {args}}}, two: {second}}}"
    return ["sort", "network.end_of_turn=newline", f"environments={environments}"]
