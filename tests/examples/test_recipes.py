"""The recipe files in examples."""

from pathlib import Path

import pytest

from ludic.recipes.compose import compose

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "rank", "lr"), [("small_chat", 0, 1e-5), ("small_chat_lora", 16, 3e-4)])
def test_the_measured_settings_of_small_chat_models_hold_for_a_loaded_model(name, rank, lr):
    """The settings in docs/measured.md; a loaded model has another learning rate by default."""
    recipe = compose([str(EXAMPLES / f"{name}.yaml"), "model=some/model", "data=rows.jsonl", "reward=rewards:exact"])
    assert (recipe.lora.rank, recipe.trainer.lr, recipe.steps) == (rank, lr, 40)
    assert (recipe.rollout.prompts, recipe.rollout.group_size, recipe.rollout.max_new_tokens) == (8, 8, 16)
