"""On-policy distillation: the weights of tokens from the log-probabilities that a teacher gives to
the policy's own samples; a teacher behind a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import ConfigError, check_value
from ludic.inference.servers.http import run_blocking
from ludic.inference.vllm.prompt_logprobs import PromptLogprobsClient
from ludic.training.config import TrainerConfig
from ludic.training.loss.context import SharedContext

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


class TeacherServer:
    """A teacher behind vLLM servers, which scores the tokens of samples: `FrozenModel` with another
    engine. Every rank asks for its own samples, and no event loop is needed.

    >>> teacher = TeacherServer("http://127.0.0.1:8000", tokenizer, cfg)

    It is of temperature 1, so the policy must be. `options` are arguments of
    `PromptLogprobsClient`, such as `timeout_s`. Raises ConfigError unless a server answers and has
    the vocabulary of `tokenizer`, the policy's.
    """

    computes_trees = False

    def __init__(
        self, url: str | Sequence[str], tokenizer: Any, cfg: TrainerConfig, *, name: str = "teacher", **options: Any
    ) -> None:
        if cfg.temperature != 1.0:
            raise ConfigError(f"{name} ({url}) gives log-probabilities at temperature 1; sample at 1, not {cfg.temperature}")
        self._client = PromptLogprobsClient(url, **options)
        run_blocking(self._client.check(name, tokenizer, cfg.max_seq_len))

    def logps(self, micro_batch: Any) -> Tensor:
        """Of a `MicroBatch`: [B, T - 1] log-probability of each next token, 0 after the last action token of a row."""
        tensors = micro_batch.tensors
        ids, acts = tensors["input_ids"], tensors["action_mask"] != 0
        bounds = tensors["cu_seqlens"].tolist() if "cu_seqlens" in tensors else None
        starts = [(row, 0) for row in range(len(ids))] if bounds is None else [(0, start) for start in bounds[:-1]]
        ends = [ids.shape[1]] * len(ids) if bounds is None else bounds[1:]
        column = torch.zeros_like(ids, dtype=torch.float32)
        places, rows = [], []
        for (row, start), end in zip(starts, ends, strict=True):
            length = int(acts[row, start:end].nonzero().max()) + 1 if bool(acts[row, start:end].any()) else 0
            if length > 1:  # a row without actions stands for no sample
                places.append((row, start + 1, start + length))
                rows.append(ids[row, start : start + length].tolist())
        scored = run_blocking(self._client.score(rows)) if rows else []
        for (row, first, last), logps in zip(places, scored, strict=True):
            column[row, first:last] = torch.tensor(logps, dtype=torch.float32)
        return SharedContext(ids, {**tensors, "teacher_logps": column}).read_logps("teacher_logps")
