"""Reward-model training: read the pairs, train, measure with `RMTrainer`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ludic.files.atomic import write_text
from ludic.recipes.build import build_config, check_callbacks
from ludic.recipes.epochs_schema import RMRecipe
from ludic.recipes.model import build_reward_model, build_tokenizer, check_adapters, choose_padding_token, is_shared_out
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import DONE, RMDirectory
from ludic.runs.epochs import PairsParts, PairsRun, check_heldout, count_steps
from ludic.runs.report.reward_model import RMReport
from ludic.runs.report.scores import encode_scores
from ludic.runs.seeding import seed_everything
from ludic.runs.shared_model import check_sharding_settings, choose_precision, place_model
from ludic.training import ranks, watchdog
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.presets import make_bradley_terry
from ludic.training.rm_trainer import RMTrainer, RMTrainerConfig

KEYS = ["train/loss", "train/accuracy", "train/margin", "train/grad_norm"]


class RMParts(PairsParts[RMTrainerConfig]):
    """The objects of a run."""

    @classmethod
    def build(cls, recipe: RMRecipe, *, note: Callable[[str], None]) -> RMParts:
        """Build the parts from a recipe. Seeds all random generators first (`seed_everything`).
        `note` receives remarks on settings that cannot be followed."""
        check_sharding_settings(recipe.sharding, recipe.trainer.model_device)
        check_adapters(recipe)
        seed_everything(recipe)
        tokenizer = choose_padding_token(build_tokenizer(recipe))
        algorithm = make_bradley_terry(**vars(recipe.loss))
        cfg = build_config(RMTrainerConfig, recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        cfg = choose_precision(cfg, recipe.sharding)
        check_callbacks(recipe.callbacks, cfg)
        data = PairData.read(recipe, tokenizer, note=note)
        check_heldout(data, cfg)
        model = build_reward_model(recipe, tokenizer)
        # A whole model that the ranks share out is only saved, and computes nothing.
        model = place_model(model, recipe.sharding, "cpu" if is_shared_out(recipe.sharding) else cfg.model_device)
        return cls(model, tokenizer, data, algorithm, cfg, count_steps(data, recipe))


class RMRun(PairsRun[RMRecipe, RMParts, RMDirectory]):
    """Training on pairs, and the metrics on held-out pairs."""

    @classmethod
    def build(cls, recipe: RMRecipe, note: Callable[[str], None]) -> RMParts:
        return RMParts.build(recipe, note=note)

    async def play_phases(self) -> None:
        ranks.ask_rank_0("writing the pairs", self.write_pairs)
        self.progress.after = self._measure(await self._train())
        self.end_phase(DONE)

    def conclude(self) -> str:
        return RMReport(self).conclude()

    async def _train(self) -> RMTrainer:
        recipe, parts = self.recipe, self.parts
        self.note_heldout()
        self.screen.note(f"Training on {len(parts.data.train) // 2:,} pairs: {parts.steps} steps of {recipe.batch_size}")
        trainer_class = partial(
            RMTrainer,
            algo=parts.algorithm,
            eval_items=parts.data.heldout or None,
        )
        return await self.train(trainer_class, self.make_source(), keys=KEYS)

    def _measure(self, trainer: RMTrainer) -> dict[str, float]:
        """The `eval_` metrics on the held-out pairs, which are also drawn, and the accuracy on
        training pairs."""
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            sample = trainer.evaluate(self.parts.data.sample(self.recipe.train_sample))
            measured = trainer.evaluate() if self.parts.data.heldout else {}
        if measured:
            if not self.directory.is_follower:
                self._draw(trainer.evaluator.metrics)  # type: ignore[union-attr]
            accuracy, pairs = measured["eval_pairwise_accuracy"], measured["eval_num_pairs"]
            self.screen.note(f"Held-out accuracy {accuracy:.4f} on {pairs:,.0f} pairs")
        return {**measured, "train_pairwise_accuracy": sample["eval_pairwise_accuracy"]}

    def _draw(self, metrics: PreferenceMetrics) -> None:
        self.draw_heldout(metrics)
        write_text(self.directory.scores, encode_scores(metrics))
