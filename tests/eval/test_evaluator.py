"""EngineEvaluator on its own and inside a trainer."""

import asyncio
import random
from dataclasses import FrozenInstanceError

import pytest
import torch
from playing import Counting, ScriptedClient, play, protocol, tiny_model, tokenizer
from training_samples import DrawingSource, cpu_config

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.distributed.publisher import LocalPublisher
from ludic.envs import DatasetQAEnv
from ludic.eval import EngineEvaluator, ProblemEvaluator
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import EnvSpec, ProtocolSpec, Reducer, RolloutEngine, RolloutRequest, Trainer, make_grpo
from ludic.types import Rollout, Step

GREEDY = InferenceSpec(sampling=SamplingParams(temperature=0.0, max_tokens=2), return_=ReturnSpec.for_eval())
REDUCERS = {"right": Reducer("count_true", "correct", normalize_by="rollouts")}


class FakeEngine:
    def __init__(self):
        self.asked = []

    async def generate_rollouts(self, **asked):
        self.asked.append(asked)
        return [Rollout(steps=[Step(0, "o", "a", None, 1.0, False, True, info={"correct": True})])]


def test_the_evaluators_settings_hold_unless_overridden():
    engine, requests, others = FakeEngine(), [RolloutRequest(EnvSpec("e"), ProtocolSpec("p"))], ["others"]
    evaluator = EngineEvaluator(engine, lambda: requests, REDUCERS, 3, 4.0, 5)
    records, metrics = play(evaluator.eval())
    assert (len(records), metrics) == (1, {"right": 1.0})
    play(evaluator.eval(requests=others, reducers={}, max_steps=6, timeout_s=7.0, concurrency=8))
    assert engine.asked == [
        {"requests": requests, "max_steps": 3, "timeout_s": 4.0, "concurrency": 5},
        {"requests": others, "max_steps": 6, "timeout_s": 7.0, "concurrency": 8},
    ]
    with pytest.raises(FrozenInstanceError):
        evaluator.max_steps = 2


def test_the_defaults_are_the_documented_ones():
    evaluator = EngineEvaluator(FakeEngine(), list, REDUCERS)
    assert (evaluator.max_steps, evaluator.timeout_s, evaluator.concurrency) == (1, None, 32)


def test_requests_may_come_from_a_coroutine_function():
    async def requests():
        return [RolloutRequest(EnvSpec("e"), ProtocolSpec("p"))]

    assert play(EngineEvaluator(FakeEngine(), requests, {}).eval())[1] == {}


class Questions:
    """A model in training behind a client, and evaluation problems of which one cannot be
    played."""

    def __init__(self):
        random.seed(0)
        torch.manual_seed(0)
        self.model = tiny_model()
        self.client = LocalChatClient(self.model, tokenizer())
        self.engine = RolloutEngine(
            env_registry={"qa": DatasetQAEnv, "broken": self.broken}, protocol_registry={"single": self.protocol}, max_retries=0
        )

    def protocol(self):
        agent = Agent(
            client=self.client,
            model="tiny",
            ctx=FullDialog(),
            parser=lambda text: ParseResult(text, 0.0, None),
            reject_incomplete_completions=False,
        )
        return SingleAgentProtocol(agent)

    def broken(self):
        raise OSError("no such environment")

    def requests(self):
        rows = [{"id": str(i), "question": f"{i}+", "answer": "!"} for i in range(3)]
        asked = [RolloutRequest(EnvSpec("qa", {"sample": row}), ProtocolSpec("single"), inference=GREEDY) for row in rows]
        return [*asked, RolloutRequest(EnvSpec("broken"), ProtocolSpec("single"))]

    def trainer(self, evaluator, **settings):
        return Trainer(
            model=self.model,
            algo=make_grpo(group_size=4),
            batch_source=DrawingSource(),
            publisher=LocalPublisher(self.client),
            cfg=cpu_config(**settings),
            evaluator=evaluator,
        )


def test_a_trainer_evaluates_at_the_start_and_every_n_steps_and_logs_failures():
    world = Questions()
    evaluator = EngineEvaluator(world.engine, world.requests, REDUCERS)
    seen = []
    world.trainer(evaluator, eval_at_start=True, eval_every_n_steps=2).train_sync(4, eval_log_fn=seen.append)
    assert [stats["eval/step"] for stats in seen] == [0.0, 2.0, 4.0]
    assert all(stats["eval/num_failed_episodes"] == 1.0 and stats["eval/num_episodes"] == 4.0 for stats in seen)
    assert all(0.0 <= stats["eval/right"] <= 1.0 for stats in seen)


def test_settings_missing_in_the_config_come_from_the_evaluator():
    engine = FakeEngine()
    world = Questions()
    evaluator = EngineEvaluator(engine, lambda: ["a request"], {}, max_steps=3, timeout_s=4.0, concurrency=5)
    world.trainer(evaluator).eval_sync()
    world.trainer(evaluator, eval_concurrency=9).eval_sync()
    world.trainer(evaluator, eval_concurrency=9).eval_sync(concurrency=2)
    assert [(asked["max_steps"], asked["timeout_s"], asked["concurrency"]) for asked in engine.asked] == [
        (3, 4.0, 5),
        (3, 4.0, 9),
        (3, 4.0, 2),
    ]


def test_an_evaluation_does_not_change_training():
    """Sampling at temperature 1 draws random numbers. The weights afterwards must equal those
    without an evaluation."""
    sampled = InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=2), return_=ReturnSpec.for_eval())

    def weights(evaluated):
        world = Questions()
        sample = {"question": "a", "answer": "b"}
        requests = [RolloutRequest(EnvSpec("qa", {"sample": sample}), ProtocolSpec("single"), inference=sampled)]
        evaluator = ProblemEvaluator(world.engine, lambda: requests, k=3)
        world.trainer(evaluator, eval_every_n_steps=1 if evaluated else None).train_sync(2)
        return [parameter.detach().clone() for parameter in world.model.parameters()]

    assert all(map(torch.equal, weights(True), weights(False)))


def test_a_trainer_logs_accuracy_and_pass_at_k():
    world = Questions()
    evaluator = ProblemEvaluator(world.engine, world.requests, k=2)
    metrics = asyncio.run(world.trainer(evaluator).eval())["metrics"]
    assert (metrics["num_episodes"], metrics["num_failed_episodes"]) == (8.0, 2.0)
    assert {"accuracy", "accuracy_low", "accuracy_high", "pass@1", "pass@2"} <= set(metrics)


def test_the_published_policy_is_evaluated():
    world = Questions()
    seen = []

    class Reading(Counting):
        def env_step(self, action):
            seen.append(world.client._version)
            return super().env_step(action)

    engine = RolloutEngine(env_registry={"read": Reading}, protocol_registry={"single": world.protocol})
    evaluator = EngineEvaluator(engine, lambda: [RolloutRequest(EnvSpec("read"), ProtocolSpec("single"), inference=GREEDY)], {})
    world.trainer(evaluator, eval_every_n_steps=1).train_sync(2)
    assert seen == [1, 2]


def test_an_evaluation_with_a_scripted_client_needs_no_model():
    engine = RolloutEngine(env_registry={"count": Counting}, protocol_registry={"single": lambda: protocol(ScriptedClient("a"))})
    requests = [RolloutRequest(EnvSpec("count"), ProtocolSpec("single"))]
    assert play(EngineEvaluator(engine, lambda: requests, {}).eval())[1] == {"num_episodes": 1.0, "num_failed_episodes": 0.0}
