"""Reward functions in TRL's form: their arguments, how their results are used, and the effect of
errors."""

import asyncio
import functools
import re
import sys
import threading

import pytest
from hypothesis import given, strategies as st
from reward_scoring import rollout, score

from ludic.errors import ConfigError, GradingError
from ludic.training.reward_functions import RewardFunctions, TrainerState, WrongLength, is_coroutine_function
from ludic.types import Rollout, Step, TokenTrace

# ---- functions from TRL's documentation, run unchanged
# ------------------------------------------------


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def accuracy_of_chat(prompts, completions, answer, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content == right else 0.0 for content, right in zip(contents, answer, strict=True)]


def for_maths_only(completions, task, **kwargs):
    return [float(c == "4") if kind == "math" else None for c, kind in zip(completions, task, strict=True)]


async def judge_score(prompts, completions, completion_ids, trainer_state, **kwargs):
    await asyncio.sleep(0)
    return [len(ids) / 10 + trainer_state.global_step for ids in completion_ids]


def test_a_function_can_take_only_completions():
    assert score(reward_len, rollout("four"), rollout("x" * 20)) == ([-16.0, 0.0], [None, None])


def test_a_conversation_is_passed_as_messages_and_columns_as_lists():
    chat = [{"role": "user", "content": "2+2="}]
    assert score(accuracy_of_chat, rollout("4", prompt=chat, answer="4"), rollout("5", prompt=chat, answer="4"))[0] == [1.0, 0.0]


def test_a_coroutine_function_gets_token_ids_and_the_state_of_the_run():
    rewards, _ = score(judge_score, rollout("abc"), trainer_state=TrainerState(global_step=7))
    assert rewards == [pytest.approx(7.3)]


def test_several_functions_are_summed_with_weights_and_none_is_skipped():
    """0.5 * (-16) + 2 * 1 = -6 is the sum for `math`; 0.5 * (-19) = -9.5 where `for_maths_only`
    returns None."""
    functions = [lambda completions, **_: [-16.0, -19.0], for_maths_only]
    sums = score(functions, rollout("4", task="math"), rollout("y", task="code"), weights=[0.5, 2.0])
    assert sums == ([-6.0, -9.5], [None, None])


def test_a_batch_is_one_call_with_all_completions():
    calls = []

    def spy(prompts, completions, completion_ids, **columns):
        calls.append((prompts, completions, completion_ids, columns))
        return [0.0] * len(prompts)

    members = [rollout("a", "g1", level=1), rollout("b", "g1", level=1), rollout("c", "g2", level=2, prompt="3+3=")]
    score(spy, *members)
    ((prompts, completions, ids, columns),) = calls
    assert (prompts, completions, ids) == (["2+2=", "2+2=", "3+3="], ["a", "b", "c"], [[97], [98], [99]])
    assert columns.pop("level") == [1, 1, 2]
    assert set(columns) == {"trainer_state", "log_extra", "log_metric", "is_eval"}


def test_a_function_without_var_keywords_gets_only_its_arguments():
    assert score(lambda completions, answer: [float(c == a) for c, a in zip(completions, answer, strict=True)],
                 rollout("4", answer="4", level=3))[0] == [1.0]  # fmt: skip


def test_rewards_add_to_those_of_the_environment_and_are_in_the_info_by_name():
    one = rollout("4", reward=0.25, task="code")
    asyncio.run(RewardFunctions([reward_len, for_maths_only, reward_len]).score([one]))
    assert one.total_reward == 0.25 - 19 - 19
    assert {k: v for k, v in one.steps[0].info.items() if k.startswith("rewards/")} == {
        "rewards/reward_len": -19.0,
        "rewards/reward_len_2": -19.0,
    }


def test_extra_log_columns_are_stored_with_their_answers():
    def logs(completions, log_extra, log_metric):
        log_extra("upper", [text.upper() for text in completions])
        log_metric("count", len(completions))
        return [1.0] * len(completions)

    one, two = rollout("a"), rollout("b")
    asyncio.run(RewardFunctions(logs).score([one, two]))
    assert one.steps[0].info["reward_log"] == {"upper": "A", "count": 2}
    assert two.steps[0].info["reward_log"] == {"upper": "B", "count": 2}


def test_an_episode_of_several_steps_is_a_list_of_messages_and_its_last_step_is_rewarded():
    seen = []

    def spy(completions, completion_ids):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [1.0]

    steps = [
        Step(0, "q", "look", "a door", 0.0, False, False, {}, TokenTrace([1], [5, 6])),
        Step(1, "a door", "open", None, 0.0, False, True, {"row": {"prompt": "q"}}, TokenTrace([1], [7])),
    ]
    played = Rollout(steps=steps)
    asyncio.run(RewardFunctions(spy).score([played]))
    said = [("assistant", "look"), ("user", "a door"), ("assistant", "open")]
    assert seen == [([{"role": role, "content": content} for role, content in said], [5, 6, 7])]
    assert [step.reward for step in steps] == [0.0, 1.0]


def test_arrays_tensors_and_booleans_are_valid_rewards():
    import numpy as np
    import torch

    for returned in (np.array([1, 2]), torch.tensor([1.0, 2.0]), (True, np.float32(2)), [torch.tensor(1), 2]):
        assert score(lambda completions, returned=returned: returned, rollout("a"), rollout("b"))[0] == [1.0, 2.0]


def test_the_name_of_a_reward_comes_from_any_kind_of_callable():
    class Judge:
        def __call__(self, completions):
            return [1.0] * len(completions)

    scorer = RewardFunctions([reward_len, functools.partial(reward_len), Judge(), lambda completions: [0]])
    assert scorer.names == ["reward_len", "reward_len_2", "Judge", "<lambda>"]


def test_plain_functions_run_in_the_main_thread():
    """math-verify sets its deadline with a signal, which works only in the main thread."""
    threads = []
    score(lambda completions: [threads.append(threading.current_thread()) or 0.0], rollout("a"))
    assert threads == [threading.main_thread()]


async def test_coroutine_functions_run_concurrently():
    met = asyncio.Barrier(2)

    async def one(completions):
        await met.wait()
        return [1.0]

    async def two(completions):
        await met.wait()
        return [2.0]

    played = rollout("a")
    assert await RewardFunctions([one, two], timeout_s=30).score([played]) == {}
    assert played.total_reward == 3.0


# ---- errors
# ------------------------------------------------------------------------------------------


def fails_on(word):
    def exact(completions):
        if word in completions:
            raise KeyError(word)
        return [1.0] * len(completions)

    return exact


def test_a_function_that_raises_fails_only_the_groups_it_raises_on():
    rewards, errors = score(fails_on("bad"), rollout("a", 1), rollout("bad", 2), rollout("b", 2), rollout("c", 3))
    assert rewards == [1.0, 0.0, 0.0, 1.0]
    assert [error is None for error in errors] == [True, False, False, True]
    line = fails_on.__code__.co_firstlineno + 3
    assert re.search(rf"exact failed: KeyError: 'bad' \({re.escape(__file__)}:{line}, in exact\)$", str(errors[1]))
    assert isinstance(errors[1], GradingError)
    assert isinstance(errors[1].__cause__, KeyError)


def test_a_function_that_takes_messages_for_text_is_told_that_they_are_messages():
    chat = [{"role": "user", "content": "2+2="}]
    _, errors = score(lambda completions: [float(text.strip() == "4") for text in completions], rollout("4", prompt=chat))
    assert "list of messages" in str(errors[0])
    assert "completion[-1]['content']" in str(errors[0])
    _, errors = score(lambda completions: [text.missing for text in completions], rollout("4"))
    assert "messages" not in str(errors[0])


def test_a_failed_function_leaves_no_partial_reward_of_the_others():
    rewards, errors = score([reward_len, fails_on("bad")], rollout("bad"), weights=[1.0, 1.0])
    assert (rewards, errors[0] is None) == ([0.0], False)


@given(bad=st.sets(st.integers(0, 11)), coroutine=st.booleans())
def test_exactly_the_groups_with_a_failure_have_no_reward(bad, coroutine):
    """12 answers in groups of 3."""
    texts = ["bad" if n in bad else "good" for n in range(12)]

    async def later(completions):
        return fails_on("bad")(completions)

    rewards, errors = score(later if coroutine else fails_on("bad"), *[rollout(t, n // 3) for n, t in enumerate(texts)])
    lost = {n // 3 for n in bad}
    assert [error is not None for error in errors] == [n // 3 in lost for n in range(12)]
    assert rewards == [0.0 if n // 3 in lost else 1.0 for n in range(12)]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned NoneType; .*a list"),
        (1.0, "returned float; .*a list"),
        ([float("nan")], "own returned nan, .*finite, or None, .*prompt '2"),
        ([float("inf")], "reward function own returned inf, where"),
        (["1.0"], r"own returned the text '1\.0', .*number"),
        ([10**400], "own returned 10{400}, .*number or None"),
        ([[1.0]], r"own returned \[1\.0\], .*number or None"),
        ([None], "every .*returned None .*prompt '2"),
        ([GradingError("too long")], "too long"),
    ],
)
def test_an_invalid_reward_is_an_error_and_not_a_reward_of_zero(returned, said):
    def own(completions):
        return returned

    played = rollout("a", reward=0.5)
    errors = asyncio.run(RewardFunctions(own).score([played]))
    with pytest.raises(GradingError, match=said):
        raise errors[played.id]
    assert played.total_reward == 0.5
    assert not [key for key in played.steps[0].info if key.startswith("rewards/")]


def test_an_invalid_reward_fails_only_its_own_rollout():
    rewards, errors = score(lambda completions: [1.0, GradingError("hung"), 0.5], rollout("a"), rollout("b"), rollout("c"))
    assert rewards == [1.0, 0.0, 0.5]
    assert [str(error) if error else None for error in errors] == [None, "hung", None]


def test_a_hanging_coroutine_is_cancelled_at_the_deadline_and_not_called_again():
    calls, cancelled = [], []

    async def hangs(completions):
        calls.append(len(completions))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    rewards, errors = score([hangs, reward_len], rollout("a", 1), rollout("b", 2), timeout_s=0.01)
    assert (calls, cancelled, rewards) == ([2], [True], [0.0, 0.0])
    assert all(re.search(r"reward function hangs .*0\.01 s", str(error)) for error in errors)


def test_a_timeout_error_raised_by_the_function_is_an_ordinary_error():
    async def gives_up(completions):
        raise TimeoutError("the judge is away")

    _, (error,) = score(gives_up, rollout("a"))
    assert re.search(rf"gives_up failed: TimeoutError: the judge is away \({re.escape(__file__)}:", str(error))


@pytest.mark.parametrize(("returned", "is_eval"), [([1.0], False), ([1.0], True), ([], False), ([1.0] * 4, False)])
def test_a_wrong_number_of_rewards_is_an_error_at_once_and_no_group_is_asked_again(returned, is_eval):
    """One reward is right for a group of one answer, so calls group by group would take it."""
    calls = []

    def forgets(completions):
        calls.append(len(completions))
        return returned

    said = f"reward function forgets returned {len(returned)} rewards for 3 completions; return one each"
    with pytest.raises(WrongLength, match=said):
        score(forgets, rollout("a", 1), rollout("b", 2), rollout("c", 3), is_eval=is_eval)
    assert calls == [3]


@pytest.mark.parametrize("coroutine", [False, True])
def test_an_exit_in_a_reward_function_is_an_ordinary_error(coroutine):
    def leaves(completions):
        if "bad" in completions:
            sys.exit(3)
        return [1.0] * len(completions)

    async def leaves_later(completions):
        return leaves(completions)

    rewards, errors = score(leaves_later if coroutine else leaves, rollout("a", 1), rollout("bad", 2))
    assert rewards == [1.0, 0.0]
    assert str(errors[1]).endswith("failed: it called sys.exit(3)")


def test_an_error_shows_only_part_of_a_long_prompt():
    played = Rollout(steps=[Step(0, "q", "a", None, 0.0, False, True, info={"row": {"prompt": "why? " * 100}})])
    errors = asyncio.run(RewardFunctions(lambda completions: [None]).score([played]))
    assert str(errors[played.id]).endswith(f" returned None for the answer to the prompt {('why? ' * 16)[:77] + '...'!r}")


def test_a_rollout_without_its_row_is_a_distinct_error():
    lost = Rollout(steps=[Step(0, "q", "a", None, 0.0, False, True)])
    rewards, errors = score(reward_len, lost, rollout("x" * 20))
    assert rewards == [0.0, 0.0]
    assert re.search("not carry the row .*played", str(errors[0]))
    assert errors[1] is None


def test_the_row_can_come_from_the_request():
    played = Rollout(steps=[Step(0, "q", "a", None, 0.0, False, True)], meta={"request_meta": {"row": {"prompt": "q", "n": 3}}})
    assert score(lambda completions, n: n, played)[0] == [3.0]


@pytest.mark.parametrize(
    ("functions", "weights", "said"),
    [
        ([], None, "at least one reward function"),
        ([reward_len], [1.0, 2.0], "2 weights for 1 reward functions"),
        ([reward_len], [float("nan")], "must be finite"),
        (["reward_len"], None, "must be callable, got str"),
    ],
)
def test_invalid_settings_are_refused(functions, weights, said):
    with pytest.raises(ConfigError, match=said):
        RewardFunctions(functions, weights)


def test_an_argument_that_the_data_lacks_is_refused_before_anything_is_played():
    scorer = RewardFunctions([reward_len, judge_score, accuracy_of_chat])
    scorer.check_columns(["answer"])
    with pytest.raises(
        ConfigError,
        match=r"accuracy_of_chat asks for answer, .*columns .*: level",
    ):
        scorer.check_columns(["level"])


class Holder:
    """A callable with an attribute `func`, as a `functools.partial` has."""

    def __init__(self, func):
        self.func = func

    def __call__(self):
        return None


async def in_coroutine():
    """Nothing."""


def test_only_a_partial_is_looked_into_for_a_coroutine_function():
    assert is_coroutine_function(functools.partial(functools.partial(in_coroutine)))
    assert not is_coroutine_function(Holder(in_coroutine))
