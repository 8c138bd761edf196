"""The exceptions that ludic raises. Each is a `LudicError` and also the standard type that fits, so
that either can be caught; the exit statuses of processes; and what messages are made of."""

from __future__ import annotations

import math
import operator
import traceback
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal, TypedDict, Unpack

from ludic.distribution import install_command

TRY_AGAIN = 75
"""An exit status: a rank, a server or the network failed. A new start resumes from the last
checkpoint."""
DO_NOT_RETRY = 78
"""The exit status of sysexits.h that tells whoever started a process not to start it again: a
setting, a file or the disk must be changed first."""


class LudicError(Exception):
    """Base class of all errors that ludic raises on purpose."""


class ConfigError(LudicError, ValueError):
    """An invalid setting, raised when it is passed in."""


class ConfigTypeError(LudicError, TypeError):
    """An object that lacks a method or ability that it needs where it is used."""


class BudgetError(ConfigError):
    """A token budget that is too small for a sample or pair that must be packed."""


class DataError(LudicError, ValueError):
    """A sample with invalid content; the message names the sample."""


RowFault = Literal["empty_response", "same_responses", "same_responses_when_cut", "prompt_too_long"]


class RowError(DataError):
    """A well-formed row that cannot be trained on. Such rows are counted by `reason`."""

    def __init__(self, message: str, *, reason: RowFault) -> None:
        super().__init__(message)
        self.reason = reason


class DataTypeError(LudicError, TypeError):
    """A sample whose sequences have the wrong type or element type."""


class DataKeyError(LudicError, KeyError):
    """A sample whose metadata, or a batch whose columns, lack a key; the message names both."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError shows its message in quotes


class MissingExtraError(LudicError, ImportError):
    """An optional dependency that is not installed; the message names the extra to install."""

    @classmethod
    def for_extra(cls, package: str, extra: str) -> MissingExtraError:
        return cls(f"{package} is not installed; `{install_command(extra)}` installs it")


def import_optional(module: str, extra: str) -> Any:
    """The module. Raises MissingExtraError, which names the extra, if it cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError.for_extra(module.partition(".")[0], extra) from error


class StaleBuildError(LudicError, ImportError):
    """The extension was built from another version than the Python files."""


INPUT_ERRORS = (ConfigError, ConfigTypeError, DataError, DataKeyError, DataTypeError, MissingExtraError)
"""Errors in what the user gave: the message says which setting, row or package is wrong."""


class RolloutError(LudicError, RuntimeError):
    """Episodes failed, and the remaining ones cannot form a batch."""

    def __init__(self, message: str, *, played: object | None = None) -> None:
        super().__init__(message)
        self.played = played
        """The `PlayedRollouts` without rollouts, with the outcomes of the episodes, if known."""


class RolloutAborted(LudicError, RuntimeError):
    """The generation of rollouts was asked to abort. Finished rollouts are kept, and generation can
    be resumed."""


class RequestsExhausted(LudicError, RuntimeError):
    """There are no more requests, so training ends."""


class StopRequested(LudicError, RuntimeError):
    """The run was asked to stop, for example by Ctrl-C. The batch source returns no more
    batches."""


class GradingError(LudicError, RuntimeError):
    """An answer could not be graded because the grader failed or took too long. The answer has no
    reward, not a reward of 0."""


class InferenceError(LudicError, RuntimeError):
    """The model failed, or the engine that runs it died."""


class EngineDeadError(InferenceError):
    """A server's engine died. The server may still answer `/health`, but must be restarted before
    any other call."""


class ServerUnreachableError(InferenceError, ConnectionError):
    """No server answers at the address."""


class ClientTagError(InferenceError):
    """A response without a client's tag, or with another client's. A retry would not help."""


class NonFiniteError(LudicError, RuntimeError):
    """A loss or gradient that is not finite. The step did not change the weights."""


class BackendStoppedError(LudicError, RuntimeError):
    """An operation of a backend that did not run, because one before it failed. The failure is the
    cause; `reset` of the backend lets it work again."""


class MismatchError(LudicError, RuntimeError):
    """Trainer and sampler assign different probabilities to the same tokens. The message contains
    the likely cause and a table."""

    def __init__(self, message: str, *, report: object | None = None) -> None:
        super().__init__(message)
        self.report = report
        """The `PreflightReport`, if there is one."""


class EmptyBatchError(LudicError, RuntimeError):
    """A batch source repeatedly returned batches with nothing to train on."""


class CheckpointError(LudicError, RuntimeError):
    """A checkpoint that is incomplete or does not match the model."""


class RankError(LudicError, RuntimeError):
    """Another rank failed; the message has its number, its host and its error."""

    def __init__(self, message: str, *, exit_code: int = TRY_AGAIN) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit status that the failed rank chose for all ranks."""


class QueueError(LudicError, RuntimeError):
    """The queue of groups cannot be reached, is full, or did not answer within its deadline. The
    call can be repeated."""


class QueueDataLost(QueueError):
    """The queue has no owner: its data are gone. The trainer claims it again and offers the missing
    groups again."""


class QueueRefused(QueueError):
    """The queue does not accept this process: a wrong password, missing rights, a server that would
    lose entries, or a file of another version. Repeating the call does not help; a setting must be
    changed first."""


class OwnershipLost(LudicError, RuntimeError):
    """Another trainer owns the queue. This one must stop, and must not be restarted."""


class LaunchError(LudicError, RuntimeError):
    """A process of a run could not be started or placed."""


class ServerError(InferenceError):
    """A server rejected a call with the HTTP status `status`; `reason` is its text."""

    def __init__(self, message: str, *, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ServerTimeoutError(InferenceError, TimeoutError):
    """A server did not answer within its deadline."""


class PublishError(LudicError, RuntimeError):
    """New weights did not reach all servers. The message names the servers that failed and what the
    others serve."""

    def __init__(self, message: str, *, answers: Sequence[Mapping[str, Any]] = ()) -> None:
        """`answers` of the engines of `sync_weights_to_engines`, in their order."""
        super().__init__(message)
        self.answers = list(answers)


class PublishTimeoutError(PublishError, TimeoutError):
    """A server took too long to accept new weights."""


class Rules(TypedDict, total=False):
    """What a value must be."""

    optional: bool
    """Or None."""
    whole: bool
    """A whole number, and no bool."""
    least: float
    """At least this."""
    above: float
    """Greater than this."""
    most: float
    """At most this."""
    below: float
    """Less than this; infinity allows every finite number."""
    choices: Collection[Any]
    """One of these."""


_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", lambda value, bound: -math.inf < value < bound),
}


def check_value(
    name: str, value: Any, hint: str = "", *, error: Callable[[str], Exception] = ConfigError, **rules: Unpack[Rules]
) -> None:
    """Raise `error` if a value breaks one of the rules. The message ends with the `hint`.

    >>> check_value("top_p", 1.5, "1 keeps all tokens", above=0, most=1)
    Traceback (most recent call last):
    ludic.errors.ConfigError: top_p (1.5) must be above 0 and at most 1; 1 keeps all tokens
    """
    broken = find_broken_rule(value, **rules)
    if broken is not None:
        raise error(f"{name} ({value!r}) {broken}{f'; {hint}' if hint else ''}")


def find_broken_rule(value: Any, **rules: Unpack[Rules]) -> str | None:
    """What the value must be and is not, for a message: `must be at least 1`. None if it keeps all
    rules. NaN and values that are no numbers break every bound."""
    if value is None and rules.get("optional"):
        return None
    if "choices" in rules:
        known = [str(choice) for choice in rules["choices"]]
        return None if value in rules["choices"] else f"must be one of {', '.join(known)}{did_you_mean(str(value), known)}"
    bounds = {name: bound for name, bound in rules.items() if name in _BOUNDS}
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    with suppress(TypeError, ValueError, ArithmeticError, RuntimeError):  # such as of text, or of several numbers
        if (is_whole or not rules.get("whole")) and all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
            return None
    limits = " and ".join("finite" if bound == math.inf else f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds.items())
    return "must be " + ", ".join((["a whole number"] if rules.get("whole") else []) + ([limits] if limits else []))


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises, also if it is interrupted. The error goes on."""
    try:
        yield
    except BaseException:
        undo()
        raise


def error_location(error: BaseException, file: str | None = None) -> str:
    """Where the error was raised, as `file:line, in function`: the innermost frame in `file`, or
    the innermost frame if none is in `file`. Empty without a traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


def shorten_names(names: Iterable[object], limit: int = 8) -> str:
    """The first `limit` names for a message, and how many more there are: `a, b and 3 more`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, count: int = 1, cutoff: float = 0.6) -> str:
    """The end of an error about an unknown `name`: `; did you mean X?` with at most `count` similar
    names among the `known`. Without any it is `; ` and `otherwise`, or empty."""
    near = get_close_matches(name, list(known), n=count, cutoff=cutoff)
    remedy = f"did you mean {' or '.join(near)}?" if near else otherwise
    return f"; {remedy}" if remedy else ""


def escape_controls(text: str, *, keep: str = "\n") -> str:
    """The text with every character as an escape that is neither printable, nor a space, nor in
    `keep`: no text moves the cursor, changes colours or its direction. Example: the escape
    character becomes `\\x1b`."""
    shown = {char for char in set(text) if char in keep or char.isprintable() or unicodedata.category(char) == "Zs"}
    return "".join(char if char in shown else char.encode("unicode_escape").decode() for char in text)
