"""The store at which ranks meet: opening it, its text values, and RankError once it is gone."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ludic.errors import RankError
from ludic.launch.rank_environment import RankEnvironment

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_DELAY_S = 0.1


class RankStore:
    """A store of `torch.distributed`. `get` is for keys that are there: nothing waits for one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def has(self, key: str) -> bool:
        return self._call(self._store.check, [key])

    def get(self, key: str) -> str:
        return self._call(self._store.get, key).decode()

    def set(self, key: str, value: str) -> None:
        self._call(self._store.set, key, value)

    def set_first(self, key: str, value: str) -> None:
        """Set a key that no rank has set; the first value stays."""
        self._call(self._store.compare_set, key, "", value)

    def append(self, key: str, value: str) -> None:
        self._call(self._store.append, key, value)

    def count(self, key: str) -> int:
        """Add 1 to a counter, and return the sum over all ranks."""
        return self._call(self._store.add, key, 1)

    def delete(self, key: str) -> None:
        self._call(self._store.delete_key, key)

    @staticmethod
    def _call(operation: Callable[..., T], *arguments: Any) -> T:
        try:
            return operation(*arguments)
        except dist.DistNetworkError as error:
            raise RankError("the store of the ranks is gone; see the output of rank 0 or torchrun, which served it") from error


def open_store(environment: RankEnvironment, timeout_s: float) -> Any:
    """The store at the address of the environment, which rank 0 serves unless an agent does."""
    serves = environment.rank == 0 and not environment.has_store
    if not serves:
        _wait_for_port(environment, timeout_s)
    try:
        return TCPStore(
            environment.address,
            environment.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=_listen(environment) if serves else None,
        )
    except dist.DistError as error:
        where = f"{environment.address}:{environment.port}"
        raise RankError(f"rank {environment.rank} cannot use the store at {where}: {str(error).splitlines()[0]}") from error


def _listen(environment: RankEnvironment) -> int:
    """A listening socket at the address of the store alone, not at all addresses of this machine.
    If this machine does not know the address by that name, at all of them."""
    where = f"{environment.address}:{environment.port}"
    try:
        listening = _bind(environment.address, environment.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RankError(f"port {environment.port}, for ranks at {where}, is in use; set MASTER_PORT or ranks.port") from error
        logger.warning(
            "the store of the ranks listens on all addresses of this machine, since %s is none of them (%s)", where, error
        )
        listening = _bind("", environment.port)
    return listening.detach()


def _bind(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((address, port), family=family, backlog=4096)


def _wait_for_port(environment: RankEnvironment, timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((environment.address, environment.port), timeout=min(10.0, timeout_s)).close()
            return
        except OSError as error:
            if time.monotonic() > ends:
                found = f"rank {environment.rank} of {environment.world_size} found no store at {environment.address}:{environment.port}"
                raise RankError(f"{found} within {timeout_s:g} s ({error}); is rank 0 running?") from error
        time.sleep(CONNECT_DELAY_S)
