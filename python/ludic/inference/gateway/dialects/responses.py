"""OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from ludic.inference.gateway.dialects import base
from ludic.types import Message

PATH = "/v1/responses"
PING = b": ping\n\n"
ID = "resp_"
error_body = base.openai_error


class _Item(Struct, frozen=True):
    type: str = "message"
    role: str = "user"
    content: base.Content = None
    summary: list[base.Part] = []
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[base.Part] | None = None


class _Tool(Struct, frozen=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Choice(Struct, frozen=True):
    name: str = ""


class _Text(Struct, frozen=True):
    format: base.Format = base.Format()


class _Body(base.Body):
    input: str | list[_Item] | None = None
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    max_output_tokens: int | None = None
    text: _Text | None = None
    previous_response_id: str | None = None
    conversation: Any = None


def read(body: bytes, *, ignore_format: bool = False) -> base.Ask:
    """The request. Raises CallError for one that is malformed or asks for what a sampled model
    cannot give."""
    given = base.decode(body, _Body)
    base.refuse_format(given.text.format if given.text else None, "text.format", ignore=ignore_format)
    if given.conversation:
        raise base.CallError("conversation is not kept here; send previous_response_id, or the whole input")
    items = [_Item(content=given.input)] if isinstance(given.input, str) else given.input or []
    if not items:
        raise base.CallError("input is missing or empty; send a text or items")
    messages: list[Message] = [{"role": "system", "content": given.instructions}] if given.instructions else []
    turn: Message | None = None
    for index, item in enumerate(items):
        turn = _read_item(item, f"input[{index}]", messages, turn)
    for tool in given.tools or ():
        if tool.type != "function":
            raise base.CallError(f"a tool of type {tool.type!r} runs on OpenAI's servers; offer functions")
    choice: Any = given.tool_choice
    if isinstance(choice, _Choice):
        choice = {"type": "function", "function": {"name": choice.name}}
    return base.Ask(
        messages=messages,
        tools=[base.make_tool(tool.name, tool.description, tool.parameters) for tool in given.tools or ()],
        tool_choice=choice,
        max_tokens=given.max_output_tokens,
        include_usage=True,
        previous=given.previous_response_id,
        num_instructions=1 if given.instructions else 0,
        **given.shared(),
    )


def _read_item(item: _Item, where: str, messages: list[Message], turn: Message | None) -> Message | None:
    """Add an item to the messages. Items of one turn of the assistant, which is `turn` if one is
    open, are one message. Returns the open turn."""
    if item.type == "function_call_output":
        content = base.read_content(item.output, f"{where}.output", "tool")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        return None
    if item.type == "message" and item.role != "assistant":
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": base.read_content(item.content, f"{where}.content", role)})
        return None
    if item.type not in ("message", "reasoning", "function_call"):
        raise base.CallError(f"{where} has the type {item.type!r}; the model reads messages, reasoning and calls of functions")
    begins = {"message": ("content", "tool_calls"), "reasoning": ("content", "tool_calls", "reasoning_content")}
    if turn is None or any(turn.get(name) for name in begins.get(item.type, ())):
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    if item.type == "message":
        turn["content"] = base.join_text(item.content, f"{where}.content")
    elif item.type == "reasoning":
        turn["reasoning_content"] = base.join_text(item.content or item.summary, f"{where}.content")
    else:
        turn.setdefault("tool_calls", []).append(base.make_call(item.call_id, item.name, item.arguments))
    return turn


def _items(answer: base.Answered, ident: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{ident}", "summary": [], "content": thought, "status": "completed"})
    if answer.text or not answer.tool_calls:
        text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{ident}", "role": "assistant", "status": "completed", "content": [text]})
    for index, call in enumerate(answer.tool_calls):
        called = {"id": f"fc_{ident}_{index}", "call_id": call["id"], **call["function"]}
        items.append({"type": "function_call", **called, "status": "completed"})
    return items


def write(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> dict[str, Any]:
    """The body of a whole answer."""
    [answer] = answers
    is_cut = answer.finish_reason == "length"
    total = answer.num_prompt + answer.num_completion
    return {
        "id": ident,
        "object": "response",
        "created_at": base.now(),
        "status": "incomplete" if is_cut else "completed",
        "model": ask.model,
        "output": _items(answer, ident),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": answer.num_prompt,
            "output_tokens": answer.num_completion,
            "total_tokens": total,
            "input_tokens_details": {"cached_tokens": answer.num_cached},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def stream(ask: base.Ask, answers: Sequence[base.Answered], ident: str) -> base.Events:
    """The answer as events."""
    number = 0

    def made(kind: str, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return base.event({"type": kind, "sequence_number": number, **data}, kind)

    whole = write(ask, answers, ident)
    empty: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
    yield made("response.created", response={**whole, "output": [], "status": "in_progress", "usage": None})
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        begun = {**item, "status": "in_progress", **empty.get(item["type"], {})}
        yield made("response.output_item.added", output_index=index, item=begun)
        if item["type"] == "message":
            part = item["content"][0]
            inside = {**place, "content_index": 0}
            yield made("response.content_part.added", **inside, part={**part, "text": ""})
            yield made("response.output_text.delta", **inside, delta=part["text"], logprobs=[])
            yield made("response.output_text.done", **inside, text=part["text"], logprobs=[])
            yield made("response.content_part.done", **inside, part=part)
        elif item["type"] == "function_call":
            yield made("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield made("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        yield made("response.output_item.done", output_index=index, item=item)
    yield made(f"response.{whole['status']}", response=whole)
