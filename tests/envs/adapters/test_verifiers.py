"""The real verifiers library with one of our clients as the model. Needs an environment with
verifiers, which conflicts with our pinned openai."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="pip install 'ludic-rl[verifiers]' in a separate environment")

from byte_client import ByteClient
from playing import ScriptedClient
from verifiers.v1.dialects import DIALECTS, ChatDialect
from vf_sums import FailingSum, sums, until_right

from ludic.envs import DatasetQAEnv
from ludic.envs.adapters import VerifiersEnv, rollout_from_trace
from ludic.envs.adapters.verifiers import VerifiersClient, play_task
from ludic.errors import ConfigError, InferenceError, RolloutError
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams
from ludic.inference.request import derive_seed
from ludic.interaction.verifiers import VerifiersProtocol
from ludic.training.batching import RolloutEngine
from ludic.training.credit_assignment import MonteCarloReturn
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest
from ludic.types import ChatResponse

SPEC = InferenceSpec(sampling=SamplingParams(temperature=0.9, max_tokens=3), return_=ReturnSpec.for_rl())


async def play_rollout(client, *, agent=None, tasks=None, max_steps=9, **settings):
    env = VerifiersEnv(tasks or sums(), agent=agent)
    (rollout,) = await VerifiersProtocol(client).run(
        env=env, max_steps=max_steps, **{"env_seed": 2, "inference": SPEC, **settings}
    )
    return rollout


@pytest.mark.parametrize("make", [lambda: ByteClient("7", "no", "5"), lambda: ScriptedClient("7", "no", "5")])
async def test_a_rollout_has_the_tokens_that_the_client_sampled(make):
    """With prompts that extend the previous turn's prompt (bytes), and with prompts that do not
    (the scripted client always reports [1, 2])."""
    client = make()
    rollout = await play_rollout(client, agent=until_right())
    if isinstance(client, ScriptedClient):
        sent = [([1, 2], list(text.encode()), [-0.5] * len(text)) for text in client.texts]
    else:
        sent = client.sent
    traces = [step.trace for step in rollout.steps]
    assert [(trace.prompt_token_ids, trace.completion_token_ids, trace.completion_logprobs) for trace in traces] == sent
    assert [step.action for step in rollout.steps] == ["7", "no", "5"]
    assert [step.prev_obs for step in rollout.steps] == ["Add.\n2+3=", "wrong", "wrong"]
    assert rollout.total_reward == 2.5


async def test_the_model_is_called_with_the_trainers_settings():
    client = ByteClient("7", "5")
    await play_rollout(client, agent=until_right(), sampling_seed=11)
    assert [request.seed for request in client.requests] == [11, derive_seed(11, 1)]
    assert all(
        (request.sampling, request.return_, request.tools) == (SPEC.sampling, SPEC.return_, None) for request in client.requests
    )
    assert client.requests[1].messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+3="},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "wrong"},
    ]


async def test_log_probabilities_are_requested_by_default():
    client = ByteClient("4")
    await play_rollout(client, inference=None, env_seed=1)
    assert client.requests[0].return_ == ReturnSpec.for_rl()


async def test_the_number_of_model_calls_is_limited():
    rollout = await play_rollout(ByteClient("7", "no", "5"), agent=until_right(), max_steps=2)
    assert [step.action for step in rollout.steps] == ["7", "no"]
    assert rollout.meta["truncation_reason"] == "env"
    assert rollout.meta["stop_condition"] == "max_turns"


async def test_client_errors_are_raised_unchanged_and_a_failed_grader_is_an_error():
    with pytest.raises(InferenceError, match="the engine is gone"):
        await play_rollout(ByteClient(error=InferenceError("the engine is gone")))

    class Silent(ByteClient):
        async def complete(self, request):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await play_rollout(Silent(), timeout_s=0.05)
    with pytest.raises(RolloutError, match="the grader fell over"):
        await play_rollout(ByteClient("5"), tasks=sums(FailingSum))
    env = VerifiersEnv(sums(FailingSum))
    await env.env_reset(seed=0)
    with pytest.raises(RolloutError, match="the grader fell over"):
        await env.env_step("5")
    await env.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_episode_leaks_nothing():
    env = VerifiersEnv(sums(), agent=until_right())
    await env.env_reset(seed=0)
    await env.env_step("no")
    await env.env_reset(seed=1)
    await env.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_harness_that_hangs_is_a_timeout():
    env = VerifiersEnv(sums(), timeout_s=0.001)
    with pytest.raises(TimeoutError, match=r"within 0.001 s"):
        await env.env_reset(seed=0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_recorded_trace_gives_the_same_rollout_as_the_trace():
    policy_client = VerifiersClient(ByteClient("7", "5"), SPEC, lambda call: None, None)
    trace = await play_task(sums()[2], policy_client, until_right(), model="m", max_turns=None)
    live, recorded = rollout_from_trace(trace), rollout_from_trace(json.loads(json.dumps(trace.to_record(float_decimals=None))))
    assert [replace(step, ts_ns=0) for step in live.steps] == [replace(step, ts_ns=0) for step in recorded.steps]
    assert (live.id, live.meta) == (recorded.id, recorded.meta)
    kept = json.loads((Path(__file__).parent / "verifiers_trace.json").read_text())
    assert kept.keys() == trace.to_record().keys()  # the recording for tests without verifiers equals what verifiers writes
    assert [node.keys() for node in kept["nodes"]] == [node.keys() for node in trace.to_record()["nodes"]]


async def test_tool_calls_pass_in_both_directions():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}

    class Calls(ByteClient):
        async def complete(self, request):
            self.requests.append(request)
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            return ChatResponse("", [5], [-1.0], "tool_calls", [1, 2]), {"raw_response": {"choices": [{"message": message}]}}

    client = Calls()
    policy_client = VerifiersClient(client, SPEC, lambda call: None, None)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "2+3="}], "tools": tools, "tool_choice": "required"}
    response = await policy_client.get_response(ChatDialect(), body, None)
    assert (client.requests[0].tools.tools, client.requests[0].tools.tool_choice) == (tools, "required")
    assert [(made.id, made.name, made.arguments) for made in response.message.tool_calls] == [("c1", "add", '{"a": 2}')]
    assert ChatDialect().parse_response(ChatDialect().validate_response(response.raw)).message == response.message
    assert (response.tokens.prompt_ids, response.tokens.completion_ids, response.tokens.completion_logprobs) == (
        [1, 2],
        [5],
        [-1.0],
    )
    assert response.finish_reason == "tool_calls"


async def test_only_chat_completions_have_tokens():
    other = next(dialect for dialect in DIALECTS if not isinstance(dialect, ChatDialect))
    policy_client = VerifiersClient(ByteClient("x"), SPEC, lambda call: None, None)
    with pytest.raises(InferenceError, match="use a harness that requests chat completions"):
        await policy_client.get_response(other, {"model": "m", "messages": []}, None)
    assert isinstance(policy_client.error, InferenceError)


async def test_the_engine_plays_groups_of_a_task_and_counts_what_fails():
    tasks = [sums()[0], sums(FailingSum)[1], sums()[2]]
    engine = RolloutEngine(
        env_registry={"sums": lambda: VerifiersEnv(tasks)},
        protocol_registry={"verifiers": lambda: VerifiersProtocol(ByteClient("3"))},
        max_retries=0,
    )
    requests = [
        RolloutRequest(
            EnvSpec("sums"), ProtocolSpec("verifiers"), env_seed=seed, inference=SPEC, num_episodes=2, meta={"group_id": seed}
        )
        for seed in range(3)
    ]
    batch = await engine.generate_batch(requests, max_steps=3, credit_assigner=MonteCarloReturn())
    assert [(item.meta["task_idx"], item.weight) for item in batch.items] == [(0, 2.5), (0, 2.5), (2, 0.5), (2, 0.5)]
    assert (batch.meta["num_failed_episodes"], batch.meta["num_dropped_groups"]) == (2, 1)
    assert all(item.actor_logps is not None for item in batch.items)


async def test_settings_are_validated_by_the_constructor():
    with pytest.raises(ConfigError, match="tasks is empty"):
        VerifiersEnv([])
    with pytest.raises(ConfigError, match=r"timeout_s \(0\)"):
        VerifiersEnv(sums(), timeout_s=0)
    with pytest.raises(ConfigError, match="plays a VerifiersEnv, not a DatasetQAEnv"):
        await VerifiersProtocol(ByteClient("x")).run(env=DatasetQAEnv({"question": "q", "answer": "a"}), max_steps=1)
