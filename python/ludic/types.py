"""The data that agents, environments and the trainer exchange: messages, steps, rollouts, and the
sampled tokens, in fields that hold arrays until somebody reads them as lists."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from reprlib import recursive_repr
from typing import Any, NamedTuple, TypeVar

from ludic.errors import DataError, DataTypeError

logger = logging.getLogger(__name__)

T = TypeVar("T")

JSON = str | int | float | bool | None | dict[str, Any] | list[Any]
Message = dict[str, Any]
"""`{"role": ..., "content": ...}`; tool messages have more keys."""
Observation = str | list[dict[str, Any]]
"""Text, or a list of parts of text and stored images (`ludic.images.content`)."""
Info = dict[str, Any]
"""Extra information from an environment or a client. Values are JSON."""


class ImageSpan(NamedTuple):
    """Where an image is in a list of token ids: from its first placeholder to its last. Marks that
    a processor writes between placeholders, such as the ends of its rows, are in it.

    Example: an image in ids [5, 9, 9, 6] with the placeholder 9 has start 1 and length 2.
    """

    digest: str
    """Of the image in the store (`ludic.images.store`)."""
    start: int
    length: int


class Routes(NamedTuple):
    """The experts that computed the first R tokens of a sequence, in each of the layers that have
    experts. The tokens after them have none recorded; the last one that was sampled never went
    through the model.

    Example: `Routes(bytes([3, 0, 1, 2]), 1, 2, 1)` are the experts 3 and 0 of token 0, and 1 and 2
    of token 1.
    """

    data: bytes
    """[R, layers, top_k] numbers of experts, little-endian."""
    layers: int
    top_k: int
    """Experts of each token."""
    width: int
    """Bytes of a number: 1, or 2 if there are more than 256 experts."""

    @property
    def array(self) -> Any:
        """[R, layers, top_k] a numpy array. Raises DataError if the bytes are no such array."""
        import numpy as np

        sizes = (self.layers, self.top_k, self.width)
        if self.width not in (1, 2) or min(sizes) < 1 or len(self.data) % math.prod(sizes):
            raise DataError(f"routes have {len(self.data)} bytes, which are not [R, layers, top_k] numbers of width {sizes}")
        return np.frombuffer(self.data, f"<u{self.width}").reshape(-1, self.layers, self.top_k)

    def cut(self, tokens: int) -> Routes:
        """Of the first `tokens` tokens."""
        return self._replace(data=self.data[: tokens * self.layers * self.top_k * self.width])


def cut_spans(spans: Sequence[ImageSpan], begin: int, *, end: int | None = None, to: int = 0) -> tuple[ImageSpan, ...]:
    """The images from token `begin` on, and before `end`, where token `begin` comes to be at `to`.
    Example: an image at [5, 9), cut at 3, is at [2, 6)."""
    return tuple(
        span._replace(start=span.start - begin + to)
        for span in spans
        if begin <= span.start and (end is None or span.start < end)
    )


def read_spans(spans: Any, num_tokens: int) -> tuple[ImageSpan, ...]:
    """The spans of images in `num_tokens` ids, from spans or from lists of JSON. Raises DataError
    unless each is in the ids and begins after the one before.

    Example: `[["3fa9...", 1, 2]]` in 4 ids is `(ImageSpan("3fa9...", 1, 2),)`.
    """
    read: list[ImageSpan] = []
    end = 0
    for span in spans:
        kinds = [type(part) for part in span] if isinstance(span, list | tuple) else []
        if kinds != [str, int, int] or not end <= span[1] < span[1] + span[2] <= num_tokens:
            raise DataError(f"images has {span!r:.80} after {end} of {num_tokens} tokens; give [digest, start, length] in order")
        read.append(ImageSpan(*span))
        end = span[1] + span[2]
    return tuple(read)


_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
TRACE_KEYS = frozenset(_TOKEN_FIELDS)
"""Keys of a client's info whose content travels in the step's `TokenTrace` instead."""


def answers_of(rollout: Rollout) -> list[Step]:
    """Its steps without the model calls that called tools and did not reach the environment."""
    return [step for step in rollout.steps if not step.info.get("intermediate_call")]


def group_of(meta: Mapping[str, Any]) -> Any:
    """The group of a rollout or a sample, read from its meta; None if it has none.

    Members of a group answer the same prompt. Example: `{"request_meta": {"group_id": "g1"}}` is of
    group `"g1"`.
    """
    return (meta.get("request_meta") or {}).get("group_id")


ENVIRONMENT = "environment"
"""Key of the name of an environment in the meta of requests, rollouts and samples, in a run with
several."""


def is_column(value: Any) -> bool:
    """Whether `value` is a `ludic.columns.Column`, without an import of numpy: messages and
    environments need none."""
    return getattr(value, "is_list_when_read", False) is True


def stored(record: object, name: str) -> Any:
    """The field as `record` holds it: a `Column` that has not been read as a list, else the
    attribute's value. For code that reads an array as well as a list, and does not change it."""
    try:
        return record.__dict__[name]
    except (AttributeError, KeyError):  # of a class that computes it, or has slots
        return getattr(record, name)


def read_list(record: object, name: str) -> Any:
    """The list that the attribute would be, or None, without a change of what `record` holds."""
    value = stored(record, name)
    return value.tolist() if is_column(value) else value


def lists_when_read(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator of data classes: a `Column` in one of these fields is a list when it is read.

    A token takes 9 bytes in arrays and 88 as Python numbers in lists, and the core reads an array
    without touching its elements. Whoever reads the field of a trace or a sample has a list, which
    can be compared, joined, changed and written as JSON. From then on the list is the field's
    value. Encoders that read `__dict__` instead, as msgspec's and orjson's do, meet the array: give
    them `dataclasses.asdict(record)`.

        trace = TokenTrace.from_arrays(np.array([5, 6]), np.array([7]))
        stored(trace, "prompt_token_ids")  # Column([5, 6], dtype=int32)
        trace.prompt_token_ids             # [5, 6]
        stored(trace, "prompt_token_ids")  # [5, 6]
    """

    def decorate(cls: type[T]) -> type[T]:
        defaults = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
        for name in names:
            setattr(cls, name, _ListField(name, defaults[name]))
        cls.__repr__ = recursive_repr()(_repr_with_lists)  # type: ignore[method-assign]
        return cls

    return decorate


def _repr_with_lists(record: Any) -> str:
    """The repr of the data class, which shows lists and leaves arrays: tasks and logs call it."""
    values = ((each.name, read_list(record, each.name)) for each in fields(record) if each.repr)
    return f"{type(record).__qualname__}({', '.join(f'{name}={value!r}' for name, value in values)})"


class _ListField:
    """The attribute of a data class whose value may be a `Column`."""

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            if self._default is MISSING:  # as without this class; data classes that inherit ask for it
                raise AttributeError(f"type object {owner.__name__ if owner else '?'!r} has no attribute {self._name!r}")
            return self._default
        held = record.__dict__
        try:
            value = held[self._name]
        except KeyError:
            raise AttributeError(f"{type(record).__name__!r} object has no attribute {self._name!r}") from None
        if is_column(value):
            value = held[self._name] = value.tolist()
        return value

    def __set__(self, record: Any, value: Any) -> None:
        record.__dict__[self._name] = value

    def __delete__(self, record: Any) -> None:
        del record.__dict__[self._name]


@lists_when_read(*_TOKEN_FIELDS)
@dataclass(frozen=True)
class TokenTrace:
    """The tokens of one model call, as the server returned them. Training uses these tokens; text
    is never tokenized again.

    Traces of ludic's engines hold arrays (`from_arrays`): int32 ids, and float32 log-probabilities,
    or float64 ones where float32 would change them. Each becomes a list when its field is read.

    Example: the prompt `ab` and the sampled completion `c<eos>` of a byte-level model are
    `TokenTrace([100, 101], [102, 2], [-0.1, -0.7], "stop")`.
    """

    prompt_token_ids: list[int]
    """[P] ids of the rendered prompt."""
    completion_token_ids: list[int]
    """[C] sampled ids, including the end token if it was sampled."""
    completion_logprobs: list[float] | None = None
    """[C] log-probability of each sampled token under the policy that sampled it."""
    finish_reason: str | None = None
    """`stop`, `length`, or another value of the server."""
    candidates: list[list[int]] | None = None
    """[C] the ids that each token was sampled among, if top-p, top-k or min-p left some out; [] for
    all. None if the engine does not keep them."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the prompt, in order. JSON of a trace without any does not have the key."""
    routes: Routes | None = None
    """The experts of the prompt and the completion, if the engine keeps them. JSON of a trace has
    none."""

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "completion_token_ids"):
            ids = stored(self, name)
            if not (is_column(ids) or is_list_of(ids, int)):
                raise DataTypeError(f"{name} must be a list of int, got {_described(ids, int)}")
        if self.images:
            self.__dict__["images"] = read_spans(self.images, len(stored(self, "prompt_token_ids")))
        else:
            self.__dict__.pop("images", None)  # the class has (); encoders that read `__dict__` write nothing
        if self.routes is None:
            self.__dict__.pop("routes", None)
        elif len(self.routes.array) > (
            total := len(stored(self, "prompt_token_ids")) + len(stored(self, "completion_token_ids"))
        ):
            raise DataError(f"routes are of {len(self.routes.array)} tokens, and the trace has {total}")
        logps, num_tokens = stored(self, "completion_logprobs"), len(stored(self, "completion_token_ids"))
        if logps is None:
            return
        if not (is_column(logps) or is_list_of(logps, float, int)):
            raise DataTypeError(f"completion_logprobs must be a list of float, got {_described(logps, float, int)}")
        if len(logps) != num_tokens:
            raise DataError(f"completion_logprobs has {len(logps)} values for {num_tokens} tokens; it must have one for each")

    @classmethod
    def from_arrays(
        cls,
        prompt: Any,
        completion: Any,
        logprobs: Any = None,
        finish_reason: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> TokenTrace:
        """A trace that holds arrays, from sequences or arrays of ids [P] and [C] and of
        log-probabilities [C]. Read, it equals the trace of lists. Raises DataTypeError for other
        types, DataError for ids beyond 32 bits."""
        from ludic.columns import float_column, int_column  # loads numpy

        logps = None if logprobs is None else float_column(logprobs)
        return cls(int_column(prompt), int_column(completion), logps, finish_reason, images=tuple(images))  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """A JSON object that `from_dict` reads back."""
        content = {**asdict(replace(self, routes=None)), "images": [list(span) for span in self.images]}
        left_out = {"routes"} if self.images else {"routes", "images"}
        return {name: value for name, value in content.items() if name not in left_out}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TokenTrace:
        prompt, completion = list(data["prompt_token_ids"]), list(data["completion_token_ids"])
        logps, finish_reason = _copy_list(data.get("completion_logprobs")), data.get("finish_reason")
        return cls(prompt, completion, logps, finish_reason, data.get("candidates"), tuple(data.get("images") or ()))


def is_list_of(value: object, *kinds: type) -> bool:
    """Whether `value` is a list whose elements are of these types or subclasses; a bool does not
    count as an int. Takes about 10 ns per element."""
    if not isinstance(value, list):
        return False
    types = set(map(type, value))
    return types.issubset(kinds) or all(issubclass(kind, kinds) and kind is not bool for kind in types)


def _described(value: object, *kinds: type) -> str:
    if not isinstance(value, list):
        return type(value).__name__
    wrong = next(element for element in value if not is_list_of([element], *kinds))
    return f"a list that holds {wrong!r} ({type(wrong).__name__})"


@lists_when_read(*_TOKEN_FIELDS)
@dataclass
class ChatResponse:
    """One completion, with its tokens if the server returned them. Tokens of ludic's engines are
    arrays until they are read, as in a `TokenTrace`."""

    text: str
    """The completion as text, without the end token."""
    completion_token_ids: list[int] | None = None
    """[C] sampled ids."""
    completion_logprobs: list[float] | None = None
    """[C] log-probabilities of those ids."""
    finish_reason: str | None = None
    """`stop`, `length`, or another value of the server."""
    prompt_token_ids: list[int] | None = None
    """[P] ids of the rendered prompt."""
    candidates: list[list[int]] | None = None
    """As in a `TokenTrace`."""
    images: tuple[ImageSpan, ...] = ()
    """As in a `TokenTrace`."""
    routes: Routes | None = None
    """As in a `TokenTrace`."""

    def __post_init__(self) -> None:
        ids, logps = stored(self, "completion_token_ids"), stored(self, "completion_logprobs")
        if ids is not None and logps is not None and len(ids) != len(logps):
            logger.warning("the response has %d token ids and %d log-probabilities", len(ids), len(logps))

    def to_arrays(self) -> ChatResponse:
        """The same response, which holds its tokens as arrays. Raises DataError for ids beyond 32
        bits."""
        from ludic.columns import float_column, int_column  # loads numpy

        makers = zip(_TOKEN_FIELDS, (int_column, int_column, float_column), strict=True)
        arrays: dict[str, Any] = {name: make(held) for name, make in makers if (held := stored(self, name)) is not None}
        return replace(self, **arrays)

    def to_info(self) -> Info:
        """`completion`, and `finish_reason` if there is one."""
        info: Info = {"completion": self.text}
        if self.finish_reason is not None:
            info["finish_reason"] = self.finish_reason
        return info

    def merge_into_info(self, info: Info | None = None) -> Info:
        """Update `info` in place with `to_info()` and return it."""
        info = {} if info is None else info
        info.update(self.to_info())
        return info

    def to_trace(self) -> TokenTrace | None:
        """The trace; None unless the ids of prompt and completion are known."""
        prompt, completion, logps = (_copy_list(stored(self, name)) for name in _TOKEN_FIELDS)
        if prompt is None or completion is None:
            return None
        return TokenTrace(prompt, completion, logps, self.finish_reason, self.candidates, self.images, self.routes)


def _copy_list(values: Any) -> Any:
    """Another list of the same numbers. None and arrays, which are never changed, as they are."""
    return values if values is None or is_column(values) else list(values)


@dataclass
class StepOutcome:
    """The response of an environment to an action."""

    obs: Observation
    """What the agent sees next."""
    reward: float
    truncated: bool
    """The environment truncated the episode."""
    terminated: bool
    """The episode reached its end."""
    info: Info = field(default_factory=dict)
    trace: TokenTrace | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of an environment, for saving and restoring."""

    env_kind: str
    version: str
    episode_id: str
    obs: Observation
    world: dict[str, JSON]
    created_ns: int = field(default_factory=time.time_ns)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Step:
    """One action of one agent. Example: `Step(0, "2+2=", "4", None, 1.0, False, True)`."""

    index: int
    """Position in the rollout, from 0."""
    prev_obs: Observation
    action: str
    """The raw text of the model."""
    next_obs: Observation | None
    """None after the last step."""
    reward: float
    truncated: bool
    terminated: bool
    info: Info = field(default_factory=dict)
    trace: TokenTrace | None = None
    ts_ns: int = field(default_factory=time.time_ns)


@dataclass
class Rollout:
    """One episode of one agent."""

    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    steps: list[Step] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def total_reward(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def length(self) -> int:
        return len(self.steps)

    @property
    def start_ns(self) -> int | None:
        return self.steps[0].ts_ns if self.steps else None

    @property
    def end_ns(self) -> int | None:
        return self.steps[-1].ts_ns if self.steps else None

    @property
    def duration_ns(self) -> int | None:
        return self.steps[-1].ts_ns - self.steps[0].ts_ns if self.steps else None

    @property
    def duration_s(self) -> float | None:
        return None if self.duration_ns is None else self.duration_ns / 1e9
