"""Which paths of a real vLLM server started by ludic are accessible with and without the secret."""

import httpx2
import pytest

from ludic.inference.servers.server_secret import secret_headers
from ludic.inference.vllm.endpoints import VllmEndpoints
from ludic.inference.vllm.in_server.secret_middleware import OPEN_PATHS

pytestmark = pytest.mark.integration

SAMPLING = {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/models", "/tokenize", "/health", "/metrics"}
CHANGING = {
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/inference/v1/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/server_info",
}


def ask(server, path, *, method="post", **headers):
    sent = {"json": {}} if method == "post" else {}
    return httpx2.request(method, server.url + path, headers=headers, timeout=60, **sent).status_code


def test_without_the_secret_only_sampling_and_read_only_paths_are_allowed(vllm_server):
    described = httpx2.get(f"{vllm_server.url}/openapi.json", headers=secret_headers(vllm_server.url), timeout=60).json()
    paths = {path: sorted(methods) for path, methods in described["paths"].items()}
    assert set(paths) >= (SAMPLING - {"/metrics"}) | CHANGING
    refused = {path for path, methods in paths.items() if ask(vllm_server, path, method=methods[0]) == 401}
    assert refused >= CHANGING
    assert refused.isdisjoint(SAMPLING)
    open_paths = set(paths) - refused
    assert {path for path in open_paths if not path.startswith(("/v1/", "/v2/", "/inference/v1/", "/cohere/"))} <= OPEN_PATHS


def test_only_the_right_secret_can_change_the_server(vllm_server):
    server = VllmEndpoints(vllm_server.url)
    before = server.weight_version()
    for guess in ("", "guess", "Bearer local"):
        answer = httpx2.post(
            f"{vllm_server.url}/update_weight_version",
            json={"new_version": "theirs"},
            headers={"X-Ludic-Secret": guess},
            timeout=60,
        )
        assert answer.status_code == 401
        assert "needs the server's secret" in answer.json()["error"]["message"]
    assert server.weight_version() == before
    server.set_weight_version("ours")
    assert server.weight_version() == "ours"
    server.set_weight_version(before)


def test_a_web_page_has_no_access(vllm_server):
    page = {"Origin": "https://example.com"}
    body = {"model": vllm_server.name, "prompt": [5], "max_tokens": 1}
    completions = f"{vllm_server.url}/v1/completions"
    assert httpx2.post(completions, json=body, timeout=60).status_code == 200
    assert httpx2.post(completions, json=body, headers=page, timeout=60).status_code == 403
    asks_first = httpx2.options(completions, headers={**page, "Access-Control-Request-Method": "POST"}, timeout=60)
    assert (asks_first.status_code, asks_first.headers.get("access-control-allow-origin")) == (403, None)
    text = httpx2.post(completions, content=b'{"model": "tiny"}', headers={"Content-Type": "text/plain"}, timeout=60)
    assert text.status_code == 415
