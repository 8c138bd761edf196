"""A port stays free until a server listens on it."""

import socket

import pytest

from ludic.inference.servers import ports
from ludic.inference.servers.ports import free_port


def test_nobody_who_connects_or_asks_for_any_port_gets_it():
    first = ports._first_of_kernel()
    for _ in range(50):
        assert ports.LOWEST <= free_port() < first
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        assert any_port.getsockname()[1] >= first


def test_it_is_free(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", port)
        monkeypatch.setattr(ports, "_first_of_kernel", lambda: port + 1)
        assert free_port() != port  # the only one below the kernel's range is taken


def test_without_room_below_the_range_it_is_one_of_the_kernel(monkeypatch):
    monkeypatch.setattr(ports, "_first_of_kernel", lambda: 1024)
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match=r"no port of 192\.0\.2\.1 is free"):
        free_port("192.0.2.1")  # of the range for documentation, RFC 5737
