"""An environment with one prompt and one answer, whose reward comes from outside."""

from __future__ import annotations

from collections.abc import Mapping

from ludic.envs.dataset_qa_env import Sample
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import RolloutError
from ludic.types import Info, StepOutcome

ANSWER_COLUMNS = ("answer", "solution", "target", "completion")
"""Columns that may hold the right answer. Only people are shown it."""


class PromptEnv(SingleAgentEnv):
    """Shows the `prompt` of one row and takes one answer, with reward 0. The step's info has the
    row as `row`, for the reward functions (see `ludic.training.reward_functions`).

    A prompt of messages is in the info of the reset as `messages`, which start the dialogue (see
    `FullDialog`); the observation is the last message. A column `chat_template_kwargs` is in the
    info, too.
    """

    def __init__(self, sample: Sample, *, system_prompt: str | None = None) -> None:
        super().__init__()
        self.sample = dict(sample)
        self._prompt = self.sample["prompt"]
        self._system_prompt = system_prompt
        self._done = False

    @property
    def suggested_sysprompt(self) -> str | None:
        return self._system_prompt

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """The prompt; the same at every reset, for any seed."""
        self._done = False
        info = {} if isinstance(self._prompt, str) else {"messages": self._prompt}
        arguments = self.sample.get("chat_template_kwargs")
        return self.env_current_obs(), {**info, "chat_template_kwargs": arguments} if arguments else info

    def env_step(self, action: str) -> StepOutcome:
        if self._done:
            raise RolloutError("this prompt is already answered; call reset() before the next step")
        self._done = True
        return StepOutcome(obs="", reward=0.0, truncated=False, terminated=True, info={"row": self.sample})

    def env_current_obs(self) -> str:
        return prompt_shown(self._prompt)


def right_answer(row: Mapping[str, object]) -> str:
    """The right answer as people are shown it; empty for a row without one."""
    return next((str(row[name]) for name in ANSWER_COLUMNS if row.get(name) is not None), "")


def prompt_shown(prompt: str | list[dict[str, object]]) -> str:
    """The text, or the content of the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
