"""What a task reports beside the reward: facts, which hold or do not, and measures, which are numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ludic.envs.tasks import Task
from ludic.training.stats import Reducer
from ludic.types import Rollout


def measures_of(task: Task) -> Mapping[str, str]:
    """Keys of the step's info that hold numbers, and what they mean; a task need not have any."""
    measures: Mapping[str, str] = getattr(task, "measures", {})
    return measures


def logged_names(task: Task) -> list[str]:
    """All keys, facts first."""
    return [*task.facts, *measures_of(task)]


def meaning_of(task: Task, name: str) -> str:
    """The words for one key."""
    return {**task.facts, **measures_of(task)}[name]


def task_reducers(task: Task) -> dict[str, Reducer]:
    """Facts as shares of all samples, measures as means over the samples that have them."""
    facts = {name: Reducer("count_true", name, normalize_by="samples") for name in task.facts}
    return {**facts, **{name: Reducer("mean", name) for name in measures_of(task)}}


def rates_of(task: Task, episodes: Sequence[Rollout]) -> dict[str, float]:
    """The same over the last steps of episodes."""
    infos = [episode.steps[-1].info for episode in episodes]
    facts = {name: _mean([float(info.get(name, False)) for info in infos]) for name in task.facts}
    return {**facts, **{name: _mean([float(info[name]) for info in infos if name in info]) for name in measures_of(task)}}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
