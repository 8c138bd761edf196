"""Messages as the token ids that a model reads, so that the turns of a dialogue extend one
another token by token."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.inference.prompts.template import ChatTemplate
from ludic.types import Message

REMEMBERED = 4096
"""Prompts and answers that are kept: the members of a group share a prompt, and the next turn of
each begins with its last answer."""


class PromptTokens:
    """Renders with the tokenizer's chat template, and encodes without special tokens of its own.

    A prompt that begins with an earlier prompt and the answer to it, as text, begins with the very
    tokens of both; only what follows is encoded. Without this a sampled answer would be split into
    tokens anew, and differently wherever the model did not write it the way that the tokenizer
    does. Where the template changes earlier turns, such as one that leaves thoughts out, the whole
    is encoded. Of two answers to the same messages with the same text, the tokens of the later one
    count.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()
        self._answered: OrderedDict[str, tuple[str, list[int]]] = OrderedDict()
        """Dialogues up to an answer -> text and ids up to it."""
        self._lock = threading.Lock()

    def encode(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """[P] ids of the prompt. Raises ConfigError where the template cannot show the tools."""
        key = _key(messages, tools)
        with self._lock:
            known = self._prompts.get(key)
        if known is None:
            known = self._encode(messages, tools)
            self._remember(self._prompts, key, known)
        return list(known)

    def answered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        answer: Message,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
    ) -> None:
        """Remember which tokens an answer was made of, for the turns that follow it."""
        text = self._template.render(messages, tools) + self._text(completion_ids)
        self._remember(self._answered, _key([*messages, answer], tools), (text, [*prompt_ids, *completion_ids]))

    def text(self, ids: Sequence[int]) -> str:
        """Ids as the text of an answer, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _encode(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self._template.render(messages, tools)
        before, ids = self._known_beginning(messages, tools, text)
        return [*ids, *self.tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]]

    def _known_beginning(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> tuple[str, list[int]]:
        """The longest dialogue that was answered here and that the text begins with."""
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1].get("role") != "assistant":
                continue
            with self._lock:
                before, ids = self._answered.get(_key(messages[:end], tools), ("", []))
            if before and text.startswith(before):
                return before, ids
        return "", []

    def _text(self, ids: Sequence[int]) -> str:
        """Ids as the text that a prompt has them in, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _remember(self, memory: OrderedDict[str, Any], key: str, value: object) -> None:
        with self._lock:
            memory[key] = value
            while len(memory) > REMEMBERED:
                memory.popitem(last=False)


def _key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([list(messages), list(tools)])
