"""The report of a run of direct preference optimization.

Each closing sentence is printed only if the numbers support it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.eval.intervals import wilson_interval
from ludic.runs.dpo_answers import read_answers
from ludic.runs.report.epochs import PairsReport, describe_data
from ludic.runs.report.summary import make_table

ACCURACY = "rewards/accuracies"
SHOWN_ANSWERS, SHOWN_CHARACTERS = 4, 60
RATES = {
    "score": "true quality",
    "well_formed": "well-formed",
    "finished": "ended",
}


class DPOReport(PairsReport):
    """Its summary.json has the `eval_` metrics and `after` once the run is finished, the `eval_`
    metrics only if pairs are held out."""

    accuracy = heldout_accuracy = ACCURACY
    margins = "the differences of the implicit rewards of the held-out pairs"

    @property
    def title(self) -> str:
        return f"{self.run.recipe.loss.loss_type} loss, beta {self.run.recipe.loss.beta:g}"

    def list_facts(self) -> dict[str, Any]:
        loss, after = self.run.recipe.loss, self.run.progress.after or {}
        return {
            "loss_type": loss.loss_type,
            "beta": loss.beta,
            **{key: value for key, value in after.items() if key.startswith("eval_")},
            "before": self.run.progress.before,
            "after": {key: value for key, value in after.items() if not key.startswith("eval_")} or None,
            **super().list_facts(),
        }

    def show(self, summary: Mapping[str, Any]) -> None:
        console, data = self.console, summary["data"]
        if "eval_loss" in summary:
            title = f"{summary['eval_num_pairs']:,.0f} held-out pairs, by implicit rewards"
            table = make_table(title, ("", "after"), right=("after",))
            for name in (ACCURACY, "rewards/margins", "rewards/chosen", "rewards/rejected", "loss", "ece"):
                table.add_row(name, f"{summary[f'eval_{name}']:.4f}")
            console.print(table)
        self.show_best_accuracy(summary)
        if (summary["before"] or {}).get("answers") and summary["after"]:
            console.print(_make_rates_table(summary["before"], summary["after"]))
        rows = read_answers(self.directory.answers, before="end")
        if rows:
            console.print(_make_answers_table(rows))
        left_out = f"{sum(data['left_out'].values()):,} rows make no pair"
        console.print(f"{describe_data(data)}; {left_out}")
        self.show_pair_costs(summary)
        console.print(f"[bold]What this shows[/]: {describe_results(summary)}")

    def list_files(self) -> tuple[dict[Path, str], dict[Path, str]]:
        pictures, rows = super().list_files()
        return pictures, {
            **rows,
            self.directory.answers: "sampled answers, before and after",
            self.directory.reference_logps: "log-probabilities of the reference, for a resume",
            self.directory.reference: "the policy after the warm-up, which is the reference",
        }


def _make_rates_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
    times = ("before", "after")
    table = make_table(f"{after['answers']:,} sampled answers; 95 % intervals", ("", *times), right=times)
    for key, name in RATES.items():
        if key in before and key in after:
            table.add_row(name, _format_rate(before[key]), _format_rate(after[key]))
    return table


def _format_rate(rate: Mapping[str, float | None] | None) -> str:
    if rate is None:
        return "none"
    if rate["low"] is None or rate["high"] is None:
        return f"{rate['mean']:.3f}"
    return f"{rate['mean']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})"


def _make_answers_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The first answers to the same prompts."""
    from rich.text import Text

    columns = ["prompt", *dict.fromkeys(row["when"] for row in rows)]
    table = make_table("Sampled answers", columns)
    by_time = [[row for row in rows if row["when"] == when] for when in columns[1:]]
    for same in list(zip(*by_time, strict=False))[:SHOWN_ANSWERS]:
        table.add_row(Text(_shorten(same[0]["prompt"], end=True)), *(Text(_shorten(row["text"])) for row in same))
    return table


def _shorten(text: str, *, end: bool = False) -> str:
    """One line of at most `SHOWN_CHARACTERS`; of a prompt, its end."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return f"…{line[-SHOWN_CHARACTERS:]}" if end else f"{line[:SHOWN_CHARACTERS]}…"


DESCRIBED_RATES = {"score": "true quality of sampled answers", "well_formed": "share of well-formed answers"}


def describe_results(summary: Mapping[str, Any]) -> str:
    """The sentences on one line, from the content of summary.json."""
    return " ".join(_write_sentences(summary))


def _write_sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["status"] != "finished":
        yield "The run was stopped before its end was measured."
        return
    if not summary["steps"]:
        yield "Nothing was trained."
        return
    if f"eval_{ACCURACY}" in summary:
        yield from _describe_pairs(summary)
    else:
        yield "No pairs are held out, so nothing here measures what was learned; raise heldout, or give heldout_data."
    before, after = summary["before"] or {}, summary["after"] or {}
    known = [name for name in DESCRIBED_RATES if before.get(name) and after.get(name)]
    for name in known:
        yield _describe_change(DESCRIBED_RATES[name], before[name], after[name])
    if not known:
        yield "Nothing here measures whether sampled answers are better."


def _describe_pairs(summary: Mapping[str, Any]) -> Iterator[str]:
    """A policy that is its reference has the margin 0 on every pair, and no accuracy."""
    share, pairs = summary[f"eval_{ACCURACY}"], summary["eval_num_pairs"]
    low, high = wilson_interval(share * pairs, pairs)
    against = (
        "more often than not"
        if low > 0.5
        else "less often than not"
        if high < 0.5
        else "which this number of pairs does not tell from chance"
    )
    best = summary.get("bayes_accuracy")
    bound = "" if best is None else f"; {best:.1%} is the best possible on average"
    yield (
        f"The policy moved towards the chosen response in {share:.1%} of {pairs:,.0f} held-out pairs, {against} (95 % interval "
        f"{low:.1%} to {high:.1%}{bound})."
    )
    chosen, rejected = summary["eval_rewards/chosen"], summary["eval_rewards/rejected"]
    if rejected < chosen < 0:
        yield (
            "Chosen responses became less likely than under the reference, and rejected ones even less: the margin comes from the "
            "rejected responses. loss.nll_coeff above 0 raises chosen responses too."
        )


def _describe_change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The intervals of two independent samples; what they overlap in may be noise."""
    by = f"from {before['mean']:.3f} to {after['mean']:.3f}"
    bounds = (before["low"], before["high"], after["low"], after["high"])
    if any(bound is None for bound in bounds):
        return f"The {name} went {by}; how much of it is noise is not known."
    if after["low"] > before["high"] or after["high"] < before["low"]:
        return f"The {name} {'rose' if after['mean'] > before['mean'] else 'fell'} {by}; their 95 % intervals do not meet."
    if after["mean"] == before["mean"]:
        return f"The {name} did not change: {after['mean']:.3f}."
    return f"The {name} went {by}, which may be noise: their 95 % intervals overlap."
