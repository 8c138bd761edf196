"""On-policy distillation: the weights of tokens from the log-probabilities that a teacher gives to
the policy's own samples; a teacher behind a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import ConfigError, DataError, check_value
from ludic.inference.servers.http import run_blocking
from ludic.inference.vllm.prompt_logprobs import PromptLogprobsClient
from ludic.models.images.rows import IMAGES
from ludic.training.config import TrainerConfig
from ludic.training.info_seed.seed_tags import with_prompt
from ludic.training.loss.batch import CANDIDATES
from ludic.training.loss.context import SharedContext
from ludic.training.types import ReferencePolicy, SAWItem

T = TypeVar("T")
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


@dataclass(frozen=True)
class Teacher:
    """A teacher that sees another prompt than the policy, such as one with the right answer or with
    feedback on an earlier one.

    >>> teacher = Teacher(prompt=lambda item: tokenizer.encode(f"{item.meta['row']['answer']} ..."))
    """

    policy: ReferencePolicy | None = None
    """None means the policy that is trained, with the weights that the step begins with
    (self-distillation)."""
    prompt: Callable[[SAWItem], Sequence[int]] | None = None
    """Returns the token ids that stand for all tokens before a sample's first action token. None
    means the sample's own."""


@dataclass(frozen=True)
class Teachers:
    """Several teachers; a column of the sample's row, or of its meta, names the one that scores
    it. In `make_opd(teacher=...)` a mapping makes one, with `teacher_column`."""

    by_name: Mapping[str, Teacher | ReferencePolicy]
    column: str | None = "teacher"
    """None means that there is one teacher, for all samples."""

    computes_trees = False

    def divide(self, items: Sequence[SAWItem], max_seq_len: int) -> Iterator[tuple[Teacher, list[int], list[SAWItem]]]:
        """Each teacher with the rows of its samples, and all samples, of which these have its
        prompt. Raises DataError for a sample without a teacher, and for one that is then too
        long."""
        only = next(iter(self.by_name))
        names = [only if self.column is None else (item.meta.get("row") or item.meta).get(self.column) for item in items]
        for item, name in zip(items, names, strict=True):
            if name not in self.by_name:
                rule = f"name one of the teachers {', '.join(self.by_name)}"
                raise DataError(f"{item.meta.get('rollout_id')} has {self.column} {name!r}; {rule}")
        for known, given in self.by_name.items():
            teacher = given if isinstance(given, Teacher) else Teacher(given)
            rows, shown = [row for row, name in enumerate(names) if name == known], list(items)
            for row in rows if teacher.prompt is not None else ():
                shown[row] = with_prompt(items[row], list(teacher.prompt(items[row])))  # type: ignore[misc]
                if (length := len(shown[row].input_ids)) > max_seq_len:
                    rule = f"max_seq_len ({max_seq_len}) must be as long"
                    raise DataError(f"{items[row].meta.get('rollout_id')} has {length} tokens with the teacher's prompt; {rule}")
            yield teacher, rows, shown


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
        self._run(self._client.check(name, tokenizer, cfg.max_seq_len))

    def logps(self, micro_batch: Any) -> Tensor:
        """Of a `MicroBatch`: [B, T - 1] log-probability of each next token, 0 after a row's last
        action token."""
        tensors = micro_batch.tensors
        if IMAGES in tensors:
            raise DataError("a server scores text, and the samples have images; pass teacher=FrozenModel.from_pretrained(...)")
        if CANDIDATES in tensors:
            raise DataError("a server scores the whole vocabulary, not candidates; leave rollout.keep_candidates out")
        ids, acts = tensors["input_ids"], tensors["action_mask"] != 0
        ends = tensors["cu_seqlens"][1:].tolist() if "cu_seqlens" in tensors else [ids.shape[1]]
        rows: dict[tuple[int, int, int], list[int]] = {}
        """(row, first predicted token, end) -> the ids, with the token before these."""
        for row, (start, end) in product(range(len(ids)), pairwise([0, *ends])):
            actions = acts[row, start + 1 : end].nonzero()
            if len(actions):  # a row without actions stands for no sample
                last = start + 1 + int(actions.max())
                rows[row, start + 1, last + 1] = ids[row, start : last + 1].tolist()
        scored = self._run(self._client.score(list(rows.values()))) if rows else []
        column = torch.zeros_like(ids, dtype=torch.float32)
        for (row, first, end), logps in zip(rows, scored, strict=True):
            column[row, first:end] = torch.tensor(logps, dtype=torch.float32)
        return SharedContext(ids, {**tensors, "teacher_logps": column}).read_logps("teacher_logps")

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call, whose connections are closed: no call is known to be the last."""

        async def run() -> T:
            try:
                return await call
            finally:
                await self._client.aclose()

        return run_blocking(run())
