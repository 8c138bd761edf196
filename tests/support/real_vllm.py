"""The one real vLLM server of a test run: a tiny model on the CPU, started when the first test asks for it.

`LUDIC_VLLM_PYTHON` names the interpreter that has vLLM (`make vllm` builds ./.venv-vllm/bin/python). Without it the tests that need the
server are skipped; with it, a server that does not come up is a failure. A test that changes the weights puts `vllm_server.folder`'s back.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

READY_S = 540.0
"""25 s on a quiet machine; minutes on a busy one."""
FLAGS = ["--max-model-len", "512", "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]


@dataclass(frozen=True)
class RealServer:
    """Where the server is and what it serves."""

    host: str
    port: int
    folder: Path
    """The model and its tokenizer in Hugging Face layout."""
    model: Any
    """The same model here, in float32."""
    tokenizer: Any
    log: Path
    name: str = "tiny"

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory):
    """A `RealServer` for the whole run."""
    if not os.environ.get("LUDIC_VLLM_PYTHON"):
        pytest.skip("LUDIC_VLLM_PYTHON names no interpreter with vLLM; `make vllm` builds one")
    from tiny_policy import save_tiny_policy, tiny_tokenizer

    from ludic.inference.vllm.launch import free_port, start_vllm_server, stop_vllm_server, wait_for_vllm_health

    folder = tmp_path_factory.mktemp("policy")
    model = save_tiny_policy(folder)
    log, port = tmp_path_factory.mktemp("vllm") / "server.log", free_port()
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    proc = start_vllm_server(
        str(folder),
        "127.0.0.1",
        port,
        served_model_name="tiny",
        client_tags=True,
        weights="gloo",
        think_limits=True,
        extra_args=FLAGS,
        env=env,
        log_path=log,
    )
    try:
        wait_for_vllm_health("127.0.0.1", port, proc, timeout_s=READY_S)
        yield RealServer("127.0.0.1", port, folder, model, tiny_tokenizer(), log)
    finally:
        stop_vllm_server(proc)
