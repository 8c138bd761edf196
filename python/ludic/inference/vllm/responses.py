"""What a vLLM server answers, read and checked: token ids, their log-probabilities, and the weights that sampled them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.errors import InferenceError
from ludic.inference.servers.answers import without_nulls
from ludic.inference.servers.errors import AbortedError
from ludic.inference.servers.http import Answer
from ludic.types import ChatResponse


@dataclass(frozen=True)
class SampledTokens:
    """One continuation of token ids. Example: `SampledTokens([7, 9], [-0.1, -2.0], "stop", None)` ended with its end token 9."""

    token_ids: list[int]
    """[C] ids sampled, the end token or the tokens of a stop string among them."""
    logprobs: list[float]
    """[C] log-probability of each."""
    finish_reason: str
    stop_reason: int | str | None
    """The token id or the text that ended it; None for the end token and for the length."""
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    """`{"version", "start", "end"}` of each stretch of tokens, where the server says so."""

    @property
    def ended_by_token(self) -> bool:
        """Whether the last id is an end token and no text."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


def answer_object(answer: Answer, url: str) -> dict[str, Any]:
    """An answer as a JSON object."""
    payload = without_nulls(answer.json())
    if not isinstance(payload, dict):
        raise InferenceError(f"{url} answered {answer.quoted()}, which is no JSON object; is this the right address?")
    return payload


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
    """Whether what was asked for came: ids of prompt and completion, and one log-probability for each of the latter."""
    if ids and (response.completion_token_ids is None or response.prompt_token_ids is None):
        raise InferenceError(
            "the server gave no token ids although they were asked for; it must know return_token_ids (vLLM 0.10.2 and later)"
        )
    if logprobs and response.completion_logprobs is None and response.completion_token_ids != []:
        raise InferenceError(
            "the server gave no log-probabilities although they were asked for; start it without --max-logprobs 0"
        )
    if response.completion_token_ids is not None and response.completion_logprobs is not None:
        _check_logprobs(response.completion_token_ids, response.completion_logprobs)


def sampled_tokens(payload: Mapping[str, Any], prompt_ids: Sequence[int], *, name: str) -> SampledTokens:
    """The first choice of `/inference/v1/generate` or of `/v1/completions`, whose prompt must be the one that was sent."""
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise InferenceError(f"{name} answered without a choice: {str(dict(payload))[:200]}")
    if choice.get("finish_reason") == "abort":
        raise AbortedError(f"{name} aborted the request; what it had sampled is no whole answer")
    read = payload.get("prompt_token_ids", choice.get("prompt_token_ids"))
    if read is None:
        read = choice.get("prompt_token_ids")
    _check_prompt(list(prompt_ids), read, name)
    ids, listed = choice.get("token_ids"), _listed_logprobs(choice.get("logprobs"))
    if not isinstance(ids, list):
        raise InferenceError(f"{name} gave no token ids; it must know return_token_ids (vLLM 0.10.2 and later)")
    logprobs = [logprob for _, logprob in listed]
    _check_logprobs(ids, logprobs)
    if any(token is not None and token != sampled for (token, _), sampled in zip(listed, ids, strict=True)):
        raise InferenceError(f"{name} gave log-probabilities of other tokens than those that it sampled")
    return SampledTokens(
        ids, logprobs, str(choice.get("finish_reason")), choice.get("stop_reason"), list(choice.get("weight_versions") or [])
    )


def _check_prompt(sent: list[int], read: object, name: str) -> None:
    if read is None:
        raise InferenceError(
            f"{name} did not say which prompt it read; it must echo prompt_token_ids when return_token_ids is set"
        )
    if read != sent:
        raise InferenceError(
            f"{name} read a prompt of {len(read) if isinstance(read, list) else read} tokens that is not the one of {len(sent)} that "
            "was sent; nothing between here and the model may change token ids"
        )


def _check_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(ids) != len(logprobs):
        raise InferenceError(
            f"the server gave {len(logprobs)} log-probabilities for {len(ids)} tokens; there must be one for each"
        )
    if not all(map(math.isfinite, logprobs)):
        raise InferenceError("the server's log-probabilities are not finite; check its weights and its number format")


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


def _listed_logprobs(logprobs: object) -> list[tuple[int | None, float]]:
    """(token id where it is said, log-probability) of each sampled token."""
    if not isinstance(logprobs, Mapping):
        return []
    if isinstance(logprobs.get("token_logprobs"), list):
        return [(None, float(value)) for value in logprobs["token_logprobs"]]
    return [(entry.get("token_id"), float(entry["logprob"])) for entry in logprobs.get("content") or []]


def _part(whole: Any, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)
