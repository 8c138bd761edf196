"""Environments with one question and one answer: with one verdict, or with a reward that comes from
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ludic.envs.env import SingleAgentEnv, check_step
from ludic.types import Info, Observation, StepOutcome

Sample = Mapping[str, Any]
"""A row of a data set."""
ParserFn = Callable[[str], str]
"""The data set's answer text -> the target of the verifier."""
VerifierFn = Callable[[str, str], bool]
"""(action, parsed target) -> whether the action is right."""
PromptBuilder = Callable[[Sample], Any]
"""A row -> text, an image, or a list of texts, images and parts."""


def strip(text: str) -> str:
    return text.strip()


def same_text(action: str, target: str) -> bool:
    """Equality, ignoring case and surrounding white space."""
    return action.strip().lower() == target.strip().lower()


class DatasetQAEnv(SingleAgentEnv):
    """Shows the question of one row, takes one answer, and ends with `correct_reward` or
    `incorrect_reward`."""

    def __init__(
        self,
        sample: Sample,
        *,
        prompt_key: str = "question",
        answer_key: str = "answer",
        system_prompt: str | None = None,
        prompt_builder: PromptBuilder | None = None,
        target_parser: ParserFn = strip,
        verifier: VerifierFn = same_text,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        super().__init__()
        self.sample = sample
        self._prompt_key, self._answer_key, self._system_prompt = prompt_key, answer_key, system_prompt
        self._prompt_builder, self._target_parser, self._verifier = prompt_builder, target_parser, verifier
        self._correct_reward, self._incorrect_reward = correct_reward, incorrect_reward
        self._question_id = str(sample.get("id") or sample.get("uid") or 0)
        self._obs: Any = ""
        self._done = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Any, Info]:
        """The prompt; the same at every reset, for any seed."""
        self._done = False
        self._obs = self._prompt_builder(self.sample) if self._prompt_builder else self._field(self._prompt_key)
        return self._obs, {"question_id": self._question_id}

    def env_step(self, action: str) -> StepOutcome:
        target = self.begin_verdict()
        return self.end_verdict(action, target, correct=bool(self._verifier(action, target)))

    def begin_verdict(self) -> str:
        """The parsed target. Raises RolloutError if the question is already answered."""
        check_step(not self._done, f"question {self._question_id} is already answered")
        return self._target_parser(self._field(self._answer_key))

    def end_verdict(self, action: str, target: str, *, correct: bool) -> StepOutcome:
        """End the episode and return its outcome."""
        self._done = True
        self._obs = f"{'Correct' if correct else 'Incorrect'}. Expected: {target}"
        info: Info = {
            "question_id": self._question_id,
            "raw_action": action,
            "parsed_answer": action,
            "target_answer": target,
            "correct": correct,
        }
        reward = self._correct_reward if correct else self._incorrect_reward
        return StepOutcome(obs=self._obs, reward=reward, truncated=False, terminated=True, info=info)

    def env_current_obs(self) -> Any:
        return self._obs

    def _field(self, key: str) -> Any:
        if key not in self.sample:
            raise KeyError(f"the sample has no {key!r}; it has {sorted(self.sample)}")
        value = self.sample[key]
        return value if isinstance(value, list) else str(value)


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

    def env_reset(self, *, seed: int | None = None) -> tuple[Observation, Info]:
        """The prompt; the same at every reset, for any seed."""
        self._done = False
        info = {} if isinstance(self._prompt, str) else {"messages": self._prompt}
        arguments = self.sample.get("chat_template_kwargs")
        return self.env_current_obs(), {**info, "chat_template_kwargs": arguments} if arguments else info

    def env_step(self, action: str) -> StepOutcome:
        check_step(not self._done, "this prompt is already answered")
        self._done = True
        return StepOutcome(obs="", reward=0.0, truncated=False, terminated=True, info={"row": self.sample})

    def env_current_obs(self) -> Observation:
        return prompt_shown(self._prompt)


def right_answer(row: Mapping[str, object]) -> str:
    """The right answer as people are shown it; empty for a row without one."""
    return next((str(row[name]) for name in ANSWER_COLUMNS if row.get(name) is not None), "")


def prompt_shown(prompt: str | list[dict[str, Any]]) -> Observation:
    """The text, or the content of the last message."""
    return prompt if isinstance(prompt, str) else prompt[-1].get("content") or ""
