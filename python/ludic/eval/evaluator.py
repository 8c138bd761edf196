"""Plays requests and reduces the episodes to metrics. Evaluators that a trainer can use: each
request once, or several answers to each problem for accuracy, avg@k and pass@k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.errors import check_value
from ludic.eval.tally import PROBLEM_KEY, SAMPLE_KEY, Measurement, RolloutValue, measure
from ludic.event_loop import EventLoop, await_if_needed
from ludic.inference.request import derive_seed
from ludic.training.evaluators.protocol import Evaluator as Evaluator
from ludic.training.reducers import Reducer, apply_reducers_to_records
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.rollouts.episodes import PlayedRollouts
from ludic.training.rollouts.to_samples import step_facts
from ludic.training.types import RequestsFn, RolloutRequest
from ludic.types import Rollout, Step, stored

Record = dict[str, Any]
Metrics = dict[str, float]


async def run_eval(
    *,
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    reducers: Mapping[str, Reducer],
    max_steps: int,
    timeout_s: float | None = None,
    concurrency: int = 8,
) -> tuple[list[Record], Metrics]:
    """(a record for each step, the reducers' metrics). No requests give `([], {})`.

    With an engine that counts failures, such as `RolloutEngine`, the metrics have `num_episodes`
    and `num_failed_episodes`. Failed episodes have no records and do not reach the reducers. If all
    fail, the engine's RolloutError passes through.
    """
    if not requests:
        return [], {}
    rollouts = await engine.generate_rollouts(
        requests=requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency
    )
    records, reduced = reduce_rollouts(rollouts, reducers)
    return records, {**count_failures(rollouts), **reduced}


def run_eval_sync(
    *,
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    reducers: Mapping[str, Reducer],
    max_steps: int,
    timeout_s: float | None = None,
    concurrency: int = 8,
) -> tuple[list[Record], Metrics]:
    """`run_eval` for synchronous code."""
    evaluation = run_eval(
        engine=engine,
        requests=requests,
        reducers=reducers,
        max_steps=max_steps,
        timeout_s=timeout_s,
        concurrency=concurrency,
    )
    return EventLoop().run(evaluation, instead="run_eval(...)")


def reduce_rollouts(rollouts: Sequence[Rollout], reducers: Mapping[str, Reducer]) -> tuple[list[Record], Metrics]:
    """(a record for each step, the reducers' metrics)."""
    records = [build_record(rollout, step) for rollout in rollouts for step in rollout.steps]
    return records, apply_reducers_to_records(records, reducers, sample_count=len(records), rollout_count=len(rollouts))


def build_record(rollout: Rollout, step: Step) -> Record:
    """The record of a step: its own facts, overridden by the rollout's meta, overridden by the
    step's info."""
    return {
        **step_facts(rollout, step),
        "completion_length": 0 if step.trace is None else len(stored(step.trace, "completion_token_ids")),
        **rollout.meta,
        **step.info,
    }


def count_failures(rollouts: Sequence[Rollout]) -> Metrics:
    """The episodes that the engine counted; empty for an engine that counts none."""
    if not isinstance(rollouts, PlayedRollouts):
        return {}
    counts = rollouts.counts
    return {"num_episodes": float(counts.num_episodes), "num_failed_episodes": float(counts.num_failed_episodes)}


@dataclass(frozen=True)
class EngineEvaluator:
    """Plays the requests of `requests_fn` with an engine. For `Trainer(evaluator=...)`."""

    engine: RolloutEngine
    requests_fn: RequestsFn
    """A plain or a coroutine function."""
    reducers: Mapping[str, Reducer]
    max_steps: int = 1
    timeout_s: float | None = None
    """Deadline of each model call, in seconds."""
    concurrency: int = 32

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Record], Metrics]:
        """See `run_eval`. Arguments that are not None override the evaluator's own."""
        return await run_eval(
            engine=self.engine,
            requests=await await_if_needed(self.requests_fn()) if requests is None else requests,
            reducers=self.reducers if reducers is None else reducers,
            max_steps=self.max_steps if max_steps is None else max_steps,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            concurrency=self.concurrency if concurrency is None else concurrency,
        )


@dataclass(frozen=True)
class ProblemEvaluator:
    """Plays each request `k` times and measures by problem. Also an `Evaluator` for `Trainer`.

    Every evaluation uses the same seeds: the seeds of sample j of problem i depend only on `seed`,
    i and j, so the first answers are the same for every `k`.
    """

    engine: RolloutEngine
    requests_fn: RequestsFn
    """Returns one request for each problem. The problem's name is `problem_id` in the meta, or else
    its position. `num_episodes` is ignored."""
    k: int = 1
    """Number of answers to each problem."""
    reducers: Mapping[str, Reducer] = field(default_factory=dict)
    max_steps: int = 1
    timeout_s: float | None = None
    """Deadline of each model call, in seconds."""
    concurrency: int = 32
    seed: int = 0
    solved_at: float = 1.0
    """An answer is right if its total reward is at least this."""
    confidence: float = 0.95
    select: Callable[[Rollout], bool] | None = None
    """Selects the rollout to measure, for episodes with several."""
    also: Mapping[str, RolloutValue] = field(default_factory=dict)
    """Other values to average, such as a fact of the last step's info."""

    def __post_init__(self) -> None:
        check_value("k", self.k, "it is the number of answers to each problem", least=1)

    async def measure(self) -> Measurement:
        """Play and measure. Raises RolloutError if every episode failed."""
        return (await self.play())[1]

    async def play(self) -> tuple[list[Rollout], Measurement]:
        """The same, also returning the rollouts that were measured."""
        rollouts = await self.sample()
        return rollouts, self._measure(rollouts)

    async def sample(
        self,
        problems: Sequence[RolloutRequest] | None = None,
        *,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> list[Rollout]:
        """The answers, which are not measured. Arguments that are not None override the
        evaluator's own."""
        problems = await await_if_needed(self.requests_fn()) if problems is None else problems
        return await self.engine.generate_rollouts(
            requests=repeat_requests(problems, k=self.k, seed=self.seed),
            max_steps=self.max_steps if max_steps is None else max_steps,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            concurrency=self.concurrency if concurrency is None else concurrency,
        )

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Record], Metrics]:
        """(a record for each step, the metrics of the measurement and of the reducers)."""
        rollouts = await self.sample(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        records, reduced = reduce_rollouts(rollouts, self.reducers if reducers is None else reducers)
        return records, {**self._measure(rollouts).metrics(), **reduced}

    def _measure(self, rollouts: Sequence[Rollout]) -> Measurement:
        return measure(
            rollouts,
            rollouts.failures if isinstance(rollouts, PlayedRollouts) else (),
            solved_at=self.solved_at,
            confidence=self.confidence,
            select=self.select,
            also=self.also,
        )


def repeat_requests(problems: Sequence[RolloutRequest], *, k: int, seed: int) -> list[RolloutRequest]:
    """`k` requests of one episode for each problem. They are not a group: if one fails, the others
    still count."""
    requests = []
    for i, problem in enumerate(problems):
        of_problem = derive_seed(seed, 1 + i)
        env_seed = of_problem if problem.env_seed is None else problem.env_seed
        meta = {PROBLEM_KEY: str(i), **{key: value for key, value in problem.meta.items() if key != "group_id"}}
        requests += [
            replace(
                problem,
                num_episodes=1,
                env_seed=env_seed,
                sampling_seed=derive_seed(of_problem, 1 + j),
                meta={**meta, SAMPLE_KEY: j},
            )
            for j in range(k)
        ]
    return requests
