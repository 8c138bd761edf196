"""Episodes that fail in every way: they are counted, their groups are left out, the others are
played, and nothing leaks."""

import asyncio
import json

import pytest
from hypothesis import given, strategies as st
from jumping_loop import play_jumping
from playing import FOR_RL, Counting, ScriptedClient, play, protocol

from ludic.errors import ConfigError, RolloutError
from ludic.training import (
    ConstantCredit,
    EnvSpec,
    GroupNormalizedReturn,
    GRPORequestStrategy,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
)
from ludic.types import Rollout, Step


class Forever(Counting):
    """An asynchronous environment whose step never returns."""

    async def env_step(self, action):
        await asyncio.Event().wait()


class Cancelled(Counting):
    """Awaits something that somebody else cancels, such as a closed pool."""

    async def env_step(self, action):
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost


class ExitsInStep(Counting):
    """Calls sys.exit, like scripts that were not written as libraries."""

    async def env_step(self, action):
        raise SystemExit("usage: env [-h]")


class ExitsInReset(Counting):
    def env_reset(self, *, seed=None):
        raise SystemExit(2)


class ExitsInClose(Counting):
    async def close(self):
        raise SystemExit(3)


class ErrorWithoutMessage(Counting):
    def env_step(self, action):
        class NoMessageError(Exception):
            def __str__(self):
                raise OSError("no message")

        raise NoMessageError


class NoInfo:
    """A protocol whose steps have no info."""

    async def run(self, **_):
        return [Rollout(steps=[Step(0, "o", "a", None, 1.0, False, True, info=None)])]


class NoTrace:
    """A protocol that plays but does not report the sampled tokens."""

    async def run(self, **_):
        return [Rollout(steps=[Step(0, "o", "a", None, 1.0, False, True)])]


class SameNumbers:
    async def run(self, **_):
        return [Rollout(steps=[Step(0, "o", "a", "o", 1.0, False, False), Step(0, "o", "a", None, 1.0, False, True)])]


class Garbage(Counting):
    def env_step(self, action):
        return "correct!"


class NoObservation(Counting):
    def env_reset(self, *, seed=None):
        return None


class ClosesAsynchronously(Counting):
    async def close(self):
        await asyncio.sleep(0)
        self.closed = True


class CannotClose(Counting):
    def close(self):
        raise OSError("still busy")


def raising_factory():
    raise OSError("no room for an environment")


def exiting_factory():
    raise SystemExit("no licence")


class ReturnsNothing:
    """A protocol that does not return a list of rollouts."""

    async def run(self, **_):
        return None


ENVS = {
    "count": Counting,
    "forever": Forever,
    "cancelled": Cancelled,
    "garbage": Garbage,
    "no_observation": NoObservation,
    "unmade": raising_factory,
    "exits": ExitsInStep,
    "exits_at_once": ExitsInReset,
    "exits_at_its_end": ExitsInClose,
    "exits_instead": exiting_factory,
    "unshowable": ErrorWithoutMessage,
    "async_close": ClosesAsynchronously,
    "cannot_close": CannotClose,
}


def engine(**settings):
    protocols = {
        "single": lambda: protocol(ScriptedClient("ab")),
        "nothing": ReturnsNothing,
        "no_info": NoInfo,
        "no_trace": NoTrace,
        "same_numbers": SameNumbers,
    }
    return RolloutEngine(env_registry=ENVS, protocol_registry=protocols, **settings)


def request(env="count", played_by="single", group=None):
    return RolloutRequest(
        EnvSpec(env), ProtocolSpec(played_by), inference=FOR_RL, meta={} if group is None else {"group_id": group}
    )


def counts(batch):
    return tuple(batch.meta[f"num_{name}"] for name in ("episodes", "retried_episodes", "failed_episodes", "dropped_groups"))


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (request("garbage"), "AttributeError"),
        (request("no_observation"), "TypeError"),
        (request("unmade"), "OSError: no room for an environment"),
        (request("cancelled"), r"RolloutError: .*episode \d \(cancelled\) .*was cancelled"),
        (request("forever"), "TimeoutError"),
        (request(played_by="nothing"), "TypeError"),
        (request("exits"), r"RolloutError: episode \d \(exits\) .*SystemExit: usage: env"),
        (request("exits_at_once"), "raised SystemExit: 2"),
        (request("exits_instead"), "raised SystemExit: no licence"),
        (request("unshowable"), "NoMessageError, whose message cannot be shown"),
        (request(played_by="no_info"), "GarbageError: .*info of step 0 .*NoneType; .*dict"),
        (request(played_by="same_numbers"), r"GarbageError: .*steps .*indices \[0, 0\]"),
    ],
)
def test_a_failing_episode_is_counted_and_the_others_are_played(broken, cause):
    Counting.made.clear()
    eng = engine(episode_timeout_s=0.05)
    batch = play_jumping(eng.generate_batch([request(), broken, request()], credit_assigner=ConstantCredit()))
    assert counts(batch) == (3, 1, 1, 1)
    assert [item.meta["episode_idx"] for item in batch.items] == [0, 2]
    assert all(env.closed for env in Counting.made)
    with pytest.raises(RolloutError, match=cause):
        play_jumping(eng.generate_rollouts([broken], 1))


def test_an_episode_without_tokens_is_left_out_of_the_batch_and_not_retried():
    batch = play(engine().generate_batch([request(), request(played_by="no_trace")], credit_assigner=ConstantCredit()))
    assert counts(batch) == (2, 0, 1, 1)
    assert [item.meta["episode_idx"] for item in batch.items] == [0]
    with pytest.raises(ValueError, match="Missing rollout-time token trace"):
        play(engine().generate_batch([request(played_by="no_trace")], credit_assigner=ConstantCredit()))
    assert len(play(engine().generate_rollouts([request(played_by="no_trace")], 1))) == 1  # rollouts that are not for training


def test_an_exit_in_close_does_not_discard_the_episode(caplog):
    batch = play(engine().generate_batch([request("exits_at_its_end")], credit_assigner=ConstantCredit()))
    assert counts(batch) == (1, 0, 0, 0)
    assert "ExitsInClose.close() raised SystemExit: 3" in caplog.text


def test_an_interrupt_in_an_environment_ends_the_run():
    class Interrupted(Counting):
        def env_step(self, action):
            raise KeyboardInterrupt

    eng = RolloutEngine(
        env_registry={"interrupted": Interrupted}, protocol_registry={"single": lambda: protocol(ScriptedClient("ab"))}
    )
    with pytest.raises(KeyboardInterrupt):
        play(eng.generate_rollouts([request("interrupted")], 1))


def test_an_episode_without_a_time_limit_is_not_cut_off():
    with pytest.raises(TimeoutError):
        play_jumping(asyncio.wait_for(engine().generate_rollouts([request("forever")], 1), 1e6))
    with pytest.raises(ConfigError, match="episode_timeout_s"):
        engine(episode_timeout_s=0)


def test_the_time_limit_of_an_episode_starts_when_it_is_played():
    """The second episode starts after the first has used up a whole time limit."""
    eng = engine(episode_timeout_s=0.05, max_retries=0)
    batch = play_jumping(eng.generate_batch([request("forever"), request()], credit_assigner=ConstantCredit(), concurrency=1))
    assert counts(batch) == (2, 0, 1, 1)


def test_close_may_be_a_coroutine_and_its_failure_does_not_discard_the_episode(caplog):
    Counting.made.clear()
    batch = play(engine().generate_batch([request("async_close"), request("cannot_close")], credit_assigner=ConstantCredit()))
    assert counts(batch) == (2, 0, 0, 0)
    assert Counting.made[0].closed
    assert "CannotClose.close() failed" in caplog.text


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_a_batch_has_exactly_the_groups_in_which_nothing_failed(members):
    """`members`: (group, whether it fails)."""
    requests = [request("garbage" if fails else "count", group=group) for group, fails in members]
    lost = {group for group, fails in members if fails}
    left = [position for position, (group, _) in enumerate(members) if group not in lost]
    eng = engine(max_retries=0, cancel_siblings=False)
    if not left:
        with pytest.raises(RolloutError, match="no complete group is left"):
            play(eng.generate_batch(requests, credit_assigner=ConstantCredit()))
        return
    batch = play(eng.generate_batch(requests, credit_assigner=ConstantCredit(), concurrency=3))
    assert counts(batch) == (len(members), 0, sum(fails for _, fails in members), len(lost))
    assert [item.meta["episode_idx"] for item in batch.items] == left


def test_credit_is_computed_on_whole_groups_when_an_episode_is_lost_without_an_error():
    """If a lost episode were not treated as failed, three of four members would be left, which this
    assigner refuses."""
    groups = [*GRPORequestStrategy(4).expand([request()]), *GRPORequestStrategy(4).expand([request()])]
    groups[6] = RolloutRequest(EnvSpec("cancelled"), groups[6].protocol, inference=FOR_RL, meta=groups[6].meta)
    batch = play(engine().generate_batch(groups, credit_assigner=GroupNormalizedReturn(4)))
    assert (len(batch.items), counts(batch)) == (4, (8, 1, 1, 1))


def test_only_rollouts_that_are_used_are_written(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    eng = engine(jsonl_path=path)
    play(eng.generate_rollouts([request(), request(group="g"), request("garbage", group="g")], 1))
    assert [json.loads(line)["meta"]["episode_idx"] for line in path.read_text().splitlines()] == [0]
    with pytest.raises(RolloutError):
        play(eng.generate_rollouts([request("garbage")], 1))
    assert len(path.read_text().splitlines()) == 1


def test_failed_episodes_are_retried_max_retries_times(caplog):
    Counting.made.clear()
    with pytest.raises(RolloutError):
        play(engine(max_retries=3).generate_rollouts([request("garbage")], 1))
    assert len(Counting.made) == 4
    assert "failed 4 times" in caplog.text
    with pytest.raises(ConfigError, match="max_retries"):
        engine(max_retries=-1)


def test_many_failures_are_logged_in_a_few_lines(caplog):
    play(engine(max_retries=0).generate_rollouts([request(), *[request("garbage") for _ in range(10)]], 1))
    assert len(caplog.records) == 4
    assert "7 more episodes failed" in caplog.text
