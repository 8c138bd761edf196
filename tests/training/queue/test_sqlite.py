"""The log in a SQLite file: the laws of all logs, and what concerns files and processes."""

import shutil
import sqlite3
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from log_comparison import compare_with_model
from log_laws import LogLaws, lease, works
from memory_log import Clock, MemoryLog

from ludic.errors import ConfigError, OwnershipLost, QueueError, QueueRefused
from ludic.training.queue.sqlite import SQLiteLog


class SQLitePlace:
    def __init__(self, folder=None):
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # nothing is flushed to a disk
        self.folder = Path(tempfile.mkdtemp(prefix="ludic-queue-", dir=in_memory)) if folder is None else Path(folder)
        self.clock, self.logs = Clock(), []

    def connect(self):
        self.logs.append(SQLiteLog(self.folder / "queue.sqlite", clock=self.clock))
        return self.logs[-1]

    def lose_data(self):
        for path in self.folder.glob("queue.sqlite*"):
            path.unlink()

    def remove(self):
        for log in self.logs:
            log.disconnect()
        shutil.rmtree(self.folder)


class MemoryPlace:
    """The model must follow its own laws."""

    def __init__(self):
        self.clock = Clock()
        self.log = MemoryLog(self.clock)
        self.lose_data = self.log.lose_data

    def connect(self):
        return self.log

    def remove(self):
        pass


class TestSQLiteLog(LogLaws):
    @pytest.fixture
    def place(self):
        return SQLitePlace()


class TestTheModel(LogLaws):
    @pytest.fixture
    def place(self):
        return MemoryPlace()


TestAgainstTheModel = compare_with_model(SQLitePlace).TestCase


@pytest.fixture
def log(tmp_path):
    log = SQLiteLog(tmp_path / "queue.sqlite", timeout_s=0.2)
    yield log
    log.disconnect()


def test_a_wall_clock_that_is_set_back_holds_no_lease_and_no_claim(log, monkeypatch):
    log.claim("t1", run="r1", ttl_s=0.05)
    log.offer("t1", works(0))
    assert log.lease("a", lease_s=0.05) is not None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    time.sleep(0.06)
    assert log.lease("b").work.number == 0
    log.claim("t2", run="r2")


def test_a_clock_that_begins_anew_ends_leases_and_claims_but_one_that_goes_on_does_not(tmp_path):
    """As after a restart of the machine, which stopped 9,000 s after its start."""
    file, clock = tmp_path / "queue.sqlite", Clock()
    before = SQLiteLog(file, clock=lambda: 9_000 + clock())
    before.claim("t1", run="r1")
    before.offer("t1", works(0))
    assert before.lease("a") is not None
    other = SQLiteLog(file, clock=lambda: 9_000 + clock())
    assert other.lease("b") is None
    with pytest.raises(OwnershipLost):
        other.claim("t2", run="r2")
    after = SQLiteLog(file, clock=clock)
    assert after.outstanding()[0].age_s == 0
    assert after.lease("b").work.attempt == 1
    after.claim("t2", run="r2")


@pytest.mark.parametrize("call", ["claim", "offer", "withdraw", "lease", "renew", "give_back", "deliver", "forget", "close"])
def test_a_call_that_is_interrupted_anywhere_has_done_nothing_or_everything(tmp_path, call):
    """SQLite is stopped after 1, 4, 7, ... of its instructions, until the call gets through. The
    content is as before, or as the call leaves it, and repeating the call then changes nothing."""
    place = SQLitePlace(tmp_path)
    log = place.connect()
    log.claim("t1", run="r")
    log.offer("t1", works(*range(5)))
    log.deliver(lease(log), b"zero")
    held, position = lease(log), log.read(None)[0].position
    calls = {
        "claim": lambda: log.claim("t2", run="r"),
        "offer": lambda: log.offer("t1", works(1, 2, 8, 9, version=3)),
        "withdraw": lambda: log.withdraw("t1", [1, 2, 3]),
        "lease": lambda: log.lease("b"),
        "renew": lambda: log.renew(held, lease_s=500),
        "give_back": lambda: log.give_back(held),
        "deliver": lambda: log.deliver(held, b"one" * 5000),
        "forget": lambda: log.forget("t1", position),
        "close": lambda: log.close("t1"),
    }
    before, stops = dump(log), 0
    while dump(log) == before:
        interrupt_after(log, 3 * stops + 1)
        with suppress(QueueError):
            calls[call]()
        stops += 1
    assert stops > 10
    log.disconnect()  # ends the interruptions
    after = dump(log)
    if call == "lease":  # leasing again takes the next number
        assert [row for row in after["work"] if row not in before["work"]] == [after["work"][1]]
    else:
        calls[call]()
        assert dump(log) == after
    place.remove()


def interrupt_after(log, instructions):
    """The next call is interrupted when SQLite has run this many virtual instructions."""
    left = [instructions]

    def count():
        left[0] -= 1
        return left[0] < 0

    log._connect().set_progress_handler(count, 1)


def dump(log):
    """Every row of every table."""
    other = sqlite3.connect(log.path)
    try:
        names = [name for (name,) in other.execute("select name from sqlite_master where type = 'table' order by name")]
        return {name: other.execute(f"select * from {name}").fetchall() for name in names if not name.startswith("sqlite_")}
    finally:
        other.close()


def test_a_call_waits_for_another_process_until_its_deadline(log):
    log.claim("t1", run="r")
    other = sqlite3.connect(log.path, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(QueueError, match=r"offer: .*locked.*another process holds it"):
        log.offer("t1", works(0))
    other.execute("rollback")
    other.close()
    assert log.offer("t1", works(0)) == 1


def test_reading_waits_until_its_deadline_and_ends_with_the_first_entry(log):
    log.claim("t1", run="r")
    log.offer("t1", works(0))
    assert log.read(None, timeout_s=0.05) == []
    with ThreadPoolExecutor(1) as threads:
        entries = threads.submit(log.read, None, timeout_s=60)
        log.deliver(lease(log), b"x")
        assert len(entries.result(timeout=30)) == 1


def test_a_folder_that_does_not_exist_and_a_file_that_is_no_queue_are_named(tmp_path):
    with pytest.raises(QueueError, match=r"missing/queue.sqlite.*folder must exist"):
        SQLiteLog(tmp_path / "missing" / "queue.sqlite").stats()
    (tmp_path / "text").write_bytes(b"this is no database, only some text" * 100)
    with pytest.raises(QueueError, match="delete it"):
        SQLiteLog(tmp_path / "text").stats()
    with pytest.raises(ConfigError, match="timeout_s"):
        SQLiteLog(tmp_path / "queue.sqlite", timeout_s=0)


def test_a_file_of_another_version_is_not_touched(tmp_path):
    path = tmp_path / "queue.sqlite"
    db = sqlite3.connect(path)
    db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(QueueRefused, match="version 99, this ludic reads 1"):
        SQLiteLog(path).stats()


def test_two_processes_that_open_a_new_file_at_once_share_it(tmp_path):
    """Sixteen connections at once: one makes the tables, and all see them."""
    logs = [SQLiteLog(tmp_path / "queue.sqlite") for _ in range(16)]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda log: log.stats().entries, logs)) == [0] * 16
        list(threads.map(lambda log: log.push(b"x", max_entries=100), logs))
    assert logs[0].stats().entries == 16
    for log in logs:
        log.disconnect()


def test_a_new_file_that_another_process_is_writing_to_is_waited_for(tmp_path):
    other = sqlite3.connect(tmp_path / "queue.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")
    with pytest.raises(QueueError, match="another process holds it"):
        SQLiteLog(tmp_path / "queue.sqlite", timeout_s=0.05).stats()
    release = threading.Timer(0.1, lambda: other.execute("commit"))
    release.start()
    log = SQLiteLog(tmp_path / "queue.sqlite")
    assert log.stats().entries == 0
    release.join()
    log.disconnect()
    other.close()


def test_positions_of_deleted_data_are_no_positions_of_new_ones(tmp_path):
    place = SQLitePlace(tmp_path)
    log = place.connect()
    for payload in (b"1", b"2"):
        log.push(payload, max_entries=9)
    last = log.read(None)[-1].position
    place.lose_data()
    log.push(b"3", max_entries=9)
    assert [entry.payload for entry in log.read(last)] == [b"3"]
    place.remove()
