"""Reward-model training: read the pairs, train, measure with `RMTrainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ludic.errors import ConfigError
from ludic.eval.preference_picture import draw_margins, draw_reliability
from ludic.files.atomic import write_text
from ludic.recipes.build import build_config
from ludic.recipes.callbacks import check_callbacks
from ludic.recipes.lora import check_adapters
from ludic.recipes.model import build_tokenizer
from ludic.recipes.rm.model import build_reward_model, choose_padding_token
from ludic.recipes.rm.schema import RMRecipe
from ludic.recipes.sharding import is_shared_out
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import DONE, RMDirectory
from ludic.runs.epochs import EpochsRun
from ludic.runs.report.scores import encode_scores
from ludic.runs.seeding import seed_everything
from ludic.runs.shared_model import check_sharding_settings, choose_precision, place_model
from ludic.training import ranks, watchdog
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.presets import make_bradley_terry
from ludic.training.rm_trainer import RMTrainer, RMTrainerConfig

KEYS = ["train/loss", "train/accuracy", "train/margin", "train/grad_norm"]


@dataclass
class RMParts:
    """The objects of a run. They are built before anything is written, so that a wrong setting
    or pair leaves no folder behind."""

    model: Any
    tokenizer: Any
    data: PairData
    algorithm: RLAlgorithm
    cfg: RMTrainerConfig
    steps: int
    """Batches in the whole run."""

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
        if not data.heldout and (cfg.eval_every_n_steps or cfg.eval_at_start):
            raise ConfigError(
                "trainer.eval_every_n_steps needs held-out pairs; raise heldout, or give heldout_data or heldout_split"
            )
        model = build_reward_model(recipe, tokenizer)
        # A whole model that the ranks share out is only saved, and computes nothing.
        model = place_model(model, recipe.sharding, "cpu" if is_shared_out(recipe.sharding) else cfg.model_device)
        steps = recipe.epochs * _make_source(data, recipe).num_batches_per_epoch if recipe.steps is None else recipe.steps
        return cls(model, tokenizer, data, algorithm, cfg, steps)


class RMRun(EpochsRun[RMRecipe, RMParts, RMDirectory]):
    """Training on pairs, and the metrics on held-out pairs."""

    async def play_phases(self) -> None:
        ranks.ask_rank_0("writing the pairs", self._write_pairs)
        self.progress.after = self._measure(await self._train())
        self.end_phase(DONE)

    def _write_pairs(self) -> None:
        if self.recipe.data is None:
            self.parts.data.write_missing_rows(self.directory.pairs, self.directory.heldout_pairs)

    async def _train(self) -> RMTrainer:
        recipe, parts = self.recipe, self.parts
        if not parts.data.heldout:
            self.screen.note("No pairs are held out; only training pairs are measured")
        self.screen.note(f"Training on {len(parts.data.train) // 2:,} pairs: {parts.steps} steps of {recipe.batch_size}")
        trainer_class = partial(
            RMTrainer,
            algo=parts.algorithm,
            eval_items=parts.data.heldout or None,
            enable_gradient_checkpointing=recipe.gradient_checkpointing,
        )
        return await self.train(trainer_class, _make_source(parts.data, recipe), keys=KEYS)

    def _measure(self, trainer: RMTrainer) -> dict[str, float]:
        """The `eval_` metrics on the held-out pairs, which are also drawn, and the accuracy on
        training pairs."""
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            sample = trainer.evaluate(self.parts.data.sample(self.recipe.train_sample))
            measured = trainer.evaluate() if self.parts.data.heldout else {}
        if measured:
            if not self.directory.is_followed:
                self._draw(trainer.evaluator.metrics)  # type: ignore[union-attr]
            accuracy, pairs = measured["eval_pairwise_accuracy"], measured["eval_num_pairs"]
            self.screen.note(f"Held-out accuracy {accuracy:.4f} on {pairs:,.0f} pairs")
        return {**measured, "train_pairwise_accuracy": sample["eval_pairwise_accuracy"]}

    def _draw(self, metrics: PreferenceMetrics) -> None:
        title = f"{self.directory.path.name}, held-out pairs"
        draw_reliability(self.directory.reliability, metrics, title=title)
        draw_margins(self.directory.margins, metrics, title=title)
        write_text(self.directory.scores, encode_scores(metrics))


def _make_source(data: PairData, recipe: RMRecipe) -> ItemBatchSource:
    source = preference_batches(data.train, batch_size=recipe.batch_size, seed=recipe.seed)
    source.unshard()  # all ranks share its batches
    return source
