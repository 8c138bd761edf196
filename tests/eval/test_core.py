"""run_eval: its calls of the engine, its records, its metrics, and failures that are counted."""

import asyncio
import json

import pytest
from playing import FOR_RL, Counting, ScriptedClient, protocol

from ludic.errors import RolloutError
from ludic.eval import run_eval, run_eval_sync, write_jsonl
from ludic.training import EnvSpec, ProtocolSpec, Reducer, RolloutEngine, RolloutRequest
from ludic.types import Rollout, Step, TokenTrace


class FakeEngine:
    """Accepts only the documented keyword arguments and does not report failures."""

    def __init__(self, rollouts):
        self.rollouts, self.asked = rollouts, []

    async def generate_rollouts(self, *, requests, max_steps, timeout_s, concurrency):
        self.asked.append((list(requests), max_steps, timeout_s, concurrency))
        return self.rollouts


REQUEST = RolloutRequest(EnvSpec("env"), ProtocolSpec("single"))
TWO_STEPS = Rollout(
    id="r",
    steps=[
        Step(0, "o0", "a0", "o1", 0.25, False, False, info={"ok": True}, trace=TokenTrace([1], [2, 3, 4])),
        Step(1, "o1", "a1", None, 0.5, False, True, info={"ok": False, "who": "step", "reward": 9.0}),
    ],
    meta={"who": "rollout", "action": "of the rollout"},
)
REDUCERS = {
    "ok_by_steps": Reducer("count_true", "ok", normalize_by="samples"),
    "ok_by_rollouts": Reducer("count_true", "ok", normalize_by="rollouts"),
    "length": Reducer("mean", "completion_length"),
}


def test_a_step_record_prefers_info_over_meta_over_basic_fields():
    engine = FakeEngine([TWO_STEPS])
    records, metrics = run_eval_sync(
        engine=engine, requests=[REQUEST], reducers=REDUCERS, max_steps=3, timeout_s=4.0, concurrency=5
    )
    assert engine.asked == [([REQUEST], 3, 4.0, 5)]
    assert records[0] == {
        "rollout_id": "r",
        "step_index": 0,
        "reward": 0.25,
        "prev_obs": "o0",
        "action": "of the rollout",
        "total_reward": 0.75,
        "completion_length": 3,
        "truncated": False,
        "terminated": False,
        "who": "rollout",
        "ok": True,
    }
    assert (records[1]["who"], records[1]["reward"], records[1]["completion_length"]) == ("step", 9.0, 0)
    assert metrics == {"ok_by_steps": 0.5, "ok_by_rollouts": 1.0, "length": 1.5}


def test_without_requests_the_evaluation_is_empty():
    engine = FakeEngine([])
    assert run_eval_sync(engine=engine, requests=[], reducers=REDUCERS, max_steps=1) == ([], {})
    assert engine.asked == []


def test_the_defaults_are_the_documented_ones():
    engine = FakeEngine([])
    run_eval_sync(engine=engine, requests=[REQUEST], reducers={}, max_steps=1)
    assert engine.asked[0][2:] == (None, 8)


class Breaking(Counting):
    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks

    def env_step(self, action):
        if self.breaks:
            raise OSError("gone")
        return super().env_step(action)


def real(breaks):
    engine = RolloutEngine(env_registry={"env": Breaking}, protocol_registry={"single": lambda: protocol(ScriptedClient("ab"))})
    return engine, [RolloutRequest(EnvSpec("env", {"breaks": b}), ProtocolSpec("single"), inference=FOR_RL) for b in breaks]


def test_failed_episodes_are_counted_and_are_not_zeros():
    engine, requests = real([False, True, False, True, True])
    reducers = {"reward": Reducer("mean", "reward"), "by_rollouts": Reducer("sum", "reward", normalize_by="rollouts")}
    records, metrics = run_eval_sync(engine=engine, requests=requests, reducers=reducers, max_steps=1)
    assert len(records) == 2
    assert metrics == {"num_episodes": 5.0, "num_failed_episodes": 3.0, "reward": 1.0, "by_rollouts": 1.0}


def test_if_every_episode_fails_an_error_is_raised():
    engine, requests = real([True, True])
    with pytest.raises(RolloutError, match=r"2 of 2 episodes failed.*OSError: gone"):
        run_eval_sync(engine=engine, requests=requests, reducers={}, max_steps=1)


def test_in_a_running_event_loop_the_error_says_what_to_await():
    async def inside():
        with pytest.raises(RuntimeError, match=r"await run_eval\(\.\.\.\)"):
            run_eval_sync(engine=FakeEngine([]), requests=[REQUEST], reducers={}, max_steps=1)
        return await run_eval(engine=FakeEngine([TWO_STEPS]), requests=[REQUEST], reducers={}, max_steps=1)

    assert len(asyncio.run(inside())[0]) == 2


def test_records_are_written_as_json_lines(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    write_jsonl(path, [{"a": 1}, {"a": float("nan"), "text": "\ud83d", "tuple": (1, 2)}])
    write_jsonl(str(path), [{"a": 2}, {"a": float("nan"), "text": "ä\n"}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 2}, {"a": None, "text": "ä\n"}]
