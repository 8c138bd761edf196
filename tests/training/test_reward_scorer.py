"""Scoring rollouts with a reward model: what is scored, in which form, and how failures are
handled."""

import asyncio
import math
from dataclasses import replace

import pytest
from playing import FOR_RL, Counting, ScriptedClient, protocol, tokenizer
from reward_models import FakeRewardModel, reward_model, rollout, score_alone

from ludic.errors import ConfigError, DataError, GradingError, InferenceError
from ludic.inference import LocalRewardModel
from ludic.inference.reward_types import ImageTokens
from ludic.training import (
    EnvSpec,
    EpisodicReturn,
    GroupNormalizedReturn,
    ProtocolSpec,
    RewardModelReward,
    RewardModelScorer,
    RolloutEngine,
    RolloutRequest,
    make_grpo_with_rm,
)
from ludic.types import ImageSpan

TRACE = ([53, 46, 53, 64], [55, 2], [-0.1, -0.2], "stop")


def score(scorer, *rollouts):
    return asyncio.run(scorer.score(list(rollouts)))


def test_the_score_is_stored_beside_the_reward():
    client, one = FakeRewardModel(), rollout("r", ("2+2=", "4"), reward=0.5)
    assert score(RewardModelScorer(client), one) == {}
    assert (one.meta["rm_score"], one.total_reward) == (len("2+2=\n4"), 0.5)
    assert one.meta["rm_score_from"] == "text"
    assert client.calls == [(["2+2=\n4"], True)]


def test_sampled_tokens_are_scored_when_the_tokenizers_agree():
    client, one = FakeRewardModel(tokenizer=tokenizer()), rollout("r", ("2+2=", "4"), ids=TRACE)
    score(RewardModelScorer(client, policy_tokenizer=tokenizer(), normalize=False), one)
    assert client.calls == [([[53, 46, 53, 64, 55, 2]], False)]
    assert one.meta["rm_score_from"] == "tokens"


def test_a_local_model_scores_a_trace_by_its_tokens():
    model = reward_model()
    scorer = RewardModelScorer(LocalRewardModel(model, tokenizer()), policy_tokenizer=tokenizer(), normalize=False)
    one, cut_off = rollout("a", ("2+2=", "4"), ids=TRACE), rollout("b", ("2+2=", "4"), ids=([53, 46, 53, 64], [55]))
    score(scorer, one, cut_off)
    assert one.meta["rm_score"] == pytest.approx(score_alone(model, [53, 46, 53, 64, 55, 2]), abs=1e-5)
    assert cut_off.meta["rm_score"] == pytest.approx(score_alone(model, [53, 46, 53, 64, 55]), abs=1e-5)


def test_text_is_scored_with_a_warning_when_tokenizers_differ_or_there_is_no_trace(caplog):
    client = FakeRewardModel(tokenizer=object())
    traced, bare = rollout("a", ("2+2=", "4"), ids=TRACE), rollout("b", ("1+1=", "2"))
    score(RewardModelScorer(client, policy_tokenizer=tokenizer()), traced, bare)
    assert client.calls[0][0] == ["2+2=\n4", "1+1=\n2"]
    assert "tokenised again" in caplog.text


def test_a_render_function_takes_precedence():
    client = FakeRewardModel(tokenizer=tokenizer())
    scorer = RewardModelScorer(client, render_fn=lambda r: r.steps[-1].action, policy_tokenizer=tokenizer())
    score(scorer, rollout("r", ("2+2=", "4"), ids=TRACE))
    assert client.calls[0][0] == ["4"]


def test_a_model_that_is_sent_text_does_not_score_answers_to_images():
    seeing = rollout("a", ("what?", "4"), ids=TRACE)
    seeing.steps[-1].trace = replace(seeing.steps[-1].trace, images=(ImageSpan("a", 0, 2),))
    client, blind = FakeRewardModel(tokenizer=tokenizer()), rollout("b", ("2+2=", "4"), ids=TRACE)
    errors = score(RewardModelScorer(client, policy_tokenizer=tokenizer()), seeing, blind)
    assert "rollout a has images" in str(errors["a"])
    assert list(errors) == ["a"]
    assert score(RewardModelScorer(client, render_fn=lambda one: "described"), seeing) == {}
    assert client.calls[-1][0] == ["described"]


def test_a_model_that_sees_images_gets_them_with_the_tokens():
    """Answers of equal tokens to other images are other inputs."""
    client = FakeRewardModel(tokenizer=tokenizer())
    client.reads_images = True
    answers = [rollout(name, ("what?", "4"), ids=TRACE) for name in "abc"]
    for answer, digest in zip(answers, "xyx", strict=True):
        answer.steps[-1].trace = replace(answer.steps[-1].trace, images=(ImageSpan(digest, 0, 2),))
    assert score(RewardModelScorer(client, policy_tokenizer=tokenizer()), *answers) == {}
    ids = (*TRACE[0], *TRACE[1])
    assert client.calls[0][0] == [ImageTokens(ids, (ImageSpan(digest, 0, 2),)) for digest in "xy"]


class Template:
    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert not add_generation_prompt
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


def test_a_conversation_is_rendered_by_the_template():
    client = FakeRewardModel()
    scorer = RewardModelScorer(client, use_chat_template=True, tokenizer=Template(), system_prompt="be good")
    chat_messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    by_turns, recorded = rollout("a", ("o1", "a1"), ("o2", "a2")), rollout("b", ("o", "ans"), chat_prompt_messages=chat_messages)
    score(scorer, by_turns, recorded)
    assert client.calls[0][0] == [
        "system:be good|user:o1|assistant:a1|user:o2|assistant:a2",
        "system:s|user:q|assistant:ans",
    ]


@pytest.mark.parametrize("tokenizer_given", [None, object(), tokenizer()])
def test_a_missing_template_is_refused_immediately(tokenizer_given):
    with pytest.raises(ConfigError, match="chat template"):
        RewardModelScorer(FakeRewardModel(), use_chat_template=True, tokenizer=tokenizer_given)


def test_batches_have_the_requested_size_and_equal_inputs_are_scored_once():
    client = FakeRewardModel()
    rollouts = [rollout(str(i), ("q", "a" * (i % 5))) for i in range(20)]
    score(RewardModelScorer(client, batch_size=2), *rollouts)
    assert sorted(len(inputs) for inputs, _ in client.calls) == [1, 2, 2]
    assert [r.meta["rm_score"] for r in rollouts] == [2.0 + i % 5 for i in range(20)]


def test_any_object_with_score_batch_can_score():
    class Plain:
        def score_batch(self, inputs, *, normalize=True):
            return [0.25] * len(inputs)

    one = rollout("r", ("q", "a"))
    score(RewardModelScorer(Plain()), one)
    assert one.meta["rm_score"] == 0.25


def test_a_refused_input_fails_only_its_own_rollout():
    client = FakeRewardModel(lambda text: DataError("too long") if "bad" in text else len(text))
    rollouts = [rollout(str(i), ("q", "bad" if i == 5 else str(i))) for i in range(8)]
    errors = score(RewardModelScorer(client), *rollouts)
    assert list(errors) == ["5"]
    assert "too long" in str(errors["5"])
    assert [("rm_score" in r.meta) for r in rollouts] == [i != 5 for i in range(8)]


def test_a_failed_call_is_not_repeated_for_each_input():
    client = FakeRewardModel(lambda text: InferenceError("the server is gone"))
    rollouts = [rollout(str(i), ("q", str(i)), reward=1.0) for i in range(4)]
    errors = score(RewardModelScorer(client, batch_size=2), *rollouts)
    assert sorted(errors) == list("0123")
    assert all(isinstance(error, GradingError) and "gone" in str(error) for error in errors.values())
    assert len(client.calls) == 2
    assert not any("rm_score" in r.meta for r in rollouts)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_an_error_of_its_rollout(bad):
    client = FakeRewardModel(lambda text: bad if "1" in text else 1.0)
    one, two = rollout("a", ("q", "1")), rollout("b", ("q", "2"))
    one.meta["rm_score"] = 0.9  # of a previous call
    errors = score(RewardModelScorer(client), one, two)
    assert list(errors) == ["a"]
    assert "rm_score" not in one.meta
    assert two.meta["rm_score"] == 1.0


def test_a_wrong_number_of_scores_is_an_error():
    class Short:
        async def score_batch(self, inputs, *, normalize=True):
            return [1.0]

    errors = score(RewardModelScorer(Short()), rollout("a", ("q", "1")), rollout("b", ("q", "2")))
    assert "1 scores for 2 inputs" in str(errors["a"])


def test_a_client_that_never_answers_times_out():
    class Silent:
        async def score_batch(self, inputs, *, normalize=True):
            await asyncio.Event().wait()

    errors = score(RewardModelScorer(Silent(), timeout_s=0.01), rollout("a", ("q", "1")))
    assert "too long" in str(errors["a"])


def test_a_rollout_that_cannot_be_rendered_or_has_no_steps_is_its_own_error():
    def render(r):
        return {"a": "fine"}[r.id]

    errors = score(
        RewardModelScorer(FakeRewardModel(), render_fn=render), rollout("a", ("q", "1")), rollout("b", ("q", "1")), rollout("c")
    )
    assert sorted(errors) == ["b", "c"]
    assert "no step" in str(errors["c"])


@pytest.mark.parametrize(
    ("mode", "rewards"),
    # step rewards 1 and 2 (a return of 3), score 10
    [
        ("replace", [0.0, 10.0]),
        ("add", [1.0, 12.0]),
        ("multiply", [10.0, 20.0]),
        ("weighted", [0.25, 0.5 + 7.5]),
        ("bonus", [1.0, 2.0 + 5.0]),
    ],
)
def test_as_the_reward_the_score_replaces_or_joins_the_return_by_mode(mode, rewards):
    one = rollout("r", ("o", "a"), ("p", "b"), reward=2.0)
    one.steps[0].reward = 1.0
    reward = RewardModelReward(RewardModelScorer(FakeRewardModel(lambda _: 10.0)), mode, rm_coeff=0.5, alpha=0.25)
    assert score(reward, one) == {}
    assert [step.reward for step in one.steps] == rewards
    assert one.steps[-1].info["rewards/reward_model"] == 10.0
    assert one.steps[-1].info["rewards/task"] == 3.0


@pytest.mark.parametrize(("finish", "expected"), [("stop", 4.0), ("length", 1.0)])
def test_a_truncated_answer_gets_a_penalty_and_keeps_its_raw_score(finish, expected):
    one = rollout("r", ("o", "a"), reward=9.0, ids=([5], [6], [-0.1], finish))
    two = rollout("s", ("o", "a"), reward=9.0, finish_reason=finish)
    score(RewardModelReward(RewardModelScorer(FakeRewardModel(lambda _: 4.0)), unfinished_penalty=3.0), one, two)
    assert [one.total_reward, two.total_reward] == [expected, expected]
    assert one.meta["rm_score"] == one.steps[-1].info["rewards/reward_model"] == 4.0
    with pytest.raises(ConfigError, match="unfinished_penalty"):
        RewardModelReward(RewardModelScorer(FakeRewardModel()), unfinished_penalty=-1.0)


def test_reward_functions_run_first_and_their_failures_are_kept():
    class Before:
        async def score(self, rollouts):
            rollouts[0].steps[-1].reward += 1.0
            return {rollouts[1].id: GradingError("no")}

    client, one, two = FakeRewardModel(), rollout("a", ("q", "1")), rollout("b", ("q", "22"))
    errors = score(RewardModelReward(RewardModelScorer(client), "add", before=Before()), one, two)
    assert list(errors) == ["b"]
    assert one.total_reward == 1.0 + len("q\n1")
    assert client.calls[0][0] == ["q\n1"]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"mode \('mean'\) must be one of"):
        RewardModelReward(RewardModelScorer(FakeRewardModel()), "mean")


# In the rollout engine


def engine(scorer, *texts):
    client = ScriptedClient(*texts)
    return RolloutEngine(env_registry={"e": Counting}, protocol_registry={"p": lambda: protocol(client)}, scorer=scorer)


def requests(*groups):
    return [RolloutRequest(EnvSpec("e"), ProtocolSpec("p"), inference=FOR_RL, env_seed=1, meta={"group_id": g}) for g in groups]


def test_scores_reach_the_credit_assigner_of_the_preset():
    algorithm = make_grpo_with_rm(group_size=2, rm_mode="replace")
    playing = engine(RewardModelScorer(FakeRewardModel(lambda text: len(text.split("\n")[1]))), "aa", "b")
    batch = asyncio.run(playing.generate_batch(requests("g", "g"), algorithm, concurrency=1))
    assert [item.weight for item in batch.items] == [2.0, 1.0]
    assert [item.meta["reward"] for item in batch.items] == [1.0, 1.0]


def test_as_the_reward_scores_are_compared_within_their_group():
    reward = RewardModelReward(RewardModelScorer(FakeRewardModel(lambda text: len(text.split("\n")[1]))))
    batch = asyncio.run(
        engine(reward, "aaa", "b").generate_batch(requests("g", "g"), credit_assigner=GroupNormalizedReturn(2), concurrency=1)
    )
    assert [item.weight for item in batch.items] == [1.0, -1.0]


def test_a_rollout_that_cannot_be_scored_is_a_failed_episode_and_its_group_is_left_out():
    client = FakeRewardModel(lambda text: DataError("no") if text.endswith("c") else 1.0)
    playing = engine(RewardModelReward(RewardModelScorer(client)), "a", "b", "c", "d")
    batch = asyncio.run(playing.generate_batch(requests("g", "g", "h", "h"), credit_assigner=EpisodicReturn(), concurrency=1))
    assert batch.meta["num_failed_episodes"] == 1
    assert batch.meta["num_dropped_groups"] == 1
    assert [item.weight for item in batch.items] == [1.0, 1.0]
