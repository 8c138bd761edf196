"""Cuts prompts that are too long. Only user messages are cut, so that the rendered template keeps
its beginning and its end."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludic.errors import ConfigError
from ludic.types import Message

logger = logging.getLogger(__name__)

MAX_PROMPT_CHARS = 2048
"""Default of the environment variable `MAX_PROMPT_CHARS`."""
CHARS_PER_TOKEN = 4


def prompt_limit(
    max_prompt_chars: int | None = None,
    *,
    max_prompt_tokens: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> int | None:
    """Maximum number of characters of a prompt; None for no limit.

    The limit is `max_prompt_chars`, else the environment's `MAX_PROMPT_CHARS`, else 2048; 0 and
    below mean no limit. With `max_prompt_tokens` it is at least four characters per token.
    """
    limit = max_prompt_chars
    if limit is None:
        text = environment.get("MAX_PROMPT_CHARS", "").strip() or str(MAX_PROMPT_CHARS)
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

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """Cut the excess characters from the ends of user messages, beginning with the longest
        message."""
        texts = [message.get("content") for message in messages]
        lengths = [len(text) if isinstance(text, str) else 0 for text in texts]
        excess = 0 if self.limit is None else sum(lengths) - self.limit
        if excess <= 0:
            return list(messages)
        clipped = list(messages)
        users = [i for i, message in enumerate(messages) if message.get("role") == "user" and isinstance(texts[i], str)]
        for i in sorted(users, key=lambda i: -lengths[i]):
            removed = min(excess, lengths[i])
            clipped[i] = {**messages[i], "content": str(texts[i])[: lengths[i] - removed]}
            excess -= removed
            if not excess:
                break
        self.clipped += 1
        if self.clipped == 1:
            logger.warning(
                "a prompt of %d characters was cut to %d; set MAX_PROMPT_CHARS higher, or 0 for no limit (logged once)",
                sum(lengths),
                self.limit,
            )
        return clipped
