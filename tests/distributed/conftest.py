"""Stub servers that accept pushed weights."""

import contextlib

import pytest
from stub_weight_server import StubWeightServer


@pytest.fixture
def start(tmp_path):
    """`start(**options)` starts a stub server that runs until the test ends."""
    with contextlib.ExitStack() as stack:
        servers = []

        def start_one(**options):
            server = stack.enter_context(StubWeightServer(tmp_path / f"server{len(servers)}", **options))
            servers.append(server)
            return server

        yield start_one
