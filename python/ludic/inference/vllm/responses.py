"""What a vLLM server answers, read and checked: token ids, their log-probabilities, and the
weights that sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from msgspec import Meta, Struct

from ludic.errors import InferenceError
from ludic.inference.servers.errors import AbortedError
from ludic.types import ChatResponse

T = TypeVar("T")
C = TypeVar("C", bound="_Choice")


@dataclass(frozen=True)
class SampledTokens:
    """One continuation of token ids. Example: `SampledTokens([7, 9], [-0.1, -2.0], "stop",
    None)` ended with its end token 9."""

    token_ids: list[int]
    """[C] ids sampled, the end token or the tokens of a stop string among them."""
    logprobs: list[float]
    """[C] log-probability of each."""
    finish_reason: str
    stop_reason: int | str | None
    """The token id or the text that ended it; None for the end token and for the length."""
    weight_versions: list[WeightSpan] = field(default_factory=list)
    """`{"version", "start", "end"}` of each stretch of tokens, where the server says so."""

    @property
    def ended_by_token(self) -> bool:
        """Whether the last id is an end token and no text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
FinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call", "content_filter", "repetition", "error"]
LOGP_TOLERANCE = 1e-3
"""How far above 0 a log-probability may be by rounding."""


class WeightSpan(TypedDict):
    """A stretch of sampled tokens and the weights that they are of."""

    version: str | int | None
    start: int
    end: int


class _Entry(Struct):
    logprob: float
    token_id: int | None = None


class _Logprobs(Struct):
    content: list[_Entry] | None = None
    token_logprobs: list[float] | None = None

    def values(self) -> list[float]:
        if self.token_logprobs is not None:
            return self.token_logprobs
        return [entry.logprob for entry in self.content or ()]


class _Choice(Struct, kw_only=True):
    finish_reason: FinishReason
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] | None = None


class Continuation(Struct):
    """What `/inference/v1/generate` and `/v1/completions` answer, as far as it is read. Decoding
    holds the types: an id that is no whole number of 31 bits, or a `finish_reason` that nobody
    knows, is an InferenceError."""

    choices: list[_Choice]
    prompt_token_ids: list[TokenId] | None = None


class _Message(Struct):
    content: str | None = None


class _ChatChoice(_Choice, kw_only=True):
    message: _Message


class ChatCompletion(Struct):
    """What `/v1/chat/completions` answers, as far as it is read."""

    choices: list[_ChatChoice]
    prompt_token_ids: list[TokenId] | None = None

    def response(self) -> ChatResponse:
        """What the first choice says."""
        choice = _first(self.choices, "the server")
        return ChatResponse(
            text=choice.message.content or "",
            completion_token_ids=choice.token_ids,
            completion_logprobs=None if choice.logprobs is None else choice.logprobs.values(),
            finish_reason=choice.finish_reason,
            prompt_token_ids=choice.prompt_token_ids if self.prompt_token_ids is None else self.prompt_token_ids,
        )


def check_length(ids: Sequence[int], max_tokens: int, name: str) -> None:
    """More tokens than were asked for are no answer to the request."""
    if len(ids) > max_tokens:
        raise InferenceError(f"{name} gave {len(ids)} tokens; max_tokens ({max_tokens}) is the most that was asked for")


def check_vocabulary(ids: Sequence[int], vocab_size: int | None, name: str) -> None:
    """Ids that the policy has no embedding of cannot be trained on."""
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise InferenceError(
            f"{name} gave the token id {max(ids)}, and the policy's vocabulary has {vocab_size}; serve the model that is trained"
        )


def chat_response(answer: Any) -> ChatResponse:
    """The first choice of a chat completion, whose parts are attributes or keys."""
    choices = _part(answer, "choices")
    if not choices:
        raise InferenceError(f"the server answered without a choice: {str(answer)[:200]}")
    choice = choices[0]
    finish_reason = _part(choice, "finish_reason")
    if finish_reason == "abort":
        raise AbortedError("the server aborted the request; what it had sampled is no whole answer")
    prompt_ids = _part(answer, "prompt_token_ids")
    if prompt_ids is None:
        prompt_ids = _part(choice, "prompt_token_ids")
    ids = _part(choice, "token_ids")
    return ChatResponse(
        text=_part(_part(choice, "message"), "content") or "",
        completion_token_ids=None if ids is None else list(ids),
        completion_logprobs=_chat_logprobs(_part(choice, "logprobs")),
        finish_reason=finish_reason,
        prompt_token_ids=None if prompt_ids is None else list(prompt_ids),
    )


def check_trace(response: ChatResponse, *, ids: bool, logprobs: bool) -> None:
    """Whether what was asked for came: ids of prompt and completion, and one log-probability for
    each of the latter."""
    if ids and (response.completion_token_ids is None or response.prompt_token_ids is None):
        raise InferenceError(
            "the server gave no token ids although they were asked for; it must know return_token_ids (vLLM 0.10.2 and later)"
        )
    if logprobs and response.completion_logprobs is None and response.completion_token_ids != []:
        raise InferenceError(
            "the server gave no log-probabilities although they were asked for; start it without --max-logprobs 0"
        )
    if response.completion_token_ids is not None and response.completion_logprobs is not None:
        check_logprobs(response.completion_token_ids, response.completion_logprobs)


def sampled_tokens(answer: Continuation, prompt_ids: Sequence[int], *, name: str) -> SampledTokens:
    """The first choice, whose prompt must be the one that was sent."""
    choice = _first(answer.choices, name)
    read = choice.prompt_token_ids if answer.prompt_token_ids is None else answer.prompt_token_ids
    _check_prompt(list(prompt_ids), read, name)
    ids, listed = choice.token_ids, choice.logprobs or _Logprobs()
    if ids is None:
        raise InferenceError(f"{name} gave no token ids; it must know return_token_ids (vLLM 0.10.2 and later)")
    logprobs = listed.values()
    check_logprobs(ids, logprobs)
    if listed.token_logprobs is None and any(
        entry.token_id is not None and entry.token_id != sampled for entry, sampled in zip(listed.content or (), ids, strict=True)
    ):
        raise InferenceError(f"{name} gave log-probabilities of other tokens than those that it sampled")
    spans = choice.weight_versions or []
    if not all(0 <= span["start"] <= span["end"] <= len(ids) for span in spans):
        raise InferenceError(f"{name} gave the versions {str(spans)[:200]} for {len(ids)} tokens; they must lie within these")
    return SampledTokens(ids, logprobs, choice.finish_reason, choice.stop_reason, spans)


def _first(choices: Sequence[C], name: str) -> C:
    """Raises InferenceError where there is none, AbortedError where the server gave up on it."""
    if not choices:
        raise InferenceError(f"{name} answered without a choice")
    if choices[0].finish_reason in ("abort", "error"):
        raise AbortedError(f"{name} aborted the request; what it had sampled is no whole answer")
    return choices[0]


def _check_prompt(sent: list[int], read: list[int] | None, name: str) -> None:
    if read is None:
        raise InferenceError(
            f"{name} did not say which prompt it read; it must echo prompt_token_ids when return_token_ids is set"
        )
    if read != sent:
        raise InferenceError(
            f"{name} read a prompt of {len(read)} tokens that is not the one of {len(sent)} that was sent; nothing between here and the "
            "model may change token ids"
        )


def check_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """One for each token, finite, and none above 0."""
    if len(ids) != len(logprobs):
        raise InferenceError(
            f"the server gave {len(logprobs)} log-probabilities for {len(ids)} tokens; there must be one for each"
        )
    if not all(map(math.isfinite, logprobs)):
        raise InferenceError("the server's log-probabilities are not finite; check its weights and its number format")
    if logprobs and max(logprobs) > LOGP_TOLERANCE:
        raise InferenceError(
            f"the server gave the log-probability {max(logprobs):g}; none is above 0: it must run with --logprobs-mode "
            "processed_logprobs or raw_logprobs, and not give logits"
        )


def _chat_logprobs(logprobs: Any) -> list[float] | None:
    """Of the sampled tokens, in whichever of three forms they come."""
    if logprobs is None:
        return None
    for key in ("token_logprobs", "logprobs"):
        values = _part(logprobs, key)
        if values is not None:
            return [float(value) for value in values]
    content = _part(logprobs, "content")
    return None if content is None else [float(_part(entry, "logprob")) for entry in content]


def _part(whole: Any, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
