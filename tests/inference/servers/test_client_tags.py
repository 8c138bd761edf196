"""Tags of clients that share a server: how a tag is chosen, what it filters, and the middleware
that echoes it."""

import asyncio
import json

import pytest
from hypothesis import given, strategies as st
from stub_vllm import StubVLLM
from stub_vllm_sampling import CHAT, GENERATE
from tiny_policy import tiny_tokenizer

from ludic.errors import ClientTagError, ConfigError
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams, VLLMChatClient
from ludic.inference.servers.client_tags import ClientTag, find_tag, resolve_client_tag, shared_server_settings
from ludic.inference.vllm.in_server.client_tag_middleware import ClientTagMiddleware


@pytest.mark.parametrize(
    ("explicit", "environment", "tag"),
    [
        ("mine", {"VLLM_CLIENT_TAG": "env", "RANK": "1"}, "mine"),
        (None, {"VLLM_CLIENT_TAG": " env ", "RANK": "1"}, "env"),
        ("  ", {"VLLM_CLIENT_TAG": "", "RANK": "1", "WORLD_SIZE": "4"}, "rank-1-of-4"),
        (None, {"RANK": "1", "LOCAL_RANK": "0"}, "rank-1"),
        (None, {"LOCAL_RANK": "0", "SLURM_NTASKS": "2"}, "rank-0-of-2"),
        (None, {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "rank-3-of-8"),
        (None, {}, None),
    ],
)
def test_the_tag_is_explicit_or_comes_from_the_launchers_variables(explicit, environment, tag):
    assert resolve_client_tag(explicit, environment) == tag


@pytest.mark.parametrize(
    ("answer", "tag"),
    [
        ({"client_tag": " a "}, "a"),
        ({"metadata": {"client_tag": "a"}}, "a"),
        ({"meta": {"context": {"extra": {"request": {"client_tag": "a"}}}}}, "a"),
        ({"meta": [{}, {"client_tag": "a"}]}, "a"),
        ({"meta": [{}] * 8 + [{"client_tag": "a"}]}, None),  # the ninth
        ({"client_tag": "  ", "extra": {"client_tag": "a"}}, "a"),
        ({"client_tag": 7}, None),
        ({"elsewhere": {"client_tag": "a"}}, None),
        ({"meta": {"meta": {"meta": {"meta": {"meta": {"meta": {"client_tag": "a"}}}}}}}, None),  # six down
    ],
)
def test_a_tag_is_read_from_every_place_where_servers_put_it(answer, tag):
    assert find_tag(answer) == tag


def group(tag=None, *outputs):
    found = {} if tag is None else {"metadata": {"client_tag": tag}}
    return {**found, **({"outputs": list(outputs)} if outputs else {})}


def test_groups_and_outputs_of_other_clients_are_dropped_and_counted():
    mine = ClientTag("a")
    answer = {
        "results": [group("a"), group("b"), group(None, group("a"), group("b")), group(None, group("b")), group("a", group())]
    }
    kept = mine.filter(answer)
    assert kept["results"] == [group("a"), group(None, group("a")), group("a", group())]
    assert (mine.counts.filtered, mine.counts.errors, mine.counts.untagged) == (3, 0, 0)
    assert len(answer["results"]) == 5  # the input is not modified


def test_a_response_without_own_outputs_is_an_error():
    mine = ClientTag("a")
    with pytest.raises(ClientTagError, match="another client_tag than 'a'"):
        mine.filter({"choices": [group("b"), group("c")]})
    with pytest.raises(ClientTagError, match="has the client_tag 'b' and not 'a'"):
        mine.filter({"client_tag": "b", "text": ["x"]})
    with pytest.raises(ClientTagError):
        mine.filter({"metadata": {"client_tag": "b"}, "choices": [group()]})
    assert mine.counts.errors == 3


def test_an_untagged_response_is_an_error_with_a_remedy_or_is_counted():
    with pytest.raises(ClientTagError, match=r"no client_tag; .*`ludic serve --client-tags`"):
        ClientTag("a", "require_echo").filter({"choices": [group()]})
    lenient = ClientTag("a", "lenient")
    assert lenient.filter({"choices": [group()]}) == {"choices": [group()]}
    assert lenient.counts.untagged == 1
    assert ClientTag("a", "require_echo").filter({"metadata": {"client_tag": "a"}, "choices": [group()]})["choices"] == [group()]


tags = st.sampled_from([None, "a", "b"])
groups = st.lists(st.builds(lambda tag, outputs: group(tag, *map(group, outputs)), tags, st.lists(tags, max_size=3)), max_size=6)


@given(groups)
def test_exactly_the_clients_own_outputs_are_kept(results):
    """An output is the client's own unless its tag or, without one, its group's tag says
    otherwise."""

    def outputs(group):
        return group.get("outputs") or []

    def is_mine(group):
        if (find_tag(group) or "a") != "a":
            return False
        return not outputs(group) or any((find_tag(o) or "a") == "a" for o in outputs(group))

    expected = [
        {**g, "outputs": [o for o in outputs(g) if (find_tag(o) or "a") == "a"]} if outputs(g) else g
        for g in results
        if is_mine(g)
    ]
    mine = ClientTag("a")
    if results and not expected:
        with pytest.raises(ClientTagError):
            mine.filter({"results": results})
    else:
        assert mine.filter({"results": results})["results"] == expected


def test_a_tag_that_is_not_a_valid_header_value_is_refused():
    for tag in ("", " ", "a\nb", "é"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            ClientTag(tag)


# -- the client


def ask(server, *, tokenizer, **settings):
    async def whole():
        async with VLLMChatClient(port=server.port, tokenizer=tokenizer, client_tag="rank-0-of-2", **settings) as client:
            request = ChatCompletionRequest(
                "tiny", [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4), ReturnSpec.for_rl()
            )
            try:
                return (await client.complete(request))[0], client.metrics()
            except ClientTagError as error:
                return error, client.metrics()

    return asyncio.run(whole())


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_the_tag_is_sent_in_header_and_body_and_its_echo_is_accepted(path):
    tokenizer = tiny_tokenizer() if path == GENERATE else None
    with StubVLLM(echo_tags=True) as server:
        response, metrics = ask(server, tokenizer=tokenizer, client_tag_policy="require_echo")
        sent = [(body, headers) for seen, body, headers in server.requests if seen == path]
    assert response.completion_token_ids
    assert [(body["client_tag"], headers["x-vllm-client-tag"]) for body, headers in sent] == [("rank-0-of-2", "rank-0-of-2")]
    assert metrics["client_tag_untagged"] == metrics["client_tag_errors"] == 0


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_a_missing_echo_is_an_immediate_error_or_is_counted(path):
    tokenizer = tiny_tokenizer() if path == GENERATE else None
    with StubVLLM() as server:
        error, metrics = ask(server, tokenizer=tokenizer, client_tag_policy="require_echo")
        assert isinstance(error, ClientTagError)
        assert metrics["client_tag_errors"] == 1
        assert len(server.bodies(path)) == 1  # a retry would give the same
        response, metrics = ask(server, tokenizer=tokenizer)
        assert response.completion_token_ids
        assert metrics["client_tag_untagged"] == 1


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_a_choice_of_another_client_is_ignored(path):
    def with_another(given):
        another = {**given["choices"][0], "metadata": {"client_tag": "rank-1-of-2"}, "token_ids": [1], "logprobs": None}
        own = {**given["choices"][0], "metadata": {"client_tag": "rank-0-of-2"}}
        return {**given, "choices": [another, own]}

    tokenizer = tiny_tokenizer() if path == GENERATE else None
    with StubVLLM() as server:
        server.fail(path, with_another)
        response, metrics = ask(server, tokenizer=tokenizer, client_tag_policy="require_echo")
    assert len(response.completion_token_ids) == len(response.completion_logprobs)
    assert metrics["client_tag_filtered"] == 1


# -- the settings of a shared server


def test_the_launchers_variables_configure_a_client():
    assert shared_server_settings({}) == {
        "client_tag": None,
        "client_tag_policy": "lenient",
        "max_prompt_chars": 2048,
        "api_key": "local",
        "extra_headers": {},
        "timeout_s": 120.0,
        "max_retries": 3,
        "backoff_s": 1.0,
        "backoff_growth": 2.0,
    }
    environment = {
        "RANK": "1", "WORLD_SIZE": "2", "MAX_PROMPT_CHARS": "0", "VLLM_API_KEY": "k", "VLLM_EXTRA_HEADERS": '{"X-Team": "rl"}',
        "VLLM_TIMEOUT": "9", "VLLM_MAX_RETRIES": "1", "VLLM_BACKOFF": "0.5", "VLLM_BACKOFF_MULTIPLIER": "3",
    }  # fmt: skip
    settings = shared_server_settings(environment)
    assert (settings["client_tag"], settings["client_tag_policy"]) == ("rank-1-of-2", "require_echo")
    with StubVLLM(echo_tags=True) as server:

        async def whole():
            async with VLLMChatClient(port=server.port, tokenizer=tiny_tokenizer(), **settings) as client:
                await client.complete_tokens([5], sampling=SamplingParams(max_tokens=2))

        asyncio.run(whole())
        headers = [headers for path, _, headers in server.requests if path == GENERATE]
    assert [(h["authorization"], h["x-team"], h["x-vllm-client-tag"]) for h in headers] == [("Bearer k", "rl", "rank-1-of-2")]


@pytest.mark.parametrize(
    ("environment", "message"),
    [({"VLLM_TIMEOUT": "soon"}, "VLLM_TIMEOUT"), ({"VLLM_EXTRA_HEADERS": "[secret]"}, "VLLM_EXTRA_HEADERS")],
)
def test_invalid_variables_are_refused_and_secrets_are_not_shown(environment, message):
    with pytest.raises(ConfigError, match=message) as refused:
        shared_server_settings(environment)
    assert "secret" not in str(refused.value)


# -- the middleware


def respond_through_middleware(
    body=b"{}", answer=b"{}", *, headers=(), kind=b"application/json", chunks=1, status=200, method="POST"
):
    """(status, headers, body) that the middleware returns, and the body that the application behind
    it received."""
    seen, sent = [], []

    async def application(scope, receive, send):
        got = b""
        while True:
            message = await receive()
            got += message.get("body", b"")
            if not message.get("more_body"):
                break
        seen.append(got)
        length = (b"content-length", str(len(answer)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), length]})
        size = -(-len(answer) // chunks) or 1
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)] or [b""]
        for number, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": number + 1 < len(pieces)})

    halves = [body[: len(body) // 2], body[len(body) // 2 :]]
    incoming = [{"type": "http.request", "body": half, "more_body": number == 0} for number, half in enumerate(halves)]

    async def receive():
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "headers": list(headers)}
    asyncio.run(ClientTagMiddleware(application)(scope, receive, send))
    start, *bodies = sent
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in bodies), seen[0]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("by", ["header", "body"])
def test_the_tag_is_echoed_in_the_header_and_in_every_chunk(by, chunks):
    answer = {"choices": [{"index": 0}, {"index": 1, "metadata": {"x": 1}}], "results": [{"outputs": [{"text": "é"}]}]}
    body = json.dumps({"client_tag": "a", "prompt": "é"} if by == "body" else {"prompt": "é"}).encode()
    headers = [(b"x-vllm-client-tag", b"a")] if by == "header" else []
    status, out, data, seen = respond_through_middleware(body, json.dumps(answer).encode(), headers=headers, chunks=chunks)
    found = json.loads(data)
    assert (status, out[b"x-vllm-client-tag"], int(out[b"content-length"])) == (200, b"a", len(data))
    assert seen == body
    assert [choice["metadata"] for choice in found["choices"]] == [{"client_tag": "a"}, {"x": 1, "client_tag": "a"}]
    assert found["results"][0]["outputs"][0] == {"text": "é", "metadata": {"client_tag": "a"}}
    assert ClientTag("a", "require_echo").filter(found) == found


def test_errors_are_tagged_too():
    status, _, data, _ = respond_through_middleware(answer=b'{"error": {}}', headers=[(b"x-vllm-client-tag", b"a")], status=404)
    assert (status, json.loads(data)) == (404, {"error": {}, "metadata": {"client_tag": "a"}})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(b"data: {}\n\n", b"text/event-stream"), (b"not json", b"application/json"), (b"[1]", b"application/json")],
)
def test_bodies_that_are_not_objects_only_get_the_header(answer, kind):
    _, out, data, _ = respond_through_middleware(answer=answer, kind=kind, headers=[(b"x-vllm-client-tag", b"a")], chunks=2)
    assert (data, out[b"x-vllm-client-tag"]) == (answer, b"a")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"client_tag": 5}', b'{"client_tag": "a\\r\\nb: c"}', b'{"client_tag": " "}']
)
def test_without_a_tag_the_response_is_unchanged(body):
    _, out, data, seen = respond_through_middleware(body, b'{"a": 1}')
    assert (data, seen) == (b'{"a": 1}', body)
    assert b"x-vllm-client-tag" not in out


def test_a_client_disconnect_reaches_the_application():
    """A server stops sampling for a disconnected client, so the disconnect message must not be
    swallowed."""
    heard = []

    async def application(scope, receive, send):
        heard.extend([await receive(), await receive()])

    incoming = [{"type": "http.request", "body": b'{"client_tag": "a"}'}, {"type": "http.disconnect"}]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        raise AssertionError

    asyncio.run(ClientTagMiddleware(application)({"type": "http", "method": "POST", "headers": []}, receive, send))
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]
