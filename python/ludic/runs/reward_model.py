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


class RMRun(PairsRun[RMRecipe, RMDirectory]):
    """Training on pairs, and the metrics on held-out pairs."""

    @classmethod
    def build(cls, recipe: RMRecipe, note: Callable[[str], None]) -> PairsParts:
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
        return PairsParts(model, tokenizer, cfg, count_steps(data, recipe), data, algorithm)

    async def play_phases(self) -> None:
        ranks.ask_rank_0("writing the pairs", self.write_pairs)
        trainer_class = partial(RMTrainer, algo=self.parts.algorithm, eval_items=self.parts.data.heldout or None)
        trainer = await self.train_on_pairs(trainer_class, "Training on", KEYS)
        self.progress.after = self._measure(trainer)
        self.end_phase(DONE)

    def conclude(self) -> str:
        return RMReport(self).conclude()

    def _measure(self, trainer: RMTrainer) -> dict[str, float]:
        """The `eval_` metrics on the held-out pairs, which are also drawn, and the accuracy on
        training pairs."""
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            sample = trainer.evaluate(self.parts.data.train[: 2 * self.recipe.train_sample])
            measured = trainer.evaluate() if self.parts.data.heldout else {}
        if measured:
            if not self.directory.is_follower:
                metrics: PreferenceMetrics = trainer.evaluator.metrics  # type: ignore[union-attr]
                self.draw_heldout(metrics)
                write_text(self.directory.scores, encode_scores(metrics))
            accuracy, pairs = measured["eval_pairwise_accuracy"], measured["eval_num_pairs"]
            self.screen.note(f"Held-out accuracy {accuracy:.4f} on {pairs:,.0f} pairs")
        return {**measured, "train_pairwise_accuracy": sample["eval_pairwise_accuracy"]}
