"""Flags of vLLM's that training needs, and what of ours a server loads. It runs in the server's
environment too: standard library alone."""

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


def weight_flags(backend: WeightBackend | None) -> list[tuple[str, str | None]]:
    """What makes a server take weights while it serves."""
    if backend is None:
        return []
    return [("--worker-extension-cls", WORKER_EXTENSION), ("--weight-transfer-config", json.dumps({"backend": backend}))]


def changing_variables(arguments: Sequence[str]) -> dict[str, str]:
    """What a server with these arguments needs in its environment so that what it serves can be
    changed: the endpoints for that exist nowhere but in development mode. Nothing where it takes
    neither weights nor adapters."""
    flags = {argument.split("=")[0] for argument in arguments}
    adapters = "--enable-lora" in flags
    changing = adapters or not flags.isdisjoint(["--worker-extension-cls", "--weight-transfer-config"])
    variables = {"VLLM_SERVER_DEV_MODE": "1"} if changing else {}
    return variables | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {})


def missing_flags(defaults: Sequence[tuple[str, str | None]], given: Sequence[str]) -> list[str]:
    """The defaults that are not given, as arguments; of a flag that is among them twice, the
    first."""
    arguments: list[str] = []
    taken = {argument.split("=")[0] for argument in given}
    for flag, value in defaults:
        if flag not in taken:
            taken.add(flag)
            arguments += [flag] if value is None else [flag, value]
    return arguments
