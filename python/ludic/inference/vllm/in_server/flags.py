"""The flags and environment variables of vLLM that training needs, and what of ours a server
loads."""

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
"""Longer than any client's, so that no request meets a connection that is being closed."""


def weight_flags(backend: WeightBackend | None) -> list[tuple[str, str | None]]:
    """The flags with which a server takes weights while it serves."""
    if backend is None:
        return []
    return [("--worker-extension-cls", WORKER_EXTENSION), ("--weight-transfer-config", json.dumps({"backend": backend}))]


def default_variables(arguments: Sequence[str], *, cpu: bool = False) -> dict[str, str]:
    """The environment variables of a server with these arguments, for those that its user does
    not set. `cpu` is for vLLM's build for CPUs."""
    return {
        "VLLM_USE_V1": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        **({"TORCHDYNAMO_DISABLE": "1"} if cpu else {}),
        **_changing_variables(arguments),
    }


def _changing_variables(arguments: Sequence[str]) -> dict[str, str]:
    """The variables without which what a server serves cannot be changed: vLLM has the endpoints
    for that in development mode alone. Empty for a server that takes neither weights nor
    adapters."""
    flags = {argument.split("=")[0] for argument in arguments}
    adapters = "--enable-lora" in flags
    changing = adapters or not flags.isdisjoint(["--worker-extension-cls", "--weight-transfer-config"])
    variables = {"VLLM_SERVER_DEV_MODE": "1"} if changing else {}
    return variables | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {})


def missing_flags(defaults: Sequence[tuple[str, str | None]], explicit: Sequence[str]) -> list[str]:
    """The defaults that are not among the explicit arguments, as arguments. Of a flag that is
    among the defaults twice, the first counts."""
    arguments: list[str] = []
    present = {argument.split("=")[0] for argument in explicit}
    for flag, value in defaults:
        if flag not in present:
            present.add(flag)
            arguments += [flag] if value is None else [flag, value]
    return arguments
