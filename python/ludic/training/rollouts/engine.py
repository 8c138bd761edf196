"""Plays episodes: many at once, each with an environment and a protocol of its own."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, DataError
from ludic.inference.current_episode import new_episode
from ludic.inference.request import ReturnSpec
from ludic.interaction.base import InteractionProtocol
from ludic.interaction.containment import contained, message_of
from ludic.training.algorithm import RLAlgorithm
from ludic.training.rollouts.check import GarbageError, check_rollouts
from ludic.training.rollouts.episodes import Episode, count_episodes, without_failed_groups
from ludic.training.rollouts.log import append_rollouts
from ludic.training.rollouts.played import PlayedRollouts, RolloutCounts, ran_out_of_steps
from ludic.training.rollouts.to_samples import batch_from_rollouts, trace_of
from ludic.training.types import CreditAssigner, RolloutRequest, RolloutScorer, SampleFilter, SAWBatch
from ludic.types import Rollout

logger = logging.getLogger(__name__)

EnvFactory = Callable[..., LudicEnv[str, str, str]]
ProtocolFactory = Callable[..., InteractionProtocol]
CLOSE_TIMEOUT_S = 30.0
"""How long an environment may take to close."""


class RolloutEngine:
    """Plays requests with the environments and protocols of its registries (kind -> factory).

    An episode that raises, times out or gives what is no rollout is played again, with a fresh
    environment, up to `max_retries` times. If it still fails, its whole group is left out, counted
    and logged with the error: a batch is never lost to one episode, and a failure is never a
    reward. The other members of such a group are cancelled, unless `cancel_siblings` is off; every
    episode is then played, and every failure is found. If nothing is left, RolloutError names the
    first cause.

    Whatever an environment, an agent or a protocol raises is such a failure, SystemExit and every
    BaseException among it, but KeyboardInterrupt, which ends the run. Not contained is what no
    Python code can contain: the end of the process, and what tasks and threads raise that an
    environment starts itself.

    `episode_timeout_s` bounds a whole episode, environment included; the `timeout_s` of a call
    bounds each model call. An environment that blocks the event loop cannot be interrupted; one
    that swallows its cancellation is given `STOP_TIMEOUT_S`, and then closed by force
    (`interaction.containment`). One that has `close` is closed in any case, and is given time for
    it.

    `scorer` sees the rollouts of a call before credit is given, once and all together, and adds to
    their rewards. A rollout that it cannot reward is a failed episode; it is not played again.

    `jsonl_path`: every rollout is appended there, token traces included. `on_episode` is called
    when an episode is over, however it ended.
    """

    def __init__(
        self,
        *,
        env_registry: Mapping[str, EnvFactory],
        protocol_registry: Mapping[str, ProtocolFactory],
        jsonl_path: str | Path | None = None,
        max_retries: int = 1,
        episode_timeout_s: float | None = None,
        cancel_siblings: bool = True,
        on_episode: Callable[[], object] | None = None,
        scorer: RolloutScorer | None = None,
    ) -> None:
        if max_retries < 0:
            raise ConfigError(f"max_retries ({max_retries}) must be >= 0")
        if episode_timeout_s is not None and not episode_timeout_s > 0:
            raise ConfigError(f"episode_timeout_s ({episode_timeout_s}) must be > 0, or None for episodes without a limit")
        self._envs = dict(env_registry)
        self._protocols = dict(protocol_registry)
        self._jsonl_path = None if jsonl_path is None else Path(jsonl_path)
        self._max_retries = max_retries
        self._episode_timeout_s = episode_timeout_s
        self._cancel_siblings = cancel_siblings
        self._on_episode = on_episode
        self._scorer = scorer
        self._episodes = 0
        self._told_of_max_steps = False
        self.totals = RolloutCounts()
        """What happened to the episodes of all calls so far."""
        if self._jsonl_path is not None:
            self._jsonl_path.parent.mkdir(parents=True, exist_ok=True)

    async def generate_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int,
        concurrency: int = 8,
        timeout_s: float | None = None,
    ) -> PlayedRollouts:
        """Play `num_episodes` of every request, at most `concurrency` at once; rollouts in the
        order of the requests.

        Seeds that a request leaves open are the episode's number since the engine was made, so that
        no batch repeats another.
        """
        return await self._play_all(requests, max_steps, timeout_s, concurrency)

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
    ) -> SAWBatch:
        """Play the requests and make one sample of each step, with the credit of
        `credit_assigner` or of `algorithm`."""
        assigner = credit_of(algorithm, credit_assigner)
        rollouts = await self._play_all(requests, max_steps, timeout_s, concurrency, trained=True)
        batch = batch_from_rollouts(rollouts, assigner, sample_filter)
        batch.meta.update(vars(rollouts.counts), target_rollouts=rollouts.num_requested)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"episodes": self._episodes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._episodes = int(state["episodes"])

    async def _play_all(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int,
        timeout_s: float | None,
        concurrency: int,
        *,
        trained: bool = False,
    ) -> PlayedRollouts:
        episodes = self._expand(requests)
        groups: dict[object, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        gate = asyncio.Semaphore(max(1, concurrency))
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                siblings = groups[episode.group]
                episode.task = tasks.create_task(self._play(episode, siblings, gate, max_steps, timeout_s))
                episode.task.add_done_callback(self._tell)
        if trained:
            _check_traces(episodes)
        if self._scorer is not None:
            await _score(self._scorer, episodes)
        counts = count_episodes(episodes)
        self.totals += counts
        played = without_failed_groups(episodes, counts)
        self._tell_of_max_steps(played, max_steps)
        if self._jsonl_path is not None and played:
            await asyncio.to_thread(append_rollouts, self._jsonl_path, played)
        return played

    def _tell_of_max_steps(self, played: PlayedRollouts, max_steps: int) -> None:
        """Once: a limit that no episode fits into is more likely forgotten than meant."""
        if not self._told_of_max_steps and ran_out_of_steps(played):
            self._told_of_max_steps = True
            logger.warning(
                "all %d episodes were cut after max_steps (%d), and none had been ended by its environment (%s); raise max_steps if "
                "episodes have more turns",
                len(played),
                max_steps,
                played[0].meta.get("env_name", "of its own"),
            )

    def _tell(self, _task: asyncio.Task[None]) -> None:
        if self._on_episode is not None:
            self._on_episode()

    def _expand(self, requests: Sequence[RolloutRequest]) -> list[Episode]:
        for request in requests:  # a name that is wrong is wrong for every episode: say so before any is played
            _factory(self._protocols, request.protocol.kind, "protocol")
            _factory(self._envs, request.env.kind, "env")
        wanted = [request for request in requests for _ in range(request.num_episodes)]
        episodes = [Episode(self._episodes + i, request) for i, request in enumerate(wanted)]
        self._episodes += len(episodes)
        return episodes

    async def _play(
        self, episode: Episode, siblings: Sequence[Episode], gate: asyncio.Semaphore, max_steps: int, timeout_s: float | None
    ) -> None:
        async with gate:
            while True:
                try:
                    with new_episode():
                        episode.rollouts = await self._play_once(episode, max_steps, timeout_s)
                    return
                except Exception as error:
                    if _is_being_cancelled():  # and something on the way made another error of it
                        raise asyncio.CancelledError from error
                    if episode.retries == self._max_retries:
                        episode.error = error
                        break
                    episode.retries += 1
                    logger.info("episode %d failed with %s; playing it again", episode.index, message_of(error))
        if self._cancel_siblings:
            _cancel(siblings)

    async def _play_once(self, episode: Episode, max_steps: int, timeout_s: float | None) -> list[Rollout]:
        made: list[Any] = []
        what = f"episode {episode.index} ({episode.request.env.kind})"
        try:
            return await contained(self._run(episode, made, max_steps, timeout_s), what=what, timeout_s=self._episode_timeout_s)
        finally:
            for env in made:
                await _close(env)

    async def _run(self, episode: Episode, made: list[Any], max_steps: int, timeout_s: float | None) -> list[Rollout]:
        """All that is not ours of an episode. The environment is put into `made`, for who has to
        close it."""
        request = episode.request
        protocol = _factory(self._protocols, request.protocol.kind, "protocol")(**request.protocol.kwargs)
        env = _factory(self._envs, request.env.kind, "env")(**request.env.kwargs)
        made.append(env)
        env_seed = episode.index if request.env_seed is None else request.env_seed
        sampling_seed = episode.index if request.sampling_seed is None else request.sampling_seed
        given = await protocol.run(
            env=env,
            max_steps=max_steps,
            env_seed=env_seed,
            sampling_seed=sampling_seed,
            inference=request.inference,
            timeout_s=timeout_s,
        )
        rollouts = check_rollouts(given)
        facts = _engine_facts(request, max_steps, timeout_s, env_seed, sampling_seed)
        for rollout in rollouts:
            _describe(rollout, episode, facts)
        return rollouts


def credit_of(algorithm: RLAlgorithm | None, credit_assigner: CreditAssigner | None) -> CreditAssigner:
    """The credit assigner given, or that of the algorithm."""
    if credit_assigner is not None:
        return credit_assigner
    if algorithm is None:
        raise ConfigError("credit_assigner or algorithm must be given; credit turns rewards into weights")
    return algorithm.credit_assigner


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _cancel(siblings: Sequence[Episode]) -> None:
    """Stop those that are still to be played: what they would give is not used."""
    for sibling in siblings:
        if sibling.cancelled or sibling.task is None or sibling.task.done() or sibling.task is asyncio.current_task():
            continue
        sibling.cancelled = True
        sibling.task.cancel()


def _factory(registry: Mapping[str, Callable[..., Any]], kind: str, what: str) -> Callable[..., Any]:
    if kind not in registry:
        raise KeyError(f"Unknown {what} kind {kind!r}; registered: {sorted(registry)}")
    return registry[kind]


def _engine_facts(
    request: RolloutRequest, max_steps: int, timeout_s: float | None, env_seed: int, sampling_seed: int
) -> dict[str, Any]:
    asked = request.inference.return_ if request.inference else ReturnSpec()
    return {
        "max_steps": max_steps,
        "timeout_s": timeout_s,
        "env_kind": request.env.kind,
        "protocol_kind": request.protocol.kind,
        "env_seed": env_seed,
        "sampling_seed": sampling_seed,
        "forced_env_seed": request.env_seed,
        "forced_sampling_seed": request.sampling_seed,
        "return_spec": {
            "return_token_ids": asked.return_token_ids,
            "return_chosen_logprobs": asked.return_chosen_logprobs,
            "top_logprobs_k": asked.top_logprobs_k,
        },
    }


def _describe(rollout: Rollout, episode: Episode, facts: dict[str, Any]) -> None:
    """Say in the rollout's meta where it comes from."""
    rollout.meta.setdefault("episode_idx", episode.index)
    rollout.meta.update(episode.request.meta)
    rollout.meta["request_meta"] = {**rollout.meta.get("request_meta", {}), **episode.request.meta}
    rollout.meta["engine"] = dict(facts)
    versions = [step.info["policy_version"] for step in rollout.steps if "policy_version" in step.info]
    if versions:
        rollout.meta.setdefault("policy_version", min(versions))


async def _close(env: Any) -> None:
    """Release what the environment holds, if it offers to. A failure there does not undo the
    episode, and a cancellation waits."""
    name = type(env).__name__
    try:
        close = getattr(env, "close", None)
        if close is not None:
            await _to_its_end(contained(_awaited(close), what=f"{name}.close()", timeout_s=CLOSE_TIMEOUT_S))
    except Exception:
        logger.warning("%s.close() failed", name, exc_info=True)


async def _awaited(function: Callable[[], Any]) -> None:
    result = function()
    if inspect.isawaitable(result):
        await result


async def _to_its_end(work: Coroutine[Any, Any, object]) -> None:
    """Await `work` whole. A cancellation that comes meanwhile is raised when it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = None if task.cancelled() else task.exception()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure


def _check_traces(episodes: Sequence[Episode]) -> None:
    """An episode without the tokens that were sampled cannot be trained on: it has failed.
    Playing it again would give none either."""
    for episode in episodes:
        if episode.error is not None:
            continue
        try:
            for rollout in episode.rollouts:
                for step in rollout.steps:
                    trace_of(rollout, step)
        except DataError as error:
            episode.error = GarbageError(str(error))


async def _score(scorer: RolloutScorer, episodes: Sequence[Episode]) -> None:
    """Reward the groups in which no episode failed; an episode with a rollout that got no reward
    has failed now."""
    lost = {episode.group for episode in episodes if episode.error is not None}
    played = [episode for episode in episodes if episode.group not in lost]
    if not played:
        return
    errors = await scorer.score([rollout for episode in played for rollout in episode.rollouts])
    for episode in played:
        episode.error = next((errors[rollout.id] for rollout in episode.rollouts if rollout.id in errors), None)
