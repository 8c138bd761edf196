"""The cache of prompt ids, and reuse of sampled tokens in later prompts."""

import pytest

from ludic.errors import ConfigError
from ludic.inference.prompts import template as template_module
from ludic.inference.prompts.template import Dialogue, DialogueCache, PromptEncoder, PromptTokens

USER = {"role": "user", "content": "2+2="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Counting:
    """A tokenizer that records the texts that it encodes."""

    chat_template = None

    def __init__(self):
        self.calls = []

    def __call__(self, texts, add_special_tokens):
        self.calls.append(texts)
        return {"input_ids": [[ord(c) for c in text] for text in texts] if isinstance(texts, list) else list(map(ord, texts))}


def test_a_batch_is_encoded_in_one_call_without_duplicates():
    tokenizer = Counting()
    encoder = PromptEncoder(tokenizer)
    dialogues = [Dialogue([{"role": "user", "content": text}]) for text in ("ab", "c", "ab")]
    assert encoder.encode_batch(dialogues) == [[97, 98], [99], [97, 98]]
    assert encoder.encode_batch(dialogues) == [[97, 98], [99], [97, 98]]
    assert tokenizer.calls == [["ab", "c"]]


def test_a_prompt_that_cannot_be_rendered_fails_alone():
    good, bad = Dialogue([{"role": "user", "content": "a"}]), Dialogue([{"role": "user", "content": "a"}], [TOOL])
    ids, error = PromptEncoder(Counting()).encode_batch([good, bad])
    assert ids == [97]
    assert isinstance(error, ConfigError)


def test_returned_ids_are_a_copy():
    encoder = PromptEncoder(Counting())
    dialogue = Dialogue([{"role": "user", "content": "a"}])
    encoder.encode_batch([dialogue])[0].append(0)
    assert encoder.encode_batch([dialogue]) == [[97]]


@pytest.mark.parametrize("size", [1, 2])
def test_the_cache_evicts_its_oldest_dialogue(monkeypatch, size):
    monkeypatch.setattr(template_module, "CACHE_SIZE", size)
    cache = DialogueCache()
    dialogues = [Dialogue([{"role": "user", "content": str(i)}]) for i in range(3)]
    for i, dialogue in enumerate(dialogues):
        cache.put(dialogue, i)
    assert [cache.get(dialogue) for dialogue in dialogues] == [None] * (3 - size) + list(range(3 - size, 3))


class Merging:
    """A tokenizer that merges `ab` into one token, 300, and a template that ends each message with
    `|`."""

    chat_template = "joined"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text.replace("ab", chr(300))]}

    def decode(self, ids, **settings):
        return "".join(map(chr, ids)).replace(chr(300), "ab")

    def apply_chat_template(self, messages, **settings):
        return "".join(f"{message['content']}|" for message in messages)


def test_the_next_prompt_starts_with_the_sampled_tokens_and_is_not_retokenised():
    tokens = PromptTokens(Merging())
    prompt, sampled = tokens.encode(Dialogue([USER])), [ord("a"), ord("b")]
    answer = {"role": "assistant", "content": tokens.decode(sampled)}
    dialogue = Dialogue([USER, answer, USER])
    assert PromptTokens(Merging()).encode(dialogue) == [*prompt, 300, ord("|"), *prompt]
    tokens.remember_answer(Dialogue([USER]), answer, prompt, sampled)
    assert tokens.encode(dialogue) == [*prompt, *sampled, ord("|"), *prompt]
