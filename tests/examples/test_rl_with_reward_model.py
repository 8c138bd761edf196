"""examples/rl_with_reward_model.py: every stage runs, and the full run improves the policy's true
reward."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "rl_with_reward_model.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_with_reward_model", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stage_runs(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(example, "TASK", example.DigitSort(digits=3, right=0.5, backwards=0.25, num_heldout=2))
    monkeypatch.setattr(example, "NETWORK", replace(example.NETWORK, hidden_size=32, intermediate_size=64))
    rounds = example.main(sft_steps=20, problems=20, rm_steps=3, rl_steps=1, rounds=2)
    assert [(before.stage, after.stage) for before, after in rounds] == [
        ("round 1, before", "round 1, after"),
        ("round 2, before", "round 2, after"),
    ]
    assert rounds[0][1].right == rounds[1][0].right  # the policy did not change, the reward model did
    assert rounds[0][1].score != rounds[1][0].score
    assert "Right answers:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("12459", 0), ("1245", 1), ("95421", 4), ("", 5), ("12345", 2), ("124599", 1)],
)
def test_mistakes_are_counted_as_edit_distance(example: ModuleType, answer: str, expected: int) -> None:
    assert example.mistakes(answer, "12459") == expected


def test_a_round_that_raised_only_the_score_counts_as_over_optimised(example: ModuleType) -> None:
    def measured(stage: str, score: float, right: float) -> object:
        return example.Measured(stage, score, right)

    good = (measured("a", 0.0, 0.2), measured("b", 1.0, 0.5))
    bad = (measured("c", 0.0, 0.5), measured("d", 1.0, 0.3))
    assert "OVER-OPTIMISED" not in example.verdict([good])
    assert re.search("OVER-OPTIMISED, .*right answers fell: d\\.$", example.verdict([good, bad]))


@pytest.mark.integration
def test_the_policy_improves_the_true_reward(example: ModuleType) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        [(before, after)] = example.main(seed=0)
    finally:
        torch.set_num_threads(threads)
    assert after.score > before.score + 1
    assert after.right > before.right + 0.1
