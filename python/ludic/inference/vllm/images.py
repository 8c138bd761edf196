"""Images in requests to vLLM servers: the bytes of an image are sent to a server once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ludic.errors import ServerError
from ludic.images.store import ImageStore
from ludic.inference.servers.http import HttpResponse
from ludic.inference.servers.server import Server
from ludic.inference.vllm.servers import GENERATE

MAX_KNOWN = 4096
"""Images of a server that are remembered."""
FORGOTTEN = "data is not provided"
"""What vLLM says of an image that it gets by digest, and has not."""


class SentImages:
    """Posts requests with images to the token endpoint.

    1. If the server does not have an image, the request goes ahead for one token, with the bytes;
       others for the same image wait for it. They then find its keys and values in the server's
       prefix cache.
    2. The request names its images by digest.
    3. A server that has forgotten an image, because it was restarted or got new weights, says so:
       it gets the image again. One that keeps none gets the bytes with the request.
    """

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._known: dict[str, OrderedDict[str, None]] = {}
        """URL -> the digests that it has, the last used at the end."""
        self._coming: dict[tuple[asyncio.AbstractEventLoop, str, str], asyncio.Future[None]] = {}

    async def post(
        self, server: Server, body: Mapping[str, Any], digests: Sequence[str], headers: Mapping[str, str] | None
    ) -> HttpResponse:
        """The answer to `body`, with the images of its prompt in order."""
        for sent in ((), (), digests):
            known = self._known.get(server.url)
            try:
                if not sent:
                    await self._send_new(server, body, digests, headers)
                    known = self._known.get(server.url)
                answer = await server.post(GENERATE, {**body, "content_parts": self._parts(digests, sent)}, headers=headers)
            except ServerError as error:
                if FORGOTTEN not in error.reason or sent:
                    raise
                if self._known.get(server.url) is known:  # or another request has noticed it
                    self._known.pop(server.url, None)
            else:
                break
        self._remember(server.url, digests)
        return answer

    async def _send_new(
        self, server: Server, body: Mapping[str, Any], digests: Sequence[str], headers: Mapping[str, str] | None
    ) -> None:
        loop, url = asyncio.get_running_loop(), server.url
        sampling = {**body["sampling_params"], "max_tokens": 1, "min_tokens": 0}
        while new := {(loop, url, digest) for digest in digests if digest not in self._known.get(url, ())}:
            if coming := [self._coming[each] for each in new & self._coming.keys()]:
                await asyncio.wait(coming)
                continue
            sent = loop.create_future()
            self._coming |= dict.fromkeys(new, sent)
            try:
                parts = self._parts(digests, {digest for *_, digest in new})
                await server.post(GENERATE, {**body, "sampling_params": sampling, "content_parts": parts}, headers=headers)
                self._remember(url, digests)
            finally:
                sent.set_result(None)
                for each in new:
                    del self._coming[each]

    def _remember(self, url: str, digests: Sequence[str]) -> None:
        known = self._known.setdefault(url, OrderedDict())
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > max(MAX_KNOWN, len(digests)):
            known.popitem(last=False)

    def _parts(self, digests: Sequence[str], sent: Collection[str] = ()) -> list[dict[str, Any]]:
        """`content_parts`, with the bytes of the images that are `sent`."""
        urls = {digest: self._store.data_url(digest) for digest in sent}
        return [{"type": "image_url", "url": urls.get(digest), "uuid": digest} for digest in digests]
