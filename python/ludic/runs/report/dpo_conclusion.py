"""The closing sentences of a report on direct preference optimization. Each is printed only if the
numbers support it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ludic.eval.intervals import wilson_interval

ACCURACY = "eval_rewards/accuracies"
RATES = {"score": "true quality of sampled answers", "well_formed": "share of well-formed answers"}


def conclude(summary: Mapping[str, Any]) -> str:
    """The sentences on one line, from the content of summary.json."""
    return " ".join(_write_sentences(summary))


def _write_sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["status"] != "finished":
        yield "The run was stopped before its end was measured."
        return
    if not summary["steps"]:
        yield "Nothing was trained."
        return
    if ACCURACY in summary:
        yield from _describe_pairs(summary)
    else:
        yield "No pairs are held out, so nothing here measures what was learned; raise heldout, or give heldout_data."
    before, after = summary["before"] or {}, summary["after"] or {}
    known = [name for name in RATES if before.get(name) and after.get(name)]
    for name in known:
        yield _describe_change(RATES[name], before[name], after[name])
    if not known:
        yield "Nothing here measures whether sampled answers are better."


def _describe_pairs(summary: Mapping[str, Any]) -> Iterator[str]:
    """A policy that is its reference has the margin 0 on every pair, and no accuracy."""
    share, pairs = summary[ACCURACY], summary["eval_num_pairs"]
    low, high = wilson_interval(share * pairs, pairs)
    against = (
        "more often than not"
        if low > 0.5
        else "less often than not"
        if high < 0.5
        else "which is not told from chance by so many"
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
            "Chosen responses became less likely than under the reference, and rejected ones even less: the margin comes from what is "
            "avoided. loss.nll_coeff above 0 raises chosen responses too."
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
