"""The laws of a `GroupLog`, for every implementation.

class TestSQLiteLog(LogLaws):
    @pytest.fixture
    def place(self, tmp_path):
        return SQLitePlace(tmp_path)

TestAgainstTheModel = compare_with_model(SQLitePlace).TestCase
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest
from memory_log import Clock

from ludic.errors import DataError, OwnershipLost, QueueDataLost
from ludic.training.queue.base import MAX_PAYLOAD_BYTES, Entry, GroupLog, Lease, Work


class LogPlace(Protocol):
    """Where one log is: a file, or keys of a server."""

    clock: Clock

    def connect(self) -> GroupLog:
        """A log as another process would open it."""
        ...

    def lose_data(self) -> None:
        """Delete everything that the log holds, also under open connections."""
        ...

    def remove(self) -> None:
        """Close all connections and remove what is left."""
        ...


def numbers_of(entries: list[Entry]) -> list[int | None]:
    return [entry.number for entry in entries]


def works(*numbers: int, version: int = 0) -> list[Work]:
    return [Work(number, version) for number in numbers]


def lease(log: GroupLog, actor: str = "a", lease_s: float = 60.0) -> Lease:
    leased = log.lease(actor, lease_s=lease_s)
    assert leased is not None
    return leased


class LogLaws:
    """One test for each sentence of the protocol. A subclass has the fixture `place`."""

    @pytest.fixture
    def log(self, place: LogPlace):
        log = place.connect()
        log.claim("t1", run="r")
        yield log
        place.remove()

    def test_a_log_that_holds_nothing_is_read_and_waited_for(self, place):
        log = place.connect()
        assert log.read(None, timeout_s=0.05) == []
        log.claim("t1", run="r")
        assert log.read(None, timeout_s=0.05) == []
        place.lose_data()
        assert log.read(None, timeout_s=0.05) == []
        place.remove()

    def test_what_is_offered_is_leased_in_the_order_of_numbers_and_each_once(self, log):
        assert log.offer("t1", works(5, 3, 4)) == 3
        assert [lease(log, actor).work for actor in "abc"] == works(3, 4, 5)
        assert log.lease("d") is None

    def test_offering_again_changes_nothing(self, log):
        log.offer("t1", works(0, 1))
        held = lease(log)
        assert log.offer("t1", works(0, 1, 2)) == 1
        assert [(each.work.number, each.actor) for each in log.outstanding()] == [(0, "a"), (1, None), (2, None)]
        assert log.deliver(held, b"x")

    def test_offering_another_version_ends_the_lease(self, log):
        log.offer("t1", works(0))
        held = lease(log)
        assert log.offer("t1", works(0, version=4)) == 0
        assert not log.renew(held)
        assert not log.deliver(held, b"old")
        assert lease(log).work == Work(0, version=4)

    def test_delivery_moves_the_number_from_work_to_entries(self, log):
        log.offer("t1", works(0, 1))
        assert log.deliver(lease(log), b"zero")
        assert [each.work.number for each in log.outstanding()] == [1]
        assert [(entry.number, entry.payload) for entry in log.read(None)] == [(0, b"zero")]

    def test_the_second_delivery_of_a_lease_is_refused(self, log):
        log.offer("t1", works(0))
        held = lease(log)
        assert [log.deliver(held, b"x"), log.deliver(held, b"x")] == [True, False]
        assert numbers_of(log.read(None)) == [0]

    def test_a_lease_that_ran_out_is_taken_over_with_one_more_attempt(self, log, place):
        log.offer("t1", works(0))
        lease(log, "a", lease_s=60)
        place.clock.advance(59.5)
        assert log.lease("b") is None
        place.clock.advance(1)
        assert [each.actor for each in log.outstanding()] == [None]
        assert lease(log, "b").work == Work(0, 0, attempt=1)
        assert log.stats().claimed == 1

    def test_renewing_keeps_a_lease_and_takes_one_back_that_ran_out(self, log, place):
        log.offer("t1", works(0))
        held = lease(log, "a", lease_s=60)
        place.clock.advance(50)
        assert log.renew(held, lease_s=60)
        place.clock.advance(50)
        assert log.lease("b") is None
        place.clock.advance(50)  # the time is up, and nobody came
        assert log.renew(held, lease_s=60)
        assert log.lease("b") is None

    def test_a_lease_that_was_taken_over_cannot_be_renewed(self, log, place):
        log.offer("t1", works(0))
        held = lease(log, "a", lease_s=1)
        place.clock.advance(2)
        lease(log, "b")
        assert not log.renew(held)
        assert [each.actor for each in log.outstanding()] == ["b"]

    def test_the_first_delivery_wins_whoever_has_the_lease(self, log, place):
        log.offer("t1", works(0))
        slow = lease(log, "slow", lease_s=1)
        place.clock.advance(2)
        quick = lease(log, "quick")
        assert log.deliver(slow, b"slow")
        assert not log.deliver(quick, b"quick")
        assert [entry.payload for entry in log.read(None)] == [b"slow"]

    def test_what_is_given_back_is_free_at_once_and_was_no_attempt(self, log):
        log.offer("t1", works(0))
        log.give_back(lease(log, "a"))
        assert lease(log, "b").work == Work(0, 0, attempt=0)

    def test_giving_back_a_lease_that_another_has_changes_nothing(self, log, place):
        log.offer("t1", works(0))
        held = lease(log, "a", lease_s=1)
        place.clock.advance(2)
        lease(log, "b")
        log.give_back(held)
        assert log.lease("c") is None

    def test_what_is_withdrawn_is_neither_leased_nor_delivered(self, log):
        log.offer("t1", works(0, 1))
        held = lease(log)
        log.withdraw("t1", [0, 1, 7])
        assert log.lease("b") is None
        assert not log.renew(held)
        assert not log.deliver(held, b"x")
        assert log.read(None) == []

    def test_entries_are_read_by_position_in_the_order_of_delivery(self, log):
        log.offer("t1", works(*range(5)))
        for held in reversed([lease(log) for _ in range(5)]):
            log.deliver(held, b"%d" % held.work.number)
        first = log.read(None, limit=2)
        assert numbers_of(first) == [4, 3]
        assert numbers_of(log.read(first[-1].position)) == [2, 1, 0]
        assert numbers_of(log.read(None)) == [4, 3, 2, 1, 0]  # reading changes nothing
        assert log.read(log.read(None)[-1].position) == []

    def test_what_is_forgotten_is_gone_and_later_positions_stay(self, log):
        log.offer("t1", works(0, 1, 2))
        for _ in range(3):
            log.deliver(lease(log), b"x")
        entries = log.read(None)
        log.forget("t1", entries[1].position)
        assert log.read(None) == [entries[2]]
        assert log.read(entries[0].position) == [entries[2]]
        log.forget("t1", entries[1].position)
        assert log.stats().entries == 1

    def test_a_new_owner_of_the_run_replaces_the_old_one(self, log):
        log.claim("t2", run="r")
        for call in (
            lambda: log.offer("t1", works(0)),
            lambda: log.withdraw("t1", [0]),
            lambda: log.forget("t1", "x-1"),
            lambda: log.announce("t1", 3),
            lambda: log.renew_claim("t1"),
            lambda: log.close("t1"),
        ):
            with pytest.raises(OwnershipLost, match="t2"):
                call()
        assert log.offer("t2", works(0)) == 1
        assert (log.version(), log.is_closed()) == (None, False)

    def test_work_and_entries_survive_a_new_owner_of_the_run(self, log):
        log.offer("t1", works(0, 1))
        log.deliver(lease(log), b"x")
        held = lease(log)
        log.claim("t2", run="r")
        assert log.deliver(held, b"y")
        assert numbers_of(log.read(None)) == [0, 1]

    def test_another_run_is_refused_while_the_claim_lasts_and_then_begins_with_nothing(self, log, place):
        log.offer("t1", works(0, 1))
        log.announce("t1", 5)
        log.deliver(lease(log), b"x")
        held, entry = lease(log), log.read(None)[0]
        log.set_aside(entry, "bad")
        place.clock.advance(20)
        log.renew_claim("t1", ttl_s=30)
        place.clock.advance(20)
        with pytest.raises(OwnershipLost, match="r"):
            log.claim("other", run="r2")
        place.clock.advance(20)
        log.claim("other", run="r2")
        assert (log.read(None), log.outstanding(), log.aside(), log.version()) == ([], [], [], None)
        log.offer("other", works(1))
        assert not log.deliver(held, b"of the first run")
        with pytest.raises(OwnershipLost):
            log.offer("t1", works(2))

    def test_a_closed_log_holds_no_groups_and_can_be_claimed_by_any_run(self, log):
        log.offer("t1", works(0, 1, 2))
        log.deliver(lease(log), b"x")
        held = lease(log)
        log.close("t1")
        assert log.is_closed()
        assert (log.lease("b"), log.deliver(held, b"x"), log.read(None), log.outstanding()) == (None, False, [], [])
        log.claim("next", run="r2")
        assert not log.is_closed()

    def test_a_log_that_nobody_claimed_gives_nothing_and_is_not_closed(self, log, place):
        place.lose_data()
        assert (log.lease("a"), log.version(), log.is_closed(), log.outstanding()) == (None, None, False, [])

    def test_a_new_claim_of_the_run_opens_a_closed_log(self, log):
        log.close("t1")
        log.claim("t2", run="r")
        log.offer("t2", works(0))
        assert not log.is_closed()
        assert lease(log).work.number == 0

    def test_lost_data_are_reported_to_the_owner_and_refused_to_actors(self, log, place):
        log.offer("t1", works(0, 1))
        log.deliver(lease(log), b"x")
        held, old = lease(log), log.read(None)[0]
        place.lose_data()
        with pytest.raises(QueueDataLost):
            log.offer("t1", works(0))
        with pytest.raises(QueueDataLost):
            log.renew_claim("t1")
        assert not log.deliver(held, b"y")
        log.claim("t1", run="r")
        log.offer("t1", works(1))
        log.forget("t1", old.position)
        assert log.renew(held)  # the group is outstanding again as it was leased
        assert log.deliver(held, b"y")
        assert numbers_of(log.read(old.position)) == [1]  # an old position is before everything

    def test_versions_are_announced_also_backwards(self, log):
        assert log.version() is None
        log.announce("t1", 7)
        log.announce("t1", 5)
        assert log.version() == 5

    def test_what_is_set_aside_stays_in_the_log_and_is_kept_once(self, log):
        log.offer("t1", works(0))
        log.deliver(lease(log), b"bad")
        entry = log.read(None)[0]
        log.set_aside(entry, "its reward is nan")
        log.set_aside(entry, "its reward is nan")
        assert [(kept.entry, kept.reason) for kept in log.aside()] == [(entry, "its reward is nan")]
        assert log.read(None) == [entry]
        assert log.stats().aside == 1

    def test_statistics_count_what_is_there(self, log, place):
        log.offer("t1", works(0, 1, 2))
        place.clock.advance(5)
        log.deliver(lease(log), b"12345")
        lease(log)
        stats = log.stats()
        assert (stats.entries, stats.bytes, stats.outstanding, stats.leased) == (1, 5, 2, 1)
        assert stats.oldest_s == pytest.approx(5, abs=0.01)

    def test_a_producer_without_numbers_waits_when_the_log_is_full(self, log):
        assert [log.push(b"%d" % i, max_entries=2) for i in range(3)] == [True, True, False]
        entries = log.read(None)
        assert [(entry.number, entry.payload) for entry in entries] == [(None, b"0"), (None, b"1")]
        log.forget("t1", entries[0].position)
        assert log.push(b"2", max_entries=2)

    def test_an_entry_that_is_too_large_is_refused_and_its_group_stays_outstanding(self, log):
        log.offer("t1", works(0))
        held = lease(log)
        with pytest.raises(DataError, match=str(MAX_PAYLOAD_BYTES)):
            log.deliver(held, bytes(MAX_PAYLOAD_BYTES + 1))
        assert log.deliver(held, b"small")

    def test_all_clients_see_the_same_log_and_threads_lease_each_number_once(self, log, place):
        log.offer("t1", works(*range(24)))
        logs = [place.connect() for _ in range(3)]
        with ThreadPoolExecutor(6) as threads:
            held = list(threads.map(lambda i: lease(logs[i % 3], f"a{i}"), range(24)))
        assert sorted(each.work.number for each in held) == list(range(24))
