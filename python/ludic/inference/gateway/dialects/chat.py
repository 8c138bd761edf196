"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ludic.inference.gateway.dialects.base import (
    Answered,
    Ask,
    CallError,
    Content,
    Events,
    Sampling,
    decode,
    encode,
    event,
    join_text,
    make_call,
    make_tool,
    now,
    openai_error,
)
from ludic.types import Message

PATH = "/v1/chat/completions"
PING = b": ping\n\n"
ID = "chatcmpl-"
error_body = openai_error


class _Function(Struct, frozen=True):
    name: str = ""
    arguments: str | dict[str, Any] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Call(Struct, frozen=True):
    function: _Function
    id: str | None = None


class _Message(Struct, frozen=True):
    role: str
    content: Content = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Tool(Struct, frozen=True):
    function: _Function


class _Choice(Struct, frozen=True):
    function: _Function = _Function()


class _Format(Struct, frozen=True):
    type: str = "text"


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class _Body(Sampling):
    messages: list[_Message] | None = None
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    response_format: _Format | None = None


def read(body: bytes, *, ignore_format: bool = False) -> Ask:
    """The request. Raises CallError for one that is malformed or asks for what a sampled model
    cannot give."""
    given = decode(body, _Body)
    if not given.messages:
        raise CallError("messages is missing or empty; a chat needs at least one")
    refuse_format(given.response_format.type if given.response_format else "text", "response_format", ignore=ignore_format)
    choice: Any = given.tool_choice
    if isinstance(choice, _Choice):
        choice = {"type": "function", "function": {"name": choice.function.name}}
    return Ask(
        messages=[_read_message(message, index) for index, message in enumerate(given.messages)],
        model=given.model,
        tools=[make_tool(t.function.name, t.function.description, t.function.parameters) for t in given.tools or ()],
        tool_choice=choice,
        stream=bool(given.stream),
        n=1 if given.n is None else given.n,
        max_tokens=given.max_completion_tokens or given.max_tokens,
        stop=[given.stop] if isinstance(given.stop, str) else given.stop or [],
        logprobs=bool(given.logprobs),
        include_usage=bool(given.stream_options and given.stream_options.include_usage),
        sampling=given.given(),
    )


def refuse_format(kind: str, field: str, *, ignore: bool) -> None:
    """Raise CallError for a format that needs constrained decoding."""
    if kind != "text" and not ignore:
        raise CallError(
            f"{field} {kind!r} needs constrained decoding, whose tokens are no samples of the model; agent.unsupported=ignore "
            "answers without it"
        )


def _read_message(message: _Message, index: int) -> Message:
    made: Message = {
        "role": "system" if message.role == "developer" else message.role,
        "content": join_text(message.content, f"messages[{index}].content"),
    }
    if message.tool_calls:
        made["tool_calls"] = [make_call(call.id, call.function.name, arguments_of(call.function)) for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        made["reasoning_content"] = reasoning
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id or ""
        made |= {"name": message.name} if message.name else {}
    return made


def arguments_of(function: _Function) -> str:
    """The arguments as JSON text."""
    given = function.arguments
    return given if isinstance(given, str) else encode(given or {}).decode()


def write(ask: Ask, answers: Sequence[Answered], ident: str) -> dict[str, Any]:
    """The body of a whole answer."""
    choices = []
    for index, answer in enumerate(answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text if answer.text or not answer.tool_calls else None}
        message |= {"reasoning_content": answer.reasoning} if answer.reasoning is not None else {}
        message |= {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {}
        choice = {"index": index, "message": message, "finish_reason": answer.finish_reason}
        if ask.logprobs:
            choice["logprobs"] = {"content": [logprob_entry(*pair) for pair in answer.logprobs]}
        choices.append(choice)
    shared = {"id": ident, "object": "chat.completion", "created": now(), "model": ask.model}
    return {**shared, "choices": choices, "usage": usage(answers)}


def stream(ask: Ask, answers: Sequence[Answered], ident: str) -> Events:
    """The answer as events."""
    shared = {"id": ident, "object": "chat.completion.chunk", "created": now(), "model": ask.model}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        return event({**shared, "choices": [{"index": index, "delta": delta, "finish_reason": finish, **more}]})

    for index, answer in enumerate(answers):
        thought = {"reasoning_content": answer.reasoning} if answer.reasoning is not None else {}
        probs: dict[str, Any] = (
            {"logprobs": {"content": [logprob_entry(*pair) for pair in answer.logprobs]}} if ask.logprobs else {}
        )
        yield chunk(index, {"role": "assistant", "content": answer.text, **thought}, **probs)
        for number, call in enumerate(answer.tool_calls):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, answer.finish_reason)
    if ask.include_usage:
        yield event({**shared, "choices": [], "usage": usage(answers)})
    yield b"data: [DONE]\n\n"


def usage(answers: Sequence[Answered]) -> dict[str, Any]:
    """Counts of tokens in OpenAI's form."""
    prompt, sampled = answers[0].num_prompt, sum(answer.num_completion for answer in answers)
    details = {"cached_tokens": answers[0].num_cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": details,
    }


def logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    """One token of `logprobs`."""
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
