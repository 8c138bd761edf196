"""How the facts (booleans) and measures (numbers) that a task logs beside the reward are
reduced."""

from __future__ import annotations

from ludic.tasks import EpisodicTask
from ludic.training.stats import Denominator, Reducer


def logged_names(task: EpisodicTask) -> list[str]:
    """The keys of all facts and measures, facts first."""
    return [*task.facts, *task.measures]


def task_reducers(task: EpisodicTask) -> dict[str, Reducer]:
    """Facts are shares of all samples, or of all episodes where these have several model calls.
    Measures are means over the samples that have them."""
    each: Denominator = "samples" if task.max_turns == 1 and task.tool_use is None else "rollouts"
    facts = {name: Reducer("count_true", name, normalize_by=each) for name in task.facts}
    return {**facts, **{name: Reducer("mean", name) for name in task.measures}}
