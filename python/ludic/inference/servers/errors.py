"""What a failed request to a server means: come again, nobody there, engine dead, or wrong."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from ludic.errors import EngineDeadError, InferenceError, ServerUnreachableError
from ludic.inference.servers.persistence import is_transient

T = TypeVar("T")

DEAD_MARKS = ("EngineCore encountered an issue", "EngineDeadError", "EngineGenerateError")
"""How a vLLM server says that its engine is gone, in the body of a 500."""
SHOWN = 500
"""Characters of a body that errors quote."""


class AbortedError(InferenceError):
    """The server stopped a request on somebody's order. What it had sampled is no whole answer; the request may be made again."""


class BusyError(InferenceError):
    """The server asks to come again. `response` has its headers."""

    response: Any = None


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, BusyError | AbortedError | ServerUnreachableError)


def has_no_path(error: Exception) -> bool:
    """Whether a server does not offer what was asked for, as opposed to not having the model."""
    if getattr(error, "status_code", None) not in (403, 404, 405):
        return False
    return "model" not in str(getattr(error, "body", None) or "").lower()


async def meant(request: Awaitable[T], url: str, timeout_s: float) -> T:
    """The answer to a request that the openai package makes, its errors in our words."""
    from openai import APIConnectionError, APIStatusError, APITimeoutError, OpenAIError

    try:
        return await request
    except APITimeoutError as error:
        if "ConnectTimeout" in type(error.__cause__).__name__:
            raise ServerUnreachableError(f"{url} cannot be reached; is the server running there?") from error
        raise TimeoutError(f"{url} gave no answer within {timeout_s} s") from error
    except APIConnectionError as error:
        raise ServerUnreachableError(
            f"{url} cannot be reached ({error.__cause__ or error}); is the server running there?"
        ) from error
    except APIStatusError as error:
        raise _status_error(error, url) from error
    except (OpenAIError, ValueError) as error:  # a body that is no JSON is a ValueError
        if isinstance(error, InferenceError):
            raise
        raise InferenceError(f"{url} gave no completion: {type(error).__name__}: {error}") from error


def _status_error(error: Any, url: str) -> InferenceError:
    said = error.response.text[:SHOWN]
    if error.status_code >= 500 and any(mark in said for mark in DEAD_MARKS):
        return EngineDeadError(f"the engine of {url} is dead ({said}); start the server again and push the weights to it")
    if is_transient(error):
        busy = BusyError(f"{url} answered {error.status_code}: {said}")
        busy.response = error.response
        return busy
    return InferenceError(f"{url} gave no completion: {error.status_code}: {said}")
