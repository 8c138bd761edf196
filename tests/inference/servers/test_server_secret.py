"""Who may change what a server serves: those who know its secret, and no web page."""

import asyncio
import json
import os
import stat

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.inference.servers.server_secret import HEADER, remove_secret, resolve_secret, secret_file, secret_headers, store_secret
from ludic.inference.vllm.in_server import secret
from ludic.inference.vllm.in_server.secret_middleware import OPEN_FOLDERS, OPEN_PATHS, SecretMiddleware

SECRET = "s3cret-of-this-run-and-no-other"
JSON = {"content-type": "application/json", "content-length": "2"}
CHANGING = [
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/sleep",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/server_info",
]
"""Of vLLM 0.32, in development mode and out of it."""


@pytest.fixture
def server(monkeypatch):
    """Asks a server behind the middleware; its status, what it said, and whether the server
    itself was reached."""
    monkeypatch.setenv("LUDIC_SERVER_SECRET", SECRET)
    reached, sent = [], []

    async def app(scope, _receive, send):
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    guarded = SecretMiddleware(app)

    def ask(path, headers=None, *, method="POST", kind="http", root_path=""):
        reached.clear()
        sent.clear()

        async def receive():
            raise AssertionError("the body of a request that is refused was read")

        async def send(message):
            sent.append(message)

        lines = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": kind, "path": path, "root_path": root_path, "headers": lines}
        asyncio.run(guarded({**scope, "method": method} if kind == "http" else scope, receive, send))
        if kind == "websocket" and not reached:
            return sent[0]["code"], sent[0]["reason"], False
        said = b"".join(message.get("body", b"") for message in sent)
        assert (sent[0]["status"] == 200) == bool(reached)
        return sent[0]["status"], json.loads(said), bool(reached)

    return ask


@pytest.mark.parametrize("path", CHANGING)
def test_what_changes_what_is_served_needs_the_secret(server, path):
    for headers in ({}, {HEADER: "guessed"}, {HEADER: SECRET[:-1]}, {HEADER: ""}, {"authorization": f"Bearer {SECRET}"}):
        status, said, reached = server(path, {**JSON, **headers})
        assert (status, reached) == (401, False)
        assert f"{path} needs the server's secret in the header X-Ludic-Secret" in said["error"]["message"]
    assert server(path, {**JSON, HEADER: SECRET})[2]
    assert server(path, {HEADER.lower(): SECRET})[2]  # without a body


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\x85", "/", "//"])
def test_no_other_spelling_of_a_path_is_let_through(server, path, end):
    """`/pause%0A` comes as "/pause" and a line feed, and the regular expression of the route
    `/pause` matches it."""
    for method in ("POST", "GET", "OPTIONS"):
        assert server(path + end, JSON, method=method)[0] == 401
    assert server(path + end, kind="websocket")[0] == 1008


@given(st.text(max_size=30))
def test_a_path_that_is_not_known_to_be_harmless_needs_the_secret(name):
    from ludic.inference.vllm.in_server.secret_middleware import find_refusal

    path = f"/{name}"
    if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS):
        assert find_refusal(SECRET, "POST", path, {})[0] == 401
        assert find_refusal(SECRET, "GET", path, {})[0] == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/classify"])
def test_sampling_and_scoring_need_none(server, path):
    assert server(path, JSON)[2]


def test_a_body_is_json_or_refused(server):
    """What a web page may send anywhere without asking is text, or a form."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        for path, more in (("/v1/completions", {}), ("/pause", {HEADER: SECRET})):
            status, said, reached = server(path, {"content-type": kind, "content-length": "2", **more})
            assert (status, reached) == (415, False), kind
            assert "must be application/json" in said["error"]["message"]
            assert server(path, {"content-type": kind, "transfer-encoding": "chunked", **more})[0] == 415
    assert server("/v1/completions", {**JSON, "content-type": "Application/JSON; charset=utf-8"})[2]
    assert server("/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=x", "content-length": "9"})[2]


@pytest.mark.parametrize(
    "origin", ["https://example.com", "http://10.0.0.1:8000", "null", "http://localhost.example.com", "http://[::1", ""]
)
def test_no_page_of_another_machine_is_answered_whatever_it_asks(server, origin):
    for path, more in (("/v1/completions", JSON), ("/health", {}), ("/pause", {HEADER: SECRET})):
        assert server(path, {"origin": origin, **more})[0] == 403
    assert server("/v1/completions", {"origin": origin}, method="OPTIONS")[0] == 403  # what a browser asks before it sends JSON
    assert server("/v1/realtime", {"origin": origin}, kind="websocket")[0] == 1008


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:80"])
def test_a_page_of_this_machine_may_sample_and_needs_the_secret_for_more(server, origin):
    assert server("/v1/completions", {"origin": origin, **JSON})[2]
    assert server("/pause", {"origin": origin})[0] == 401


def test_paths_are_read_as_the_servers_routes_read_them(server):
    assert server("/v1/pause", root_path="/v1")[0] == 401
    assert server("/api/health", root_path="/api")[2]
    assert server("/api/pause", root_path="/api")[0] == 401


def test_a_server_without_a_secret_does_not_come_up(monkeypatch):
    monkeypatch.delenv("LUDIC_SERVER_SECRET", raising=False)
    with pytest.raises(RuntimeError, match="LUDIC_SERVER_SECRET is not set"):
        SecretMiddleware(None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUDIC_SERVER_SECRETS", str(tmp_path / "secrets"))
    return tmp_path / "secrets"


@pytest.mark.parametrize("umask", [0, 0o077])
def test_the_file_is_for_its_user_alone(folder, umask):
    before = os.umask(umask)
    try:
        path = store_secret(8000, SECRET)
    finally:
        os.umask(before)
    assert path.parent == folder
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [found.name for found in folder.iterdir()] == [path.name]


def test_clients_of_this_user_find_it_by_the_port_of_this_machine(folder):
    store_secret(8000, SECRET)
    for url in ("http://127.0.0.1:8000", "http://localhost:8000/v1", "http://[::1]:8000/pause"):
        assert secret_headers(url, {}) == {HEADER: SECRET}
    for url in ("http://127.0.0.1:8001", "http://10.0.0.1:8000", "https://example.com:8000", "http://127.0.0.1", "none"):
        assert secret_headers(url, {}) == {}
    remove_secret(8000, "of a later server")
    assert secret_headers("http://127.0.0.1:8000", {})
    remove_secret(8000, SECRET)
    remove_secret(8000, SECRET)
    assert secret_headers("http://127.0.0.1:8000", {}) == {}


def test_what_the_environment_says_is_sent_to_any_server(folder):
    store_secret(8000, SECRET)
    given = {"LUDIC_SERVER_SECRET": "one-of-my-own-for-all"}
    for url in ("http://127.0.0.1:8000", "http://10.0.0.1:8000"):
        assert secret_headers(url, given) == {HEADER: "one-of-my-own-for-all"}


def test_a_file_that_others_may_have_read_or_written_is_none(folder):
    store_secret(8000, SECRET).chmod(0o640)
    assert secret_headers("http://127.0.0.1:8000", {}) == {}


def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_another(folder):
    folder.write_text("a file")
    with pytest.raises(ConfigError, match="LUDIC_SERVER_SECRETS"):
        store_secret(8000, SECRET)


def test_homes_that_machines_share_hold_a_file_for_each(folder, monkeypatch):
    first = secret_file(8000)
    monkeypatch.setattr(secret.socket, "gethostname", lambda: "another")
    assert secret_file(8000) != first


def test_a_secret_is_random_or_long_enough():
    assert resolve_secret({}) != resolve_secret({})
    assert len(resolve_secret({})) == 43
    assert resolve_secret({"LUDIC_SERVER_SECRET": SECRET}) == SECRET
    for bad in ("short", "with a space in between", "line\nbreak-line-break", "ünïcode-ünïcode-ünïcode"):
        with pytest.raises(ConfigError, match="at least 16 printable ASCII characters"):
            resolve_secret({"LUDIC_SERVER_SECRET": bad})
