"""Episodes of an agent that calls the model through a URL: their steps, rewards, branches, limits
and ends."""

import asyncio
import gc

import pytest
from chat_tokenizers import bpe_tokenizer
from playing import tiny_model
from scripted_sampler import ScriptedSampler

from ludic.envs import DatasetQAEnv
from ludic.errors import ConfigError, InferenceError, RolloutError
from ludic.inference import ChatCompletionRequest, InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.inference.gateway.session import Limits
from ludic.interaction.agent_program import AgentUse, describe_agent, number_branches
from ludic.tasks.agents import WithAgent
from ludic.tasks.episodic import as_episodic
from ludic.tasks.errand import Errand, run_errand
from ludic.training import make_grpo
from ludic.training.reward_functions import RewardFunctions, make_reward
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest

INFERENCE = InferenceSpec(SamplingParams(1.0, 90), ReturnSpec.for_rl())
ROW = {"prompt": "question", "question": "question", "answer": "yes"}


async def one_call(session):
    async with session.client() as client:
        asked = await client.chat.completions.create(model="x", messages=list(session.messages))
    return asked.choices[0].message.content


async def play(agent, script=lambda *_: "yes", *, sampler=None, row=ROW, count=1, seed=3, **settings):
    """The rollouts of `count` episodes."""
    use = AgentUse(agent, **settings)
    sampler = sampler or ScriptedSampler(bpe_tokenizer(), script)
    engine = RolloutEngine(
        env_registry={"question": lambda: DatasetQAEnv(row)},
        protocol_registry={"agent": lambda: use.make_protocol(sampler, system_prompt="Be brief.")},
        max_retries=0,
    )
    requests = [
        RolloutRequest(
            EnvSpec("question"), ProtocolSpec("agent"), sampling_seed=seed + i, inference=INFERENCE, meta={"group_id": "g"}
        )
        for i in range(count)
    ]
    try:
        return await engine.generate_rollouts(requests, max_steps=1, for_training=True)
    finally:
        use.close()


async def test_an_episode_is_rewarded_for_what_the_agent_returns():
    [rollout] = await play(one_call)
    [step] = rollout.steps
    assert (step.reward, step.terminated, step.action, step.prev_obs) == (1.0, True, "yes", "Be brief.\nquestion")
    assert rollout.meta["policy_version"] == 3
    assert rollout.meta["agent"]["output"] == "yes"
    assert step.info["agent/calls"] == 1
    assert step.trace.completion_logprobs == [-0.5] * 4


@pytest.mark.parametrize("value", ["no", None, 3])
async def test_the_output_is_text_or_that_of_the_last_call(value):
    async def agent(session):
        await one_call(session)
        return value

    if value == 3:
        with pytest.raises(RolloutError, match="returned int; it must return"):
            await play(agent)
    else:
        [rollout] = await play(agent)
        assert rollout.meta["agent"]["output"] == ("no" if value else "yes")
        assert rollout.total_reward == (0.0 if value else 1.0)


async def test_a_plain_function_runs_in_a_thread():
    import openai

    def agent(session):
        with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            return client.chat.completions.create(model="x", messages=session.messages).choices[0].message.content

    assert [rollout.total_reward for rollout in await play(agent, count=3)] == [1.0] * 3


async def branching(session):
    """A dialogue of two turns, two sub-agents from its history, and one of its own."""
    async with session.client() as client:

        async def ask(messages, model="x"):
            answer = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
            return [*messages, {"role": "assistant", "content": answer.content}]

        first = await ask(list(session.messages))
        for task in ("one", "two"):
            await ask([*first, {"role": "user", "content": f"sub-task {task}"}])
        await ask([{"role": "user", "content": "title"}], "small-haiku")
        await ask([*first, {"role": "user", "content": "go on"}])
    return "yes"


async def test_calls_are_steps_with_their_parents_and_branches():
    [rollout] = await play(branching, lambda _, number: f"answer {number}")
    infos = [step.info for step in rollout.steps]
    assert [info["parent"] for info in infos] == [None, 0, 0, None, 0]
    assert [info["branch"] for info in infos] == [0, 3, 2, 1, 0]
    assert [info.get("intermediate_call", False) for info in infos] == [True] * 4 + [False]
    assert [step.reward for step in rollout.steps] == [0, 0, 0, 0, 1]
    assert (infos[-1]["agent/branches"], infos[-1]["agent/continued"]) == (4, 0.75)
    for step in rollout.steps:
        if step.info["parent"] is not None:
            parent = rollout.steps[step.info["parent"]].trace
            read = [*parent.prompt_token_ids, *parent.completion_token_ids]
            assert step.trace.prompt_token_ids[: step.info["shared"]] == read[: step.info["shared"]] == read
    weights = make_grpo(group_size=2).credit_assigner.compute(await play(branching, lambda _, n: f"answer {n}", count=2))
    assert len(weights) == 10
    described = describe_agent(rollout)
    assert "5 calls" in described
    assert "call 3 (root)" in described


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"train": "main"}, [0, 4]),
        ({"untrained_models": ["*haiku*"]}, [0, 1, 2, 4]),
        ({"train": lambda call: call.parent is None}, [0, 3]),
    ],
)
async def test_which_calls_are_trained_is_a_setting(settings, calls):
    [rollout] = await play(branching, **settings)
    assert [step.info["call"] for step in rollout.steps] == calls
    assert [step.index for step in rollout.steps] == list(range(len(calls)))
    assert rollout.total_reward == 1.0


async def test_nothing_to_train_is_a_failed_episode():
    with pytest.raises(RolloutError, match="none of the 5 calls is trained"):
        await play(branching, train=lambda call: False)


async def fails_first(session):
    raise ValueError("no such file")


async def fails_later(session):
    await one_call(session)
    raise ValueError("gave up")


async def never_ends(session):
    await one_call(session)
    await asyncio.sleep(60)


async def test_an_agent_that_makes_no_call_has_failed():
    for agent in (fails_first, lambda session: "yes"):
        with pytest.raises(RolloutError, match="made no call that the model answered"):
            await play(agent)


@pytest.mark.parametrize(
    ("agent", "status", "settings"), [(fails_later, "failed", {}), (never_ends, "timeout", {"timeout_s": 0.5})]
)
async def test_an_agent_that_ends_badly_is_scored_or_lost(agent, status, settings):
    [rollout] = await play(agent, **settings)
    assert (rollout.meta["agent"]["status"], rollout.meta["agent"]["output"], rollout.total_reward) == (status, "", 0.0)
    assert rollout.steps[-1].truncated == (status == "timeout")
    assert rollout.steps[-1].info[f"agent/{'timeouts' if status == 'timeout' else 'failed'}"] == 1.0
    with pytest.raises(RolloutError, match=f"the agent {status}"):
        await play(agent, **settings, on_timeout="lose", on_error="lose")


async def goes_on(session):
    """Swallows its cancellation."""
    await one_call(session)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "yes"


async def makes_another_error(session):
    await one_call(session)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise RuntimeError("cleaning up failed") from None


@pytest.mark.parametrize("agent", [goes_on, makes_another_error])
async def test_a_timeout_is_one_whatever_the_agent_makes_of_it(agent):
    [rollout] = await play(agent, timeout_s=0.5)
    assert (rollout.meta["agent"]["status"], rollout.total_reward, rollout.steps[-1].truncated) == ("timeout", 0.0, True)
    assert "agent.timeout_s (0.5)" in rollout.meta["agent"]["error"]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_a_client_of_another_event_loop_is_closed_without_an_error():
    """The agent leaves a socket to the garbage collector, which runs here and not in a later
    test."""

    def agent(session):
        async def main():
            client = session.client()
            answer = await client.chat.completions.create(model="x", messages=list(session.messages))
            return answer.choices[0].message.content

        return asyncio.run(main())

    [rollout] = await play(agent)
    assert rollout.total_reward == 1.0
    gc.collect()


async def test_an_error_of_the_agent_is_logged_once(caplog):
    await play(fails_later, count=3)
    assert sum("gave up" in record.getMessage() for record in caplog.records) == 1
    assert caplog.records[0].exc_info


async def test_one_call_continues_all_there_is():
    [rollout] = await play(one_call)
    assert rollout.steps[-1].info["agent/continued"] == 1.0
    assert describe_agent(rollout).startswith("1 call in ")


async def test_a_failure_of_the_engine_is_never_a_reward():
    def fail(prompt, number):
        raise InferenceError("away")

    async def agent(session):
        try:
            await one_call(session)
        except Exception:
            return "yes"

    with pytest.raises(RolloutError, match="the engine failed in a call of the agent"):
        await play(agent, fail)


async def test_refused_calls_truncate_the_episode():
    async def agent(session):
        await one_call(session)
        try:
            await one_call(session)
        except Exception:
            return "yes"

    [rollout] = await play(agent, limits=Limits(max_calls=1))
    assert (rollout.steps[-1].truncated, rollout.meta["agent"]["refused"], rollout.total_reward) == (True, 1, 1.0)


async def test_reward_functions_get_the_output_and_the_calls_of_tools():
    seen = {}

    def reward(prompts, completions, tool_calls, tool_results, **columns):
        seen.update(completions=completions, calls=tool_calls, results=tool_results)
        return [1.0]

    script = iter(['<tool_call>{"name": "look", "arguments": {"key": "b"}}</tool_call>', "x"])
    row = {**ROW, "question": "b", "store": dict.fromkeys("abcdefgh", "x")}
    [rollout] = await play(run_errand, lambda *_: next(script), row=row)
    rollout.steps[-1].info["row"] = row
    await RewardFunctions([reward]).score([rollout])
    assert seen["completions"] == ["x"]
    assert [call["function"]["name"] for call in seen["calls"][0]] == ["look"]
    assert seen["results"] == [["x"]]


@pytest.mark.parametrize(("text", "reward"), [("1", 1.0), ("ran\n0.25", 0.25), ("", 0.0), ("2 passed", None), ("nan", None)])
async def test_the_last_line_of_a_verification_is_the_reward(text, reward):
    [rollout] = await play(one_call)
    row = {**ROW, "prompt": "question"}
    rollout.steps[-1].info.update(row=row, verified=text)
    before, seen = rollout.total_reward, []

    def own(completions, verified):
        seen.extend(verified)
        return [0.0]

    errors = await RewardFunctions([make_reward("verified"), own]).score([rollout])
    assert seen == [text]
    assert (rollout.total_reward - before, list(errors)) == ((reward, []) if reward is not None else (0.0, [rollout.id]))


def test_without_a_verification_there_is_no_reward():
    assert make_reward("verified")(["answer", "answer"], verified=[None, "1"]) == [None, 1.0]


async def test_settings_of_the_agent_are_told():
    async def agent(session):
        async with session.client() as client:
            await client.chat.completions.create(model="x", messages=list(session.messages), temperature=0.0)
        return "yes"

    [rollout] = await play(agent)
    assert rollout.meta["agent"]["ignored"] == {"temperature": 0.0}
    assert describe_agent(rollout).endswith("ignored: temperature=0.0")


def test_branches_are_numbered_from_the_last_call():
    class Made:
        def __init__(self, number, parent):
            self.number, self.parent = number, parent

    calls = [Made(0, None), Made(1, 0), Made(2, 0), Made(3, 1), Made(4, None)]
    assert number_branches(calls) == {4: 0, 3: 1, 1: 1, 0: 1, 2: 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout_s": 0}, "agent.timeout_s"),
        ({"history": "all"}, "agent.history"),
        ({"train": "some"}, r"agent.train \('some'\)"),
        ({"on_error": "stop"}, "agent.on_error"),
        ({"limits": Limits(max_calls=0)}, "agent.max_calls"),
    ],
)
def test_invalid_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        AgentUse(one_call, **settings)


async def test_the_same_dialogue_has_the_same_ids_as_with_an_agent_in_this_process():
    """A frozen policy that answers twice, through the gateway and through its chat interface."""
    tokenizer = bpe_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    client = LocalChatClient(model, tokenizer)

    async def agent(session):
        messages = list(session.messages)
        async with session.client() as sdk:
            for _ in range(2):
                answer = (await sdk.chat.completions.create(model="x", messages=messages)).choices[0].message.content
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        return answer

    [rollout] = await play(agent, sampler=client)
    for step in rollout.steps:
        trace = step.trace
        again = await client.complete_tokens(trace.prompt_token_ids, sampling=SamplingParams(0.0, 1))
        assert again.prompt_token_ids == trace.prompt_token_ids
    first = rollout.steps[0].trace
    asked = ChatCompletionRequest(
        "x",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question"}],
        SamplingParams(1.0, 90),
        ReturnSpec.for_rl(),
        seed=0,
    )
    assert (await client.complete(asked))[0].prompt_token_ids == first.prompt_token_ids


def test_a_task_with_an_agent_has_its_measures_and_shows_the_dialogue():
    task = WithAgent(as_episodic(Errand()), AgentUse(run_errand))
    assert "agent/calls" in task.measures
    assert task.teach is not None
    assert task.max_turns == 1
