"""When a thought is cut short: which token a row of a batch must draw next. No vLLM here, so that
it can be tested anywhere.

A request with `max_think` N may sample N tokens; from then on it is given the tokens of `</think>`
one by one, and goes on freely after them. A thought that was closed by itself is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """One request's limit, and its output so far, which the server goes on writing into."""

    limit: int
    output: Sequence[int]


class ThinkLimits:
    """The thoughts of a batch by row."""

    def __init__(self, closing: Sequence[int]) -> None:
        if not closing:
            raise ValueError("the tokenizer makes no tokens of </think>; it cannot close a thought")
        self.closing = tuple(closing)
        self.rows: dict[int, Thought] = {}

    def add(self, row: int, limit: int | None, output: Sequence[int]) -> None:
        """A request takes a row, whoever was there before."""
        self.rows.pop(row, None)
        if limit is not None:
            self.rows[row] = Thought(limit, output)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """A request changes rows: with the one that is there, or in its place."""
        moved, other = self.rows.pop(source, None), self.rows.pop(target, None)
        if moved is not None:
            self.rows[target] = moved
        if swap and other is not None:
            self.rows[source] = other

    def forced(self) -> dict[int, int]:
        """Row -> the only token that it may draw now."""
        found = {row: self._forced(thought) for row, thought in self.rows.items()}
        return {row: token for row, token in found.items() if token is not None}

    def _forced(self, thought: Thought) -> int | None:
        step = len(thought.output) - thought.limit
        if not 0 <= step < len(self.closing) or contains(thought.output[: thought.limit], self.closing):
            return None
        return self.closing[step]


def contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    """Whether the tokens of `part` follow one another somewhere in `tokens`."""
    size = len(part)
    return any(tuple(tokens[i : i + size]) == tuple(part) for i in range(len(tokens) - size + 1))


def heeded(tokens: Sequence[int], limit: int, closing: Sequence[int]) -> bool:
    """Whether an answer can be that of a server that has this limit: it is short, or its thought
    is closed in time."""
    end = limit + len(closing)
    return len(tokens) < end or contains(tokens[:end], closing)


def thought_limit(value: object) -> int | None:
    """`max_think` as a request has it. ValueError for one that is no positive whole number."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"max_think must be a positive integer, got {value!r}")
    return value
