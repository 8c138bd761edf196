"""What adapters share: the life cycle of an episode (new, running, over, closed), imports of
optional libraries, and values of other libraries in the types of JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Set as AbstractSet
from typing import Any

from ludic.envs.env import SingleAgentEnv
from ludic.errors import MissingExtraError, RolloutError
from ludic.types import StepOutcome

_WRONG_STATES = {
    "new": "has no episode yet; call reset() before the first step",
    "over": "has ended its episode; call reset() before the next step",
    "closed": "is closed; make a new one",
}


class Episode:
    """Rejects calls out of order: a step before `reset` or after the end, and any call after
    `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = "new"

    @property
    def running(self) -> bool:
        return self._state == "running"

    def begin(self) -> None:
        self._check_not("closed")
        self._state = "running"

    def check_step(self) -> None:
        self._check_not("new", "over", "closed")

    def check_begun(self) -> None:
        self._check_not("new", "closed")

    def end(self) -> None:
        self._state = "over"

    def close(self) -> bool:
        """Returns True on the first call, False after."""
        was_open = self._state != "closed"
        self._state = "closed"
        return was_open

    def _check_not(self, *states: str) -> None:
        if self._state in states:
            raise RolloutError(f"{self._name} {_WRONG_STATES[self._state]}")


class AdaptedEnv(SingleAgentEnv):
    """An environment of another library, which shows an observation as text."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._episode, self._obs = Episode(name), ""

    def env_current_obs(self) -> str:
        self._episode.check_begun()
        return self._obs


def refused_action(action: str, feedback: str, reward: float) -> StepOutcome:
    """The outcome of text that is no action, which leaves the environment as it is."""
    info = {"invalid_action": True, "raw_action": action}
    return StepOutcome(obs=feedback, reward=reward, truncated=False, terminated=False, info=info)


def import_extra(module: str, extra: str) -> Any:
    """Import and return a module. Raises MissingExtraError, which names the extra, if its package
    is not installed; an import error within the package passes through."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError.for_extra(package, extra) from error


def to_json_types(value: Any) -> Any:
    """`value` in the types of JSON: arrays become lists, NumPy scalars Python numbers, keys
    strings, and anything that JSON has no type for `str(value)`."""
    if isinstance(value, float | str) and hasattr(value, "item"):  # NumPy's float64 and str_ subclass Python's types
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_types(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(element) for element in value]
    if isinstance(value, AbstractSet):
        return sorted((to_json_types(element) for element in value), key=str)
    if hasattr(value, "tolist"):
        return to_json_types(value.tolist())
    if hasattr(value, "model_dump"):
        return to_json_types(value.model_dump())
    return str(value)
