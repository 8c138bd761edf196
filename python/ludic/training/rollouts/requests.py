"""Makes requests from data: from a queue until it is empty, or from a sequence in an endless
loop. Request strategies expand a list of requests into groups, or leave it unchanged."""

from __future__ import annotations

import copy
import queue
import random
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import iscoroutine
from typing import Any, Literal, Protocol, runtime_checkable

from ludic.data.passes import Passes, shuffle_range
from ludic.errors import ConfigError, ConfigTypeError, RequestsExhausted, check_value
from ludic.inference.request import InferenceSpec
from ludic.training.credit_assignment import check_group_size
from ludic.training.group_credit import GREEDY
from ludic.training.rollouts.group_ledger import check_number, damaged
from ludic.training.types import EnvSpec, ProtocolSpec, RequestsFn, RolloutRequest

Row = tuple[int, Any]
"""(index in the data set, sample)"""
OnEmpty = Literal["raise", "return_empty"]


class RequestStrategy(Protocol):
    """Expands requests."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests to play."""
        ...


@dataclass
class IdentityStrategy:
    """Leaves the requests unchanged."""

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests unchanged."""
        return list(requests)


@dataclass
class GRPORequestStrategy:
    """Expands every request to `group_size` requests for the same problem: the same environment
    seed, consecutive sampling seeds, the same `group_id`.

    Example, `group_size=3`: a request with `env_seed` 7 and `sampling_seed` 100 becomes three with
    `env_seed` 7 and `sampling_seed` 100, 101, 102.

    Seeds that are None in a request, and the group's id, are drawn from Python's global random
    generator, whose state checkpoints save. `greedy`: a further member, the last, takes the most
    likely tokens.
    """

    group_size: int
    greedy: bool = False

    def __post_init__(self) -> None:
        check_group_size(self.group_size)

    def expand(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the members of each request's group, group after group."""
        members = []
        for request in requests:
            env_seed = random.getrandbits(32) if request.env_seed is None else request.env_seed
            sampling_seed = random.getrandbits(32) if request.sampling_seed is None else request.sampling_seed
            members += _make_members(request, self.group_size + self.greedy, env_seed, sampling_seed, random.getrandbits(128))
            if self.greedy:
                last, spec = members[-1], request.inference or InferenceSpec()
                sampling = replace(spec.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
                members[-1] = replace(last, inference=replace(spec, sampling=sampling), meta={**last.meta, GREEDY: True})
        return members


def _make_members(
    request: RolloutRequest, group_size: int, env_seed: int, sampling_seed: int, group_bits: int
) -> list[RolloutRequest]:
    """The members of one group: the same environment seed, consecutive sampling seeds, one
    `group_id`."""
    meta = {**request.meta, "group_id": str(uuid.UUID(int=group_bits, version=4))}
    return [
        replace(request, env_seed=env_seed, sampling_seed=sampling_seed + member, num_episodes=1, meta=dict(meta))
        for member in range(group_size)
    ]


def make_requests_fn_from_queue(
    q: queue.Queue[Any],
    *,
    batch_size: int,
    build_request: Callable[[Any], RolloutRequest],
    strategy: RequestStrategy | None = None,
    on_empty: OnEmpty = "raise",
) -> Callable[[], list[RolloutRequest]]:
    """Return a function that makes the requests of the next `batch_size` entries of the queue; the
    last batch may be smaller.

    If the queue is empty, the function raises RequestsExhausted, or with `on_empty="return_empty"`
    returns [].
    """
    check_value("batch_size", batch_size, above=0)
    check_value("on_empty", on_empty, choices=("raise", "return_empty"))
    expand = (strategy or IdentityStrategy()).expand

    def requests() -> list[RolloutRequest]:
        entries: list[Any] = []
        while len(entries) < batch_size:
            try:
                entries.append(q.get_nowait())
            except queue.Empty:
                break
        if not entries and on_empty == "raise":
            raise RequestsExhausted("the queue of samples is empty")
        return expand([build_request(entry) for entry in entries])

    return requests


def make_dataset_queue_requests_fn(
    samples_q: queue.Queue[Row],
    *,
    batch_size: int,
    env_kind: str,
    protocol_kind: str,
    inference: InferenceSpec | None = None,
    env_kwargs_fn: Callable[[Any], Mapping[str, Any]] | None = None,
    protocol_kwargs: Mapping[str, Any] | None = None,
    request_meta_fn: Callable[[int, Any], Mapping[str, Any]] | None = None,
    env_seed_fn: Callable[[int, Any], int] | None = None,
    sampling_seed_fn: Callable[[int, Any], int] | None = None,
    group_size: int = 1,
    on_empty: OnEmpty = "raise",
) -> Callable[[], list[RolloutRequest]]:
    """Return a function that makes requests from a queue of `(index, sample)`. Each sample becomes
    a group of `group_size` requests.

    By default the environment gets the keyword `sample`, and both seeds are the index.
    """
    strategy = _strategy_for(group_size, inference)
    build = _request_builder(
        env_kind, protocol_kind, inference, env_kwargs_fn, protocol_kwargs, request_meta_fn, env_seed_fn, sampling_seed_fn
    )
    return make_requests_fn_from_queue(
        samples_q, batch_size=batch_size, build_request=build, strategy=strategy, on_empty=on_empty
    )


def make_dataset_sequence_requests_fn(
    samples: Sequence[Any],
    *,
    batch_size: int,
    env_kind: str,
    protocol_kind: str,
    inference: InferenceSpec | None = None,
    env_kwargs_fn: Callable[[Any], Mapping[str, Any]] | None = None,
    protocol_kwargs: Mapping[str, Any] | None = None,
    request_meta_fn: Callable[[int, Any], Mapping[str, Any]] | None = None,
    env_seed_fn: Callable[[int, Any], int] | None = None,
    sampling_seed_fn: Callable[[int, Any], int] | None = None,
    group_size: int = 1,
    shuffle: bool = False,
    rng_seed: int = 0,
) -> SequenceRequests:
    """Return a function that makes requests from a sequence in an endless loop. After the last
    sample a new pass begins, with `shuffle` in a new order.

    The function has `state_dict` and `load_state_dict`, so a resumed run continues with the next
    sample. The other arguments are as in `make_dataset_queue_requests_fn`.
    """
    strategy = _strategy_for(group_size, inference)
    build = _request_builder(
        env_kind, protocol_kind, inference, env_kwargs_fn, protocol_kwargs, request_meta_fn, env_seed_fn, sampling_seed_fn
    )
    return SequenceRequests(samples, batch_size=batch_size, build=build, strategy=strategy, shuffle=shuffle, rng_seed=rng_seed)


class SequenceRequests:
    """Makes requests from samples, pass after pass. The position is the whole state, since the
    order of pass k depends only on the seed and k."""

    def __init__(
        self,
        samples: Sequence[Any],
        *,
        batch_size: int,
        build: Callable[[Row], RolloutRequest],
        strategy: RequestStrategy,
        shuffle: bool,
        rng_seed: int,
    ) -> None:
        if len(samples) == 0:
            raise ConfigError("samples is empty; at least one sample is needed to make requests")
        check_value("batch_size", batch_size, above=0)
        self._samples, self._batch_size, self._build = samples, batch_size, build
        self._strategy, self._rng_seed = strategy, rng_seed
        order = (lambda number: shuffle_range(len(samples), f"{rng_seed}/{number}")) if shuffle else None
        self._passes = Passes(len(samples), order)
        self.position = 0

    def __call__(self) -> list[RolloutRequest]:
        indices = [self._passes.at(self.position + i) for i in range(self._batch_size)]
        requests = self._strategy.expand([self._build((index, self._samples[index])) for index in indices])
        self.position += self._batch_size
        return requests

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the facts that determine the order."""
        return {"position": self.position, "num_samples": len(self._samples), "rng_seed": self._rng_seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position in `state`. Raises ConfigError if the number of samples or the
        seed differs, since the order would differ."""
        for name, own in (("num_samples", len(self._samples)), ("rng_seed", self._rng_seed)):
            if state.get(name, own) != own:
                raise ConfigError(f"the saved {name} is {state[name]}, here it is {own}; give the same samples and rng_seed")
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ConfigError(f"the saved position of the requests ({position!r}) must be a whole number >= 0")
        self.position = position


def _request_builder(
    env_kind: str,
    protocol_kind: str,
    inference: InferenceSpec | None,
    env_kwargs_fn: Callable[[Any], Mapping[str, Any]] | None,
    protocol_kwargs: Mapping[str, Any] | None,
    request_meta_fn: Callable[[int, Any], Mapping[str, Any]] | None,
    env_seed_fn: Callable[[int, Any], int] | None,
    sampling_seed_fn: Callable[[int, Any], int] | None,
) -> Callable[[Row], RolloutRequest]:
    """Return a function that makes the request of a row, with the documented defaults."""

    def build(row: Row) -> RolloutRequest:
        index, sample = row
        return RolloutRequest(
            env=EnvSpec(kind=env_kind, kwargs=dict(env_kwargs_fn(sample)) if env_kwargs_fn else {"sample": sample}),
            protocol=ProtocolSpec(kind=protocol_kind, kwargs=dict(protocol_kwargs or {})),
            env_seed=env_seed_fn(index, sample) if env_seed_fn else index,
            sampling_seed=sampling_seed_fn(index, sample) if sampling_seed_fn else index,
            inference=inference,
            meta=dict(request_meta_fn(index, sample)) if request_meta_fn else {},
        )

    return build


def _strategy_for(group_size: int, inference: InferenceSpec | None) -> RequestStrategy:
    """Raises ConfigError for groups at temperature 0: members differ only in their sampling seed,
    which greedy decoding ignores."""
    if group_size > 1 and inference is not None and inference.sampling.temperature == 0:
        raise ConfigError(f"group_size ({group_size}) at temperature 0 gives equal answers; raise inference.sampling.temperature")
    return IdentityStrategy() if group_size == 1 else GRPORequestStrategy(group_size)


@runtime_checkable
class Stateful(Protocol):
    """An engine or a function of requests with a position that checkpoints save."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue at the position in `state`."""
        ...


class RequestsByPosition:
    """The requests of a function that returns them in batches, as `Prompts`.

    A request is found again by the state that the function had before its batch, so the function
    needs `state_dict` and `load_state_dict` for a run that is resumed. Requests that are groups
    already, with `group_size` members of one `group_id`, count as one.

        batches of 3: positions 0 1 2 | 3 4 5; at(4) loads the state before the second batch, calls
        the function, and takes the request with index 1
    """

    def __init__(self, requests_fn: RequestsFn, group_size: int, oldest_kept: Callable[[], int | None] = lambda: 0) -> None:
        """`oldest_kept()`: no position before this one is requested any more. None means no
        position that is taken."""
        self._oldest_kept = oldest_kept
        position: object = requests_fn
        self._requests_fn, self._group_size = requests_fn, group_size
        self._function = position if isinstance(position, Stateful) else None
        self._next = 0
        self._starts: list[tuple[int, dict[str, Any] | None]] = []
        """(position of the first request of a batch, the function's state before it)"""
        self._batch: tuple[int, list[RolloutRequest]] = (0, [])
        """(position of its first request, the requests) of the batch that `take` takes from."""

    def take(self) -> tuple[int, RolloutRequest]:
        first, batch = self._batch
        if self._next == first + len(batch):
            state = self._function_state()
            batch = self._ask()
            if not batch:
                raise RequestsExhausted("requests has returned no more requests")
            first = self._next
            self._batch = first, batch
            oldest = self._oldest_kept()
            del self._starts[: len(self._starts) if oldest is None else max(0, self._index_of(oldest))]
            self._starts.append((first, state))
        self._next += 1
        return self._next - 1, batch[self._next - 1 - first]

    def at(self, position: int) -> RolloutRequest:
        first, batch = self._batch
        if not first <= position < first + len(batch):
            first, batch = self._batch_of(position)
        return batch[position - first]

    def state_dict(self, kept: Iterable[int]) -> dict[str, Any]:
        """The state from which the next requests and those at the positions `kept` follow."""
        needed = {self._index_of(position) for position in [*kept, self._next - 1] if position >= 0}
        self._starts = [start for i, start in enumerate(self._starts) if i in needed]
        return {"next": self._next, "starts": [list(start) for start in self._starts], "requests": self._function_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError for a damaged one; the caller then puts back
        what `remember` has kept."""
        keys = {"next", "starts", "requests"}
        if not isinstance(state, Mapping) or set(state) != keys or not isinstance(state["starts"], list):
            raise damaged(f"requests ({state!r:.200}) must have {', '.join(sorted(keys))}, and starts a list")
        self._next = check_number("requests.next", state["next"])
        self._starts, before = [], -1
        for start in state["starts"]:
            if not isinstance(start, list | tuple) or len(start) != 2:
                raise damaged(f"a start of requests ({start!r:.200}) must be a position and a state")
            before = check_number("a position of requests.starts", start[0], least=before + 1, most=self._next - 1)
            self._starts.append((before, start[1]))
        self._batch = self._next, []
        if self._function is not None:
            self._function.load_state_dict(copy.deepcopy(state["requests"]))
            if self._next:
                self._batch = self._batch_of(self._next - 1)

    def remember(self) -> Callable[[], None]:
        """A function that sets everything back to what it is now."""
        kept = self._next, list(self._starts), self._batch
        function = self._function_state()

        def put_back() -> None:
            self._next, self._starts, self._batch = kept
            if self._function is not None:
                self._function.load_state_dict(function or {})

        return put_back

    def _function_state(self) -> dict[str, Any] | None:
        return None if self._function is None else copy.deepcopy(self._function.state_dict())

    def _index_of(self, position: int) -> int:
        return bisect_right(self._starts, position, key=lambda start: start[0]) - 1

    def _batch_of(self, position: int) -> tuple[int, list[RolloutRequest]]:
        """The batch of a position, requested again. The function's state is then as before."""
        if self._function is None:
            raise ConfigError("requests has no state_dict to find the prompts of unfinished groups; add it and load_state_dict")
        index = self._index_of(position)
        if index < 0:
            raise damaged(f"it does not say which requests had position {position}")
        first, before = self._starts[index]
        now = copy.deepcopy(self._function.state_dict())
        try:
            self._function.load_state_dict(copy.deepcopy(before or {}))
            batch = self._ask()
        finally:
            self._function.load_state_dict(now)
        if position >= first + len(batch):
            raise damaged(f"position {position} is said to be in a batch of {len(batch)} requests from position {first} on")
        return first, batch

    def _ask(self) -> list[RolloutRequest]:
        returned = self._requests_fn()
        if not isinstance(returned, Sequence):
            if iscoroutine(returned):
                returned.close()
            raise ConfigTypeError(f"requests returned {type(returned).__name__}; it must be a plain function that returns a list")
        prompts: list[RolloutRequest] = []  # the first request of every group
        sizes: Counter[object] = Counter()
        for request in returned:
            _check_one_episode(request)
            group_id = request.meta.get("group_id")
            if group_id is None or group_id not in sizes:
                prompts.append(request)
            if group_id is not None:
                sizes[group_id] += 1
        wrong = {size for size in sizes.values() if size != self._group_size}
        if wrong:
            raise ConfigError(f"requests gave a group of {min(wrong)} members, group_size is {self._group_size}; return as many")
        return prompts


def make_group(request: RolloutRequest, ordinal: int, group_size: int, seed: int) -> list[RolloutRequest]:
    """The members of group number `ordinal`: the same environment seed, consecutive sampling seeds,
    one `group_id`. What the request does not say follows from (seed, ordinal).

    Example, `group_size=3`: a request with `sampling_seed` 100 becomes three with 100, 101, 102.
    """
    _check_one_episode(request)
    rng = random.Random(f"group {seed} {ordinal}")
    group_bits, env_seed, sampling_seed = rng.getrandbits(128), rng.getrandbits(31), rng.getrandbits(31)
    env_seed = env_seed if request.env_seed is None else request.env_seed
    sampling_seed = sampling_seed if request.sampling_seed is None else request.sampling_seed
    return _make_members(request, group_size, env_seed, sampling_seed, group_bits)


def _check_one_episode(request: RolloutRequest) -> None:
    if request.num_episodes != 1:
        raise ConfigError(f"a request has num_episodes={request.num_episodes}; set group_size instead")
