"""ASGI middleware for a vLLM server. Requests that change what it serves need its secret; requests
from web pages of other machines are refused.

Pass it to vLLM as `--middleware ludic.inference.vllm.in_server.secret_middleware.SecretMiddleware`,
with the secret in `LUDIC_SERVER_SECRET`. Paths that sample or only report need no secret. Every
other path does, including unknown ones.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from ludic.inference.vllm.in_server.adapter_uploads import UPLOADS, AdapterStore
from ludic.inference.vllm.in_server.asgi import App, Message, Receive, Send
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE, is_loopback_host, resolve_secret

Refusal = tuple[int, str]
"""Status and reason."""

OPEN_FOLDERS = ("/v1/", "/v2/", "/inference/v1/", "/cohere/")
"""Sampling, scoring and the list of models: the paths that vLLM's own `--api-key` guards."""
OPEN_PATHS = frozenset(
    ["/health", "/ping", "/load", "/version", "/metrics", "/tokenize", "/detokenize"]
    + ["/pooling", "/classify", "/score", "/rerank", "/generative_scoring"]
    + ["/is_paused", "/weight_info", "/get_world_size"]
)
CLOSED_PATHS = frozenset(["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests"])
FILES = ("/v1/audio/", UPLOADS)
"""The paths whose bodies are forms or files."""


def find_refusal(secret: str, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    """Why the server refuses a request, or None. Names of headers are lower case."""
    origin = headers.get("origin")
    if origin is not None and not _is_of_this_machine(origin):
        return 403, f"requests from a page of {origin[:100]} are refused: only pages of this machine may send any"
    if not _is_open(path) and not hmac.compare_digest(headers.get(HEADER.lower(), "").encode(), secret.encode()):
        return 401, (
            f"{path[:100]} needs the server's secret in the header {HEADER}. Processes of the user that started the server, on its "
            f"machine, send it automatically; for others set {VARIABLE}"
        )
    has_body = headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and content_type != "application/json" and not path.startswith(FILES):
        return 415, f"the body of {method} {path[:100]} must be application/json"
    return None


def _is_of_this_machine(origin: str) -> bool:
    try:
        return is_loopback_host(urlsplit(origin).hostname or "")
    except ValueError:  # brackets that are no address
        return False


def _is_open(path: str) -> bool:
    """Whether a path needs no secret.

    Paths that are not printable always need one: `$` in a regular expression also matches before a
    line feed, so "/pause" followed by a line feed may match a route.
    """
    if not path.isprintable():
        return False
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDERS) and path.rstrip("/") not in CLOSED_PATHS)


class SecretMiddleware:
    """Refuses requests for which `find_refusal` gives a reason, before the server sees them, and
    takes adapters that are sent. The server does not start without a secret."""

    def __init__(self, app: App) -> None:
        if not os.environ.get(VARIABLE):
            raise RuntimeError(f"{VARIABLE} is not set; start the server with `ludic serve`, or set it to a secret of your own")
        self._app, self._secret, self._adapters = app, resolve_secret(os.environ), AdapterStore()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers") or []}
        reason = find_refusal(self._secret, scope.get("method", "GET"), _path(scope), headers)
        if reason is None and scope.get("method") == "PUT" and _path(scope).startswith(UPLOADS):
            await _answer(send, *await self._adapters.store(_path(scope).removeprefix(UPLOADS), receive))
        elif reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason[1][:100]})
        else:
            status, text = reason  # like vLLM's own errors
            await _answer(send, status, {"error": {"message": text, "type": "Refused", "param": None, "code": status}})


def _path(scope: Message) -> str:
    """The path as the server's routes see it, without the prefix that the server is mounted
    under."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _answer(send: Send, status: int, content: object) -> None:
    """Answer, and close the connection, because the rest of it may be a body that was not read."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
