"""Which rewards count as right: by setting, by the task, or from rewards of 0 and 1."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from ludic.errors import ConfigError
from ludic.recipes.build import build_task
from ludic.recipes.schema import TaskSection
from ludic.tasks import DigitSort, TicTacToe, as_episodic
from ludic.tasks.rewards import Success, success_of


@dataclass(frozen=True)
class Unsure(DigitSort):
    """A task without a statement about its rewards."""

    success_reward: float | None = None


def own(tmp_path, reward: Any) -> Any:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "a", "answer": "#### 1"}\n{"prompt": "b", "answer": "#### 2"}\n')
    return as_episodic(build_task(TaskSection(kind="data"), data=str(path), reward=reward))


def test_a_built_in_task_knows_what_is_right():
    assert success_of(as_episodic(DigitSort()), None) == Success(1.0)
    assert success_of(TicTacToe(), None) == Success(0.5)


def test_a_single_verifier_has_maximum_one_and_other_rewards_are_unknown(tmp_path, monkeypatch):
    (tmp_path / "success_rewards.py").write_text("def length(completions, **columns):\n    return list(map(len, completions))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert success_of(own(tmp_path, "gsm8k"), None) == Success(1.0)
    for reward in ({"gsm8k": 2.0}, ["gsm8k", "success_rewards:length"], "success_rewards:length"):
        assert success_of(own(tmp_path, reward), None) == Success(1.0, is_assumed=True), reward


def test_an_explicit_threshold_takes_precedence():
    assert success_of(TicTacToe(), 1.0) == Success(1.0)
    assert success_of(as_episodic(Unsure()), 0.3) == Success(0.3)
    with pytest.raises(ConfigError, match=r"solved_at \(inf\)"):
        success_of(TicTacToe(), math.inf)


@pytest.mark.parametrize(
    ("rewards", "found"), [([0, 1, 1.0], 1.0), ([0.0], 1.0), ([], 1.0), ([0, 0.5], None), ([1, 2], None), ([-1], None)]
)
def test_the_default_threshold_holds_only_for_rewards_of_0_and_1(rewards, found):
    assert success_of(as_episodic(Unsure()), None).holds_for(rewards) == found
    assert Success(0.5).holds_for(rewards) == 0.5
    assert Success(None).holds_for(rewards) is None
