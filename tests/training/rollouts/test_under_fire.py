"""A thousand episodes of which three in ten go wrong: the run completes, every failure is
counted once, and nothing is left behind."""

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
BY_ENVIRONMENT = {  # what goes wrong in it, and the error that is counted
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


class Burning(SingleAgentEnv):
    """Holds an open file and, if asked, a process; goes wrong as `fault` says. The observation
    tells the client what it has to do."""

    alive: ClassVar = weakref.WeakSet()
    processes: ClassVar[list] = []

    def __init__(self, fault, with_process=False):
        super().__init__()
        self.fault = fault
        self.file = open(os.devnull)  # noqa: SIM115
        self.process = subprocess.Popen(["sleep", "600"]) if with_process else None
        Burning.alive.add(self)
        Burning.processes += [self.process] if self.process else []

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


class BurningClient(ScriptedClient):
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
        env_registry={"burning": Burning},
        protocol_registry={"single": lambda: protocol(BurningClient("ab"))},
        **{"episode_timeout_s": 60.0, "max_retries": 0, **settings},
    )


def request(fault, group=None, **kwargs):
    meta = {"fault": fault, **({} if group is None else {"group_id": group})}
    return RolloutRequest(EnvSpec("burning", {"fault": fault, **kwargs}), ProtocolSpec("single"), inference=FOR_RL, meta=meta)


def faults_of(count, share, seed):
    rng = random.Random(seed)
    return [rng.choice(list(FAULTS)) if rng.random() < share else "none" for _ in range(count)]


async def with_tasks_left(work):
    """What it gives, and the tasks that it leaves running."""
    result = await work
    return result, asyncio.all_tasks() - {asyncio.current_task()}


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def fire(caplog):
    """Nothing is logged: a log record keeps its error, and an error what it passed through."""
    caplog.set_level(logging.CRITICAL)
    Burning.processes.clear()
    Burning.alive.clear()
    return Burning


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where the system lists them")
@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_thousand_episodes_under_fire_complete_are_counted_and_leave_nothing(fire, max_retries):
    faults = faults_of(EPISODES, 0.3, seed=7)
    requests = [request(fault, with_process=i % 50 == 0) for i, fault in enumerate(faults)]
    before = open_files()
    eng = engine(max_retries=max_retries)
    played, tasks = play_jumping(with_tasks_left(eng.generate_rollouts(requests, 1, concurrency=64)))

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
    assert len(fire.processes) >= EPISODES // 50
    assert all(process.returncode is not None for process in fire.processes)
    assert len(fire.alive) == 0  # freed without the garbage collector: no circle through an error's frames


def test_a_batch_is_made_of_what_is_left():
    faults = faults_of(100, 0.3, seed=8)
    batch = play_jumping(engine().generate_batch([request(fault) for fault in faults], credit_assigner=ConstantCredit()))
    assert len(batch.items) == faults.count("none")
    assert batch.meta["num_failed_episodes"] == 100 - faults.count("none")
    assert batch.meta["avg_total_reward"] == 1.0  # failures are no zeros


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["none", "none", *FAULTS])), min_size=1, max_size=24))
def test_siblings_of_a_lost_episode_are_cancelled_and_every_episode_is_accounted_for(members):
    """`members`: (group, fault)."""
    lost = {group for group, fault in members if fault != "none"}
    left = [i for i, (group, _) in enumerate(members) if group not in lost]
    requests = [request(fault, group=group) for group, fault in members]
    if not left:
        with pytest.raises(RolloutError, match="no complete group is left"):
            play_jumping(engine().generate_rollouts(requests, 1))
        return
    played, tasks = play_jumping(with_tasks_left(engine().generate_rollouts(requests, 1, concurrency=3)))
    counts = played.counts
    assert [rollout.meta["episode_idx"] for rollout in played] == left
    assert counts.num_dropped_groups == len(lost) <= counts.num_failed_episodes
    assert {f.meta["group_id"] for f in played.failures} == lost
    assert all(f.meta["fault"] != "none" for f in played.failures)
    assert counts.num_failed_episodes + counts.num_cancelled_episodes <= len(members) - len(left)
    assert tasks == set()


def test_a_sibling_that_hangs_is_cancelled_and_closed_though_nothing_limits_it(fire):
    """Without a limit of its own it would be waited for in vain."""
    requests = [request("hangs", group="g"), request("hangs", group="g"), request("raises", group="g"), request("none")]
    eng = engine(episode_timeout_s=None)
    played, tasks = play_jumping(with_tasks_left(eng.generate_rollouts(requests, 1, concurrency=4)))
    assert (len(played), played.counts.num_failed_episodes, played.counts.num_cancelled_episodes) == (1, 1, 2)
    assert tasks == set()
    assert len(fire.alive) == 0


class Slow(Counting):
    """Takes its time to close."""

    def __init__(self, step_s=0.0, close_s=5.0):
        super().__init__()
        self.step_s, self.close_s = step_s, close_s

    async def env_step(self, action):
        await asyncio.sleep(self.step_s)
        return super().env_step(action)

    async def close(self):
        await asyncio.sleep(self.close_s)
        self.closed = True


class Stubborn(Counting):
    """Makes an ordinary error of a cancellation, as code with a broad `except` does."""

    async def env_step(self, action):
        try:
            await asyncio.Event().wait()
        except BaseException:
            raise OSError("interrupted") from None


def other(envs, **settings):
    return RolloutEngine(env_registry=envs, protocol_registry={"single": lambda: protocol(ScriptedClient("ab"))}, **settings)


def request_for(env, group=None, **kwargs):
    meta = {} if group is None else {"group_id": group}
    return RolloutRequest(EnvSpec(env, kwargs), ProtocolSpec("single"), inference=FOR_RL, meta=meta)


def test_the_time_to_close_is_not_taken_from_the_episode_and_closing_is_not_cut_short():
    Counting.made.clear()
    eng = other({"slow": Slow}, episode_timeout_s=1.0, max_retries=0)
    played = play_jumping(eng.generate_rollouts([request_for("slow", close_s=9.0), request_for("slow", step_s=2.0)], 1))
    assert (len(played), played.counts.num_failed_episodes) == (1, 1)
    assert [env.closed for env in Counting.made] == [True, True]


def test_a_cancelled_sibling_that_is_closing_closes_to_the_end():
    Counting.made.clear()
    eng = other({"slow": Slow, "never": Stubborn}, episode_timeout_s=1.0, max_retries=0)
    requests = [request_for("slow", group="g", close_s=9.0), request_for("never", group="g"), request_for("slow")]
    played, tasks = play_jumping(with_tasks_left(eng.generate_rollouts(requests, 1)))
    assert (len(played), played.counts.num_failed_episodes, played.counts.num_cancelled_episodes) == (1, 1, 1)
    assert all(env.closed for env in Counting.made)
    assert tasks == set()


def test_closing_has_a_deadline_of_its_own():
    eng = other({"slow": Slow}, max_retries=0)
    assert len(play_jumping(eng.generate_rollouts([request_for("slow", close_s=1e9)], 1))) == 1


def test_cancelling_the_engine_ends_episodes_that_make_another_error_of_it():
    Counting.made.clear()

    async def scenario():
        eng = other({"stubborn": Stubborn}, max_retries=5)
        requests = [request_for("stubborn") for _ in range(5)]
        task = asyncio.create_task(eng.generate_rollouts(requests, 1))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert play_jumping(scenario()) == set()
    assert len(Counting.made) == 5  # none was played again
    assert all(env.closed for env in Counting.made)


@pytest.mark.parametrize("returned", ["text", None, [None], ["a rollout"], 3])
def test_a_protocol_that_returns_no_rollouts_failed(returned):
    class Garbage:
        async def run(self, **_):
            return returned

    eng = RolloutEngine(env_registry={"count": Counting}, protocol_registry={"single": Garbage}, max_retries=0)
    with pytest.raises(RolloutError, match="GarbageError: the protocol returned"):
        play_jumping(eng.generate_rollouts([request_for("count")], 1))


def test_a_reward_that_is_not_finite_is_a_value_error_where_nothing_else_is_left():
    with pytest.raises(ValueError, match="reward of step 0 is nan; it must be a finite number"):
        play_jumping(engine().generate_batch([request("nan")], credit_assigner=ConstantCredit()))


def test_an_answer_that_is_no_text_failed():
    class Numbers:
        async def complete(self, request):
            return ChatResponse(text=5), {}

    agent = Agent(client=Numbers(), model="m", ctx=FullDialog(), parser=lambda text: ParseResult("a", 0.0, None))
    eng = RolloutEngine(
        env_registry={"count": Counting}, protocol_registry={"single": lambda: SingleAgentProtocol(agent)}, max_retries=0
    )
    with pytest.raises(RolloutError, match="action of step 0 is of type int; it must be text"):
        play_jumping(eng.generate_rollouts([request_for("count")], 1))


def test_the_end_of_every_episode_is_told_however_it_ended():
    ended = []
    requests = [request("none"), request("raises", group="g"), request("hangs", group="g"), request("nan"), request("none")]
    played = play_jumping(engine(on_episode=lambda: ended.append(1)).generate_rollouts(requests, 1))
    assert (len(ended), played.counts.num_episodes) == (5, 5)
