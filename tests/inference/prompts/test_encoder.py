"""The cache of prompt ids, and reuse of sampled tokens in later prompts."""

import pytest

from ludic.errors import ConfigError
from ludic.inference.prompts import encoder as encoder_module
from ludic.inference.prompts.encoder import DialogueCache, PromptEncoder
from ludic.inference.prompts.template import Dialogue

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


def ids_of(encoder, *dialogues):
    """The ids of each dialogue, or its error."""
    return [getattr(made, "ids", made) for made in encoder.encode_batch([(dialogue, None) for dialogue in dialogues])]


def test_a_batch_is_encoded_in_one_call_without_duplicates():
    tokenizer = Counting()
    encoder = PromptEncoder(tokenizer)
    dialogues = [Dialogue([{"role": "user", "content": text}]) for text in ("ab", "c", "ab")]
    assert ids_of(encoder, *dialogues) == [[97, 98], [99], [97, 98]]
    assert ids_of(encoder, *dialogues) == [[97, 98], [99], [97, 98]]
    assert tokenizer.calls == [["ab", "c"]]


def test_a_prompt_that_cannot_be_rendered_fails_alone():
    good, bad = Dialogue([{"role": "user", "content": "a"}]), Dialogue([{"role": "user", "content": "a"}], [TOOL])
    ids, error = ids_of(PromptEncoder(Counting()), good, bad)
    assert ids == [97]
    assert isinstance(error, ConfigError)


def test_returned_ids_are_a_copy():
    encoder = PromptEncoder(Counting())
    dialogue = Dialogue([{"role": "user", "content": "a"}])
    ids_of(encoder, dialogue)[0].append(0)
    assert ids_of(encoder, dialogue) == [[97]]


@pytest.mark.parametrize("size", [1, 2])
def test_the_cache_evicts_its_oldest_dialogue(monkeypatch, size):
    monkeypatch.setattr(encoder_module, "CACHE_SIZE", size)
    cache = DialogueCache()
    dialogues = [Dialogue([{"role": "user", "content": str(i)}]) for i in range(3)]
    for i, dialogue in enumerate(dialogues):
        cache.put(dialogue, i)
    assert [cache.get(dialogue) for dialogue in dialogues] == [None] * (3 - size) + list(range(3 - size, 3))
