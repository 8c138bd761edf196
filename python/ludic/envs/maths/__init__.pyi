from ludic.envs.maths.grader import (
    GraderCounts as GraderCounts,
    GSM8KEnv as GSM8KEnv,
    MATHEnv as MATHEnv,
    MathGrader as MathGrader,
    MathQAEnv as MathQAEnv,
    MathReward as MathReward,
    final_answer as final_answer,
    gsm8k_reward as gsm8k_reward,
    gsm8k_target as gsm8k_target,
    math_reward as math_reward,
    math_target as math_target,
)
from ludic.envs.maths.tagged import (
    TaggedMathReward as TaggedMathReward,
    canonical_answer as canonical_answer,
    tagged_answer as tagged_answer,
)
