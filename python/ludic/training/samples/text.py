"""Plain text as token ids, without a chat template."""

from __future__ import annotations

from typing import Any

from ludic.errors import RowError
from ludic.inference.prompts.template import begin_text
from ludic.training.samples.conversations import ChatTokens


def tokenize_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of the text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def append_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return `ids` with the end token at the end, appended if it is missing; unchanged if the
    tokenizer has no end token. Example: with end token 2, [5, 6] and [5, 6, 2] both give
    [5, 6, 2]."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def tokenize_document(tokenizer: Any, text: str, max_tokens: int | None, where: str) -> list[ChatTokens]:
    """Return a plain text as samples whose tokens are all trained but the first, which nothing
    precedes. Special tokens that the tokenizer begins a text with, and the end token, belong to it.

    A text of more than `max_tokens` tokens is divided: each further sample begins with the last
    token of the one before it, as context, so that each token is trained once. Raises RowError,
    naming the row `where`, for an empty text.

    Example: ids [5, 6, 7, 8, 2] with `max_tokens` 3 are [5, 6, 7] with mask [0, 1, 1] and
    [7, 8, 2] with mask [0, 1, 1].
    """
    if not text:
        raise RowError(f"{where} has an empty text; leave the row out", reason="empty_response")
    ids = append_eos(tokenizer, list(tokenizer(text, verbose=False)["input_ids"]))
    longest = max(2, len(ids) if max_tokens is None else max_tokens)
    starts = range(0, max(1, len(ids) - 1), longest - 1)
    pieces = [ids[start : start + longest] for start in starts]
    return [ChatTokens(piece, [0] + [1] * (len(piece) - 1)) for piece in pieces]


def tokenize_prompt_completion(tokenizer: Any, prompt: str, completion: str, where: str) -> ChatTokens:
    """Return the ids of prompt, completion and end token; completion and end token are the action.
    The prompt begins with the token with which the tokenizer begins texts, if there is one.

    If the tokenizer merges characters of prompt and completion into one token, the two are
    tokenised separately: the policy reads the prompt by itself. Raises RowError, naming the row
    `where`, for an empty completion.

    Example with end token 2: `2+` is [5, 6] and `2+2` is [5, 6, 5], so the completion is [5]: ids
    [5, 6, 5, 2], mask [0, 0, 1, 1]. If `2+2` were the single token [8], the completion `2` would be
    tokenised by itself.
    """
    prompt_ids, joint_ids = tokenize_text(tokenizer, prompt), tokenize_text(tokenizer, prompt + completion)
    is_prefix = joint_ids[: len(prompt_ids)] == prompt_ids
    completion_ids = joint_ids[len(prompt_ids) :] if is_prefix else tokenize_text(tokenizer, completion)
    if not completion_ids:
        raise RowError(f"{where} has an empty completion; leave the row out", reason="empty_response")
    completion_ids = append_eos(tokenizer, completion_ids)
    prompt_ids = begin_text(tokenizer, prompt_ids)
    return ChatTokens([*prompt_ids, *completion_ids], [0] * len(prompt_ids) + [1] * len(completion_ids))
