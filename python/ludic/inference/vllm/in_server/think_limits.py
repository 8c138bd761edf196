"""Forces the tokens of `</think>` on rows of a batch whose thinking has reached its limit. This
module does not need vLLM.

A request with `max_think` N samples N tokens freely. Then the tokens of `</think>` are forced one
by one, and it samples freely again. Nothing is forced if the model has closed its thinking itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """The limit of one request, and its output so far. The server appends to that list."""

    limit: int
    output: Sequence[int]


class ThinkLimits:
    """The thoughts of a batch, by row."""

    def __init__(self, closing: Sequence[int]) -> None:
        if not closing:
            raise ValueError("the tokenizer encodes </think> to no tokens, so thinking cannot be closed")
        self.closing = tuple(closing)
        self.rows: dict[int, Thought] = {}

    def add(self, row: int, limit: int | None, output: Sequence[int]) -> None:
        """Put a request into a row, replacing any other."""
        self.rows.pop(row, None)
        if limit is not None:
            self.rows[row] = Thought(limit, output)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """Move a request to another row: swap it with the one there, or replace that."""
        moved, other = self.rows.pop(source, None), self.rows.pop(target, None)
        if moved is not None:
            self.rows[target] = moved
        if swap and other is not None:
            self.rows[source] = other

    def forced_tokens(self) -> dict[int, int]:
        """Row -> the token that it must sample next. Other rows sample freely. With limit 3 and
        closing (7, 8): 7 after 3 tokens of output, 8 after 4 tokens."""
        tokens: dict[int, int] = {}
        for row, thought in self.rows.items():
            step = len(thought.output) - thought.limit
            if 0 <= step < len(self.closing) and not contains(thought.output[: thought.limit], self.closing):
                tokens[row] = self.closing[step]
        return tokens


def contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` is a contiguous part of `tokens`."""
    size = len(part)
    return any(tuple(tokens[i : i + size]) == tuple(part) for i in range(len(tokens) - size + 1))


def respects_limit(tokens: Sequence[int], limit: int, closing: Sequence[int]) -> bool:
    """Whether an answer can come from a server that enforces this limit: it is short, or its
    thinking is closed in time."""
    end = limit + len(closing)
    return len(tokens) < end or contains(tokens[:end], closing)


def parse_max_think(value: object) -> int | None:
    """The `max_think` of a request. Raises ValueError unless it is None or a positive integer."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"max_think must be a positive integer, got {value!r}")
    return value
