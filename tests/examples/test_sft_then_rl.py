"""examples/sft_then_rl.py: every stage runs, and in the full run each one improves on the previous
one."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ludic.training.rollouts.log import read_rollouts

PATH = Path(__file__).parents[2] / "examples" / "sft_then_rl.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sft_then_rl", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stage_runs(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "TASK", example.DigitSort(digits=3, right=0.9, backwards=0.0))
    example.main(tmp_path, sft_steps=60, answers=200, rejection_steps=2, rl_steps=1)
    kept = read_rollouts(tmp_path / "good.jsonl")
    assert 0 < len(kept) < 200
    assert all(rollout.total_reward == 1.0 for rollout in kept)


@pytest.mark.integration
def test_every_stage_improves_the_accuracy(example: ModuleType, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reached = example.main(tmp_path, seed=1)
    finally:
        torch.set_num_threads(threads)
    assert reached["supervised"] < 0.4
    assert reached["supervised"] + 0.2 < reached["rejection sampling"]
    assert reached["reinforcement"] > 0.85
