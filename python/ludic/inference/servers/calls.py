"""Calls to a server beside its completions, each with a deadline, their failures in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.errors import ServerError, ServerTimeoutError, ServerUnreachableError
from ludic.inference.servers.openai_client import is_loopback
from ludic.inference.servers.server_secret import secret_headers

QUICK_TIMEOUT_S = 30.0
"""For calls that do not move weights."""
SHOWN = 400
"""Characters of a body that errors quote."""
ONE_CALL = {"Connection": "close"}
"""A connection for each call: a server closes those it keeps when a call fails, and when nothing comes for some seconds, and the next
call on them would fail for no reason of its own."""


class ServerCalls:
    """One server. What it is asked is for those who derive from this."""

    hint = ""
    """What a server needs so that it has a path."""

    def __init__(self, url: str, *, session: Any = None, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """`session` sends the calls, as `requests.Session` does; without it, one of its own."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._session = session

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The JSON that the server answers, text where it is none. Raises ServerError, ServerTimeoutError, ServerUnreachableError."""
        import requests

        if self._session is None:
            self._session = requests.Session()
            self._session.trust_env = not is_loopback(self.url)  # no proxy leads to this machine
        send = getattr(self._session, method)
        deadline = self.timeout_s if timeout_s is None else timeout_s
        body: dict[str, Any] = {} if method == "get" else {"json": json or {}}
        try:
            answer = send(
                f"{self.url}{path}", params=params, timeout=deadline, headers={**ONE_CALL, **secret_headers(self.url)}, **body
            )
        except requests.Timeout as error:
            raise ServerTimeoutError(f"{self.url}{path} gave no answer within {deadline:g} s") from error
        except requests.RequestException as error:
            raise ServerUnreachableError(
                f"{self.url}{path} cannot be reached ({type(error).__name__}); is the server running?"
            ) from error
        if answer.status_code != 200:
            raise ServerError(self._refusal(path, answer.status_code, answer.text), status=answer.status_code)
        try:
            return answer.json()
        except ValueError:
            return answer.text

    def _refusal(self, path: str, status: int, body: str) -> str:
        said = " ".join(body.split())[:SHOWN] or "nothing"
        hint = f"{self.hint}; " if status in (404, 405) and self.hint else ""
        return f"{self.url}{path} answered {status}: {hint}it said {said}"
