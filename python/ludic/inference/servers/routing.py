"""Which server of a pool gets a call, by the name in `inference.routing`: `least_busy`, `session`
or `prefix`. A server answers sooner if it has cached the keys and values of the prompt's prefix.

Prompts are compared by the hashes of their prefixes. Example with blocks of two tokens: the prompts
`[5, 6, 7, 8, 9]` and `[5, 6, 7, 8, 1, 2]` have three keys each and share the first two.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from ludic.columns import int_column
from ludic.errors import check_value
from ludic.inference.client import current_episode
from ludic.inference.servers.server import Server

Routing = Literal["least_busy", "session", "prefix"]

BLOCK_TOKENS = 16
"""Tokens of a key. vLLM caches blocks of 16 tokens on GPUs and of 128 on CPUs."""
MOST_KEYS = 2**16
"""Keys that are remembered, of all sessions, and of each server that does not report its size."""
SPILL_RATIO, SPILL_CALLS = 1.5, 4
"""A server with this many times the calls of the least busy one, plus so many, gets no more."""
LEAST_SHARE = 0.25
"""Of a prompt that must be cached, for the cache to decide."""


def block_keys(ids: Sequence[int], model: str = "") -> list[bytes]:
    """[ceil(P / 16)] hashes of the prefixes of a prompt of `model`. The last is of the whole."""
    tokens, key, keys = int_column(ids).tobytes(), model.encode(), []
    for start in range(0, len(tokens), 4 * BLOCK_TOKENS):
        key = hashlib.blake2b(key + tokens[start : start + 4 * BLOCK_TOKENS], digest_size=16).digest()
        keys.append(key)
    return keys


class LeastBusy:
    """The server with the fewest calls in flight."""

    reads_prompts = False
    """Whether the keys of prompts are needed."""

    def choose(self, servers: Sequence[Server], keys: Sequence[bytes]) -> Server:
        """The server for a prompt, of one or more that may get it."""
        return min(servers, key=lambda server: (server.in_flight, server.requests))

    def record(self, server: Server, keys: Sequence[bytes]) -> None:
        """A server computes a prompt, or has done so just now."""

    def forget(self, server: Server | None = None) -> None:
        """The cache of a server, or of all, is empty."""


class BySession(LeastBusy):
    """The server of the episode's last call. The first call of an episode goes where the same
    prompt went last, so that the answers of a group share its prefill. If that server is overloaded
    or gone, the episode moves to the least busy one."""

    reads_prompts = True

    def __init__(self) -> None:
        self._homes: OrderedDict[Hashable, Server] = OrderedDict()

    def choose(self, servers: Sequence[Server], keys: Sequence[bytes]) -> Server:
        homes = [self._homes[each] for each in _sessions(keys) if each in self._homes]
        return super().choose([home for home in homes[:1] if home in _not_overloaded(servers)] or servers, keys)

    def record(self, server: Server, keys: Sequence[bytes]) -> None:
        _remember(self._homes, _sessions(keys), server)


class ByPrefix(LeastBusy):
    """The server that has cached most of the prompt, the least busy of several; the least busy of
    all if none has cached a quarter. Overloaded servers are left out. What a server has cached is
    estimated from the calls that went there, at most as many tokens as fit into its cache, the last
    used ones."""

    reads_prompts = True

    def __init__(self) -> None:
        self._cached: dict[Server, OrderedDict[Hashable, Server]] = {}

    def choose(self, servers: Sequence[Server], keys: Sequence[bytes]) -> Server:
        counts = {server: self._count(server, keys) for server in _not_overloaded(servers)}
        most = max(counts.values())
        best = [server for server, count in counts.items() if count == most]
        return super().choose(servers if most < LEAST_SHARE * len(keys) else best, keys)

    def record(self, server: Server, keys: Sequence[bytes]) -> None:
        size = MOST_KEYS if server.kv.tokens is None else server.kv.tokens // BLOCK_TOKENS
        _remember(self._cached.setdefault(server, OrderedDict()), reversed(keys), server, size)

    def forget(self, server: Server | None = None) -> None:
        for each in list(self._cached) if server is None else [server]:
            self._cached.pop(each, None)

    def _count(self, server: Server, keys: Sequence[bytes]) -> int:
        """Leading keys that the server has cached."""
        cached = self._cached.get(server, ())
        return next((number for number, key in enumerate(keys) if key not in cached), len(keys))


def _sessions(keys: Sequence[bytes]) -> list[Hashable]:
    """The episode of a call, and its whole prompt."""
    return [each for each in (current_episode(), *keys[-1:]) if each is not None]


def _not_overloaded(servers: Sequence[Server]) -> list[Server]:
    most = SPILL_RATIO * min(server.in_flight for server in servers) + SPILL_CALLS
    return [server for server in servers if server.in_flight < most]


def _remember(table: OrderedDict[Hashable, Server], keys: Iterable[Hashable], server: Server, most: int = MOST_KEYS) -> None:
    """Make `keys` the last used ones, and drop the others beyond `most`."""
    for key in keys:
        table[key] = server
        table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)


def make_router(routing: Routing) -> LeastBusy:
    """Raises ConfigError for another name."""
    kinds = {"least_busy": LeastBusy, "session": BySession, "prefix": ByPrefix}
    check_value("routing", routing, choices=tuple(kinds))
    return kinds[routing]()
