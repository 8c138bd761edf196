"""Slow, endless and wrong vLLM and SGLang servers: deadlines hold for every call, and impossible
samples are never trained on."""

import asyncio
import json

import pytest
from hostile_server import HostileServer, drip_body, drip_head, endless, plain, silent, timed_call
from stub_vllm import StubVLLM
from stub_vllm_sampling import CHAT, COMPLETIONS, GENERATE
from tiny_policy import tiny_tokenizer

from ludic.errors import InferenceError, ServerUnreachableError
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, VLLMChatClient
from ludic.inference.servers.errors import is_retryable
from ludic.inference.sglang import SGLangClient
from ludic.inference.vllm import servers as servers_module

DEADLINE_S = 0.5
FOREVER_S = 60.0
"""Without the deadline, a call of these servers would never end. A busy machine takes longer than
the deadline."""
MODELS = {"data": [{"id": "tiny", "max_model_len": 512}]}
HEALTHY = {"/health": plain(b""), "/v1/models": plain(json.dumps(MODELS)), "/weight_info": plain(b'{"weight_version": "3"}')}


@pytest.mark.parametrize("hostile", [silent, drip_head, drip_body, endless])
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_the_constructor_respects_its_deadline(hostile, path, monkeypatch):
    monkeypatch.setattr(servers_module, "HEALTH_INTERVAL_S", 0.1)
    with HostileServer(plain(), {**HEALTHY, path: hostile}) as server:
        outcome, took_s = timed_call(VLLMChatClient, urls=[server.url], connection_timeout_s=DEADLINE_S)
    if hostile is endless and path == "/v1/models":
        assert outcome.models() == []  # a server of another kind does not answer these
    else:
        assert isinstance(outcome, ServerUnreachableError)
        assert f"{path} did not answer within {DEADLINE_S} s" in str(outcome)
    assert took_s < FOREVER_S


@pytest.mark.parametrize("hostile", [silent, drip_head, drip_body])
@pytest.mark.parametrize("path", ["/weight_info", CHAT])
def test_a_completion_respects_its_deadline_including_side_requests(hostile, path, monkeypatch):
    monkeypatch.setattr(servers_module, "VERSION_AGE_S", -1.0)  # the version is read before every request

    async def complete(server):
        async with VLLMChatClient(urls=[server.url], timeout_s=DEADLINE_S) as client:
            server.by_path[path] = hostile
            return await client.complete(ChatCompletionRequest("tiny", [{"role": "user", "content": "a"}]))

    with HostileServer(plain(), dict(HEALTHY)) as server:
        outcome, took_s = timed_call(lambda: asyncio.run(complete(server)))
    assert isinstance(outcome, TimeoutError)
    assert took_s < FOREVER_S


def ask(stub, path, change, **settings):
    """The client's result when `change` modifies the choice of the usual response."""
    stub.fail(
        path, lambda given: {**given, "choices": [{**given["choices"][0], **change}]} if isinstance(change, dict) else change
    )

    async def complete():
        given = {"tokenizer": None if path == CHAT else tiny_tokenizer(), "max_retries": 0, "vocab_size": 384, **settings}
        async with VLLMChatClient(port=stub.port, **given) as client:
            request = ChatCompletionRequest(
                "tiny",
                [{"role": "user", "content": "a"}],
                SamplingParams(max_tokens=3),
                ReturnSpec.for_rl(),
                seed=1,
            )
            return await client.complete(request)

    return asyncio.run(complete())


def listed(path, logprobs):
    if path == COMPLETIONS:
        return {"token_logprobs": logprobs}
    return {"content": [{"token": "x", "logprob": logprob} for logprob in logprobs]}


def answered(path, ids, logprobs=None, **parts):
    return {"token_ids": ids, "logprobs": listed(path, logprobs or [-0.5] * len(ids)), "weight_versions": None, **parts}


IMPOSSIBLE = {
    "above 0": (lambda path: answered(path, [5, 6], [-0.5, 0.2]), r"log-probability 0\.2; .*at most 0"),
    "a logit": (lambda path: answered(path, [5, 6], [-0.5, 1e30]), "it must be at most 0"),
    "too many": (lambda path: answered(path, [5, 6, 7, 8]), r"4 tokens; the request allows max_tokens \(3\)"),
    "outside": (lambda path: answered(path, [5, 384]), "token id 384, .*vocabulary has 384"),
    "negative": (lambda path: answered(path, [5, -1]), "Expected `int` >= 0"),
    "fraction": (lambda path: answered(path, [5, 10.5]), "Expected `int`, got `float`"),
    "huge": (lambda path: answered(path, [5, 2**40]), "Expected `int` <= 2147483647"),
    "text": (lambda path: answered(path, [5, "6"]), "Expected `int`, got `str`"),
    "true": (lambda path: answered(path, [5, True]), "Expected `int`, got `bool`"),
    "words": (lambda path: answered(path, [5], ["low"]), "Expected `float`, got `str`"),
    "finish": (lambda path: answered(path, [5], finish_reason="banana"), "Invalid enum value 'banana'"),
    "no finish": (lambda path: answered(path, [5], finish_reason=None), "finish_reason"),
    "no list": (lambda path: answered(path, [5]) | {"token_ids": {"5": 6}}, "Expected `array"),
    "choices": (lambda path: {"choices": {"0": {}}, "prompt_token_ids": [5]}, "finish_reason|choices|array"),
}


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_sample_is_one_clear_error(path, case):
    change, said = IMPOSSIBLE[case]
    with StubVLLM(scale_out=path != COMPLETIONS) as stub:
        change = change(path)
        if "choices" in change:
            stub.fail(path, (200, change))
            change = {}
        with pytest.raises(InferenceError, match=said) as caught:
            ask(stub, path, change)
    assert not is_retryable(caught.value)


def test_log_probabilities_rounded_above_0_and_maximal_ids_and_lengths_are_accepted():
    with StubVLLM() as stub:
        response, _ = ask(stub, GENERATE, answered(GENERATE, [383, 0, 5], [-0.5, 1e-6, 0]))
    assert (response.completion_token_ids, response.completion_logprobs) == ([383, 0, 5], [-0.5, 1e-6, 0.0])


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ({"version": -1, "start": 0, "end": 2}, "reports weight version -1"),
        ({"version": str(10**30), "start": 0, "end": 2}, "reports weight version 1000"),
        ({"version": "3", "start": 0, "end": 9}, "must lie within"),
        ({"version": "3", "start": 2, "end": 0}, "must lie within"),
        ({"version": 1.5, "start": 0, "end": 2}, "got `float`"),
        ({"version": "3"}, "missing required field"),
    ],
)
def test_invalid_weight_versions_are_errors(span, said):
    with StubVLLM() as stub, pytest.raises(InferenceError, match=said):
        ask(stub, GENERATE, answered(GENERATE, [5, 6], weight_versions=[span]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_ids": [10.5, 6]}, "Expected `int`, got `float`"),
        ({"output_ids": [5, 99]}, "log-probabilities of 2 others"),
        ({"meta_info": {"output_token_logprobs": [[-1.0, 10.5, None]]}, "output_ids": [10]}, "Expected `int`, got `float`"),
        ({"meta_info": {"output_token_logprobs": [[0.5, 10, None]]}, "output_ids": [10]}, "it must be at most 0"),
        ({"meta_info": {"output_token_logprobs": [[-1.0, 300, None]]}, "output_ids": [300]}, "vocabulary has 272"),
        ({"meta_info": {"output_token_logprobs": [[-1.0, 5, None]] * 4}, "output_ids": [5] * 4}, r"max_tokens \(3\)"),
        ({"meta_info": {"finish_reason": {"type": "banana"}}}, "Invalid enum value"),
        ({"meta_info": {"weight_version": "-7"}}, "reports weight version -7"),
        ({"meta_info": {}}, "log-probabilities of 0 others"),
        ({"meta_info": 7}, "Expected `object`, got `int`"),
    ],
)
def test_sglang_responses_are_validated_equally(change, said):
    given = {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-0.5, 6, "b"]]}, **change}
    if isinstance(change.get("meta_info"), dict) and change["meta_info"] and "output_ids" not in change:
        given["meta_info"] = {"output_token_logprobs": [[-1.0, 5, None], [-0.5, 6, "b"]], **change["meta_info"]}

    async def complete(url):
        client = SGLangClient(url, max_retries=0, vocab_size=272)
        try:
            return await client.complete_tokens([9], sampling=SamplingParams(max_tokens=3))
        finally:
            await client.aclose()

    with HostileServer(plain(json.dumps(given))) as server, pytest.raises(InferenceError, match=said):
        asyncio.run(complete(server.url))
