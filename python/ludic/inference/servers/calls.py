"""Calls to a server beside its completions, each with a deadline, their failures in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ludic.errors import InferenceError, ServerError
from ludic.inference.servers.http import BlockingHttp
from ludic.inference.servers.server_secret import secret_headers

T = TypeVar("T")

QUICK_TIMEOUT_S = 30.0
"""For calls that do not move weights."""


class ServerCalls:
    """One server. What it is asked is for those who derive from this."""

    hint = ""
    """What a server needs so that it has a path."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """`headers` go with every call, beside those of the protocol."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
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
        """What the server answers: JSON of the type `answer`; without one, whatever JSON there is,
        or the text where it is none.

        Raises ServerError, ServerTimeoutError and ServerUnreachableError, and InferenceError for an
        answer of another type.
        """
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        body = None if method == "get" else dict(json or {})
        given = self._http.ask(
            method.upper(),
            f"{self.url}{path}",
            json=body,
            params=params,
            headers=secret_headers(self.url),
            timeout_s=deadline_s,
        )
        if given.status != 200:
            raise ServerError(self._refusal(path, given.status, given.quoted()), status=given.status, said=given.text)
        if answer is not None:
            return given.read(answer)
        try:
            decoded: T = given.json()
            return decoded
        except InferenceError:
            return given.text  # type: ignore[return-value]

    def _refusal(self, path: str, status: int, said: str) -> str:
        hint = f"{self.hint}; " if status in (404, 405) and self.hint else ""
        return f"{self.url}{path} answered {status}: {hint}it said {said}"


def convert_answer(payload: object, kind: type[T], url: str) -> T:
    """Decoded JSON as a typed answer of the server at `url`. Raises InferenceError if it is of
    another type."""
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise InferenceError(f"{url} answered {str(payload)[:200]}, which is not what it must be: {error}") from error
