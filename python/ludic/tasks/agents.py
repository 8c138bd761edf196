"""Tasks that an agent of the user's own answers, and their warm-up: the agent plays with an
imperfect teacher in place of the model, through the same gateway, so that demonstrations have the
agent's own prompts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from ludic.inference.client import Sampled
from ludic.inference.prompts.template import find_turn_end
from ludic.inference.request import InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction.agent_program import MEASURES, AgentUse
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.tasks.episodic import EpisodicTask, WithCalls
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest, SAWItem
from ludic.types import TokenTrace

LESSONS = 512
"""Episodes of the teacher."""


class WithAgent(WithCalls):
    """`task`, of one turn, which an agent of the user's own answers. The task sees what the agent
    returned."""

    call_measures = MEASURES

    def __init__(self, task: EpisodicTask, use: AgentUse) -> None:
        super().__init__(task)
        self._use = use

    @property
    def agent(self) -> AgentUse:
        return self._use

    @property
    def sees_cut_off_answers(self) -> bool:
        return True

    async def aclose(self) -> None:
        self._use.close()
        await self.task.aclose()


class _Teacher:
    """A client that says what `EpisodicTask.teach` says. It follows from the seed of a call."""

    def __init__(self, task: EpisodicTask, tokenizer: Any) -> None:
        self.tokenizer, self._task = tokenizer, task
        self._end = find_turn_end(tokenizer).token

    async def sample_tokens(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingParams | None = None, seed: int | None = None
    ) -> Sampled:
        teach = self._task.teach
        assert teach is not None
        said = teach(self.tokenizer.decode(prompt_token_ids), Random(seed))
        ids = list(self.tokenizer(said, add_special_tokens=False)["input_ids"])
        ids += [] if self._end is None else [self._end]
        return Sampled(TokenTrace.from_arrays(prompt_token_ids, ids, [0.0] * len(ids), "stop"), self._end is not None, 0)


class AgentDemonstrations(DemonstrationSource):
    """Returns samples of the teacher's episodes, without end: one for each call, drawn from
    `LESSONS` episodes. Batch `k` depends only on the seed and `k`."""

    _items: Sequence[SAWItem] = ()

    async def _make(self, rng: Random) -> tuple[list[SAWItem], int]:
        self._items = self._items or await self._play()
        return [rng.choice(self._items) for _ in range(self._batch_size)], self._batch_size

    async def _play(self) -> list[SAWItem]:
        task, teacher, agent = self._task, _Teacher(self._task, self._tokenizer), self._task.agent
        assert agent is not None
        rng = Random(f"lessons {self._seed}")
        engine = RolloutEngine(
            env_registry={"task": lambda problem: task.make_env(problem)},
            protocol_registry={"agent": lambda: agent.make_protocol(teacher, system_prompt=self._system_prompt)},
        )
        inference = InferenceSpec(SamplingParams(1.0, task.max_new_tokens), ReturnSpec.for_rl())
        requests = [
            RolloutRequest(
                EnvSpec("task", {"problem": task.draw(rng)}),
                ProtocolSpec("agent"),
                sampling_seed=rng.randrange(2**31),
                inference=inference,
            )
            for _ in range(LESSONS)
        ]
        batch = await engine.generate_batch(requests, credit_assigner=ConstantCredit(), concurrency=32)
        return batch.items
