"""A real Redis server for tests, and a log on it with a name of its own.

The program is LUDIC_REDIS_SERVER, target/redis/redis-server (`make redis` fetches it), or one on
PATH. Without one, tests that need it are skipped; if LUDIC_REDIS_SERVER is set, a server that does
not start is a failure.
"""

import itertools
from contextlib import contextmanager

import pytest
from benches.python.redis_server import RedisServer, find_redis_server

_names = itertools.count()


def redis_program_or_skip():
    program = find_redis_server()
    if program is None:
        pytest.skip("no redis-server: `make redis` fetches one, or LUDIC_REDIS_SERVER names one")
    return program


def new_name():
    """A name for a log that no other test of this process has used."""
    return f"test-{next(_names)}"


@contextmanager
def running_redis(folder, **settings):
    """A server with its data in `folder`; yields a `RedisServer` and kills it on exit."""
    with RedisServer(folder, redis_program_or_skip(), **settings) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """One server for all tests of a process. Tests that kill or change it start their own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_log(redis_server):
    """A log that no other test has used."""
    from ludic.training.queue.redis import RedisLog

    log = RedisLog(redis_server.url, new_name(), deadline_s=10.0)
    yield log
    log.disconnect()
