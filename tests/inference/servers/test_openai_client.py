"""The client of OpenAI-compatible servers against a real loopback server: what it sends, reads and
retries."""

import asyncio
import json

import numpy as np
import pytest
from stub_openai_server import CUT, HANG, StubOpenAIServer, completion

from ludic.errors import ConfigError, InferenceError
from ludic.images.content import find_digests, image_part
from ludic.images.store import ImageStore, use_store
from ludic.inference import (
    ChatCompletionRequest,
    OpenAIChatClient,
    ReturnSpec,
    SamplingParams,
    ToolRequest,
    VLLMExtensions,
)

MESSAGES = [{"role": "user", "content": "2+2="}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def ask(answer, request=None, **settings):
    """(result or error, request bodies that the server received)."""
    with StubOpenAIServer(answer) as server:
        outcome = asyncio.run(complete(server, request or ChatCompletionRequest("m", MESSAGES), **settings))
    return outcome, server


async def complete(server, request, **settings):
    async with OpenAIChatClient(server.base_url, **{"backoff_s": 0.0, **settings}) as client:
        try:
            return await client.complete(request)
        except (InferenceError, TimeoutError, ConfigError) as error:
            return error


def in_turn(*answers):
    """Returns the first answer, then the second, then the last one forever."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def test_a_request_has_only_openais_fields():
    request = ChatCompletionRequest("m", MESSAGES, SamplingParams(temperature=0.0, max_tokens=9, stop=["\n"]), seed=7)
    (response, info), server = ask(lambda body: completion("4"), request)
    assert response.text == "4"
    assert response.finish_reason == "stop"
    assert response.to_trace() is None
    assert server.bodies == [
        {
            "model": "m",
            "messages": MESSAGES,
            "temperature": 0.0,
            "max_tokens": 9,
            "top_p": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop": ["\n"],
            "seed": 7,
        }
    ]
    assert info["raw_response"]["usage"]["completion_tokens"] == 1
    assert info["used_args"]["seed"] == 7
    json.dumps(info)  # rollouts have it, and they are written as JSON


def test_images_are_sent_as_urls_and_kept_as_digests():
    with use_store(ImageStore()) as store:
        content = [{"type": "text", "text": "?"}, image_part(store.add(np.zeros((2, 2, 3), np.uint8)))]
        (_, info), server = ask(lambda body: completion("4"), ChatCompletionRequest("m", [{"role": "user", "content": content}]))
        [digest] = find_digests(content)
        [message] = server.bodies[0]["messages"]
        assert message["content"] == [content[0], {"type": "image_url", "image_url": {"url": store.data_url(digest)}}]
    assert info["used_args"]["messages"][0]["content"] == content


def test_token_ids_and_log_probabilities_are_requested_from_servers_that_have_them():
    logprobs = {"content": [{"token": "a", "logprob": -0.25, "bytes": None, "top_logprobs": []}]}
    answer = completion("a", token_ids=[64], logprobs=logprobs, prompt_token_ids=[1, 2])
    request = ChatCompletionRequest("m", MESSAGES, return_=ReturnSpec.for_rl(top_logprobs_k=2))
    (response, _), server = ask(lambda body: answer, request, returns_token_ids=True)
    trace = response.to_trace()
    assert (trace.prompt_token_ids, trace.completion_token_ids, trace.completion_logprobs) == ([1, 2], [64], [-0.25])
    sent = server.bodies[0]
    assert (sent["return_token_ids"], sent["logprobs"], sent["top_logprobs"]) == (True, True, 2)
    _, server = ask(lambda body: answer, request)
    assert "return_token_ids" not in server.bodies[0]  # servers other than vLLM reject unknown fields


def test_arguments_of_the_chat_template_are_sent_and_the_requests_go_first():
    own = {"enable_thinking": False, "effort": "low"}
    request = ChatCompletionRequest("m", MESSAGES, chat_template_kwargs={"effort": "high"})
    _, server = ask(lambda body: completion("4"), request, chat_template_kwargs=own)
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False, "effort": "high"}


def test_tools_are_sent_and_calls_are_in_the_raw_response():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answer = completion(None, "tool_calls")
    answer["choices"][0]["message"]["tool_calls"] = [call]
    request = ChatCompletionRequest("m", MESSAGES, tools=ToolRequest([TOOL], tool_choice="required"))
    (response, info), server = ask(lambda body: answer, request)
    assert (server.bodies[0]["tools"], server.bodies[0]["tool_choice"]) == ([TOOL], "required")
    assert response.text == ""
    assert info["raw_response"]["choices"][0]["message"]["tool_calls"] == [call]


def test_api_keys_of_the_environment_are_not_sent(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "secret")
    _, server = ask(lambda body: completion("4"))
    assert "secret" not in str(server.headers)
    _, server = ask(lambda body: completion("4"), api_key="mine")
    assert server.headers[0]["authorization"] == "Bearer mine"


@pytest.mark.parametrize("trouble", [(500, {}), (503, {}), (429, {}), (408, {}), CUT, (429, {}, {"retry-after": "0"})])
def test_transient_errors_are_retried(trouble):
    (response, _), server = ask(in_turn(trouble, trouble, completion("4")))
    assert response.text == "4"
    assert len(server.bodies) == 3


def test_retries_are_limited():
    error, server = ask(lambda body: (503, {"error": {"message": "overloaded"}}), max_retries=2)
    assert isinstance(error, InferenceError)
    assert "overloaded" in str(error)
    assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_permanent_errors_are_not_retried(status):
    error, server = ask(lambda body: (status, {"error": {"message": "no such model"}}))
    assert isinstance(error, InferenceError)
    assert "no such model" in str(error)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        ("<html>It works!</html>", "InferenceError|JSON"),
        ([1, 2], "Expected `object`, got `array`"),
        ({}, "missing required field `choices`"),
        ({"choices": []}, "length >= 1 - at `$.choices`"),
        ({"choices": [{"index": 0}]}, "missing required field `message`"),
        ({"choices": ["4"]}, "got `str` - at `$.choices[0]`"),
        (completion({"text": "4"}), "got `object` - at `$.choices[0].message.content`"),
        (completion("12", "abort"), "aborted"),
    ],
)
def test_a_malformed_completion_is_a_clear_error(garbage, said):
    error, server = ask(lambda body: garbage)
    assert isinstance(error, InferenceError)
    assert error.__class__ is InferenceError
    assert any(part in f"{type(error).__name__} {error}" for part in said.split("|"))
    assert len(server.bodies) == 1


def sampled(ids=(64, 65), logps=(-0.5, -0.25), reason="stop", prompt=(1, 2)):
    """A completion with tokens."""
    logprobs = {"content": [{"token": "a", "logprob": logp, "bytes": None, "top_logprobs": []} for logp in logps]}
    return completion("ab", reason, token_ids=list(ids), logprobs=logprobs, prompt_token_ids=list(prompt))


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (sampled(logps=(-0.5, 5.0)), "log-probability 5; it must be at most 0"),
        (sampled(logps=(-0.5, -1e300)), "the log-probability -1e+300; it must be finite"),
        (sampled(logps=(-0.5,)), "1 log-probabilities for 2 tokens"),
        (sampled(ids=range(100_000), logps=[-0.5] * 100_000), "100000 tokens; the request allows max_tokens (8)"),
        (sampled(reason="banana"), "Invalid enum value 'banana'"),
        (sampled(ids=(64, -1)), "Expected `int` >= 0"),
        (sampled(ids=(64, 2**31)), "Expected `int` <= 2147483647"),
        (sampled(prompt=(1, -2)), "Expected `int` >= 0"),
        (completion("ab"), "did not return token ids"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_an_error(hostile, said):
    request = ChatCompletionRequest("m", MESSAGES, SamplingParams(max_tokens=8), ReturnSpec.for_rl())
    error, server = ask(lambda body: hostile, request, returns_token_ids=True)
    assert isinstance(error, InferenceError)
    assert said in str(error)
    assert len(server.bodies) == 1


def test_tokens_that_were_not_requested_are_not_used():
    request = ChatCompletionRequest("m", MESSAGES, return_=ReturnSpec.for_rl())
    (response, _), _ = ask(lambda body: sampled(logps=(-0.5, 5.0), reason="eos_token"), request)
    assert (response.text, response.finish_reason, response.to_trace()) == ("ab", "eos_token", None)


def test_a_hanging_server_is_abandoned_at_the_deadline():
    error, _ = ask(lambda body: HANG, timeout_s=1.0)
    assert isinstance(error, TimeoutError)
    assert "no answer within 1.0 s" in str(error)


def test_the_deadline_includes_retries():
    """A server that asks for an hour gets at most a minute, and the deadline is sooner."""
    error, server = ask(lambda body: (429, {}, {"retry-after": "3600"}), timeout_s=1.0)
    assert isinstance(error, TimeoutError)
    assert len(server.bodies) == 1


def test_an_unreachable_server_is_an_error():
    async def scenario():
        async with OpenAIChatClient("http://127.0.0.1:9/v1", max_retries=1, backoff_s=0.0) as client:
            return await client.complete(ChatCompletionRequest("m", MESSAGES))

    with pytest.raises(InferenceError, match="127\\.0\\.0\\.1:9"):
        asyncio.run(scenario())


def test_the_models_of_a_server_are_listed():
    async def scenario(server):
        async with OpenAIChatClient(server.base_url + "/") as client:
            return await client.models()

    with StubOpenAIServer(lambda body: {}, models=("a", "b")) as server:
        assert asyncio.run(scenario(server)) == ["a", "b"]


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="must begin with http"):
        OpenAIChatClient("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="timeout_s"):
        OpenAIChatClient("http://127.0.0.1:8000/v1", timeout_s=0)
    error, server = ask(lambda body: {}, ChatCompletionRequest("m", MESSAGES, extensions=VLLMExtensions()))
    assert "unsupported request.extensions: VLLMExtensions" in str(error)
    assert server.bodies == []
