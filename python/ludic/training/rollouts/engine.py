"""Plays episodes concurrently, each with its own environment and protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, DataError, RolloutError, check_value
from ludic.event_loop import await_if_needed, describe_error, is_being_cancelled, run_contained, run_to_completion
from ludic.inference.client import new_episode
from ludic.inference.request import ReturnSpec
from ludic.interaction.single_agent import InteractionProtocol
from ludic.training.algorithm import RLAlgorithm
from ludic.training.freed_memory import settle_memory
from ludic.training.rollouts.episodes import (
    CutOffWarnings,
    Episode,
    GarbageError,
    PlayedRollouts,
    RolloutCounts,
    SampleCheck,
    check_rollouts,
    count_episodes,
    drop_failed_groups,
)
from ludic.training.rollouts.log import append_failures, append_rollouts
from ludic.training.rollouts.to_samples import batch_from_played, require_trace
from ludic.training.types import CreditAssigner, RolloutRequest, RolloutScorer, SampleFilter, SAWBatch
from ludic.types import Rollout

logger = logging.getLogger(__name__)

EnvFactory = Callable[..., LudicEnv[str, str, str]]
ProtocolFactory = Callable[..., InteractionProtocol]
CLOSE_TIMEOUT_S = 30.0
"""Time limit for closing an environment."""


class RolloutEngine:
    """Plays requests with the environments and protocols of its registries (kind -> factory).

    **Failures.** An episode that raises, times out or returns anything but rollouts is played again
    in a new environment, up to `max_retries` times. If it still fails, its whole group is dropped,
    counted, and logged with the error: a failed episode does not fail the batch, and does not count
    as a reward of 0. The other members of the group are cancelled; with `cancel_siblings=False`
    they are played to the end, so that every failure is reported. If no group is left, RolloutError
    names the first error.

    Every exception of an environment, agent or protocol is such a failure, including SystemExit and
    every BaseException except KeyboardInterrupt, which ends the run. The engine cannot contain a
    crash of the process, nor errors in tasks and threads that an environment starts itself.

    **Deadlines.** `episode_timeout_s` limits a whole episode, including its environment; the
    `timeout_s` of a call limits each model call. An environment that blocks the event loop cannot
    be interrupted. An environment that ignores its cancellation is closed by force after
    `STOP_TIMEOUT_S` (`ludic.event_loop`). An environment with a `close` method is always
    closed, within `CLOSE_TIMEOUT_S`.

    **Scoring.** `scorer` gets all rollouts of a call together, before credit is assigned, and
    changes their rewards. If it cannot reward a rollout, the episode has failed and is not played
    again.

    `jsonl_path`: every rollout is appended to this file, with its token traces; `failures_path`:
    the error of every episode that failed (`rollouts.log`). `on_episode` is called when an episode
    ends, with or without success.
    """

    def __init__(
        self,
        *,
        env_registry: Mapping[str, EnvFactory],
        protocol_registry: Mapping[str, ProtocolFactory],
        jsonl_path: str | Path | None = None,
        failures_path: str | Path | None = None,
        max_retries: int = 1,
        episode_timeout_s: float | None = None,
        cancel_siblings: bool = True,
        on_episode: Callable[[], object] | None = None,
        scorer: RolloutScorer | None = None,
    ) -> None:
        check_value("max_retries", max_retries, least=0)
        check_value("episode_timeout_s", episode_timeout_s, "None sets no limit", above=0, optional=True)
        self._envs = dict(env_registry)
        self._protocols = dict(protocol_registry)
        self._jsonl_path, self._failures_path = (None if path is None else Path(path) for path in (jsonl_path, failures_path))
        self._max_retries = max_retries
        self._episode_timeout_s = episode_timeout_s
        self._cancel_siblings = cancel_siblings
        self._on_episode = on_episode
        self._scorer = scorer
        self._episodes = 0
        self._warner = CutOffWarnings()
        self.check: SampleCheck | None = None
        """What training takes; set by a trainer."""
        self.totals = RolloutCounts()
        """Outcomes of the episodes of all calls so far."""
        for path in (self._jsonl_path, self._failures_path):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)

    async def generate_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int,
        concurrency: int = 8,
        timeout_s: float | None = None,
        *,
        for_training: bool = False,
        gate: asyncio.Semaphore | None = None,
    ) -> PlayedRollouts:
        """Play `num_episodes` episodes of every request, at most `concurrency` at a time. Returns
        the rollouts in the order of the requests. `for_training`: an episode without the token
        traces that training needs has failed. `gate`: limits the episodes of several calls
        together, instead of `concurrency`.

        A seed that is None in a request is set to the episode number. Episodes are numbered over
        all calls of the engine, so no batch repeats another.
        """
        gate = gate or asyncio.Semaphore(max(1, concurrency))
        rollouts = await self._play_all(requests, max_steps, timeout_s, gate, for_training=for_training)
        await self._write_log(rollouts)
        return rollouts

    async def generate_batch(
        self,
        requests: Sequence[RolloutRequest],
        algorithm: RLAlgorithm | None = None,
        sample_filter: SampleFilter | None = None,
        *,
        max_steps: int = 1,
        credit_assigner: CreditAssigner | None = None,
        timeout_s: float | None = None,
        concurrency: int = 8,
        on_rollouts: Callable[[list[Rollout]], object] | None = None,
    ) -> SAWBatch:
        """Play the requests and return one sample per step, with credit from `credit_assigner`, or
        else from `algorithm`. `on_rollouts` is called in a thread with the rollouts and their
        credit."""
        assigner = select_credit_assigner(algorithm, credit_assigner)
        gate = asyncio.Semaphore(max(1, concurrency))
        rollouts = await self._play_all(requests, max_steps, timeout_s, gate, for_training=True)
        try:
            return batch_from_played(rollouts, assigner, sample_filter)
        finally:
            await self._write_log(rollouts)  # with their credit
            if on_rollouts is not None:
                await asyncio.to_thread(on_rollouts, rollouts)

    def state_dict(self) -> dict[str, int]:
        """Return the number of episodes started so far, which seeds that are None depend on."""
        return {"episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the numbering of episodes from `state`."""
        self._episodes = int(state["episodes"])

    async def _play_all(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int,
        timeout_s: float | None,
        gate: asyncio.Semaphore,
        *,
        for_training: bool = False,
    ) -> PlayedRollouts:
        for request in requests:  # an unknown name fails before any episode is played
            _look_up(self._protocols, request.protocol.kind, "protocol")
            _look_up(self._envs, request.env.kind, "env")
        per_episode = [request for request in requests for _ in range(request.num_episodes)]
        episodes = [Episode(self._episodes + i, request) for i, request in enumerate(per_episode)]
        self._episodes += len(episodes)
        groups: dict[object, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        with settle_memory():
            async with asyncio.TaskGroup() as tasks:
                for episode in episodes:
                    siblings = groups[episode.group]
                    episode.task = tasks.create_task(self._play(episode, siblings, gate, max_steps, timeout_s))
                    episode.task.add_done_callback(self._report_episode)
        if for_training:
            _fail_untrainable(episodes)
        if self._scorer is not None:
            await _score_episodes(self._scorer, episodes)
        counts = count_episodes(episodes)
        self.totals += counts
        try:
            played = drop_failed_groups(episodes, counts)
        except RolloutError as error:
            if isinstance(error.played, PlayedRollouts):
                await self._log_failures(error.played)
            raise
        await self._log_failures(played)
        self._warner.look_at(played, max_steps)
        return played

    async def _write_log(self, rollouts: PlayedRollouts) -> None:
        if self._jsonl_path is not None and rollouts:
            await asyncio.to_thread(append_rollouts, self._jsonl_path, rollouts)

    async def _log_failures(self, played: PlayedRollouts) -> None:
        if self._failures_path is not None and played.failures:
            await asyncio.to_thread(append_failures, self._failures_path, played.failures)

    def _report_episode(self, _task: asyncio.Task[None]) -> None:
        if self._on_episode is not None:
            self._on_episode()

    async def _play(
        self, episode: Episode, siblings: Sequence[Episode], gate: asyncio.Semaphore, max_steps: int, timeout_s: float | None
    ) -> None:
        """Play an episode, and play it again if it fails. Sets its `rollouts` or its `error`."""
        async with gate:
            while True:
                try:
                    with new_episode():
                        episode.rollouts = await self._play_once(episode, max_steps, timeout_s)
                    return
                except Exception as error:
                    if is_being_cancelled():  # users' code turned the cancellation into another error
                        raise asyncio.CancelledError from error
                    if episode.retries == self._max_retries:
                        episode.error = error
                        break
                    episode.retries += 1
                    logger.info("episode %d failed with %s; playing it again", episode.index, describe_error(error))
        for sibling in siblings if self._cancel_siblings else ():  # their rollouts would not be used
            task = sibling.task
            if sibling.cancelled or task is None or task.done() or task is asyncio.current_task():
                continue
            sibling.cancelled = True
            task.cancel()

    async def _play_once(self, episode: Episode, max_steps: int, timeout_s: float | None) -> list[Rollout]:
        envs: list[Any] = []
        what = f"episode {episode.index} ({episode.request.env.kind})"
        try:
            return await run_contained(
                self._run(episode, envs, max_steps, timeout_s), what=what, timeout_s=self._episode_timeout_s
            )
        finally:
            for env in envs:
                await close_environment(env)

    async def _run(self, episode: Episode, envs: list[Any], max_steps: int, timeout_s: float | None) -> list[Rollout]:
        """Run users' code for an episode. Appends the environment to `envs`, so that the caller
        closes it in all cases."""
        request = episode.request
        protocol = _look_up(self._protocols, request.protocol.kind, "protocol")(**request.protocol.kwargs)
        env = _look_up(self._envs, request.env.kind, "env")(**request.env.kwargs)
        envs.append(env)
        env_seed = episode.index if request.env_seed is None else request.env_seed
        sampling_seed = episode.index if request.sampling_seed is None else request.sampling_seed
        returned = await protocol.run(
            env=env,
            max_steps=max_steps,
            env_seed=env_seed,
            sampling_seed=sampling_seed,
            inference=request.inference,
            timeout_s=timeout_s,
        )
        rollouts = check_rollouts(returned, self.check)
        facts = _engine_facts(request, max_steps, timeout_s, env_seed, sampling_seed)
        for rollout in rollouts:
            rollout.meta.setdefault("episode_idx", episode.index)
            rollout.meta.update(request.meta)
            rollout.meta["request_meta"] = {**rollout.meta.get("request_meta", {}), **request.meta}
            rollout.meta["engine"] = dict(facts)
            versions = [step.info["policy_version"] for step in rollout.steps if "policy_version" in step.info]
            if versions:
                rollout.meta.setdefault("policy_version", min(versions))
        return rollouts


def select_credit_assigner(algorithm: RLAlgorithm | None, credit_assigner: CreditAssigner | None) -> CreditAssigner:
    """Return `credit_assigner`, or else the algorithm's. Raises ConfigError if both are
    None."""
    if credit_assigner is not None:
        return credit_assigner
    if algorithm is None:
        raise ConfigError("pass credit_assigner or algorithm, which computes the weights of samples")
    return algorithm.credit_assigner


def _look_up(registry: Mapping[str, Callable[..., Any]], kind: str, what: str) -> Callable[..., Any]:
    if kind not in registry:
        raise KeyError(f"Unknown {what} kind {kind!r}; registered: {sorted(registry)}")
    return registry[kind]


def _engine_facts(
    request: RolloutRequest, max_steps: int, timeout_s: float | None, env_seed: int, sampling_seed: int
) -> dict[str, Any]:
    return_spec = request.inference.return_ if request.inference else ReturnSpec()
    return {
        "max_steps": max_steps,
        "timeout_s": timeout_s,
        "env_kind": request.env.kind,
        "protocol_kind": request.protocol.kind,
        "env_seed": env_seed,
        "sampling_seed": sampling_seed,
        "forced_env_seed": request.env_seed,
        "forced_sampling_seed": request.sampling_seed,
        "return_spec": dict(vars(return_spec)),
    }


async def close_environment(env: Any) -> None:
    """Close the environment if it has `close`. An error in `close` is logged and does not fail the
    episode. A cancellation takes effect after the environment is closed."""
    name = type(env).__name__
    try:
        close = getattr(env, "close", None)
        if close is not None:
            await run_to_completion(run_contained(_call(close), what=f"{name}.close()", timeout_s=CLOSE_TIMEOUT_S))
    except Exception:
        logger.warning("%s.close() failed", name, exc_info=True)


async def _call(function: Callable[[], Any]) -> Any:
    """Call a plain or a coroutine function."""
    return await await_if_needed(function())


def _fail_untrainable(episodes: Sequence[Episode]) -> None:
    """Mark the episodes without the token traces that training needs as failed. They are not played
    again, since the server would return no tokens again."""
    for episode in episodes:
        if episode.error is not None:
            continue
        try:
            for rollout in episode.rollouts:
                for step in rollout.steps:
                    require_trace(rollout, step)
        except DataError as error:
            episode.error = GarbageError(str(error))


async def _score_episodes(scorer: RolloutScorer, episodes: Sequence[Episode]) -> None:
    """Reward the rollouts of the groups in which no episode failed. An episode with a rollout that
    cannot be rewarded fails."""
    failed_groups = {episode.group for episode in episodes if episode.error is not None}
    played = [episode for episode in episodes if episode.group not in failed_groups]
    if not played:
        return
    errors = await scorer.score([rollout for episode in played for rollout in episode.rollouts])
    for episode in played:
        episode.error = next((errors[rollout.id] for rollout in episode.rollouts if rollout.id in errors), None)
