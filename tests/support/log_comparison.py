"""Compares a `GroupLog` with the model, call by call.

TestAgainstTheModel = compare_with_model(SQLitePlace).TestCase
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from log_laws import LogPlace, works
from memory_log import MemoryLog

from ludic.errors import OwnershipLost, QueueDataLost
from ludic.training.queue.base import GroupLog, Lease

PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def compare_with_model(make_place: Callable[[], LogPlace]) -> type[RuleBasedStateMachine]:
    """A state machine: trainers and actors that are killed and restarted at any time, leases that
    run out, and data that are lost. Every answer must be that of the model.

    A killed process is one whose leases are never used again, or an owner that a new one replaces.
    A call whose answer was lost is one that is repeated.
    """
    owners, runs = st.sampled_from(["t1", "t2"]), st.sampled_from(["r1", "r2"])
    numbers = st.lists(st.integers(0, 6), max_size=4)
    repeats = st.booleans()

    class Comparison(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.place = make_place()
            self.model, self.log = MemoryLog(self.place.clock), self.place.connect()
            self.leases: list[tuple[Lease, Lease]] = []
            self.positions: list[tuple[str, str]] = []

        def teardown(self) -> None:
            self.place.remove()

        def both(self, call: Callable[[GroupLog], Any], *, repeat: bool = False) -> Any:
            for _ in range(1 + repeat):
                answers = [_answer(call, log) for log in (self.model, self.log)]
                assert answers[0] == answers[1]
            return answers[0]

        @rule(owner=owners, run=runs, repeat=repeats)
        def claim(self, owner: str, run: str, repeat: bool) -> None:
            self.both(lambda log: log.claim(owner, run=run, ttl_s=30), repeat=repeat)

        @rule(owner=owners)
        def renew_claim(self, owner: str) -> None:
            self.both(lambda log: log.renew_claim(owner, ttl_s=30))

        @rule(owner=owners, numbers=numbers, version=st.integers(0, 2), repeat=repeats)
        def offer(self, owner: str, numbers: list[int], version: int, repeat: bool) -> None:
            self.both(lambda log: log.offer(owner, works(*numbers, version=version)), repeat=repeat)

        @rule(owner=owners, numbers=numbers)
        def withdraw(self, owner: str, numbers: list[int]) -> None:
            self.both(lambda log: log.withdraw(owner, numbers))

        @rule(owner=owners, version=st.integers(0, 3))
        def announce(self, owner: str, version: int) -> None:
            self.both(lambda log: log.announce(owner, version))

        @rule(actor=st.sampled_from("ab"), lease_s=st.sampled_from([5.0, 50.0]))
        def lease(self, actor: str, lease_s: float) -> None:
            expected, got = (log.lease(actor, lease_s=lease_s) for log in (self.model, self.log))
            assert (expected is None) == (got is None)
            if expected is not None and got is not None:
                assert (expected.work, expected.actor, expected.run) == (got.work, got.actor, got.run)
                self.leases.append((expected, got))

        def with_lease(self, data: st.DataObject, call: Callable[[GroupLog, Lease], Any]) -> None:
            if self.leases:
                expected, got = data.draw(st.sampled_from(self.leases))
                assert call(self.model, expected) == call(self.log, got)

        @rule(data=st.data(), lease_s=st.sampled_from([5.0, 50.0]))
        def renew(self, data: st.DataObject, lease_s: float) -> None:
            self.with_lease(data, lambda log, held: log.renew(held, lease_s=lease_s))

        @rule(data=st.data())
        def give_back(self, data: st.DataObject) -> None:
            self.with_lease(data, lambda log, held: log.give_back(held))

        @rule(data=st.data(), payload=st.binary(max_size=3))
        def deliver(self, data: st.DataObject, payload: bytes) -> None:
            self.with_lease(data, lambda log, held: log.deliver(held, payload))

        @rule(payload=st.binary(max_size=3))
        def push(self, payload: bytes) -> None:
            self.both(lambda log: log.push(payload, max_entries=4))

        @rule(data=st.data(), limit=st.integers(1, 3))
        def read(self, data: st.DataObject, limit: int) -> None:
            after = data.draw(st.sampled_from([(None, None), *self.positions]))
            expected, got = (log.read(position, limit=limit) for log, position in zip((self.model, self.log), after, strict=True))
            assert [(entry.number, entry.payload) for entry in expected] == [(entry.number, entry.payload) for entry in got]
            self.positions += [(left.position, right.position) for left, right in zip(expected, got, strict=True)]

        @rule(data=st.data(), owner=owners)
        def forget(self, data: st.DataObject, owner: str) -> None:
            if self.positions:
                expected, got = data.draw(st.sampled_from(self.positions))
                assert _answer(lambda log: log.forget(owner, expected), self.model) == _answer(
                    lambda log: log.forget(owner, got), self.log
                )

        @rule()
        def set_aside(self) -> None:
            for log in (self.model, self.log):
                for entry in log.read(None, limit=1):
                    log.set_aside(entry, "bad")

        @rule(owner=owners)
        def close(self, owner: str) -> None:
            self.both(lambda log: log.close(owner))

        @rule(seconds=st.sampled_from([1.0, 6.0, 31.0]))
        def let_time_pass(self, seconds: float) -> None:
            self.place.clock.advance(seconds)

        @rule()
        def restart(self) -> None:
            self.log = self.place.connect()

        @rule()
        def lose_data(self) -> None:
            self.model.lose_data()
            self.place.lose_data()

        @rule()
        def look(self) -> None:
            self.both(lambda log: (log.outstanding(), log.version(), log.is_closed(), log.stats()))
            self.both(lambda log: [(kept.entry.number, kept.entry.payload, kept.reason) for kept in log.aside()])

    Comparison.TestCase.settings = settings(
        max_examples=5 * settings.default.max_examples // 10, stateful_step_count=40, deadline=None, phases=PHASES
    )
    return Comparison


def _answer(call: Callable[[GroupLog], Any], log: GroupLog) -> Any:
    try:
        return call(log)
    except (OwnershipLost, QueueDataLost) as error:
        return type(error)
