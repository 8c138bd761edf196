"""A scorer in the engine runs once per batch, before credit. Rollouts that it could not reward are
counted."""

import asyncio

import pytest
from playing import FOR_RL, ScriptedClient, protocol

from ludic.envs import PromptEnv
from ludic.errors import RolloutError
from ludic.training.credit_assignment import EpisodicReturn, GroupNormalizedReturn
from ludic.training.reward_functions import RewardFunctions
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest


class Flaky(PromptEnv):
    """Fails if its row says so."""

    def env_step(self, action):
        if self.sample.get("broken"):
            raise OSError("the environment broke")
        return super().env_step(action)


def engine(function, *texts, **settings):
    client = ScriptedClient(*texts)
    return RolloutEngine(
        env_registry={"prompt": Flaky},
        protocol_registry={"p": lambda: protocol(client)},
        scorer=RewardFunctions(function),
        **settings,
    )


def request(group, **row):
    return RolloutRequest(
        EnvSpec("prompt", {"sample": {"prompt": "2+2=", **row}}), ProtocolSpec("p"), inference=FOR_RL, meta={"group_id": group}
    )


def is_four(completions, **_):
    calls.append(list(completions))
    if "boom" in completions:
        raise ValueError("boom")
    return [float(text == "4") for text in completions]


calls: list[list[str]] = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def test_a_scorer_is_called_once_per_batch_and_credit_uses_its_rewards():
    playing = engine(is_four, "4", "5", "4", "4")
    batch = asyncio.run(
        playing.generate_batch([request(g) for g in "aabb"], credit_assigner=GroupNormalizedReturn(2), concurrency=1)
    )
    assert calls == [["4", "5", "4", "4"]]
    assert [item.weight for item in batch.items] == [0.5, -0.5, 0.0, 0.0]
    assert [item.meta["rewards/is_four"] for item in batch.items] == [1.0, 0.0, 1.0, 1.0]
    assert batch.meta["avg_total_reward"] == 0.75


def test_rollouts_without_a_batch_are_rewarded_and_logged_with_their_rewards(tmp_path):
    playing = engine(is_four, "4", jsonl_path=tmp_path / "r.jsonl")
    (rollout,) = asyncio.run(playing.generate_rollouts([request("a")], 1))
    assert rollout.total_reward == 1.0
    assert '"total_reward":1.0' in (tmp_path / "r.jsonl").read_text()


def test_the_traceback_of_a_reward_function_is_logged_once_per_batch(caplog):
    playing = engine(is_four, "boom")
    with pytest.raises(RolloutError, match=r"is_four failed: ValueError: boom \(.*test_scorer\.py:\d+, in is_four\)"):
        asyncio.run(playing.generate_rollouts([request(g) for g in "abc"], 1))
    assert [record.exc_info is not None and record.exc_info[0] for record in caplog.records] == [ValueError, False, False]


def test_a_group_that_could_not_be_rewarded_is_left_out_and_counted(caplog):
    playing = engine(is_four, "4", "boom", "4", "5")
    batch = asyncio.run(playing.generate_batch([request(g) for g in "aabb"], credit_assigner=EpisodicReturn(), concurrency=1))
    assert [item.meta["action"] for item in batch.items] == ["4", "5"]
    assert (batch.meta["num_failed_episodes"], batch.meta["num_dropped_groups"]) == (2, 1)
    assert "reward function is_four failed: ValueError: boom" in caplog.text


def test_groups_lost_while_playing_are_not_scored():
    playing = engine(is_four, "4", max_retries=0)
    wanted = [request("a", broken=True), request("a"), request("b")]
    batch = asyncio.run(playing.generate_batch(wanted, credit_assigner=EpisodicReturn(), concurrency=1))
    assert calls == [["4"]]
    assert (len(batch.items), batch.meta["num_failed_episodes"], batch.meta["num_dropped_groups"]) == (1, 1, 1)


def test_if_nothing_could_be_rewarded_the_error_names_the_cause():
    playing = engine(is_four, "boom")
    with pytest.raises(RolloutError, match=r"2 of 2 episodes .*is_four failed: .*boom"):
        asyncio.run(playing.generate_batch([request(g) for g in "ab"], credit_assigner=EpisodicReturn()))


def test_if_nothing_could_be_played_the_scorer_is_not_called():
    playing = engine(is_four, "4", max_retries=0)
    with pytest.raises(RolloutError, match="the environment broke"):
        asyncio.run(playing.generate_rollouts([request("a", broken=True)], 1))
    assert calls == []


def test_without_requests_the_scorer_is_not_called():
    assert asyncio.run(engine(is_four, "4").generate_rollouts([], 1)) == []
    assert calls == []
