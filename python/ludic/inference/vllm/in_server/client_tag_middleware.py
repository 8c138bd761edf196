"""ASGI middleware for a server that several clients share. It copies the client tag of each request
into the response.

Pass it to vLLM as `--middleware
ludic.inference.vllm.in_server.client_tag_middleware.ClientTagMiddleware` (`ludic serve
--client-tags`).
"""

from __future__ import annotations

import json
from typing import Any

from ludic.inference.vllm.in_server.asgi import App, Message, Receive, Send

HEADER = "X-VLLM-Client-Tag"
FIELD = "client_tag"
OUTER_LISTS = ("results", "choices")
"""Keys of a response with its groups, each of which may have `outputs`."""
NAME = HEADER.lower().encode()


class ClientTagMiddleware:
    """Reads the tag from the header, else from `client_tag` in the body, and writes it into a
    header of the response. If the response is a JSON object, it also writes the tag into its
    `metadata` and the `metadata` of each of its `choices`, `results` and `outputs`.

    Event streams only get the header. Requests without a tag pass unchanged, and so do messages
    that a client has disconnected.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tag = dict(scope.get("headers") or []).get(NAME, b"").decode("latin-1").strip()
        if not tag and scope.get("method") == "POST":
            body, receive = await _read_body(receive)
            tag = _parse_tag(body)
        if not tag:
            await self._app(scope, receive, send)
            return
        response = _TaggedResponse(tag, send)
        await self._app(scope, receive, response.send)


class _TaggedResponse:
    """Buffers a JSON response until it is complete, and sends it with the tag. Forwards anything
    else immediately."""

    def __init__(self, tag: str, send: Send) -> None:
        self._tag, self._send = tag, send
        self._start: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers") or [] if name.lower() != NAME]
            start = {**message, "headers": [*headers, (NAME, self._tag.encode("latin-1"))]}
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            if kind.split(b";")[0].strip() == b"application/json":
                self._start = start
            else:
                await self._send(start)
            return
        if message["type"] != "http.response.body" or self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = _tag_body(bytes(self._body), self._tag)
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        start, self._start = {**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, None
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


async def _read_body(receive: Receive) -> tuple[bytes, Receive]:
    """The complete body, and a `receive` that first returns the messages read here and then new
    ones."""
    messages: list[Message] = []
    while True:
        messages.append(await receive())
        if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body"):
            break
    body = b"".join(message.get("body", b"") for message in messages)

    async def replay() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, replay


def _parse_tag(body: bytes) -> str:
    try:
        tag = json.loads(body).get(FIELD)
    except (ValueError, AttributeError, RecursionError):
        return ""
    is_valid = isinstance(tag, str) and tag.isprintable() and tag.isascii()
    return tag.strip() if is_valid else ""


def _tag_body(body: bytes, tag: str) -> bytes:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(answer, dict):
        return body
    _add_tag(answer, tag)
    for name in OUTER_LISTS:
        for group in answer.get(name) or []:
            if isinstance(group, dict):
                _add_tag(group, tag)
                for output in group.get("outputs") or []:
                    if isinstance(output, dict):
                        _add_tag(output, tag)
    return json.dumps(answer, ensure_ascii=False).encode()


def _add_tag(part: dict[str, Any], tag: str) -> None:
    metadata = part.get("metadata")
    part["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), FIELD: tag}
