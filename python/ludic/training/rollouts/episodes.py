"""The episodes of one call of the engine: what they give, the checks of it, their outcomes, the
report of failures, and warnings where a limit that cuts them off is probably too low by mistake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from ludic.columns import LARGEST, find_token_fault
from ludic.errors import DataError, LudicError, RolloutError
from ludic.event_loop import describe_error
from ludic.images.content import is_content, show_content
from ludic.training.types import RolloutRequest
from ludic.types import Rollout, Step, TokenTrace, stored

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3
"""How many failures of a batch are logged in full."""


@dataclass
class Episode:
    """One episode to play, and its outcome."""

    index: int
    """Its number among all episodes of the engine."""
    request: RolloutRequest
    rollouts: list[Rollout] = field(default_factory=list)
    error: Exception | None = None
    retries: int = 0
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    """Whether it was cancelled because another episode of its group failed."""

    @property
    def group(self) -> object:
        """Key of its group; an episode without a `group_id` is a group by itself."""
        group = self.request.meta.get("group_id")
        return ("episode", self.index) if group is None else ("group", group)


def count_episodes(episodes: Sequence[Episode]) -> RolloutCounts:
    """Count the outcomes of the episodes."""
    failed = [episode for episode in episodes if episode.error is not None]
    return RolloutCounts(
        num_episodes=len(episodes),
        num_retried_episodes=sum(episode.retries > 0 for episode in episodes),
        num_failed_episodes=len(failed),
        num_cancelled_episodes=sum(episode.cancelled for episode in episodes),
        num_dropped_groups=len({episode.group for episode in failed}),
    )


def drop_failed_groups(episodes: Sequence[Episode], counts: RolloutCounts) -> PlayedRollouts:
    """Return the rollouts of the groups in which no episode failed, and log the failures. Raises
    RolloutError if all groups failed.

    Example: 4 episodes in groups a a b b with 2 agents each; the last episode failed. The result
    has the 4 rollouts of group a, which are 4 / 2 = 2 per episode; `num_requested` is 2 * 4 = 8.
    """
    failed = [episode for episode in episodes if episode.error is not None]
    failed_groups = {episode.group for episode in failed}
    retained = [episode for episode in episodes if episode.group not in failed_groups]
    _log_failures(failed)
    first = failed[0].error if failed else None
    failures = [_describe_failure(episode) for episode in failed]
    # An error refers to its frames, and these refer to the episode: a reference cycle that would
    # keep environments alive.
    for episode in episodes:
        episode.error = episode.task = None
    if first is not None and not retained:
        raise (GarbageError if isinstance(first, GarbageError) else RolloutError)(
            f"{len(failed)} of {len(episodes)} episodes failed and no complete group is left: {describe_error(first)}",
            played=PlayedRollouts([], counts, failures, num_requested=len(episodes)),
        ) from first
    rollouts = [rollout for episode in retained for rollout in episode.rollouts]
    per_episode = len(rollouts) / len(retained) if retained else 1.0  # several agents give several rollouts
    return PlayedRollouts(rollouts, counts, failures, num_requested=round(per_episode * len(episodes)))


def _log_failures(failed: Sequence[Episode]) -> None:
    """Log the first `SHOWN_FAILURES` errors. An error from users' code has its traceback when it
    first occurs."""
    seen: set[str] = set()
    for episode in failed[:SHOWN_FAILURES]:
        error = episode.error
        message = str(error) if isinstance(error, LudicError) else describe_error(error)
        times = f"{episode.retries + 1} times" if episode.retries else "once"
        foreign = error.__cause__ if isinstance(error, LudicError) else error
        is_known = foreign is None or isinstance(foreign, LudicError) or describe_error(foreign) in seen
        trace = None if is_known else foreign
        seen.add(describe_error(foreign))
        logger.error("episode %d failed %s; its group is dropped: %s", episode.index, times, message, exc_info=trace)
    if len(failed) > SHOWN_FAILURES:
        logger.error("%d more episodes failed", len(failed) - SHOWN_FAILURES)


def _describe_failure(episode: Episode) -> EpisodeFailure:
    played = episode.rollouts[0].steps if episode.rollouts else []
    return EpisodeFailure(
        episode_idx=episode.index,
        env_kind=episode.request.env.kind,
        env_seed=episode.request.env_seed,
        error=describe_error(episode.error),
        attempts=episode.retries + 1,
        meta=dict(episode.request.meta),
        seen=show_content(played[-1].prev_obs) if played else None,
        answer=played[-1].action if played else None,
    )


@dataclass
class RolloutCounts:
    """Outcomes of the episodes of one call."""

    num_episodes: int = 0
    num_retried_episodes: int = 0
    """Episodes that failed at least once and were played again."""
    num_failed_episodes: int = 0
    """Episodes that failed after all retries."""
    num_cancelled_episodes: int = 0
    """Episodes cancelled because another episode of their group failed after all retries."""
    num_dropped_groups: int = 0
    """Groups dropped because one of their episodes failed after all retries."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return RolloutCounts(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that failed after all retries."""

    episode_idx: int
    env_kind: str
    env_seed: int | None
    """The seed in the request."""
    error: str
    """Type and message of the last error."""
    attempts: int
    meta: dict[str, Any]
    """The meta of the request."""
    seen: str | None = None
    """The last observation that was answered, of an episode that was played and could not be
    rewarded; None of another."""
    answer: str | None = None
    """The answer to it."""


class PlayedRollouts(list[Rollout]):
    """The usable rollouts in the order of the requests, with the outcomes of all episodes."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        counts: RolloutCounts,
        failures: Sequence[EpisodeFailure],
        *,
        num_requested: int | None = None,
    ) -> None:
        """`num_requested`: number of rollouts that were requested; a failed episode counts as many
        as the others returned on average. None means the number of `rollouts`."""
        super().__init__(rollouts)
        self.counts, self.failures = counts, list(failures)
        self.num_requested = len(rollouts) if num_requested is None else num_requested


MAX_LATER_VERSIONS = 10_000
"""How much newer than the weights a sample may be. A trainer that went back to a checkpoint meets
samples of weights that it had after it."""


class GarbageError(RolloutError, DataError):
    """An episode returned invalid rollouts; it counts as failed."""


@dataclass
class SampleCheck:
    """What the model in hand can be trained on. A trainer makes one and hands it to its source
    (`BatchSourceBase.use_check`), so that whatever is wrong is refused where it comes in."""

    vocab_size: int | None = None
    """Rows of the model's embedding; None if it is not known, as in an actor."""
    version: int | None = None
    """Version of the weights, that is the trainer's step; None if it is not known."""

    def find_fault(self, meta: Mapping[str, Any], ids: Any = None, logps: Any = None) -> str | None:
        """Why the `policy_version` in `meta`, or the ids [T] of a sample and the log-probabilities
        [A] of some of them cannot be trained on; None if nothing is wrong."""
        version, newest = meta.get("policy_version"), 2**31 - 1 if self.version is None else self.version + MAX_LATER_VERSIONS
        if version is not None and not (isinstance(version, int | np.integer) and 0 <= version <= newest):
            return f"policy_version {version!r}; it must be a whole number from 0 to {newest}"
        if ids is None:
            return None
        return find_token_fault(ids, logps, self.vocab_size) if len(ids) else "no tokens"

    def find_step_fault(self, rollout: Rollout, step: Step) -> str | None:
        """The same for a step of a rollout."""
        fault = self.find_fault(rollout.meta)
        if step.trace is None:
            return fault or self.find_fault(step.info)
        prompt, completion, logps = trace_columns(step.trace)
        fault = fault or self.find_fault(step.info, prompt if len(prompt) else completion)
        fault = fault or find_token_fault(completion, logps, self.vocab_size)
        return fault or self.find_candidate_fault(step.trace.candidates)

    def find_candidate_fault(self, candidates: Sequence[Any] | None) -> str | None:
        """The same for the candidates of tokens."""
        ids = [] if candidates is None else [token for each in candidates for token in each]
        fault = find_token_fault(ids, None, self.vocab_size)
        return fault and f"among its candidates {fault}"


def check_rollouts(returned: Any, check: SampleCheck | None = None) -> list[Rollout]:
    """Return the rollouts of one episode. Raises GarbageError unless they are a list of valid
    rollouts, with content as observations, text as actions, finite rewards, and tokens that pass
    `check`."""
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise GarbageError(f"the protocol returned {type(returned).__name__} (TypeError); it must return a list of Rollout")
    for rollout in returned:
        if not isinstance(rollout, Rollout):
            raise GarbageError(f"the protocol returned a list with {type(rollout).__name__}; each element must be Rollout")
        _check_type(rollout.id, str, "the id of a rollout")
        _check_type(rollout.meta, dict, "the meta of a rollout")
        _check_type(rollout.steps, list, "the steps of a rollout")
        for step in rollout.steps:
            _check_type(step, Step, "a step of a rollout")
            _check_step(step)
            if fault := (check or SampleCheck()).find_step_fault(rollout, step):
                raise GarbageError(f"step {step.index} of rollout {rollout.id} has {fault}")
        indices = [step.index for step in rollout.steps]
        if len(set(indices)) < len(indices):
            raise GarbageError(f"the steps of a rollout have the indices {indices}; they must be distinct")
    return list(returned)


def _check_type(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        wanted = "text" if kind is str else f"a {kind.__name__}"
        raise GarbageError(f"{what} is of type {type(value).__name__}; it must be {wanted}")


def _check_content(value: Any, what: str) -> None:
    if not is_content(value):
        raise GarbageError(f"{what} is of type {type(value).__name__}; it must be text, or parts of text and stored images")


def _check_step(step: Step) -> None:
    _check_type(step.index, int, "the index of a step")
    _check_type(step.info, dict, f"the info of step {step.index}")
    if step.trace is not None:
        _check_type(step.trace, TokenTrace, f"the trace of step {step.index}")
    _check_content(step.prev_obs, f"prev_obs of step {step.index}")
    _check_type(step.action, str, f"action of step {step.index}")
    if step.next_obs is not None:
        _check_content(step.next_obs, f"next_obs of step {step.index}")
    if not is_reward(step.reward):
        raise GarbageError(f"the reward of step {step.index} is {step.reward!r}; it must be a finite number of float32")


def trace_columns(trace: TokenTrace) -> tuple[Any, Any, Any]:
    """Ids of the prompt [P] and the completion [C], and log-probabilities [C] or None, as the trace
    holds them: arrays or lists."""
    names = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
    prompt, completion, logps = (stored(trace, name) for name in names)
    return prompt, completion, logps


def is_reward(value: Any) -> bool:
    """Whether `value` is a number of Python, numpy or torch that float32 holds. Text is not a
    number."""
    try:
        return bool(abs(0.0 + value) <= LARGEST)
    except (TypeError, ValueError):
        return False


REPORTED_SHARE = 0.1
"""Share of the answers of a call from which on rejected ones are reported."""


class CutOffWarnings:
    """Looks at the rollouts of each call, and warns once of each limit."""

    def __init__(self) -> None:
        self._warned_of_steps = self._warned_of_tokens = False

    def look_at(self, rollouts: Sequence[Rollout], max_steps: int) -> None:
        """`max_steps`: the limit that the rollouts were played with."""
        self._look_at_steps(rollouts, max_steps)
        steps = [step for rollout in rollouts for step in rollout.steps]
        rejected = [step for step in steps if step.info.get("incomplete_completion")]
        if not self._warned_of_tokens and rejected and len(rejected) >= REPORTED_SHARE * len(steps):
            self._warned_of_tokens = True
            logger.warning(
                "%d of %d answers reached their token limit: no parser, environment or verifier saw them, and each earned %g "
                "instead; raise max_tokens (rollout.max_new_tokens of a recipe), or have them judged with "
                "Agent(reject_incomplete_completions=False)",
                len(rejected),
                len(steps),
                rejected[0].reward,
            )

    def _look_at_steps(self, rollouts: Sequence[Rollout], max_steps: int) -> None:
        """Warn if `max_steps` cut off all episodes, or with a limit of 1, which is the default,
        any; those that ended with a parse error do not count."""
        answered = [rollout for rollout in rollouts if rollout.steps and not rollout.steps[-1].info.get("parse_error")]
        cut = [rollout for rollout in answered if rollout.meta.get("truncation_reason") == "max_steps"]
        if self._warned_of_steps or not cut or (max_steps != 1 and len(cut) < len(answered)):
            return
        self._warned_of_steps = True
        logger.warning(
            "%s %d episodes were cut off after max_steps (%d) before the environment (%s) ended them; raise max_steps if episodes have "
            "more turns%s",
            "all" if len(cut) == len(rollouts) else f"{len(cut)} of",
            len(rollouts),
            max_steps,
            cut[0].meta.get("env_name", "of its own"),
            ": without it a batch source plays one turn" if max_steps == 1 else "",
        )
