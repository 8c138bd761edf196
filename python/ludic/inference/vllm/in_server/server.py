"""`python -m ludic.inference.vllm.in_server.server FLAGS...`: vLLM's own server with the settings
that training needs.

Run it with an interpreter that has vLLM and this package; `ludic serve` does the same from any
other interpreter. It takes all flags of vLLM, with these defaults:

- it listens only on this machine;
- log-probabilities come from the sampled distribution;
- sampling defaults are vLLM's, not the model's;
- the token endpoint is on;
- clients that send the server's secret can push weights, with the gloo backend;
- thinking ends after `max_think` tokens.

Here are also the flags and environment variables of vLLM that training needs, and the paths of the
classes that a server loads from ludic.

`--batch-invariant` makes samples independent of the other requests in the batch, where vLLM can.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from ludic.inference.vllm.in_server.secret import VARIABLE, SecretError, resolve_secret, store_secret

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


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM 0.32 can be started with."""


def lora_flags(rank: int) -> list[tuple[str, str | None]]:
    """The flags of a server that serves adapters up to `rank`, at most `LORA_RANKS[-1]`; none for
    rank 0. Adapters beyond 4 in one batch wait; 8 are in memory."""
    most = next((str(each) for each in LORA_RANKS if each >= rank), str(rank))
    flags = [("--enable-lora", None), ("--max-lora-rank", most), ("--max-loras", "4"), ("--max-cpu-loras", "8")]
    return flags if rank else []


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


DEFAULTS = [("--host", "127.0.0.1"), *DEFAULT_FLAGS, ("--logits-processors", THINK_PROCESSOR), *weight_flags("gloo")]
PORT = 8000
"""vLLM's default port."""
PYTHON_VARIABLE = "LUDIC_VLLM_PYTHON"


def server_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command of the server, and its environment. Variables that are set already do not
    change."""
    explicit = [argument for argument in arguments if argument != "--batch-invariant"]
    flags = [*missing_flags(DEFAULTS, explicit), "--middleware", SECRET_MIDDLEWARE]
    variables = {**default_variables([*flags, *explicit]), **environment, VARIABLE: resolve_secret(environment)}
    if len(explicit) < len(arguments):
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *explicit], variables


def read_port(arguments: Sequence[str]) -> int:
    """The last port among the arguments, else vLLM's default."""
    ports = [text.partition("=")[2] for text in arguments if text.startswith("--port=")]
    ports += [value for flag, value in itertools.pairwise(arguments) if flag == "--port"]
    return int(ports[-1]) if ports else PORT


def missing_vllm_message(python: str) -> str:
    """The error message for an interpreter that has no vLLM."""
    return (
        f"{python} has no vLLM; build an environment with `make vllm` in a clone, or with pip install 'vllm>=0.32' in its own virtual "
        f"environment, and name its interpreter with {PYTHON_VARIABLE}=PATH, --python PATH or inference.python=PATH"
    )


def main() -> None:
    """Replace this process by the server. Without vLLM, exit with a message on how to install
    it."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"error: {missing_vllm_message(sys.executable)}")
    try:
        command, variables = server_command(sys.argv[1:], os.environ)
        if not os.environ.get(VARIABLE):
            store_secret(read_port(sys.argv[1:]), variables[VARIABLE])
    except SecretError as error:
        sys.exit(f"error: {error}")
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main()
