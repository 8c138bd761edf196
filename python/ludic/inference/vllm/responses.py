"""Parses and checks the responses of vLLM servers: token ids, their log-probabilities, and the
weight versions that sampled them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from msgspec import Meta, Struct

from ludic.errors import InferenceError
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.servers.answers import check_served_version, drop_nulls
from ludic.inference.servers.client_tags import ClientTag
from ludic.inference.servers.errors import AbortedError
from ludic.inference.servers.http import HttpResponse, convert_answer
from ludic.inference.vllm.requests import TokenRequest
from ludic.types import ChatResponse, Routes

T = TypeVar("T")
C = TypeVar("C", bound="_Choice")


@dataclass(frozen=True)
class SampledTokens:
    """A continuation of token ids. Example: `SampledTokens([7, 9], [-0.1, -2.0], "stop", None)`
    ends with the end token 9."""

    token_ids: list[int]
    """[C] sampled ids, including the end token or the tokens of a stop string."""
    logprobs: list[float]
    """[C] log-probability of each."""
    finish_reason: str
    stop_reason: int | str | None
    """The stop token id or stop string; None for the end token and for the length limit."""
    weight_versions: list[WeightSpan] = field(default_factory=list)
    """`{"version", "start", "end"}` of each span of tokens, if the server reports it."""
    routes: Routes | None = None
    """Of the prompt and these tokens, if the server reports them."""

    @property
    def ended_by_token(self) -> bool:
        """Whether the last id is an end token rather than text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
FinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call", "content_filter", "repetition", "error"]


class WeightSpan(TypedDict):
    """The weight version that sampled the tokens from `start` up to `end`."""

    version: str | int | None
    start: int
    end: int


class _Entry(Struct):
    logprob: float
    token_id: int | None = None


class Logprobs(Struct):
    """Log-probabilities of the sampled tokens, in either form."""

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
    logprobs: Logprobs | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None


class Continuation(Struct):
    """The fields of a response of `/inference/v1/generate` and `/v1/completions` that are read. A
    token id that is not a 31-bit integer, or an unknown `finish_reason`, is an InferenceError."""

    choices: Annotated[list[_Choice], Meta(min_length=1)]
    prompt_token_ids: list[TokenId] | None = None


class ChatMessage(Struct):
    """The answer."""

    content: str | None = None


class _ChatChoice(_Choice, kw_only=True):
    message: ChatMessage


class ChatCompletion(Struct):
    """The fields of a response of `/v1/chat/completions` that are read."""

    choices: Annotated[list[_ChatChoice], Meta(min_length=1)]
    prompt_token_ids: list[TokenId] | None = None

    def response(self) -> ChatResponse:
        """The first choice."""
        choice = _first_choice(self.choices, "the server")
        return ChatResponse(
            text=choice.message.content or "",
            completion_token_ids=choice.token_ids,
            completion_logprobs=None if choice.logprobs is None else choice.logprobs.values(),
            finish_reason=choice.finish_reason,
            prompt_token_ids=choice.prompt_token_ids if self.prompt_token_ids is None else self.prompt_token_ids,
        )


def check_tokens(
    ids: Sequence[int],
    logprobs: Sequence[float] | None,
    name: str,
    *,
    max_tokens: int,
    vocab_size: int | None,
    banned_ids: Sequence[int] = (),
) -> None:
    """Raise InferenceError for more than `max_tokens` sampled tokens, for ids or log-probabilities
    that nothing can be trained on, and for `banned_ids`."""
    from ludic.columns import find_token_fault  # loads numpy

    if logprobs is not None and len(ids) != len(logprobs):
        raise InferenceError(f"{name} returned {len(logprobs)} log-probabilities for {len(ids)} tokens; each needs one")
    if len(ids) > max_tokens:
        raise InferenceError(f"{name} returned {len(ids)} tokens; the request allows max_tokens ({max_tokens})")
    if fault := find_token_fault(ids, logprobs, vocab_size):
        raise InferenceError(f"{name} returned {fault}; serve the model that is trained")
    if drawn := set(ids).intersection(banned_ids):
        raise InferenceError(f"{name} sampled {sorted(drawn)}, tokens of images that it was told to leave out by logit_bias")


def check_versions(spans: Sequence[WeightSpan], num_tokens: int, name: str) -> None:
    """Raise InferenceError for spans outside of the tokens and for numbers that are no versions."""
    if not all(0 <= span["start"] <= span["end"] <= num_tokens for span in spans):
        raise InferenceError(f"{name} returned weight versions {str(spans)[:200]}, which must lie within {num_tokens} tokens")
    for span in spans:
        check_served_version(span["version"], name)


def read_chat_response(answer: Any) -> ChatResponse:
    """The first choice of a chat completion, which is an object of the openai package or JSON."""
    choices = _read_member(answer, "choices")
    if not choices:
        raise InferenceError(f"the server returned no choice: {str(answer)[:200]}")
    choice = choices[0]
    finish_reason = _read_member(choice, "finish_reason")
    if finish_reason == "abort":
        raise AbortedError("the server aborted the request; its partial output is discarded")
    prompt_ids = _read_member(answer, "prompt_token_ids")
    if prompt_ids is None:
        prompt_ids = _read_member(choice, "prompt_token_ids")
    ids = _read_member(choice, "token_ids")
    return ChatResponse(
        text=_read_member(_read_member(choice, "message"), "content") or "",
        completion_token_ids=None if ids is None else list(ids),
        completion_logprobs=_read_chat_logprobs(_read_member(choice, "logprobs")),
        finish_reason=finish_reason,
        prompt_token_ids=None if prompt_ids is None else list(prompt_ids),
    )


@dataclass(frozen=True)
class ResponseReader:
    """Parses the responses of one client's servers and checks them."""

    name: str
    """The servers' name in error messages."""
    vocab_size: int | None = None
    """The policy's; larger token ids are an error."""
    tag: ClientTag | None = None

    def read_chat(self, response: HttpResponse, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """The first choice of a chat completion, and the whole JSON without nulls. Raises
        InferenceError."""
        payload = drop_nulls(response.read(dict[str, Any]))
        if self.tag is not None:
            payload = self.tag.filter(payload)
        chat = (
            response.read(ChatCompletion) if self.tag is None else convert_answer(payload, ChatCompletion, self.name)
        ).response()
        spec, ids = request.return_, chat.completion_token_ids
        if spec.return_token_ids and (ids is None or chat.prompt_token_ids is None):
            raise InferenceError("the server did not return token ids; it must support return_token_ids (vLLM 0.10.2 and later)")
        if spec.return_chosen_logprobs and chat.completion_logprobs is None and ids != []:
            raise InferenceError("the server did not return the requested log-probabilities; start it without --max-logprobs 0")
        if ids is not None:
            max_tokens = request.sampling.max_tokens
            check_tokens(ids, chat.completion_logprobs, self.name, max_tokens=max_tokens, vocab_size=self.vocab_size)
        return chat.to_arrays(), payload

    def read_tokens(self, response: HttpResponse, request: TokenRequest) -> SampledTokens:
        """The first choice of a continuation of token ids. Raises InferenceError if its prompt is
        not the one that was sent, and for tokens that nothing can be trained on."""
        if self.tag is None:
            answer = response.read(Continuation)
        else:
            answer = convert_answer(self.tag.filter(response.read(dict[str, Any])), Continuation, self.name)
        name, choice = self.name, _first_choice(answer.choices, self.name)
        prompt = choice.prompt_token_ids if answer.prompt_token_ids is None else answer.prompt_token_ids
        ids, logprobs = choice.token_ids, choice.logprobs or Logprobs()
        if ids is None or prompt is None:
            raise InferenceError(f"{name} returned no token ids; it must support return_token_ids (vLLM 0.10.2 and later)")
        if prompt != list(request.prompt_ids):
            raise InferenceError(_describe_other_prompt(name, prompt, request))
        values = logprobs.values()
        check_tokens(
            ids,
            values,
            name,
            max_tokens=request.sampling.max_tokens,
            vocab_size=self.vocab_size,
            banned_ids=request.banned_ids,
        )
        if logprobs.token_logprobs is None and any(
            entry.token_id not in (None, token) for entry, token in zip(logprobs.content or (), ids, strict=True)
        ):
            raise InferenceError(f"{name} returned log-probabilities of other tokens than the sampled ones")
        spans = choice.weight_versions or []
        check_versions(spans, len(ids), name)
        routes = None if choice.routed_experts is None else _read_routes(choice.routed_experts, len(prompt) + len(ids), name)
        return SampledTokens(ids, values, choice.finish_reason, choice.stop_reason, spans, routes)


def _read_routes(encoded: str, num_tokens: int, name: str) -> Routes:
    """The experts of vLLM's `routed_experts`: [R, layers, top_k] of uint8 or uint16, as base64 of
    an `.npy` file, with R up to the number of tokens. Raises InferenceError for anything else."""
    from zipfile import BadZipFile

    import numpy as np

    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, BadZipFile) as error:
        raise InferenceError(f"{name} returned routed_experts that cannot be read: {error}") from error
    is_known = isinstance(experts, np.ndarray) and experts.dtype in (np.uint8, np.uint16) and experts.ndim == 3
    if not is_known or len(experts) > num_tokens or not experts.size:
        shown = f"{getattr(experts, 'dtype', type(experts).__name__)} {list(getattr(experts, 'shape', ()))}"
        raise InferenceError(
            f"{name} returned routed_experts {shown} for {num_tokens} tokens; they are uint8 or uint16 [R, L, K]"
        )
    data = np.ascontiguousarray(experts, dtype=f"<u{experts.itemsize}").tobytes()
    return Routes(data, experts.shape[1], experts.shape[2], experts.itemsize)


def _describe_other_prompt(name: str, prompt: Sequence[int], request: TokenRequest) -> str:
    fault = f"{name} read a prompt of {len(prompt)} tokens, not the {len(request.prompt_ids)} that were sent"
    if not request.images:
        return fault
    pairs = enumerate(zip(prompt, request.prompt_ids, strict=False))
    first = next((place for place, (read, sent) in pairs if read != sent), min(len(prompt), len(request.prompt_ids)))
    number = max(1, sum(span.start <= first for span in request.images))
    span = request.images[number - 1]
    return (
        f"{fault}: they differ from token {first} on, at image {number} of {len(request.images)} ({span.digest}, {span.length} tokens "
        "here); serve the model's own processor, with the same images.min_pixels and images.max_pixels"
    )


def _first_choice(choices: Sequence[C], name: str) -> C:
    """The first choice. Raises AbortedError if the server aborted it."""
    if choices[0].finish_reason in ("abort", "error"):
        raise AbortedError(f"{name} aborted the request; its partial output is discarded")
    return choices[0]


def _read_chat_logprobs(logprobs: Any) -> list[float] | None:
    """The log-probabilities of the sampled tokens, from any of the three forms that servers use."""
    if logprobs is None:
        return None
    for key in ("token_logprobs", "logprobs"):
        values = _read_member(logprobs, key)
        if values is not None:
            return [float(value) for value in values]
    content = _read_member(logprobs, "content")
    return None if content is None else [float(_read_member(entry, "logprob")) for entry in content]


def _read_member(whole: Any, name: str) -> Any:
    """An attribute of an object of the openai package, or the value of a key of JSON."""
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
