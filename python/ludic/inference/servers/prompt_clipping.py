"""Prompts that are too long are cut within what the user says, so that the template's head and
its call for an answer stay whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludic.errors import ConfigError
from ludic.types import Message

logger = logging.getLogger(__name__)

MAX_PROMPT_CHARS = 2048
"""Unless the environment's `MAX_PROMPT_CHARS` says otherwise."""
CHARS_PER_TOKEN = 4


def prompt_limit(
    max_prompt_chars: int | None = None,
    *,
    max_prompt_tokens: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """Characters that a prompt may have; None for no limit.

    `max_prompt_chars`, else the environment's `MAX_PROMPT_CHARS`, else 2048; 0 and below set no
    limit. Where a limit in tokens is known, four characters of each are let through.
    """
    env = os.environ if environment is None else environment
    limit = max_prompt_chars
    if limit is None:
        text = env.get("MAX_PROMPT_CHARS", "").strip() or str(MAX_PROMPT_CHARS)
        try:
            limit = int(text)
        except ValueError:
            raise ConfigError(f"MAX_PROMPT_CHARS ({text!r}) must be a whole number of characters; 0 sets no limit") from None
    if limit <= 0:
        return None
    return limit if max_prompt_tokens is None else max(limit, CHARS_PER_TOKEN * max_prompt_tokens)


@dataclass
class PromptClipper:
    """Cuts prompts to `limit` characters of content, and counts them."""

    limit: int | None
    clipped: int = 0
    """Prompts that were cut."""
    _warned: bool = field(default=False, repr=False)

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, those of the user cut at their ends, the longest first, by as many
        characters as are too many."""
        texts = [message.get("content") for message in messages]
        lengths = [len(text) if isinstance(text, str) else 0 for text in texts]
        excess = 0 if self.limit is None else sum(lengths) - self.limit
        if excess <= 0:
            return list(messages)
        cut = list(messages)
        users = [i for i, message in enumerate(messages) if message.get("role") == "user" and isinstance(texts[i], str)]
        for i in sorted(users, key=lambda i: -lengths[i]):
            gone = min(excess, lengths[i])
            cut[i] = {**messages[i], "content": str(texts[i])[: lengths[i] - gone]}
            excess -= gone
            if not excess:
                break
        self._count(sum(lengths))
        return cut

    def _count(self, length: int) -> None:
        self.clipped += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "a prompt of %d characters was cut to %d; set MAX_PROMPT_CHARS higher, or 0 for no limit (said once)",
                length,
                self.limit,
            )
