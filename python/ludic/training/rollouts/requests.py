"""Makes requests from data: from a queue until it is empty, or from a sequence in an endless
loop."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ludic.data.passes import Passes, shuffle_range
from ludic.errors import ConfigError, RequestsExhausted
from ludic.inference.request import InferenceSpec
from ludic.training.rollouts.request_groups import GRPORequestStrategy, IdentityStrategy, RequestStrategy
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest

Row = tuple[int, Any]
"""(index in the data set, sample)"""
OnEmpty = Literal["raise", "return_empty"]


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
    _check_batch_size(batch_size)
    if on_empty not in ("raise", "return_empty"):
        raise ConfigError(f"on_empty ({on_empty!r}) must be 'raise' or 'return_empty'")
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
    _check_groups_differ(group_size, inference)
    build = _request_builder(
        env_kind, protocol_kind, inference, env_kwargs_fn, protocol_kwargs, request_meta_fn, env_seed_fn, sampling_seed_fn
    )
    return make_requests_fn_from_queue(
        samples_q, batch_size=batch_size, build_request=build, strategy=_strategy_for(group_size), on_empty=on_empty
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
    sample. The other arguments are those of `make_dataset_queue_requests_fn`.
    """
    _check_groups_differ(group_size, inference)
    build = _request_builder(
        env_kind, protocol_kind, inference, env_kwargs_fn, protocol_kwargs, request_meta_fn, env_seed_fn, sampling_seed_fn
    )
    return SequenceRequests(
        samples, batch_size=batch_size, build=build, strategy=_strategy_for(group_size), shuffle=shuffle, rng_seed=rng_seed
    )


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
        _check_batch_size(batch_size)
        self._samples, self._batch_size, self._build = samples, batch_size, build
        self._strategy, self._rng_seed = strategy, rng_seed
        self._passes = Passes(len(samples), self._shuffle if shuffle else None)
        self.position = 0

    def __call__(self) -> list[RolloutRequest]:
        rows = [self._row(self.position + i) for i in range(self._batch_size)]
        requests = self._strategy.expand([self._build(row) for row in rows])
        self.position += self._batch_size
        return requests

    def _row(self, position: int) -> Row:
        index = self._passes.at(position)
        return index, self._samples[index]

    def _shuffle(self, number: int) -> Sequence[int]:
        """The order of pass `number`."""
        return shuffle_range(len(self._samples), f"{self._rng_seed}/{number}")

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the facts that determine the order."""
        return {"position": self.position, "num_samples": len(self._samples), "rng_seed": self._rng_seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position in `state`. Raises ConfigError if the number of samples or the
        seed differs, since the order would differ."""
        for name, own in (("num_samples", len(self._samples)), ("rng_seed", self._rng_seed)):
            if state.get(name, own) != own:
                raise ConfigError(
                    f"the saved position belongs to {name}={state[name]}, here it is {own}: the requests would not be those of the "
                    "run that is resumed; give the same samples and rng_seed, or begin a new run"
                )
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ConfigError(
                f"the saved position of the requests ({position!r}) must be a whole number >= 0; take an older checkpoint"
            )
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


def _strategy_for(group_size: int) -> RequestStrategy:
    return IdentityStrategy() if group_size == 1 else GRPORequestStrategy(group_size)


def _check_groups_differ(group_size: int, inference: InferenceSpec | None) -> None:
    """Raise ConfigError for groups at temperature 0: members differ only in their sampling seed,
    which greedy decoding ignores."""
    if group_size > 1 and inference is not None and inference.sampling.temperature == 0:
        raise ConfigError(
            f"group_size ({group_size}) at temperature 0 gives {group_size} equal answers, so all advantages are 0; raise "
            "inference.sampling.temperature, or set group_size=1"
        )


def _check_batch_size(batch_size: int) -> None:
    if batch_size <= 0:
        raise ConfigError(f"batch_size must be positive, got {batch_size}")
