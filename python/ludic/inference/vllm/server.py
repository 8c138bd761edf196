"""`python -m ludic.inference.vllm.server FLAGS...`: vLLM's own server with the settings that training needs.

To be run by an interpreter that has vLLM and this package; `ludic serve` does the same from any other. All flags of vLLM's are taken. What
is not given is: this machine alone as host, log-probabilities of the distribution drawn from, vLLM's sampling defaults and not the model's,
the token endpoint, the endpoints for weights with the gloo backend, and thoughts closed after `max_think` tokens. `--batch-invariant`
makes samples independent of the batch that they are in, where vLLM can.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ludic.inference.vllm.flags import DEFAULT_FLAGS, THINK_PROCESSOR, missing_flags, weight_flags

DEFAULTS = [("--host", "127.0.0.1"), *DEFAULT_FLAGS, ("--logits-processors", THINK_PROCESSOR), *weight_flags("gloo")]
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}


def server_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command that serves, and its environment: what is set there already stays."""
    given = [argument for argument in arguments if argument != "--batch-invariant"]
    variables = {**ENVIRONMENT, **environment}
    if len(given) < len(arguments):
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *missing_flags(DEFAULTS, given), *given], variables


def main() -> None:
    """Become the server."""
    command, variables = server_command(sys.argv[1:], os.environ)
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main()
