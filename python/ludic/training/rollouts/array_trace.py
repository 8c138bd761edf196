"""Token traces that came as bytes: their numbers are arrays, and lists only for whoever reads the
attributes of a `TokenTrace`."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError
from ludic.types import TokenTrace


class ArrayTrace(TokenTrace):
    """A `TokenTrace` that holds arrays. Its attributes are lists as everywhere, made when they are
    first read: a token takes 30 ns as a Python number and 1 ns in an array.

    Example: `ArrayTrace(np.array([100, 101]), np.array([102, 2]), np.array([-0.1, -0.7]))` equals
    `TokenTrace([100, 101], [102, 2], [-0.1, -0.7])`.
    """

    prompt: NDArray[np.int32]
    """[P] `prompt_token_ids`."""
    completion: NDArray[np.int32]
    """[C] `completion_token_ids`."""
    logps: NDArray[np.float64] | None
    """[C] `completion_logprobs`. Of 64 bits, so that an element is a float of Python."""

    def __init__(
        self, prompt_token_ids: Any, completion_token_ids: Any, completion_logprobs: Any = None, finish_reason: str | None = None
    ) -> None:
        self.prompt, self.completion = (np.asarray(ids, np.int32) for ids in (prompt_token_ids, completion_token_ids))
        self.logps = None if completion_logprobs is None else np.asarray(completion_logprobs, np.float64)
        object.__setattr__(self, "finish_reason", finish_reason)
        if self.logps is not None and len(self.logps) != len(self.completion):
            raise DataError(f"{len(self.logps)} log-probabilities for {len(self.completion)} tokens; there must be one for each")

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        ids: list[int] = self.prompt.tolist()
        return ids

    @cached_property
    def completion_token_ids(self) -> list[int]:
        ids: list[int] = self.completion.tolist()
        return ids

    @cached_property
    def completion_logprobs(self) -> list[float] | None:
        return None if self.logps is None else [*self.logps.tolist()]

    def to_lists(self) -> TokenTrace:
        """The trace that holds lists."""
        return TokenTrace(*_values(self))

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if isinstance(other, TokenTrace) else NotImplemented

    __hash__ = TokenTrace.__hash__  # which raises, as a list does


def columns_of(trace: TokenTrace) -> tuple[Any, Any, Any]:
    """Ids of the prompt [P] and the completion [C], and log-probabilities [C] or None, as the trace
    holds them: arrays of an `ArrayTrace`, else lists."""
    if isinstance(trace, ArrayTrace):
        return trace.prompt, trace.completion, trace.logps
    return trace.prompt_token_ids, trace.completion_token_ids, trace.completion_logprobs


def _values(trace: TokenTrace) -> tuple[Any, ...]:
    return tuple(getattr(trace, field.name) for field in fields(trace))
