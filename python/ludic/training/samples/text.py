"""Plain text as token ids, without a template."""

from __future__ import annotations

from typing import Any

from ludic.errors import RowError
from ludic.training.samples.conversations import ChatTokens


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of the text, and no others."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ended(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` with the end token, which they may have already; as they are where the tokenizer has
    none."""
    end = getattr(tokenizer, "eos_token_id", None)
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def prompt_and_completion(tokenizer: Any, prompt: str, completion: str, where: str) -> ChatTokens:
    """Prompt, completion and end token, of which the latter two are the action. Where the
    tokenizer merges across the border, the two are tokenised apart: the policy, too, sees the
    prompt alone. Raises RowError, naming the row, for an empty completion."""
    before, joint = text_ids(tokenizer, prompt), text_ids(tokenizer, prompt + completion)
    after = joint[len(before) :] if joint[: len(before)] == before else text_ids(tokenizer, completion)
    if not after:
        raise RowError(f"{where} has an empty completion; leave the row out", reason="empty_response")
    after = ended(tokenizer, after)
    return ChatTokens([*before, *after], [0] * len(before) + [1] * len(after))
