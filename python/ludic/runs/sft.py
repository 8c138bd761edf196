"""Supervised fine-tuning: read the data, measure the held-out loss, train, measure again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ludic.errors import ConfigError
from ludic.inference.local.client import end_token_ids
from ludic.recipes.build import build_trainer_config, check_callbacks
from ludic.recipes.epochs_schema import SFTRecipe
from ludic.recipes.model import add_adapters, build_model, build_tokenizer, check_adapters, quantize_base
from ludic.runs.data.sft import SFTData, StreamedSFTData, describe_missing_ends, write_demonstrations
from ludic.runs.directory import DONE, SFTDirectory
from ludic.runs.epochs import EpochsRun
from ludic.runs.report.sft import SFTReport
from ludic.runs.seeding import seed_everything
from ludic.runs.shared_model import check_sharding_settings, choose_precision, place_model
from ludic.training import ranks, watchdog
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.held_out import HeldOutLoss
from ludic.training.presets import make_sft
from ludic.training.trainer import Trainer

KEYS = ["train/loss", "train/grad_norm", "train/seq_len_truncated_rate"]
MEASURED = ("loss", "perplexity")
"""The metrics of an evaluation."""


@dataclass
class SFTParts:
    """The objects of a run. They are built before anything is written, so that a wrong setting
    or row leaves no folder behind."""

    model: Any
    tokenizer: Any
    data: SFTData | StreamedSFTData
    cfg: TrainerConfig
    steps: int
    """Batches in the whole run."""
    heldout: HeldOutLoss | None

    @classmethod
    def build(cls, recipe: SFTRecipe) -> SFTParts:
        """Build the parts from a recipe. Seeds all random generators first (`seed_everything`)."""
        check_sharding_settings(recipe.sharding, recipe.trainer.model_device)
        check_adapters(recipe)
        seed_everything(recipe)
        tokenizer = build_tokenizer(recipe)
        data = (StreamedSFTData if recipe.streaming else SFTData).read(recipe, tokenizer)
        cfg = build_trainer_config(recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        cfg = choose_precision(cfg, recipe.sharding)
        check_callbacks(recipe.callbacks, cfg, measured=MEASURED)
        model = quantize_base(build_model(recipe, tokenizer), recipe, cfg.model_device)
        model = add_adapters(place_model(model, recipe.sharding, cfg.model_device), recipe, seed=recipe.seed)
        steps = data.count_steps(recipe) if recipe.steps is None else recipe.steps
        heldout = HeldOutLoss(model, data.heldout, cfg) if data.heldout else None
        if heldout is None and (cfg.eval_every_n_steps or cfg.eval_at_start):
            raise ConfigError(f"trainer.eval_every_n_steps needs held-out rows, and there are none: {data.why_no_heldout}")
        return cls(model, tokenizer, data, cfg, steps, heldout)


class SFTRun(EpochsRun[SFTRecipe, SFTParts, SFTDirectory]):
    """Held-out loss, training, and the loss again."""

    @classmethod
    def build(cls, recipe: SFTRecipe, note: Callable[[str], None]) -> SFTParts:
        return SFTParts.build(recipe)

    @property
    def measured(self) -> tuple[str, ...]:
        return MEASURED

    async def play_phases(self) -> None:
        for line in self.parts.data.formats:
            self.screen.note(line)
        ranks.ask_rank_0("writing the demonstrations", self._write_demonstrations)
        if self.progress.before is None:
            self.progress.before = self._measure()
            self.directory.write_progress(self.progress)
        await self._train()
        self.progress.after = self._measure()
        self.end_phase(DONE)

    def _write_demonstrations(self) -> None:
        if self.recipe.data is None and not self.directory.demonstrations.is_file():
            write_demonstrations(self.recipe, self.parts.tokenizer, self.directory.demonstrations)

    async def _train(self) -> None:
        recipe, parts = self.recipe, self.parts
        if parts.heldout is None:
            self.screen.note(f"No rows are held out, and nothing is measured: {parts.data.why_no_heldout}")
        self.screen.note(f"Training on {parts.data.describe()}: {parts.steps} steps of {recipe.batch_size}")
        counts = parts.data.count(None, parts.cfg.max_seq_len, end_token_ids(parts.model, parts.tokenizer))
        if counts["samples_without_end"]:  # of a stream, they are known at the end
            self.screen.note(describe_missing_ends(counts["samples_without_end"], parts.tokenizer))
        trainer_class = partial(Trainer, algo=make_sft(normalizer="tokens"), evaluator=self.evaluator(parts.heldout))
        await self.train(trainer_class, parts.data.make_source(recipe), keys=KEYS)

    def conclude(self) -> str:
        return SFTReport(self).conclude()

    def _measure(self) -> dict[str, float] | None:
        if self.parts.heldout is None:
            return None
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            measured = ranks.ask_rank_0("the held-out loss", self.parts.heldout.measure)
        self.screen.note(f"Held-out loss {measured['loss']:.4f} on {len(self.parts.data.heldout):,} samples")
        return measured
