"""The gateway: calls of the SDKs have exact tokens; retries, lost clients, limits and keys."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler

from ludic.errors import ConfigError, InferenceError
from ludic.inference import LocalChatClient
from ludic.inference.gateway import gateway as gateway_module
from ludic.inference.gateway.gateway import Gateway
from ludic.inference.gateway.session import Limits
from ludic.inference.request import SamplingParams

LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": LOOK}]
CALL = '<tool_call>{"name":"look",  "arguments":{"key":"a"}}</tool_call>'


def numbered(prompt, number):
    return f"answer {number}"


@asynccontextmanager
async def episode(script=numbered, *, limits=None, delay=0.0, run=None, seed=7, **settings):
    """(a session, its sampler, a client of the openai package that asks once)."""
    sampler = script if isinstance(script, ScriptedSampler) else ScriptedSampler(bpe_tokenizer(), script, delay=delay)
    with Gateway(sampler, sampler.tokenizer, **settings) as gateway:
        session = gateway.open(sampling=run or SamplingParams(1.0, 200), seed=seed, limits=limits, prompt="question")
        session.gateway, session.sampler = gateway, sampler
        async with session.client().with_options(max_retries=0, timeout=20) as client:
            yield session, sampler, client


async def ask(client, messages, **settings):
    return (await client.chat.completions.create(model="x", messages=messages, **settings)).choices[0].message


def user(text):
    return {"role": "user", "content": text}


def ids_of(call):
    return [*call.trace.prompt_token_ids, *call.trace.completion_token_ids]


async def test_a_dialogue_of_an_agent_with_tools_has_the_sampled_tokens_in_every_prompt():
    script = iter([f"I look.\n{CALL}", "<think>\nhm\n</think>\n\nIt is a.", "done"])
    async with episode(lambda *_: next(script)) as (session, sampler, client):
        messages = [user("question")]
        first = await ask(client, messages, tools=TOOLS)
        assert (first.content, first.tool_calls[0].function.arguments) == ("I look.", '{"key": "a"}')
        told = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "v"}
        second = await ask(client, [*messages, first.model_dump(exclude_none=True), told], tools=TOOLS)
        assert (second.content, second.reasoning_content) == ("It is a.", "hm")
        third = await ask(
            client, [*messages, first, told, {"role": "assistant", "content": "It is a. "}, user("go on")], tools=TOOLS
        )
        assert third.content == "done"
        counts = await session.gateway.close_session(session)
    calls = session.calls
    assert [call.parent for call in calls] == [None, 0, 0]  # the template drops thoughts before a user's message
    assert [call.reason for call in calls] == ["root", "continues", "continues"]
    assert ids_of(calls[1])[: len(ids_of(calls[0]))] == ids_of(calls[0])
    assert ids_of(calls[2])[: len(ids_of(calls[0]))] == ids_of(calls[0])
    assert [call.trace.prompt_token_ids for call in calls] == [asked for asked, *_ in sampler.asked]
    assert [call.policy_version for call in calls] == [3, 3, 3]
    assert [[m["role"] for m in call.messages] for call in calls] == [["user"], ["tool"], ["tool", "assistant", "user"]]
    assert (calls[0].trace.finish_reason, calls[0].delivered, counts.error) == ("tool_calls", True, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_has_what_clients_ask_for(stream):
    async with episode(lambda *_: "one two END three") as (session, _, client):
        asked = {"model": "gpt-4o", "messages": [user("question")], "n": 2, "stop": ["END"], "logprobs": True, "stream": stream}
        if not stream:
            answer = await client.chat.completions.create(**asked)
            assert [choice.message.content for choice in answer.choices] == ["one two ", "one two "]
            assert "".join(t.token for t in answer.choices[0].logprobs.content) == "one two END"
            assert (answer.model, answer.usage.completion_tokens) == ("gpt-4o", 22)
        else:
            chunks = [
                chunk async for chunk in await client.chat.completions.create(**asked, stream_options={"include_usage": True})
            ]
            texts = [
                "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == i) for i in (0, 1)
            ]
            assert texts == ["one two ", "one two "]
            assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 22
    assert [call.model for call in session.calls] == ["gpt-4o"] * 2


async def test_responses_and_completions_and_models():
    script = iter([f"I look.\n{CALL}", "done", "plain", "ids"])
    async with episode(lambda *_: next(script)) as (session, sampler, client):
        tools = [{"type": "function", **LOOK}]
        first = await client.responses.create(model="x", input="question", instructions="Be brief.", tools=tools)
        assert [item.type for item in first.output] == ["message", "function_call"]
        told = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "v"}
        stream = await client.responses.create(
            model="x", input=[user("question"), *first.output, told], instructions="Be brief.", tools=tools, stream=True
        )
        events = [event async for event in stream]
        assert events[-1].response.output_text == "done"
        assert session.calls[1].parent == 0
        plain = await client.completions.create(model="x", prompt="Once", max_tokens=50)
        assert plain.choices[0].text == "plain"
        exact = await client.completions.create(model="x", prompt=[5, 6, 7], max_tokens=50)
        assert (exact.choices[0].text, sampler.asked[-1][0]) == ("ids", [5, 6, 7])
        assert [model.id for model in (await client.models.list()).data] == ["policy"]
        assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"


async def test_a_response_continues_the_one_that_it_names():
    script = iter([f"I look.\n{CALL}", "done", "again", "other"])
    async with episode(lambda *_: next(script)) as (session, sampler, client):
        given = {"model": "x", "instructions": "Be brief.", "tools": [{"type": "function", **LOOK}]}
        first = await client.responses.create(input="question", **given)
        told = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "v"}
        second = await client.responses.create(input=[told], previous_response_id=first.id, **given)
        whole = await client.responses.create(input=[user("question"), *first.output, told], **given)
        assert sampler.asked[1][0] == sampler.asked[2][0]
        assert (second.output_text, whole.output_text) == ("done", "again")
        assert [call.parent for call in session.calls] == [None, 0, 0]
        third = await client.responses.create(
            input="more", previous_response_id=second.id, **given | {"instructions": "Be long."}
        )
        assert (third.output_text, session.calls[3].reason) == ("other", "changed:0:content")  # instructions are not kept
        with pytest.raises(openai.BadRequestError, match="'resp_unknown' is not of an answer"):
            await client.responses.create(input="more", previous_response_id="resp_unknown", **given)


def anthropic_events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def test_messages_of_anthropic_with_tools_thoughts_streams_and_counts():
    script = iter([f"<think>\nhm\n</think>\n\nI look.\n{CALL}", "done", " and more"])
    async with episode(lambda *_: next(script)) as (session, _, _), httpx2.AsyncClient(trust_env=False) as http:
        headers = {"x-api-key": session.api_key}

        async def post(path="/v1/messages?beta=true", **body):
            body = {"model": "claude", "max_tokens": 99, **body}
            return await http.post(f"{session.anthropic_base_url}{path}", headers=headers, json=body)

        tools = [{"name": "look", "description": "Look.", "input_schema": LOOK["parameters"]}]
        system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
        asked = {"system": system, "tools": tools, "messages": [user("question")]}
        first = (await post(**asked)).json()
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert (first["stop_reason"], first["content"][2]["input"]) == ("tool_use", {"key": "a"})
        result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": [{"type": "text", "text": "v"}]}
        system[0]["text"] += "2"
        turns = [*asked["messages"], {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        events = anthropic_events((await post(**{**asked, "messages": turns}, stream=True)).text)
        assert "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta") == "done"
        assert (session.calls[1].parent, session.calls[1].reason) == (0, "continues")
        count = (await post("/v1/messages/count_tokens", **asked)).json()["input_tokens"]
        assert count == len(session.calls[0].trace.prompt_token_ids)
        more = (await post(**{**asked, "messages": [*turns, {"role": "assistant", "content": "done"}]})).json()
        assert more["content"][0]["text"] == " and more"
        ended = ids_of(session.calls[1])
        assert session.calls[2].trace.prompt_token_ids == ended[:-1]  # the answer goes on without its end token
        refused = await post(**{**asked, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_forced_call_is_sampled_after_its_beginning():
    async with episode(lambda prompt, _: 'look", "arguments": {"key": "b"}}\n</tool_call>') as (session, _, client):
        message = await ask(client, [user("question")], tools=TOOLS, tool_choice="required")
        assert message.tool_calls[0].function.arguments == '{"key": "b"}'
        tokenizer = session.sampler.tokenizer
        assert tokenizer.decode(session.calls[0].trace.prompt_token_ids).endswith('<tool_call>\n{"name": "')
        told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "v"}
        await ask(client, [user("question"), message, told], tools=TOOLS, tool_choice="none")
        assert session.calls[1].reason == "tools"


async def test_settings_of_the_run_are_used_and_those_of_the_agent_counted():
    async with episode(run=SamplingParams(0.9, 50, top_p=0.8)) as (session, sampler, client):
        await ask(client, [user("question")], temperature=0.0, max_tokens=7)
        counts = await session.gateway.close_session(session)
    [(_, sampling, _)] = sampler.asked
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.9, 0.8, 7)
    assert counts.ignored == {"temperature": 0.0}
    async with episode(run=SamplingParams(0.9, 50), sampling="harness") as (_, sampler, client):
        await ask(client, [user("question")], temperature=0.25, max_tokens=500, seed=3)
    [(_, sampling, _)] = sampler.asked
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 50)


async def test_seeds_follow_from_the_prompt_and_not_from_the_order_of_calls():
    async def seeds(*texts):
        async with episode() as (_, sampler, client):
            for text in texts:
                await ask(client, [user(text)])
            return {(tuple(ids), seed) for ids, _, seed in sampler.asked}

    assert await seeds("a", "b", "a") == await seeds("a", "a", "b") == await seeds("b", "a", "a")
    assert len(await seeds("a", "a", "a")) == 3


async def test_a_second_attempt_gets_the_same_answer_of_one_call():
    async with episode(delay=0.3) as (session, sampler, client):
        slow = client.with_options(timeout=0.15, max_retries=3)
        message = await ask(slow, [user("question")])
        assert message.content == "answer 0"
        assert len(sampler.asked) == len(session.calls) == 1
        again = await client.chat.completions.create(model="x", messages=[user("other")], extra_headers={"Idempotency-Key": "k"})
        same = await client.chat.completions.create(model="x", messages=[user("other")], extra_headers={"Idempotency-Key": "k"})
        assert (again, len(session.calls)) == (same, 2)
        await ask(client, [user("other")])
        assert len(session.calls) == 3


async def test_a_call_whose_client_has_gone_is_no_part_of_the_episode(monkeypatch):
    monkeypatch.setattr(gateway_module, "RETRY_GRACE_S", 0.05)
    async with episode(delay=0.2) as (session, sampler, client):
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=0.05), [user("question")])
        await asyncio.sleep(0.5)
        await ask(client, [user("question")])
        counts = await session.gateway.close_session(session)
    assert [call.delivered for call in session.calls] == [True]
    seeds = [seed for _, _, seed in sampler.asked]
    assert seeds[0] == seeds[1]
    assert counts.counts["undelivered"] <= 1


@pytest.mark.parametrize(
    ("limits", "status", "text"),
    [
        (Limits(max_calls=1), 403, "may make 1 calls"),
        (Limits(max_tokens=9), 403, "may sample 9 tokens"),
        (Limits(context=40), 400, "prompt is too long"),
    ],
)
async def test_limits_are_errors_that_end_a_client_or_let_it_compact(limits, status, text):
    async def play(client):
        messages = [user("question")]
        for _ in range(20):
            answer = await ask(client, messages)
            messages = [*messages, {"role": "assistant", "content": answer.content}, user("go on")]

    async with episode(limits=limits) as (_, sampler, client):
        with pytest.raises(openai.APIStatusError, match=text) as error:
            await play(client)
        assert error.value.status_code == status
        assert (error.value.code == "context_length_exceeded") == (status == 400)
        assert limits.context is None or all(len(ids) + each.max_tokens <= 40 for ids, each, _ in sampler.asked)


async def test_keys_end_with_their_session_and_see_only_it():
    async with episode() as (session, _, client):
        other = session.gateway.open(sampling=SamplingParams(1.0, 20), seed=0)
        await ask(client, [user("question")])
        assert (len(session.calls), len(other.calls)) == (1, 0)
        assert session.api_key not in repr(session)
        url = f"{session.gateway.url}/e/{other.api_key}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as in_path:
            await ask(in_path, [user("question")])
        assert len(other.calls) == 1
        for key in ("sk-other", ""):
            with pytest.raises(openai.AuthenticationError):
                await ask(client.with_options(api_key=key or "x"), [user("question")])
        await session.gateway.close_session(session)
        with pytest.raises(openai.AuthenticationError, match="not of a running episode"):
            await ask(client, [user("question")])


async def test_a_failure_of_the_engine_is_not_the_agents_fault():
    def fail(prompt, number):
        raise InferenceError("the engine is away")

    async with episode(fail) as (session, _, client):
        with pytest.raises(openai.InternalServerError, match="the engine is away"):
            await ask(client, [user("question")])
        counts = await session.gateway.close_session(session)
    assert isinstance(counts.error, InferenceError)
    assert session.calls == []


async def test_closing_a_session_cancels_its_calls():
    async with episode(delay=30) as (session, _, client):
        asked = asyncio.ensure_future(ask(client, [user("question")]))
        await asyncio.sleep(0.3)
        await session.gateway.close_session(session)
        with pytest.raises(openai.PermissionDeniedError, match="episode is over"):
            await asked
    assert session.calls == []


async def test_a_slow_stream_gets_pings_before_its_events(monkeypatch):
    from ludic.inference.gateway import http

    monkeypatch.setattr(http, "PING_AFTER_S", 0.05)
    monkeypatch.setattr(http, "PING_EVERY_S", 0.05)
    async with episode(delay=0.4) as (session, _, _), httpx2.AsyncClient(trust_env=False) as raw:
        body = {"model": "x", "messages": [user("question")], "stream": True, "max_tokens": 9}
        headers = {"authorization": f"Bearer {session.api_key}"}
        text = (await raw.post(f"{session.base_url}/chat/completions", json=body, headers=headers)).text
        assert text.startswith(": ping\n\n: ping")
        assert "answer 0" in text
        text = (await raw.post(f"{session.base_url}/messages", json=body, headers=headers)).text
        assert text.startswith("event: ping")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [user("a")], "response_format": {"type": "json_schema"}}, "constrained decoding"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "reads text alone",
        ),
        ({"messages": []}, "at least one"),
        ({"messages": [user("a")], "n": 0}, r"n \(0\) must be"),
        (
            {"messages": [user("a")], "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "must be one of look",
        ),
    ],
)
async def test_what_a_sampled_model_cannot_give_is_refused_by_name(body, text):
    async with episode() as (session, _, client):
        with pytest.raises(openai.BadRequestError, match=text):
            await client.post("/chat/completions", body=body, cast_to=object)
        assert session.calls == []


async def test_formats_can_be_ignored_and_tools_left_out():
    async with episode(unsupported="ignore") as (session, _, client):
        await ask(client, [user("a")], response_format={"type": "json_object"})
        assert len(session.calls) == 1


def test_a_client_without_sample_tokens_is_refused():
    class Chat:
        async def complete(self, request):
            raise AssertionError

    with pytest.raises(ConfigError, match="has no sample_tokens"):
        Gateway(Chat(), bpe_tokenizer())


async def test_log_probabilities_equal_a_forward_pass_over_the_ids():
    import torch
    from playing import tiny_model

    tokenizer = bpe_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    sampler = LocalChatClient(model, tokenizer)
    with Gateway(sampler, tokenizer) as gateway:
        sessions = [gateway.open(sampling=SamplingParams(1.0, 12), seed=i) for i in range(4)]

        async def play(session):
            async with session.client() as client:
                messages = [user("question")]
                for _ in range(3):
                    answer = await ask(client, messages)
                    messages = [*messages, {"role": "assistant", "content": answer.content}, user("go on")]

        await asyncio.gather(*map(play, sessions))
    calls = [call for session in sessions for call in session.calls]
    assert len(calls) == 12
    for call in calls:
        ids = torch.tensor([ids_of(call)])
        start = len(call.trace.prompt_token_ids)
        logps = torch.log_softmax(model(input_ids=ids).logits[0, start - 1 : -1], -1).gather(1, ids[0, start:, None])[:, 0]
        assert call.trace.completion_logprobs == pytest.approx(logps.tolist(), abs=2e-5)
        assert call.parent is None or ids_of(session_of(sessions, call).calls[call.parent]) == ids[0, : call.shared].tolist()


def session_of(sessions, call):
    return next(session for session in sessions if call in session.calls)


async def test_limits_hold_for_calls_at_the_same_time():
    async with episode(limits=Limits(max_calls=5), delay=0.1) as (session, _, client):
        answers = await asyncio.gather(*(ask(client, [user(str(i))]) for i in range(20)), return_exceptions=True)
        assert sum(isinstance(each, openai.PermissionDeniedError) for each in answers) == 15
        assert len(session.calls) == 5
    async with episode(lambda *_: "x" * 100, limits=Limits(max_tokens=50), delay=0.1) as (session, _, client):
        await asyncio.gather(*(ask(client, [user(str(i))], n=8) for i in range(4)), return_exceptions=True)
        assert sum(len(call.trace.completion_token_ids) for call in session.calls) <= 50


async def test_calls_that_nobody_waits_for_have_a_limit_too(monkeypatch):
    monkeypatch.setattr(gateway_module, "RETRY_GRACE_S", 0.0)
    async with episode(limits=Limits(max_calls=2), delay=0.2) as (_, sampler, client):
        for number in range(12):
            with pytest.raises((openai.APITimeoutError, openai.PermissionDeniedError)):
                await ask(client.with_options(timeout=0.1), [user(str(number))])
            await asyncio.sleep(0.15)
    assert len(sampler.asked) <= 6


async def test_a_failure_that_a_second_attempt_mends_is_none():
    def fail_once(prompt, number):
        if number == 0:
            raise InferenceError("hiccup")
        return "fine"

    async with episode(fail_once) as (session, _, client):
        await ask(client.with_options(max_retries=2), [user("question")])
        counts = await session.gateway.close_session(session)
    assert (counts.error, len(session.calls)) == (None, 1)


async def test_of_several_samples_one_failure_ends_the_others():
    started, ended = [], []

    class Slow(ScriptedSampler):
        async def sample_tokens(self, *arguments, **settings):
            started.append(1)
            if len(started) == 1:
                raise InferenceError("away")
            try:
                await asyncio.sleep(30)
            finally:
                ended.append(1)

    async with episode(Slow(bpe_tokenizer(), numbered)) as (_, _, client):
        with pytest.raises(openai.InternalServerError):
            await ask(client, [user("question")], n=4)
        await asyncio.sleep(0.2)
        assert len(ended) == len(started) - 1


async def test_an_answer_that_nobody_got_is_not_continued(monkeypatch):
    monkeypatch.setattr(gateway_module, "RETRY_GRACE_S", 0.5)
    async with episode(lambda *_: "same", delay=0.3) as (session, _, client):
        lost = asyncio.ensure_future(ask(client.with_options(timeout=0.15), [user("question")]))
        message = await ask(client, [user("question")])
        with pytest.raises(openai.APITimeoutError):
            await lost
        await ask(client, [user("question"), {"role": "assistant", "content": message.content}, user("go")])
    assert [(call.parent, call.reason) for call in session.calls] == [(None, "root"), (0, "continues")]


async def test_the_second_attempt_of_one_of_two_equal_calls_is_its_own():
    async with episode(delay=0.4) as (session, _, client):
        other = asyncio.ensure_future(ask(client, [user("question")]))
        slow = client.with_options(timeout=0.25, max_retries=3)
        first, second = (await ask(slow, [user("question")])).content, (await other).content
        assert first != second
        assert len(session.calls) == 2


async def test_plain_completions_keep_their_thoughts():
    async with episode(lambda *_: "<think>\nhm\n</think>\n\nso") as (_, _, client):
        answer = await client.completions.create(model="x", prompt="Once", max_tokens=50, logprobs=0)
        assert answer.choices[0].text == "<think>\nhm\n</think>\n\nso"
        assert answer.choices[0].logprobs.token_logprobs


async def test_a_prompt_beyond_the_engines_context_is_the_agents_to_shorten():
    from playing import tiny_model

    tokenizer = bpe_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=64)
    async with episode(LocalSampler(model, tokenizer)) as (session, _, client):
        with pytest.raises(openai.BadRequestError, match="prompt is too long") as error:
            await ask(client, [user("question " * 100)])
        assert error.value.code == "context_length_exceeded"
        counts = await session.gateway.close_session(session)
    assert counts.error is None


class LocalSampler(ScriptedSampler):
    """The in-process engine in the place of a script."""

    def __init__(self, model, tokenizer):
        super().__init__(tokenizer, numbered)
        self.inner = LocalChatClient(model, tokenizer)
        self.context_length = self.inner.context_length

    async def sample_tokens(self, ids, **settings):
        return await self.inner.sample_tokens(ids, **settings)


@pytest.mark.parametrize("properties", [{"key": True}, ["key"], "key"])
async def test_schemas_that_are_none_do_no_harm(properties):
    tools = [{"type": "function", "function": {"name": 'a"b', "parameters": {"type": "object", "properties": properties}}}]
    async with episode(lambda *_: CALL) as (session, _, client):
        await ask(client, [user("question")], tools=tools)
        assert session.calls[0].answer["tool_calls"]


async def test_long_prompts_of_one_session_do_not_stop_another():
    async with episode() as (session, _, client):
        other = session.gateway.open(sampling=SamplingParams(1.0, 20), seed=0)
        long = asyncio.ensure_future(ask(client, [user("word " * 400_000)]))
        await asyncio.sleep(0.3)
        async with httpx2.AsyncClient(trust_env=False) as http:
            started = asyncio.get_running_loop().time()
            await http.get(f"{session.gateway.url}/health")
            assert asyncio.get_running_loop().time() - started < 1.0 or long.done()
        await long
        assert other.calls == []


def test_transcripts_end_with_their_session():
    sampler = ScriptedSampler(bpe_tokenizer(), numbered)
    with Gateway(sampler, sampler.tokenizer) as gateway:

        async def play():
            for _ in range(3):
                session = gateway.open(sampling=SamplingParams(1.0, 20), seed=0)
                async with session.client() as client:
                    await ask(client, [user("question")])
                await gateway.close_session(session)

        asyncio.run(play())
        assert gateway._encoder._transcripts == {}


def test_a_port_that_is_taken_is_told():
    sampler = ScriptedSampler(bpe_tokenizer(), numbered)
    with Gateway(sampler, sampler.tokenizer) as first:
        second = Gateway(sampler, sampler.tokenizer, port=first._bound)
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"cannot use port {first._bound}"):
                second.open(sampling=SamplingParams(1.0, 20))
