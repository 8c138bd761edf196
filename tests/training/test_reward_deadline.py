"""Plain reward functions with a deadline: what a hung one costs, and when it ends the run."""

import logging
import re
import threading
import time

import pytest
from reward_scoring import rollout, score

from ludic.errors import ConfigError, GradingError
from ludic.training.reward_functions import RewardDeadlineExceeded, RewardFunctions, RewardsHung, ThreadedCalls, report_slow_call

LONG_S = 60.0


@pytest.fixture
def release():
    """Set at the end of the test, so that hung threads end."""
    event = threading.Event()
    yield event
    event.set()


def hangs_on(word, release):
    def judge(completions):
        if word in completions:
            release.wait(LONG_S)
        return [float(len(text)) for text in completions]

    return judge


def test_a_hung_call_fails_its_group_alone(release):
    began = time.monotonic()
    judge = hangs_on("bad", release)
    rewards, errors = score(judge, rollout("a", 1), rollout("bad", 2), rollout("bb", 2), rollout("ccc", 3), plain_timeout_s=3.0)
    assert time.monotonic() - began < LONG_S / 2
    assert rewards == [1.0, 0.0, 0.0, 3.0]
    assert [error is None for error in errors] == [True, False, False, True]
    assert isinstance(errors[1], GradingError)
    assert re.search(r"reward function judge .*3 s \(reward_timeout_s\); .*goes on", str(errors[1]))


def test_without_a_deadline_a_plain_function_runs_in_this_thread_and_with_one_in_its_own():
    threads = []

    def judge(completions):
        threads.append(threading.current_thread())
        return [0.0] * len(completions)

    score(judge, rollout("a"))
    score(judge, rollout("a"), plain_timeout_s=LONG_S)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
    assert threads[1].daemon  # the process can end without it


def test_an_error_in_a_thread_keeps_its_file_and_line():
    def judge(completions):
        raise KeyError("bad")

    _, (error,) = score(judge, rollout("a"), plain_timeout_s=LONG_S)
    line = judge.__code__.co_firstlineno + 1
    assert re.search(rf"judge failed: KeyError: 'bad' \({re.escape(__file__)}:{line}, in judge\)$", str(error))

    def gives_up(completions):
        raise TimeoutError("the judge is away")

    _, (error,) = score(gives_up, rollout("a"), plain_timeout_s=LONG_S)
    assert "TimeoutError: the judge is away" in str(error)  # its own, not that of the deadline


async def test_too_many_hung_calls_end_the_run(release):
    scorer = RewardFunctions(hangs_on("bad", release), plain_timeout_s=0.05, max_hung=2)
    for _ in range(2):
        errors = await scorer.score([rollout("bad")])
        assert [type(error) for error in errors.values()] == [GradingError]
    with pytest.raises(RewardsHung, match=r"3 calls .*0\.05 s .*judge; .*at most 2"):
        await scorer.score([rollout("bad")])


async def test_a_call_that_ends_late_is_not_counted_any_more(release):
    calls = ThreadedCalls(max_hung=1)
    with pytest.raises(RewardDeadlineExceeded):
        await calls.call("slow", lambda: release.wait(LONG_S), 0.05)
    assert calls.hung == 1
    release.set()
    waited_until = time.monotonic() + LONG_S
    while calls.hung and time.monotonic() < waited_until:
        time.sleep(0.01)
    assert calls.hung == 0
    assert await calls.call("fast", lambda: 3, LONG_S) == 3


def test_a_late_call_logs_nothing(release):
    done = threading.Event()

    def judge(completions, log_metric):
        release.wait(LONG_S)
        log_metric("late", 1.0)
        done.set()
        return [1.0]

    played = rollout("a")
    score(judge, played, plain_timeout_s=0.05)
    release.set()
    assert done.wait(LONG_S)
    assert "reward_log" not in played.steps[-1].info


def test_a_coroutine_that_a_plain_function_returns_is_awaited():
    async def judge(completions):
        return [2.0] * len(completions)

    rewards, _ = score(lambda completions: judge(completions), rollout("a"), plain_timeout_s=LONG_S)
    assert rewards == [2.0]


def test_a_slow_call_without_a_deadline_is_reported_once_with_its_line(caplog):
    reported: set[str] = set()
    release = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record):
            release.set()

    handler = Seen()
    logging.getLogger("ludic.training.reward_functions").addHandler(handler)
    try:
        with report_slow_call("judge", reported, after_s=0.01):
            assert release.wait(LONG_S)
        with report_slow_call("judge", reported, after_s=0.01):
            time.sleep(0.1)
    finally:
        logging.getLogger("ludic.training.reward_functions").removeHandler(handler)
    [record] = [record for record in caplog.records if "judge" in record.getMessage()]
    assert "has been running for 0.01 s" in record.getMessage()
    assert "set reward_timeout_s to give it a deadline" in record.getMessage()


@pytest.mark.parametrize("name", ["timeout_s", "plain_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_deadline_is_above_zero(name, seconds):
    with pytest.raises(ConfigError, match=rf"^{name} "):
        RewardFunctions(lambda completions: [0.0], **{name: seconds})
