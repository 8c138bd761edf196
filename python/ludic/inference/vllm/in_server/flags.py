"""The flags and environment variables of vLLM that training needs, and the paths of the classes
that a server loads from ludic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

WeightBackend = Literal["gloo", "ludic_nccl", "disk"]
TAG_MIDDLEWARE = "ludic.inference.vllm.in_server.client_tag_middleware.ClientTagMiddleware"
SECRET_MIDDLEWARE = "ludic.inference.vllm.in_server.secret_middleware.SecretMiddleware"
THINK_PROCESSOR = "ludic.inference.vllm.in_server.think_processor:GlobalThinkProcessor"
DEFAULT_FLAGS: list[tuple[str, str | None]] = [
    ("--generation-config", "vllm"),
    ("--logprobs-mode", "processed_logprobs"),
    ("--enable-scale-out", None),
]
"""Flag and value; a flag without a value stands alone."""
WORKER_EXTENSION = "ludic.inference.vllm.in_server.worker.WeightWorker"
KEEP_ALIVE_S = 60
"""Longer than any client's, so that no request is sent over a connection that is being closed."""


def weight_flags(backend: WeightBackend | None) -> list[tuple[str, str | None]]:
    """The flags of a server that takes new weights while it serves; none without a backend."""
    if backend is None:
        return []
    return [("--worker-extension-cls", WORKER_EXTENSION), ("--weight-transfer-config", json.dumps({"backend": backend}))]


def default_variables(arguments: Sequence[str], *, cpu: bool = False) -> dict[str, str]:
    """Default environment variables of a server with these arguments. `cpu` is for vLLM's CPU
    build."""
    variables = {
        "VLLM_USE_V1": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
    }
    if cpu:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    flags = {argument.split("=")[0] for argument in arguments}
    # vLLM has the endpoints that take new weights or adapters only in development mode.
    if not flags.isdisjoint(["--enable-lora", "--worker-extension-cls", "--weight-transfer-config"]):
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    if "--enable-lora" in flags:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return variables


def missing_flags(defaults: Sequence[tuple[str, str | None]], explicit: Sequence[str]) -> list[str]:
    """The defaults that are not among the explicit arguments, as arguments. If a flag has several
    defaults, the first counts."""
    arguments: list[str] = []
    present = {argument.split("=")[0] for argument in explicit}
    for flag, value in defaults:
        if flag not in present:
            present.add(flag)
            arguments += [flag] if value is None else [flag, value]
    return arguments
