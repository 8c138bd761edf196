"""Gymnasium environments with text observations and actions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ludic.envs.adapters.episode import AdaptedEnv, import_extra, refused_action, to_json_types
from ludic.errors import ConfigError
from ludic.types import Info, StepOutcome


class GymnasiumEnv(AdaptedEnv):
    """A `gymnasium.Env`, or the id of one that is made with `make_settings`.

    Observations: the result of `observe`; without it the rendering, if the environment renders
    `ansi`; else the observation formatted by its space. Actions: the result of `read_action`
    (ValueError for text that is no action); without it integers, `action_names`, or text, by the
    action space.

    Text that is no action never reaches the environment: the outcome has `invalid_action_reward`
    and `info["invalid_action"]`, its observation lists the legal actions, and the episode
    continues. A step that is both terminated and truncated counts as terminated.

    Example: `GymnasiumEnv("FrozenLake-v1", render_mode="ansi", action_names=["left", "down",
    "right", "up"])`.
    """

    def __init__(
        self,
        env: Any,
        *,
        observe: Callable[[Any], str] | None = None,
        read_action: ReadAction | None = None,
        action_names: Sequence[str] | None = None,
        invalid_action_reward: float = -1.0,
        system_prompt: str | None = None,
        **make_settings: Any,
    ) -> None:
        self._env = import_extra("gymnasium", "gymnasium").make(env, **make_settings) if isinstance(env, str) else env
        super().__init__(f"GymnasiumEnv({env if isinstance(env, str) else type(self._env.unwrapped).__name__})")
        self._observe = observe or self._default_observation
        if read_action is None:
            self._read_action, self._legal = action_reader(self._env.action_space, action_names)
        else:
            self._read_action, self._legal = read_action, ""
        self._invalid_action_reward = invalid_action_reward
        self._system_prompt = system_prompt

    @property
    def suggested_sysprompt(self) -> str | None:
        """`system_prompt`, or by default one that names the legal actions."""
        if self._system_prompt is not None or not self._legal:
            return self._system_prompt
        return f"Answer with your action and nothing else: {self._legal}."

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        self._episode.begin()
        obs, info = self._env.reset(seed=seed)
        self._obs = self._observe(obs)
        return self._obs, to_json_types(info)

    def env_step(self, action: str) -> StepOutcome:
        self._episode.check_step()
        try:
            env_action = self._read_action(action)
        except ValueError as error:
            feedback = f"Invalid action. Answer with {error}." if str(error) else "Invalid action."
            return refused_action(action, f"{feedback}\n{self._obs}", self._invalid_action_reward)
        obs, reward, terminated, truncated, info = self._env.step(env_action)
        if terminated or truncated:
            self._episode.end()
        self._obs = self._observe(obs)
        return StepOutcome(
            obs=self._obs,
            reward=float(reward),
            truncated=bool(truncated) and not terminated,
            terminated=bool(terminated),
            info=to_json_types(info),
        )

    def close(self) -> None:
        """Release the environment. Calls after the first do nothing."""
        if self._episode.close():
            self._env.close()

    def _default_observation(self, obs: Any) -> str:
        if self._env.render_mode == "ansi":
            return rendered_text(self._env.render())
        return observation_text(self._env.observation_space, obs)


ReadAction = Callable[[str], Any]
"""Text to an element of the action space; for other text a ValueError that names the legal ones."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)


def rendered_text(frame: str) -> str:
    """A terminal rendering without its colours: highlighted text is put in brackets."""
    return _HIGHLIGHT.sub(r"[\1]", frame).strip("\n")


def observation_text(space: Any, value: Any) -> str:
    """An observation as text: numbers to four digits, arrays of several dimensions with one row a
    line, dictionaries with one key a line."""
    kind = type(space).__name__
    if kind == "Text":
        return str(value)
    if kind == "Discrete":
        return str(int(value))
    if kind == "Tuple":
        return ", ".join(observation_text(part, element) for part, element in zip(space.spaces, value, strict=True))
    if kind == "Dict":
        return "\n".join(f"{key}: {observation_text(part, value[key])}" for key, part in space.spaces.items())
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return _rows(to_json_types(value))
    return json.dumps(to_json_types(value))


def _rows(numbers: Any) -> str:
    if not isinstance(numbers, list):
        return _number(numbers)
    if numbers and isinstance(numbers[0], list):
        return "\n".join(_rows(row) for row in numbers)
    return " ".join(map(_number, numbers))


def _number(value: float | int) -> str:
    return str(int(value)) if isinstance(value, int) else f"{value:.4g}"


def action_reader(space: Any, names: Sequence[str] | None) -> tuple[ReadAction, str]:
    """(the parser of actions of this space, the legal actions in words). `names` are the actions of
    a Discrete space, in order.

    Raises ConfigError for a space whose actions have no obvious text form, and for names that do
    not fit.
    """
    kind = type(space).__name__
    if names is not None:
        return _named(space, kind, names)
    if kind == "Discrete":
        low, high = int(space.start), int(space.start) + int(space.n) - 1
        legal = f"a whole number from {low} to {high}"
        return (lambda text: _integers(text, [low], [high], legal)[0]), legal
    if kind in ("MultiDiscrete", "MultiBinary"):
        return _several(space, kind)
    if kind == "Text":
        legal = f"a text of {space.min_length} to {space.max_length} characters out of {space.characters!r}"

        def read(text: str) -> str:
            if not space.contains(text):
                raise ValueError(legal)
            return text

        return read, legal
    raise ConfigError(f"actions of a {kind} space cannot be read from text; give `read_action`, a function from text to actions")


def _named(space: Any, kind: str, names: Sequence[str]) -> tuple[ReadAction, str]:
    if kind != "Discrete" or len(names) != space.n:
        size = f" of {space.n} actions" if kind == "Discrete" else ""
        raise ConfigError(f"action_names has {len(names)} names for a {kind} space{size}; it names each action of a Discrete one")
    of_name = {name.casefold(): index + int(space.start) for index, name in enumerate(names)}
    if len(of_name) != len(names):
        raise ConfigError(f"action_names ({list(names)}) must differ from each other, whatever the case")
    legal = f"one of {', '.join(names)}"

    def read(text: str) -> int:
        if text.strip().casefold() not in of_name:
            raise ValueError(legal)
        return of_name[text.strip().casefold()]

    return read, legal


def _several(space: Any, kind: str) -> tuple[ReadAction, str]:
    import numpy as np

    shape = space.shape
    if kind == "MultiBinary":
        low, high = [0] * int(np.prod(shape)), [1] * int(np.prod(shape))
    else:
        low = [int(start) for start in np.ravel(space.start)]
        high = [start + int(count) - 1 for start, count in zip(low, np.ravel(space.nvec), strict=True)]
    bounds = ", ".join(f"{least} to {most}" for least, most in zip(low, high, strict=True))
    legal = f"{len(low)} whole numbers with spaces between them, in these bounds: {bounds}"
    return (lambda text: np.array(_integers(text, low, high, legal), dtype=space.dtype).reshape(shape)), legal


def _integers(text: str, low: list[int], high: list[int], legal: str) -> list[int]:
    words = text.replace(",", " ").split()
    if len(words) != len(low) or not all(map(_INTEGER.fullmatch, words)):
        raise ValueError(legal)
    numbers = [int(word) for word in words]
    if not all(least <= number <= most for least, number, most in zip(low, numbers, high, strict=True)):
        raise ValueError(legal)
    return numbers
