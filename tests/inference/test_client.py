"""The interface between publishers and chat clients. A user's publisher needs only `publish`; every
other member has a default."""

import asyncio
from types import SimpleNamespace

import pytest

from ludic.inference.client import PolicyPublisher, Publisher, PushTarget, as_publisher


class OnlyPublishes:
    def __init__(self):
        self.pushed = []

    def publish(self, state_dict, version=None):
        self.pushed.append((sorted(state_dict), version))


def test_a_publisher_with_only_publish_gets_the_other_members():
    own = OnlyPublishes()
    publisher = as_publisher(own)
    publisher.expect_change(False)
    publisher.publish({"w": 1}, version=4)
    publisher.close()
    assert own.pushed == [(["w"], 4)]
    assert publisher.timings == {}
    assert isinstance(own, PolicyPublisher)


def test_a_publisher_with_expect_change_is_told_whether_weights_changed():
    told = []
    own = SimpleNamespace(publish=lambda state_dict, version=None: None, expect_change=told.append)
    as_publisher(own).expect_change(False)
    assert told == [False]


def test_publish_can_be_a_coroutine_function_that_the_caller_awaits():
    class Asynchronous:
        pushed = 0

        async def publish(self, state_dict, version=None):
            self.pushed += 1

    own = Asynchronous()
    asyncio.run(as_publisher(own).publish({}, version=1))
    assert own.pushed == 1


def test_a_publisher_of_the_library_is_not_wrapped():
    publisher = Publisher()
    assert as_publisher(publisher) is publisher
    with pytest.raises(NotImplementedError, match="Publisher does not publish"):
        publisher.publish({})


def test_a_target_caches_the_connections_to_its_servers():
    target, connections = PushTarget(), SimpleNamespace(close=lambda: None)
    assert (target.connections, target.all_urls(), dict(target.request_headers)) == (None, [], {})
    target.hold_connections(connections)
    target.weights_changed(1, lost=["http://a"])
    target.adapter_changed("policy", "policy@1")
    assert target.connections is connections
    assert PushTarget.connections is None
