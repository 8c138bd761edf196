"""The real vLLM server of a test run: a tiny model on the CPU, started when the first test needs
it. `running_vllm` starts further servers.

`LUDIC_VLLM_PYTHON` names the interpreter that has vLLM (`make vllm` builds
./.venv-vllm/bin/python). Tests that need the server are skipped if it is unset; if it is set, a
server that does not start is a failure. A test that changes the weights uses
`vllm_server_to_change`.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

READY_S = 540.0
"""It starts in 25 s on an idle machine and in minutes on a busy one."""
FLAGS = ["--max-model-len", "512", "--block-size", "32", "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]


@dataclass(frozen=True)
class RealServer:
    """The address of a server and the model that it serves."""

    host: str
    port: int
    folder: Path
    """Folder of the model and tokenizer in Hugging Face format."""
    model: Any
    """The same model in this process, in float32."""
    tokenizer: Any
    log: Path
    proc: Any
    """The leader of the server's process group."""
    name: str = "tiny"

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"


def vllm_or_skip():
    """Path of the interpreter that has vLLM. Skips the test if there is none."""
    python = os.environ.get("LUDIC_VLLM_PYTHON")
    if not python:
        pytest.skip("LUDIC_VLLM_PYTHON names no interpreter with vLLM; `make vllm` builds one")
    return python


@contextmanager
def running_vllm(folder, model, log):
    """Start a server of the model in `folder` and yield it as a `RealServer`. Stops it on exit."""
    from tiny_policy import tiny_tokenizer

    from ludic.inference.servers.ports import free_port
    from ludic.inference.vllm.launch import start_vllm_server, stop_vllm_server, wait_for_vllm_health

    port = free_port()
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
        yield RealServer("127.0.0.1", port, folder, model, tiny_tokenizer(), log, proc)
    finally:
        stop_vllm_server(proc)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory):
    """A `RealServer` that all tests share."""
    vllm_or_skip()
    from tiny_policy import save_tiny_policy

    folder = tmp_path_factory.mktemp("policy")
    model = save_tiny_policy(folder)
    with running_vllm(folder, model, tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield server


@pytest.fixture
def vllm_server_to_change(vllm_server):
    """The shared server. Its original weights are restored after the test."""
    from ludic.distributed import create_vllm_publisher

    yield vllm_server
    create_vllm_publisher(vllm_server.url, allow_unchanged=True).publish(dict(vllm_server.model.named_parameters()), version=0)
