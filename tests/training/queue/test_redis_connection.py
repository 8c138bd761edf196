import logging
import socket

import pytest
from hypothesis import given, strategies as st
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from ludic.errors import ConfigError, QueueError, QueueRefused
from ludic.training.queue.redis import RedisConnection, check_prefix, hide_password

PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=3, max_size=12)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host", "redis://***@host"),
        ("rediss://me:secret@host:6379/2?ssl_ca_certs=/ca.pem", "rediss://***@host:6379/2"),
        ("redis://:se@cret@host", "redis://***@host"),
        ("redis://:secret#@host", "redis://***@host"),
        ("redis://host?password=secret", "redis://***@host"),
        ("unix:///run/redis.sock?password=secret", "unix://***@/run/redis.sock"),
        ("me:secret@host", "***"),
    ],
)
def test_an_url_is_shown_without_its_password(url, shown):
    assert hide_password(url) == shown


@given(password=PASSWORDS, scheme=st.sampled_from(["redis", "rediss", "unix", "http"]))
def test_no_password_is_ever_shown(password, scheme):
    secret = f"{password}SECRET{password}"
    url = f"{scheme}://user:{secret}@host:6379/0"
    assert "SECRET" not in hide_password(url)
    error = refusal_of(url)
    if error is not None:
        assert "SECRET" not in str(error)
        assert error.__suppress_context__ or error.__context__ is None  # no cause that would show it


def refusal_of(url):
    """The error of a connection to this URL; None if it is usable."""
    try:
        RedisConnection(url, deadline_s=1.0).disconnect()
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://host", "must begin with redis://"),
        ("redis://host:port", "no readable host and port"),
        ("redis://:a/b@host", "%2F"),
        ("redis://host?socket_timeout=1000", "socket_timeout; db and ssl_"),
        ("redis://host?password=secret", "password; db and ssl_"),
    ],
)
def test_an_unusable_url_is_refused(url, problem):
    with pytest.raises(ConfigError, match=problem):
        RedisConnection(url, deadline_s=1.0)


def test_names_of_queues_have_no_braces():
    assert check_prefix("run-7/a b") == "run-7/a b"
    for name in ["", "a{b", "a}b", "a\nb"]:
        with pytest.raises(ConfigError, match="name"):
            check_prefix(name)


class Server:
    """Stands for a server: each command raises or returns the next of `answers`."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, client):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def checked_connection(**settings):
    connection = RedisConnection("redis://:hunter2@host", **{"deadline_s": 5.0, **settings})
    connection._checked = True
    return connection


def test_a_call_is_repeated_until_the_server_answers():
    server = Server(ConnectionError("gone"), ReadOnlyError("replica"), "answer")
    assert checked_connection().call(server) == "answer"
    assert server.answers == []


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ResponseError("WRONGTYPE"), False),
        (OutOfMemoryError("maxmemory"), False),  # the next checkpoint frees memory
        (AuthenticationError("invalid password"), True),
        (NoPermissionError("no rights to run EVALSHA"), True),
    ],
)
def test_a_refusal_is_not_repeated_and_says_whether_it_can_pass(error, is_final):
    server = Server(error, "never asked")
    with pytest.raises(QueueError, match=r"redis://\*\*\*@host (refused a command|is full)") as caught:
        checked_connection().call(server)
    assert server.answers == ["never asked"]
    assert isinstance(caught.value, QueueRefused) == is_final


def test_a_server_that_repeats_the_password_does_not_reach_the_message():
    with pytest.raises(QueueError, match=r"beginning with: `\*\*\*`") as caught:
        checked_connection().call(Server(ResponseError("unknown command `AUTH`, beginning with: `hunter2`")))
    assert caught.value.__suppress_context__


def test_a_server_that_is_not_there_ends_the_call_at_its_deadline():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        connection = RedisConnection(f"redis://127.0.0.1:{taken.getsockname()[1]}", deadline_s=0.3)
        with pytest.raises(QueueError, match=r"did not answer within 0.3 s"):
            connection.call(lambda client: client.ping())  # without the deadline it waits for ever


def test_a_server_that_says_nothing_ends_the_call_at_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = RedisConnection(f"redis://127.0.0.1:{silent.getsockname()[1]}", deadline_s=0.3)
        with pytest.raises(QueueError, match=r"did not answer within 0.3 s \(TimeoutError"):
            connection.call(lambda client: client.ping())  # without the deadline it waits for ever
        connection.disconnect()


class Facts:
    """A client that says this about its server."""

    def __init__(self, **facts):
        self.facts = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1, **facts}

    def info(self, section):
        return self.facts


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"redis_version": "6.0.16"}, r"Redis 6\.0\.16; 6\.2 or newer"),
        ({"maxmemory_policy": "allkeys-lru"}, "allkeys-lru; .*maxmemory-policy noeviction"),
    ],
)
def test_a_server_that_would_lose_entries_is_refused(facts, problem):
    connection = RedisConnection("redis://:hunter2@host", deadline_s=1.0)
    connection._client = Facts(**facts)
    with pytest.raises(QueueRefused, match=problem):
        connection.call(lambda client: "never asked")


def test_a_server_without_a_file_is_warned_of_once(caplog):
    connection = RedisConnection("redis://:hunter2@host", deadline_s=1.0)
    connection._client = Facts(aof_enabled=0)
    with caplog.at_level(logging.WARNING):
        assert [connection.call(lambda client: 1), connection.call(lambda client: 2)] == [1, 2]
    assert len(caplog.records) == 1
    assert "redis://***@host has appendonly off" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(("used", "warned"), [(50, False), (51, True)])
def test_a_server_is_warned_of_above_half_of_its_memory(used, warned, caplog):
    connection = checked_connection()
    connection._client = Facts(used_memory=used * 2**20, maxmemory=100 * 2**20)
    with caplog.at_level(logging.WARNING):
        connection.warn_of_memory()
        connection.warn_of_memory()
    assert len(caplog.records) == int(warned)  # at most once a minute
    assert ("uses 51 of the 100 MB" in caplog.text) == warned
