"""Servers that are restarted at any moment: no sample is of other weights than the version says,
and none of an older version than was published when it was asked for."""

import asyncio
import random
import re
import socket
import threading
from contextlib import ExitStack

import pytest
from stub_policy_server import StubPolicyServer, ids_of
from stub_weight_server import refuse, same, weights
from tiny_policy import tiny_tokenizer

from ludic.distributed.adapters import supervised
from ludic.distributed.adapters.supervised import SupervisedServers
from ludic.errors import ConfigError, EngineDeadError, PublishError
from ludic.inference import SamplingParams, VLLMChatClient
from ludic.inference.servers.pool import Restarts
from ludic.runs.servers import clear_versions, kept_current

SAMPLING = SamplingParams(max_tokens=4)
DEADLINE_S = 60.0
"""For an event that comes within milliseconds on an idle machine."""
WEIGHTS = {version: weights(version + 1) for version in range(9)}
"""None is weights(0), with which a server begins."""


class Fleet:
    """Servers, their client and their publisher."""

    def __init__(self, folder, servers, **options):
        self.servers, self.folder = servers, folder
        self.urls = [server.url for server in servers]
        self.client = VLLMChatClient(urls=self.urls, tokenizer=tiny_tokenizer(), timeout_s=DEADLINE_S, backoff_s=0.0)
        self.end, self.is_stopped = None, False
        self.client.follow_restarts(Restarts(self.urls.__getitem__, lambda: self.end, rest_s=0.0, look_s=0.001))
        self.publisher = self.make_publisher(**options)

    def make_publisher(self, timeout_s=DEADLINE_S, **options):
        find_url = self.urls.__getitem__
        return SupervisedServers(
            self.client,
            self.folder,
            count=len(self.urls),
            find_url=find_url,
            headers={},
            timeout_s=timeout_s,
            find_end=lambda: self.end,
            is_stopped=lambda: self.is_stopped,
            **options,
        )

    async def sample(self):
        """(version, sampled ids)."""
        sampled, info = await self.client._token_completions.sample(request())
        return info["policy_version"], sampled.token_ids


def request():
    from ludic.inference.vllm.requests import TokenRequest

    return TokenRequest("tiny", [1, 2, 3], SAMPLING, 0)


class Hang:
    """A fault: the server does not answer until `release`."""

    def __init__(self):
        self.began, self._answer = threading.Event(), threading.Event()

    def __call__(self, _):
        self.began.set()
        self._answer.wait(DEADLINE_S)

    def release(self):
        self._answer.set()


class Clock:
    """Each look at it takes a second while `goes` is true; else time stands still, so that what
    waits for a deadline waits forever."""

    def __init__(self):
        self.now, self.goes = 0, lambda: False

    def __call__(self):
        self.now += self.goes()
        return self.now


@pytest.fixture
def hang():
    hang = Hang()
    yield hang
    hang.release()


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setattr(supervised, "RETRY_S", 0.001)
    with ExitStack() as stack:

        def start(count, **options):
            folders = [tmp_path / f"server{number}" for number in range(count)]
            fleet = Fleet(tmp_path / "pushed", [stack.enter_context(StubPolicyServer(folder)) for folder in folders], **options)
            stack.callback(fleet.publisher.close)
            return fleet

        yield start


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (3, 2)])
async def test_no_sample_is_of_weights_that_were_not_published(fleet, count, seed):
    """Servers are restarted between two steps, while samples are drawn, and while weights are
    pushed; nobody waits until they are ready."""
    fleet, rng, drawn = fleet(count), random.Random(seed), []

    async def draw(least):
        version, ids = await fleet.sample()
        drawn.append((least, version, ids))

    def restart_in_a_push(_):
        if rng.random() < 0.2:
            threading.Thread(target=rng.choice(fleet.servers).restart).start()

    for server in fleet.servers:
        server.faults |= {"/update_weights": restart_in_a_push, "/finish_weight_update": restart_in_a_push}
    async with fleet.client:
        with kept_current(fleet.publisher, every_s=0.001):
            for version in range(5):
                await fleet.publisher.publish(WEIGHTS[version], version)
                if rng.random() < 0.7:
                    rng.choice(fleet.servers).restart()
                drawing = [asyncio.create_task(draw(version)) for _ in range(8)]
                await asyncio.sleep(0)
                if rng.random() < 0.5:
                    rng.choice(fleet.servers).restart()
                await asyncio.gather(*drawing)
    assert len(drawn) == 5 * 8
    assert all(least == version for least, version, _ in drawn)
    assert all(ids == ids_of(WEIGHTS[version]) for _, version, ids in drawn)


async def test_a_restarted_server_is_asked_again_once_it_has_the_newest_version(fleet):
    fleet = fleet(1)
    (server,) = fleet.servers
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 7)
        assert await fleet.sample() == (7, ids_of(WEIGHTS[0]))
        server.restart()
        waiting = asyncio.create_task(fleet.sample())
        async with asyncio.timeout(DEADLINE_S):
            while server.paths().count("/inference/v1/generate") < 2 or fleet.client._servers.pool.live:
                await asyncio.sleep(0.001)  # its answer was not taken
        assert not waiting.done()
        assert (server.version, same(server.served, weights(0))) == ("default", True)
        fleet.publisher.bring_back()
        assert await asyncio.wait_for(waiting, DEADLINE_S) == (7, ids_of(WEIGHTS[0]))


async def test_nothing_is_sampled_before_the_first_version(fleet):
    """Even if its name is the number that the first weights of a server count as."""
    fleet = fleet(1)
    async with fleet.client:
        waiting = asyncio.create_task(fleet.sample())
        async with asyncio.timeout(DEADLINE_S):
            while fleet.client._servers.pool.live:
                await asyncio.sleep(0.001)
        await fleet.publisher.publish(WEIGHTS[0], 0)
        assert await asyncio.wait_for(waiting, DEADLINE_S) == (0, ids_of(WEIGHTS[0]))


async def test_a_server_that_misses_a_version_gets_no_requests_until_it_has_it(fleet):
    fleet = fleet(2)
    first, second = fleet.servers
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        second.faults["/start_weight_update"] = refuse("busy")
        await fleet.publisher.publish(WEIGHTS[1], 1)
        assert (first.version, second.version) == ("1", "0")
        assert [await fleet.sample() for _ in range(4)] == [(1, ids_of(WEIGHTS[1]))] * 4
        second.faults.clear()
        fleet.publisher.bring_back()
        assert second.version == "1"
        asked = second.paths().count("/inference/v1/generate")
        async with asyncio.timeout(DEADLINE_S):
            while second.paths().count("/inference/v1/generate") < asked + 2:
                assert await fleet.sample() == (1, ids_of(WEIGHTS[1]))


async def test_the_first_version_of_a_trainer_must_reach_every_server_that_lives(fleet):
    """They may have a later version of a trainer that was killed."""
    fleet = fleet(2)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[8], 8)
        later = fleet.make_publisher(timeout_s=0.0)
        fleet.servers[1].faults["/start_weight_update"] = refuse("busy")
        with pytest.raises(PublishError, match=r"version 5 .*within 0 s: .*busy"):
            await later.publish(WEIGHTS[5], 5)
        fleet.servers[1].faults.clear()
        await later.publish(WEIGHTS[5], 5)
        assert [server.version for server in fleet.servers] == ["5", "5"]
        later.close()


def cut_connection(_):
    raise ConnectionAbortedError


async def test_the_first_version_does_not_skip_a_server_whose_connections_break(fleet):
    """It lives, and may have a later version of a trainer that was killed: an actor that asks for
    version 3 would take its answers."""
    fleet = fleet(2)
    living = fleet.servers[1]
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[5], 5)
        later = fleet.make_publisher(timeout_s=0.0)
        for path in ("/collective_rpc:ludic_state", "/start_weight_update", "/update_weights"):
            living.faults = {path: cut_connection}
            with pytest.raises(PublishError, match=r"version 3 .*within 0 s: .*cannot be reached"):
                await later.publish(WEIGHTS[3], 3)
        living.faults = {}
        await later.publish(WEIGHTS[3], 3)
        assert [server.version for server in fleet.servers] == ["3", "3"]
        later.close()


async def test_the_first_version_skips_servers_where_nobody_listens_or_that_have_no_address(fleet):
    """Another life of them begins without a version of anybody."""
    fleet = fleet(3)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fleet.urls[1], fleet.urls[2] = f"http://127.0.0.1:{unused.getsockname()[1]}", None
        async with fleet.client:
            await fleet.publisher.publish(WEIGHTS[3], 3)
    assert [server.version for server in fleet.servers] == ["3", "default", "default"]


async def test_a_server_that_comes_back_at_another_address_is_found(fleet, tmp_path):
    fleet = fleet(1)
    with StubPolicyServer(tmp_path / "elsewhere") as moved:
        async with fleet.client:
            await fleet.publisher.publish(WEIGHTS[0], 0)
            fleet.servers[0].restart()
            fleet.urls[0] = moved.url
            fleet.publisher.bring_back()
            async with asyncio.timeout(DEADLINE_S):
                assert await fleet.sample() == (0, ids_of(WEIGHTS[0]))
            assert "/inference/v1/generate" in moved.paths()
        fleet.publisher.close()


async def test_frozen_weights_are_left_out_of_pushes_and_stay_those_of_a_server_that_is_restarted(fleet):
    fleet, trained = fleet(1, partial=True), dict(list(WEIGHTS[0].items())[:1])
    async with fleet.client:
        await fleet.publisher.publish(trained, 0)
        fleet.servers[0].restart()
        fleet.publisher.bring_back()
        async with asyncio.timeout(DEADLINE_S):
            assert await fleet.sample() == (0, ids_of({**weights(0), **trained}))


async def test_the_weights_of_a_version_are_sent_again_under_a_new_name_even_if_they_are_the_same(fleet, caplog):
    """A server's version never changes alone: it may be another life of it by then."""
    fleet = fleet(1)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        await fleet.publisher.publish(WEIGHTS[0], 1)
    assert re.search("are sent .*again, as version 1", caplog.text)
    assert "/update_weight_version" not in fleet.servers[0].paths()
    assert fleet.servers[0].versions_served == ["default", "0", "1"]


async def test_a_server_that_is_given_a_version_is_not_given_it_again(fleet):
    """Somebody looks for servers to bring back while the push goes on."""
    fleet, looking = fleet(1), []

    def look(_):
        looking.append(threading.Thread(target=fleet.publisher.bring_back))
        looking[-1].start()

    fleet.servers[0].faults["/finish_weight_update"] = look
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        for thread in looking:
            thread.join(DEADLINE_S)
    assert len(looking) == 1
    assert fleet.servers[0].versions_served == ["default", "0"]


async def test_a_push_does_not_wait_for_a_server_that_is_brought_back(fleet):
    """It takes long to load, while the trainer goes on with the other one."""
    fleet, asked, answer = fleet(2), threading.Event(), threading.Event()
    first, second = fleet.servers

    def take_long(_):
        asked.set()
        answer.wait(DEADLINE_S)

    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        second.restart()
        second.faults["/update_weights"] = take_long
        bringing = threading.Thread(target=fleet.publisher.bring_back)
        bringing.start()
        try:
            assert await asyncio.to_thread(asked.wait, DEADLINE_S)
            await fleet.publisher.publish(WEIGHTS[1], 1)
            assert (first.version, second.version, answer.is_set()) == ("1", "default", False)
            assert bringing.is_alive()
        finally:
            answer.set()
            await asyncio.to_thread(bringing.join, DEADLINE_S)
        second.faults.clear()
        fleet.publisher.bring_back()
        assert second.version == "1"


async def test_a_server_that_does_not_answer_the_first_question_is_not_asked_for_more(fleet):
    """The calls of a push have its long deadline."""
    fleet = fleet(2)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        first, second = fleet.servers
        first.faults["/weight_info"] = cut_connection
        asked = first.paths().count("/collective_rpc:ludic_state")
        await fleet.publisher.publish(WEIGHTS[1], 1)
        assert (first.version, second.version) == ("0", "1")
        assert first.paths().count("/collective_rpc:ludic_state") == asked


async def test_a_push_waits_shortly_for_a_server_that_hangs_and_later_pushes_do_not(fleet, hang):
    fleet = fleet(2, clock=(clock := Clock()), wait_s=7)
    first, second = fleet.servers
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        second.faults["/update_weights"] = hang
        clock.goes = lambda: hang.began.is_set() and fleet.publisher._servers[0].version is fleet.publisher._current
        await fleet.publisher.publish(WEIGHTS[1], 1)
        assert 7 <= clock.now <= 9
        assert [await fleet.sample() for _ in range(4)] == [(1, ids_of(WEIGHTS[1]))] * 4
        clock.goes = lambda: False
        await fleet.publisher.publish(WEIGHTS[2], 2)
        assert [await fleet.sample() for _ in range(4)] == [(2, ids_of(WEIGHTS[2]))] * 4
        fleet.publisher.bring_back()  # which does not wait for it either
        assert (first.version, second.version) == ("2", "0")
        second.faults.clear()
        hang.release()
        async with asyncio.timeout(DEADLINE_S):
            while second.version != "2":
                await asyncio.to_thread(fleet.publisher.bring_back)
            while fleet.client._servers.pool.live != fleet.client._servers.pool.servers:
                assert await fleet.sample() == (2, ids_of(WEIGHTS[2]))


async def test_a_late_server_that_gives_no_answer_is_still_not_waited_for(fleet, hang):
    """Its connection breaks, and it hangs again at the next version."""
    fleet = fleet(2, clock=(clock := Clock()), wait_s=7)
    first, second = fleet.publisher._servers
    faults, again = fleet.servers[1].faults, Hang()

    def hang_up(body):
        hang(body)
        cut_connection(body)

    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        faults["/update_weights"] = hang_up
        clock.goes = lambda: hang.began.is_set() and first.version is fleet.publisher._current
        try:
            await fleet.publisher.publish(WEIGHTS[1], 1)
            fleet.publisher.bring_back()  # which is told at once that it has not answered
            faults["/update_weights"] = again
            hang.release()
            async with asyncio.timeout(DEADLINE_S):
                while second._life._busy.locked():
                    await asyncio.sleep(0.001)
            before = clock.now
            await fleet.publisher.publish(WEIGHTS[2], 2)
            assert clock.now - before < 7
        finally:
            again.release()


async def test_a_thread_that_starts_late_gives_the_newest_version(fleet):
    """The address of the server is read from a slow disk."""
    fleet = fleet(2, clock=Clock(), wait_s=0)
    server, slow, gone_on = fleet.publisher._servers[1], threading.Event(), threading.Event()

    def find_url(number):
        if slow.is_set() and threading.current_thread().name == "ludic-servers":
            gone_on.wait(DEADLINE_S)
        return fleet.urls[number]

    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        before = set(threading.enumerate())
        server._find_url = find_url
        slow.set()
        for version in (1, 2):
            await fleet.publisher.publish(WEIGHTS[version], version)
        late = [thread for thread in threading.enumerate() if thread not in before and thread.name == "ludic-servers"]
        assert len(late) == 2
        gone_on.set()
        for thread in late:
            await asyncio.to_thread(thread.join, DEADLINE_S)
        fleet.publisher.bring_back()
    assert fleet.servers[1].versions_served == ["default", "0", "2"]


async def test_a_server_that_loads_a_version_too_late_comes_back(fleet):
    """It has loaded it when nobody waits for the answer any more."""
    fleet = fleet(2)
    first, second = fleet.servers

    def answer_nobody(body):
        second.on_finish_weight_update(None, body)
        cut_connection(body)

    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        second.faults["/finish_weight_update"] = answer_nobody
        await fleet.publisher.publish(WEIGHTS[1], 1)
        assert (second.version, second.paused) == ("1", "abort")
        assert [await fleet.sample() for _ in range(4)] == [(1, ids_of(WEIGHTS[1]))] * 4
        second.faults.clear()
        fleet.publisher.bring_back()
        assert (second.version, second.paused) == ("1", None)
        await fleet.publisher.publish(WEIGHTS[2], 2)
        assert (first.version, second.version) == ("2", "2")


async def test_a_warning_says_which_server_does_not_come_back(fleet, caplog):
    """Once, until something else fails."""
    fleet = fleet(2)
    url, faults = fleet.urls[1], fleet.servers[1].faults

    def warnings():
        return [record.getMessage() for record in caplog.records if record.msg.startswith("%s is not back, and")]

    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        faults["/update_weights"] = refuse("out of memory")
        await fleet.publisher.publish(WEIGHTS[1], 1)
        for _ in range(3):
            fleet.publisher.bring_back()
        (warning,) = warnings()
        assert re.search(f"^{url} .*gets no requests: ", warning)
        assert "out of memory" in warning
        assert warning.endswith("end its process to have it restarted")
        faults["/update_weights"] = refuse("no such file")
        fleet.publisher.bring_back()
        assert "no such file" in warnings()[1]
        faults.clear()
        fleet.publisher.bring_back()
        assert fleet.servers[1].version == "1"


async def test_a_server_that_hangs_does_not_keep_the_process_from_ending(fleet, hang):
    """Not even while it loads a version, which Ctrl-C does not interrupt."""
    fleet = fleet(2, clock=Clock(), wait_s=0)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        before = set(threading.enumerate())
        fleet.servers[1].faults["/finish_weight_update"] = hang
        publishing = asyncio.create_task(fleet.publisher.publish(WEIGHTS[1], 1))
        assert await asyncio.to_thread(hang.began.wait, DEADLINE_S)
        await publishing
        held = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("ludic-servers")]
        assert held
        assert all(thread.daemon for thread in held)


async def test_a_server_that_hangs_does_not_keep_another_from_coming_back(fleet, hang):
    fleet = fleet(3, clock=Clock(), wait_s=0)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)
        fleet.servers[0].faults["/start_weight_update"] = hang
        await fleet.publisher.publish(WEIGHTS[1], 1)
        fleet.servers[1].restart()
        async with asyncio.timeout(DEADLINE_S):
            while fleet.servers[1].version != "1":
                await asyncio.to_thread(fleet.publisher.bring_back)
        assert hang.began.is_set()


@pytest.mark.parametrize(("count", "is_first"), [(1, False), (2, False), (2, True)])
async def test_a_push_that_needs_servers_that_hang_fails(fleet, count, is_first):
    """All of them; at the first version of a trainer, one is enough."""
    fleet, clock = fleet(count), Clock()
    hangs = [Hang() for _ in range(1 if is_first else count)]
    async with fleet.client:
        publisher = fleet.make_publisher(clock=clock, answer_s=20, wait_s=3)
        if not is_first:
            await publisher.publish(WEIGHTS[0], 0)
        for server, hang in zip(fleet.servers, hangs, strict=False):
            server.faults["/finish_weight_update"] = hang
        clock.goes = lambda: all(hang.began.is_set() for hang in hangs)
        try:
            with pytest.raises(PublishError, match=r"version 1 .*within 20 s: .*inference.push_timeout_s"):
                await publisher.publish(WEIGHTS[1], 1)
            assert 20 <= clock.now <= 25
        finally:
            for hang in hangs:
                hang.release()
            publisher.close()


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_push_does_not_wait_for_a_process_that_has_ended(fleet, tmp_path, hang, is_first):
    """Its machine is lost, and nobody answers on its connections."""
    fleet = fleet(1, clock=Clock())
    with StubPolicyServer(tmp_path / "elsewhere") as moved:
        async with fleet.client:
            if not is_first:
                await fleet.publisher.publish(WEIGHTS[0], 0)

            def lose(_):
                fleet.urls[0] = moved.url
                hang(_)

            fleet.servers[0].faults["/update_weights"] = lose
            await fleet.publisher.publish(WEIGHTS[1], 1)
            assert (fleet.servers[0].version, moved.version) == ("default" if is_first else "0", "1")
        fleet.publisher.close()


async def test_a_push_ends_when_no_server_will_answer_or_the_run_is_stopped(fleet, hang):
    fleet = fleet(1, clock=(clock := Clock()), wait_s=5)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[0], 0)

        def lose(_):
            fleet.end = "every server has failed"
            hang(_)

        fleet.servers[0].faults["/update_weights"] = lose
        with pytest.raises(PublishError, match=r"version 1 was not published: .*has failed"):
            await fleet.publisher.publish(WEIGHTS[1], 1)
        fleet.end, fleet.is_stopped, clock.goes = None, True, lambda: True
        later = fleet.make_publisher(clock=clock, wait_s=5)
        fleet.servers[0].faults["/collective_rpc:ludic_state"] = hang
        with pytest.raises(PublishError, match=r"no server .*asked to stop"):
            await later.publish(WEIGHTS[1], 1)
        later.close()


async def test_a_wait_ends_where_no_server_will_come_back(fleet):
    fleet = fleet(1)
    async with fleet.client:
        waiting = asyncio.create_task(fleet.sample())
        fleet.end = "every server has failed more often than place.restarts allows"
        with pytest.raises(EngineDeadError, match="every server has failed"):
            await asyncio.wait_for(waiting, DEADLINE_S)
        fleet.servers[0].faults["/weight_info"] = refuse("busy")
        with pytest.raises(PublishError, match=r"no server .*every server has failed"):
            await fleet.publisher.publish(WEIGHTS[0], 0)


async def test_an_actor_may_be_set_back_with_its_trainer(fleet):
    fleet = fleet(1)
    async with fleet.client:
        await fleet.publisher.publish(WEIGHTS[7], 7)
        fleet.client.require_version(7)
        await fleet.publisher.publish(WEIGHTS[5], 5)
        fleet.client.require_version(6)
        assert not await fleet.client.has_version(6)
        fleet.client.require_version(5)
        assert await fleet.client.has_version(5)
        assert await fleet.sample() == (5, ids_of(WEIGHTS[5]))


def test_a_client_whose_answers_do_not_say_what_sampled_them_is_refused(fleet):
    client = VLLMChatClient(urls=fleet(1).urls)
    with pytest.raises(ConfigError, match="pass tokenizer="):
        client.follow_restarts(Restarts(lambda number: None))


def test_versions_of_an_earlier_trainer_are_deleted(tmp_path):
    clear_versions(tmp_path / "pushed")
    for name in ("version_3", ".unfinished_version_4"):
        (tmp_path / "pushed" / name).mkdir(parents=True)
    clear_versions(tmp_path / "pushed")
    assert not list((tmp_path / "pushed").iterdir())
