"""`python -m ludic.inference.vllm.in_server.server FLAGS...`: vLLM's own server with the settings
that training needs.

Run it with an interpreter that has vLLM and this package; `ludic serve` does the same from any
other. It takes all flags of vLLM. Its defaults: it listens on this machine alone, gives
log-probabilities of the distribution drawn from, takes sampling defaults from vLLM and not from the
model, and offers the token endpoint and, to those who send the server's secret, the endpoints for
weights with the gloo backend. It closes thoughts after `max_think` tokens. `--batch-invariant`
makes samples independent of the batch that they are in, where vLLM can.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Mapping, Sequence

from ludic.inference.vllm.in_server.flags import (
    DEFAULT_FLAGS,
    SECRET_MIDDLEWARE,
    THINK_PROCESSOR,
    default_variables,
    missing_flags,
    weight_flags,
)
from ludic.inference.vllm.in_server.secret import VARIABLE, SecretError, keep_secret, secret_of

DEFAULTS = [("--host", "127.0.0.1"), *DEFAULT_FLAGS, ("--logits-processors", THINK_PROCESSOR), *weight_flags("gloo")]
PORT = 8000
"""vLLM's own."""
PYTHON_VARIABLE = "LUDIC_VLLM_PYTHON"


def server_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command that serves, and its environment. Variables that are set already stay."""
    explicit = [argument for argument in arguments if argument != "--batch-invariant"]
    flags = [*missing_flags(DEFAULTS, explicit), "--middleware", SECRET_MIDDLEWARE]
    variables = {**default_variables([*flags, *explicit]), **environment, VARIABLE: secret_of(environment)}
    if len(explicit) < len(arguments):
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *explicit], variables


def port_of(arguments: Sequence[str]) -> int:
    """The last port among the arguments, else vLLM's own."""
    ports = [text.partition("=")[2] for text in arguments if text.startswith("--port=")]
    ports += [value for flag, value in itertools.pairwise(arguments) if flag == "--port"]
    return int(ports[-1]) if ports else PORT


def without_vllm(python: str) -> str:
    """The error message for an interpreter that has no vLLM."""
    return (
        f"{python} has no vLLM; build an environment with it by `make vllm` in a clone, or by pip install 'vllm>=0.32' in a virtual "
        f"environment of its own, and name its interpreter by {PYTHON_VARIABLE}=PATH, --python PATH or inference.python=PATH"
    )


def main() -> None:
    """Become the server. Without vLLM it says how to get it."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"error: {without_vllm(sys.executable)}")
    try:
        command, variables = server_command(sys.argv[1:], os.environ)
        if not os.environ.get(VARIABLE):
            keep_secret(port_of(sys.argv[1:]), variables[VARIABLE])
    except SecretError as error:
        sys.exit(f"error: {error}")
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main()
