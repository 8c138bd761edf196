"""Calls of a user's `generate_fn`: what it is passed, and the check of what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.rollouts.training.types import Sample

OFFERED = ("seeds", "partial", "weight_version")
"""Arguments that are passed where the signature names them."""


class GenerateCalls:
    """A `generate_fn` with the arguments of every call. Raises ConfigTypeError unless it can be
    called with a list of prompts and `rollout_kwargs`."""

    def __init__(self, generate_fn: Callable[..., Any], rollout_kwargs: Mapping[str, Any]) -> None:
        self._generate, self._rollout_kwargs = generate_fn, dict(rollout_kwargs)
        self.name = name_of_function(generate_fn)
        signature = _read_signature(generate_fn)
        named = () if signature is None else signature.parameters
        self._takes = {name for name in OFFERED if name in named and name not in self._rollout_kwargs}
        if signature is not None:
            self._check_arguments(signature)

    @property
    def takes_partial(self) -> bool:
        """Whether the function can go on with a sample that was interrupted."""
        return "partial" in self._takes

    def _check_arguments(self, signature: inspect.Signature) -> None:
        offered = dict.fromkeys(self._takes)
        try:
            signature.bind([], **self._rollout_kwargs, **offered)
        except TypeError as error:
            raise ConfigTypeError(
                f"{self.name}{signature} cannot be called as generate_fn(prompts{''.join(f', {name}=' for name in self._rollout_kwargs)}): "
                f"{error}; it takes a list of prompts and the rollout_kwargs"
            ) from error

    def __call__(self, prompts: Sequence[Any], *, seeds: Sequence[int], partial: Any = None, weight_version: int = 0) -> Any:
        """What the function returns, awaited by nobody."""
        offered = {"seeds": list(seeds), "partial": partial, "weight_version": weight_version}
        return self._generate(list(prompts), **self._rollout_kwargs, **{name: offered[name] for name in self._takes})

    def check(self, samples: Any, prompts: Sequence[Any]) -> list[Sample]:
        """The samples, if there is one for each prompt. Raises DataError if not."""
        if not isinstance(samples, Sequence) or isinstance(samples, str):
            raise DataError(f"{self.name} returned {_describe(samples)}; it must return a list with one Sample for each prompt")
        strange = next((sample for sample in samples if not isinstance(sample, Sample)), None)
        if strange is not None:
            raise DataError(f"{self.name} returned a list with {_describe(strange)}; every element must be a Sample")
        if len(samples) != len(prompts):
            raise DataError(
                f"{self.name} returned {len(samples)} samples for {len(prompts)} prompts; it must return one Sample for each prompt it "
                "is given (n_samples_per_prompt calls it with the same prompt several times)"
            )
        return list(samples)


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: also for `functools.partial` and for an object with
    `async def __call__`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of_function(function: Callable[..., Any]) -> str:
    """Its name for messages."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check_reward_function(reward_fn: Any) -> None:
    """Raise ConfigTypeError unless it is a function, such as for a coroutine."""
    if reward_fn is not None and not callable(reward_fn):
        if inspect.iscoroutine(reward_fn):
            reward_fn.close()
        raise ConfigTypeError(f"reward_fn must be a function of a Sample, not {_describe(reward_fn)}; pass it without calling it")


def to_reward(value: Any, name: str) -> float:
    """The number that a reward function returned. Raises ConfigError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} returned {_describe(value)}; a reward function is called with one Sample and returns its reward, a number"
        ) from error


def _read_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for functions that do not tell, such as some of C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
