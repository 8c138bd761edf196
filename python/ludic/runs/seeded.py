"""The held-out measurement of a run with InfoSeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ludic.recipes.info_seed_section import build_info_seed
from ludic.recipes.schema import EvaluationSection, Recipe, RolloutSection
from ludic.runs.directory import RunDirectory
from ludic.runs.held_out import Evaluation, HeldOut
from ludic.tasks import EpisodicTask
from ludic.training.info_seed import SeedEvaluator
from ludic.training.rollouts.engine import RolloutEngine


class SeededHeldOut(HeldOut):
    """Measures `eval_seed/*` too, and writes a heat map for each measurement."""

    def __init__(
        self, engine: RolloutEngine, task: EpisodicTask, section: EvaluationSection, rollout: RolloutSection, seeds: SeedEvaluator
    ) -> None:
        super().__init__(engine, task, section, rollout)
        self._seeds = seeds

    async def measure(self, *, concurrency: int | None = None, timeout_s: float | None = None) -> Evaluation:
        measured = await super().measure(concurrency=concurrency, timeout_s=timeout_s)
        self._seeds.step = self.current_step()
        _, metrics = await self._seeds.eval(concurrency=concurrency, timeout_s=timeout_s)
        return replace(measured, facts={**measured.facts, **metrics})


def make_held_out(recipe: Recipe, task: EpisodicTask, engine: RolloutEngine, model: Any, directory: RunDirectory) -> HeldOut:
    """The measurement of a run, with that of its seeds if it has some. `model` is the policy of the
    engine."""
    info_seed, section = build_info_seed(recipe.info_seed), recipe.info_seed
    if info_seed is None or not section.eval_samples:
        return HeldOut(engine, task, recipe.evaluation, recipe.rollout)
    seeds = SeedEvaluator(
        engine,
        task,
        info_seed,
        rollout=recipe.rollout,
        model=model,
        prompts=recipe.evaluation.prompts,
        samples=section.eval_samples,
        heatmaps=directory.seed_heatmaps,
    )
    return SeededHeldOut(engine, task, recipe.evaluation, recipe.rollout, seeds)
