"""The endpoint that takes token ids: `/inference/v1/generate` on a vLLM server started with
`--enable-scale-out`, else `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.errors import ServerError
from ludic.inference.servers.errors import is_missing_endpoint
from ludic.inference.servers.http import HttpResponse
from ludic.inference.servers.pool import Server

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


class TokenEndpoints:
    """Finds out with the first request which endpoint each server has."""

    def __init__(self) -> None:
        self.without_generate: set[str] = set()
        """URLs of servers that have only `/v1/completions`, which does not report the weight
        version."""

    async def post(
        self, server: Server, generate: dict[str, Any], completions: dict[str, Any], headers: Mapping[str, str] | None
    ) -> HttpResponse:
        """Post the body that fits the server's endpoint: `generate` or `completions`, which are the
        same request. Raises InferenceError."""
        if server.url not in self.without_generate:
            try:
                return await server.post(GENERATE, generate, headers=headers)
            except ServerError as error:
                if not is_missing_endpoint(error):
                    raise
                self.without_generate.add(server.url)
        return await server.post(COMPLETIONS, completions, headers=headers)
