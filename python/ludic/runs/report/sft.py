"""The report of a supervised run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.inference.local.client import end_token_ids
from ludic.runs.data.sft import describe_missing_ends
from ludic.runs.directory import DONE
from ludic.runs.report.curve import draw_text_curve, write_picture
from ludic.runs.report.epochs import EpochsReport
from ludic.runs.report.summary import show_costs


class SFTReport(EpochsReport):
    """Its summary.json has `before` and `after`, which are null if nothing is held out, `after`
    also if the run was stopped."""

    def build_summary(self) -> dict[str, Any]:
        if self.run.recipe.streaming and self.run.source is None and self.directory.summary.is_file():
            # A finished run is shown again, and has not counted its rows.
            earlier: dict[str, Any] = json.loads(self.directory.summary.read_text(encoding="utf-8"))
            return earlier
        return super().build_summary()

    def list_facts(self) -> dict[str, Any]:
        run, parts = self.run, self.run.parts
        return {
            "before": run.progress.before,
            "after": run.progress.after,
            "epochs": round(parts.data.count_epochs(run.source, run.progress.steps, run.recipe.batch_size), 3),
            "data": parts.data.count(run.source, parts.cfg.max_seq_len, end_token_ids(parts.model, parts.tokenizer)),
        }

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [line["train/loss"] for line in self.lines]

    def draw(self, summary: Mapping[str, Any]) -> None:
        measured = summary["before"] is not None and summary["after"] is not None
        marks = {"held-out loss": (summary["before"]["loss"], summary["after"]["loss"])} if measured else {}
        title = f"supervised fine-tuning, seed {self.run.recipe.seed}"
        write_picture(self.directory.picture, {"loss": self.losses}, marks=marks, title=title, measure="nats per token")

    def show(self, summary: Mapping[str, Any]) -> None:
        run, console = self.run, self.console
        before, after, data = summary["before"], summary["after"], summary["data"]
        if before is not None:
            later = f"{after['loss']:.4f} (perplexity {after['perplexity']:.3f})" if after else "not measured"
            console.print(f"[bold]Held-out loss[/]: {before['loss']:.4f} before, {later} after")
        if run.progress.phase == DONE and summary["steps"] < run.parts.steps:
            who = "Early stopping" if run.progress.stopped_by is None else run.progress.stopped_by["callback"]
            console.print(f"{who} ended the run at step {summary['steps']} of {run.parts.steps}.", markup=False)
        console.print(
            f"[bold]Data[/]: {data['samples']:,} samples of {data['tokens']:,} tokens, {data['trained_tokens']:,} of them trained; "
            f"{data['samples_cut']:,} longer than max_seq_len were cut, {data['samples_cut_empty']:,} of them to nothing"
        )
        if data["samples_without_end"]:
            missing = describe_missing_ends(data["samples_without_end"], run.parts.tokenizer)
            console.print(missing, markup=False)
        for line in draw_text_curve(self.losses):
            console.print(line, markup=False)
        show_costs(console, summary)

    def list_files(self) -> tuple[dict[Path, str], dict[Path, str]]:
        return {self.directory.picture: "the loss curve"}, {self.directory.demonstrations: "the rows that were trained on"}
