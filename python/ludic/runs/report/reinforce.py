"""The report of a reinforcement run and its summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ludic.files.atomic import write_text
from ludic.runs.directory import Progress, RunDirectory
from ludic.runs.held_out import Answer, Evaluation, make_comparable
from ludic.runs.report.conclusion import Facts, collect_facts, conclude, count_idle
from ludic.runs.report.costs import format_execution, format_memory, format_padding, format_seconds, sum_padding, sum_phases
from ludic.runs.report.curve import draw_text_curve, write_picture
from ludic.runs.report.files import describe_files, show_files
from ludic.runs.report.provenance import count_lost_episodes, count_samples, format_lost, provenance
from ludic.runs.report.sampling import (
    format_actors,
    summarize_actors,
    summarize_mismatch,
    summarize_overlap,
    summarize_weight_sync,
)
from ludic.tasks.measures import logged_names
from ludic.tasks.success import success_of
from ludic.training.backend.memory import memory_peaks
from ludic.training.stats import SAMPLED_REWARD

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.recipes.schema import Recipe
    from ludic.tasks import EpisodicTask

_TRAINER_PHASES = ("rollout", "batching", "forward_backward", "optimizer", "publish")
_DRAWN = 4  # rates in the picture; the table has all
_RATE_NAMES = {
    "sampled_reward": "held-out reward, sampled",
    "greedy_accuracy": "held-out accuracy, greedy",
    "greedy_reward": "held-out reward, greedy",
}
_SHOWN_EVALUATIONS = 12


@dataclass(frozen=True)
class Summary:
    """The content of summary.json."""

    status: str
    """finished or interrupted; that of a run that failed has only what `write_failure` knows."""
    stopped_by: dict[str, Any] | None
    """The `callback` that ended the run, its `reason`, the `step`, and the steps that were asked
    for (`of_steps`); null if none did."""
    model: str | None
    """The model that was trained; null for a small model that was made."""
    algorithm: str
    versions: dict[str, str] | None
    """Library versions at the start of the run; null in the folder of an older version."""
    before: dict[str, float] | None
    """Held-out rates after the warm-up; null if the run was interrupted before."""
    after: dict[str, float] | None
    """Held-out rates at the end; null if the run was interrupted."""
    solved_at: float | None
    """An answer counts as right from this reward on; null if nothing defines a right answer, and
    there is no accuracy."""
    intervals: dict[str, dict[str, list[float | None]]]
    """95 % intervals over problems, `[low, high]`, for `before` and `after`; only rates that are
    known per problem have one."""
    heldout: dict[str, int]
    """`problems` of the last measurement, and the `answers` that were sampled to them."""
    wall_s: float
    phases_s: dict[str, float]
    execution_s: float | None
    """Of `wall_s`: seconds in which at least one program ran, to be judged; left out
    without programs."""
    padding: dict[str, float]
    memory: dict[str, float]
    """Peaks of this process so far, in MiB: `memory_peaks`."""
    steps: int
    """Batches of reinforcement done."""
    idle_steps: int
    """Steps that had nothing to train on, because every answer had the weight 0."""
    stopped_early: bool
    """Early stopping or a callback ended the run before all its steps."""
    episodes: dict[str, int]
    """Training episodes that `failed`, were `retried` or `cancelled`, and `dropped_groups`, the
    groups that were dropped for a failed episode."""
    samples: dict[str, int]
    """Samples of the steps of reinforcement, and how many of them were cut: `count_samples`."""
    clip_fraction: float | None
    """Mean over the steps; null for an algorithm without clipping."""
    mismatch: dict[str, Any] | None
    """The difference between trainer and sampler: `preflight` before the first step, `mean` and
    `kl` over all steps, the largest `max`, the smallest `ess`, the mean `lag` in versions; null
    if nothing was measured."""
    weight_sync: dict[str, float] | None
    """Weight updates: the number of `pushes`, `mean_s` and `max_s` of one; null without any."""
    overlap: dict[str, float] | None
    """Seconds of generation, seconds that the trainer waited for it, and the `hidden` share;
    null without reinforcement."""
    actors: dict[str, float] | None
    """Of a run with actors: how many were `alive` on average, `restarts`, the age of samples in
    versions, `lag_mean` and `lag_max`, and seconds that the trainer waited for them; else null."""
    seed: int
    config_hash: str

    def to_json(self) -> str:
        content = {name: value for name, value in vars(self).items() if name != "execution_s" or value is not None}
        return json.dumps(content, indent=2) + "\n"

    def write(self, directory: RunDirectory) -> None:
        write_text(directory.summary, self.to_json())


@dataclass(frozen=True)
class Outcome:
    """The content of the report."""

    summary: Summary
    task: EpisodicTask
    before: Evaluation | None
    after: Evaluation | None
    rewards: Sequence[float]
    """Mean reward of the sampled answers, per step."""
    facts: Mapping[str, Sequence[float]]
    """One value per step for each of the task's facts and measures."""
    closing_facts: Facts
    """The facts for the closing sentences."""
    no_accuracy: str | None
    """Why there is no accuracy, and how to get one; None if there is one."""
    measured: Sequence[tuple[int, Mapping[str, float]]]
    """(step, rates) of each evaluation during the training."""

    @property
    def is_untrained(self) -> bool:
        """No step of reinforcement was asked for, so that there is one measurement."""
        return self.closing_facts.requested_steps == 0


def build_outcome(
    progress: Progress, directory: RunDirectory, task: EpisodicTask, recipe: Recipe, *, config_hash: str
) -> Outcome:
    """The outcome of a run, from its progress.json and metrics.jsonl, so that a resumed run is
    reported as a whole."""
    before, after = make_comparable(
        *(None if saved is None else Evaluation.from_dict(saved) for saved in (progress.before, progress.after))
    )
    every_line = directory.read_metrics("reinforce")
    warm_up, reinforce = (
        [line for line in lines if "train/loss" in line] for lines in (directory.read_metrics("warm_up"), every_line)
    )
    clipped = [value for line in reinforce for key, value in line.items() if key.endswith("clip_frac") and "ratio" not in key]
    closing_facts = collect_facts(
        before,
        after,
        requested_steps=recipe.steps,
        steps=progress.steps,
        idle_steps=count_idle(every_line),
        reward_is_score=task.reward_is_score,
        clip_fraction=sum(clipped) / len(clipped) if clipped else None,
    )
    closing_facts = replace(closing_facts, stopped_by=(progress.stopped_by or {}).get("callback", closing_facts.stopped_by))
    summary = Summary(
        **provenance(progress, model=recipe.model, algorithm=recipe.algorithm),
        before=before.rates() if before else None,
        after=after.rates() if after else None,
        solved_at=_find_solved_at(before, after),
        intervals=_intervals_of(before, after),
        heldout=_count_heldout(after or before),
        wall_s=round(progress.seconds.get("wall", 0.0), 2),
        phases_s=sum_phases(progress.seconds, reinforce, own=("set_up", "warm_up", "evaluate"), timed=_TRAINER_PHASES),
        execution_s=round(progress.seconds["execution"], 2) if "execution" in progress.seconds else None,
        padding=sum_padding([*warm_up, *reinforce]),
        memory=memory_peaks(),
        steps=progress.steps,
        idle_steps=closing_facts.idle_steps,
        stopped_early=closing_facts.stopped_early,
        episodes=count_lost_episodes(reinforce),
        samples=count_samples(reinforce),
        clip_fraction=closing_facts.clip_fraction,
        mismatch=summarize_mismatch(reinforce, progress.preflight),
        weight_sync=summarize_weight_sync(reinforce),
        overlap=summarize_overlap(reinforce),
        actors=summarize_actors(reinforce),
        seed=recipe.seed,
        config_hash=config_hash,
    )
    success = success_of(task, recipe.evaluation.solved_at)
    return Outcome(
        summary=summary,
        task=task,
        before=before,
        after=after,
        rewards=[line[f"train/{SAMPLED_REWARD}"] for line in reinforce],
        facts={name: [line[f"train/{name}"] for line in reinforce] for name in logged_names(task)},
        closing_facts=closing_facts,
        no_accuracy=success.why_unknown("evaluation.solved_at") if before and summary.solved_at is None else None,
        measured=[(line["step"], _read_rates(line)) for line in every_line if line.get("eval/step") == line["step"]],
    )


def _find_solved_at(*evaluations: Evaluation | None) -> float | None:
    return next((evaluation.solved_at for evaluation in evaluations if evaluation is not None), None)


def _intervals_of(before: Evaluation | None, after: Evaluation | None) -> dict[str, dict[str, list[float | None]]]:
    """`_list_intervals` of the measurements that there are."""
    return {name: _list_intervals(measured) for name, measured in (("before", before), ("after", after)) if measured}


def _list_intervals(evaluation: Evaluation) -> dict[str, list[float | None]]:
    intervals = {name: evaluation.interval(name) for name in evaluation.rates()}
    return {name: [interval.low, interval.high] for name, interval in intervals.items() if interval is not None}


def _count_heldout(evaluation: Evaluation | None) -> dict[str, int]:
    if evaluation is None:
        return {}
    graded = evaluation.by_problem.get("sampled_reward", ())
    return {"problems": sum(value is not None for value in graded), "answers": evaluation.num_sampled}


def _read_rates(line: Mapping[str, float]) -> dict[str, float]:
    """The held-out rates in a line of metrics.jsonl."""
    rates = {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
    if "greedy_accuracy" in rates:
        rates.pop("greedy_reward", None)
    return {name: value for name, value in rates.items() if name not in ("step", "num_failed_episodes")}


def draw_rewards(outcome: Outcome, directory: RunDirectory, title: str) -> None:
    """Draw reward.png: the rewards of every step and the held-out rates of every measurement."""
    marks, between = {}, {}
    if outcome.before is not None and outcome.after is not None:
        before, after = outcome.before.rates(), outcome.after.rates()
        drawn = {name: _label_in_picture(outcome.task, name) for name in list(before)[:_DRAWN] if name in after}
        marks = {label: (before[name], after[name]) for name, label in drawn.items()}
        between = {
            label: [(step, rates[name]) for step, rates in outcome.measured if name in rates] for name, label in drawn.items()
        }
    series = {"reward of the sampled answers": outcome.rewards, **outcome.facts}
    write_picture(directory.picture, series, marks=marks, measured=between, title=title)


def _label_in_picture(task: EpisodicTask, name: str) -> str:
    return label_rate(task, name) if name in _RATE_NAMES else f"held-out {name}"


def show_report(console: Console, outcome: Outcome, directory: RunDirectory) -> None:
    """Print rates, answers, curve, timings, padding and the files of the run."""
    if outcome.before is not None:
        console.print(_make_rates_table(outcome, outcome.before, outcome.after))
    if outcome.no_accuracy is not None:
        console.print(outcome.no_accuracy, highlight=False, markup=False)
    if outcome.before is not None and outcome.after is not None:
        console.print(_make_answers_table(outcome, {"before": outcome.before, "after": outcome.after}))
    if outcome.measured:
        console.print(_make_evaluations_table(outcome))
    for line in draw_text_curve(outcome.rewards):
        console.print(line, highlight=False, markup=False)
    console.print(format_seconds(outcome.summary.wall_s, outcome.summary.phases_s), highlight=False)
    if outcome.summary.execution_s is not None:
        console.print(format_execution(outcome.summary.wall_s, outcome.summary.execution_s), highlight=False)
    console.print(format_padding(outcome.summary.padding), highlight=False)
    console.print(format_memory(outcome.summary.memory), highlight=False)
    if outcome.summary.actors is not None:
        console.print(format_actors(outcome.summary.actors), highlight=False)
    lost = format_lost(outcome.summary.episodes)
    if lost is not None:
        console.print(lost, highlight=False)
    console.print(f"[bold]What this shows[/]: {conclude(outcome.closing_facts)}", highlight=False)
    console.print(f"[bold]What is rewarded[/]: the reward sees {outcome.task.reward_sees}.", highlight=False)
    files = describe_files(directory, {directory.picture: "the reward curve"}, {directory.rollouts: "sampled episodes"})
    show_files(console, directory.path, files)


def _make_rates_table(outcome: Outcome, before: Evaluation, after: Evaluation | None) -> Any:
    from rich.table import Table

    counts = outcome.summary.heldout
    counted = f": {counts['problems']}, {counts['answers']} sampled answers" if counts.get("problems") else ""
    table = Table(title=f"Held-out problems{counted}; 95 % intervals", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("measured",) if outcome.is_untrained else ("before reinforcement", "after"):
        table.add_column(column, justify="right")
    later = after.rates() if after else {}
    for name in before.rates():
        cells = [_format_rate(before, name), _format_rate(after, name) if after and name in later else "not measured"]
        table.add_row(label_rate(outcome.task, name), *(cells[:1] if outcome.is_untrained else cells))
    return table


def label_rate(task: EpisodicTask, name: str) -> str:
    """The label of a held-out rate in tables and pictures."""
    if task.reward_is_score and name in ("sampled_reward", "greedy_reward"):
        return f"held-out score as rewarded, {name.split('_')[0]}"
    return _RATE_NAMES.get(name) or task.rates.get(name, name)


def _format_rate(evaluation: Evaluation, name: str) -> str:
    interval = evaluation.interval(name)
    value = f"{evaluation.rates()[name]:.3f}"
    return value if interval is None or interval.low is None else f"{value}\n{interval.low:.3f} to {interval.high:.3f}"


def _make_evaluations_table(outcome: Outcome) -> Any:
    """Evaluations during training, evenly thinned from the last backwards."""
    from rich.table import Table

    names = list(outcome.measured[-1][1])[:_DRAWN]
    table = Table(title=f"Measured during training: {len(outcome.measured)} times", title_justify="left")
    for column in ("step", *(label_rate(outcome.task, name) for name in names)):
        table.add_column(column, justify="right")
    stride = -(-len(outcome.measured) // _SHOWN_EVALUATIONS)
    for step, rates in reversed(outcome.measured[::-1][::stride]):
        table.add_row(str(step), *(f"{rates[name]:.3f}" if name in rates else "" for name in names))
    return table


def _make_answers_table(outcome: Outcome, measured: Mapping[str, Evaluation]) -> Any:
    """Sampled answers of each measurement, of the last alone if nothing was trained in between:
    with marks and the right answer if there is an accuracy, else with rewards and a reference."""
    from rich.table import Table
    from rich.text import Text

    if outcome.is_untrained:
        measured = {"answer": list(measured.values())[-1]}
    answers = [evaluation.answers for evaluation in measured.values()]
    has_reference = any(answer.expected for answer in answers[0])
    expected = "right answer" if outcome.no_accuracy is None else "reference in the data"
    marks = "" if outcome.no_accuracy is None else ", with its reward"
    table = Table(title="Sampled answers", title_justify="left")
    for column in ("question", *([expected] if has_reference else []), *(f"{when}{marks}" for when in measured)):
        table.add_column(column)
    for same in zip(*answers, strict=True):
        reference = [Text(_shorten(same[0].expected))] if has_reference else []
        table.add_row(Text(_shorten(same[0].question)), *reference, *(Text(*_format_answer(answer)) for answer in same))
    return table


def _format_answer(answer: Answer) -> tuple[str, str]:
    """(text of the answer, colour)."""
    if answer.reward is None:
        return "? could not be graded", "yellow"
    text = _make_printable(_shorten(answer.text))
    if answer.success is None:
        return f"{answer.reward:.3g}  {text}", ""
    return f"{'✓' if answer.success else '✗'} {text}", "green" if answer.success else "red"


def _shorten(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _make_printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text)
