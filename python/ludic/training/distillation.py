"""On-policy distillation: the weights of tokens from the log-probabilities that a teacher gives to
the policy's own samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import check_value

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Distillation:
    """The weight of token t is A_t = reward_coeff A + sum_{k >= t} gamma^(k - t) (log pi_T(y_k) -
    log pi(y_k)): the credit A from rewards, and minus the reverse KL towards the teacher pi_T,
    estimated from the sampled tokens.

    pi is the old policy (`loss.context`), and the weight is a constant. In a policy-gradient loss
    that sums over an answer's tokens, on samples of the policy and with `reward_coeff=0`:

    - `gamma=1`: the expected gradient is the exact gradient of KL(pi || pi_T) over whole answers
      (log-ratios to go; MiniLLM, arXiv:2306.08543, eq. 5, without its length normalization).
    - `gamma=0`, the default: it is the gradient of the sum over tokens of KL(pi(. | y_<t) ||
      pi_T(. | y_<t)) with the prefixes held fixed (Thinking Machines, "On-Policy Distillation",
      2025). Left out is how a token changes the prefixes of later ones. Its variance is far lower.

    An answer is one sample: of an episode of several turns, log-ratios to go end with the turn.
    """

    reward_coeff: float = 0.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        check_value("reward_coeff", self.reward_coeff, "0 learns from the teacher alone", least=0, below=math.inf)
        check_value("gamma", self.gamma, "0 counts a token's own log-ratio", least=0, most=1)

    def weigh(self, credit: Values, teacher: Values, policy: Values, counts: NDArray[Any]) -> Values:
        """[S] weights of the tokens of all samples, one sample after another, from their credit and
        log-probabilities [S]; counts [N]: tokens of each sample.

        Example: one sample, credit 0, teacher [-1, -2] and policy [-2, -1] give log-ratios [1, -1]
        and, with gamma 0.5, weights [1 - 0.5, -1].
        """
        to_go = teacher - policy
        if self.gamma:
            ends = set((np.cumsum(counts) - 1).tolist())
            for token in range(len(to_go) - 2, -1, -1):
                if token not in ends:
                    to_go[token] += self.gamma * to_go[token + 1]
        return self.reward_coeff * credit + to_go
