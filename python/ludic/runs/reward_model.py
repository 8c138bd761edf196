"""Reward-model training: read the pairs, train, measure with `RMTrainer`, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ludic.files.atomic import write_text
from ludic.models.quantization import count_weights
from ludic.recipes.build import build_config, check_callbacks
from ludic.recipes.epochs_schema import RMRecipe
from ludic.recipes.model import build_reward_model, build_tokenizer, check_adapters, choose_padding_token, is_shared_out
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import DONE, RMDirectory
from ludic.runs.epochs import PairsParts, PairsRun, check_heldout, count_steps, describe_data
from ludic.runs.report.scores import encode_scores
from ludic.runs.report.summary import make_table
from ludic.runs.shared_model import choose_precision, place_model, prepare_sharding
from ludic.training import ranks, watchdog
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.presets import make_bradley_terry
from ludic.training.rm_trainer import RMTrainer, RMTrainerConfig
from ludic.training.rng import seed_everything

KEYS = ["train/loss", "train/accuracy", "train/margin", "train/grad_norm"]


CRITERIA: dict[str, tuple[str, Callable[[Mapping[str, float]], float], Callable[[float], bool]]] = {
    "held-out accuracy": ("over 60 %", lambda summary: summary["eval_pairwise_accuracy"], lambda value: value > 0.6),
    "median margin": ("over 0", lambda summary: summary["eval_margin_p50"], lambda value: value > 0),
    "negative margins": ("under 40 %", lambda summary: summary["eval_negative_margin_rate"], lambda value: value < 0.4),
    "calibration error": ("under 0.15", lambda summary: summary["eval_ece"], lambda value: value < 0.15),
    "train-test gap": (
        "under 15 points",
        lambda summary: summary["train_pairwise_accuracy"] - summary["eval_pairwise_accuracy"],
        lambda value: value < 0.15,
    ),
}
"""Name -> (rule in words, value, rule). A reward model that breaks one should not be optimised
against."""


class RMRun(PairsRun[RMRecipe, RMDirectory]):
    """Training on pairs, and the metrics on held-out pairs. Its summary.json has the `eval_`
    metrics and `train_pairwise_accuracy` once the run is finished, the `eval_` metrics only if
    pairs are held out."""

    accuracy, heldout_accuracy = "accuracy", "pairwise_accuracy"
    margins = "the score differences of the held-out pairs"
    method = "reward model"

    @classmethod
    def build(cls, recipe: RMRecipe, note: Callable[[str], None]) -> PairsParts:
        prepare_sharding(recipe.sharding, recipe.trainer.model_device)
        check_adapters(recipe)
        seed_everything(recipe.seed)
        tokenizer = choose_padding_token(build_tokenizer(recipe))
        algorithm = make_bradley_terry(**vars(recipe.loss))
        cfg = build_config(RMTrainerConfig, recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        cfg = choose_precision(cfg, recipe.sharding)
        check_callbacks(recipe.callbacks, cfg)
        model = build_reward_model(recipe, tokenizer)
        data = PairData.read(recipe, tokenizer, note=note)
        check_heldout(data.heldout, cfg)
        # A whole model that the ranks share out is only saved, and computes nothing.
        model = place_model(model, recipe.sharding, "cpu" if is_shared_out(recipe.sharding) else cfg.model_device)
        return PairsParts(model, tokenizer, cfg, count_steps(data, recipe), data, algorithm)

    async def play_phases(self) -> None:
        ranks.ask_rank_0("writing the pairs", self.write_pairs)
        trainer_class = partial(RMTrainer, algo=self.parts.algorithm, eval_items=self.parts.data.heldout or None)
        trainer = await self.train_on_pairs(trainer_class, "Training on", KEYS)
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            sample = trainer.evaluate(self.parts.data.train[: 2 * self.recipe.train_sample])
        measured = self.measure_heldout(trainer, "Held-out accuracy")
        self.progress.after = {**measured, "train_pairwise_accuracy": sample["eval_pairwise_accuracy"]}
        self.end_phase(DONE)

    def draw_heldout(self, metrics: PreferenceMetrics) -> None:
        super().draw_heldout(metrics)
        write_text(self.directory.scores, encode_scores(metrics))

    def list_facts(self) -> dict[str, Any]:
        trained, frozen = (count_weights(self.parts.model, trained=flag) for flag in (True, False))
        counts = {"parameters": trained + frozen, "trained_parameters": trained}
        return {**(self.progress.after or {}), **super().list_facts(), **counts}

    def show(self, summary: Mapping[str, Any]) -> None:
        if "eval_loss" in summary:
            title = f"{summary['eval_num_pairs']:,.0f} held-out pairs"
            table = make_table(title, ("", "measured", "should be", ""), right=("measured",))
            for name, (rule, value_of, holds) in CRITERIA.items():
                value = value_of(summary)
                table.add_row(name, f"{value:.4f}", rule, "[green]✓[/]" if holds(value) else "[red]✗[/]")
            self.screen.console.print(table)
            if self.progress.early_stopping is not None:
                self.screen.console.print(
                    "Early stopping chose the weights by these same pairs, so the figures are slightly optimistic; for figures to "
                    "publish, measure on other pairs (heldout_data=FILE in a separate run with steps=0)"
                )
        self.show_best_accuracy(summary)
        data = summary["data"]
        self.screen.console.print(describe_data(data))
        trained, heldout = data["left_out"], data["heldout_left_out"]
        if trained or heldout:
            counts = ("left out", "of the held-out data")
            table = make_table("Rows that make no pair", ("", *counts), right=counts)
            for reason in sorted({*trained, *heldout}):
                table.add_row(reason.replace("_", " "), f"{trained.get(reason, 0):,}", f"{heldout.get(reason, 0):,}")
            self.screen.console.print(table)
        self.show_pair_costs(summary)
