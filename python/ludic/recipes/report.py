"""What a run shows at its end, and its summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.recipes.curve import text_curve, write_picture
from ludic.recipes.evaluate import Answer, Evaluation
from ludic.recipes.measures import logged_names
from ludic.recipes.reward_model import is_unrewarded
from ludic.recipes.run_directory import Progress, RunDirectory, write_text
from ludic.recipes.sampling_report import mismatch_of, overlap_of, weight_sync_of
from ludic.training.reward_scorer import SCORE_INFO
from ludic.training.stats import SAMPLED_REWARD

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.envs.tasks import EpisodicTask

_TRAINER_PHASES = ("rollout", "batching", "forward_backward", "optimizer", "publish")
_TOKEN_KEYS = ("real_tokens", "padded_tokens", "padded_tokens_greedy", "padded_tokens_unpacked")
_STANDARD_ERROR = 0.5**0.5
"""Of the difference of two rates from one answer each, at its largest."""
_DRAWN = 4  # rates in the picture; all are in the table
_RATE_NAMES = {"sampled_reward": "held-out reward, sampled", "greedy_accuracy": "held-out accuracy, greedy"}


@dataclass(frozen=True)
class Summary:
    """The content of summary.json."""

    before: dict[str, float] | None
    """Held-out rates after the warm-up; null where the run was interrupted before."""
    after: dict[str, float] | None
    """Held-out rates at the end; null where the run was interrupted."""
    wall_s: float
    phases_s: dict[str, float]
    padding: dict[str, float]
    steps: int
    """Batches of reinforcement done."""
    clip_fraction: float | None
    """Mean over the steps; null for an algorithm without a clip."""
    mismatch: dict[str, Any] | None
    """How far trainer and sampler were apart: `preflight` before the first step, `mean` and `kl` over all steps, the largest `max`, the
    smallest `ess`, the mean `lag` in versions; null where nothing was measured."""
    weight_sync: dict[str, float] | None
    """Pushes of weights: `pushes`, `mean_s` and `max_s` of one; null without any."""
    overlap: dict[str, float] | None
    """Seconds of generation, those of them that the trainer waited, and the `hidden` share; null without reinforcement."""
    seed: int
    config_hash: str

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=2) + "\n"

    def write(self, directory: RunDirectory) -> None:
        write_text(directory.summary, self.to_json())


@dataclass(frozen=True)
class Outcome:
    """Everything that the report shows."""

    summary: Summary
    task: EpisodicTask
    before: Evaluation | None
    after: Evaluation | None
    rewards: Sequence[float]
    """Mean reward of the sampled answers of each step."""
    facts: Mapping[str, Sequence[float]]
    """The same for each of the task's facts and measures."""
    warmed_up: bool
    """There were demonstrations before."""


def outcome_of(progress: Progress, directory: RunDirectory, task: EpisodicTask, *, seed: int, config_hash: str) -> Outcome:
    """From what the run wrote: progress.json and metrics.jsonl, so that a resumed run reports as a whole."""
    before, after = (None if found is None else Evaluation.from_dict(found) for found in (progress.before, progress.after))
    warm_up, reinforce = (
        [line for line in directory.read_metrics(phase) if "train/loss" in line] for phase in ("warm_up", "reinforce")
    )
    clipped = [value for line in reinforce for key, value in line.items() if key.endswith("clip_frac") and "ratio" not in key]
    summary = Summary(
        before=before.rates() if before else None,
        after=after.rates() if after else None,
        wall_s=round(progress.seconds.get("wall", 0.0), 2),
        phases_s=phases_of(progress.seconds, reinforce, own=("set_up", "warm_up", "evaluate"), timed=_TRAINER_PHASES),
        padding=padding_of([*warm_up, *reinforce]),
        steps=progress.steps,
        clip_fraction=sum(clipped) / len(clipped) if clipped else None,
        mismatch=mismatch_of(reinforce, progress.preflight),
        weight_sync=weight_sync_of(reinforce),
        overlap=overlap_of(reinforce),
        seed=seed,
        config_hash=config_hash,
    )
    return Outcome(
        summary=summary,
        task=task,
        before=before,
        after=after,
        rewards=[line[f"train/{SAMPLED_REWARD}"] for line in reinforce],
        facts={name: [line[f"train/{name}"] for line in reinforce] for name in logged_names(task)},
        warmed_up=bool(warm_up),
    )


def phases_of(
    seconds: Mapping[str, float],
    lines: Sequence[Mapping[str, float]],
    *,
    own: Sequence[str] = ("set_up", "evaluate"),
    timed: Sequence[str] = ("batching", "forward_backward", "optimizer", "checkpoint"),
) -> dict[str, float]:
    """Seconds of the run's `own` phases (set-up reads the data), of a server's start where there was one, of the parts of its steps as the
    trainer `timed` them, and of the rest."""
    whole = {name: seconds.get(name, 0.0) for name in own}
    whole |= {name: seconds[name] for name in ("server_start",) if name in seconds}
    parts = {name: sum(line.get(f"perf/{name}_s", 0.0) for line in lines) for name in timed}
    rest = seconds.get("wall", 0.0) - sum(whole.values()) - sum(parts.values())
    return {name: round(value, 2) for name, value in {**whole, **parts, "other": max(0.0, rest)}.items()}


def padding_of(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Tokens of all training passes, as they were packed and as they might have been."""
    real, computed, greedy, unpacked = (sum(line.get(f"perf/{key}", 0.0) for line in lines) for key in _TOKEN_KEYS)
    if not computed:
        return {}
    return {
        "real_tokens": real,
        "computed_tokens": computed,
        "greedy_tokens": greedy,
        "unpacked_tokens": unpacked,
        "saved_vs_greedy": 1 - computed / greedy,
        "saved_vs_unpacked": 1 - computed / unpacked,
    }


def draw_rewards(outcome: Outcome, directory: RunDirectory, title: str) -> None:
    """reward.png: every step, and the held-out rates at both ends."""
    marks = {}
    if outcome.before is not None and outcome.after is not None:
        before, after = outcome.before.rates(), outcome.after.rates()
        marks = {_RATE_NAMES.get(name, f"held-out {name}"): (before[name], after[name]) for name in list(before)[:_DRAWN]}
    series = {"reward of the sampled answers": outcome.rewards, **outcome.facts}
    write_picture(directory.picture, series, marks=marks, title=title)


def show_report(console: Console, outcome: Outcome, directory: RunDirectory) -> None:
    """Rates, answers, curve, timings, padding, and where everything lies."""
    if outcome.before is not None:
        console.print(_rates_table(outcome.task, outcome.before, outcome.after))
    if outcome.before is not None and outcome.after is not None:
        console.print(_answers_table(outcome.before.answers, outcome.after.answers))
    for line in text_curve(outcome.rewards):
        console.print(line, highlight=False, markup=False)
    console.print(seconds_line(outcome.summary.wall_s, outcome.summary.phases_s), highlight=False)
    console.print(padding_line(outcome.summary.padding), highlight=False)
    console.print(_honest_line(outcome), highlight=False)
    show_files(console, directory, _files_of(directory))


def _rates_table(task: EpisodicTask, before: Evaluation, after: Evaluation | None) -> Any:
    from rich.table import Table

    table = Table(title="Held-out problems", title_justify="left")
    for column in ("", "before reinforcement", "after"):
        table.add_column(column, justify="left" if not column else "right")
    later = after.rates() if after else {}
    for name, value in before.rates().items():
        label = _RATE_NAMES.get(name) or f"{task.rates[name]}, sampled"
        table.add_row(label, f"{value:.3f}", f"{later[name]:.3f}" if name in later else "not measured")
    return table


def _answers_table(before: Sequence[Answer], after: Sequence[Answer]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Sampled answers", title_justify="left")
    for column in ("question", "right answer", "before", "after"):
        table.add_column(column)
    for old, new in zip(before, after, strict=True):
        cells = [Text(*_marked(answer)) for answer in (old, new)]
        table.add_row(Text(_shortened(old.question)), Text(_shortened(old.expected)), *cells)
    return table


def _marked(answer: Answer) -> tuple[str, str]:
    """What the answer was and its colour."""
    if answer.reward is None:
        return "? could not be graded", "yellow"
    right = answer.success
    return f"{'✓' if right else '✗'} {_printable(_shortened(answer.text))}", "green" if right else "red"


def _shortened(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def seconds_line(wall_s: float, phases_s: Mapping[str, float]) -> str:
    phases = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in phases_s.items())
    return f"[bold]Seconds[/]: {wall_s:.1f} in all; {phases}"


def padding_line(padding: Mapping[str, float]) -> str:
    if not padding:
        return "[bold]Padding[/]: nothing was trained on"
    return (
        f"[bold]Padding[/]: {padding['computed_tokens']:,.0f} tokens computed for {padding['real_tokens']:,.0f} real ones; greedy "
        f"packing would compute {padding['greedy_tokens']:,.0f} ({padding['saved_vs_greedy']:.1%} saved), no packing "
        f"{padding['unpacked_tokens']:,.0f} ({padding['saved_vs_unpacked']:.1%} saved)"
    )


def _honest_line(outcome: Outcome) -> str:
    clip = outcome.summary.clip_fraction
    clipped = "" if clip is None else f" The clip acted on {clip:.2%} of what it saw."
    return f"[bold]What this shows[/]: the reward sees {outcome.task.reward_sees}. {_what_happened(outcome)}{clipped}"


def _what_happened(outcome: Outcome) -> str:
    if outcome.before is None or outcome.after is None:
        return "The run was stopped before its end was measured."
    if not outcome.summary.steps:
        return "There was no reinforcement."
    gain = outcome.after.sampled_reward - outcome.before.sampled_reward
    if SCORE_INFO in outcome.before.facts and not is_unrewarded(outcome.task):
        return _two_numbers(outcome.before, outcome.after)
    if gain <= 2 * _STANDARD_ERROR / max(1, outcome.after.num_sampled) ** 0.5:
        return (
            f"The sampled reward did not rise ({gain:+.3f}): with few right answers among the samples, or few steps, there is little "
            "to select."
        )
    return "The warm-up's demonstrations already contain right answers; reinforcement selects and sharpens them."


def _two_numbers(before: Evaluation, after: Evaluation) -> str:
    """What was trained on and what is wanted, where these are not the same."""
    score = before.facts[SCORE_INFO], after.facts[SCORE_INFO]
    reward = before.sampled_reward, after.sampled_reward
    said = (
        f"On held-out problems the reward model's score went from {score[0]:.3f} to {score[1]:.3f}, the task's own reward from "
        f"{reward[0]:.3f} to {reward[1]:.3f}."
    )
    if score[1] > score[0] and reward[1] < reward[0]:
        return f"{said} The reward model is over-optimised: what it scores higher is worse."
    return said


def _files_of(directory: RunDirectory) -> dict[Path, str]:
    return {
        directory.summary: "this, for programs",
        directory.picture: "the reward curve",
        directory.config: "the resolved recipe; `ludic train` reads it",
        directory.metrics: "every step",
        directory.rollouts: "sampled episodes",
        directory.model: "model and tokenizer in Hugging Face layout",
        directory.adapter: "the adapters alone, in PEFT's layout; they are merged in model",
        directory.base: "what the adapters adapt",
    }


def show_files(console: Console, directory: RunDirectory, notes: Mapping[Path, str]) -> None:
    """Where everything lies. `notes`: path to what it is; what does not exist is left out."""
    console.print(f"[bold]Written to[/] {directory.path}/", highlight=False)
    for path, note in notes.items():
        if path.exists():
            console.print(f"  {path.name:<16}{note}", highlight=False, markup=False)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text)
