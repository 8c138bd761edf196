"""Environments with the APIs of other libraries, small enough that every outcome is obvious."""

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np


class Password(gymnasium.Env):
    """A text environment that shows the password backwards. One answer ends the episode."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(8, min_length=1, charset="abcdefgh")

    def __init__(self):
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.password = "".join(self.np_random.choice(list("abcdefgh"), 4))
        return self.password[::-1], {"length": np.int64(4)}

    def step(self, action):
        right = action == self.password
        return ("open" if right else "shut"), np.float32(right), np.bool_(right), False, {"tried": {"a", action}}

    def close(self):
        self.closed += 1


class BothAtOnce(Password):
    """Terminates and truncates in the same step."""

    def step(self, action):
        return "x", 1.0, True, True, {}


@dataclass
class Result:
    """Same fields as OpenEnv's StepResult."""

    observation: Any
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


@dataclass
class CountdownClient:
    """Same methods as OpenEnv's asynchronous client. Counts down from a number derived from the
    seed; a wrong number does not end the episode.

    `limit`: number of steps after which the episode is truncated.
    """

    limit: int = 10
    calls: list[tuple[str, Any]] = field(default_factory=list)

    async def reset(self, **settings):
        self.calls.append(("reset", settings))
        self.left, self.steps = 2 + settings.get("seed", 0) % 3, 0
        return Result({"message": f"say {self.left}"})

    async def step(self, action):
        self.calls.append(("step", action))
        if not action["message"].isascii():
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.steps += 1
        right = action["message"] == str(self.left)
        self.left -= right
        cut = self.left > 0 and self.steps >= self.limit
        return Result({"message": f"say {self.left}"}, float(right), self.left == 0 or cut, {"truncated": True} if cut else None)

    async def close(self):
        self.calls.append(("close", None))
