"""How an actor gets the weights that it samples with."""

import asyncio

import pytest

from ludic.errors import PublishError
from ludic.runs.actors.queue import make_run_id
from ludic.runs.actors.worker import ServerWeights


class Server:
    """Serves these versions, one for each question, and goes on with the last one."""

    def __init__(self, *versions):
        self.versions, self.required, self.adapters = list(versions), None, None

    def require_version(self, version):
        self.required = version

    async def has_version(self, version, adapters):
        self.adapters = adapters
        return (self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]) >= version


async def test_weights_are_awaited_until_the_server_has_them(tmp_path):
    server, name = Server(3, 3, 5), f"{tmp_path.name}-{make_run_id(tmp_path)[:8]}"
    await ServerWeights(server, tmp_path).load(4)
    assert (server.versions, server.required, server.adapters) == ([5], 4, name)


async def test_a_server_that_came_back_with_an_older_version_is_an_error_at_the_deadline(tmp_path):
    waiting = ServerWeights(Server(3), tmp_path, serve_s=0.1).load(4)
    with pytest.raises(PublishError, match=r"had version 4 for 0\.1 s"):
        await asyncio.wait_for(waiting, timeout=20)
