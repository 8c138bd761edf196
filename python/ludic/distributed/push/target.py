"""The servers of a push, from a client, a URL, or a list of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.inference.client import PushTarget, Version


class PushUrls(PushTarget):
    """Servers without a client. Requests to them have these headers, such as their secret."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str] | None = None) -> None:
        self.server_urls, self._headers = list(urls), headers or {}

    @property
    def request_headers(self) -> Mapping[str, str]:
        return self._headers


class _UserClient(PushTarget):
    """A client that does not derive from `PushTarget`. It has `server_url` or `server_urls`, and
    other members of `PushTarget` or not. Its headers come from its `_session`, if it has one."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.server_urls = getattr(client, "server_urls", None) or [client.server_url]
        self.connections = getattr(client, "_connections", None)

    @property
    def request_headers(self) -> Mapping[str, str]:
        session = getattr(self._client, "_session", None)
        return {} if session is None else dict(session.headers)

    def hold_connections(self, connections: Any) -> None:
        """Also keep the connections on the user's client, where a later `as_push_target` finds
        them."""
        self.connections = self._client._connections = connections

    def weights_changed(self, version: Version, *, lost: Sequence[str] = ()) -> None:
        if hasattr(self._client, "weights_changed"):
            self._client.weights_changed(version, lost=lost)

    def adapter_changed(self, name: str, served_name: str) -> None:
        names = getattr(self._client, "served_names", None)
        if names is not None:
            names[name] = served_name


def as_push_target(client: PushTarget | str | Sequence[Any] | Any) -> PushTarget:
    """The servers of a client, of a URL, or of several clients and URLs."""
    if isinstance(client, PushTarget):
        return client
    if isinstance(client, str):
        return PushUrls([client])
    if isinstance(client, Sequence):
        return PushUrls([url for one in client for url in as_push_target(one).all_urls()])
    return _UserClient(client)
