"""Ranks as threads that meet at a real store."""

import asyncio
import json
import re
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from ludic.errors import RankError, RequestsExhausted
from ludic.training.ranks.liveness import name_ranks
from ludic.training.ranks.rendezvous import Failure, Rendezvous

PATIENCE_S = 600.0


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def meetings(store, world_size):
    """A meeting for each rank, with connections of their own."""
    return [Rendezvous(store.clone(), rank, world_size, exit_code=lambda error: 78) for rank in range(world_size)]


def on_ranks(ranks, work):
    """Call `work` with each meeting, in threads. Returns results or errors, by rank."""
    results = [None] * len(ranks)

    def run(number, meeting):
        try:
            results[number] = work(meeting)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S / 5)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_ranks_come_and_those_that_do_not_are_named(store):
    assert on_ranks(meetings(store, 3), lambda meeting: meeting.gather(PATIENCE_S)) == [None] * 3
    late = HashStore()
    for rank in (0, 2):
        with pytest.raises(RankError, match=r"rank(s 1, 2| 1) of 3 .*within 0.01 s"):
            Rendezvous(late, rank, 3).gather(0.01)


def test_an_error_of_one_rank_is_raised_on_all(store):
    ranks = meetings(store, 3)

    def work(meeting):
        with meeting.agree("saving", PATIENCE_S):
            if meeting.rank == 1:
                raise OSError("the disk is full")

    first, own, third = on_ranks(ranks, work)
    assert isinstance(own, OSError)
    for error in (first, third):
        assert isinstance(error, RankError)
        assert str(error).startswith("saving failed on rank 1 of 3, on ")
        assert str(error).endswith("OSError: the disk is full")
    assert on_ranks(ranks, lambda meeting: meeting.agree("saving again", PATIENCE_S).__enter__()) == [None] * 3


def test_a_rank_that_does_not_come_to_an_agreement_is_named_at_the_deadline(store):
    ranks = meetings(store, 3)

    def work(meeting):
        if meeting.rank != 1:
            with meeting.agree("saving", 0.2):
                pass

    errors = on_ranks(ranks, work)
    for rank in (0, 2):
        assert re.search(rf"saving: rank {rank} .*0\.2 s .*rank 1 of 3", str(errors[rank]))


def test_a_failure_ends_the_waits_of_others_at_once(store):
    ranks = meetings(store, 2)

    def work(meeting):
        if meeting.rank == 1:
            meeting.report_failure(meeting.describe(ValueError("no reward")))
            return
        with meeting.agree("saving", PATIENCE_S):
            pass

    error, _ = on_ranks(ranks, work)  # long before the deadline of the agreement
    assert isinstance(error, RankError)
    assert error.exit_code == 78
    assert "failed on rank 1 of 2" in str(error)
    assert str(error).endswith("ValueError: no reward")
    assert ranks[1].find_failure() is None  # its own


def test_what_rank_0_says_reaches_all_and_so_does_its_error(store):
    ranks = meetings(store, 3)

    def ask(meeting, question):
        with meeting.rank_0_alone("measuring", PATIENCE_S) as shared:
            if meeting.rank == 0:
                shared.append(question())
        return shared

    assert on_ranks(ranks, lambda meeting: ask(meeting, lambda: {"reward": 0.5})) == [[{"reward": 0.5}]] * 3
    own, *others = on_ranks(ranks, lambda meeting: ask(meeting, lambda: 1 / 0))
    assert isinstance(own, ZeroDivisionError)
    assert all(str(error).startswith("measuring failed on rank 0 of 3") for error in others)
    assert on_ranks(ranks, lambda meeting: ask(meeting, lambda: None)) == [[None]] * 3


def test_a_rank_that_works_too_long_is_not_waited_for(store):
    waiting = meetings(store, 2)[1]
    with pytest.raises(RankError, match=r"measuring: rank 1 .*0.1 s .*rank 0"), waiting.rank_0_alone("measuring", 0.1):
        pass


def test_ranks_that_do_different_things_notice(store):
    def work(meeting):
        with meeting.agree("saving" if meeting.rank else "loading", PATIENCE_S):
            pass

    _, second = on_ranks(meetings(store, 2), work)
    assert re.search("rank 0 .*at 'loading', rank 1 .*'saving'", str(second))


def test_a_rank_that_fails_keeps_its_own_error_where_another_is_elsewhere(store):
    def work(meeting):
        with meeting.agree("saving" if meeting.rank else "loading", PATIENCE_S):
            if meeting.rank:
                raise OSError("no such folder")

    first, second = on_ranks(meetings(store, 2), work)
    assert str(first).startswith("loading failed on rank 1 of 2")
    assert (type(second), str(second)) == (OSError, "no such folder")


def test_keys_of_old_agreements_are_deleted(store):
    ranks = meetings(store, 2)

    def work(meeting):
        for _ in range(20):
            with meeting.agree("saving", PATIENCE_S):
                pass
            with meeting.rank_0_alone("asking", PATIENCE_S) as shared:
                shared.append(1)

    before = store.num_keys()
    assert on_ranks(ranks, work) == [None, None]
    assert store.num_keys() - before < 15


def test_a_stop_reaches_all_ranks_and_the_first_signal_stays(store):
    first, second = meetings(store, 2)
    assert second.requested_stop() is None
    first.request_stop(15)
    second.request_stop(2)
    assert [meeting.requested_stop() for meeting in (first, second)] == [15, 15]


def test_ranks_that_lost_each_other_find_who_is_silent(store):
    ranks = meetings(store, 4)
    silent = on_ranks(ranks, lambda meeting: meeting.find_silent() if meeting.rank != 2 else None)
    assert silent == [[2], [2], None, [2]]
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([2, 5]) == "ranks 2, 5"


def test_a_store_that_ended_is_named():
    served = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    meeting = Rendezvous(TCPStore("127.0.0.1", served.port, timeout=timedelta(seconds=10), wait_for_workers=False), 1, 2)
    del served
    with pytest.raises(RankError, match="the store of the ranks is gone"):
        meeting.gather(PATIENCE_S)


def test_a_failure_travels_as_json():
    failure = Rendezvous(HashStore(), 3, 4).describe(KeyError("reward"))
    assert Failure(**json.loads(json.dumps(vars(failure)))) == failure
    assert (failure.rank, failure.text, failure.exit_code) == (3, "KeyError: 'reward'", 75)


def read(meeting, topic, kind="batch", patience_s=PATIENCE_S, **settings):
    return asyncio.run(meeting.read(topic, kind, patience_s, **settings))


def test_messages_of_rank_0_are_read_in_their_order_by_all_and_then_removed(store):
    ranks = meetings(store, 3)
    topics = [[meeting.open_topic() for _ in range(2)] for meeting in ranks]
    assert topics[0] == topics[1] == topics[2]
    [first, second] = topics[0]
    before = store.num_keys()
    for number in range(3):
        ranks[0].post(first, "batch", sizes=[number])
    ranks[0].post(second, "batch", sizes=[9])

    def work(meeting):
        return [read(meeting, topic)["sizes"] for topic in (first, second, first, first)]

    assert on_ranks(ranks[1:], work) == [[[0], [9], [1], [2]]] * 2
    assert store.num_keys() == before


def test_a_message_may_come_late_and_what_is_called_meanwhile_may_raise(store):
    [first, second] = meetings(store, 2)
    topic = {meeting.open_topic() for meeting in (first, second)}.pop()
    looks = []

    def post():
        looks.append(1)
        if len(looks) == 3:
            first.post(topic, "batch")

    assert read(second, topic, while_waiting=post) == {"kind": "batch"}
    assert len(looks) == 3

    def stop():
        raise KeyError("enough")

    with pytest.raises(KeyError):
        read(second, topic, while_waiting=stop)


def test_errors_other_kinds_failures_and_silence_end_a_wait_for_a_message(store):
    [first, second] = meetings(store, 2)
    topic = {meeting.open_topic() for meeting in (first, second)}.pop()
    first.post_error(topic, RequestsExhausted("none left"))
    with pytest.raises(RequestsExhausted, match="none left"):
        read(second, topic)
    first.post(topic, "finished")
    with pytest.raises(RankError, match="is at batch and rank 0 at finished"):
        read(second, topic)
    with pytest.raises(RankError, match=r"rank 0 \(batch 2\), .*raise patience_s \(0.01 s\)"):
        read(second, topic, patience_s=0.01)
    first.report_failure(first.describe(ValueError("no reward")))
    with pytest.raises(RankError, match="failed on rank 0 of 2"):
        read(second, topic)
