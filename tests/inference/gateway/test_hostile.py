"""What programs that are not trusted send: no input is answered with 5xx, hangs beyond its
deadline, or reaches another session."""

import asyncio
import json

import httpx2
import pytest
from chat_tokenizers import bpe_tokenizer
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted_sampler import ScriptedSampler

from ludic.inference.gateway import http
from ludic.inference.gateway.gateway import Gateway
from ludic.inference.request import SamplingParams

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def gateway():
    sampler = ScriptedSampler(bpe_tokenizer(), lambda *_: "fine")
    with Gateway(sampler, sampler.tokenizer) as made:
        yield made


async def raw(gateway, data, wait_s=5.0):
    """(the first line of the answer, all of it) of these bytes on a connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway._bound)
    writer.write(data)
    await writer.drain()
    try:
        answer = await asyncio.wait_for(reader.read(2**16), wait_s)
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    return answer.partition(b"\r\n")[0].decode("latin-1"), answer


def head(session, length, path=PATHS[0], extra=""):
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.api_key}\r\ncontent-length: {length}\r\n{extra}\r\n".encode()


def post(session, body, path=PATHS[0]):
    return head(session, len(body), path) + body


def open_session(gateway):
    return gateway.open(sampling=SamplingParams(1.0, 20), seed=0)


BODIES = {
    "no JSON": b"{",
    "empty": b"",
    "invalid UTF-8": b'{"model":"x","messages":[{"role":"user","content":"\xff"}]}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a number": b'{"messages": 3, "input": 3, "prompt": 3.5}',
    "a role that is a list": b'{"messages":[{"role":[],"content":"a"}],"input":[{"role":[]}]}',
    "half a surrogate pair": b'{"model":"x","messages":[{"role":"user","content":"\\ud800"}],"input":"\\ud800","prompt":"\\ud800"}',
    "null messages": b'{"messages":[null],"input":[null],"prompt":[null]}',
    "a negative n": b'{"messages":[{"role":"user","content":"a"}],"prompt":"a","n":-1,"max_tokens":-5,"input":"a"}',
    "huge numbers": b'{"messages":[{"role":"user","content":"a"}],"prompt":[99999999999999999999],"max_tokens":1e400,"input":"a"}',
    "ids that are none": b'{"messages":[],"prompt":[-1, 70000],"input":[]}',
    "arguments that are no JSON": json.dumps(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                {"role": "tool", "content": "x"},
            ]
        }
    ).encode(),
    "tools without a name": b'{"messages":[{"role":"user","content":"a"}],"tools":[{}],"input":"a"}',
    "unknown roles": b'{"messages":[{"role":"robot","content":"a"}],"input":[{"role":"robot","content":"a"}]}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BODIES)
async def test_a_malformed_body_is_the_clients_fault(gateway, path, name):
    session = open_session(gateway)
    status, answer = await raw(gateway, post(session, BODIES[name], path))
    assert status.split()[1][0] in "24", (name, answer)
    await gateway.close_session(session)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PATHS), json_values, st.sampled_from(["messages", "input", "prompt", "tools", "tool_choice", "stop", "n"]))
def test_any_value_in_a_field_is_answered(gateway, path, value, field):
    session = open_session(gateway)
    given_body = {"messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a", "max_tokens": 3, field: value}
    status, answer = asyncio.run(raw(gateway, post(session, json.dumps(given_body).encode(), path)))
    assert status.split()[1][0] in "24", answer
    asyncio.run(gateway.close_session(session))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\x01\x02" * 50 + b"\r\n\r\n", "400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000, "431"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", "400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000000\r\n\r\n", "413"),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", "401"),
        (b"GET /e//v1/models HTTP/1.1\r\nhost: x\r\n\r\n", "401"),
        (b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", "401"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "200"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n", "401"),
    ],
)
async def test_malformed_requests_have_a_status_and_end_the_connection(gateway, data, status):
    line, _ = await raw(gateway, data)
    assert line.split()[1] == status
    async with httpx2.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{gateway.url}/health")).status_code == 200


async def test_slow_headers_and_half_bodies_have_a_deadline(gateway, monkeypatch):
    monkeypatch.setattr(http, "HEADER_S", 0.2)
    monkeypatch.setattr(http, "BODY_S", 0.2)
    session = open_session(gateway)
    for data in (b"POST /v1/chat/completions HT", head(session, 100) + b"{"):
        line, answer = await raw(gateway, data)
        assert line.split()[1] == "408", answer
    monkeypatch.setattr(http, "IDLE_S", 0.2)
    assert await raw(gateway, b"") == ("", b"")


async def test_a_body_that_grows_beyond_the_limit_is_refused(gateway, monkeypatch):
    monkeypatch.setattr(http, "BODY_BYTES", 1000)
    session = open_session(gateway)
    chunk = b"400\r\n" + b"a" * 1024 + b"\r\n"
    start = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {session.api_key}\r\ntransfer-encoding: chunked\r\n\r\n"
    line, _ = await raw(gateway, start.encode() + chunk * 3)
    assert line.split()[1] == "413"


async def test_too_many_connections_are_closed(gateway, monkeypatch):
    monkeypatch.setattr(http, "CONNECTIONS", 2)
    held = [await asyncio.open_connection("127.0.0.1", gateway._bound) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert await raw(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") == ("", b"")
    for _, writer in held:
        writer.close()
    await asyncio.sleep(0.1)
    assert (await raw(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"))[0].split()[1] == "200"


async def test_requests_on_one_connection_are_answered_in_order(gateway):
    session = open_session(gateway)
    body = b'{"model":"x","messages":[{"role":"user","content":"a"}]}'
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway._bound)
    writer.write(post(session, body) * 3)
    answers = b""
    while answers.count(b"HTTP/1.1 200") < 3:
        answers += await asyncio.wait_for(reader.read(2**16), 5)
    writer.close()
    assert len(session.calls) == 3


async def test_a_socket_file_is_of_one_session(gateway, tmp_path):
    paths = [tmp_path / "one.sock", tmp_path / "two.sock"]
    sessions = [gateway.open(sampling=SamplingParams(1.0, 20), seed=0, socket=path) for path in paths]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    body = b'{"model":"x","messages":[{"role":"user","content":"a"}]}'
    reader, writer = await asyncio.open_unix_connection(str(paths[0]))
    other = sessions[1].api_key.encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: "
        + other
        + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )
    assert b" 200 " in (await asyncio.wait_for(reader.read(2**16), 5)).partition(b"\r\n")[0]
    writer.close()
    assert [len(session.calls) for session in sessions] == [1, 0]
    for session in sessions:
        await gateway.close_session(session)
    with pytest.raises(OSError, match=r"refused|No such file"):
        await asyncio.open_unix_connection(str(paths[0]))
