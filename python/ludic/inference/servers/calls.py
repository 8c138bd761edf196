"""Control calls to one server, each with a deadline. They raise this library's errors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ludic.errors import InferenceError, ServerError, ServerTimeoutError
from ludic.inference.servers.http import BlockingHttp
from ludic.inference.servers.server_secret import secret_headers

T = TypeVar("T")

QUICK_TIMEOUT_S = 30.0
"""For calls that do not move weights."""


class ServerCalls:
    """Calls to one server. Subclasses add a method for each endpoint."""

    hint = ""
    """How to start a server that has the endpoints; shown when one is missing."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """`headers` are sent with every call."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.ends_at: float | None = None
        """The time of `time.monotonic()` at which every call ends, whatever its own timeout."""
        self._http = BlockingHttp(headers)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        answer: type[T] | None = None,
    ) -> T:
        """Make a call and return the response as JSON of the type `answer`. Without a type, return
        any JSON, or the text if it is not JSON.

        Raises ServerError, ServerTimeoutError and ServerUnreachableError, and InferenceError for
        JSON of another type.
        """
        deadline_s = self._left_s(path, self.timeout_s if timeout_s is None else timeout_s)
        body = None if method == "get" else dict(json or {})
        response = self._http.request(
            method.upper(),
            f"{self.url}{path}",
            json=body,
            params=params,
            headers=secret_headers(self.url),
            timeout_s=deadline_s,
        )
        if response.status != 200:
            raise ServerError(
                self._message(path, response.status, response.excerpt()), status=response.status, reason=response.text
            )
        if answer is not None:
            return response.read(answer)
        try:
            decoded: T = response.json()
            return decoded
        except InferenceError:
            return response.text  # type: ignore[return-value]

    def _left_s(self, path: str, timeout_s: float) -> float:
        """The seconds that a call may take. Raises ServerTimeoutError if `ends_at` is over."""
        if self.ends_at is None:
            return timeout_s
        left_s = self.ends_at - time.monotonic()
        if left_s <= 0:
            raise ServerTimeoutError(f"{self.url}{path} was not called: the time for this server is over")
        return min(timeout_s, left_s)

    def _message(self, path: str, status: int, excerpt: str) -> str:
        hint = f"{self.hint}; " if status in (404, 405) and self.hint else ""
        return f"{self.url}{path} answered {status}: {hint}it said {excerpt}"


def convert_answer(payload: object, kind: type[T], url: str) -> T:
    """Convert decoded JSON from the server at `url` to a type. Raises InferenceError if it has
    another type."""
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise InferenceError(f"{url} answered {str(payload)[:200]}, which does not have the expected form: {error}") from error
