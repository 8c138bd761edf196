"""Names of reward functions."""

import pytest

from ludic.errors import ConfigError
from ludic.tasks.rewards import build_rewards
from ludic.training import reward_functions
from ludic.training.reward_functions import register_reward, reward_names


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(reward_functions, "_OWN", {})


def make_short():
    return lambda completions: [-float(len(text)) for text in completions]


def test_a_registered_reward_can_be_named_in_a_recipe():
    assert register_reward("short", make_short) is make_short
    assert reward_names() == [
        "gsm8k",
        "ifeval",
        "ifeval_instructions",
        "judge",
        "math",
        "pure_accuracy_math",
        "short",
        "verified",
    ]
    built = build_rewards({"short": 0.5, "pure_accuracy_math": 1}, None, timeout_s=1)
    assert (built.functions[0](["abc"]), built.weights) == ([-3.0], [0.5, 1.0])


def test_registering_is_a_decorator_too():
    assert register_reward("short")(make_short) is make_short
    assert "short" in reward_names()


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("math", make_short, "there is a reward 'math' already"),
        ("a:b", make_short, "text without `:`"),
        ("", make_short, "text without `:`"),
        ("short", 3, "a function .*got int"),
    ],
)
def test_a_name_that_is_taken_or_no_name_is_refused(name, make, message):
    with pytest.raises(ConfigError, match=message):
        register_reward(name, make)


def test_an_unknown_name_is_answered_by_the_nearest():
    with pytest.raises(ConfigError, match=r"reward \(pure_acuracy_math\) .*did you mean pure_accuracy_math\?"):
        build_rewards("pure_acuracy_math", None, timeout_s=1)
