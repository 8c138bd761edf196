"""A thousand episodes of which three in ten fail: the run completes, every failure is counted once,
and nothing leaks."""

import asyncio
import logging
import os
import random
import subprocess
import weakref
from collections import Counter
from contextlib import suppress
from typing import ClassVar

import pytest
from hypothesis import given, strategies as st
from jumping_loop import play_jumping
from playing import FOR_RL, Counting, ScriptedClient, protocol

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.errors import RolloutError
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import ConstantCredit, EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import ChatResponse, StepOutcome

EPISODES = 1000
BY_ENVIRONMENT = {  # environment fault -> the error that is counted
    "raises": "OSError",
    "hangs": "TimeoutError",
    "text": "AttributeError",
    "nothing": "AttributeError",
    "nan": "GarbageError",
    "infinite": "GarbageError",
    "spelled": "TypeError",
    "no_text": "RolloutError",
    "exits": "RolloutError",
    "swallows": "TimeoutError",
}
BY_CLIENT = {
    "client_raises": "OSError",
    "client_hangs": "TimeoutError",
    "client_nothing": "TypeError",
    "client_tokens": "DataTypeError",
    "client_logprobs": "GarbageError",
}
FAULTS = {**BY_ENVIRONMENT, **BY_CLIENT}


class FaultyEnv(SingleAgentEnv):
    """Holds an open file and, if requested, a child process. Fails as `fault` says. Its observation
    tells the client what to do."""

    alive: ClassVar = weakref.WeakSet()
    processes: ClassVar[list] = []

    def __init__(self, fault, with_process=False):
        super().__init__()
        self.fault = fault
        self.file = open(os.devnull)  # noqa: SIM115
        self.process = subprocess.Popen(["sleep", "600"]) if with_process else None
        FaultyEnv.alive.add(self)
        FaultyEnv.processes += [self.process] if self.process else []

    def env_reset(self, *, seed=None):
        return (None if self.fault == "no_text" else self.fault), {}

    async def env_step(self, action):
        await asyncio.sleep(0)
        if self.fault == "raises":
            raise OSError("the disk is gone")
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "exits":
            raise SystemExit(1)
        while self.fault == "swallows":
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if self.fault in ("text", "nothing"):
            return {"text": "correct!", "nothing": None}[self.fault]
        reward = {"nan": float("nan"), "infinite": float("inf"), "spelled": "1.0"}.get(self.fault, 1.0)
        return StepOutcome("done", reward, False, True)

    def env_current_obs(self):
        return self.fault

    async def close(self):
        await asyncio.sleep(0.01)
        self.file.close()
        if self.process:
            self.process.kill()
            self.process.wait()


class FaultyClient(ScriptedClient):
    async def complete(self, request):
        fault = request.messages[-1]["content"]
        if fault == "client_raises":
            raise OSError("connection reset")
        if fault == "client_hangs":
            await asyncio.Event().wait()
        response, info = await super().complete(request)
        self.requests.clear()
        if fault == "client_nothing":
            return None
        if fault == "client_tokens":
            response.completion_token_ids = ["a", "b"]
        if fault == "client_logprobs":
            response.completion_logprobs = [float("nan")] * 2
        return response, info


def engine(**settings):
    return RolloutEngine(
        env_registry={"burning": FaultyEnv},
        protocol_registry={"single": lambda: protocol(FaultyClient("ab"))},
        **{"episode_timeout_s": 60.0, "max_retries": 0, **settings},
    )


def request(fault, group=None, **kwargs):
    meta = {"fault": fault, **({} if group is None else {"group_id": group})}
    return RolloutRequest(EnvSpec("burning", {"fault": fault, **kwargs}), ProtocolSpec("single"), inference=FOR_RL, meta=meta)


def faults_of(count, share, seed):
    rng = random.Random(seed)
    return [rng.choice(list(FAULTS)) if rng.random() < share else "none" for _ in range(count)]


async def run_and_list_tasks(work):
    """The result, and the tasks that are still running."""
    result = await work
    return result, asyncio.all_tasks() - {asyncio.current_task()}


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def without_logging(caplog):
    """Logging is off, because a log record keeps its exception and that keeps its frames alive."""
    caplog.set_level(logging.CRITICAL)
    FaultyEnv.processes.clear()
    FaultyEnv.alive.clear()
    return FaultyEnv


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where the system lists them")
@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_thousand_faulty_episodes_are_counted_and_leak_nothing(without_logging, max_retries):
    faults = faults_of(EPISODES, 0.3, seed=7)
    requests = [request(fault, with_process=i % 50 == 0) for i, fault in enumerate(faults)]
    before = open_files()
    eng = engine(max_retries=max_retries)
    played, tasks = play_jumping(run_and_list_tasks(eng.generate_rollouts(requests, 1, concurrency=64)))

    broken = [i for i, fault in enumerate(faults) if fault != "none"]
    assert 250 < len(broken) < 350
    assert [rollout.meta["episode_idx"] for rollout in played] == [i for i, fault in enumerate(faults) if fault == "none"]
    assert played.counts.num_episodes == EPISODES
    assert played.counts.num_failed_episodes == played.counts.num_dropped_groups == len(broken)
    assert played.counts.num_cancelled_episodes == 0
    assert played.counts.num_retried_episodes == (len(broken) if max_retries else 0)
    assert [failure.episode_idx for failure in played.failures] == broken
    assert {failure.attempts for failure in played.failures} == {1 + max_retries}
    assert Counter((f.meta["fault"], f.error.split(":")[0]) for f in played.failures) == Counter(
        (fault, FAULTS[fault]) for fault in faults if fault != "none"
    )

    assert tasks == set()
    assert open_files() == before
    assert len(without_logging.processes) >= EPISODES // 50
    assert all(process.returncode is not None for process in without_logging.processes)
    assert len(without_logging.alive) == 0  # freed without the garbage collector: no cycle through an exception's frames


def test_a_batch_has_the_remaining_episodes():
    faults = faults_of(100, 0.3, seed=8)
    batch = play_jumping(engine().generate_batch([request(fault) for fault in faults], credit_assigner=ConstantCredit()))
    assert len(batch.items) == faults.count("none")
    assert batch.meta["num_failed_episodes"] == 100 - faults.count("none")
    assert batch.meta["avg_total_reward"] == 1.0  # failures are not rewards of zero


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["none", "none", *FAULTS])), min_size=1, max_size=24))
def test_siblings_of_a_failed_episode_are_cancelled_and_every_episode_is_counted(members):
    """`members`: (group, fault)."""
    lost = {group for group, fault in members if fault != "none"}
    left = [i for i, (group, _) in enumerate(members) if group not in lost]
    requests = [request(fault, group=group) for group, fault in members]
    if not left:
        with pytest.raises(RolloutError, match="no complete group is left"):
            play_jumping(engine().generate_rollouts(requests, 1))
        return
    played, tasks = play_jumping(run_and_list_tasks(engine().generate_rollouts(requests, 1, concurrency=3)))
    counts = played.counts
    assert [rollout.meta["episode_idx"] for rollout in played] == left
    assert counts.num_dropped_groups == len(lost) <= counts.num_failed_episodes
    assert {f.meta["group_id"] for f in played.failures} == lost
    assert all(f.meta["fault"] != "none" for f in played.failures)
    assert counts.num_failed_episodes + counts.num_cancelled_episodes <= len(members) - len(left)
    assert tasks == set()


def test_a_hanging_sibling_without_a_time_limit_is_cancelled_and_closed(without_logging):
    """Without a time limit the engine would otherwise wait forever."""
    requests = [request("hangs", group="g"), request("hangs", group="g"), request("raises", group="g"), request("none")]
    eng = engine(episode_timeout_s=None)
    played, tasks = play_jumping(run_and_list_tasks(eng.generate_rollouts(requests, 1, concurrency=4)))
    assert (len(played), played.counts.num_failed_episodes, played.counts.num_cancelled_episodes) == (1, 1, 2)
    assert tasks == set()
    assert len(without_logging.alive) == 0


class SlowToClose(Counting):
    """Is slow to close."""

    def __init__(self, step_s=0.0, close_s=5.0):
        super().__init__()
        self.step_s, self.close_s = step_s, close_s

    async def env_step(self, action):
        await asyncio.sleep(self.step_s)
        return super().env_step(action)

    async def close(self):
        await asyncio.sleep(self.close_s)
        self.closed = True


class SwallowsCancellation(Counting):
    """Converts a cancellation to an ordinary error, like code with a broad `except`."""

    async def env_step(self, action):
        try:
            await asyncio.Event().wait()
        except BaseException:
            raise OSError("interrupted") from None


def engine_of(envs, **settings):
    return RolloutEngine(env_registry=envs, protocol_registry={"single": lambda: protocol(ScriptedClient("ab"))}, **settings)


def request_for(env, group=None, **kwargs):
    meta = {} if group is None else {"group_id": group}
    return RolloutRequest(EnvSpec(env, kwargs), ProtocolSpec("single"), inference=FOR_RL, meta=meta)


def test_closing_does_not_count_towards_the_time_limit_and_is_not_interrupted():
    Counting.made.clear()
    eng = engine_of({"slow": SlowToClose}, episode_timeout_s=1.0, max_retries=0)
    played = play_jumping(eng.generate_rollouts([request_for("slow", close_s=9.0), request_for("slow", step_s=2.0)], 1))
    assert (len(played), played.counts.num_failed_episodes) == (1, 1)
    assert [env.closed for env in Counting.made] == [True, True]


def test_a_cancelled_sibling_finishes_closing():
    Counting.made.clear()
    eng = engine_of({"slow": SlowToClose, "never": SwallowsCancellation}, episode_timeout_s=1.0, max_retries=0)
    requests = [request_for("slow", group="g", close_s=9.0), request_for("never", group="g"), request_for("slow")]
    played, tasks = play_jumping(run_and_list_tasks(eng.generate_rollouts(requests, 1)))
    assert (len(played), played.counts.num_failed_episodes, played.counts.num_cancelled_episodes) == (1, 1, 1)
    assert all(env.closed for env in Counting.made)
    assert tasks == set()


def test_closing_has_its_own_deadline():
    eng = engine_of({"slow": SlowToClose}, max_retries=0)
    assert len(play_jumping(eng.generate_rollouts([request_for("slow", close_s=1e9)], 1))) == 1


def test_cancelling_the_engine_ends_episodes_that_swallow_the_cancellation():
    Counting.made.clear()

    async def scenario():
        eng = engine_of({"stubborn": SwallowsCancellation}, max_retries=5)
        requests = [request_for("stubborn") for _ in range(5)]
        task = asyncio.create_task(eng.generate_rollouts(requests, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert play_jumping(scenario()) == set()
    assert len(Counting.made) == 5  # none was retried
    assert all(env.closed for env in Counting.made)


@pytest.mark.parametrize("returned", ["text", None, [None], ["a rollout"], 3])
def test_a_protocol_that_returns_no_rollouts_counts_as_failed(returned):
    class Garbage:
        async def run(self, **_):
            return returned

    eng = RolloutEngine(env_registry={"count": Counting}, protocol_registry={"single": Garbage}, max_retries=0)
    with pytest.raises(RolloutError, match="GarbageError: the protocol returned"):
        play_jumping(eng.generate_rollouts([request_for("count")], 1))


def test_if_every_reward_is_not_finite_the_engine_raises_a_value_error():
    with pytest.raises(ValueError, match=r"reward of step 0 is nan; .*finite"):
        play_jumping(engine().generate_batch([request("nan")], credit_assigner=ConstantCredit()))


def test_a_response_without_text_counts_as_failed():
    class Numbers:
        async def complete(self, request):
            return ChatResponse(text=5), {}

    agent = Agent(client=Numbers(), model="m", ctx=FullDialog(), parser=lambda text: ParseResult("a", 0.0, None))
    eng = RolloutEngine(
        env_registry={"count": Counting}, protocol_registry={"single": lambda: SingleAgentProtocol(agent)}, max_retries=0
    )
    with pytest.raises(RolloutError, match=r"step 0 is of type int; .*text"):
        play_jumping(eng.generate_rollouts([request_for("count")], 1))


def test_the_end_of_every_episode_is_reported_however_it_ended():
    ended = []
    requests = [request("none"), request("raises", group="g"), request("hangs", group="g"), request("nan"), request("none")]
    played = play_jumping(engine(on_episode=lambda: ended.append(1)).generate_rollouts(requests, 1))
    assert (len(ended), played.counts.num_episodes) == (5, 5)
