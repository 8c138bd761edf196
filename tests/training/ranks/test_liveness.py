"""Ranks that were killed, seen from one that waits for them. Rank 0 is a process of its own."""

import asyncio
import os
import re
import signal
import subprocess
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from ludic.errors import RankError
from ludic.training.ranks import liveness
from ludic.training.ranks.liveness import QUIET_S, Liveness, find_begin, find_machine, has_ended
from ludic.training.ranks.rank_store import RankStore
from ludic.training.ranks.rendezvous import Rendezvous

FOREVER_S = 1e9
ENDED = "rank 0 of 2 ended without a word: killed"
on_linux = pytest.mark.skipif(find_machine() is None, reason="needs /proc")


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running
        running.kill()


def kill(process):
    """Nobody waits for it yet, as nobody may for a rank whose launcher is busy."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def join_as(process, store, rank, monkeypatch):
    """The meeting of a rank that is that process."""
    with monkeypatch.context() as patched:
        patched.setattr(liveness.os, "getpid", lambda: process.pid)
        meeting = Rendezvous(store.clone(), rank, 2)
        meeting.announce()
    return meeting


@pytest.fixture
def two(store, process, monkeypatch):
    """The process of rank 0, and the meetings of it and of rank 1, which looks at each chance."""
    monkeypatch.setattr(liveness, "LOOK_S", 0.0)
    waiting = Rendezvous(store.clone(), 1, 2)
    waiting.announce()
    yield process, join_as(process, store, 0, monkeypatch), waiting
    del store  # which serves the others


def wait_in_agreement(meeting):
    with meeting.agree("saving", FOREVER_S):
        pass


def wait_for_answer(meeting):
    with meeting.rank_0_alone("measuring", FOREVER_S):
        pass


def wait_for_message(meeting):
    asyncio.run(meeting.read(meeting.open_topic(), "batch", FOREVER_S))


@on_linux
def test_a_process_has_ended_though_nobody_has_waited_for_it(process):
    begin = find_begin(process.pid)
    assert not has_ended(process.pid, begin)
    assert has_ended(process.pid, begin - 1)  # another one had its id before
    kill(process)
    assert has_ended(process.pid, begin)
    process.wait()
    assert has_ended(process.pid, begin)


@on_linux
@pytest.mark.parametrize("wait", [wait_in_agreement, wait_for_answer, wait_for_message])
def test_each_wait_for_a_rank_that_was_killed_ends(wait, two):
    process, _, waiting = two
    assert waiting.describe_ended() is None
    kill(process)
    with pytest.raises(RankError, match=ENDED):
        wait(waiting)


@on_linux
def test_a_rank_that_was_killed_before_it_came_is_not_waited_for(two):
    process, _, waiting = two
    kill(process)
    with pytest.raises(RankError, match=ENDED):
        waiting.gather(FOREVER_S)


@on_linux
def test_what_a_rank_said_before_its_end_counts(two):
    process, killed, waiting = two
    with killed.rank_0_alone("measuring", FOREVER_S) as values:
        values.append(1)
    kill(process)
    with waiting.rank_0_alone("measuring", FOREVER_S) as shared:
        pass
    assert shared == [1]
    killed.report_failure(killed.describe(OSError("the disk is full")))
    with pytest.raises(RankError, match="the disk is full"):
        wait_in_agreement(waiting)


@on_linux
def test_a_rank_that_has_left_was_not_killed_and_one_that_was_need_not_leave(two):
    process, killed, waiting = two
    kill(process)
    waiting.wait_until_left(0, FOREVER_S)
    killed.leave()
    assert waiting.describe_ended() is None


@on_linux
def test_nothing_is_known_of_the_processes_of_another_machine(two, monkeypatch):
    process, _, _ = two
    kill(process)
    monkeypatch.setattr(liveness, "find_machine", lambda: "another")
    store = HashStore()
    elsewhere = Liveness(RankStore(store), 1, 2)
    elsewhere.announce()
    assert elsewhere.describe_ended() is None


def test_a_rank_that_gives_no_sign_is_lost_once_a_stop_was_asked_for():
    store = RankStore(HashStore())
    other, looking = Liveness(store, 1, 3), Liveness(store, 2, 3)
    other.give_sign()  # rank 0 never gives one: it has no watchdog
    assert looking.look(0.0, stopping=True) is None
    assert looking.look(QUIET_S + 1, stopping=False) is None
    assert looking.look(QUIET_S + 1.5, stopping=True) is None  # it looked less than a second ago
    assert re.search("^rank 1 of 3 .*sign of life .*10 s", looking.look(QUIET_S + 2, stopping=True))
    other.give_sign()
    assert looking.look(QUIET_S + 3, stopping=True) is None
    assert looking.look(2 * QUIET_S + 2, stopping=True) is None
    store.set(f"{liveness.LEFT}/1", "")
    assert looking.look(4 * QUIET_S, stopping=True) is None


@on_linux
def test_a_rank_whose_process_runs_here_needs_no_signs(process, monkeypatch):
    """It may be too busy for its watchdog. One elsewhere is lost without them."""
    store = RankStore(HashStore())
    here, elsewhere, looking = (Liveness(store, rank, 3) for rank in range(3))
    with monkeypatch.context() as patched:
        patched.setattr(liveness.os, "getpid", lambda: process.pid)
        here.announce()
    here.give_sign()
    elsewhere.give_sign()
    assert looking.look(0.0, stopping=True) is None
    assert looking.look(QUIET_S + 2, stopping=True).startswith("rank 1 of 3 gave no sign")
    kill(process)
    assert re.search("^rank 0 of 3 .*without a word", looking.look(QUIET_S + 4, stopping=True))


def test_a_wait_after_a_signal_ends_for_want_of_signs(store, monkeypatch):
    monkeypatch.setattr(liveness, "LOOK_S", 0.0)
    monkeypatch.setattr(liveness, "QUIET_S", 0.0)
    elsewhere, waiting = (Rendezvous(store.clone(), rank, 2) for rank in range(2))
    elsewhere.give_sign()
    waiting.request_stop(signal.SIGTERM)
    with pytest.raises(RankError, match=r"rank 0 of 2 .*sign of life"):
        wait_in_agreement(waiting)


def test_many_ranks_look_less_often():
    store = RankStore(HashStore())
    looking = Liveness(store, 0, 640)
    looks = []
    looking.describe_ended = lambda: looks.append(1)
    for second in range(101):
        looking.look(float(second), stopping=False)
    assert len(looks) == 11
