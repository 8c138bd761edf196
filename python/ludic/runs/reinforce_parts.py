"""The objects of a `ludic train` run, built from its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ludic.recipes.actors import check_actors, check_over_sampling
from ludic.recipes.build import (
    add_reward_model,
    build_algorithm,
    build_episodic_task,
    build_trainer_config,
)
from ludic.recipes.model import add_adapters, build_policy, check_adapters
from ludic.recipes.processes import choose_logprob_convention
from ludic.recipes.schema import Recipe
from ludic.recipes.sections import check_checkpoints
from ludic.runs.control import check_control
from ludic.runs.data.warmup import Warmup
from ludic.runs.held_out import check_watched_metrics
from ludic.runs.prompt_room import check_prompts
from ludic.runs.rollouts import check_rollouts
from ludic.runs.sampler import check_inference
from ludic.runs.seeding import seed_everything
from ludic.runs.shared_model import check_sampling, check_sharding_settings
from ludic.runs.trial import try_task
from ludic.tasks import EpisodicTask
from ludic.training.algorithm import RLAlgorithm
from ludic.training.config import TrainerConfig


@dataclass
class RLParts:
    """The objects of a run. They are built before anything is written, so that a wrong setting
    leaves no folder behind."""

    task: EpisodicTask
    algorithm: RLAlgorithm
    warmup_cfg: TrainerConfig
    trainer_cfg: TrainerConfig
    warmup: Warmup
    model: Any
    tokenizer: Any

    @classmethod
    def build(cls, recipe: Recipe) -> RLParts:
        """Build the parts from a recipe. Seeds all random generators first (`seed_everything`)."""
        check_checkpoints(recipe.checkpoint)
        check_actors(recipe)
        check_over_sampling(recipe)
        check_sharding_settings(recipe.sharding, recipe.trainer.model_device)
        check_sampling(recipe)
        task = build_episodic_task(recipe)
        algorithm = build_algorithm(recipe, max_completion_tokens=recipe.rollout.max_new_tokens or task.max_new_tokens)
        check_control(recipe, algorithm)
        check_rollouts(recipe, task)
        seed_everything(recipe)
        check_adapters(recipe)
        model, tokenizer = build_policy(recipe)
        check_prompts(recipe, task, tokenizer, model)
        try_task(recipe, task, tokenizer, model)
        task = add_reward_model(recipe, task, tokenizer)
        if recipe.model is not None:
            model = add_adapters(model, recipe, seed=recipe.seed, device=recipe.trainer.model_device)
        check_inference(recipe, model)
        convention = choose_logprob_convention(recipe.rollout)
        derived = {"pad_token_id": tokenizer.pad_token_id, "seed": recipe.seed}
        parts = cls(
            task=task,
            algorithm=algorithm,
            warmup_cfg=build_trainer_config(recipe.warmup.trainer, **derived),
            trainer_cfg=build_trainer_config(recipe.trainer, **derived, temperature=convention.temperature),
            warmup=Warmup.read(recipe, task, tokenizer),
            model=model,
            tokenizer=tokenizer,
        )
        check_watched_metrics(recipe, parts.warmup_cfg, parts.trainer_cfg, task)
        return parts
