"""Rewards of places in an answer: where they are, the credit of tokens by hand, and laws."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from playing import tokenizer
from reward_models import FakeRewardModel, reward_model, score_alone

from ludic.errors import ConfigError, DataError, GradingError
from ludic.inference import LocalRewardModel
from ludic.training import GroupNormalizedReturn, OverlongPenalty, ProcessReward, RewardModelReward, RewardModelScorer
from ludic.training.process_rewards import find_step_ends
from ludic.training.reward_functions import RewardFunctions
from ludic.training.rollouts.to_samples import batch_from_rollouts
from ludic.types import Rollout, Step, TokenTrace

EOS = 2


def answer(text="abcd", reward=0.0, places=None, group="g", **info):
    """One answer with one token for each byte, and no end token."""
    info = {"row": {"prompt": "?"}, **info} | ({} if places is None else {"process_rewards": places})
    step = Step(0, "?", text, None, reward, False, True, info, TokenTrace([9], tokenizer()(text)["input_ids"], None, "stop"))
    return Rollout(steps=[step], meta={"request_meta": {"group_id": group}})


def placed(*places, text="abcd"):
    return answer(text, sum(reward for *_, reward in places), [list(place) for place in places])


def credit(assigner, *rollouts):
    """The credit of each token of each rollout."""
    weights = assigner.compute(rollouts)
    return [
        [w for s in r.steps for w in np.broadcast_to(weights[r.id, s.index], len(s.trace.completion_token_ids)).tolist()]
        for r in rollouts
    ]


def alone(mode="returns", **settings):
    return ProcessReward(1, mode, normalize="none", **settings)


# ---- credit by hand


def test_returns_sum_the_rewards_that_end_later():
    one = placed((0, 1, 1.0), (2, 3, -0.5))
    assert credit(alone(), one) == [[0.5, 0.5, -0.5, -0.5]]
    # gamma 1/2: 1 at token 1 and -0.5 at token 3 are 1/2 - 1/16, 1 - 1/8, -1/4, -1/2
    assert credit(alone(gamma=0.5), one) == [[0.4375, 0.875, -0.25, -0.5]]


def test_as_they_are_a_place_shares_its_reward_and_places_may_overlap():
    assert credit(alone("as_is"), placed((0, 1, 1.0), (2, 3, -0.5))) == [[0.5, 0.5, -0.25, -0.25]]
    assert credit(alone("as_is"), placed((1, 1, 1.0), (0, 3, 4.0))) == [[1.0, 2.0, 1.0, 1.0]]


def test_all_step_rewards_of_a_group_are_normalised_together():
    """DeepSeekMath, section 4.1.3. The rewards 1, 0 and 0, -1 have mean 0 and standard deviation
    sqrt(1/2), so that they become sqrt(2), 0, 0, -sqrt(2). The first answer's tokens have sqrt(2)
    up to its first step's end, then 0; the second's have -sqrt(2)."""
    first, second = placed((1, 1, 1.0), (3, 3, 0.0)), placed((0, 0, 0.0), (3, 3, -1.0))
    root = math.sqrt(2)
    assert credit(ProcessReward(2), first, second) == [
        pytest.approx([root, root, 0, 0], abs=1e-6),
        pytest.approx([-root] * 4),
    ]


def test_by_index_first_rewards_are_compared_with_first_ones():
    """First rewards 3 and 1 become 1 and -1; second ones 10 and 20 become -1 and 1."""
    rollouts = placed((0, 0, 3.0), (3, 3, 10.0)), placed((1, 1, 1.0), (3, 3, 20.0))
    assert credit(ProcessReward(2, normalize="index"), *rollouts) == [
        pytest.approx([0, -1, -1, -1], abs=1e-6),
        pytest.approx([0, 0, 1, 1], abs=1e-6),
    ]


def test_an_outcome_of_zero_counts_beside_the_steps_if_another_answer_has_one():
    """Outcomes 1 and 0, steps 1 and 0: by index the outcomes become 1 and -1, and so do the
    steps."""
    right, wrong = answer(reward=2.0, places=[[1, 1, 1.0]]), answer(places=[[1, 1, 0.0]])
    by_index = ProcessReward(2, normalize="index")
    assert credit(by_index, right, wrong) == [pytest.approx([2, 2, 1, 1]), pytest.approx([-2, -2, -1, -1])]


def test_a_reward_of_a_later_step_reaches_the_earlier_ones():
    episode = answer("ab", 0.0)
    episode.steps += answer("cd", 1.0, [[0, 0, 1.0]]).steps
    episode.steps[1].index = 1
    assert credit(alone(gamma=0.5), episode) == [[0.25, 0.5, 1.0, 0.0]]


def test_calls_of_tools_have_no_reward_of_their_own():
    """Otherwise the rewards 0 1 and 0 0 would be compared, and not 1 and 0."""
    episodes = []
    for reward in (1.0, 0.0):
        episode = answer("call", intermediate_call=True)
        episode.steps += answer("ab", reward).steps
        episode.steps[1].index = 1
        episodes.append(episode)
    assert credit(ProcessReward(2), *episodes) == [pytest.approx([1.0] * 6), pytest.approx([-1.0] * 6)]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6))
def test_plain_rewards_have_the_credit_of_grpo(rewards):
    rollouts = [answer(reward=reward) for reward in rewards]
    expected = GroupNormalizedReturn(len(rewards), normalize_adv=True).compute(rollouts)
    found = ProcessReward(len(rewards)).compute(rollouts)
    assert all(isinstance(weight, float) for weight in found.values())
    assert found == pytest.approx(expected, abs=1e-6)


PLACES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.floats(-100, 100)), max_size=5)


@given(PLACES, st.floats(-10, 10))
def test_as_they_are_credits_sum_to_the_reward(places, outcome):
    places = [[min(first, last), max(first, last), reward] for first, last, reward in places]
    one = answer("abcdefgh", outcome + sum(reward for *_, reward in places), places)
    assert sum(credit(alone("as_is"), one)[0]) == pytest.approx(one.total_reward, abs=1e-6)
    assert credit(alone(), one)[0][0] == pytest.approx(one.total_reward, abs=1e-6)


def test_the_length_penalty_goes_around_it():
    """Of 8 tokens 4 are over the limit of 4: the penalty is 1, for the whole answer."""
    penalised = OverlongPenalty(alone(), max_tokens=8, buffer_tokens=4)
    assert credit(penalised, placed((0, 0, 2.0), text="abcdefgh")) == [[1.0] + [-1.0] * 7]


def test_a_group_of_another_size_and_unknown_settings_are_refused():
    with pytest.raises(DataError, match="group_size is 3"):
        ProcessReward(3).compute([placed((0, 0, 1.0))])
    for settings in ({"mode": "sum"}, {"normalize": "batch"}, {"gamma": 1.5}, {"gamma": math.nan}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            ProcessReward(2, **settings)
    bare = Rollout(steps=[Step(0, "?", "a", None, 1.0, False, True)], meta={"request_meta": {"group_id": "g"}})
    with pytest.raises(DataError, match="no token trace"):
        ProcessReward(1).compute([bare])


def test_the_credit_of_tokens_is_a_column_of_the_sample_unless_it_is_constant():
    rollouts = [placed((0, 1, 1.0), (2, 3, -0.5)), answer(reward=0.25, group="h")]
    several, constant = batch_from_rollouts(rollouts, alone()).items
    assert several.attachments.token_columns["token_weight"].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert (several.weight, constant.weight, constant.attachments.token_columns) == (0.0, 0.25, {})


# ---- reward functions


def scored(returned, one, **settings):
    """The rollout, or its error, after a function that returns this for it."""
    settings = {"tokenizer": tokenizer(), **settings}
    errors = asyncio.run(RewardFunctions(lambda completions: [returned], **settings).score([one]))
    return errors.get(one.id, one)


def test_positions_and_characters_are_stored_as_tokens_with_their_weight():
    """é is two bytes, so that characters 0 to 1 are the tokens 0 to 2."""
    one = scored([(3, 1.0), ((0, 2), -0.25), (np.int64(0), 0.5)], answer("éab", reward=1.0), weights=[2.0])
    assert one.steps[0].info["process_rewards"] == [[3, 3, 2.0], [0, 2, -0.5], [0, 0, 1.0]]
    assert (one.total_reward, one.steps[0].info["rewards/<lambda>"]) == (3.5, 1.25)


def test_a_position_counts_the_tokens_of_all_answers():
    episode = answer("call", intermediate_call=True)
    episode.steps += [*answer("ab").steps, *answer("cd").steps]
    one = scored([(1, 1.0), (2, 2.0)], episode)
    assert [(step.reward, step.info.get("process_rewards")) for step in one.steps] == [
        (0.0, None),
        (1.0, [[1, 1, 1.0]]),
        (2.0, [[0, 0, 2.0]]),
    ]


class Pieces:
    """A tokenizer with tokens of several characters: an id is an index of its text."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, **_):
        return "".join(self.pieces[i] for i in ids)


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_a_span_has_exactly_the_tokens_that_its_characters_are_in(pieces, data):
    text = "".join(pieces)
    owners = [index for index, piece in enumerate(pieces) for _ in piece]
    end = data.draw(st.integers(1, len(text)))
    start = data.draw(st.integers(0, end - 1))
    one = answer(text)
    one.steps[0].trace = TokenTrace([9], list(range(len(pieces))))
    scored([((start, end), 1.0)], one, tokenizer=Pieces(*pieces))
    assert one.steps[0].info["process_rewards"] == [[owners[start], owners[end - 1], 1.0]]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([(4, 1.0)], "at 4, .*position in 4 completion_ids"),
        ([(-1, 1.0)], "at -1, .*position in 4"),
        ([((2, 2), 1.0)], r"at \(2, 2\), .*in 4 characters"),
        ([((3, 5), 1.0)], r"at \(3, 5\), .*in 4 characters"),
        ([((-1, 2), 1.0)], r"at \(-1, 2\), .*in 4 characters"),
        ([(0, 1.0), (1, math.nan)], r"returned \[\(1, nan\)\], .*finite"),
        ([(0, "1")], r"returned \[\(0, '1'\)\], .*number"),
        ([(0.5, 1.0)], r"returned \[\(0\.5, 1\.0\)\], .*position"),
        ([((0, 1, 2), 1.0)], r"\(\(0, 1, 2\), 1\.0\).*start, end"),
        ([1.0, 2.0], r"returned \[1\.0\], .*list of \(position"),
    ],
)
def test_a_wrong_place_or_reward_is_one_line_and_changes_nothing(returned, said):
    one = answer(reward=0.5)
    with pytest.raises(GradingError, match=said) as caught:
        raise scored(returned, one)
    assert "\n" not in str(caught.value)
    assert "reward function <lambda> returned" in str(caught.value)
    assert (one.total_reward, list(one.steps[0].info)) == (0.5, ["row"])


def test_characters_need_a_tokenizer_and_the_text_of_the_tokens():
    with pytest.raises(GradingError, match=r"characters \(0, 1\), .*tokenizer="):
        raise scored([((0, 1), 1.0)], answer(), tokenizer=None)
    other = answer()
    other.steps[0].action = "xyz"
    with pytest.raises(GradingError, match=r"\(0, 1\), .*decode to"):
        raise scored([((0, 1), 1.0)], other)


def test_answers_that_are_measured_get_the_sum_alone():
    one = scored([(99, 1.0), ((0, 99), 0.5)], answer(), is_eval=True)
    assert (one.total_reward, "process_rewards" in one.steps[0].info) == (1.5, False)


def test_rewards_see_the_calls_of_tools_and_their_results_unless_the_data_has_such_columns():
    calls = [{"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    episode = answer("call", intermediate_call=True, chat_completion={"tool_calls": calls}, tool_results=["7"])
    episode.steps += answer("7").steps
    seen = []

    def check(completions, tool_calls, tool_results):
        seen.append((completions, tool_calls, tool_results))
        return [1.0] * len(completions)

    functions = RewardFunctions(check)
    functions.check_columns([])
    asyncio.run(functions.score([episode, answer("8")]))
    seen_calls = [calls[0] | {"name": "look", "arguments": {}, "result": "7", "failed": None}]
    assert seen == [(["7", "8"], [seen_calls, []], [["7"], []])]
    own = answer(row={"prompt": "?", "tool_calls": "mine"})
    asyncio.run(functions.score([own]))
    assert seen[-1][1:] == (["mine"], [[]])


# ---- reward models


@pytest.mark.parametrize(
    ("text", "step_end", "ends"),
    [
        ("ab\n\ncd\n\ne", "\n\n", [3, 7, 8]),
        ("ab\n\n\n\ncd", "\n\n", [5, 7]),  # no empty step
        ("ab\n\n", "\n\n", [3]),
        ("ab", "\n\n", [1]),
        ("a.b.c", ord(".") + 3, [1, 3, 4]),
        ("é.b", ".", [2, 3]),
    ],
)
def test_steps_end_with_their_separator_and_with_the_answer(text, step_end, ends):
    assert find_step_ends(tokenizer()(text)["input_ids"], step_end, tokenizer()) == ends


def test_the_end_token_after_a_separator_is_no_step():
    assert find_step_ends([*tokenizer()("a.b.")["input_ids"], EOS], ".", tokenizer()) == [1, 4]


def judged(one, before=None, **settings):
    scorer = RewardModelScorer(
        FakeRewardModel(tokenizer=tokenizer()), policy_tokenizer=tokenizer(), normalize=False, step_end=".", timeout_s=5
    )
    return asyncio.run(RewardModelReward(scorer, before=before, **settings).score([one]))


def test_a_reward_model_scores_each_step_end():
    """The fake model's score is its number of tokens: the prompt's one and those of the answer."""
    one = answer("ab.c", reward=7.0)
    assert judged(one) == {}
    assert one.meta["rm_score_steps"] == [[2, 4.0], [3, 5.0]]
    assert (one.total_reward, one.meta["rm_score"]) == (9.0, 9.0)
    assert one.steps[0].info["process_rewards"] == [[2, 2, 4.0], [3, 3, 5.0]]
    assert credit(alone(), one) == [[9.0, 9.0, 9.0, 5.0]]


def test_step_scores_join_rewards_that_keep_their_places_unless_they_are_scaled():
    functions = RewardFunctions(lambda completions: [[(0, 1.0)]])
    one, two = answer("ab.c"), answer("ab.c")
    judged(one, functions, mode="bonus", rm_coeff=0.5)
    assert one.steps[0].info["process_rewards"] == [[0, 0, 1.0], [2, 2, 2.0], [3, 3, 2.5]]
    judged(two, functions, mode="weighted", alpha=0.5)  # 0.5 * 1 + 0.5 * (4 + 5)
    assert (two.total_reward, two.steps[0].info["process_rewards"]) == (5.0, [[2, 2, 2.0], [3, 3, 2.5]])


def test_a_local_model_gives_each_step_the_score_of_what_it_ends():
    model, one = reward_model(), answer("ab.c")
    client = LocalRewardModel(model, tokenizer())
    scorer = RewardModelScorer(client, policy_tokenizer=tokenizer(), normalize=False, step_end=".")
    assert asyncio.run(scorer.score([one])) == {}
    ids = [9, *one.steps[0].trace.completion_token_ids]
    assert [score for _, score in one.meta["rm_score_steps"]] == pytest.approx(
        [score_alone(model, ids[:4]), score_alone(model, ids)], abs=1e-5
    )


def test_step_scores_need_sampled_ids_and_a_mode_that_adds():
    scorer = RewardModelScorer(FakeRewardModel(tokenizer=object()), policy_tokenizer=tokenizer(), step_end=".")
    one = answer()
    errors = asyncio.run(scorer.score([one]))
    with pytest.raises(GradingError, match=r"step_end \('\.'\) .*policy_tokenizer"):
        raise errors[one.id]
    with pytest.raises(ConfigError, match=r"step_end \(''\)"):
        RewardModelScorer(FakeRewardModel(), step_end="")
    with pytest.raises(ConfigError, match=r"multiply.*step_end"):
        RewardModelReward(scorer, "multiply")
