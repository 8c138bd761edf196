"""Servers that take weights."""

import contextlib

import pytest
from stub_weight_server import StubWeightServer


@pytest.fixture
def start(tmp_path):
    """`start(**options)` gives a server that runs until the test ends."""
    with contextlib.ExitStack() as stack:
        started = []

        def start_one(**options):
            server = stack.enter_context(StubWeightServer(tmp_path / f"server{len(started)}", **options))
            started.append(server)
            return server

        yield start_one
