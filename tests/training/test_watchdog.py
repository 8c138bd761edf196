"""Deadlines of phases, and what is printed when one is exceeded."""

import asyncio
import re
import threading

import pytest

from ludic.errors import ConfigError
from ludic.training import watchdog
from ludic.training.watchdog import MOST_STACKS, Watchdog, phase, print_stacks, remaining_s, watched


class Process:
    """A process that a watchdog can end: `ended` is set with the exit status."""

    def __init__(self, out):
        self.out, self.code, self.ended, self.reported = out.open("w+"), None, threading.Event(), []

    def end(self, code):
        if not self.ended.is_set():
            self.code = code
            self.ended.set()

    def watch(self, **deadlines_s):
        return Watchdog(deadlines_s, name="rank 1 of 2", report=self.reported.append, end=self.end, out=self.out)

    def printed(self):
        self.out.seek(0)
        return self.out.read()


@pytest.fixture
def process(tmp_path):
    made = Process(tmp_path / "err")
    yield made
    made.out.close()


@pytest.fixture
def running(process):
    """Starts watchdogs and closes them after the test."""
    started = []

    def start(**deadlines_s):
        watch = process.watch(**deadlines_s)
        watch.start()
        started.append(watch)
        return watch

    yield start
    for watch in started:
        watch.close()
    for thread in threading.enumerate():
        if thread.name == "watchdog":  # it may print once more, since nothing ended this process
            thread.join(timeout=60)


def test_a_phase_that_exceeds_its_deadline_prints_all_stacks_and_ends_the_process(process, running):
    running(save=0.05)
    with phase("save"):
        assert process.ended.wait(timeout=60)
    assert process.code == 75
    printed = process.printed()
    assert re.search("rank 1 of 2: .*save has taken", printed)
    assert "its deadline is 0.05 s" in printed
    assert "test_a_phase_that_exceeds_its_deadline" in printed  # this thread's stack
    assert "_watch" in printed
    assert process.reported
    assert "the phase save" in process.reported[0]


def test_the_main_thread_is_printed_beside_any_number_of_others(tmp_path):
    over = threading.Event()
    others = [threading.Thread(target=over.wait, daemon=True) for _ in range(MOST_STACKS + 10)]
    for thread in others:
        thread.start()
    with (tmp_path / "stacks").open("w+") as out:
        print_stacks(out)
        out.seek(0)
        printed = out.read()
    over.set()
    for thread in others:
        thread.join()
    assert "test_the_main_thread_is_printed" in printed


def test_the_deadline_counts_from_the_last_progress(process, running):
    watch = running(step=600.0, save=300.0)
    with phase("step"):
        began = watch._phase.since
        with phase("save"):
            assert watch._phase.name == "save"
        assert watch._phase.name == "step"
        assert watch._phase.since > began
        with phase("a name without a deadline"):
            assert watch._phase is None
        assert watch._phase.name == "step"
    assert watch._phase is None
    assert not process.ended.is_set()


def test_a_phase_ends_with_its_error(running):
    watch = running(save=5.0)
    with pytest.raises(OSError, match="full"), phase("save"):
        raise OSError("full")
    assert watch._phase is None


def test_functions_and_coroutine_functions_can_be_phases(running):
    watch = running(step=5.0)

    @watched("step")
    def step(value):
        return watch._phase.name, value

    @watched("step")
    async def later(value):
        await asyncio.sleep(0)
        return watch._phase.name, value

    assert step(1) == ("step", 1)
    assert asyncio.run(later(2)) == ("step", 2)
    assert step.__name__ == "step"


def test_without_a_watchdog_nothing_is_watched(process):
    assert watchdog._active is None
    with phase("save"):
        assert remaining_s(7.0) == 7.0
    process.watch(save=1.0).close()


def test_a_wait_ends_before_the_watchdog(running):
    running(save=100.0, load=15.0)
    assert remaining_s(7.0) == 7.0  # outside of phases
    with phase("save"):
        assert 30 < remaining_s(7.0) <= 98
    with phase("load"):
        assert 0 < remaining_s(7.0) <= 13.5


def test_the_failure_of_another_rank_ends_a_process_that_does_not_end_by_itself(process, monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_S", 0.1)
    watch = Watchdog({"step": 0.5}, find_failure=lambda: ("rank 0 failed: no disk", 78), end=process.end, out=process.out)
    watch.start()
    assert process.ended.wait(timeout=60)
    watch.close()
    assert process.code == 78
    assert re.search(r"rank 0 failed: no disk\. .*0\.1 s", process.printed())
    assert "the exit status is 78" in process.printed()


def test_the_last_phase_ends_a_process_that_never_leaves_it(process, running):
    running(ending=0.05).enter_last("ending")
    assert process.ended.wait(timeout=60)
    assert process.code == 75
    assert "the phase ending has taken" in process.printed()


def test_a_deadline_must_be_positive():
    with pytest.raises(ConfigError, match=r"deadline of save .*\(0\) must be above 0"):
        Watchdog({"save": 0})
