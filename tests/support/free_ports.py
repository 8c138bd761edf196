"""Ports for servers that tests start in other processes.

The kernel gives the ports of its own range (32768 to 60999 on Linux) to whoever connects or asks
for any port. One that a test has found free there may be taken before its server listens; below
that range nobody gets one unasked.
"""

import random
import socket
from contextlib import ExitStack

FIRST, LAST = 15_000, 32_000
_RANDOM = random.SystemRandom()  # another one in each process of tests, whatever they seed


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that nobody listens on."""
    for _ in range(1000):
        first = _RANDOM.randrange(FIRST, LAST)
        with ExitStack() as bound:
            try:
                for port in range(first, first + count):
                    bound.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError(f"no {count} consecutive free ports")


def free_port() -> int:
    """A port that nobody listens on."""
    return free_ports(1)
