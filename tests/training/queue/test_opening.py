"""Which log an address means."""

import pytest

from ludic.errors import ConfigError
from ludic.training.queue.opening import open_log
from ludic.training.queue.sqlite import SQLiteLog


@pytest.mark.parametrize(("where", "path"), [("run", "run/queue.sqlite"), ("a/b.sqlite", "a/b.sqlite")])
def test_a_folder_or_a_file_is_a_log_of_sqlite_that_is_made_when_it_is_used(tmp_path, where, path):
    log = open_log(tmp_path / where, name="run")
    assert isinstance(log, SQLiteLog)
    assert log.path == tmp_path / path
    assert not log.path.exists()


def test_an_unknown_address_is_refused_without_its_password():
    with pytest.raises(ConfigError, match="amqp:// is unknown; give redis://") as error:
        open_log("amqp://user:secret@host", name="run")
    assert "secret" not in str(error.value)


def test_a_redis_address_is_a_log_on_a_server():
    pytest.importorskip("redis")
    log = open_log("redis://user:secret@127.0.0.1:1", name="run")
    assert "secret" not in repr(log)
