"""Where a vLLM server takes token ids: `/inference/v1/generate` if it was started with
`--enable-scale-out`, else `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.errors import ServerError
from ludic.inference.servers.errors import has_no_path
from ludic.inference.servers.http import Answer
from ludic.inference.servers.pool import Server

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


class TokenEndpoints:
    """Finds out at the first request which it is."""

    def __init__(self) -> None:
        self.without_generate: set[str] = set()
        """Addresses of those that take them on completions alone, which do not say of which
        weights an answer is."""

    async def post(
        self, server: Server, generate: dict[str, Any], completions: dict[str, Any], headers: Mapping[str, str] | None
    ) -> Answer:
        """The answer to one of two bodies that ask for the same. Raises InferenceError."""
        if server.url not in self.without_generate:
            try:
                return await server.post(GENERATE, generate, headers=headers)
            except ServerError as error:
                if not has_no_path(error):
                    raise
                self.without_generate.add(server.url)
        return await server.post(COMPLETIONS, completions, headers=headers)
