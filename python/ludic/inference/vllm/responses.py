"""Parses and checks the responses of vLLM servers: token ids, their log-probabilities, and the
weight versions that sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from msgspec import Meta, Struct

from ludic.errors import InferenceError
from ludic.inference.request import ChatCompletionRequest, ReturnSpec
from ludic.inference.servers.answers import without_nulls
from ludic.inference.servers.calls import convert_answer
from ludic.inference.servers.client_tags import ClientTag
from ludic.inference.servers.errors import AbortedError
from ludic.inference.servers.http import HttpResponse
from ludic.inference.servers.weight_versions import served_version
from ludic.inference.vllm.requests import TokenRequest
from ludic.types import ChatResponse

T = TypeVar("T")
C = TypeVar("C", bound="_Choice")


@dataclass(frozen=True)
class SampledTokens:
    """A continuation of token ids. Example: `SampledTokens([7, 9], [-0.1, -2.0], "stop", None)`
    ended with the end token 9."""

    token_ids: list[int]
    """[C] sampled ids, including the end token or the tokens of a stop string."""
    logprobs: list[float]
    """[C] log-probability of each."""
    finish_reason: str
    stop_reason: int | str | None
    """The stop token id or stop string; None for the end token and for the length limit."""
    weight_versions: list[WeightSpan] = field(default_factory=list)
    """`{"version", "start", "end"}` of each span of tokens, if the server reports it."""

    @property
    def ended_by_token(self) -> bool:
        """Whether the last id is an end token rather than text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
FinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call", "content_filter", "repetition", "error"]
LOGP_TOLERANCE = 1e-3
"""How far above 0 rounding may lift a log-probability."""


class WeightSpan(TypedDict):
    """The weight version that sampled the tokens from `start` up to `end`."""

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
    """Response of `/inference/v1/generate` and `/v1/completions`, the fields that are read. A token
    id that is no 31-bit integer, or an unknown `finish_reason`, is an InferenceError."""

    choices: list[_Choice]
    prompt_token_ids: list[TokenId] | None = None


class _Message(Struct):
    content: str | None = None


class _ChatChoice(_Choice, kw_only=True):
    message: _Message


class ChatCompletion(Struct):
    """Response of `/v1/chat/completions`, the fields that are read."""

    choices: list[_ChatChoice]
    prompt_token_ids: list[TokenId] | None = None

    def response(self) -> ChatResponse:
        """The first choice."""
        choice = _first(self.choices, "the server")
        return ChatResponse(
            text=choice.message.content or "",
            completion_token_ids=choice.token_ids,
            completion_logprobs=None if choice.logprobs is None else choice.logprobs.values(),
            finish_reason=choice.finish_reason,
            prompt_token_ids=choice.prompt_token_ids if self.prompt_token_ids is None else self.prompt_token_ids,
        )


def check_length(ids: Sequence[int], max_tokens: int, name: str) -> None:
    """Raise InferenceError for more than `max_tokens` tokens."""
    if len(ids) > max_tokens:
        raise InferenceError(f"{name} gave {len(ids)} tokens; the request allows max_tokens ({max_tokens})")


def check_vocabulary(ids: Sequence[int], vocab_size: int | None, name: str) -> None:
    """Raise InferenceError for ids that the policy has no embedding for."""
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise InferenceError(
            f"{name} gave the token id {max(ids)}, and the policy's vocabulary has {vocab_size}; serve the model that is trained"
        )


def chat_response(answer: Any) -> ChatResponse:
    """The first choice of a chat completion of the openai package, or of its JSON."""
    choices = _part(answer, "choices")
    if not choices:
        raise InferenceError(f"the server answered without a choice: {str(answer)[:200]}")
    choice = choices[0]
    finish_reason = _part(choice, "finish_reason")
    if finish_reason == "abort":
        raise AbortedError("the server aborted the request; its partial output is discarded")
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


@dataclass(frozen=True)
class ResponseReader:
    """Parses the responses of one client's servers and checks them."""

    name: str
    """Of the servers, for messages."""
    vocab_size: int | None = None
    """Of the policy: larger token ids are an error."""
    tag: ClientTag | None = None

    def read_chat(self, response: HttpResponse, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """The first choice of a chat completion, and the whole JSON without nulls. Raises
        InferenceError."""
        payload = without_nulls(response.read(dict[str, Any]))
        if self.tag is not None:
            payload = self.tag.filter(payload)
        chat = (
            response.read(ChatCompletion) if self.tag is None else convert_answer(payload, ChatCompletion, self.name)
        ).response()
        _check_requested(chat, request.return_)
        for ids in (chat.prompt_token_ids, chat.completion_token_ids):
            check_vocabulary(ids or (), self.vocab_size, self.name)
        check_length(chat.completion_token_ids or (), request.sampling.max_tokens, self.name)
        return chat, payload

    def read_tokens(self, response: HttpResponse, request: TokenRequest) -> SampledTokens:
        """The first choice of a continuation of token ids. Raises InferenceError."""
        if self.tag is None:
            continuation = response.read(Continuation)
        else:
            continuation = convert_answer(self.tag.filter(response.read(dict[str, Any])), Continuation, self.name)
        sampled = _sampled_tokens(continuation, request.prompt_ids, name=self.name)
        check_length(sampled.token_ids, request.sampling.max_tokens, self.name)
        check_vocabulary(sampled.token_ids, self.vocab_size, self.name)
        for span in sampled.weight_versions:
            served_version(span["version"], self.name)
        return sampled


def _check_requested(response: ChatResponse, spec: ReturnSpec) -> None:
    """Raise InferenceError if the response lacks the token ids of prompt and completion, or the
    log-probabilities, that were asked for."""
    if spec.return_token_ids and (response.completion_token_ids is None or response.prompt_token_ids is None):
        raise InferenceError(
            "the server returned no token ids although they were asked for; it must support return_token_ids (vLLM 0.10.2 and later)"
        )
    if spec.return_chosen_logprobs and response.completion_logprobs is None and response.completion_token_ids != []:
        raise InferenceError(
            "the server returned no log-probabilities although they were asked for; start it without --max-logprobs 0"
        )
    if response.completion_token_ids is not None and response.completion_logprobs is not None:
        check_logprobs(response.completion_token_ids, response.completion_logprobs)


def _sampled_tokens(answer: Continuation, prompt_ids: Sequence[int], *, name: str) -> SampledTokens:
    """The first choice. Raises InferenceError if its prompt is not the one that was sent."""
    choice = _first(answer.choices, name)
    read = choice.prompt_token_ids if answer.prompt_token_ids is None else answer.prompt_token_ids
    _check_prompt(list(prompt_ids), read, name)
    ids, listed = choice.token_ids, choice.logprobs or _Logprobs()
    if ids is None:
        raise InferenceError(f"{name} gave no token ids; it must support return_token_ids (vLLM 0.10.2 and later)")
    logprobs = listed.values()
    check_logprobs(ids, logprobs)
    if listed.token_logprobs is None and any(
        entry.token_id is not None and entry.token_id != sampled for entry, sampled in zip(listed.content or (), ids, strict=True)
    ):
        raise InferenceError(f"{name} gave log-probabilities of other tokens than the sampled ones")
    spans = choice.weight_versions or []
    if not all(0 <= span["start"] <= span["end"] <= len(ids) for span in spans):
        raise InferenceError(f"{name} gave the versions {str(spans)[:200]} for {len(ids)} tokens; they must lie within these")
    return SampledTokens(ids, logprobs, choice.finish_reason, choice.stop_reason, spans)


def _first(choices: Sequence[C], name: str) -> C:
    """Raises InferenceError if there is none, AbortedError if the server aborted it."""
    if not choices:
        raise InferenceError(f"{name} answered without a choice")
    if choices[0].finish_reason in ("abort", "error"):
        raise AbortedError(f"{name} aborted the request; its partial output is discarded")
    return choices[0]


def _check_prompt(sent: list[int], read: list[int] | None, name: str) -> None:
    if read is None:
        raise InferenceError(
            f"{name} did not report the prompt that it read; it must echo prompt_token_ids when return_token_ids is set"
        )
    if read != sent:
        raise InferenceError(
            f"{name} read a prompt of {len(read)} tokens, not the {len(sent)} tokens that were sent; nothing on the way to the model "
            "may change token ids"
        )


def check_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Raise InferenceError unless there is one log-probability for each token, finite and at most
    0."""
    if len(ids) != len(logprobs):
        raise InferenceError(
            f"the server gave {len(logprobs)} log-probabilities for {len(ids)} tokens; there must be one for each"
        )
    if not all(map(math.isfinite, logprobs)):
        raise InferenceError("the server's log-probabilities are not finite; check its weights and its number format")
    if logprobs and max(logprobs) > LOGP_TOLERANCE:
        raise InferenceError(
            f"the server gave the log-probability {max(logprobs):g}; it must be at most 0: start it with --logprobs-mode "
            "processed_logprobs or raw_logprobs, so that it does not return logits"
        )


def _chat_logprobs(logprobs: Any) -> list[float] | None:
    """The log-probabilities of the sampled tokens, from any of the three forms that servers use."""
    if logprobs is None:
        return None
    for key in ("token_logprobs", "logprobs"):
        values = _part(logprobs, key)
        if values is not None:
            return [float(value) for value in values]
    content = _part(logprobs, "content")
    return None if content is None else [float(_part(entry, "logprob")) for entry in content]


def _part(whole: Any, name: str) -> Any:
    """An attribute of an object of the openai package, or a key of JSON."""
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
