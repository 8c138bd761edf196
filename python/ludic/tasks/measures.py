"""What a task logs beside the reward: facts, which hold or do not, and measures, which are
numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ludic.tasks import EpisodicTask
from ludic.training.stats import Denominator, Reducer


def measures_of(task: EpisodicTask) -> Mapping[str, str]:
    """Keys of the step's info that hold numbers, and what they mean; a task need not have any."""
    measures: Mapping[str, str] = getattr(task, "measures", {})
    return measures


def logged_names(task: EpisodicTask) -> list[str]:
    """All keys, facts first."""
    return [*task.facts, *measures_of(task)]


def task_reducers(task: EpisodicTask) -> dict[str, Reducer]:
    """Facts as shares of all samples, of all episodes where these have several turns; measures
    as means over the samples that have them."""
    each: Denominator = "samples" if task.max_turns == 1 else "rollouts"
    facts = {name: Reducer("count_true", name, normalize_by=each) for name in task.facts}
    return {**facts, **{name: Reducer("mean", name) for name in measures_of(task)}}
