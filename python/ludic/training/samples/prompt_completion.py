"""One prompt and one completion, rendered with a chat template. `samples.conversations` is for
conversations of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ludic.errors import DataError
from ludic.inference.prompts.template import ChatTemplate, find_turn_end
from ludic.training.samples.preference import add_system_prompt, conversation_tokens, truncate_right
from ludic.types import Message


@dataclass(frozen=True)
class ChatTemplateResult:
    """A conversation of two turns. Example: `<user>hi<assistant>yo<eos>` has `prompt_len` 4 with a
    byte-level tokenizer whose roles are one token each."""

    tokens: list[int]
    """Ids, up to the end token of the completion."""
    text: str
    """The rendered text up to the same end token; never truncated."""
    prompt_len: int
    """Number of tokens before the completion."""
    truncation_meta: dict[str, Any] | None
    """The entries of a sample's `meta` about the truncation; None if nothing was truncated."""


def tokenize_with_chat_template(
    tokenizer: Any, prompt: str, completion: str, *, system_prompt: str | None = None, max_length: int | None = None
) -> ChatTemplateResult:
    """Tokenise the conversation of the user message `prompt` and the assistant message
    `completion`, truncated on the right to `max_length`. Raises DataError for an empty
    completion, and for a prompt that fills `max_length` by itself."""
    question, answer = _turns(prompt, completion, system_prompt)
    full = conversation_tokens(tokenizer, question, answer, "the conversation")
    truncated = truncate_right(full, max_length, "the conversation")
    text = format_chat_template_text(tokenizer, prompt, completion, system_prompt=system_prompt)
    return ChatTemplateResult(truncated.tokens.input_ids, text, full.action_mask.index(1), truncated.cut or None)


def format_chat_template_text(tokenizer: Any, prompt: str, completion: str, *, system_prompt: str | None = None) -> str:
    """Return the conversation as text, up to the end token of the completion, for a server that
    tokenises text itself.

    Example: `<user>hi<assistant>yo<eos>\\n` is cut after `<eos>`. An `<eos>` in the prompt does not
    count.
    """
    question, answer = _turns(prompt, completion, system_prompt)
    template, turn_end = ChatTemplate(tokenizer), find_turn_end(tokenizer)
    text = str(template.apply([*question, *answer], prompt=False, tokenize=False))
    rendered_prompt = str(template.apply(question, prompt=True, tokenize=False))
    end = "" if turn_end.token is None else str(tokenizer.decode([turn_end.token]))
    place = text.rfind(end) if end else -1
    closed = text + end if turn_end.is_open else text
    return text[: place + len(end)] if end and place >= len(rendered_prompt) else closed


def _turns(prompt: str, completion: str, system_prompt: str | None) -> tuple[list[Message], list[Message]]:
    if not completion:
        raise DataError("the completion is empty; there is nothing to score")
    return add_system_prompt([{"role": "user", "content": prompt}], system_prompt), [{"role": "assistant", "content": completion}]
