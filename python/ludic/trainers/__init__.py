"""One object a method: from a model, data and rewards to a trained model. They run recipes, as the
commands do."""

from ludic.trainers.base import RecipeTrainer
from ludic.trainers.methods import DPO, GRPO, PPO, SFT, RewardModel
from ludic.training.judge import Judge

__all__ = ["DPO", "GRPO", "PPO", "SFT", "Judge", "RecipeTrainer", "RewardModel"]
