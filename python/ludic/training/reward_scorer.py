"""Scores of a reward model for rollouts: beside the reward, where credit finds them, or as the
reward itself."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ludic.errors import ConfigError, DataError, GradingError
from ludic.event_loop import await_if_needed
from ludic.inference.reward_types import ScoringInput
from ludic.training.reward_credit import CombineMode, check_mode, score_of, shares
from ludic.training.types import RolloutScorer
from ludic.types import Message, Rollout

logger = logging.getLogger(__name__)

RenderFn = Callable[[Rollout], str]
SCORE_INFO = "rewards/reward_model"
TASK_REWARD_INFO = "rewards/task"


class RewardModelClient(Protocol):
    """A reward model.

    It may also offer `reads_ids_of(tokenizer) -> bool`: whether `score_batch` takes lists of that
    tokenizer's ids beside text.
    """

    async def score_batch(self, inputs: list[Any], *, normalize: bool = True) -> list[float]:
        """[N] one score for each input. DataError for an input that it refuses: the others are
        then scored without it."""
        ...


@dataclass
class RewardModelScorer:
    """Writes a reward model's score of each rollout to `rollout.meta[score_key]`. Rewards stay as
    they are.

    It is a scorer for `RolloutEngine(scorer=...)`, where a rollout that cannot be scored is a
    failed episode, counted, and never one with a score of 0. Called by itself it returns the errors
    by rollout id; a rollout without a score is then refused when credit is given.

    What is scored, in this order:
    1. the text of `render_fn`;
    2. with `use_chat_template` the conversation as `tokenizer` renders it: the messages that the
       last step's agent saw and its answer, else the observations and actions by turns, with
       `system_prompt` before them where they have none;
    3. the tokens of the last step as they were sampled, prompt and completion, where
       `policy_tokenizer` made them and the client says that its own reads the same ids;
    4. observations and actions, one a line.
    `meta[score_key + "_from"]` says `tokens` or `text`. Text is an approximation: it is tokenised
    again and has no end token, so a model that was trained on tokens judges something else than
    what was sampled.

    Equal inputs of a call are scored once, so that equal answers have equal scores to the bit.
    `batch_size` inputs go into one call of the client, all calls run at the same time, and each has
    `timeout_s`.
    """

    client: RewardModelClient
    score_key: str = "rm_score"
    batch_size: int = 64
    use_chat_template: bool = False
    tokenizer: Any = None
    system_prompt: str | None = None
    render_fn: RenderFn | None = None
    policy_tokenizer: Any = None
    normalize: bool = True
    """Passed to the client: scores in (0, 1). Without, scores as the model gives them, which
    differences of scores are meant for."""
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size ({self.batch_size}) must be >= 1")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s ({self.timeout_s}) must be > 0")
        if self.use_chat_template and not (hasattr(self.tokenizer, "apply_chat_template") and _template_of(self.tokenizer)):
            raise ConfigError("use_chat_template needs a tokenizer that has a chat template; give one as tokenizer")
        self._takes_ids: bool | None = None

    async def score(self, rollouts: Sequence[Rollout]) -> dict[str, Exception]:
        """Score the rollouts in place; why a rollout has no score, by its id."""
        errors: dict[str, Exception] = {}
        inputs: dict[str, ScoringInput] = {}
        for rollout in rollouts:
            rollout.meta.pop(self.score_key, None)
            try:
                inputs[rollout.id] = self._input_of(rollout)
            except Exception as error:
                errors[rollout.id] = _failure(error)
        scores = await self._scores(list(dict.fromkeys(inputs.values())))
        for rollout in rollouts:
            if rollout.id not in inputs:
                continue
            given = inputs[rollout.id]
            score = scores[given]
            if isinstance(score, Exception):
                errors[rollout.id] = score
            else:
                rollout.meta[self.score_key] = score
                rollout.meta[f"{self.score_key}_from"] = "text" if isinstance(given, str) else "tokens"
        return errors

    async def _scores(self, inputs: Sequence[ScoringInput]) -> dict[ScoringInput, float | Exception]:
        batches = [inputs[start : start + self.batch_size] for start in range(0, len(inputs), self.batch_size)]
        results = await asyncio.gather(*(self._batch(batch) for batch in batches))
        return dict(zip(inputs, (score for result in results for score in result), strict=True))

    async def _batch(self, inputs: Sequence[ScoringInput]) -> list[float | Exception]:
        """A score or an error for each. Where the client refuses an input, halves of the batch
        are tried, down to the one it refuses."""
        try:
            async with asyncio.timeout(self.timeout_s):
                given = [each if isinstance(each, str) else list(each) for each in inputs]
                scores = await await_if_needed(self.client.score_batch(given, normalize=self.normalize))
            return _checked(scores, len(inputs))
        except DataError as error:
            if len(inputs) == 1:
                return [_failure(error)]
            middle = len(inputs) // 2
            return [*await self._batch(inputs[:middle]), *await self._batch(inputs[middle:])]
        except Exception as error:
            return [_failure(error)] * len(inputs)

    def _input_of(self, rollout: Rollout) -> ScoringInput:
        if not rollout.steps:
            raise DataError(f"rollout {rollout.id} has no step; there is nothing to score")
        if self.render_fn is not None:
            return self.render_fn(rollout)
        if self.use_chat_template:
            text: str = self.tokenizer.apply_chat_template(
                conversation_of(rollout, self.system_prompt), tokenize=False, add_generation_prompt=False
            )
            return text
        trace = rollout.steps[-1].trace
        if trace is not None and self._reads_ids():
            return (*trace.prompt_token_ids, *trace.completion_token_ids)
        return "\n".join(text for step in rollout.steps for text in (step.prev_obs, step.action))

    def _reads_ids(self) -> bool:
        if self._takes_ids is None:
            reads = getattr(self.client, "reads_ids_of", None)
            self._takes_ids = self.policy_tokenizer is not None and reads is not None and bool(reads(self.policy_tokenizer))
            if self.policy_tokenizer is not None and not self._takes_ids:
                logger.warning("the reward model does not read the policy's token ids; what it scores is text, tokenised again")
        return self._takes_ids


@dataclass
class RewardModelReward:
    """Makes the score the reward, so that whatever compares returns within a group compares scores.
    A scorer for `RolloutEngine`.

    The return becomes `combined(mode, return, score)`: rewards of steps are scaled alike and what
    is added is added to the last step. `before` is asked first: reward functions, whose sum is then
    the return that is combined. Info of the last step says what was combined: `rewards/task` and
    `rewards/reward_model`.

    `unfinished_penalty` is taken off the score of a rollout whose last answer ran into the token
    limit. A reward model is trained on answers that end, and what it says of one that does not is
    chance: policies were seen to find that chance within twenty steps, and to never end again.
    """

    scorer: RewardModelScorer
    mode: CombineMode = "replace"
    rm_coeff: float = 1.0
    alpha: float = 0.5
    before: RolloutScorer | None = None
    unfinished_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if not (math.isfinite(self.unfinished_penalty) and self.unfinished_penalty >= 0):
            raise ConfigError(f"unfinished_penalty ({self.unfinished_penalty}) must be a finite number >= 0; it is subtracted")

    async def score(self, rollouts: Sequence[Rollout]) -> Mapping[str, Exception]:
        """Reward the rollouts in place; the errors of those that could not be, by their id."""
        errors: dict[str, Exception] = {} if self.before is None else dict(await self.before.score(rollouts))
        errors |= await self.scorer.score([rollout for rollout in rollouts if rollout.id not in errors])
        for rollout in rollouts:
            if rollout.id not in errors:
                self._reward(rollout)
        return errors

    def _reward(self, rollout: Rollout) -> None:
        score, task = score_of(rollout, self.scorer.score_key), rollout.total_reward
        judged = score - self.unfinished_penalty if _is_unfinished(rollout) else score
        scale, added = shares(self.mode, judged, rm_coeff=self.rm_coeff, alpha=self.alpha)
        for step in rollout.steps:
            step.reward *= scale
        last = rollout.steps[-1]
        last.reward += added
        last.info.update({SCORE_INFO: score, TASK_REWARD_INFO: task})


def _is_unfinished(rollout: Rollout) -> bool:
    last = rollout.steps[-1]
    said = last.trace.finish_reason if last.trace is not None else last.info.get("finish_reason")
    return said == "length"


def conversation_of(rollout: Rollout, system_prompt: str | None = None) -> list[Message]:
    """What was said, as messages: what the last agent that recorded it saw, and its answer; else
    observations and actions by turns."""
    messages: list[Message] = []
    for step in reversed(rollout.steps):
        if step.info.get("chat_prompt_messages"):
            messages = [*step.info["chat_prompt_messages"], {"role": "assistant", "content": step.action}]
            break
    else:
        for step in rollout.steps:
            messages += [{"role": "user", "content": step.prev_obs}, {"role": "assistant", "content": step.action}]
    if system_prompt and not any(message.get("role") == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _checked(scores: Any, expected: int) -> list[float | Exception]:
    if len(scores) != expected:
        raise GradingError(f"the reward model gave {len(scores)} scores for {expected} inputs; there must be one for each")
    return [_score_or_error(float(score)) for score in scores]


def _score_or_error(score: float) -> float | Exception:
    return score if math.isfinite(score) else GradingError(f"the reward model gave {score}; a score must be finite")


def _failure(error: Exception) -> Exception:
    """For one rollout; a failure of many is one object each would share, and raising adds to its
    traceback."""
    if isinstance(error, GradingError):
        return error
    reason = "it took too long" if isinstance(error, TimeoutError) and not str(error) else str(error)
    failure = GradingError(f"the reward model gave no score: {type(error).__name__}: {reason}")
    failure.__cause__ = error
    return failure


def _template_of(tokenizer: Any) -> bool:
    """Whether the tokenizer can render. One that is no tokenizer of transformers is trusted to."""
    return getattr(tokenizer, "chat_template", True) is not None
