"""A pool that is asked, aborted, left, entered and killed in any order keeps its laws."""

import asyncio
import contextlib

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from jumping_loop import JumpingLoop
from pool_playing import Fate, PlayedPool

from ludic.errors import RolloutAborted


class PoolLife(RuleBasedStateMachine):
    """The pool of one run, over several processes."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=JumpingLoop)
        self.played = None
        self.asked = None
        self.given = {}
        self.saved = None

    @initialize(
        seed=st.integers(0, 2**20),
        max_lag=st.integers(0, 3),
        part=st.floats(0, 1),
        size=st.integers(1, 3),
        order=st.sampled_from(["arrival", "submission"]),
        limit=st.none() | st.integers(1, 4),
        closing_s=st.sampled_from([0.0, 2.0]),
    )
    def begin(self, seed, max_lag, part, size, order, limit, closing_s):
        self.fate = Fate(seed, rejected=0.3, failing=0.2, doomed=0.2, closing_s=closing_s)
        self.settings = {"groups_per_batch": size, "members_per_group": 2, "over_sampling_factor": 1 + part * max_lag}
        self.settings |= {"max_lag": max_lag, "order": order, "max_concurrency": limit, "patience": 10_000, "seed": seed}
        self.played = PlayedPool(self.fate, self.settings)
        self.save()

    def run(self, work):
        return self.runner.run(work)

    @precondition(lambda self: self.asked is None)
    @rule()
    def ask(self):
        async def ask():
            self.asked = asyncio.create_task(self.played.pool.next_batch())
            await asyncio.sleep(0)

        self.run(ask())

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds):
        self.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.asked is not None and self.asked.done())
    @rule()
    def take(self):
        asked, self.asked = self.asked, None
        with contextlib.suppress(RolloutAborted):
            batch = asked.result()
            self.played.check_batch(batch)
            assert len(batch) == self.settings["groups_per_batch"]
            for group in batch:
                assert group.ordinal not in self.given
                assert [member[:2] for member in group.members] == [[group.ordinal, 0], [group.ordinal, 1]]
                self.given[group.ordinal] = group.position

    @precondition(lambda self: self.asked is not None and not self.asked.done())
    @rule()
    def give_up_asking(self):
        async def cancel():
            self.asked.cancel()
            await asyncio.wait([self.asked])

        self.run(cancel())
        if self.asked.cancelled():
            self.asked = None

    @rule()
    def abort(self):
        self.played.pool.request_abort()
        self.run(asyncio.sleep(0))

    @rule()
    def resume(self):
        self.played.pool.resume()

    @rule()
    def enter(self):
        self.run(self.played.pool.__aenter__())

    @rule()
    def leave(self):
        """Also while a batch is awaited, and outside of `async with`."""
        self.run(self.played.pool.__aexit__(None, None, None))
        self.run(asyncio.sleep(0))
        assert self.played.running == 0
        assert self.asked is None or self.asked.done()

    @precondition(lambda self: self.asked is None or not self.asked.done())
    @rule()
    def save(self):
        self.saved = (self.played.save(), dict(self.given))

    @rule()
    def kill(self):
        """The process ends, and a new one begins from the last checkpoint."""
        self.runner.close()
        self.runner = asyncio.Runner(loop_factory=JumpingLoop)
        self.played, self.asked = PlayedPool(self.fate, self.settings), None
        saved, given = self.saved
        self.given = dict(given)
        self.played.load(saved)

    @invariant()
    def every_group_is_in_one_state(self):
        if self.played is None:
            return
        self.played.check()
        pool = self.played.pool
        is_taken = self.asked is None or not self.asked.done()
        assert pool.counts.given == len(self.given) or not is_taken
        assert pool.counts.kept <= -(-self.settings["groups_per_batch"] * self.settings["over_sampling_factor"] // 1)

    def teardown(self):
        self.runner.close()


PoolLife.TestCase.settings = settings(stateful_step_count=30)
test_a_pool_keeps_its_laws_whatever_happens = PoolLife.TestCase
