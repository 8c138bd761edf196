"""GSM8K and MATH: one problem, one answer, compared by math-verify."""

from __future__ import annotations

from ludic.envs.dataset_qa_env import DatasetQAEnv, ParserFn, Sample
from ludic.envs.maths.answers import final_answer, first_present, gsm8k_target, math_target
from ludic.envs.maths.grader import MathGrader, shared_grader
from ludic.types import StepOutcome

GSM8K_SYSTEM_PROMPT = "Solve the problem step by step. Put the final number in \\boxed{}."
MATH_SYSTEM_PROMPT = "Solve the problem step by step. Put the final answer in \\boxed{}."


class MathQAEnv(DatasetQAEnv):
    """A question with an expression as answer. The model may answer with a longer text (see
    `final_answer`).

    If the grader fails or takes too long, GradingError is raised: the episode fails and has no
    reward.
    """

    def __init__(
        self,
        sample: Sample,
        *,
        prompt_key: str,
        answer_key: str,
        target_parser: ParserFn,
        system_prompt: str | None,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        super().__init__(
            sample,
            prompt_key=prompt_key,
            answer_key=answer_key,
            system_prompt=system_prompt,
            target_parser=target_parser,
            correct_reward=correct_reward,
            incorrect_reward=incorrect_reward,
        )
        self._grader = grader or shared_grader()

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]  # the protocol awaits it
        target = self.begin_verdict()
        return self.end_verdict(action, target, correct=await self._grader.grade(final_answer(action), target))


class GSM8KEnv(MathQAEnv):
    """A row of GSM8K: `question`, and `answer`, whose target is the last number after `####`."""

    def __init__(
        self,
        sample: Sample,
        *,
        system_prompt: str | None = GSM8K_SYSTEM_PROMPT,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        super().__init__(
            sample,
            prompt_key="question",
            answer_key="answer",
            target_parser=gsm8k_target,
            system_prompt=system_prompt,
            grader=grader,
            correct_reward=correct_reward,
            incorrect_reward=incorrect_reward,
        )


class MATHEnv(MathQAEnv):
    r"""A row of MATH: `problem` or `question`, and `solution` or `answer`, whose target is the
    last `\boxed{...}`."""

    def __init__(
        self,
        sample: Sample,
        *,
        system_prompt: str | None = MATH_SYSTEM_PROMPT,
        grader: MathGrader | None = None,
        correct_reward: float = 1.0,
        incorrect_reward: float = 0.0,
    ) -> None:
        first_present(sample, "problem", "question"), first_present(sample, "solution", "answer")
        super().__init__(
            sample,
            prompt_key="problem" if sample.get("problem") is not None else "question",
            answer_key="solution" if sample.get("solution") is not None else "answer",
            target_parser=math_target,
            system_prompt=system_prompt,
            grader=grader,
            correct_reward=correct_reward,
            incorrect_reward=incorrect_reward,
        )
