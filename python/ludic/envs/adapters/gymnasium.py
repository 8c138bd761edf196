"""Gymnasium environments with text observations and actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ludic.envs.adapters.episode import Episode
from ludic.envs.adapters.gymnasium_spaces import ReadAction, action_reader, observation_text, rendered_text
from ludic.envs.adapters.missing_library import import_extra
from ludic.envs.adapters.plain_values import to_json_types
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.types import Info, StepOutcome


class GymnasiumEnv(SingleAgentEnv):
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
        super().__init__()
        self._env = import_extra("gymnasium", "gymnasium").make(env, **make_settings) if isinstance(env, str) else env
        self._observe = observe or self._default_observation
        if read_action is None:
            self._read_action, self._legal = action_reader(self._env.action_space, action_names)
        else:
            self._read_action, self._legal = read_action, ""
        self._invalid_action_reward = invalid_action_reward
        self._system_prompt = system_prompt
        self._episode = Episode(f"GymnasiumEnv({env if isinstance(env, str) else type(self._env.unwrapped).__name__})")
        self._obs = ""

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
            return self._refused(action, str(error))
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

    def env_current_obs(self) -> str:
        self._episode.check_begun()
        return self._obs

    def close(self) -> None:
        """Release the environment. Calls after the first do nothing."""
        if self._episode.close():
            self._env.close()

    def _refused(self, action: str, legal: str) -> StepOutcome:
        """The outcome of text that is no action: the state is unchanged, and the last observation
        is repeated."""
        feedback = f"Invalid action. Answer with {legal}." if legal else "Invalid action."
        return StepOutcome(
            obs=f"{feedback}\n{self._obs}",
            reward=self._invalid_action_reward,
            truncated=False,
            terminated=False,
            info={"invalid_action": True, "raw_action": action},
        )

    def _default_observation(self, obs: Any) -> str:
        if self._env.render_mode == "ansi":
            return rendered_text(self._env.render())
        return observation_text(self._env.observation_space, obs)
