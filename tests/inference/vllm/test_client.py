"""The vLLM client against a stub that behaves like the real server: what is sent, what is read,
what is refused."""

import asyncio
import base64
import io
from itertools import pairwise
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest
from faulty_server import CUT, HANG
from stub_vllm import StubVLLM
from stub_vllm_sampling import CHAT, COMPLETIONS, DEAD, GENERATE
from tiny_policy import tiny_tokenizer

from ludic.columns import Column
from ludic.errors import ConfigError, EngineDeadError, InferenceError, ServerUnreachableError
from ludic.inference import (
    ChatCompletionRequest,
    ReturnSpec,
    SamplingParams,
    ToolRequest,
    VLLMChatClient,
    VLLMExtensions,
)
from ludic.inference.extensions import BackendExtensions
from ludic.types import TRACE_KEYS, stored

MESSAGES = [{"role": "user", "content": "2+2="}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def server():
    with StubVLLM() as stub:
        yield stub


def rl(max_tokens=8, seed=1, messages=MESSAGES, extensions=None, **sampling):
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **sampling})
    return ChatCompletionRequest("tiny", messages, params, ReturnSpec.for_rl(), seed=seed, extensions=extensions)


def run(server, scenario, **settings):
    async def whole():
        client = VLLMChatClient(port=server.port, **{"backoff_s": 0.0, "tokenizer": tiny_tokenizer(), **settings})
        async with client:
            return await scenario(client)

    return asyncio.run(whole())


def answer(server, request=None, **settings):
    return run(server, lambda client: client.complete(request or rl()), **settings)


# -- the specified behaviour of `complete`, without a server


class Recorder:
    """Replaces the openai client: `.chat.completions.create(**kwargs)`."""

    def __init__(self, choice, **top):
        self.kwargs = None
        self.given = SimpleNamespace(choices=[choice], model_dump=lambda exclude_none: {"dumped": exclude_none}, **top)
        self.chat = self.completions = self

    async def create(self, **kwargs):
        self.kwargs = kwargs
        return self.given


def choice(content="4", **parts):
    return SimpleNamespace(message=SimpleNamespace(content=content), finish_reason="stop", **parts)


def client_without_server(recorder=None):
    client = object.__new__(VLLMChatClient)
    if recorder is not None:
        client._async_client = recorder
    return client


def complete_bare(request, choice_=None, **top):
    recorder = Recorder(choice_ or choice(), **top)
    response, info = asyncio.run(client_without_server(recorder).complete(request))
    return response, info, recorder.kwargs


def test_a_request_is_sent_as_specified():
    request = ChatCompletionRequest("m", MESSAGES, SamplingParams(0.5, 9, stop=["\n"]), seed=7, tools=ToolRequest([TOOL]))
    response, info, sent = complete_bare(request)
    assert sent == {
        "model": "m",
        "messages": MESSAGES,
        "temperature": 0.5,
        "max_tokens": 9,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": ["\n"],
        "seed": 7,
        "tools": [TOOL],
        "tool_choice": "auto",
    }
    assert info == {"raw_response": {"dumped": True}, "used_args": sent}
    assert (response.text, response.finish_reason, response.to_trace()) == ("4", "stop", None)


def test_unset_parameters_are_not_sent():
    _, _, sent = complete_bare(ChatCompletionRequest("m", MESSAGES, tools=ToolRequest([TOOL], tool_choice=None)))
    assert not {"seed", "tool_choice", "extra_body", "logprobs", "stop"} & set(sent)


def test_ids_and_log_probabilities_are_requested():
    request = ChatCompletionRequest("m", MESSAGES, return_=ReturnSpec.for_rl())
    _, _, sent = complete_bare(request)
    assert (sent["logprobs"], sent["extra_body"]) == (1, {"return_token_ids": True})
    _, _, sent = complete_bare(ChatCompletionRequest("m", MESSAGES, return_=ReturnSpec.for_rl(top_logprobs_k=5)))
    assert sent["logprobs"] == 5
    assert sent["extra_body"] == {
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 5,
    }  # servers do not accept a number here


def test_extensions_are_in_the_body_and_the_callers_override_them():
    _, _, sent = complete_bare(ChatCompletionRequest("m", MESSAGES, extensions=VLLMExtensions()))
    assert "extra_body" not in sent
    extensions = VLLMExtensions(
        max_think=64, repetition_penalty=1.5, extra_body_overrides={"repetition_penalty": 2.0, "top_k": 3}
    )
    _, _, sent = complete_bare(ChatCompletionRequest("m", MESSAGES, extensions=extensions))
    assert sent["extra_body"] == {"repetition_penalty": 2.0, "vllm_xargs": {"max_think": 64}, "top_k": 3}


@pytest.mark.parametrize(
    ("extensions", "error", "said"),
    [
        (BackendExtensions("other"), TypeError, "unsupported request.extensions: BackendExtensions"),
        (VLLMExtensions(max_think=0), ValueError, "max_think must be a positive integer, got 0"),
        (VLLMExtensions(max_think=True), ValueError, "max_think must be a positive integer, got True"),
        (VLLMExtensions(max_think=1.5), ValueError, "max_think must be a positive integer, got 1.5"),
        (VLLMExtensions(repetition_penalty=0.0), ValueError, "repetition_penalty must be > 0, got 0.0"),
        (VLLMExtensions(repetition_penalty=float("nan")), ValueError, "repetition_penalty must be > 0, got nan"),
    ],
)
def test_settings_are_validated_before_the_client_is_called(extensions, error, said):
    with pytest.raises(error, match=said):
        asyncio.run(client_without_server().complete(ChatCompletionRequest("m", MESSAGES, extensions=extensions)))


@pytest.mark.parametrize(
    "logprobs",
    [
        SimpleNamespace(token_logprobs=[-0.5, -1.0]),
        {"token_logprobs": [-0.5, -1.0]},
        {"logprobs": [-0.5, -1.0]},
        SimpleNamespace(content=[SimpleNamespace(logprob=-0.5), SimpleNamespace(logprob=-1.0)]),
        {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
    ],
)
def test_log_probabilities_are_read_in_every_format(logprobs):
    response, _, _ = complete_bare(rl(), choice(token_ids=[7, 8], logprobs=logprobs), prompt_token_ids=[1, 2])
    trace = response.to_trace()
    assert (trace.prompt_token_ids, trace.completion_token_ids, trace.completion_logprobs) == ([1, 2], [7, 8], [-0.5, -1.0])


def test_missing_content_is_empty_text():
    response, _, _ = complete_bare(rl(), choice(None))
    assert response.text == ""


# -- token ids in, token ids out


def test_messages_are_rendered_locally_and_sampled_ids_are_returned(server):
    response, info = answer(server)
    assert {type(stored(response, name)) for name in TRACE_KEYS} == {Column}
    body = server.bodies(GENERATE)[0]
    prompt = tiny_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert body["token_ids"] == response.prompt_token_ids == tiny_tokenizer()(prompt)["input_ids"]
    ids, logps, finish, _ = server.sample(body["token_ids"], max_tokens=8, seed=1)
    assert (response.completion_token_ids, response.completion_logprobs, response.finish_reason) == (ids, logps, finish)
    assert (body["sampling_params"]["logprobs"], body["sampling_params"]["seed"], body["return_token_ids"]) == (0, 1, True)
    assert "token_ids" not in info["used_args"]
    assert info["policy_version"] == 0


def test_text_is_decoded_from_the_ids_without_the_end_token(server):
    tokenizer = tiny_tokenizer()
    server.eos_id = tokenizer.eos_token_id
    for seed in range(200):
        response, _ = answer(server, rl(seed=seed, max_tokens=60))
        if response.finish_reason == "stop":
            break
    assert response.completion_token_ids[-1] == tokenizer.eos_token_id
    assert response.text == tokenizer.decode(response.completion_token_ids[:-1], skip_special_tokens=True)


def test_a_server_without_the_token_endpoint_gets_completion_requests():
    with StubVLLM(scale_out=False) as server:

        async def scenario(client):
            return [await client.complete(rl(seed=seed)) for seed in (1, 2)]

        answers = run(server, scenario)
        ids = [
            server.sample(response.prompt_token_ids, max_tokens=8, seed=seed)[0] for seed, (response, _) in enumerate(answers, 1)
        ]
        assert [response.completion_token_ids for response, _ in answers] == ids
        assert len(server.bodies(GENERATE)) == 1  # detected once
        body = server.bodies(COMPLETIONS)[0]
        assert (body["prompt"], body["logprobs"], body["return_token_ids"]) == ([answers[0][0].prompt_token_ids], 0, True)


def test_an_unknown_model_is_not_mistaken_for_a_missing_endpoint(server):
    with pytest.raises(InferenceError, match=r"404.*does not exist"):
        run(server, lambda client: client.complete_tokens([5], model="other"))
    assert server.bodies(COMPLETIONS) == []


def test_ids_are_continued_unchanged(server):
    trace = run(server, lambda client: client.complete_tokens([300, 5, 383], sampling=SamplingParams(max_tokens=4), seed=9))
    assert trace.prompt_token_ids == [300, 5, 383]
    assert trace.completion_token_ids == server.sample([300, 5, 383], max_tokens=4, seed=9)[0]


def test_a_turn_starts_with_the_exact_tokens_of_earlier_turns(server):
    """Re-tokenising the text would lose unknown ids and invalid bytes."""
    server.eos_id = tiny_tokenizer().eos_token_id

    async def scenario(client):
        messages, prompts, seed = list(MESSAGES), [], 0
        while len(prompts) < 3:
            response, _ = await client.complete(rl(seed=seed, messages=messages, max_tokens=60))
            seed += 1
            if response.finish_reason == "stop":
                prompts.append((response.prompt_token_ids, response.completion_token_ids))
                messages += [{"role": "assistant", "content": response.text}, {"role": "user", "content": "and then?"}]
        return prompts

    turns = run(server, scenario)
    for (prompt, completion), (following, _) in pairwise(turns):
        whole = prompt + completion
        assert following[: len(whole)] == whole
    assert any(token >= len(tiny_tokenizer()) for _, completion in turns for token in completion)


def replace_fields(**parts):
    """The usual response with some fields of its choice or of its top level replaced."""

    def change(given):
        for name, value in parts.items():
            (given if name == "prompt_token_ids" else given["choices"][0])[name] = value
        return given

    return change


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (replace_fields(prompt_token_ids=[1, 2]), r"read a prompt of 2 tokens, not the \d+ that were sent"),
        (replace_fields(prompt_token_ids=None), "no token ids"),
        (replace_fields(token_ids=None), "no token ids"),
        (replace_fields(logprobs=None), "0 log-probabilities for"),
        (replace_fields(token_ids=[1], logprobs={"content": [{"token_id": 2, "logprob": -1.0}]}), "other tokens"),
        (replace_fields(token_ids=[1], logprobs={"content": [{"token_id": 1, "logprob": float("nan")}]}), "not finite"),
        ((200, {"choices": []}), r"length >= 1 - at `\$.choices`"),
        ((200, [1]), "Expected `object`, got `array`"),
        ((200, "<html>It works!</html>"), "is not JSON"),
    ],
)
def test_an_inexact_token_response_is_an_error(server, fault, said):
    server.fail(GENERATE, fault)
    with pytest.raises(InferenceError, match=said):
        answer(server)
    assert len(server.bodies(GENERATE)) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (replace_fields(prompt_token_ids=None), "did not return token ids"),
        (replace_fields(token_ids=None), "did not return token ids"),
        (replace_fields(logprobs=None), "did not return the requested log-probabilities"),
        (replace_fields(token_ids=[1] * 9), "log-probabilities for 9 tokens"),
    ],
)
def test_an_inexact_chat_completion_is_an_error(server, fault, said):
    server.fail(CHAT, fault)
    with pytest.raises(InferenceError, match=said):
        answer(server, tokenizer=None)


def test_a_response_has_the_version_of_the_weights(server):
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    server.fail(GENERATE, replace_fields(weight_versions=spans))
    _, info = answer(server)
    assert (info["policy_version"], info["weight_versions"]) == (3, spans)  # the version of its oldest token


def test_a_restarted_server_reports_its_initial_weights(server):
    """Otherwise its samples would appear to come from the newest version, and nothing would show
    their age."""
    server.fail(GENERATE, replace_fields(weight_versions=[{"version": "default", "start": 0, "end": 5}]))

    async def scenario(client):
        client.weights_changed(7)
        return (await client.complete(rl()))[1]

    assert run(server, scenario)["policy_version"] == 0


def test_tools_that_the_template_ignores_are_refused(server):
    request = ChatCompletionRequest("tiny", MESSAGES, SamplingParams(max_tokens=4), tools=ToolRequest([TOOL]))
    with pytest.raises(ConfigError, match="ignores tools"):
        answer(server, request)
    assert server.bodies(GENERATE) == []


# -- requests that are refused before they are sent


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"max_tokens": 600}, r"must fit into the server's context \(512\)"),
    ],
)
def test_invalid_sampling_parameters_are_refused(server, sampling, said):
    with pytest.raises(ConfigError, match=said):
        answer(server, rl(**sampling))
    assert server.bodies(GENERATE) == []


def test_clipping_can_be_enabled_and_is_counted(server):
    async def scenario(client):
        trace = await client.complete_tokens([5] * 500, sampling=SamplingParams(max_tokens=100), seed=1)
        return trace, client.metrics()["clipped_max_tokens"]

    trace, counted = run(server, scenario, on_overflow="clip")
    assert server.bodies(GENERATE)[0]["sampling_params"]["max_tokens"] == 12
    assert len(trace.completion_token_ids) <= 12
    assert counted == 1
    with pytest.raises(InferenceError, match="fills the server's context"):
        run(server, lambda client: client.complete_tokens([5] * 512), on_overflow="clip")


def test_clipping_by_the_server_is_detected():
    with StubVLLM(max_model_len=40) as server:
        server.eos_id = None  # the stub never ends a completion by itself
        server.fail(CHAT, lambda given: given)
        request = rl(max_tokens=39, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(ConfigError, match="must fit"):
            run(server, lambda client: client.complete(request), tokenizer=None)


def test_a_field_that_the_server_would_ignore_is_refused(server):
    request = rl(extensions=VLLMExtensions(extra_body_overrides={"top_kk": 3}))
    for tokenizer in (tiny_tokenizer(), None):
        with pytest.raises(ConfigError, match=r"'top_kk'.*did you mean top_k"):
            answer(server, request, tokenizer=tokenizer)
    answer(server, request, allow_unknown_fields=True)
    assert server.bodies(GENERATE)[0]["sampling_params"]["top_kk"] == 3


# -- retries


def in_use(server, path):
    return {"tokenizer": None} if path == CHAT else {}


@pytest.mark.parametrize("path", [GENERATE, CHAT])
@pytest.mark.parametrize("trouble", [(503, {}), (429, {}), (500, {"error": {"message": "RuntimeError"}}), CUT])
def test_transient_errors_are_retried(server, path, trouble):
    server.fail(path, trouble, trouble)
    response, _ = answer(server, **in_use(server, path))
    assert response.completion_token_ids
    assert len(server.bodies(path)) == 3


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_retries_are_limited(server, path):
    server.fail(path, *[(503, {"error": {"message": "overloaded"}})] * 3)
    with pytest.raises(InferenceError, match="overloaded"):
        answer(server, max_retries=2, **in_use(server, path))
    assert len(server.bodies(path)) == 3


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_permanent_errors_are_not_retried(server, path):
    server.fail(path, (400, {"error": {"message": "bad"}}))
    with pytest.raises(InferenceError, match=r"400.*bad"):
        answer(server, **in_use(server, path))
    assert len(server.bodies(path)) == 1


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_a_dead_engine_is_reported_and_not_retried(server, path):
    server.dead = True
    with pytest.raises(EngineDeadError, match="restart the server") as dead:
        answer(server, **in_use(server, path))
    assert len(server.bodies(path)) == 1
    assert DEAD in str(dead.value)


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_an_aborted_request_is_retried_and_never_an_answer(server, path):
    def aborted(given):
        return replace_fields(finish_reason="abort")(given)

    async def scenario(client):
        response, _ = await client.complete(rl())
        return response, client.metrics()["aborted"]

    server.fail(path, aborted)
    response, counted = run(server, scenario, **in_use(server, path))
    assert response.finish_reason in ("stop", "length")
    assert (counted, len(server.bodies(path))) == (1, 2)
    server.fail(path, *[aborted] * 2)
    with pytest.raises(InferenceError, match="aborted"):
        answer(server, max_retries=1, **in_use(server, path))


def test_requests_wait_during_a_pause_and_continue_after_a_resume(server):
    async def scenario(client):
        httpx2.post(f"{server.url}/pause?mode=keep", timeout=60)
        asked = asyncio.create_task(client.complete(rl()))
        while not server.bodies(GENERATE):
            await asyncio.sleep(0.001)
        assert not asked.done()
        httpx2.post(f"{server.url}/resume", timeout=60)
        return await asked

    response, _ = run(server, scenario)
    assert response.completion_token_ids == server.sample(response.prompt_token_ids, max_tokens=8, seed=1)[0]


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_a_hanging_server_is_abandoned_at_the_deadline(server, path):
    server.fail(path, HANG, HANG)
    with pytest.raises(TimeoutError, match=r"no answer within 0.5 s"):
        answer(server, timeout_s=0.5, **in_use(server, path))


def test_a_stopped_server_is_reported_as_unreachable(server):
    async def scenario(client):
        server.close()
        return await client.complete(rl())

    with pytest.raises(ServerUnreachableError, match="cannot be reached"):
        run(server, scenario, max_retries=1)


def test_a_client_works_in_a_second_event_loop(server):
    client = VLLMChatClient(port=server.port, tokenizer=tiny_tokenizer())

    async def once():
        async with client:
            return (await client.complete(rl()))[0].completion_token_ids

    assert asyncio.run(once()) == asyncio.run(once())


# -- the server as a whole


@pytest.mark.parametrize("caught", [ServerUnreachableError, ConnectionError, "requests.ConnectionError"])
def test_an_unreachable_server_raises_every_documented_exception_type(caught):
    if caught == "requests.ConnectionError":
        caught = pytest.importorskip("requests").ConnectionError
    with pytest.raises(caught, match="did not answer within 0 s"):
        VLLMChatClient(port=9, connection_timeout_s=0)


def test_wildcard_addresses_become_the_loopback_address():
    with StubVLLM() as server:
        client = VLLMChatClient(host="0.0.0.0", port=server.port)
        assert client.server_url == f"http://127.0.0.1:{server.port}"


def test_the_version_is_read_from_the_server(server):
    async def scenario(client):
        first = await client.get_policy_version()
        server.weight_version = "12"
        return first, await client.get_policy_version()

    assert run(server, scenario) == (0, 12)


def test_an_unreadable_version_is_the_last_known_one():
    async def scenario(client):
        server.close()
        return await client.get_policy_version()

    with StubVLLM(dev_mode=False) as server:
        assert run(server, scenario) == 0
    with StubVLLM() as server:
        server.weight_version = "5"
        assert run(server, scenario) == 5  # failing to read the version does not make the samples stale


def test_an_inference_only_client_refuses_weights(server):
    async def scenario(client):
        with pytest.raises(RuntimeError, match=r"cannot push weights.*enable_weight_updates=True"):
            client.sync_weights({})

    run(server, scenario)


def test_a_publisher_pushes_weights_and_the_client_knows_the_version(server, monkeypatch):
    from ludic.distributed.adapters import vllm as adapter

    class Control:
        closed = False

        def close(self):
            self.closed = True

    control, made, pushed = Control(), [], []

    def create(client, **settings):
        made.append(settings)
        client.hold_connections(control)
        return SimpleNamespace(publish=lambda params, version: pushed.append((params, version)))

    monkeypatch.setattr(adapter, "create_vllm_publisher", create)

    async def scenario(client):
        versions = [client.sync_weights({"w": 1}, version=4, timeout_s=9.0), client.sync_weights({"w": 2})]
        _, info = await client.complete(rl())
        client.close_communicator()
        return versions, info["policy_version"]

    settings = {"enable_weight_updates": True, "publisher_settings": {"master_address": "10.0.0.1"}, "tokenizer": None}
    assert run(server, scenario, **settings) == (["4", "5"], 5)
    assert made == [{"timeout_s": 9.0, "allow_unchanged": True, "master_address": "10.0.0.1"}]
    assert pushed == [({"w": 1}, "4"), ({"w": 2}, "5")]
    assert control.closed


def test_a_server_that_missed_a_push_gets_no_requests():
    with StubVLLM() as first, StubVLLM() as second:

        async def whole():
            async with VLLMChatClient(urls=[first.url, second.url], tokenizer=tiny_tokenizer()) as client:
                client.weights_changed(3, lost=[second.url])
                await asyncio.gather(*(client.complete(rl(seed=seed)) for seed in range(4)))
                return client.metrics()["live"]

        assert asyncio.run(whole()) == 1
        assert (len(first.bodies(GENERATE)), len(second.bodies(GENERATE))) == (4, 0)


def test_a_failed_prefix_cache_reset_is_an_error(server):
    async def scenario(client):
        client.reset_prefix_cache()
        assert server.cache_resets == 1
        server.dev_mode = False
        with pytest.raises(InferenceError, match="VLLM_SERVER_DEV_MODE=1"):
            client.reset_prefix_cache()
        return client.get_num_background_tasks()

    assert run(server, scenario) == 0


def test_a_model_name_can_refer_to_the_current_adapter(server):
    server.adapters["tiny@3"] = "/adapters/3"

    async def scenario(client):
        client.served_names["tiny"] = "tiny@3"
        await client.complete(rl())

    run(server, scenario)
    run(server, scenario, tokenizer=None)
    assert [server.bodies(path)[0]["model"] for path in (GENERATE, CHAT)] == ["tiny@3", "tiny@3"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_overflow": "drop"}, "on_overflow"),
        ({"urls": []}, "at least one server"),
        ({"urls": ["127.0.0.1:8000"]}, "must begin with http"),
        ({"urls": ["http://a", "http://a/v1"]}, "named twice"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"client_tag": "a\nb"}, "printable"),
        ({"client_tag": "a", "client_tag_policy": "strict"}, "client_tag_policy"),
    ],
)
def test_invalid_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        VLLMChatClient(connection_timeout_s=0, **settings)


def npy(experts):
    """As vLLM writes routed experts."""
    with io.BytesIO() as buffer:
        np.save(buffer, experts)
        return base64.b64encode(buffer.getvalue()).decode()


def npy_head(shape):
    """A file that says that it has so many experts, and has none."""
    with io.BytesIO() as buffer:
        np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
        return base64.b64encode(buffer.getvalue()).decode()


def sample_with_experts(answer, **server):
    """The trace of one continuation of [5, 6, 7] by a server that answers so."""
    with StubVLLM(**server) as stub:
        stub.routed_experts = answer

        async def sample():
            async with VLLMChatClient(urls=[f"http://127.0.0.1:{stub.port}"]) as client:
                return await client.complete_tokens([5, 6, 7], sampling=SamplingParams(max_tokens=4), seed=1)

        return asyncio.run(sample())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_of_a_server_are_routes_of_the_trace(dtype):
    """All tokens but the last, of three layers of two experts."""
    trace = sample_with_experts(lambda ids: npy(np.arange(6 * (len(ids) - 1), dtype=dtype).reshape(-1, 3, 2)))
    tokens = 3 + len(trace.completion_token_ids)
    assert trace.routes.array.tolist() == np.arange(6 * (tokens - 1)).reshape(-1, 3, 2).tolist()
    assert sample_with_experts(None).routes is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("no base64!", r"cannot be read"),
        (base64.b64encode(b"no npy").decode(), r"cannot be read"),
        (npy(np.array([[[{}]]], dtype=object)), r"cannot be read"),
        (base64.b64encode(b"PK\x03\x04 no zip").decode(), r"cannot be read"),
        (npy_head((2**45, 1, 1)), r"cannot be read"),
        (npy(np.zeros((2, 3, 2))), r"uint8 or uint16"),
        (npy(np.zeros((2, 3), dtype=np.uint8)), r"uint8 or uint16"),
        (npy(np.zeros((99, 3, 2), dtype=np.uint8)), r"\[99, 3, 2\] for \d tokens"),
        (npy(np.zeros((0, 3, 2), dtype=np.uint8)), r"\[0, 3, 2\]"),
    ],
)
def test_routed_experts_of_another_form_are_an_error(answer, said):
    with pytest.raises(InferenceError, match=said):
        sample_with_experts(lambda ids: answer)
