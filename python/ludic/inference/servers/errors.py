"""What the status of a server's answer means: come again, engine dead, or wrong."""

from __future__ import annotations

from collections.abc import Mapping

from ludic.errors import EngineDeadError, InferenceError, ServerError, ServerUnreachableError

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Besides 500 and above: the server asks to come again."""
DEAD_MARKS = ("EngineCore encountered an issue", "EngineDeadError", "EngineGenerateError")
"""How a vLLM server says that its engine is gone, in the body of a 500."""
SHOWN = 500
"""Characters of a body that errors quote."""


class AbortedError(InferenceError):
    """The server stopped a request on somebody's order. What it had sampled is no whole answer;
    the request may be made again."""


class BusyError(ServerError):
    """The server asks to come again."""

    def __init__(self, message: str, *, status: int, retry_after_s: float) -> None:
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s
        """0 where it does not say when."""


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, BusyError | AbortedError | ServerUnreachableError)


def has_no_path(error: Exception) -> bool:
    """Whether a server does not offer what was asked for, as opposed to not having the model."""
    return isinstance(error, ServerError) and error.status in (403, 404, 405) and "model" not in error.said.lower()


def refusal(url: str, status: int, said: str, headers: Mapping[str, str]) -> InferenceError:
    """The error for an answer whose status is not 2xx."""
    shown = " ".join(said.split())[:SHOWN] or "nothing"
    if status >= 500 and any(mark in said for mark in DEAD_MARKS):
        return EngineDeadError(f"the engine of {url} is dead ({shown}); start the server again and push the weights to it")
    if status in TRANSIENT_STATUS or status >= 500:
        return BusyError(f"{url} answered {status}: {shown}", status=status, retry_after_s=_retry_after_s(headers))
    if 300 <= status < 400:
        to = headers.get("location", "nowhere")[:SHOWN]
        return ServerError(
            f"{url} answered {status} and sends us to {to}, where nobody follows: what is sent has prompts and keys; give the address "
            "that answers itself",
            status=status,
        )
    return ServerError(f"{url} answered {status}: {shown}", status=status, said=said)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", 0.0)))
    except ValueError:  # a date
        return 0.0
