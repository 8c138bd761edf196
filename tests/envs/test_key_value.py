"""The key-value tool environment: rules by hand, guessing odds by count, and the store by
property."""

import random

import pytest
from hypothesis import given, strategies as st

from ludic.envs.key_value import KEYS, KeyValueEnv, TaggedText, TerseText
from ludic.errors import ConfigError, RolloutError

seeds = st.integers(0, 2**32)
keys = st.sampled_from(KEYS)


def start_episode(start: str = "c", seed: int = 0, **settings) -> KeyValueEnv:
    env = KeyValueEnv(start, **settings)
    env.env_reset(seed=seed)
    return env


def test_two_calls_and_the_right_answer_have_reward_one() -> None:
    env = start_episode(holds="h")
    assert env.env_current_obs() == "c"
    first = env.env_step("?c")
    assert (first.obs, first.reward, first.terminated, first.truncated, first.info) == (
        *("h", 0.0, False, False),
        {"call": "c", "malformed": False},
    )
    second = env.env_step("?h")
    assert second.obs == env.store["h"] == env.target
    last = env.env_step(f"={env.target}")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert (last.info["correct"], last.info["looked_up"], last.info["target"]) == (True, True, env.target)


def test_a_right_guess_has_reward_one_but_does_not_count_as_looked_up() -> None:
    env = start_episode()
    outcome = env.env_step(f"={env.target}")
    assert (outcome.reward, outcome.info["correct"], outcome.info["looked_up"]) == (1.0, True, False)


def test_a_wrong_answer_ends_the_episode_with_reward_zero() -> None:
    env = start_episode()
    wrong = next(key for key in KEYS if key != env.target)
    outcome = env.env_step(f"={wrong}")
    assert (outcome.reward, outcome.terminated, outcome.info["correct"]) == (0.0, True, False)
    assert outcome.obs == f"Wrong, it was {env.target}."
    with pytest.raises(RolloutError, match="call reset"):
        env.env_step("?a")


def test_one_of_the_two_calls_does_not_count_as_looked_up() -> None:
    env = start_episode(holds="h")
    env.env_step("?h")
    assert env.env_step(f"={env.target}").info["looked_up"] is False


@pytest.mark.parametrize("line", ["", "?", "c", "?cc", "?z", "=", "=z", "? c", " ?c", "?c ", "!c", "?=", "ca"])
def test_any_other_action_is_refused_and_uses_a_turn(line: str) -> None:
    env = start_episode()
    outcome = env.env_step(line)
    assert (outcome.obs, outcome.reward, outcome.terminated, outcome.truncated) == ("!", 0.0, False, False)
    assert outcome.info == {"call": None, "malformed": True}


def test_without_an_answer_the_last_turn_truncates_the_episode() -> None:
    env = start_episode(max_turns=3)
    outcomes = [env.env_step("?c") for _ in range(3)]
    assert [outcome.truncated for outcome in outcomes] == [False, False, True]
    assert not any(outcome.terminated for outcome in outcomes)
    assert (outcomes[-1].reward, outcomes[-1].info["correct"]) == (0.0, False)
    with pytest.raises(RolloutError, match="call reset"):
        env.env_step("=a")


def test_an_answer_on_the_last_turn_counts() -> None:
    env = start_episode(max_turns=1)
    assert env.env_step(f"={env.target}").reward == 1.0


@given(seed=seeds, start=keys, holds=st.none() | keys)
def test_the_store_follows_from_the_seed_and_keeps_written_values(seed: int, start: str, holds: str | None) -> None:
    state = random.getstate()
    one, two = (start_episode(start, seed, holds=holds) for _ in range(2))
    assert one.store == two.store
    assert set(one.store) == set(KEYS)
    assert set(one.store.values()) <= set(KEYS)
    assert holds is None or one.store[start] == holds
    assert random.getstate() == state


@given(seed=seeds, start=keys)
def test_looking_up_and_answering_is_always_right(seed: int, start: str) -> None:
    env = start_episode(start, seed)
    held = env.env_step(f"?{start}").obs
    answer = env.env_step(f"?{held}").obs
    outcome = env.env_step(f"={answer}")
    assert (outcome.reward, outcome.info["looked_up"]) == (1.0, True)


def test_a_guess_is_right_one_time_in_ten() -> None:
    # Standard error over 5,000 stores: .0042.
    right = sum(start_episode(holds="h", seed=seed).target == "f" for seed in range(5_000))
    assert right / 5_000 == pytest.approx(0.1, abs=0.02)


def test_the_store_cannot_be_read_before_the_episode() -> None:
    with pytest.raises(RolloutError, match="call reset"):
        KeyValueEnv("c").env_step("?c")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"start": "z"}, r"start \('z'\)"),
        ({"start": "a", "holds": "ab"}, r"holds \('ab'\)"),
        ({"start": "a", "max_turns": 0}, "max_turns"),
    ],
)
def test_an_invalid_setting_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KeyValueEnv(**settings)


# ---- calls in natural language
# ------------------------------------------------------------------------------------------


def test_calls_can_be_written_in_words() -> None:
    env = start_episode(holds="h", text=TaggedText(), system_prompt="rules")
    assert env.suggested_sysprompt == "rules"
    assert "key c" in env.env_current_obs()
    assert env.env_step("I look it up: <get>c</get>").obs == "c holds h."
    assert env.env_step("<get> h </get>").info["call"] == "h"
    assert env.env_step(f"<answer>{env.target}</answer>").info["looked_up"] is True


@pytest.mark.parametrize("line", ["c", "<get>c", "<get></get>", "<get>z</get>", "<get>abc</get>", "get c /get", "</get>c<get>"])
def test_a_line_without_a_call_gets_an_explanation(line: str) -> None:
    assert start_episode(text=TaggedText()).env_step(line).obs == TaggedText().malformed


@given(line=st.text(max_size=30))
def test_any_text_is_parsed_or_refused(line: str) -> None:
    for text in (TerseText(), TaggedText()):
        found = text.read(line)
        assert found is None or (found[0] in ("call", "answer") and found[1] in set(KEYS))
