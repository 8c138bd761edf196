"""The contract that every environment satisfies: ours, and those of other libraries through
adapters."""

import asyncio
from importlib.util import find_spec
from random import Random

import pytest
from env_contract import SEED, Case, await_values, check_info, check_outcome, close, is_over, reset, step, transcript
from foreign_envs import CountdownClient, Password
from hypothesis import given, settings, strategies as st
from playing import FOR_RL, ScriptedClient, protocol, verbatim

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs import DatasetQAEnv
from ludic.envs.adapters import GymnasiumEnv, OpenEnvEnv, TextArenaEnv, VerifiersEnv
from ludic.interaction import TraceCollector
from ludic.tasks import Addition, DigitSort
from ludic.training.credit_assignment import MonteCarloReturn
from ludic.training.rollouts.to_samples import batch_from_rollouts
from ludic.types import Rollout, Step

LAKE = {"render_mode": "ansi", "action_names": ["left", "down", "right", "up"], "is_slippery": False}


def of_task(task):
    problem = task.draw(Random(0))
    return lambda: task.make_env(problem)


def first_free(shown):
    """Plays tic-tac-toe by taking the first cell in the latest list of moves."""
    return shown.rpartition("Available Moves:")[2].split("'")[1]


BUILT_IN = [
    Case("DatasetQAEnv", lambda: DatasetQAEnv({"question": "2+2?", "answer": "4"}), ["4"], seeds_matter=False),
    Case("DigitSort", of_task(DigitSort()), ["012459"], seeds_matter=False),
    Case("Addition", of_task(Addition()), ["7+8=15>85"], seeds_matter=False),
]
ADAPTERS = [
    Case("Gymnasium text", lambda: GymnasiumEnv(Password()), ["a", "??", "fgag"]),
    Case(
        "Gymnasium discrete",
        lambda: GymnasiumEnv("FrozenLake-v1", **LAKE),
        ["down", "down", "Right", "right", "nonsense", "down", "right"],
        seeds_matter=False,
    ),
    Case("Gymnasium time limit", lambda: GymnasiumEnv("Taxi-v4", max_episode_steps=3), ["0", "1", "x", "2"], "truncated"),
    Case("TextArena one player", lambda: TextArenaEnv("GuessTheNumber-v0"), ["[3]", "3", "[20]"]),
    Case(
        "TextArena two players",
        lambda: TextArenaEnv("TicTacToe-v0", num_players=2),
        ["[4]", "[0]", "junk", "[3]", "[8]", "[5]"],
        seeds_matter=False,
    ),
    Case(
        "TextArena against a function",
        lambda: TextArenaEnv("TicTacToe-v0", num_players=2, opponents={0: first_free}),
        ["[4]", "nowhere", "[2]", "[6]"],
        seeds_matter=False,
    ),
    Case("OpenEnv", lambda: OpenEnvEnv(CountdownClient()), ["4", "one", "3", "2", "1"]),
    Case("OpenEnv cut short", lambda: OpenEnvEnv(CountdownClient(limit=2)), ["4", "4"], "truncated"),
]
if find_spec("openenv"):
    from openenv_countdown import countdown_url

    ADAPTERS += [
        Case("OpenEnv server", lambda: OpenEnvEnv(countdown_url()), ["4", "one", "3", "2", "1"]),
        Case("OpenEnv server cut short", lambda: OpenEnvEnv(countdown_url(limit=2)), ["4", "4"], "truncated"),
    ]
if find_spec("verifiers"):
    from vf_sums import sums, until_right

    ADAPTERS += [
        Case("verifiers", lambda: VerifiersEnv(sums()), ["5"]),
        Case("verifiers in turns", lambda: VerifiersEnv(sums(), agent=until_right()), ["1", "2 or 3", "5"]),
        Case("verifiers cut short", lambda: VerifiersEnv(sums(), agent=until_right(max_turns=2)), ["1", "3"], "truncated"),
    ]
each = pytest.mark.parametrize("case", BUILT_IN + ADAPTERS, ids=lambda case: case.name)
each_adapter = pytest.mark.parametrize("case", ADAPTERS, ids=lambda case: case.name)


@each
async def test_reset_returns_an_observation_and_a_json_info_for_every_agent(case):
    env = case.make()
    observations = await reset(env)
    assert list(observations) == env.agent_ids
    for obs, info in observations.values():
        assert isinstance(obs, str)
        assert obs
        check_info(info)
    assert len(env.active_agents) == 1
    assert set(env.active_agents) <= set(env.agent_ids)
    assert await await_values(env.current_obs()) == {agent: obs for agent, (obs, _) in observations.items()}
    await close(env)


@each
async def test_the_moves_end_the_episode_as_expected_and_no_earlier(case):
    env = case.make()
    _, *steps = await transcript(env, case.moves)
    assert len(steps) == len(case.moves)
    assert not any(is_over(outcomes) for outcomes in steps[:-1])
    for outcomes in steps:
        for outcome in outcomes.values():
            check_outcome(outcome)
    assert list(steps[-1]) == env.agent_ids  # the end reaches every agent
    for outcome in steps[-1].values():
        assert (outcome.terminated, outcome.truncated) == (case.ends == "terminated", case.ends == "truncated")
    await close(env)


@each
async def test_the_same_seed_gives_the_same_episode(case):
    env, other = case.make(), case.make()
    first = await transcript(env, case.moves)
    assert await transcript(other, case.moves) == first
    assert await transcript(env, case.moves) == first  # nothing is left over from the previous episode
    await close(env)
    await close(other)


@each
async def test_another_seed_can_give_another_episode(case):
    env = case.make()
    played = [await transcript(env, case.moves, seed) for seed in range(10)]
    assert (len({str(episode) for episode in played}) > 1) == case.seeds_matter
    await close(env)


@each
async def test_an_abandoned_episode_does_not_affect_the_next(case):
    env = case.make()
    whole = await transcript(env, case.moves)
    await transcript(env, case.moves[: len(case.moves) // 2], seed=SEED + 1)
    assert await transcript(env, case.moves) == whole
    await close(env)


@each
async def test_a_step_after_the_end_is_refused_until_the_next_reset(case):
    env = case.make()
    episode = await transcript(env, case.moves)
    agent = env.agent_ids[0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            await await_values(env.step({agent: case.moves[-1]}))
    assert await transcript(env, case.moves) == episode
    await close(env)


@each_adapter
async def test_a_step_before_the_first_reset_is_refused(case):
    env = case.make()
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        await await_values(env.step({env.agent_ids[0]: case.moves[0]}))
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        await await_values(env.current_obs())
    await close(env)


@each_adapter
async def test_close_can_be_called_at_any_time_and_repeatedly(case):
    for moves in ([], case.moves[:1], case.moves):
        env = case.make()
        await transcript(env, moves)
        await close(env)
        await close(env)
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            await reset(env)
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            await await_values(env.step({env.agent_ids[0]: case.moves[0]}))
    await close(case.make())  # before the first reset


@each
async def test_garbage_actions_have_a_valid_outcome(case):
    env = case.make()
    for text in case.garbage:
        await reset(env)
        for _ in range(4):
            outcomes = await step(env, text)
            for outcome in outcomes.values():
                check_outcome(outcome)
            if is_over(outcomes):
                break
    assert len(await transcript(env, case.moves)) == len(case.moves) + 1  # and the next episode is normal
    await close(env)


@each
@settings(max_examples=25)
@given(moves=st.lists(st.text(max_size=12), min_size=1, max_size=6))
def test_no_text_can_break_an_episode(case, moves):
    async def play():
        env = case.make()
        for outcomes in (await transcript(env, moves))[1:]:
            for outcome in outcomes.values():
                check_outcome(outcome)
        await close(env)

    asyncio.run(play())


@each
async def test_an_episode_played_by_agents_gives_training_samples(case):
    env = case.make()
    if len(env.agent_ids) == 1:
        rollouts = await protocol(ScriptedClient(*case.moves)).run(
            env=env, max_steps=50, env_seed=SEED, sampling_seed=1, inference=FOR_RL
        )
        (rollout,) = rollouts
        assert rollout.meta["truncation_reason"] == (None if case.ends == "terminated" else "env")
        assert rollout.meta["episode_truncated"] == (case.ends == "truncated")
    else:
        rollouts = await play_by_turns(env, case.moves)
        assert len(rollouts) == len(env.agent_ids)
    batch = batch_from_rollouts(rollouts, MonteCarloReturn())
    assert len(batch.items) == len(case.moves)
    assert sorted(item.meta["action"] for item in batch.items) == sorted(case.moves)
    for item in batch.items:
        ids = list(item.meta["action"].encode())
        assert item.input_ids == [1, 2, *ids]
        assert item.action_mask == [0, 0] + [1] * len(ids)
        assert item.actor_logps.token_logps == [-0.5] * len(ids)
    await close(env)


async def play_by_turns(env, moves) -> list[Rollout]:
    """Play through the multi-agent interface with one agent per player: the active one acts, and
    everyone who has an outcome receives it."""
    client = ScriptedClient(*moves)
    agents = {name: Agent(client=client, model="m", ctx=FullDialog(), parser=verbatim) for name in env.agent_ids}
    observations = {}
    for name, (obs, info) in (await reset(env)).items():
        agents[name].reset()
        agents[name].on_env_reset(obs, info)
        observations[name] = obs
    collector = TraceCollector()
    for index in range(len(moves)):
        (name,) = env.active_agents
        parsed, raw, info, trace = await agents[name].act(inference=FOR_RL)
        outcomes = await await_values(env.step({name: parsed.action}))
        outcome = outcomes[name]
        step = Step(
            index, observations[name], raw, outcome.obs, outcome.reward, outcome.truncated, outcome.terminated, info, trace
        )
        collector.add(name, step)
        for other, outcome in outcomes.items():
            agents[other].on_after_step(outcome.obs, outcome.info)
            observations[other] = outcome.obs
    assert env.active_agents == []
    return collector.extract_rollouts_with_per_agent_status()
