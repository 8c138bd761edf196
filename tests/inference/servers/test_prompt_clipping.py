"""Prompts that are too long lose characters of user messages and nothing else."""

import asyncio
import logging

import pytest
from hypothesis import given, strategies as st
from stub_vllm import StubVLLM
from stub_vllm_sampling import GENERATE
from tiny_policy import tiny_tokenizer

from ludic.errors import ConfigError
from ludic.inference import ChatCompletionRequest, SamplingParams, VLLMChatClient
from ludic.inference.servers.prompt_clipping import PromptClipper, prompt_limit


@pytest.mark.parametrize(
    ("given", "tokens", "environment", "limit"),
    [
        (None, None, {}, 2048),
        (None, None, {"MAX_PROMPT_CHARS": "100"}, 100),
        (50, None, {"MAX_PROMPT_CHARS": "100"}, 50),
        (None, None, {"MAX_PROMPT_CHARS": "0"}, None),
        (-1, 1000, {}, None),
        (None, 1000, {}, 4000),  # four characters per token are allowed
        (None, 100, {}, 2048),
    ],
)
def test_the_limit_is_explicit_or_comes_from_the_environment(given, tokens, environment, limit):
    assert prompt_limit(given, max_prompt_tokens=tokens, environment=environment) == limit


def test_a_limit_that_is_not_a_number_is_refused():
    with pytest.raises(ConfigError, match="MAX_PROMPT_CHARS"):
        prompt_limit(environment={"MAX_PROMPT_CHARS": "many"})


def test_the_longest_user_message_is_clipped_at_its_end():
    messages = [
        {"role": "system", "content": "s" * 4},
        {"role": "user", "content": "u" * 3},
        {"role": "user", "content": "aé😀bcd"},
    ]
    clip = PromptClipper(10)
    assert clip(messages) == [messages[0], messages[1], {"role": "user", "content": "aé😀"}]
    assert messages[2]["content"] == "aé😀bcd"
    assert clip.clipped == 1


messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.none() | st.text(max_size=20)}
    ),
    max_size=5,
)


@given(messages, st.integers(1, 60))
def test_only_user_messages_are_clipped_and_only_as_far_as_needed(messages, limit):
    clip = PromptClipper(limit)
    cut = clip(messages)

    def size(part):
        return sum(len(message["content"] or "") for message in part)

    spoken = size([message for message in messages if message["role"] == "user"])
    assert size(messages) - size(cut) == max(0, min(spoken, size(messages) - limit))
    for before, after in zip(messages, cut, strict=True):
        if before["role"] == "user":
            assert (before["content"] or "").startswith(after["content"] or "")
        else:
            assert before == after
    assert clip.clipped == (size(messages) > limit)


def test_clipping_is_logged_once_and_counted_every_time(caplog):
    clip = PromptClipper(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clip([{"role": "user", "content": "long"}])
    assert clip.clipped == 3
    assert len(caplog.records) == 1


def test_the_template_around_a_clipped_prompt_stays_complete():
    async def whole(server):
        async with VLLMChatClient(port=server.port, tokenizer=tiny_tokenizer(), max_prompt_chars=20) as client:
            messages = [{"role": "user", "content": "x" * 100}]
            await client.complete(ChatCompletionRequest("tiny", messages, SamplingParams(max_tokens=4)))
            return client.metrics()["clipped_prompts"]

    with StubVLLM() as server:
        assert asyncio.run(whole(server)) == 1
        ids = server.bodies(GENERATE)[0]["token_ids"]
    expected = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "x" * 20}], add_generation_prompt=True, tokenize=False
    )
    assert tiny_tokenizer().decode(ids, clean_up_tokenization_spaces=False) == expected
