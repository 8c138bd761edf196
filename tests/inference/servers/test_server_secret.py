"""Who may change what a server serves: clients that know its secret, and no web page."""

import asyncio
import json
import os
import re
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
    "/reset_encoder_cache",
    "/collective_rpc",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/sleep",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/server_info",
]
"""The paths of vLLM 0.32, with and without development mode."""


@pytest.fixture
def server(monkeypatch):
    """Sends a request through the middleware. Returns the status, the response body and whether the
    server itself was reached."""
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
def test_paths_that_change_the_server_need_the_secret(server, path):
    for headers in ({}, {HEADER: "guessed"}, {HEADER: SECRET[:-1]}, {HEADER: ""}, {"authorization": f"Bearer {SECRET}"}):
        status, said, reached = server(path, {**JSON, **headers})
        assert (status, reached) == (401, False)
        assert re.search(f"{path} needs .*header X-Ludic-Secret", said["error"]["message"])
    assert server(path, {**JSON, HEADER: SECRET})[2]
    assert server(path, {HEADER.lower(): SECRET})[2]  # a request without a body


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize("end", ["\n", "\r", "\x00", "\x85", "/", "//"])
def test_other_spellings_of_a_path_are_refused(server, path, end):
    """`/pause%0A` arrives as "/pause" plus a newline, which the regular expression of the route
    `/pause` matches."""
    for method in ("POST", "GET", "OPTIONS"):
        assert server(path + end, JSON, method=method)[0] == 401
    assert server(path + end, kind="websocket")[0] == 1008


@given(st.text(max_size=30))
def test_an_unknown_path_needs_the_secret(name):
    from ludic.inference.vllm.in_server.secret_middleware import find_refusal

    path = f"/{name}"
    if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS):
        assert find_refusal(SECRET, "POST", path, {})[0] == 401
        assert find_refusal(SECRET, "GET", path, {})[0] == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/classify"])
def test_sampling_and_scoring_need_no_secret(server, path):
    assert server(path, JSON)[2]


def test_a_body_that_is_not_json_is_refused(server):
    """Web pages can send text or forms to any server without a preflight request."""
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
def test_requests_from_remote_web_pages_are_refused(server, origin):
    for path, more in (("/v1/completions", JSON), ("/health", {}), ("/pause", {HEADER: SECRET})):
        assert server(path, {"origin": origin, **more})[0] == 403
    assert (
        server("/v1/completions", {"origin": origin}, method="OPTIONS")[0] == 403
    )  # the preflight request of a browser before JSON
    assert server("/v1/realtime", {"origin": origin}, kind="websocket")[0] == 1008


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:80"])
def test_a_local_web_page_can_sample_and_needs_the_secret_for_more(server, origin):
    assert server("/v1/completions", {"origin": origin, **JSON})[2]
    assert server("/pause", {"origin": origin})[0] == 401


def test_paths_are_parsed_as_by_the_servers_router(server):
    assert server("/v1/pause", root_path="/v1")[0] == 401
    assert server("/api/health", root_path="/api")[2]
    assert server("/api/pause", root_path="/api")[0] == 401


def test_a_server_without_a_secret_does_not_start(monkeypatch):
    monkeypatch.delenv("LUDIC_SERVER_SECRET", raising=False)
    with pytest.raises(RuntimeError, match="LUDIC_SERVER_SECRET is not set"):
        SecretMiddleware(None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUDIC_SERVER_SECRETS", str(tmp_path / "secrets"))
    return tmp_path / "secrets"


@pytest.mark.parametrize("umask", [0, 0o077])
def test_the_secret_file_is_readable_only_by_its_user(folder, umask):
    before = os.umask(umask)
    try:
        path = store_secret(8000, SECRET)
    finally:
        os.umask(before)
    assert path.parent == folder
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [found.name for found in folder.iterdir()] == [path.name]


def test_clients_of_this_user_find_the_secret_by_host_and_port(folder):
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


def test_a_secret_from_the_environment_is_sent_to_any_server(folder):
    store_secret(8000, SECRET)
    given = {"LUDIC_SERVER_SECRET": "one-of-my-own-for-all"}
    for url in ("http://127.0.0.1:8000", "http://10.0.0.1:8000"):
        assert secret_headers(url, given) == {HEADER: "one-of-my-own-for-all"}


def test_a_secret_file_accessible_to_others_is_ignored(folder):
    store_secret(8000, SECRET).chmod(0o640)
    assert secret_headers("http://127.0.0.1:8000", {}) == {}


def test_the_error_of_a_read_only_folder_names_the_variable_to_set(folder):
    folder.write_text("a file")
    with pytest.raises(ConfigError, match="LUDIC_SERVER_SECRETS"):
        store_secret(8000, SECRET)


def test_machines_that_share_a_home_have_separate_secret_files(folder, monkeypatch):
    first = secret_file(8000)
    monkeypatch.setattr(secret.socket, "gethostname", lambda: "another")
    assert secret_file(8000) != first


def test_a_secret_is_random_or_has_a_minimum_length():
    assert resolve_secret({}) != resolve_secret({})
    assert len(resolve_secret({})) == 43
    assert resolve_secret({"LUDIC_SERVER_SECRET": SECRET}) == SECRET
    for bad in ("short", "with a space in between", "line\nbreak-line-break", "ünïcode-ünïcode-ünïcode"):
        with pytest.raises(ConfigError, match="at least 16 printable ASCII characters"):
            resolve_secret({"LUDIC_SERVER_SECRET": bad})
