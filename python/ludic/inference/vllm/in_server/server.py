"""`python -m ludic.inference.vllm.in_server.server FLAGS...`: vLLM's own server with the settings
that training needs.

To be run by an interpreter that has vLLM and this package; `ludic serve` does the same from any
other. All flags of vLLM's are taken. What is not given is: this machine alone as host,
log-probabilities of the distribution drawn from, vLLM's sampling defaults and not the model's, the
token endpoint, the endpoints for weights with the gloo backend, for those who send the server's
secret, and thoughts closed after `max_think` tokens. `--batch-invariant` makes samples independent
of the batch that they are in, where vLLM can.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence

from ludic.errors import ConfigError
from ludic.inference.servers.server_secret import VARIABLE, keep_secret, secret_of
from ludic.inference.vllm.environment import check_has_vllm
from ludic.inference.vllm.in_server.flags import (
    DEFAULT_FLAGS,
    SECRET_MIDDLEWARE,
    THINK_PROCESSOR,
    changing_variables,
    missing_flags,
    weight_flags,
)

DEFAULTS = [("--host", "127.0.0.1"), *DEFAULT_FLAGS, ("--logits-processors", THINK_PROCESSOR), *weight_flags("gloo")]
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}
PORT = 8000
"""vLLM's own."""


def server_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command that serves, and its environment: what is set there already stays."""
    given = [argument for argument in arguments if argument != "--batch-invariant"]
    flags = [*missing_flags(DEFAULTS, given), "--middleware", SECRET_MIDDLEWARE]
    changing = changing_variables([*flags, *given])
    variables = {**ENVIRONMENT, **changing, **environment, VARIABLE: secret_of(environment)}
    if len(given) < len(arguments):
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *given], variables


def port_of(arguments: Sequence[str]) -> int:
    """The last that is given, else vLLM's own."""
    ports = [text.partition("=")[2] for text in arguments if text.startswith("--port=")]
    ports += [value for flag, value in itertools.pairwise(arguments) if flag == "--port"]
    return int(ports[-1]) if ports else PORT


def main() -> None:
    """Become the server. Without vLLM it says how to get it."""
    try:
        check_has_vllm(sys.executable)
        command, variables = server_command(sys.argv[1:], os.environ)
        if not os.environ.get(VARIABLE):
            keep_secret(port_of(sys.argv[1:]), variables[VARIABLE])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main()
