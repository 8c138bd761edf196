"""The condition of `ludic rollout --keep`: its grammar and what it refuses."""

import contextlib
import math
import operator

import pytest
from hypothesis import given, strategies as st

from ludic.cli.rollout import Keep
from ludic.errors import ConfigError, DataError
from ludic.types import Rollout, Step, TokenTrace

OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}


def rollout(reward=1.0, **info):
    trace = TokenTrace([1], [2, 3, 4])
    steps = [Step(i, "o", "a", None, reward, False, True, info if i else {}, trace) for i in range(2)]
    return Rollout("r", steps, {"policy_version": 7, "request_meta": {"level": 3}, "name": "x"})


@given(
    st.sampled_from(sorted(OPERATORS)),
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6),
    st.sampled_from(["", " ", "  "]),
)
def test_comparisons_have_their_usual_meaning(symbol, reward, number, space):
    keep = Keep.parse(f"reward{space}{symbol}{space}{number!r}")
    assert keep(rollout(reward / 2)) == OPERATORS[symbol](reward / 2 + reward / 2, number)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("reward>0", True),
        ("reward>2", False),
        ("total_reward==2", True),
        ("length<=2 and completion_tokens==6", True),
        ("reward>0 and length>2", False),
        ("right==1", True),
        ("score<.5", True),
        ("score<2.5e-1", False),
        ("policy_version>=+7", True),
        ("request_meta.level==3", True),
        ("  reward > -1AND length > 1  ".replace("1AND", "1 AND"), True),
    ],
)
def test_keys_are_looked_up_in_the_rollout_its_last_step_and_its_meta(text, holds):
    assert Keep.parse(text)(rollout(right=True, score=0.25)) == holds


@pytest.mark.parametrize(
    "text",
    ["", "reward", "reward>", ">0", "reward=1", "reward>x", "reward>0 or length>1", "reward>0 and", "reward>0 length>1", "reward>0,",
     "__import__('os')>0", "reward>1e999", "reward>nan", "reward>0x10", "reward>1.2.3", "reward>0;1", "(reward>0)", "reward>0andlength>1",
     "reward > 1_000"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="--keep"):
        Keep.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text):
    parsed: list[Keep] = []
    with contextlib.suppress(ConfigError):
        parsed.append(Keep.parse(text))
    assert all(keep.comparisons and math.isfinite(c.number) for keep in parsed for c in keep.comparisons)


def test_the_error_shows_the_position():
    with pytest.raises(ConfigError, match=r'expected "and" .*character 10'):
        Keep.parse("reward>0 or length>1")


def test_a_missing_key_is_an_error_and_not_false():
    with pytest.raises(DataError, match=r"no number 'rewards'; .*reward, .*completion_tokens, right, policy_version"):
        Keep.parse("rewards>0")(rollout(right=True))
    with pytest.raises(DataError, match="no number 'name'"):
        Keep.parse("name>0")(rollout())
