"""Problems whose answer is a mathematical expression: environments, reward functions and their
grader."""

from ludic.envs.maths.grader import (
    GraderCounts,
    GSM8KEnv,
    MATHEnv,
    MathGrader,
    MathQAEnv,
    MathReward,
    final_answer,
    gsm8k_reward,
    gsm8k_target,
    math_reward,
    math_target,
)
from ludic.envs.maths.tagged import TaggedMathReward, canonical_answer, tagged_answer

__all__ = [
    "GSM8KEnv",
    "GraderCounts",
    "MATHEnv",
    "MathGrader",
    "MathQAEnv",
    "MathReward",
    "TaggedMathReward",
    "canonical_answer",
    "final_answer",
    "gsm8k_reward",
    "gsm8k_target",
    "math_reward",
    "math_target",
    "tagged_answer",
]
