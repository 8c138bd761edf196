"""Converts messages to prompt token ids, with a cache, so that the ids of each turn of a dialogue
begin with the ids of the previous turn."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from ludic.inference.prompts.template import ChatTemplate, begin_prompt, find_turn_end
from ludic.types import Message

V = TypeVar("V")

CACHE_SIZE = 4096
"""Dialogues in a cache. The samples of a group share a prompt, and the next turn of each begins
with its last answer."""


@dataclass(frozen=True)
class Dialogue:
    """Messages, the tools that the model may call, and arguments of the chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        return json.dumps([list(self.messages), list(self.tools), dict(self.template_kwargs)])


class DialogueCache(Generic[V]):
    """A value for each of the last `CACHE_SIZE` dialogues. Thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, dialogue: Dialogue) -> V | None:
        key = dialogue.key
        with self._lock:
            return self._values.get(key)

    def put(self, dialogue: Dialogue, value: V) -> None:
        """Store a value; drops the oldest values beyond `CACHE_SIZE`."""
        key = dialogue.key
        with self._lock:
            self._values[key] = value
            while len(self._values) > CACHE_SIZE:
                self._values.popitem(last=False)


class PromptEncoder:
    """Renders prompts with the tokenizer's chat template, and encodes them. Without a
    template they begin as the tokenizer begins texts; no other special token is added."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._prompts: DialogueCache[list[int]] = DialogueCache()

    def encode_batch(self, dialogues: Sequence[Dialogue]) -> list[list[int] | Exception]:
        """[P] ids of each prompt, or the error that rendering it raised. Calls the tokenizer
        once."""
        results: list[list[int] | str | Exception] = []
        for dialogue in dialogues:
            try:
                ids = self._prompts.get(dialogue)
                results.append(self._render(dialogue) if ids is None else list(ids))
            except Exception as error:
                results.append(error)
        texts = list(dict.fromkeys(text for text in results if isinstance(text, str)))
        encoded = [begin_prompt(self.tokenizer, ids) for ids in self._tokenize(texts)] if texts else []
        ids_by_text = dict(zip(texts, encoded, strict=True))
        for dialogue, text in zip(dialogues, results, strict=True):
            if isinstance(text, str):
                self._prompts.put(dialogue, ids_by_text[text])
        return [list(ids_by_text[result]) if isinstance(result, str) else result for result in results]

    def _render(self, dialogue: Dialogue) -> str:
        return self._template.render(dialogue.messages, dialogue.tools, **dialogue.template_kwargs)

    def _tokenize(self, texts: str | list[str]) -> Any:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]


class PromptTokens(PromptEncoder):
    """A `PromptEncoder` that remembers the tokens of sampled answers.

    If the text of a prompt begins with an earlier prompt and its answer, its ids begin with exactly
    the tokens of both, and only the rest is encoded. Otherwise a sampled answer would be tokenised
    again, with different tokens wherever the model did not sample what the tokenizer produces. If a
    template changes earlier turns, for example by dropping thoughts, the whole prompt is encoded.
    Of two answers to the same messages with the same text, the tokens of the later one are used.

    Example: prompt `[5, 6]` and answer `[7, 8, 2]` (2 ends a turn) make the next prompt
    `[5, 6, 7, 8, 2, ...]`, even if the tokenizer would encode the answer's text as `[9, 2]`.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._answers: DialogueCache[tuple[str, list[int]]] = DialogueCache()
        """Dialogue that ends with an answer -> its text and ids, including the answer."""

    @property
    def extra_end_ids(self) -> list[int]:
        """Tokens that end an answer in addition to the tokenizer's end token, which servers
        know."""
        return sorted(find_turn_end(self.tokenizer).ids - {getattr(self.tokenizer, "eos_token_id", None)})

    def encode(self, dialogue: Dialogue) -> list[int]:
        """[P] ids of the prompt. Raises ConfigError if the template cannot render the tools."""
        ids = self._prompts.get(dialogue)
        if ids is None:
            text = self._render(dialogue)
            prefix_text, prefix_ids = self._longest_answered_prefix(dialogue, text)
            ids = begin_prompt(self.tokenizer, [*prefix_ids, *self._tokenize(text[len(prefix_text) :])])
            self._prompts.put(dialogue, ids)
        return list(ids)

    def remember_answer(
        self, dialogue: Dialogue, answer: Message, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        """Remember the tokens of an answer for later turns."""
        completion = self.tokenizer.decode(list(completion_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = self._render(dialogue) + str(completion)
        answered = replace(dialogue, messages=[*dialogue.messages, answer])
        self._answers.put(answered, (text, [*prompt_ids, *completion_ids]))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _longest_answered_prefix(self, dialogue: Dialogue, text: str) -> tuple[str, list[int]]:
        """Text and ids of the longest remembered dialogue that `text` begins with; empty if there
        is none."""
        for end in range(len(dialogue.messages) - 1, 0, -1):
            if dialogue.messages[end - 1].get("role") != "assistant":
                continue
            prefix, ids = self._answers.get(replace(dialogue, messages=dialogue.messages[:end])) or ("", [])
            if prefix and text.startswith(prefix):
                return prefix, ids
        return "", []


def reads_same_ids(reader: Any, writer: Any) -> bool:
    """Whether every token id of `writer` is the same token in `reader`, so that ids can be passed
    from one model to the other without decoding. `reader` may have more tokens, and may split text
    differently."""
    if reader is None or writer is None:
        return False
    return reader is writer or bool(writer.get_vocab().items() <= reader.get_vocab().items())
