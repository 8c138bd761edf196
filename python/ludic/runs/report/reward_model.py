"""The report of a reward-model run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ludic.models.quantization import count_weights
from ludic.runs.report.epochs import PairsReport, describe_data
from ludic.runs.report.summary import make_table

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


class RMReport(PairsReport):
    """Its summary.json has the `eval_` metrics and `train_pairwise_accuracy` once the run is
    finished, the `eval_` metrics only if pairs are held out."""

    accuracy, heldout_accuracy = "accuracy", "pairwise_accuracy"
    margins = "the score differences of the held-out pairs"
    title = "reward model"

    def list_facts(self) -> dict[str, Any]:
        trained, frozen = (count_weights(self.run.parts.model, trained=flag) for flag in (True, False))
        counts = {"parameters": trained + frozen, "trained_parameters": trained}
        return {**(self.run.progress.after or {}), **super().list_facts(), **counts}

    def show(self, summary: Mapping[str, Any]) -> None:
        if "eval_loss" in summary:
            title = f"{summary['eval_num_pairs']:,.0f} held-out pairs"
            table = make_table(title, ("", "measured", "should be", ""), right=("measured",))
            for name, (rule, value_of, holds) in CRITERIA.items():
                value = value_of(summary)
                table.add_row(name, f"{value:.4f}", rule, "[green]✓[/]" if holds(value) else "[red]✗[/]")
            self.console.print(table)
            if self.run.progress.early_stopping is not None:
                self.console.print(
                    "Early stopping chose the weights by these same pairs, so the figures are slightly optimistic; for figures to "
                    "publish, measure on other pairs (heldout_data=FILE in a separate run with steps=0)"
                )
        self.show_best_accuracy(summary)
        data = summary["data"]
        self.console.print(describe_data(data))
        trained, heldout = data["left_out"], data["heldout_left_out"]
        if trained or heldout:
            counts = ("left out", "of the held-out data")
            table = make_table("Rows that make no pair", ("", *counts), right=counts)
            for reason in sorted({*trained, *heldout}):
                table.add_row(reason.replace("_", " "), f"{trained.get(reason, 0):,}", f"{heldout.get(reason, 0):,}")
            self.console.print(table)
        self.show_pair_costs(summary)
