"""The report of a reinforcement run and its summary.json.

Each closing sentence is printed only if the numbers support it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ludic.agents.tool_calls import describe_failing
from ludic.eval.statistics import Interval, difference_interval
from ludic.files.jsonl import read_jsonl
from ludic.recipes.mixture import Mixture
from ludic.recipes.schema import Recipe
from ludic.runs.directory import Progress, RunDirectory
from ludic.runs.held_out import Answer, Evaluation, make_comparable
from ludic.runs.report.curve import draw_text_curve, write_picture
from ludic.runs.report.summary import (
    count_lost_episodes,
    count_samples,
    describe_files,
    make_table,
    provenance,
    show_costs,
    show_files,
    sum_padding,
    sum_phases,
    write_summary,
)
from ludic.tasks import EpisodicTask
from ludic.tasks.episodic import logged_names
from ludic.tasks.rewards import success_of
from ludic.training.backend.memory import memory_peaks
from ludic.training.reward_scorer import SCORE_INFO
from ludic.training.stats import SAMPLED_REWARD

_TRAINER_PHASES = ("rollout", "batching", "forward_backward", "optimizer", "publish")
_DRAWN = 4  # rates in the picture; the table has all
_RATE_NAMES = {
    "sampled_reward": "held-out reward, sampled",
    "greedy_accuracy": "held-out accuracy, greedy",
    "greedy_reward": "held-out reward, greedy",
}
_SHOWN_EVALUATIONS = 12
_SHOWN_CALLS = 8  # of an answer


@dataclass(frozen=True)
class Summary:
    """The content of summary.json."""

    status: str
    """finished or interrupted. The summary of a failed run has only the entries of
    `write_failure`."""
    stopped_by: dict[str, Any] | None
    """The `callback` that ended the run, its `reason`, the `step`, and the steps of the recipe
    (`of_steps`); null if none did."""
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

    def write(self, directory: RunDirectory) -> str:
        """Write summary.json, and return its text."""
        content = {name: value for name, value in vars(self).items() if name != "execution_s" or value is not None}
        return write_summary(directory, content)


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
        """No step of reinforcement was requested, so that there is one measurement."""
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
        stopped_by=(progress.stopped_by or {"callback": "Early stopping"})["callback"],
    )
    measured = {name: evaluation for name, evaluation in (("before", before), ("after", after)) if evaluation}
    last = after or before
    graded = last.by_problem.get("sampled_reward", ()) if last else ()
    summary = Summary(
        **provenance(progress, model=recipe.model, algorithm=recipe.algorithm),
        before=before.rates() if before else None,
        after=after.rates() if after else None,
        solved_at=next((evaluation.solved_at for evaluation in measured.values()), None),
        intervals={when: _list_intervals(evaluation) for when, evaluation in measured.items()},
        heldout={"problems": sum(value is not None for value in graded), "answers": last.num_sampled} if last else {},
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
        facts={name: [line.get(f"train/{name}", math.nan) for line in reinforce] for name in logged_names(task)},
        closing_facts=closing_facts,
        no_accuracy=success.why_unknown("evaluation.solved_at") if before and before.greedy_accuracy is None else None,
        measured=[(line["step"], _read_rates(line)) for line in every_line if line.get("eval/step") == line["step"]],
    )


def _list_intervals(evaluation: Evaluation) -> dict[str, list[float | None]]:
    intervals = {name: evaluation.interval(name) for name in evaluation.rates()}
    return {name: [interval.low, interval.high] for name, interval in intervals.items() if interval is not None}


def _read_rates(line: Mapping[str, float]) -> dict[str, float]:
    """The held-out rates in a line of metrics.jsonl."""
    rates = {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
    shown = {name: value for name, value in rates.items() if name.rpartition("/")[2] not in ("step", "num_failed_episodes")}
    return {
        name: value
        for name, value in shown.items()
        if not (name.endswith("greedy_reward") and name.replace("greedy_reward", "greedy_accuracy") in shown)
    }


def draw_rewards(outcome: Outcome, directory: RunDirectory, title: str) -> None:
    """Draw reward.png: the rewards of every step and the held-out rates of every measurement."""
    marks, between = {}, {}
    if outcome.before is not None and outcome.after is not None:
        before, after = outcome.before.rates(), outcome.after.rates()
        drawn = {
            name: label_rate(outcome.task, name) if name in _RATE_NAMES else f"held-out {name}"
            for name in list(before)[:_DRAWN]
            if name in after
        }
        marks = {label: (before[name], after[name]) for name, label in drawn.items()}
        between = {
            label: [(step, rates[name]) for step, rates in outcome.measured if name in rates] for name, label in drawn.items()
        }
    series = {"reward of the sampled answers": outcome.rewards, **outcome.facts}
    write_picture(directory.picture, series, marks=marks, measured=between, title=title)


def show_report(console: Console, outcome: Outcome, directory: RunDirectory) -> None:
    """Print rates, answers, curve, timings, padding and the files of the run."""
    if outcome.before is not None:
        console.print(_make_rates_table(outcome, outcome.before, outcome.after))
    if outcome.no_accuracy is not None:
        console.print(outcome.no_accuracy, markup=False)
    if outcome.before is not None and outcome.after is not None:
        console.print(_make_answers_table(outcome, {"before": outcome.before, "after": outcome.after}))
    if outcome.measured:  # thinned evenly, from the last backwards
        names = list(outcome.measured[-1][1])[:_DRAWN]
        columns = ("step", *(label_rate(outcome.task, name) for name in names))
        table = make_table(f"Measured during training: {len(outcome.measured)} times", columns, right=columns)
        stride = -(-len(outcome.measured) // _SHOWN_EVALUATIONS)
        for step, rates in reversed(outcome.measured[::-1][::stride]):
            table.add_row(str(step), *(f"{rates[name]:.3f}" if name in rates else "" for name in names))
        console.print(table)
    for line in draw_text_curve(outcome.rewards):
        console.print(line, markup=False)
    show_costs(console, vars(outcome.summary))
    if (actors := outcome.summary.actors) is not None:
        counted = f"{actors['alive']:.1f} ran on average, {actors['restarts']:.0f} restarts"
        console.print(
            f"[bold]Actors[/]: {counted if actors['alive'] else 'not counted here'}; samples were {actors['lag_mean']:.2f} versions old on "
            f"average, at most {actors['lag_max']:g}; the trainer waited {actors['waited_s']:.1f} s for them"
        )
    lost = outcome.summary.episodes
    if lost["failed"] or lost["dropped_groups"]:
        console.print(
            f"[bold]Lost[/]: {lost['failed']:,} training episodes failed, and {lost['dropped_groups']:,} groups were dropped for them; "
            "they are in no reward"
        )
    if outcome.task.tool_use is not None and directory.rollouts.is_file():
        rollouts = (rollout for _, rollout in read_jsonl(directory.rollouts))
        for line in describe_failing(step["info"] for rollout in rollouts for step in rollout["steps"]):
            console.print(_printable(line), markup=False, style="yellow")
    console.print(f"[bold]What this shows[/]: {conclude(outcome.closing_facts)}")
    console.print(f"[bold]Rewarded part[/]: the reward sees {outcome.task.reward_sees}.")
    files = describe_files(directory, {directory.picture: "the reward curve"}, {directory.rollouts: "sampled episodes"})
    show_files(console, directory.path, files)


def _make_rates_table(outcome: Outcome, before: Evaluation, after: Evaluation | None) -> Any:
    counts = outcome.summary.heldout
    counted = f": {counts['problems']}, {counts['answers']} sampled answers" if counts.get("problems") else ""
    columns = ("measured",) if outcome.is_untrained else ("before reinforcement", "after")
    table = make_table(f"Held-out problems{counted}; 95 % intervals", ("", *columns), right=columns)
    table.columns[0].no_wrap = True
    later = after.rates() if after else {}
    for name in before.rates():
        cells = [_format_rate(before, name), _format_rate(after, name) if after and name in later else "not measured"]
        table.add_row(label_rate(outcome.task, name), *(cells[:1] if outcome.is_untrained else cells))
    return table


def label_rate(task: EpisodicTask, name: str) -> str:
    """The label of a held-out rate in tables and pictures."""
    environment, _, rate = name.partition("/")
    if isinstance(task, Mixture) and environment in task.sources:
        return f"{environment}: {label_rate(task.sources[environment].task, rate)}"
    if task.reward_is_score and name in ("sampled_reward", "greedy_reward"):
        return f"held-out score as rewarded, {name.split('_')[0]}"
    return _RATE_NAMES.get(name) or task.rates.get(name, name)


def _format_rate(evaluation: Evaluation, name: str) -> str:
    interval = evaluation.interval(name)
    value = f"{evaluation.rates()[name]:.3f}"
    return value if interval is None or interval.low is None else f"{value}\n{interval.low:.3f} to {interval.high:.3f}"


def _make_answers_table(outcome: Outcome, measured: Mapping[str, Evaluation]) -> Any:
    """Sampled answers of each measurement, of the last alone if nothing was trained in between:
    with marks and the right answer if there is an accuracy, else with rewards and a reference."""
    if outcome.is_untrained:
        measured = {"answer": list(measured.values())[-1]}
    answers = [evaluation.answers for evaluation in measured.values()]
    has_reference = any(answer.expected for answer in answers[0])
    expected = "right answer" if outcome.no_accuracy is None else "reference in the data"
    marks = "" if outcome.no_accuracy is None else ", with its reward"
    columns = ["question", *([expected] if has_reference else []), *(f"{when}{marks}" for when in measured)]
    table = make_table("Sampled answers", columns)
    for same in zip(*answers, strict=True):
        reference = [Text(_shorten(same[0].expected))] if has_reference else []
        table.add_row(Text(_shorten(same[0].question)), *reference, *map(_format_answer, same))
    return table


def _format_answer(answer: Answer) -> Text:
    """The answer with its mark, and below it the calls before it."""
    if answer.reward is None:
        return Text("? could not be graded", "yellow")
    text = _printable(_shorten(answer.text))
    if answer.success is None:
        shown = Text(f"{answer.reward:.3g}  {text}")
    else:
        shown = Text(f"{'✓' if answer.success else '✗'} {text}", "green" if answer.success else "red")
    for call in answer.calls.splitlines()[:_SHOWN_CALLS]:
        shown.append(f"\n  {_printable(_shorten(call))}", "dim")
    return shown


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text)


def _shorten(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


@dataclass(frozen=True)
class Change:
    """A held-out mean before and after training. Example: `Change(0.247, 0.979, Interval(0.732,
    0.71, 0.75, 500))`."""

    before: float
    after: float
    difference: Interval | None = None
    """Interval of `after - before`; None, or without bounds, if the noise is not known."""

    @property
    def rose(self) -> bool:
        """By more than its noise."""
        return self.difference is not None and self.difference.low is not None and self.difference.low > 0

    @property
    def fell(self) -> bool:
        """By more than its noise."""
        return self.difference is not None and self.difference.high is not None and self.difference.high < 0

    @property
    def noise(self) -> str:
        """The interval of the change, in words."""
        interval = self.difference
        if interval is None or interval.low is None or interval.high is None:
            return "how much of it is noise is not known"
        return f"95 % interval {interval.low:+.3f} to {interval.high:+.3f}, {interval.num_problems} problems"

    @classmethod
    def between(cls, before: Evaluation, after: Evaluation, name: str) -> Change:
        """The change of the rate `name`, over the problems that were graded in both
        measurements."""
        rates = before.rates()[name], after.rates()[name]
        pairs = zip(before.by_problem.get(name, ()), after.by_problem.get(name, ()), strict=False)
        graded = [(early, late) for early, late in pairs if early is not None and late is not None]
        if not graded:
            return cls(*rates)
        answers = min(before.num_sampled, after.num_sampled)
        return cls(*rates, difference_interval([early for early, _ in graded], [late for _, late in graded], answers=answers))


@dataclass(frozen=True)
class Facts:
    """The facts of a run that the sentences are made of."""

    requested_steps: int
    """Steps of reinforcement that the recipe asks for."""
    steps: int
    """Steps that were taken."""
    idle_steps: int = 0
    """Steps in which every answer had the weight 0, so that nothing was trained on."""
    measured: bool = True
    """The run finished and was measured at its end."""
    reward: Change | None = None
    """The held-out reward of sampled answers; None if it was not measured twice."""
    score: Change | None = None
    """The score of a reward model; None if there is none or if the reward is that score."""
    reward_is_score: bool = False
    """The reward is the score of a reward model, and there is no other measure of an answer."""
    right: tuple[float, float] | None = None
    """Share of right sampled answers, before and after; None if nothing defines a right answer."""
    clip_fraction: float | None = None
    stopped_by: str = "Early stopping"
    """What ended the run, if that was before all of its steps."""

    @property
    def stopped_early(self) -> bool:
        """Early stopping or a callback ended the run before all of its steps."""
        return self.measured and 0 < self.steps < self.requested_steps

    @property
    def idle(self) -> bool:
        """There were steps, but none of them trained on anything."""
        return 0 < self.steps == self.idle_steps


def collect_facts(before: Evaluation | None, after: Evaluation | None, *, reward_is_score: bool, **known: Any) -> Facts:
    """`before` and `after` as `make_comparable` gives them. `known`: facts of other sources."""
    if before is None or after is None:
        return Facts(**known, measured=after is not None)
    scored = SCORE_INFO in before.facts and SCORE_INFO in after.facts and not reward_is_score
    is_marked = before.sampled_right is not None and after.sampled_right is not None
    return Facts(
        **known,
        reward=Change.between(before, after, "sampled_reward"),
        score=Change.between(before, after, SCORE_INFO) if scored else None,
        reward_is_score=reward_is_score,
        right=(before.sampled_right, after.sampled_right) if is_marked else None,  # type: ignore[arg-type]
    )


def conclude(facts: Facts) -> str:
    """The sentences on one line."""
    return " ".join(_write_sentences(facts))


def _write_sentences(facts: Facts) -> Iterator[str]:
    if not facts.measured:
        yield "The run was stopped before its end was measured."
    elif not facts.steps:
        yield "There was no reinforcement."
    if facts.stopped_early:
        yield f"{facts.stopped_by} ended the run at step {facts.steps} of {facts.requested_steps}."
    if facts.idle:
        yield (
            f"Nothing was trained on: no step of {facts.steps} had a signal. Every sampled answer had the weight 0, as it is where all "
            "answers to a problem earn the same."
        )
        return
    if facts.idle_steps:
        yield f"{facts.idle_steps} of {facts.steps} steps had no signal: every sampled answer had the weight 0."
    if facts.measured and facts.steps and facts.reward is not None:
        yield from _describe_reward(facts, facts.reward)
    if facts.clip_fraction is not None:
        yield f"The clip acted on {facts.clip_fraction:.2%} of what it saw."


def _describe_reward(facts: Facts, reward: Change) -> Iterator[str]:
    """The change of the reward, and of the score if that is something else."""
    name = "held-out score of the reward model" if facts.reward_is_score else "held-out reward of sampled answers"
    if facts.right == (1.0, 1.0):
        yield "All sampled answers to held-out problems were right before and after: on these problems there was nothing left to learn."
        return
    yield f"{_describe_change(name, reward)}."
    if facts.score is not None:
        yield f"{_describe_change('held-out score of the reward model', facts.score)}."
        if facts.score.rose and reward.fell:
            yield "The reward model is over-optimised: its score rose while the reward fell."
    elif facts.reward_is_score:
        yield "Nothing here measures whether answers with a higher score are better."
    before, after = facts.right or (None, None)
    if before == after == 0:
        yield "No sampled answer was right, before or after, so that there is little to reinforce."
    elif before and reward.rose:
        yield f"{before:.1%} of the sampled answers were right before it; reinforcement selects and sharpens these."


def _describe_change(name: str, change: Change) -> str:
    by = f"from {change.before:.3f} to {change.after:.3f}"
    if change.rose or change.fell:
        return f"The {name} {'rose' if change.rose else 'fell'} {by} ({change.noise})"
    if change.before == change.after:
        return f"The {name} did not change: {change.after:.3f}"
    if change.difference is None or change.difference.low is None:
        return f"The {name} went {by}; {change.noise}"
    return f"The {name} went {by}, which may be noise ({change.noise})"


def count_idle(lines: Sequence[dict[str, float]]) -> int:
    """The number of steps in metrics.jsonl that trained on no token. Lines that only have an
    evaluation are not counted."""
    return sum(1 for line in lines if "perf/padded_tokens" in line and not line["perf/padded_tokens"])


Lines = Sequence[Mapping[str, float]]


def summarize_mismatch(lines: Lines, preflight: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The difference between trainer and sampler: means over tokens, extremes over steps. Only
    steps are measured in which the first optimizer step had samples with a weight."""
    measured = [line for line in lines if "mismatch/mean" in line]
    lags = [line["train/policy_lag"] for line in lines if "train/policy_lag" in line]
    if not measured and not lags and preflight is None:
        return None
    return {
        "preflight": None if preflight is None else dict(preflight),
        "mean": _average_over_tokens(measured, "mean"),
        "kl": _average_over_tokens(measured, "kl"),
        "max": max((line["mismatch/max"] for line in measured), default=None),
        "ess": min((line["mismatch/ess"] for line in measured), default=None),
        "lag": sum(lags) / len(lags) if lags else None,
    }


def _average_over_tokens(lines: Lines, name: str) -> float | None:
    tokens = sum(line["mismatch/tokens"] for line in lines)
    return sum(line[f"mismatch/{name}"] * line["mismatch/tokens"] for line in lines) / tokens if tokens else None


def summarize_weight_sync(lines: Lines) -> dict[str, float] | None:
    """The number of weight updates that were pushed, and seconds of one; None without any."""
    seconds = [line["perf/publish_s"] for line in lines if line.get("perf/publish_s")]
    if not seconds:
        return None
    return {"pushes": len(seconds), "mean_s": sum(seconds) / len(seconds), "max_s": max(seconds)}


def summarize_overlap(lines: Lines) -> dict[str, float] | None:
    """Seconds of generation, seconds that the trainer waited, and the share that was hidden
    behind training."""
    measured = [line for line in lines if "perf/generation_s" in line]
    generation = sum(line["perf/generation_s"] for line in measured)
    if not generation:
        return None
    waited = sum(line.get("perf/rollout_s", 0.0) for line in measured)
    return {"generation_s": generation, "waited_s": waited, "hidden": max(0.0, 1.0 - waited / generation)}


def summarize_actors(lines: Lines) -> dict[str, float] | None:
    """The actors of a run, over all its processes: how many ran on average, how many were
    restarted, how old the samples were in versions, and how long the trainer waited for them. None
    for a run without actors."""
    measured = [line for line in lines if "queue/depth" in line]
    if not measured:
        return None
    lags = [line["train/policy_lag"] for line in measured if "train/policy_lag" in line]
    alive = [line["actors/alive"] for line in measured if "actors/alive" in line]
    return {
        "alive": sum(alive) / len(alive) if alive else 0.0,
        "restarts": sum(line.get("actors/restarts", 0.0) for line in measured),
        "lag_mean": sum(lags) / len(lags) if lags else 0.0,
        "lag_max": max(lags, default=0.0),
        "waited_s": sum(line.get("perf/rollout_s", 0.0) for line in measured),
    }
