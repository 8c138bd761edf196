"""One prompt and one completion through a chat template. Conversations of any length:
`batching.chat_template`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ludic.errors import DataError
from ludic.training.samples.preference import conversation_tokens, cut_from_the_right, with_system
from ludic.types import Message


@dataclass(frozen=True)
class ChatTemplateResult:
    """A conversation of two turns. Example: `<user>hi<assistant>yo<eos>` of a byte-level model
    has `prompt_len` 4 where the roles are one token each."""

    tokens: list[int]
    """Ids up to the end token of the completion."""
    text: str
    """What the template wrote, up to the same place, and never cut."""
    prompt_len: int
    """Tokens before the completion."""
    truncation_meta: dict[str, Any] | None
    """What a sample's `meta` says of the cut; None where there was none."""


def tokenize_with_chat_template(
    tokenizer: Any, prompt: str, completion: str, *, system_prompt: str | None = None, max_length: int | None = None
) -> ChatTemplateResult:
    """Ids of the conversation in which the user says `prompt` and the assistant `completion`,
    cut on the right to `max_length`. Raises DataError for an empty completion, and for a prompt
    that fills `max_length` alone."""
    question, answer = _turns(prompt, completion, system_prompt)
    whole = conversation_tokens(tokenizer, question, answer, "the conversation")
    found = cut_from_the_right(whole, max_length, "the conversation")
    text = format_chat_template_text(tokenizer, prompt, completion, system_prompt=system_prompt)
    return ChatTemplateResult(found.tokens.input_ids, text, whole.action_mask.index(1), found.cut or None)


def format_chat_template_text(tokenizer: Any, prompt: str, completion: str, *, system_prompt: str | None = None) -> str:
    """The conversation as text, up to the end token of the completion: what a server that
    tokenises by itself is to be sent."""
    question, answer = _turns(prompt, completion, system_prompt)
    text: str = tokenizer.apply_chat_template([*question, *answer], tokenize=False, add_generation_prompt=False)
    begun: str = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    end = getattr(tokenizer, "eos_token", None)
    place = text.rfind(end) if end else -1
    return text[: place + len(end)] if end and place >= len(begun) else text


def _turns(prompt: str, completion: str, system_prompt: str | None) -> tuple[list[Message], list[Message]]:
    if not completion:
        raise DataError("the completion is empty; there is nothing to score")
    return with_system([{"role": "user", "content": prompt}], system_prompt), [{"role": "assistant", "content": completion}]
