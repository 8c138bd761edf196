"""OpenEnv environments, through a client of the server that runs one."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from ludic.envs.adapters.episode import AdaptedEnv, import_extra, refused_action, to_json_types
from ludic.errors import RolloutError, check_value
from ludic.types import Info, StepOutcome

NOT_SHOWN = frozenset({"done", "reward", "metadata"})
"""Fields of an observation that the agent does not see."""
_REFUSED_ACTION = "VALIDATION_ERROR"
"""The server's error code for an action of the wrong type."""


def message_action(text: str) -> dict[str, Any]:
    """The action for environments that take a message."""
    return {"message": text}


def shown_observation(observation: Any) -> str:
    """An observation as text: its only field if that is text, else all fields as JSON."""
    fields = to_json_types(observation)
    if not isinstance(fields, Mapping):
        return fields if isinstance(fields, str) else json.dumps(fields)
    shown = {key: value for key, value in fields.items() if key not in NOT_SHOWN}
    values = list(shown.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(shown, ensure_ascii=False)


def says_truncated(result: Any) -> bool:
    """Whether the observation or the metadata has `truncated: true`. OpenEnv itself only has
    `done`."""
    observation = to_json_types(result.observation)
    of_observation = observation.get("metadata") if isinstance(observation, Mapping) else None
    candidates = [observation, of_observation, getattr(result, "metadata", None)]
    return any(isinstance(fields, Mapping) and fields.get("truncated") is True for fields in candidates)


class OpenEnvEnv(AdaptedEnv):
    """An OpenEnv client, or the address of a server, for which a `GenericEnvClient` is made.

    A client is a session: it plays one episode at a time, and `close` ends it, even a client that
    was passed in. `observe` turns observations into text, `make_action` turns answers into actions
    (ValueError for text that is no action). Such text, and an action that the server rejects as of
    the wrong type, changes nothing: the outcome has `invalid_action_reward` and
    `info["invalid_action"]`, and the episode continues. Any other error of the server is a
    RolloutError, never a reward. A missing reward is 0.

    Every exchange raises TimeoutError after `timeout_s`. Actions are sent unfiltered: connect only
    to servers that you trust with them.

    Example: `OpenEnvEnv("http://127.0.0.1:8000", make_action=lambda text: {"move": int(text)})`.
    """

    def __init__(
        self,
        client: Any,
        *,
        make_action: Callable[[str], Any] = message_action,
        observe: Callable[[Any], str] = shown_observation,
        is_truncated: Callable[[Any], bool] = says_truncated,
        invalid_action_reward: float = -1.0,
        system_prompt: str | None = None,
        timeout_s: float = 60.0,
        reset_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`reset_settings` are sent with every reset, in addition to the seed. Raises ConfigError
        unless `timeout_s` is above 0."""
        super().__init__(f"OpenEnvEnv({client if isinstance(client, str) else type(client).__name__})")
        check_value("timeout_s", timeout_s, above=0)
        self._client = import_extra("openenv.core", "openenv").GenericEnvClient(client) if isinstance(client, str) else client
        self._make_action, self._observe, self._is_truncated = make_action, observe, is_truncated
        self._invalid_action_reward, self._system_prompt, self._timeout_s = invalid_action_reward, system_prompt, timeout_s
        self._reset_settings = dict(reset_settings or {})

    async def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:  # type: ignore[override]  # hooks may be coroutines
        """Without a seed the server chooses."""
        self._episode.begin()
        settings = self._reset_settings if seed is None else {**self._reset_settings, "seed": seed}
        result = await self._exchange(lambda: self._client.reset(**settings))
        if result.done:
            self._episode.end()
        self._obs = self._observe(result.observation)
        return self._obs, _metadata(result)

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        self._episode.check_step()
        try:
            env_action = self._make_action(action)
        except ValueError as error:
            return self._refused(action, str(error))
        try:
            result = await self._exchange(lambda: self._client.step(env_action))
        except RolloutError as error:
            if _REFUSED_ACTION in str(error):
                return self._refused(action, str(error))
            raise
        done = bool(result.done)
        truncated = done and self._is_truncated(result)
        if done:
            self._episode.end()
        self._obs = self._observe(result.observation)
        return StepOutcome(
            obs=self._obs,
            reward=0.0 if result.reward is None else float(result.reward),
            truncated=truncated,
            terminated=done and not truncated,
            info=_metadata(result),
        )

    async def close(self) -> None:
        """End the session. Calls after the first do nothing."""
        if self._episode.close():
            async with asyncio.timeout(self._timeout_s):
                ended = self._client.close()
                if inspect.isawaitable(ended):
                    await ended

    async def _exchange(self, send: Callable[[], Any]) -> Any:
        """One request and its response. Raises RolloutError for an error of the server,
        TimeoutError after `timeout_s`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                result = send()
                return await result if inspect.isawaitable(result) else result
        except RuntimeError as error:
            raise RolloutError(f"{type(self._client).__name__}: {error}") from error

    def _refused(self, action: str, reason: str) -> StepOutcome:
        return refused_action(action, f"Invalid action. {reason}\n{self._obs}", self._invalid_action_reward)


def _metadata(result: Any) -> Info:
    metadata = getattr(result, "metadata", None)
    return to_json_types(metadata) if isinstance(metadata, Mapping) else {}
