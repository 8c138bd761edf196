"""Gymnasium's spaces as text, and its environments through the adapter."""

import gymnasium
import numpy as np
import pytest
from foreign_envs import BothAtOnce, Password
from gymnasium import spaces
from hypothesis import given, strategies as st

from ludic.envs.adapters import GymnasiumEnv
from ludic.envs.adapters.gymnasium import action_reader, observation_text, rendered_text
from ludic.errors import ConfigError


def test_an_ansi_rendering_keeps_what_was_highlighted():
    env = GymnasiumEnv("FrozenLake-v1", render_mode="ansi", is_slippery=False)
    assert env.env_reset(seed=0)[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert env.env_step("1").obs == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    env.close()
    assert rendered_text("\n a \x1b[41mb\nc\x1b[0m\n") == " a [b\nc]"


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Text(9, charset="a i\n"), "a i\n", "a i\n"),
        (spaces.Discrete(3), np.int64(2), "2"),
        (spaces.Tuple((spaces.Discrete(32), spaces.Discrete(2))), (np.int64(14), 1), "14, 1"),
        (spaces.Box(-9, 9, (3,)), np.array([0.123456, -2, 3e-7], np.float32), "0.1235 -2 3e-07"),
        (spaces.Box(0, 9, (2, 2), np.int32), np.array([[1, 2], [3, 4]], np.int32), "1 2\n3 4"),
        (spaces.MultiBinary(3), np.array([0, 1, 1], np.int8), "0 1 1"),
        (
            spaces.Dict(at=spaces.MultiDiscrete([5, 5]), on=spaces.Discrete(2)),
            {"at": np.array([4, 0]), "on": 1},
            "at: 4 0\non: 1",
        ),
        (spaces.Sequence(spaces.Discrete(3)), (1, 2), "[1, 2]"),
    ],
)
def test_observations_are_formatted_by_their_space(space, value, text):
    assert space.contains(value)
    assert observation_text(space, value) == text


@pytest.mark.parametrize(
    ("space", "names", "good", "bad"),
    [
        (spaces.Discrete(3, start=-1), None, {"-1": -1, " 1\n": 1, "+0": 0}, ["2", "-2", "1.0", "1 1", "", "one", "１", "1_0"]),
        (spaces.Discrete(2, start=5), ["Up", "down"], {"up": 5, " DOWN ": 6}, ["5", "", "u", "up down"]),
        (spaces.MultiDiscrete([2, 3], start=[0, 1]), None, {"1 3": [1, 3], "0,1": [0, 1]}, ["2 1", "0 0", "1", "1 3 1", "a b"]),
        (spaces.MultiBinary(3), None, {"1 0 1": [1, 0, 1]}, ["1 0 2", "101"]),
        (spaces.MultiBinary([2, 2]), None, {"1 0 0 1": [[1, 0], [0, 1]]}, ["1 0 1"]),
        (spaces.Text(2, charset="ab"), None, {"ab": "ab", "b": "b"}, ["abb", "", "c", " a"]),
    ],
)
def test_actions_are_parsed_by_their_space_and_other_text_is_refused(space, names, good, bad):
    read, legal = action_reader(space, names)
    for text, action in good.items():
        assert space.contains(read(text))
        assert np.array_equal(read(text), action)
    for text in bad:
        with pytest.raises(ValueError) as told:
            read(text)
        assert str(told.value) == legal


@given(st.text())
def test_every_parsed_action_is_in_the_space(text):
    for space in (spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Text(5)):
        try:
            action = action_reader(space, None)[0](text)
        except ValueError:
            continue
        assert space.contains(action)


def test_invalid_text_does_not_step_and_the_observation_lists_legal_actions():
    class Counts(Password):
        steps = 0

        def step(self, action):
            self.steps += 1
            return super().step(action)

    inner = Counts()
    env = GymnasiumEnv(inner, invalid_action_reward=-0.25)
    shown, _ = env.env_reset(seed=5)
    outcome = env.env_step("zzz")
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (-0.25, False, False)
    assert outcome.info == {"invalid_action": True, "raw_action": "zzz"}
    assert outcome.obs == f"Invalid action. Answer with a text of 1 to 8 characters out of 'abcdefgh'.\n{shown}"
    assert inner.steps == 0
    assert env.env_step("a").reward == 0.0
    assert inner.steps == 1


def test_numpy_numbers_become_json():
    env = GymnasiumEnv(Password())
    assert env.env_reset(seed=5) == ("gagf", {"length": 4})
    outcome = env.env_step("fgag")
    assert type(outcome.reward) is float
    assert outcome.info == {"tried": ["a", "fgag"]}


def test_termination_takes_precedence_over_truncation():
    env = GymnasiumEnv(BothAtOnce())
    env.env_reset(seed=0)
    outcome = env.env_step("a")
    assert (outcome.terminated, outcome.truncated) == (True, False)


def test_the_environment_is_closed_once():
    inner = Password()
    env = GymnasiumEnv(inner)
    env.close()
    env.close()
    assert inner.closed == 1


def test_formatting_and_parsing_can_be_the_users():
    env = GymnasiumEnv(
        gymnasium.make("CartPole-v1"),
        observe=lambda obs: f"angle {obs[2]:.2f}",
        read_action=lambda text: {"push left": 0, "push right": 1}[text] if text.startswith("push") else int("no"),
        system_prompt="Balance it.",
    )
    assert env.env_reset(seed=3)[0] == "angle 0.03"
    assert env.suggested_sysprompt == "Balance it."
    assert env.env_step("push left").info == {}
    assert env.env_step("pull").info["invalid_action"] is True
    env.close()


def test_the_system_prompt_names_the_legal_actions():
    prompt = GymnasiumEnv("FrozenLake-v1", action_names=["left", "down", "right", "up"]).suggested_sysprompt
    assert prompt == "Answer with your action and nothing else: one of left, down, right, up."


@pytest.mark.parametrize(
    ("space", "names", "problem"),
    [
        (spaces.Box(0, 1, (2,)), None, "Box space cannot .*text; give `read_action`"),
        (spaces.Discrete(3), ["a", "b"], "2 names .*Discrete .*3 actions"),
        (spaces.Text(3), ["a"], "1 names for a Text space"),
        (spaces.Discrete(2), ["a", "A"], "must differ"),
    ],
)
def test_an_unsupported_space_is_refused_when_the_environment_is_created(space, names, problem):
    with pytest.raises(ConfigError, match=problem):
        action_reader(space, names)
