"""Supervised fine-tuning: read the data, measure the held-out loss, train, measure and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ludic.files.jsonl import write_jsonl
from ludic.inference.local.client import end_token_ids
from ludic.recipes.build import build_trainer_config, check_callbacks
from ludic.recipes.epochs_schema import SFTRecipe
from ludic.recipes.model import add_adapters, build_model, build_tokenizer, check_adapters, quantize_base
from ludic.runs.data.sft import SFTData, StreamedSFTData, describe_missing_ends, make_demonstrations
from ludic.runs.directory import DONE, SFTDirectory
from ludic.runs.epochs import EpochsParts, EpochsRun, check_heldout
from ludic.runs.report.curve import draw_text_curve, write_picture
from ludic.runs.report.summary import show_costs
from ludic.runs.shared_model import choose_precision, place_model, prepare_sharding
from ludic.training import ranks, watchdog
from ludic.training.evaluators.held_out import HeldOutLoss
from ludic.training.presets import make_sft
from ludic.training.rng import seed_everything
from ludic.training.trainer import Trainer

KEYS = ["train/loss", "train/grad_norm", "train/seq_len_truncated_rate"]
MEASURED = ("loss", "perplexity")
"""The metrics of an evaluation."""


@dataclass
class SFTParts(EpochsParts):
    """The objects of a supervised run."""

    data: SFTData | StreamedSFTData
    heldout: HeldOutLoss | None


class SFTRun(EpochsRun[SFTRecipe, SFTParts, SFTDirectory]):
    """Held-out loss, training, and the loss again. Its summary.json has `before` and `after`, which
    are null if nothing is held out, `after` also if the run was stopped."""

    @classmethod
    def build(cls, recipe: SFTRecipe, note: Callable[[str], None]) -> SFTParts:
        prepare_sharding(recipe.sharding, recipe.trainer.model_device)
        check_adapters(recipe)
        seed_everything(recipe.seed)
        tokenizer = build_tokenizer(recipe)
        model = build_model(recipe, tokenizer)
        data = (StreamedSFTData if recipe.streaming else SFTData).read(recipe, tokenizer)
        cfg = build_trainer_config(recipe.trainer, pad_token_id=tokenizer.pad_token_id, seed=recipe.seed)
        cfg = choose_precision(cfg, recipe.sharding)
        check_callbacks(recipe.callbacks, cfg, measured=MEASURED)
        model = quantize_base(model, recipe, cfg.model_device)
        model = add_adapters(place_model(model, recipe.sharding, cfg.model_device), recipe, seed=recipe.seed)
        steps = data.count_steps(recipe) if recipe.steps is None else recipe.steps
        heldout = HeldOutLoss(model, data.heldout, cfg) if data.heldout else None
        check_heldout(data.heldout, cfg, data.why_no_heldout)
        return SFTParts(model, tokenizer, cfg, steps, data, heldout)

    @property
    def measured(self) -> tuple[str, ...]:
        return MEASURED

    async def play_phases(self) -> None:
        recipe, parts = self.recipe, self.parts
        for line in parts.data.formats:
            self.screen.note(line)
        with ranks.rank_0_alone("writing the demonstrations"):
            if ranks.rank() == 0 and recipe.data is None and not self.directory.demonstrations.is_file():
                write_jsonl(self.directory.demonstrations, make_demonstrations(recipe, parts.tokenizer))
        if self.progress.before is None:
            self.progress.before = self._measure()
            self.directory.write_progress(self.progress)
        if parts.heldout is None:
            self.screen.note(f"No rows are held out, and nothing is measured: {parts.data.why_no_heldout}")
        self.screen.note(f"Training on {parts.data.describe()}: {parts.steps} steps of {recipe.batch_size}")
        counts = parts.data.count(None, parts.cfg.max_seq_len, end_token_ids(parts.model, parts.tokenizer))
        if counts["samples_without_end"]:  # of a stream, they are known at the end
            self.screen.note(describe_missing_ends(counts["samples_without_end"], parts.tokenizer))
        trainer_class = partial(Trainer, algo=make_sft(normalizer="tokens"), evaluator=self.evaluator(parts.heldout))
        await self.train(trainer_class, parts.data.make_source(recipe), keys=KEYS)
        self.progress.after = self._measure()
        self.end_phase(DONE)

    def _measure(self) -> dict[str, float] | None:
        if self.parts.heldout is None:
            return None
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            measured = ranks.ask_rank_0("the held-out loss", self.parts.heldout.measure)
        self.screen.note(f"Held-out loss {measured['loss']:.4f} on {len(self.parts.data.heldout):,} samples")
        return measured

    def build_summary(self) -> dict[str, Any]:
        if self.recipe.streaming and self.source is None and self.directory.summary.is_file():
            # A finished run is shown again, and has not counted its rows.
            earlier: dict[str, Any] = json.loads(self.directory.summary.read_text(encoding="utf-8"))
            return earlier
        return super().build_summary()

    def list_facts(self) -> dict[str, Any]:
        parts = self.parts
        return {
            "before": self.progress.before,
            "after": self.progress.after,
            "epochs": round(parts.data.count_epochs(self.source, self.progress.steps, self.recipe.batch_size), 3),
            "data": parts.data.count(self.source, parts.cfg.max_seq_len, end_token_ids(parts.model, parts.tokenizer)),
        }

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [line["train/loss"] for line in self.lines]

    def draw(self, summary: Mapping[str, Any]) -> None:
        measured = summary["before"] is not None and summary["after"] is not None
        marks = {"held-out loss": (summary["before"]["loss"], summary["after"]["loss"])} if measured else {}
        title = f"supervised fine-tuning, seed {self.recipe.seed}"
        write_picture(self.directory.picture, {"loss": self.losses}, marks=marks, title=title, measure="nats per token")

    def show(self, summary: Mapping[str, Any]) -> None:
        console = self.screen.console
        before, after, data = summary["before"], summary["after"], summary["data"]
        if before is not None:
            later = f"{after['loss']:.4f} (perplexity {after['perplexity']:.3f})" if after else "not measured"
            console.print(f"[bold]Held-out loss[/]: {before['loss']:.4f} before, {later} after")
        if self.progress.phase == DONE and summary["steps"] < self.parts.steps:
            who = "Early stopping" if self.progress.stopped_by is None else self.progress.stopped_by["callback"]
            console.print(f"{who} ended the run at step {summary['steps']} of {self.parts.steps}.", markup=False)
        console.print(
            f"[bold]Data[/]: {data['samples']:,} samples of {data['tokens']:,} tokens, {data['trained_tokens']:,} of them trained; "
            f"{data['samples_cut']:,} longer than max_seq_len were cut, {data['samples_cut_empty']:,} of them to nothing"
        )
        if data["samples_without_end"]:
            missing = describe_missing_ends(data["samples_without_end"], self.parts.tokenizer)
            console.print(missing, markup=False)
        for line in draw_text_curve(self.losses):
            console.print(line, markup=False)
        show_costs(console, summary)

    def list_files(self) -> tuple[dict[Path, str], dict[Path, str]]:
        return {self.directory.picture: "the loss curve"}, {self.directory.demonstrations: "the rows that were trained on"}
