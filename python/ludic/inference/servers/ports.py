"""Free ports for servers that a run starts."""

from __future__ import annotations

import socket
from pathlib import Path
from random import SystemRandom

LOWEST = 15_000
"""Below it are the customary ports of services."""
TRIES = 100
_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST = 32_768
_RANDOM = SystemRandom()  # another one in each process, whatever its seeds


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens at `host` now. A server listens only after it has loaded
    its model, so the port is below the range from which the kernel serves whoever connects or asks
    for any port; only if no port there is found, in it."""
    first = _first_of_kernel()
    below = range(LOWEST, first) if first > LOWEST else range(0)
    for port in _RANDOM.sample(below, min(TRIES, len(below))):
        if (found := _bind(host, port)) is not None:
            return found
    found = _bind(host, 0)
    if found is None:
        raise OSError(f"no port of {host} is free, or it is no address of this machine")
    return found


def _first_of_kernel() -> int:
    try:
        return int(_KERNEL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return _DEFAULT_FIRST


def _bind(host: str, port: int) -> int | None:
    """The port, 0 standing for any; None if it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
