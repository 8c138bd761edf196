"""ReAct agents: which calls they make, what the model sees, and what is stored."""

import asyncio

import pytest
from hypothesis import given, strategies as st
from playing import FOR_RL, Counting, play, verbatim
from tool_playing import CallingClient, call

from ludic.agents import ReActAgent
from ludic.context import FullDialog
from ludic.errors import ConfigError, LudicError
from ludic.inference import InferenceSpec
from ludic.inference.request import call_seed, derive_seed
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import ParseResult
from ludic.training import EpisodicReturn, GroupNormalizedReturn, MonteCarloReturn
from ludic.training.reward_functions import RewardFunctions
from ludic.training.rollouts.to_samples import batch_from_rollouts


def double(n: int) -> int:
    return 2 * n


DOUBLE = ("let me see", [call("double", '{"n": 4}')])


def agent(*answers, steps=5, ctx=None, **settings):
    client = CallingClient(*answers)
    made = ReActAgent([double], steps, client=client, model="m", ctx=ctx or FullDialog(), **{"parser": verbatim, **settings})
    made.reset(system_prompt="S")
    made.on_env_reset("O", {})
    return made, client


def test_the_model_calls_tools_until_it_answers():
    acting, client = agent(DOUBLE, "8")
    parsed, raw, info, trace = play(acting.act(inference=FOR_RL, sampling_seed=7))
    assert (parsed.action, raw, info["completion"]) == ("8", "8", "8")
    assert trace.completion_token_ids == [56]
    first, second = client.requests
    assert first.tools.tools == acting.tool_schemas
    assert second.tools is not None
    assert [r.seed for r in client.requests] == [7, call_seed(7, 1)]
    assert all(r.return_.return_token_ids for r in client.requests)
    assert second.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "O"},
        {"role": "assistant", "content": "let me see", "tool_calls": DOUBLE[1]},
        {"role": "tool", "tool_call_id": "id0", "name": "double", "content": "8"},
    ]
    assert acting._ctx.messages[4:] == [{"role": "assistant", "content": "8"}]


def test_the_last_call_has_no_tools_and_a_message_that_is_not_stored():
    acting, client = agent(DOUBLE, DOUBLE, ("9", [call("double")]), steps=3)
    parsed, raw, *_ = play(acting.act())
    assert (parsed.action, raw) == ("9", "9")
    assert [r.tools is None for r in client.requests] == [False, False, True]
    assert "exhausted your reasoning steps" in client.requests[-1].messages[-1]["content"]
    assert all("exhausted" not in str(m) for m in acting._ctx.messages)
    assert acting._ctx.messages[-1] == {"role": "assistant", "content": "9"}
    assert len(acting.intermediate_calls) == 2


def test_token_ids_are_always_requested():
    acting, client = agent("8")
    play(acting.act(inference=InferenceSpec()))
    assert client.requests[0].return_.return_token_ids


@pytest.mark.parametrize("answers", [["cut"], [("cut", [call("double", '{"n": 4}')])], [DOUBLE, "cut"], [DOUBLE, DOUBLE, "cut"]])
def test_a_truncated_call_is_rejected_at_any_position(answers):
    def refuse(text):
        raise AssertionError("the parser must not be called")

    acting, client = agent(*answers, steps=3, parser=refuse, incomplete_completion_penalty=-0.3)
    parsed, raw, info, _ = play(acting.act())
    assert (parsed.action, parsed.reward, raw) == (None, -0.3, "cut")
    assert info["incomplete_completion"] is True
    assert len(client.requests) == len(answers)
    assert acting._ctx.messages[-1] == {"role": "assistant", "content": "cut"}  # the tool call that it contains was not run


def test_a_truncated_call_counts_when_that_is_allowed():
    acting, _ = agent(("cut", [call("double", '{"n": 4}')]), "8", reject_incomplete_completions=False)
    parsed, _, info, _ = play(acting.act())
    assert parsed.action == "8"
    assert "incomplete_completion" not in info


def test_each_act_starts_with_a_fresh_call_count():
    acting, _ = agent(DOUBLE, "8", "9")
    play(acting.act())
    assert len(acting.intermediate_calls) == 1
    play(acting.act())
    assert acting.intermediate_calls == []


def test_a_context_without_tools_is_refused():
    class Plain(FullDialog):
        supports_tools = False

    with pytest.raises(TypeError, match="needs supports_tools=True") as raised:
        agent("8", ctx=Plain())
    assert isinstance(raised.value, LudicError)
    with pytest.raises(ConfigError, match="max_react_steps"):
        agent("8", steps=0)


def test_an_agent_without_tools_answers_directly():
    client = CallingClient("8")
    acting = ReActAgent([], client=client, model="m", ctx=FullDialog(), parser=verbatim)
    assert play(acting.act())[1] == "8"
    assert client.requests[0].tools is None


def test_a_slow_model_call_times_out():
    class Hanging(CallingClient):
        async def complete(self, request):
            if self.requests:
                await asyncio.Event().wait()
            return await super().complete(request)

    acting = ReActAgent([double], client=Hanging(DOUBLE), model="m", ctx=FullDialog(), parser=verbatim)
    with pytest.raises(TimeoutError):
        play(acting.act(timeout_s=0.02))


# Calls before the answer are steps of the rollout and samples of the batch.


def episode(*answers, goal=2, parser=verbatim, group=None, **settings):
    client = CallingClient(*answers)
    acting = ReActAgent([double], 3, client=client, model="m", ctx=FullDialog(), parser=parser, **settings)
    (rollout,) = play(SingleAgentProtocol(acting).run(env=Counting(goal=goal), max_steps=4, sampling_seed=5, inference=FOR_RL))
    if group is not None:
        rollout.meta["request_meta"] = {"group_id": group}
    return rollout, client


def test_every_model_call_is_a_step_whose_observations_connect():
    rollout, _ = episode(DOUBLE, DOUBLE, "a", "b")
    told = [(s.index, s.prev_obs, s.action, s.next_obs, s.reward, bool(s.info.get("intermediate_call"))) for s in rollout.steps]
    assert told == [
        (0, "start None", "let me see", "8", 0.0, True),
        (1, "8", "let me see", "8", 0.0, True),
        (2, "8", "a", "step 1", 0.0, False),
        (3, "step 1", "b", None, 1.0, False),
    ]
    assert rollout.steps[0].info["chat_completion"] == {"role": "assistant", "content": "let me see", "tool_calls": DOUBLE[1]}
    assert [s.terminated for s in rollout.steps] == [False, False, False, True]


def test_reward_functions_see_the_calls_and_each_result():
    calls = [call("double", '{"n": 4}'), call("double", '{"n": "x"}', 1), {**call("", "{}", 2), "error": "no name", "text": "<x"}]
    acting, _ = agent(("let me see", calls), "8")
    [played] = play(SingleAgentProtocol(acting).run(env=Counting(), max_steps=1, inference=FOR_RL))
    played.steps[-1].info["row"] = {"prompt": "double 4 and 8"}
    seen = []
    functions = RewardFunctions(lambda completions, tool_calls, tool_results: seen.append((tool_calls, tool_results)) or [1.0])
    assert play(functions.score([played])) == {}
    told = ["8", "Error: argument n must be a valid integer, got 'x'", "Error: the call cannot be read: no name. Write it again."]
    fields = [("double", {"n": 4}, False), ("double", {"n": "x"}, True), ("", "<x", True)]
    expected = [
        {**each, "name": name, "arguments": arguments, "result": result, "failed": failed}
        for each, result, (name, arguments, failed) in zip(calls, told, fields, strict=True)
    ]
    assert seen == [([expected], [told])]
    assert played.steps[-1].info["tools/failed"] == 2


def test_steps_before_an_unparsable_answer_are_kept():
    rollout, _ = episode(DOUBLE, "z", "a", goal=1, parser=lambda t: ParseResult(None if t == "z" else t, 0.0, "Again."))
    assert [(s.index, s.action, s.next_obs) for s in rollout.steps] == [
        (0, "let me see", "8"),
        (1, "z", "Again."),
        (2, "a", None),
    ]


def test_each_call_is_a_sample_with_its_own_tokens_and_the_episodes_credit():
    rollouts = [episode(DOUBLE, "a", goal=1, group="g")[0], episode("a", goal=2, group="g")[0]]
    assert [len(r.steps) for r in rollouts] == [2, 2]
    rollouts[1].steps[-1].reward = 0.0  # the lost game
    batch = batch_from_rollouts(rollouts, GroupNormalizedReturn(group_size=2))
    # Returns 1 and 0, mean 0.5: every call of the first episode has weight +0.5, of the second
    # -0.5.
    assert [item.weight for item in batch.items] == [0.5, 0.5, -0.5, -0.5]
    tokens = [list(b"let me see"), [97], [97], [97]]
    for item, completion in zip(batch.items, tokens, strict=True):
        acted = [token for token, mask in zip(item.input_ids, item.action_mask, strict=True) if mask]
        assert acted == completion
        assert len(item.actor_logps.token_logps) == len(completion)
    assert [bool(item.meta.get("intermediate_call")) for item in batch.items] == [True, False, False, False]
    for assigner in (EpisodicReturn(), MonteCarloReturn()):
        assert [item.weight for item in batch_from_rollouts(rollouts[:1], assigner).items] == [1.0, 1.0]


def test_no_two_calls_of_an_episode_share_a_seed():
    _, client = episode(DOUBLE, DOUBLE, "a", DOUBLE, DOUBLE, "b")
    seeds = [r.seed for r in client.requests]
    assert seeds[:3] == [5, call_seed(5, 1), call_seed(5, 2)]
    assert seeds[3] == derive_seed(5, 1)
    assert len(set(seeds)) == 6
    assert seeds == [r.seed for r in episode(DOUBLE, DOUBLE, "a", DOUBLE, DOUBLE, "b")[1].requests]


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 10))
def test_seeds_of_the_first_steps_calls_differ_from_those_of_later_steps(seed, step, call_number):
    assert call_seed(seed, 0) == seed
    assert call_seed(None, call_number) is None
    assert call_seed(seed, call_number) != derive_seed(seed, step)


@given(st.lists(st.sampled_from([DOUBLE, "a"]), min_size=1, max_size=12), st.integers(1, 4))
def test_every_model_call_is_exactly_one_step(answers, goal):
    rollout, client = episode(*answers, goal=goal)
    assert len(rollout.steps) == len(client.requests)
    assert [s.index for s in rollout.steps] == list(range(len(rollout.steps)))
    assert [s.trace.prompt_token_ids[1] for s in rollout.steps] == [n + 1 for n in range(len(client.requests))]
    acted = [s for s in rollout.steps if "intermediate_call" not in s.info]
    assert len(acted) == min(goal, 4)
