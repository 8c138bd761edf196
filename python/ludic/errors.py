"""What ludic raises. Every error is a `LudicError` and also the standard type that fits, so that
either can be caught."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Literal


class LudicError(Exception):
    """The root of all errors that ludic raises on purpose."""


class ConfigError(LudicError, ValueError):
    """A setting that breaks a rule, found when it is given."""


class ConfigTypeError(LudicError, TypeError):
    """A part that cannot do what it is given for."""


class BudgetError(ConfigError):
    """A token budget that cannot hold what must be packed into it."""


class DataError(LudicError, ValueError):
    """A sample whose content breaks a rule; the message names the sample."""


RowFault = Literal["empty_response", "same_responses", "same_responses_when_cut", "prompt_too_long"]


class RowError(DataError):
    """A row that is well formed and says nothing. `reason` is by what such rows are counted."""

    def __init__(self, message: str, *, reason: RowFault) -> None:
        super().__init__(message)
        self.reason = reason


class DataTypeError(LudicError, TypeError):
    """A sample whose sequences are of a type that holds no numbers of the right kind."""


class DataKeyError(LudicError, KeyError):
    """A sample whose metadata lacks a key; the message names the sample."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the message in quotes


class MissingExtraError(LudicError, ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""

    @classmethod
    def for_extra(cls, package: str, extra: str) -> MissingExtraError:
        return cls(f"{package} is not installed; `pip install 'ludic[{extra}]'` brings it")


class RolloutError(LudicError, RuntimeError):
    """Episodes failed and no batch could be made of the rest."""


class RequestsExhausted(LudicError, RuntimeError):
    """No request is left: training ends here."""


class StopRequested(LudicError, RuntimeError):
    """Somebody asked the run to stop, by Ctrl-C for one; no further batch is given."""


class GradingError(LudicError, RuntimeError):
    """An answer that could not be graded: what should have judged it failed or took too long. It
    has no reward, not one of 0."""


class InferenceError(LudicError, RuntimeError):
    """The model failed, or the engine that runs it is gone."""


class EngineDeadError(InferenceError):
    """A server whose engine is gone. It may still answer `/health`; it has to be started again
    before anything else is asked of it."""


class ServerUnreachableError(InferenceError, ConnectionError):
    """Nobody answers at a server's address."""


class ClientTagError(InferenceError):
    """An answer that does not say whose it is, or says that it is another client's. Asking again
    would not help."""


class NonFiniteError(LudicError, RuntimeError):
    """A loss or a gradient that is not finite. The weights are as they were before the step."""


class MismatchError(LudicError, RuntimeError):
    """The trainer and the sampler give the same tokens different probabilities. The message has
    the likely cause and a table."""

    def __init__(self, message: str, *, report: object | None = None) -> None:
        super().__init__(message)
        self.report = report
        """The `PreflightReport`, if there is one."""


class EmptyBatchError(LudicError, RuntimeError):
    """A batch source that keeps giving batches with nothing to train on."""


class CheckpointError(LudicError, RuntimeError):
    """A checkpoint that is incomplete or does not fit the model."""


class ServerError(InferenceError):
    """A server refused a call with this status of HTTP, and `said` why."""

    def __init__(self, message: str, *, status: int, said: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.said = said


class ServerTimeoutError(InferenceError, TimeoutError):
    """A server did not answer within its deadline."""


class PublishError(LudicError, RuntimeError):
    """New weights did not reach the servers; the message names those that failed and says what
    the others serve."""


class PublishTimeoutError(PublishError, TimeoutError):
    """A server took too long to take new weights."""


def place_of(error: BaseException, file: str | None = None) -> str:
    """`file:line, in function` that raised the error: the innermost line of `file`, or of any
    where it passed through none of that. Empty where there is no traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


def shorten_names(names: Iterable[object], limit: int = 8) -> str:
    """The first `limit` names for a message, and how many more there are: `a, b and 3 more`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
