"""How an actor gets the weights that it samples with."""

import asyncio

import pytest

from ludic.errors import PublishError
from ludic.runs.actors.worker import ServerWeights


class Server:
    """Serves these versions, one for each question, and goes on with the last one."""

    def __init__(self, *versions):
        self.versions = list(versions)

    async def get_policy_version(self):
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]


async def test_weights_are_awaited_until_the_server_has_them():
    server = Server(3, 3, 5)
    await ServerWeights(server).load(4)
    assert server.versions == [5]


async def test_a_server_that_came_back_with_an_older_version_is_an_error_at_the_deadline():
    waiting = ServerWeights(Server(3), serve_s=0.1).load(4)
    with pytest.raises(PublishError, match=r"had version 3, not 4, for 0\.1 s"):
        await asyncio.wait_for(waiting, timeout=20)
