"""Playing many episodes: what is returned, what is retried, what is dropped, and that nothing
leaks."""

import asyncio
import json
import re
from collections import Counter
from typing import ClassVar

import pytest
from playing import FOR_RL, Counting, ScriptedClient, play, protocol

from ludic.errors import RolloutError
from ludic.training import (
    ConstantCredit,
    EnvSpec,
    EpisodicReturn,
    GroupNormalizedReturn,
    GRPORequestStrategy,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
    drop_truncated,
)
from ludic.training.rollouts.episodes import CutOffWarnings
from ludic.types import Rollout, Step, TokenTrace


def request(env="count", episodes=1, env_seed=None, sampling_seed=None, inference=FOR_RL, meta=None, **kwargs):
    return RolloutRequest(EnvSpec(env, kwargs), ProtocolSpec("single"), env_seed, sampling_seed, inference, episodes, meta or {})


def engine(client=None, envs=None, **settings):
    client = client or ScriptedClient("ab")
    return RolloutEngine(
        env_registry=envs or {"count": Counting}, protocol_registry={"single": lambda: protocol(client)}, **settings
    )


def rollouts(eng, requests, **settings):
    return play(eng.generate_rollouts(requests, settings.pop("max_steps", 5), **settings))


def test_rollouts_come_in_the_order_of_the_requests():
    requests = [request(goal=3, env_seed=1), request(goal=1, env_seed=2, episodes=2), request(goal=2, env_seed=3)]
    got = rollouts(engine(), requests, concurrency=4)
    assert [r.length for r in got] == [3, 1, 1, 2]
    assert [r.meta["episode_idx"] for r in got] == [0, 1, 2, 3]
    assert rollouts(engine(), []) == []


def test_a_rollout_records_its_origin():
    (got,) = rollouts(engine(), [request(env_seed=5, sampling_seed=9, meta={"topic": "x"})], timeout_s=20.0)
    assert got.meta["topic"] == "x"
    assert got.meta["request_meta"] == {"topic": "x"}
    assert got.meta["engine"] == {
        "max_steps": 5,
        "timeout_s": 20.0,
        "env_kind": "count",
        "protocol_kind": "single",
        "env_seed": 5,
        "sampling_seed": 9,
        "forced_env_seed": 5,
        "forced_sampling_seed": 9,
        "return_spec": {"return_token_ids": True, "return_chosen_logprobs": True, "top_logprobs_k": 1},
    }


def test_unset_seeds_differ_between_batches_and_resume():
    eng = engine()
    first = [r.meta["engine"]["env_seed"] for r in rollouts(eng, [request(episodes=3)])]
    state = eng.state_dict()
    second = [r.meta["engine"]["env_seed"] for r in rollouts(eng, [request(episodes=3)])]
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    resumed = engine()
    resumed.load_state_dict(state)
    assert [r.meta["engine"]["env_seed"] for r in rollouts(resumed, [request(episodes=3)])] == second


def test_unregistered_names_are_refused_before_anything_is_played():
    Counting.made.clear()
    with pytest.raises(KeyError, match="Unknown env kind"):
        rollouts(engine(), [request(), request("nonsense")])
    with pytest.raises(KeyError, match="Unknown protocol kind"):
        rollouts(engine(), [RolloutRequest(EnvSpec("count"), ProtocolSpec("nonsense"))])
    assert Counting.made == []


def test_the_model_is_called_with_the_settings_of_the_request():
    client = ScriptedClient("a")
    rollouts(engine(client), [request(sampling_seed=7), request(), request(inference=None, sampling_seed=9)], concurrency=1)
    assert [call.seed for call in client.requests] == [7, 1, 9]  # an unset seed becomes the number of the episode
    assert [call.sampling.max_tokens for call in client.requests] == [4, 4, 256]
    assert [call.return_.return_token_ids for call in client.requests] == [True, True, False]


def test_a_group_named_by_a_number_is_not_confused_with_an_episode(flaky):
    """Episode 1 fails alone; group 1 is something else."""
    requests = [request(meta={"group_id": 1}), request("flaky", name="f", failures=9), request(meta={"group_id": 1})]
    batch = play(engine(envs=flaky).generate_batch(requests, credit_assigner=ConstantCredit()))
    assert [item.meta["episode_idx"] for item in batch.items] == [0, 2]


def test_an_engine_lists_its_environment_and_protocol_kinds():
    kinds = {"count": Counting}
    eng = engine(envs=kinds)
    kinds.clear()
    assert len(rollouts(eng, [request()])) == 1


def cut(played):
    return [record.getMessage() for record in played if "max_steps" in record.getMessage()]


def test_a_limit_that_truncates_every_episode_is_reported_once(caplog):
    eng = engine()
    rollouts(eng, [request(goal=2, episodes=3)], max_steps=1)
    rollouts(eng, [request(goal=2, episodes=3)], max_steps=1)
    [message] = cut(caplog.records)
    assert re.search(r"all 3 episodes .*max_steps \(1\) .*\(Counting\) .*raise max_steps", message)


def test_an_episode_that_the_default_limit_cuts_off_is_reported(caplog):
    """One of two ended by itself: with the limit 1, which nobody may have chosen, that is
    enough."""
    rollouts(engine(), [request(goal=2), request(goal=1)], max_steps=1)
    [message] = cut(caplog.records)
    assert re.search(r"^1 of 2 episodes .*max_steps \(1\)", message)


@pytest.mark.parametrize(
    ("requests", "settings"),
    [
        ([request(goal=3), request(goal=2)], {"max_steps": 2}),  # one episode ended by itself
        ([request(goal=2, truncate=True)], {"max_steps": 2}),  # its environment truncated it
    ],
)
def test_a_limit_that_some_episode_fits_into_is_not_reported(requests, settings, caplog):
    rollouts(engine(), requests, **settings)
    assert cut(caplog.records) == []


def test_an_answer_that_did_not_reach_the_environment_does_not_count_for_the_limit(caplog):
    rollouts(engine(ScriptedClient("ab", finish_reason="length")), [request(goal=1)], max_steps=1)
    assert cut(caplog.records) == []


def rejected(records):
    return [record.getMessage() for record in records if "token limit" in record.getMessage()]


@pytest.mark.parametrize(("cut_off", "others", "expected"), [(1, 9, 1), (1, 10, 0), (2, 0, 1), (0, 3, 0)])
def test_answers_that_reach_the_token_limit_are_reported_once_from_a_tenth_on(cut_off, others, expected, caplog):
    def played(number, reason):
        step = Step(0, "q", "a", None, -0.1, False, True, {"incomplete_completion": True} if reason == "length" else {}, None)
        return Rollout(f"r{number}", [step], {})

    warnings = CutOffWarnings()
    answers = [played(n, "length") for n in range(cut_off)] + [played(n, "stop") for n in range(others)]
    for _ in range(2):
        warnings.look_at(answers, max_steps=5)
    assert len(rejected(caplog.records)) == expected
    if expected:
        start = (
            f"{cut_off} of {cut_off + others} answers reached their token limit: no parser, environment or verifier saw them, "
        )
        assert rejected(caplog.records)[0].startswith(start + "and each earned -0.1 instead; raise max_tokens")


def test_the_penalty_of_an_agent_for_such_an_answer_is_the_one_reported(caplog):
    rollouts(engine(ScriptedClient("ab", finish_reason="length")), [request(goal=1)], max_steps=1)
    assert re.search("^1 of 1 answers .*token limit", rejected(caplog.records)[0])


def test_failed_episodes_are_logged_with_their_error_and_their_request(flaky, tmp_path):
    """Every batch, also one of which no group is left; with the fields of the failures that the
    batch reports."""
    path = tmp_path / "logs" / "failed.jsonl"
    eng = engine(envs=flaky, failures_path=path)
    requests = [request(), request("flaky", name="f", failures=9, meta={"problem_id": "p7"})]
    got = play(eng.generate_rollouts(requests, 5))
    with pytest.raises(RolloutError):
        play(eng.generate_rollouts([request("flaky", name="g", failures=9)], 5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["episode_idx"] for line in lines] == [1, 2]
    assert lines[0] == vars(got.failures[0])
    assert lines[0]["meta"]["problem_id"] == "p7"
    assert lines[0]["error"]


def test_an_engine_counts_the_outcomes_of_all_its_episodes(flaky):
    eng = engine(envs=flaky)
    rollouts(eng, [request(episodes=2), request("flaky", name="a", failures=1)])
    rollouts(eng, [request(), request("flaky", name="b", failures=9, meta={"group_id": "g"}), request(meta={"group_id": "g"})])
    totals = vars(eng.totals)
    totals.pop("num_cancelled_episodes")
    assert totals == {"num_episodes": 6, "num_retried_episodes": 2, "num_failed_episodes": 1, "num_dropped_groups": 1}


class TwoRolloutProtocol:
    """A protocol with two rollouts that were sampled from several policy versions. The second one
    names its agent."""

    async def run(self, **_):
        def step(index, version):
            return Step(index, "o", "a", None, 0.0, False, True, info={"policy_version": version})

        second = Rollout(
            steps=[step(0, 9)], meta={"episode_idx": "own", "policy_version": 2, "request_meta": {"by": "b", "k": 0}}
        )
        return [Rollout(steps=[step(0, 6), step(1, 5), step(2, 7)]), second]


def test_a_rollout_is_as_old_as_its_oldest_step_and_keeps_the_protocols_meta():
    eng = RolloutEngine(env_registry={"count": Counting}, protocol_registry={"single": TwoRolloutProtocol})
    first, second = rollouts(eng, [request(meta={"k": 1})])
    assert [first.meta["policy_version"], second.meta["policy_version"]] == [5, 2]
    assert [first.meta["episode_idx"], second.meta["episode_idx"]] == [0, "own"]
    assert [first.meta["request_meta"], second.meta["request_meta"]] == [{"k": 1}, {"by": "b", "k": 1}]
    first.meta["engine"]["max_steps"] = "changed"
    assert second.meta["engine"]["max_steps"] == 5


@pytest.mark.parametrize(("concurrency", "expected"), [(0, 1), (1, 1), (3, 3), (99, 20)])
def test_at_most_concurrency_episodes_are_played_at_once(concurrency, expected):
    running, most = Counter(), [0]

    async def delay():
        running["now"] += 1
        most[0] = max(most[0], running["now"])
        await asyncio.sleep(0)
        running["now"] -= 1

    rollouts(engine(ScriptedClient("a", delay=delay)), [request(episodes=20)], concurrency=concurrency)
    assert most[0] == expected


class Flaky(Counting):
    """Raises in the first step of the first `failures` environments with its name."""

    tries: ClassVar[Counter] = Counter()

    def __init__(self, name, failures):
        super().__init__()
        self.name, self.failures = name, failures

    def env_step(self, action):
        Flaky.tries[self.name] += 1
        if Flaky.tries[self.name] <= self.failures:
            raise OSError(f"{self.name} broke")
        return super().env_step(action)


@pytest.fixture
def flaky():
    Flaky.tries.clear()
    Counting.made.clear()
    return {"count": Counting, "flaky": Flaky}


def test_a_failed_episode_is_played_again_with_a_fresh_environment(flaky):
    batch = play(engine(envs=flaky).generate_batch([request("flaky", name="a", failures=1)], credit_assigner=ConstantCredit()))
    assert len(batch.items) == 1
    assert (batch.meta["num_retried_episodes"], batch.meta["num_failed_episodes"]) == (1, 0)
    assert len(Counting.made) == 2
    assert all(env.closed for env in Counting.made)


def test_the_group_of_an_episode_that_fails_every_retry_is_left_out_and_counted(flaky, caplog):
    groups = [
        *GRPORequestStrategy(3).expand([request()]),
        *GRPORequestStrategy(2).expand([request("flaky", name="b", failures=99)]),
        request(),
    ]
    batch = play(engine(envs=flaky, cancel_siblings=False).generate_batch(groups, credit_assigner=EpisodicReturn()))
    assert len(batch.items) == 4
    counts = {
        "num_episodes": 6,
        "num_failed_episodes": 2,
        "num_dropped_groups": 1,
        "target_rollouts": 6,  # requested episodes, including those of the group that was left out
        "played_rollouts": 4,
    }
    assert {k: batch.meta[k] for k in counts} == counts
    assert "b broke" in caplog.text


def test_the_credit_assigner_gets_whole_groups_when_one_member_fails(flaky):
    group = GRPORequestStrategy(4).expand([request()])
    broken = GRPORequestStrategy(4).expand([request("flaky", name="c", failures=2)])  # one member fails twice, the others never
    batch = play(engine(envs=flaky).generate_batch([*group, *broken], credit_assigner=GroupNormalizedReturn(4), concurrency=1))
    assert len(batch.items) == 4


def test_if_no_episode_is_left_the_error_names_the_first_cause(flaky):
    with pytest.raises(RolloutError, match=r"2 of 2 episodes failed.*OSError: d broke"):
        rollouts(engine(envs=flaky), [request("flaky", episodes=2, name="d", failures=99)])


def test_without_retries_every_failure_is_final(flaky):
    eng = engine(envs=flaky, max_retries=0)
    batch = play(eng.generate_batch([request(), request("flaky", name="e", failures=1)], credit_assigner=ConstantCredit()))
    assert (batch.meta["num_retried_episodes"], batch.meta["num_failed_episodes"]) == (0, 1)


def test_a_model_that_hangs_makes_the_episode_fail():
    async def forever():
        await asyncio.Event().wait()

    with pytest.raises(RolloutError, match="TimeoutError"):
        rollouts(engine(ScriptedClient("a", delay=forever)), [request()], timeout_s=0.02)


def test_cancelling_the_engine_cancels_its_episodes_and_closes_their_environments():
    Counting.made.clear()

    async def scenario():
        async def forever():
            await asyncio.Event().wait()

        eng = engine(ScriptedClient("a", delay=forever))
        task = asyncio.create_task(eng.generate_rollouts([request(episodes=5)], 5))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert play(scenario()) == set()
    assert len(Counting.made) == 5
    assert all(env.closed for env in Counting.made)


def test_a_batch_has_the_tokens_that_were_sampled():
    batch = play(
        engine(ScriptedClient("ab")).generate_batch([request(goal=2, episodes=2)], credit_assigner=EpisodicReturn(), max_steps=5)
    )
    assert len(batch.items) == 4
    item = batch.items[1]
    assert item.input_ids == [1, 2, 97, 98]
    assert item.attention_mask == [1, 1, 1, 1]
    assert item.action_mask == [0, 0, 1, 1]
    assert item.actor_logps.token_logps == [-0.5, -0.5]
    assert item.weight == 1.0
    expected = {
        "step_index": 1,
        "reward": 1.0,
        "total_reward": 1.0,
        "completion_length": 2,
        "prompt_length": 2,
        "terminated": True,
    }
    assert {k: item.meta[k] for k in expected} == expected
    assert item.meta["n"] == 1
    assert not {"prompt_token_ids", "completion_token_ids", "completion_logprobs"} & set(item.meta)
    facts = {
        "target_rollouts": 2,
        "num_samples": 4,
        "avg_total_reward": 1.0,
        "avg_completion_length": 2.0,
        "avg_prompt_length": 2.0,
    }
    assert {k: batch.meta[k] for k in facts} == facts


def test_a_filter_acts_after_credit_and_is_counted():
    requests = [request(), request(goal=9)]
    batch = play(engine().generate_batch(requests, credit_assigner=EpisodicReturn(), max_steps=1, sample_filter=drop_truncated))
    assert [batch.meta[k] for k in ("num_samples_before_filter", "num_samples", "num_samples_filtered")] == [2, 1, 1]
    assert batch.meta["avg_total_reward"] == 0.5  # over all rollouts, including the filtered one


class Credit:
    def __init__(self, weights):
        self.weights = weights

    def compute(self, rollouts):
        return {(r.id, s.index): self.weights for r in rollouts for s in r.steps} if self.weights is not None else {}


def test_weights_that_are_missing_or_not_finite_are_errors():
    with pytest.raises(KeyError, match="no weight"):
        play(engine().generate_batch([request()], credit_assigner=Credit(None)))
    with pytest.raises(ValueError, match="must be finite"):
        play(engine().generate_batch([request()], credit_assigner=Credit(float("nan"))))


def test_a_step_without_token_ids_is_an_error():
    class Textual(ScriptedClient):
        async def complete(self, request):
            response, info = await super().complete(request)
            response.prompt_token_ids = None
            return response, info

    with pytest.raises(ValueError, match="Missing rollout-time token trace"):
        play(engine(Textual("a")).generate_batch([request()], credit_assigner=ConstantCredit()))


def test_requested_log_probabilities_must_be_returned():
    class Silent(ScriptedClient):
        async def complete(self, request):
            response, info = await super().complete(request)
            response.completion_logprobs = None
            return response, info

    with pytest.raises(ValueError, match="no log-probabilities"):
        play(engine(Silent("a")).generate_batch([request()], credit_assigner=ConstantCredit()))
    batch = play(engine(Silent("a")).generate_batch([request(inference=None)], credit_assigner=ConstantCredit()))
    assert batch.items[0].actor_logps is None


def test_rollouts_are_appended_as_json_with_their_traces(tmp_path):
    path = tmp_path / "deep" / "rollouts.jsonl"
    eng = engine(jsonl_path=path)
    rollouts(eng, [request()])
    rollouts(eng, [request(goal=2)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["length"] for line in lines] == [1, 2]
    step = lines[0]["steps"][0]
    assert {"index", "prev_obs", "action", "next_obs", "reward", "truncated", "terminated", "info", "ts_ns"} <= set(step)
    assert TokenTrace.from_dict(step["trace"]) == TokenTrace([1, 2], [97, 98], [-0.5, -0.5], "stop")
    assert {"id", "meta", "steps", "total_reward", "length", "duration_ns"} == set(lines[0])
