"""Problems whose answer is a mathematical expression: environments, reward functions and their
grader."""

from ludic.envs.maths.envs import GSM8KEnv, MATHEnv, MathQAEnv, MathReward, gsm8k_reward, math_reward
from ludic.envs.maths.grader import GraderCounts, MathGrader, final_answer, gsm8k_target, math_target
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
