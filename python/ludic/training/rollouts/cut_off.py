"""Warnings of episodes and answers that a limit cut off, where the limit is probably too low by
mistake."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ludic.types import Rollout, Step

logger = logging.getLogger(__name__)

REPORTED_SHARE = 0.1
"""Share of the answers of a call from which on rejected ones are reported."""


class CutOffWarnings:
    """Looks at the rollouts of each call, and warns once of each limit."""

    def __init__(self) -> None:
        self._warned_of_steps = self._warned_of_tokens = False

    def look_at(self, rollouts: Sequence[Rollout], max_steps: int) -> None:
        """`max_steps`: the limit that the rollouts were played with."""
        if not self._warned_of_steps and ran_out_of_steps(rollouts, max_steps):
            self._warned_of_steps = True
            _warn_of_steps(rollouts, max_steps)
        rejected, answers = _split_rejected(rollouts)
        if not self._warned_of_tokens and rejected and len(rejected) >= REPORTED_SHARE * answers:
            self._warned_of_tokens = True
            _warn_of_tokens(rejected, answers)


def ran_out_of_steps(rollouts: Sequence[Rollout], max_steps: int) -> bool:
    """Whether `max_steps` cut off all episodes, or with a limit of 1, which is the default, any;
    those that ended with a parse error do not count."""
    cut = [rollout.meta.get("truncation_reason") == "max_steps" for rollout in rollouts if _is_answered(rollout)]
    return any(cut) if max_steps == 1 else bool(cut) and all(cut)


def _is_answered(rollout: Rollout) -> bool:
    return bool(rollout.steps) and not rollout.steps[-1].info.get("parse_error")


def _warn_of_steps(rollouts: Sequence[Rollout], max_steps: int) -> None:
    cut = [rollout for rollout in rollouts if _is_answered(rollout) and rollout.meta.get("truncation_reason") == "max_steps"]
    logger.warning(
        "%s %d episodes were cut off after max_steps (%d) before the environment (%s) ended them; raise max_steps if episodes have "
        "more turns%s",
        "all" if len(cut) == len(rollouts) else f"{len(cut)} of",
        len(rollouts),
        max_steps,
        cut[0].meta.get("env_name", "of its own"),
        ": without it a batch source plays one turn" if max_steps == 1 else "",
    )


def _split_rejected(rollouts: Sequence[Rollout]) -> tuple[list[Step], int]:
    """(steps whose answer an agent rejected because it reached the token limit, number of all)."""
    steps = [step for rollout in rollouts for step in rollout.steps]
    return [step for step in steps if step.info.get("incomplete_completion")], len(steps)


def _warn_of_tokens(rejected: Sequence[Step], answers: int) -> None:
    logger.warning(
        "%d of %d answers reached their token limit: no parser, environment or verifier saw them, and each earned %g instead; raise "
        "max_tokens (rollout.max_new_tokens of a recipe), or have them judged with Agent(reject_incomplete_completions=False)",
        len(rejected),
        answers,
        rejected[0].reward,
    )
