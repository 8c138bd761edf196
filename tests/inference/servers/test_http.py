"""HTTP requests to servers: deadlines always hold, bodies are bounded, and redirects to other
origins are not followed."""

import asyncio
import os
import subprocess
import sys
import threading
import tracemalloc

import pytest
from hostile_server import HostileServer, bomb, drip_body, drip_head, endless, plain, redirect, silent, timed_call

from ludic.errors import (
    ConfigError,
    ConfigTypeError,
    EngineDeadError,
    InferenceError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from ludic.inference.servers.answers import WeightInfo
from ludic.inference.servers.errors import BusyError, is_retryable
from ludic.inference.servers.http import BlockingHttp, Http, convert_answer

DEADLINE_S = 0.4
FOREVER_S = 60.0
"""Without the deadline, a request of these servers would never end. A busy machine takes longer
than the deadline."""


def blocking(url, **settings):
    return BlockingHttp(settings.pop("headers", None)).request(
        settings.pop("method", "GET"), url, **{"timeout_s": 10.0, **settings}
    )


def awaiting(url, **settings):
    async def once():
        async with Http(settings.pop("headers", None)) as http:
            return await http.request(settings.pop("method", "GET"), url, **{"timeout_s": 10.0, **settings})

    return asyncio.run(once())


both = pytest.mark.parametrize("ask", [blocking, awaiting])


@both
@pytest.mark.parametrize("hostile", [silent, drip_head, drip_body])
def test_silent_and_dripping_servers_are_abandoned_at_the_deadline(ask, hostile):
    with HostileServer(hostile) as server:
        outcome, took_s = timed_call(ask, f"{server.url}/x", timeout_s=DEADLINE_S)
    assert isinstance(outcome, ServerTimeoutError)
    assert f"/x gave no answer within {DEADLINE_S:g} s" in str(outcome)
    assert DEADLINE_S <= took_s < FOREVER_S


@both
def test_a_server_that_does_not_read_a_long_request_is_abandoned_at_the_deadline(ask):
    with HostileServer(plain()) as server:
        server._request = lambda connection: server.closing.wait() and b""
        outcome, took_s = timed_call(ask, server.url, method="POST", json={"prompt": "a" * 2**25}, timeout_s=DEADLINE_S)
    assert isinstance(outcome, ServerTimeoutError)
    assert took_s < FOREVER_S


@both
def test_an_endless_body_is_cut_off_at_the_limit(ask):
    with HostileServer(endless) as server:
        tracemalloc.start()
        outcome, _ = timed_call(ask, server.url, max_bytes=2**20)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert isinstance(outcome, InferenceError)
    assert "more than 1048576 bytes" in str(outcome)
    assert server.sent < 2**25  # the contents of the socket buffers and no more
    assert peak < 2**24


@both
def test_a_body_at_the_limit_is_accepted_and_one_byte_more_is_not(ask):
    with HostileServer(plain(b"[" + b" " * 998 + b"]")) as server:
        assert ask(server.url, max_bytes=1000).json() == []
        with pytest.raises(InferenceError, match="more than 999 bytes"):
            ask(server.url, max_bytes=999)


@both
def test_compressed_bodies_are_neither_requested_nor_accepted(ask):
    with HostileServer(bomb) as server:
        with pytest.raises(InferenceError, match="encoding 'gzip'"):
            ask(server.url, headers={"Accept-Encoding": "gzip"})
        assert b"accept-encoding: identity" in server.requests[0][1].lower()
        assert server.requests[0][1].lower().count(b"accept-encoding") == 1


@both
@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_redirects_to_another_origin_are_not_followed(ask, status):
    with HostileServer(plain()) as other, HostileServer(redirect(f"{other.url}/steal", status)) as server:
        with pytest.raises(ServerError, match=r"redirects to .*/steal; redirects are not followed"):
            ask(
                server.url, method="POST", json={"prompt": "secret"}, headers={"Authorization": "Bearer secret"}
            ).raise_for_status()
        assert server.paths() == ["/"]
        assert other.requests == []


def test_headers_are_sent_once_with_every_request():
    async def twice(url):
        async with Http({"X-Secret": "s", "x-team": "rl"}) as http:
            await http.request("GET", url, timeout_s=5.0)
            await http.request("POST", url, json={}, headers={"x-secret": "other"}, timeout_s=5.0)

    with HostileServer(plain()) as server:
        asyncio.run(twice(server.url))
        BlockingHttp({"X-Secret": "s"}).request("GET", server.url, timeout_s=5.0)
    given = [request.lower() for _, request in server.requests]
    assert [request.count(b"x-secret") for request in given] == [1, 1, 1]
    assert [b"x-secret: s\r\n" in request for request in given] == [True, False, True]
    assert b"x-secret: other\r\n" in given[1]
    assert b"x-team: rl\r\n" in given[1]


@both
@pytest.mark.parametrize("scheme", ["http", "all"])
def test_requests_to_this_machine_use_no_proxy(ask, scheme, monkeypatch):
    with HostileServer(plain()) as proxy, HostileServer(plain(b"[7]")) as server:
        monkeypatch.setenv(f"{scheme}_proxy", proxy.url)
        assert ask(server.url).json() == [7]
        assert proxy.requests == []


@both
@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:70000/", "http://127.0.0.1:-5/", "http://127.0.0.1:abc/"])
def test_an_invalid_address_is_refused(ask, url):
    with pytest.raises(ConfigError, match="is not a URL"):
        ask(url)


@pytest.mark.parametrize("header", [{"X-Name": "Zo\u00eb's secret"}, {"X-N\u00e4me": "1"}])
def test_the_error_of_a_non_ascii_header_names_it_but_not_its_value(header):
    with pytest.raises(ConfigError, match="must be ASCII") as caught:
        BlockingHttp(header).request("GET", "http://127.0.0.1:1/", timeout_s=1.0)
    assert "secret" not in str(caught.value)


@both
def test_an_unreachable_server_is_a_retryable_error(ask):
    with HostileServer(plain()) as server:
        url = server.url
    with pytest.raises(ServerUnreachableError, match="cannot be reached") as caught:
        ask(url)
    assert is_retryable(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "which is not JSON"),
        (b"<html>It works!</html>", r"not JSON .*the right address"),
        (b'{"ids": [1, NaN]}', "numbers that are not finite"),
        (b'{"ids": [10.5]}', r"Expected `int`, .*`float` .*`\$.*\[0\]`"),
        (b'{"ids": [true]}', "got `bool`"),
        (b'{"ids": ["7"]}', "got `str`"),
        (b'{"ids": null}', "got `null`"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"ids": [1' + b"\xff" * 10, "which is not JSON"),
        (b"[" * 10**6, "which is not JSON|which does not have the expected form|not the expected form"),
    ],
)
def test_a_response_of_a_wrong_type_is_an_error_that_shows_it(body, said):
    with HostileServer(plain(body)) as server:
        answer = blocking(server.url)
    with pytest.raises(InferenceError, match=said) as caught:
        answer.read(dict[str, list[int]])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("400 Bad Request", "no", ServerError),
        ("429 Too Many Requests", "later", BusyError),
        ("503 Service Unavailable", "later", BusyError),
        ("500 Internal Server Error", "EngineCore encountered an issue", EngineDeadError),
    ],
)
def test_every_error_status_has_its_exception(status, body, kind):
    with HostileServer(plain(body, status, retry_after=7)) as server, pytest.raises(kind) as caught:
        blocking(server.url).raise_for_status()
    assert type(caught.value) is kind
    assert body in str(caught.value)
    assert getattr(caught.value, "retry_after_s", 7.0) == 7.0


def test_a_body_that_is_not_json_is_not_sent():
    with HostileServer(plain()) as server, pytest.raises(ConfigTypeError, match="cannot be written as JSON"):
        blocking(server.url, method="POST", json={"x": object()})
    assert server.requests == []


def test_blocking_calls_work_in_a_running_loop_and_from_many_threads():
    async def inside(url):
        return blocking(url).status

    with HostileServer(plain()) as server:
        assert asyncio.run(inside(server.url)) == 200
        found = []
        threads = [threading.Thread(target=lambda: found.append(blocking(server.url).status)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [200] * 8


CHILD = """
import os, sys
from ludic.inference.servers.http import BlockingHttp
def ask(): return BlockingHttp().request("GET", sys.argv[1], timeout_s=10).status
assert ask() == 200
pid = os.fork()
if pid == 0:
    os._exit(0 if ask() == 200 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_uses_its_own_thread_and_exits_cleanly():
    with HostileServer(plain()) as server:
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", CHILD, server.url],
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_decoded_json_of_another_type_is_an_error_that_names_the_server():
    assert convert_answer({"weight_version": 3, "more": 1}, WeightInfo, "http://a").weight_version == 3
    with pytest.raises(InferenceError, match=r"http://a answered .*weight.*expected form: .*weight_version"):
        convert_answer({"weights": 3}, WeightInfo, "http://a")
