"""Flags of vLLM's that training needs, and what of ours a server loads. It runs in the server's environment too: standard library alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

WeightBackend = Literal["gloo", "ludic_nccl", "disk"]
TAG_MIDDLEWARE = "ludic.inference.servers.client_tag_middleware.ClientTagMiddleware"
THINK_PROCESSOR = "ludic.inference.vllm.think:GlobalThinkProcessor"
DEFAULT_FLAGS: list[tuple[str, str | None]] = [
    ("--generation-config", "vllm"),
    ("--logprobs-mode", "processed_logprobs"),
    ("--enable-scale-out", None),
]
"""Flag and value; a flag without a value stands alone."""
WORKER_EXTENSION = "ludic.inference.vllm.worker.WeightWorker"


def weight_flags(backend: WeightBackend | None) -> list[tuple[str, str | None]]:
    """What makes a server take weights while it serves."""
    if backend is None:
        return []
    return [("--worker-extension-cls", WORKER_EXTENSION), ("--weight-transfer-config", json.dumps({"backend": backend}))]


def missing_flags(defaults: Sequence[tuple[str, str | None]], given: Sequence[str]) -> list[str]:
    """The defaults that are not given, as arguments; of a flag that is among them twice, the first."""
    arguments: list[str] = []
    taken = {argument.split("=")[0] for argument in given}
    for flag, value in defaults:
        if flag not in taken:
            taken.add(flag)
            arguments += [flag] if value is None else [flag, value]
    return arguments
