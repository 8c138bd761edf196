"""What all dialects share: a request in one form, an answer in one form, errors and events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ludic.types import Message, Observation

T = TypeVar("T")

encode = msgspec.json.Encoder().encode
"""JSON as bytes."""
TEXT_PARTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"}


class CallError(Exception):
    """A call that is answered with an error: its status, its code in OpenAI's form, and why.

    403 ends the call for all clients that were tried; they ask again after 409, 429 and 5xx.
    """

    def __init__(self, why: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(why)
        self.status, self.code = status, code


@dataclass
class Ask:
    """A request in one form."""

    messages: list[Message]
    model: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False
    include_usage: bool = False
    begun: Message | None = None
    """An assistant message that the answer continues."""
    previous: str | None = None
    """The id of the answer that `messages` follow, but for the first `num_instructions`."""
    num_instructions: int = 0
    prompt: str | list[int] | None = None
    """Text or ids of a plain completion, instead of messages."""
    size: int = 0
    """Bytes of the request."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Its `temperature`, `top_p` and other settings of sampling, which a run replaces by its
    own."""


@dataclass(frozen=True)
class Answered:
    """One sampled answer."""

    text: str
    """Without reasoning and calls."""
    reasoning: str | None
    tool_calls: Sequence[Mapping[str, Any]]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    num_prompt: int
    num_completion: int
    num_cached: int
    """Leading tokens of the prompt that an earlier call had."""
    logprobs: Sequence[tuple[str, float]] = ()
    """(text, log-probability) of each token, if they were asked for."""
    stop_text: str | None = None
    """The stop string that ended it."""


class Body(Struct):
    """What the requests of all dialects have."""

    model: str = ""
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None

    def shared(self) -> dict[str, Any]:
        """These as fields of an `Ask`."""
        settings = {name: getattr(self, name) for name in Body.__struct_fields__ if name not in ("model", "stream")}
        given = {name: value for name, value in settings.items() if value is not None}
        return {"model": self.model, "stream": bool(self.stream), "sampling": given}


class Format(Struct, frozen=True):
    """The format of an answer in OpenAI's dialects."""

    type: str = "text"


class Source(Struct, frozen=True):
    """Where an image is: a URL, or its bytes in base64."""

    url: str = ""
    media_type: str = "image/png"
    data: str = ""

    @property
    def address(self) -> str:
        """The URL, or one that has the bytes; empty without either."""
        return self.url or (self.data and f"data:{self.media_type};base64,{self.data}")


class Part(Struct):
    """A part of a content, or one item of a list of such."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: str | Source | None = None
    """An image of OpenAI's dialects."""
    source: Source | None = None
    """An image of Anthropic's."""


Content = str | list[Part] | None


def join_text(content: Content, where: str) -> str:
    """The text of a content. Raises CallError for a part that is no text."""
    return str(read_content(content, where, "system"))


def read_content(content: Content, where: str, role: str) -> Observation:
    """A content as text, or if it has images as parts in OpenAI's form. Raises CallError for a part
    that is neither, and for an image of another role than the user or a tool."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_read_part(part, where) for part in content]
    if not any("image_url" in part for part in parts):
        return "".join(part["text"] for part in parts)
    if role not in ("user", "tool"):
        raise CallError(f"{where} has an image; images are in messages of the user and in results of tools")
    return parts


def _read_part(part: Part, where: str) -> dict[str, Any]:
    if part.type in TEXT_PARTS:
        return {"type": "text", "text": part.text or part.refusal or ""}
    source = part.image_url or part.source
    if part.type not in ("image_url", "input_image", "image"):
        raise CallError(f"{where} has a part of type {part.type!r}; the model reads text and images")
    address = source.address if isinstance(source, Source) else source
    if not address:
        raise CallError(f"{where} has an image without its bytes; no files are kept here, so send a data: URL or base64")
    return {"type": "image_url", "image_url": {"url": address}}


def refuse_format(given: Format | None, field: str, *, ignore: bool) -> None:
    """Raise CallError for a format that needs constrained decoding."""
    if given is not None and given.type != "text" and not ignore:
        raise CallError(
            f"{field} {given.type!r} needs constrained decoding, whose tokens are no samples of the model; "
            "agent.unsupported=ignore answers without it"
        )


def make_call(ident: str | None, name: str, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """A call in OpenAI's form, with its arguments as JSON text."""
    text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
    return {"id": ident or "", "type": "function", "function": {"name": name, "arguments": text}}


def make_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": dict(parameters or {"type": "object"})},
    }


def decode(body: bytes, kind: type[T]) -> T:
    """The body as this struct. Raises CallError for anything else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(f"the body is not a request of this endpoint: {error}") from None


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encode(data) + b"\n\n"


def now() -> int:
    return int(time.time())


def openai_error(why: str, status: int, code: str | None) -> dict[str, Any]:
    """The body of an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": why, "type": kind, "param": None, "code": code}}


Events = Iterator[bytes]
