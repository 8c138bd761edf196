"""Maps the status of an HTTP response to an error: try again, the engine is dead, or a bad
request."""

from __future__ import annotations

from collections.abc import Mapping

from ludic.errors import EngineDeadError, InferenceError, ServerError, ServerUnreachableError

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which a retry may succeed. Those of 500 and above are transient too."""
DEAD_MARKS = ("EngineCore encountered an issue", "EngineDeadError", "EngineGenerateError")
"""Text in the body of a 500 by which vLLM reports that its engine has died."""
MAX_QUOTED_CHARS = 500
"""Length of a quotation in an error message."""


class AbortedError(InferenceError):
    """The server aborted a request, so its partial output is discarded. The request can be
    retried."""


class StaleWeightsError(EngineDeadError):
    """A server answered with weights that no client may sample from: it was restarted and has those
    that it began with, or it missed a push."""


class BusyError(ServerError):
    """The server asks for a retry."""

    def __init__(self, message: str, *, status: int, retry_after_s: float) -> None:
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s
        """0 if the response has no Retry-After header."""


def is_retryable(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, BusyError | AbortedError | ServerUnreachableError)


def is_missing_endpoint(error: Exception) -> bool:
    """Whether the server lacks the endpoint. False for a 404 that is due to an unknown model."""
    return isinstance(error, ServerError) and error.status in (403, 404, 405) and "model" not in error.reason.lower()


def quote_body(body: str) -> str:
    """The beginning of a body on one line, for an error message; `nothing` for an empty body."""
    return " ".join(body.split())[:MAX_QUOTED_CHARS] or "nothing"


def status_error(url: str, status: int, body: str, headers: Mapping[str, str]) -> InferenceError:
    """The error for a response whose status is not 2xx."""
    excerpt = quote_body(body)
    if status >= 500 and any(mark in body for mark in DEAD_MARKS):
        return EngineDeadError(f"the engine of {url} is dead ({excerpt}); restart the server and push the weights to it")
    if status in TRANSIENT_STATUS or status >= 500:
        return BusyError(f"{url} answered {status}: {excerpt}", status=status, retry_after_s=_retry_after_s(headers))
    if 300 <= status < 400:
        target = headers.get("location", "nowhere")[:MAX_QUOTED_CHARS]
        return ServerError(
            f"{url} answered {status} and redirects to {target}; redirects are not followed because requests carry prompts and keys: "
            "use the final address",
            status=status,
        )
    return ServerError(f"{url} answered {status}: {excerpt}", status=status, reason=body)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", 0.0)))
    except ValueError:  # an HTTP date
        return 0.0
