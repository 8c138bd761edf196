"""Scores rollouts with a reward model. A score is stored in the rollout's meta for credit
assignment (`RewardModelScorer`), or used as the reward (`RewardModelReward`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from ludic.errors import ConfigError, DataError, GradingError, check_value
from ludic.event_loop import await_if_needed
from ludic.images.content import show_content
from ludic.inference.prompts.template import ChatTemplate, read_template_kwargs
from ludic.inference.reward_types import ImageTokens, ScoringInput
from ludic.training.credit_assignment import CombineMode, read_score, score_coefficients
from ludic.training.types import RolloutScorer
from ludic.types import Message, Rollout, TokenTrace, read_list, stored

logger = logging.getLogger(__name__)

RenderFn = Callable[[Rollout], str]
Scored = ScoringInput | ImageTokens
"""What a client scores."""
SCORE_INFO = "rewards/reward_model"
TASK_REWARD_INFO = "rewards/task"


class RewardModelClient(Protocol):
    """A client of a reward model. A client that can also score token ids has
    `reads_ids_of(tokenizer)`: whether `score_batch` accepts lists of this tokenizer's ids."""

    async def score_batch(self, inputs: list[Any], *, normalize: bool = True) -> list[float]:
        """Return [N] scores, one per input. A DataError means that an input is invalid; the other
        inputs are then scored without it."""
        ...


@dataclass
class RewardModelScorer:
    """Writes the reward model's score of each rollout to `rollout.meta[score_key]`. Rewards do not
    change.

    Use it as `RolloutEngine(scorer=...)`: a rollout that cannot be scored is a failed episode and
    does not count as a score of 0. Called directly, it returns the errors by rollout id; the credit
    assigner then raises for a rollout without a score.

    The input of the reward model is the first of these that applies:

    1. the text of `render_fn`, if set;
    2. with `use_chat_template`, the conversation as rendered by `tokenizer`: the messages of the
       last step's prompt and its answer, or else observations and actions in turn, after
       `system_prompt` if they have no system message;
    3. the sampled tokens of the last step, prompt and completion, if `policy_tokenizer` is set and
       the client can score its token ids; with their images, if it has `reads_images`;
    4. observations and actions as text, one per line.

    `meta[score_key + "_from"]` is `tokens` or `text`. Text is an approximation: it is tokenised
    again and has no end token, so the reward model may score other tokens than those that were
    sampled.

    Equal inputs are scored once per call, so equal answers have exactly equal scores. The client is
    called with `batch_size` inputs at a time; all calls run concurrently, each limited to
    `timeout_s` seconds.
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
    """Passed to the client. True: scores in (0, 1). False: the model's raw scores, for modes
    that use differences of scores."""
    timeout_s: float = 600.0
    step_end: str | int | None = None
    """Text or token id that ends a step. Then the sampled tokens of the last answer are scored up
    to the end of each step, `meta[score_key + "_steps"]` has [token, score] of each, and the score
    is their sum."""

    def __post_init__(self) -> None:
        check_value("batch_size", self.batch_size, least=1)
        check_value("timeout_s", self.timeout_s, above=0)
        if self.step_end == "":
            raise ConfigError("step_end ('') must be text that ends a step, such as a blank line, or the id of a token")
        # An object without `chat_template`, no transformers tokenizer, is assumed to have one.
        has_template = hasattr(self.tokenizer, "apply_chat_template") and getattr(self.tokenizer, "chat_template", "") is not None
        if self.use_chat_template and not has_template:
            raise ConfigError("use_chat_template needs a tokenizer with a chat template; pass it as tokenizer")
        self._takes_ids: bool | None = None

    async def score(self, rollouts: Sequence[Rollout]) -> dict[str, Exception]:
        """Score the rollouts in place. Returns rollout id -> error for rollouts without a score."""
        errors: dict[str, Exception] = {}
        inputs: dict[str, list[Scored]] = {}
        for rollout in rollouts:
            rollout.meta.pop(self.score_key, None)
            try:
                inputs[rollout.id] = self._model_inputs(rollout)
            except Exception as error:
                errors[rollout.id] = _failure(error)
        distinct = list(dict.fromkeys(each for listed in inputs.values() for each in listed))
        batches = [distinct[start : start + self.batch_size] for start in range(0, len(distinct), self.batch_size)]
        results = await asyncio.gather(*(self._score_batch(batch) for batch in batches))
        scores: dict[Scored, Any] = dict(zip(distinct, (score for result in results for score in result), strict=True))
        for rollout in rollouts:
            if rollout.id not in inputs:
                continue
            scored = inputs[rollout.id]
            found = [scores[each] for each in scored]
            if failures := [score for score in found if isinstance(score, Exception)]:
                errors[rollout.id] = failures[0]
                continue
            rollout.meta[self.score_key] = math.fsum(found)
            rollout.meta[f"{self.score_key}_from"] = "text" if isinstance(scored[0], str) else "tokens"
            if self.step_end is not None:
                before = 1 + len(stored(rollout.steps[-1].trace, "prompt_token_ids"))
                rollout.meta[f"{self.score_key}_steps"] = [[len(i) - before, s] for i, s in zip(scored, found, strict=True)]
        return errors

    async def _score_batch(self, inputs: Sequence[Scored]) -> list[float | Exception]:
        """Return a score or an error for each input. If the client raises DataError for the
        batch, its halves are scored separately, down to the invalid input."""
        try:
            async with asyncio.timeout(self.timeout_s):
                batch = [list(each) if isinstance(each, tuple) else each for each in inputs]
                scores = await await_if_needed(self.client.score_batch(batch, normalize=self.normalize))
            if len(scores) != len(inputs):
                raise GradingError(f"the reward model returned {len(scores)} scores for {len(inputs)} inputs, not one each")
            return [
                score if math.isfinite(score) else GradingError(f"the reward model gave {score}; a score must be finite")
                for score in map(float, scores)
            ]
        except DataError as error:
            if len(inputs) == 1:
                return [_failure(error)]
            middle = len(inputs) // 2
            return [*await self._score_batch(inputs[:middle]), *await self._score_batch(inputs[middle:])]
        except Exception as error:
            return [_failure(error)] * len(inputs)

    def _model_inputs(self, rollout: Rollout) -> list[Scored]:
        has_images = any(step.trace is not None and step.trace.images for step in rollout.steps)
        reads_images = not self.use_chat_template and bool(getattr(self.client, "reads_images", False)) and self._reads_ids()
        if self.render_fn is None and has_images and not reads_images:
            raise DataError(
                f"rollout {rollout.id} has images, which a reward model that is sent text does not see; set render_fn"
            )
        if self.step_end is None:
            return [self._model_input(rollout)]
        from ludic.training.process_rewards import find_step_ends

        trace = rollout.steps[-1].trace if rollout.steps else None
        if trace is None or not self._reads_ids():
            raise DataError(f"step_end ({self.step_end!r}) needs a reward model that reads sampled ids; pass policy_tokenizer")
        prompt, answer = read_list(trace, "prompt_token_ids"), read_list(trace, "completion_token_ids")
        ends = find_step_ends(answer, self.step_end, self.policy_tokenizer)
        return [_as_input(trace, (*prompt, *answer[: end + 1])) for end in ends]

    def _model_input(self, rollout: Rollout) -> Scored:
        if not rollout.steps:
            raise DataError(f"rollout {rollout.id} has no step; there is nothing to score")
        if self.render_fn is not None:
            return self.render_fn(rollout)
        if self.use_chat_template:
            messages = build_conversation(rollout, self.system_prompt)
            arguments = read_template_kwargs(rollout.steps[-1].info, f"rollout {rollout.id}")
            return str(ChatTemplate(self.tokenizer).apply(messages, prompt=False, tokenize=False, **arguments))
        trace = rollout.steps[-1].trace
        if trace is not None and self._reads_ids():
            return _as_input(trace, (*read_list(trace, "prompt_token_ids"), *read_list(trace, "completion_token_ids")))
        return "\n".join(text for step in rollout.steps for text in (show_content(step.prev_obs), step.action))

    def _reads_ids(self) -> bool:
        if self._takes_ids is None:
            reads_ids_of = getattr(self.client, "reads_ids_of", None)
            self._takes_ids = bool(self.policy_tokenizer is not None and reads_ids_of and reads_ids_of(self.policy_tokenizer))
            if self.policy_tokenizer is not None and not self._takes_ids:
                logger.warning("the reward model cannot score the policy's token ids; it scores text, which is tokenised again")
        return self._takes_ids


@dataclass
class RewardModelReward:
    """Uses the score as the reward, so that group-relative credit compares scores. A scorer for
    `RolloutEngine`.

    The return and the score are combined (`score_coefficients`): every step's reward is scaled, and
    the offset is added to the last step. `before` is a scorer that runs first, such as
    `RewardFunctions`; its rewards are part of the return that is combined. The info of the last
    step has both parts: `rewards/task` and `rewards/reward_model`. With `scorer.step_end`, parts of
    the offset have places, for `ProcessReward`. The rewards of `before` keep theirs at scale 1.

    `unfinished_penalty` is subtracted from the score of a rollout with a last answer that reached
    the token limit. A reward model is trained on finished answers, and its scores of other answers
    are arbitrary: policies exploited this within twenty steps and then never ended an answer.
    """

    scorer: RewardModelScorer
    mode: CombineMode = "replace"
    rm_coeff: float = 1.0
    alpha: float = 0.5
    before: RolloutScorer | None = None
    unfinished_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_value("mode", self.mode, choices=get_args(CombineMode))
        if self.mode == "multiply" and self.scorer.step_end is not None:
            raise ConfigError("mode (multiply) needs one score, and step_end gives several; set mode=replace, or add")
        check_value("unfinished_penalty", self.unfinished_penalty, "it is subtracted", least=0, below=math.inf)

    async def score(self, rollouts: Sequence[Rollout]) -> Mapping[str, Exception]:
        """Reward the rollouts in place. Returns rollout id -> error for rollouts that could not be
        rewarded."""
        errors: dict[str, Exception] = {} if self.before is None else dict(await self.before.score(rollouts))
        errors |= await self.scorer.score([rollout for rollout in rollouts if rollout.id not in errors])
        for rollout in rollouts:
            if rollout.id not in errors:
                self._reward(rollout)
        return errors

    def _reward(self, rollout: Rollout) -> None:
        score, task = read_score(rollout, self.scorer.score_key), rollout.total_reward
        last = rollout.steps[-1]
        finish_reason = last.trace.finish_reason if last.trace is not None else last.info.get("finish_reason")
        judged = score - self.unfinished_penalty if finish_reason == "length" else score
        scale, offset = score_coefficients(self.mode, judged, rm_coeff=self.rm_coeff, alpha=self.alpha)
        for step in rollout.steps:
            step.reward *= scale
            if scale != 1:
                step.info.pop("process_rewards", None)
        last.reward += offset
        for token, each in rollout.meta.get(f"{self.scorer.score_key}_steps", ()):
            _, part = score_coefficients(self.mode, each, rm_coeff=self.rm_coeff, alpha=self.alpha)
            last.info.setdefault("process_rewards", []).append([token, token, part])
        last.info.update({SCORE_INFO: score, TASK_REWARD_INFO: task})


def build_conversation(rollout: Rollout, system_prompt: str | None = None) -> list[Message]:
    """Return the conversation as messages: the recorded prompt of the last step that has one,
    and its answer; without a recorded prompt, observations and actions in turn."""
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


def _as_input(trace: TokenTrace, ids: tuple[int, ...]) -> Scored:
    return ImageTokens(ids, trace.images) if trace.images else ids


def _failure(error: Exception) -> Exception:
    """Return the error of one rollout. Each rollout gets its own error object, because raising an
    error changes its traceback."""
    if isinstance(error, GradingError):
        return error
    reason = "it took too long" if isinstance(error, TimeoutError) and not str(error) else str(error)
    failure = GradingError(f"the reward model gave no score: {type(error).__name__}: {reason}")
    failure.__cause__ = error
    return failure
