"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ludic.inference.gateway.dialects import base
from ludic.types import Message

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
PING = base.event({"type": "ping"}, "ping")
ID = "msg_"
_CHANGING = "x-anthropic-"
"""How system blocks begin that change with every request, such as a header of billing: they are no
part of the prompt."""


class _Block(Struct, frozen=True):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: base.Content = None
    source: base.Source | None = None


class _Message(Struct, frozen=True):
    role: str
    content: str | list[_Block] = ""


class _Tool(Struct, frozen=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(Struct, frozen=True):
    type: str
    name: str | None = None


class _Body(base.Body):
    messages: list[_Message] | None = None
    system: str | list[base.Part] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


def read(body: bytes, *, ignore_format: bool = False) -> base.Ask:
    """The request. Raises CallError for one that is malformed or asks for what a sampled model
    cannot give. A last message of the assistant begins the answer."""
    given = base.decode(body, _Body)
    if not given.messages:
        raise base.CallError("messages is missing or empty; a request needs at least one")
    system: Any = given.system
    if isinstance(system, list):
        system = [part for part in system if not (part.text or "").startswith(_CHANGING)]
    text = base.join_text(system, "system")
    messages: list[Message] = [{"role": "system", "content": text}] if text else []
    for index, message in enumerate(given.messages):
        messages += _read_message(message, f"messages[{index}].content")
    begun = messages.pop() if messages[-1]["role"] == "assistant" else None
    kind = given.tool_choice.type if given.tool_choice else None
    named = {"type": "function", "function": {"name": given.tool_choice.name if given.tool_choice else ""}}
    for tool in given.tools or ():
        if tool.type not in (None, "custom"):
            raise base.CallError(f"the tool {tool.name!r} of type {tool.type!r} runs on Anthropic's servers; offer your own")
    return base.Ask(
        messages=messages,
        tools=[base.make_tool(tool.name, tool.description, tool.input_schema) for tool in given.tools or ()],
        tool_choice={"any": "required", "none": "none", "tool": named}.get(kind or "auto"),  # type: ignore[arg-type]
        max_tokens=given.max_tokens,
        stop=given.stop_sequences or [],
        include_usage=True,
        begun=begun,
        **given.shared(),
    )


def _read_message(message: _Message, where: str) -> list[Message]:
    """A message for each result of a tool in it, in their order, then one of the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Message] = []
    parts, calls, thoughts = list[base.Part](), [], []
    for block in message.content:
        match block.type:
            case "text":
                parts.append(base.Part(text=block.text))
            case "image":
                parts.append(base.Part("image", source=block.source))
            case "thinking":
                thoughts.append(block.thinking)
            case "tool_use":
                calls.append(base.make_call(block.id, block.name, block.input))
            case "tool_result":
                content = base.read_content(block.content, f"{where}: a tool_result", "tool")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case "redacted_thinking":
                pass
            case other:
                raise base.CallError(f"{where} has a block of type {other!r}; the model reads text and images")
    made: Message = {"role": message.role, "content": base.read_content(parts, where, message.role)}
    made |= {"tool_calls": calls} if calls else {}
    made |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return [*results, made] if parts or calls or not results else results


def _blocks(answer: base.Answered) -> list[dict[str, Any]]:
    thought = [] if answer.reasoning is None else [{"type": "thinking", "thinking": answer.reasoning, "signature": "ludic"}]
    text = [{"type": "text", "text": answer.text}] if answer.text or not answer.tool_calls else []
    called = [(call["id"], call["function"]) for call in answer.tool_calls]
    calls = [
        {"type": "tool_use", "id": ident, "name": function["name"], "input": json.loads(function["arguments"])}
        for ident, function in called
    ]
    return [*thought, *text, *calls]


def write(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> dict[str, Any]:
    """The body of a whole answer."""
    [answer] = answers
    reasons = {"stop": "stop_sequence" if answer.stop_text else "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": ident,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": _blocks(answer),
        "stop_reason": reasons[answer.finish_reason],
        "stop_sequence": answer.stop_text,
        "usage": {
            "input_tokens": answer.num_prompt - answer.num_cached,
            "output_tokens": answer.num_completion,
            "cache_read_input_tokens": answer.num_cached,
            "cache_creation_input_tokens": 0,
        },
    }


def stream(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> base.Events:
    """The answer as events."""
    whole = write(ask, answers, ident)

    def made(kind: str, **data: Any) -> bytes:
        return base.event({"type": kind, **data}, kind)

    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**whole["usage"], "output_tokens": 1}}
    yield made("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        empty, deltas = _deltas(block)
        yield made("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield made("content_block_delta", index=index, delta=delta)
        yield made("content_block_stop", index=index)
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield made("message_delta", delta=ending, usage={"output_tokens": answers[0].num_completion})
    yield made("message_stop")


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its content, and the content."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": base.encode(block["input"]).decode()}]


def error_body(why: str, status: int, code: str | None) -> dict[str, Any]:
    """The body of an error in Anthropic's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": why}}
