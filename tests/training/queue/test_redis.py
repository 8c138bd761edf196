"""`RedisLog` on a real server: what happens when it is killed, emptied, full, or does not answer.
The laws of all logs come first."""

import re
import subprocess
import threading

import pytest
import redis
from hypothesis.stateful import run_state_machine_as_test
from log_comparison import compare_with_model
from log_laws import LogLaws
from memory_log import Clock
from real_redis import new_name, running_redis

from ludic.errors import DataError, OwnershipLost, QueueDataLost, QueueError, QueueRefused
from ludic.training.queue.base import MAX_PAYLOAD_BYTES, Work
from ludic.training.queue.redis import RedisLog

pytestmark = pytest.mark.integration


class RedisPlace:
    """Keys of a server that tests share."""

    def __init__(self, url):
        self.url, self.name = url, new_name()
        self.clock, self.logs = Clock(), []

    def connect(self):
        self.logs.append(RedisLog(self.url, self.name, deadline_s=20.0, clock=self.clock))
        return self.logs[-1]

    def lose_data(self):
        client = redis.Redis.from_url(self.url)
        client.delete(*self.logs[0]._keys)
        client.close()

    def remove(self):
        if self.logs:
            self.lose_data()
        for log in self.logs:
            log.disconnect()


class TestRedisLog(LogLaws):
    @pytest.fixture
    def place(self, redis_server):
        return RedisPlace(redis_server.url)


def test_redis_gives_the_answers_of_the_model(redis_server):
    run_state_machine_as_test(compare_with_model(lambda: RedisPlace(redis_server.url)))


def owned(url, *, name="run", deadline_s=20.0):
    log = RedisLog(url, name, deadline_s=deadline_s)
    log.claim("trainer", run="r")
    return log


def numbers(entries):
    return [entry.number for entry in entries]


def test_what_was_acknowledged_outlives_kills_of_the_server(tmp_path):
    with running_redis(tmp_path, appendfsync="always") as server:  # while a disk is busy, `everysec` acknowledges first
        log = owned(server.url)
        log.offer("trainer", [Work(number, 0) for number in range(400)])
        delivered, stop = [], threading.Event()

        def act():
            with_log = RedisLog(server.url, "run", deadline_s=20.0)
            while not stop.is_set():
                lease = with_log.lease("actor", lease_s=1.0)
                if lease is not None and with_log.deliver(lease, b"x" * 20_000):
                    delivered.append(lease.work.number)
                stop.wait(0.002)

        actor = threading.Thread(target=act)
        actor.start()
        for _ in range(4):
            before = len(delivered)
            while len(delivered) < before + 20:  # the actor has come through the last kill
                assert actor.is_alive()
                stop.wait(0.002)
            server.kill()
            server.start()
        stop.set()
        actor.join()
        entries = log.read(None, limit=1000)
        assert len(set(numbers(entries))) == len(entries)  # none twice, even where an answer was lost
        assert set(delivered) <= set(numbers(entries))
        outstanding = {one.work.number for one in log.outstanding()}
        assert outstanding | set(numbers(entries)) == set(range(400))
        assert not outstanding & set(numbers(entries))


def test_a_run_that_is_not_utf8_is_no_traceback_and_matches_no_lease(redis_log):
    redis_log.claim("trainer", run="r")
    redis_log.offer("trainer", [Work(4, 0)])
    redis_log._server.call(lambda client: client.hset(redis_log._keys[0], "run", b"\xff"))
    lease = redis_log.lease("actor")
    assert lease.run == "\\xff"
    assert not redis_log.deliver(lease, b"entry")


def test_a_repeated_lease_returns_what_the_first_one_took(redis_log):
    redis_log.claim("trainer", run="r")
    redis_log.offer("trainer", [Work(4, 0), Work(5, 0)])
    call = redis_log._server.call

    def answer_lost(command):
        call(command)
        return call(command)

    redis_log._server.call = answer_lost
    lease = redis_log.lease("actor")
    redis_log._server.call = call
    assert lease.work == Work(4, 0)
    assert redis_log.stats().leased == 1
    assert redis_log.lease("actor").work == Work(5, 0)


def test_a_log_whose_data_are_gone_begins_anew(tmp_path):
    with running_redis(tmp_path) as server:
        log = owned(server.url)
        log.offer("trainer", [Work(0, 0), Work(1, 0)])
        lease = log.lease("actor")
        assert log.deliver(lease, b"first")
        position = log.read(None)[-1].position
        late = log.lease("actor")
        server.kill()
        server.wipe()
        server.start()
        for call in (lambda: log.renew_claim("trainer"), lambda: log.offer("trainer", [Work(1, 0)])):
            with pytest.raises(QueueDataLost):
                call()
        assert not log.deliver(late, b"of the data that are gone")
        assert log.read(position) == []
        log.claim("trainer", run="r")
        log.offer("trainer", [Work(0, 0), Work(1, 0)])
        for _ in range(2):
            assert log.deliver(log.lease("actor"), b"second")
        assert numbers(log.read(position)) == [0, 1]  # the old position is before everything new
        log.forget("trainer", position)
        assert numbers(log.read(None)) == [0, 1]


def test_waiting_readers_get_an_entry_when_it_is_delivered(redis_log):
    redis_log.claim("trainer", run="r")
    redis_log.offer("trainer", [Work(0, 0)])
    lease = redis_log.lease("actor")
    found = []
    reader = threading.Thread(target=lambda: found.extend(redis_log.read(None, timeout_s=1e6)), daemon=True)
    reader.start()
    redis_log.deliver(lease, b"x")
    reader.join(300)
    assert numbers(found) == [0]


def test_a_server_that_stops_answering_ends_each_call_at_its_deadline(tmp_path):
    with running_redis(tmp_path) as server:
        patient = owned(server.url, deadline_s=300.0)
        patient.offer("trainer", [Work(0, 0)])
        lease = patient.lease("actor")
        log = RedisLog(server.url, "run", deadline_s=0.5)
        server.pause()
        try:
            for call in (
                lambda: log.deliver(lease, b"x"),
                lambda: log.read(None, timeout_s=0.2),
                lambda: log.stats(),
                lambda: log.renew_claim("trainer"),
            ):
                with pytest.raises(QueueError, match=r"did not answer within 0\.5 s"):
                    call()
        finally:
            server.go_on()
        patient.deliver(lease, b"x")  # the lost one may have arrived
        assert numbers(patient.read(None)) == [0]


def test_a_full_server_refuses_entries_and_still_lets_the_trainer_forget(tmp_path):
    with running_redis(tmp_path, maxmemory="8mb") as server:
        log = owned(server.url)
        log.offer("trainer", [Work(number, 0) for number in range(50)])
        leases = [log.lease("actor") for _ in range(50)]
        with pytest.raises(QueueError, match=r"is full .*checkpoints more often, .*raise maxmemory"):
            any(not log.deliver(lease, b"x" * 1_000_000) for lease in leases)
        delivered = len(log.read(None))
        assert 1 <= delivered < 50
        for size in (100_000, 3_000, 100, 1):  # what is left, down to the last bytes
            with pytest.raises(QueueError, match="is full"):
                all(log.push(b"x" * size, max_entries=10_000) for _ in range(10_000))
        log.claim("trainer", run="r")
        log.renew_claim("trainer")
        log.announce("trainer", 3)
        assert log.renew(leases[-1])
        log.give_back(leases[-1])
        assert log.offer("trainer", [Work(50, 3)]) == 1  # the trainer offers before it trains what is there
        refused = log.read(None)[0]
        for _ in range(2):
            log.set_aside(refused, "no group")
        [aside] = log.aside()
        assert (aside.entry.position, aside.entry.payload) == (refused.position, b"")
        assert re.search("1000000 bytes .*not kept, .*server is full", aside.reason)
        assert log.stats().aside == 1
        log.forget("trainer", log.read(None)[-1].position)
        assert log.deliver(leases[delivered], b"x" * 1_000_000)
        assert len(log.outstanding()) == 50 - delivered


def test_a_server_that_evicts_is_refused(tmp_path):
    with running_redis(tmp_path, **{"maxmemory-policy": "allkeys-lru"}) as server:
        log = RedisLog(server.url, "run")
        with pytest.raises(QueueRefused, match=r"allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
            log.version()


def test_passwords_are_used_and_never_shown(tmp_path, caplog):
    with running_redis(tmp_path, requirepass="hunter2secret") as server:
        address = f"127.0.0.1:{server.port}"
        log = owned(f"redis://:hunter2secret@{address}")
        assert repr(log) == f"RedisLog('redis://***@{address}', 'run')"
        said = [repr(log)]
        for url in (f"redis://:wrong2secret@{address}", f"redis://{address}", f"redis://nobody:hunter2secret@{address}"):
            with pytest.raises(QueueRefused, match=r"refused a command: (Authentication|NoPermission)") as caught:
                RedisLog(url, "run", deadline_s=1e6).version()  # not tried until the deadline
            said.append(str(caught.value))
        with pytest.raises(OwnershipLost) as caught:
            log.claim("other", run="another")
        server.kill()
        with pytest.raises(QueueError, match="did not answer") as lost:
            RedisLog(f"redis://:hunter2secret@{address}", "run", deadline_s=0.1).version()
        said += [str(caught.value), str(lost.value), caplog.text]
        assert "2secret" not in "".join(said)


def test_tls_is_verified(tmp_path):
    for subject, extra in (("ca", []), ("server", ["-CA", tmp_path / "ca.pem", "-CAkey", tmp_path / "ca.key"])):
        files = ["-keyout", tmp_path / f"{subject}.key", "-out", tmp_path / f"{subject}.pem"]
        names = ["-subj", f"/CN={subject}", "-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *names, *extra]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    from ludic.inference.servers.ports import free_port

    port = free_port()
    files = {"tls-cert-file": "server.pem", "tls-key-file": "server.key", "tls-ca-cert-file": "ca.pem"}
    settings = {"tls-port": str(port), "tls-auth-clients": "no", **{name: str(tmp_path / file) for name, file in files.items()}}
    with running_redis(tmp_path / "data", **settings):
        log = owned(f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path / 'ca.pem'}")
        log.offer("trainer", [Work(0, 0)])
        assert log.lease("actor").work == Work(0, 0)
        with pytest.raises(QueueError, match=r"CERTIFICATE_VERIFY_FAILED"):
            RedisLog(f"rediss://127.0.0.1:{port}", "run", deadline_s=0.2).version()


def test_an_entry_that_is_too_large_is_refused_before_it_is_sent():
    log = RedisLog("redis://127.0.0.1:1", "run")
    with pytest.raises(DataError, match=r"16777217 bytes .*larger than 16777216"):
        log.push(b"x" * (MAX_PAYLOAD_BYTES + 1), max_entries=1)


def test_two_logs_on_one_server_know_nothing_of_each_other(redis_server):
    first, second = owned(redis_server.url, name="one"), owned(redis_server.url, name="two")
    first.offer("trainer", [Work(0, 0)])
    assert second.outstanding() == []
    second.close("trainer")
    assert len(first.outstanding()) == 1


def test_all_keys_are_on_one_server_of_a_cluster(redis_log):
    from redis.crc import key_slot

    assert len({key_slot(key.encode()) for key in redis_log._keys}) == 1
