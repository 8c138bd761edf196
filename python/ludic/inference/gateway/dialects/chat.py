"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ludic.inference.gateway.dialects import base
from ludic.types import Message

PATH = "/v1/chat/completions"
PING = b": ping\n\n"
ID = "chatcmpl-"
error_body = base.openai_error


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
    content: base.Content = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Tool(Struct, frozen=True):
    function: _Function


class _Choice(Struct, frozen=True):
    function: _Function = _Function()


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class _Body(base.Body):
    messages: list[_Message] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    response_format: base.Format | None = None


def read(body: bytes, *, ignore_format: bool = False) -> base.Ask:
    """The request. Raises CallError for one that is malformed or asks for what a sampled model
    cannot give."""
    given = base.decode(body, _Body)
    if not given.messages:
        raise base.CallError("messages is missing or empty; a chat needs at least one")
    base.refuse_format(given.response_format, "response_format", ignore=ignore_format)
    choice: Any = given.tool_choice
    if isinstance(choice, _Choice):
        choice = {"type": "function", "function": {"name": choice.function.name}}
    return base.Ask(
        messages=[_read_message(message, index) for index, message in enumerate(given.messages)],
        tools=[base.make_tool(t.function.name, t.function.description, t.function.parameters) for t in given.tools or ()],
        tool_choice=choice,
        n=1 if given.n is None else given.n,
        max_tokens=given.max_completion_tokens or given.max_tokens,
        stop=[given.stop] if isinstance(given.stop, str) else given.stop or [],
        logprobs=bool(given.logprobs),
        include_usage=bool(given.stream_options and given.stream_options.include_usage),
        **given.shared(),
    )


def _read_message(message: _Message, index: int) -> Message:
    made: Message = {
        "role": "system" if message.role == "developer" else message.role,
        "content": base.read_content(message.content, f"messages[{index}].content", message.role),
    }
    if message.tool_calls:
        made["tool_calls"] = [base.make_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        made["reasoning_content"] = reasoning
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id or ""
        made |= {"name": message.name} if message.name else {}
    return made


def write(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> dict[str, Any]:
    """The body of a whole answer."""
    choices = []
    for index, answer in enumerate(answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text if answer.text or not answer.tool_calls else None}
        message |= {"reasoning_content": answer.reasoning} if answer.reasoning is not None else {}
        message |= {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {}
        choices.append({"index": index, "message": message, "finish_reason": answer.finish_reason, **_logprobs(ask, answer)})
    shared = {"id": ident, "object": "chat.completion", "created": base.now(), "model": ask.model}
    return {**shared, "choices": choices, "usage": usage(answers)}


def stream(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> base.Events:
    """The answer as events."""
    shared = {"id": ident, "object": "chat.completion.chunk", "created": base.now(), "model": ask.model}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        return base.event({**shared, "choices": [{"index": index, "delta": delta, "finish_reason": finish, **more}]})

    for index, answer in enumerate(answers):
        thought = {"reasoning_content": answer.reasoning} if answer.reasoning is not None else {}
        yield chunk(index, {"role": "assistant", "content": answer.text, **thought}, **_logprobs(ask, answer))
        for number, call in enumerate(answer.tool_calls):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, answer.finish_reason)
    if ask.include_usage:
        yield base.event({**shared, "choices": [], "usage": usage(answers)})
    yield b"data: [DONE]\n\n"


def usage(answers: Sequence[base.Answered]) -> dict[str, Any]:
    """Counts of tokens in OpenAI's form."""
    prompt, sampled = answers[0].num_prompt, sum(answer.num_completion for answer in answers)
    details = {"cached_tokens": answers[0].num_cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": details,
    }


def _logprobs(ask: base.Ask, answer: base.Answered) -> dict[str, Any]:
    """The field of a choice that has them, if they were asked for."""
    content = [
        {"token": text, "logprob": logp, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, logp in answer.logprobs
    ]
    return {"logprobs": {"content": content}} if ask.logprobs else {}
