"""Several agents in one environment: taking turns, acting together, and against opponents that the
environment plays."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from playing import FOR_RL, Counting, ScriptedClient, play, tiny_model, verbatim
from tool_playing import CallingClient, call

from ludic.agents import Agent, ReActAgent
from ludic.context import FullDialog
from ludic.envs import LudicEnv
from ludic.errors import ConfigError
from ludic.inference import LocalChatClient
from ludic.inference.request import agent_seed
from ludic.interaction import MultiAgentProtocol
from ludic.models.byte_tokenizer import make_line_tokenizer
from ludic.parsers import ParseResult
from ludic.training import EnvSpec, GroupNormalizedReturn, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.training.rollouts.requests import GRPORequestStrategy
from ludic.types import StepOutcome


def outcome(obs="", reward=0.0, *, ends=False, cut=False, **info):
    return StepOutcome(obs, reward, cut, ends, info)


class ScriptedEnv(LudicEnv[str, str, str]):
    """Plays a script: for every turn, the active agents and the outcome of each. Records the
    actions it receives."""

    def __init__(self, first, *turns, ids=("x", "o")):
        self.first, self.turns, self.ids = first, turns, list(ids)
        self.actions, self.seed = [], None

    @property
    def agent_ids(self):
        return self.ids

    @property
    def active_agents(self):
        return list(self.turns[len(self.actions)][0]) if len(self.actions) < len(self.turns) else []

    def reset(self, *, seed=None):
        self.seed = seed
        return {agent_id: (obs, {}) for agent_id, obs in self.first.items()}

    def step(self, actions):
        answers = self.turns[len(self.actions)][1]
        self.actions.append(dict(actions))
        return answers


def strict(text):
    return ParseResult(None, -1.0, "Say a move.") if text == "z" else ParseResult(text, 0.25, None)


def agent(client, **settings):
    return Agent(client=client, model="m", ctx=settings.pop("ctx", None) or FullDialog(), **{"parser": verbatim, **settings})


def run(env, clients, max_steps=10, **settings):
    agents = {agent_id: agent(client, **settings) for agent_id, client in clients.items()}
    rollouts = play(MultiAgentProtocol(agents).run(env=env, max_steps=max_steps, env_seed=3, sampling_seed=11, inference=FOR_RL))
    return {r.meta["agent_id"]: r for r in rollouts}, agents


def messages_of(acting):
    return [(m["role"], m["content"]) for m in acting._ctx.messages]


def transitions_of(rollout):
    return [(s.index, s.prev_obs, s.action, s.next_obs, s.reward, s.terminated, s.truncated) for s in rollout.steps]


def a_game():
    """X moves, O moves, X wins: a zero-sum game in which the loser does not act last."""
    return ScriptedEnv(
        {"x": "you begin", "o": "wait"},
        ("x", {"x": outcome("wait"), "o": outcome("x played 1")}),
        ("o", {"o": outcome("wait"), "x": outcome("o played 2")}),
        ("x", {"x": outcome("won", 1.0, ends=True, result="win"), "o": outcome("lost", -1.0, ends=True, result="loss")}),
    )


def test_the_player_who_did_not_act_last_gets_the_moves_and_the_final_reward():
    env, x, o = a_game(), ScriptedClient("1", "3"), ScriptedClient("2")
    rollouts, agents = run(env, {"x": x, "o": o})
    assert env.seed == 3
    assert env.actions == [{"x": "1"}, {"o": "2"}, {"x": "3"}]
    assert transitions_of(rollouts["x"]) == [
        (0, "you begin", "1", "wait\n\no played 2", 0.0, False, False),
        (2, "wait\n\no played 2", "3", None, 1.0, True, False),
    ]
    assert transitions_of(rollouts["o"]) == [(1, "wait\n\nx played 1", "2", None, -1.0, True, False)]
    assert (rollouts["o"].total_reward, rollouts["o"].steps[-1].info["result"]) == (-1.0, "loss")
    assert sum(r.total_reward for r in rollouts.values()) == 0.0
    assert [m["content"] for m in o.requests[0].messages] == ["wait\n\nx played 1"]
    assert messages_of(agents["x"]) == [
        ("user", "you begin"),
        ("assistant", "1"),
        ("user", "wait\n\no played 2"),
        ("assistant", "3"),
    ]
    assert messages_of(agents["o"]) == [("user", "wait\n\nx played 1"), ("assistant", "2"), ("user", "wait")]


def test_each_rollout_records_its_agent_and_its_end():
    rollouts, _ = run(a_game(), {"x": ScriptedClient("1"), "o": ScriptedClient("2")})
    assert rollouts["o"].meta == {
        "protocol": "MultiAgentProtocol",
        "env_name": "ScriptedEnv",
        "agents": ["x", "o"],
        "agent_id": "o",
        "episode_truncated": False,
        "truncation_reason": None,
    }
    assert rollouts["x"].id != rollouts["o"].id
    assert rollouts["x"].steps[0].info["parsed_action"] == "1"
    assert rollouts["x"].steps[0].trace.completion_token_ids == [49]


def test_termination_on_a_bots_turn_terminates_the_agents_rollout():
    env = ScriptedEnv({"x": "go"}, ("x", {"x": outcome("", 0.5)}), ("o", {"x": outcome("lost", -1.0, ends=True)}))
    rollouts, agents = run(env, {"x": ScriptedClient("1")})
    assert env.actions == [{"x": "1"}, {}]
    assert transitions_of(rollouts["x"]) == [(0, "go", "1", None, -0.5, True, False)]
    assert messages_of(agents["x"]) == [("user", "go"), ("assistant", "1")]


def test_truncation_on_a_bots_turn_is_the_environments():
    env = ScriptedEnv({"x": "go"}, ("x", {"x": outcome()}), ("o", {"x": outcome("late", cut=True)}))
    rollouts, _ = run(env, {"x": ScriptedClient("1")})
    assert (rollouts["x"].meta["episode_truncated"], rollouts["x"].meta["truncation_reason"]) == (True, "env")
    assert "truncation_reason" not in rollouts["x"].steps[-1].info


def test_a_bot_can_move_first():
    env = ScriptedEnv({"x": "new game"}, ("o", {"x": outcome("o played 5")}), ("x", {"x": outcome("won", 1.0, ends=True)}))
    rollouts, agents = run(env, {"x": ScriptedClient("1")})
    assert transitions_of(rollouts["x"]) == [(1, "new game\n\no played 5", "1", None, 1.0, True, False)]
    assert messages_of(agents["x"])[0] == ("user", "new game\n\no played 5")


def test_players_who_act_together_are_called_concurrently():
    both = asyncio.Event()
    waiting = []

    async def until_both_are_asked():
        waiting.append(1)
        if len(waiting) == 2:
            both.set()
        await both.wait()

    env = ScriptedEnv({"x": "?", "o": "?"}, ("xo", {"x": outcome(reward=1.0, ends=True), "o": outcome(reward=-1.0, ends=True)}))
    clients = {k: ScriptedClient(k, delay=until_both_are_asked) for k in "xo"}
    rollouts, _ = run(env, clients)
    assert env.actions == [{"x": "x", "o": "o"}]
    assert [rollouts[k].total_reward for k in "xo"] == [1.0, -1.0]


def test_an_unparsable_answer_is_left_out_of_the_turn():
    env = ScriptedEnv(
        {"x": "?", "o": "?"},
        ("xo", {"x": outcome("round 1", 2.0), "o": outcome("round 1")}),
        ("xo", {"x": outcome(ends=True), "o": outcome(ends=True)}),
    )
    x = ScriptedClient("z", "1")
    rollouts, agents = run(env, {"x": x, "o": ScriptedClient("2")}, parser=strict)
    assert env.actions == [{"o": "2"}, {"x": "1", "o": "2"}]
    failed, last = rollouts["x"].steps
    assert (failed.action, failed.reward, failed.info["parse_error"]) == ("z", 1.0, True)  # -1 from the parser, 2 from the turn
    assert failed.next_obs == last.prev_obs == "Say a move.\n\nround 1"
    assert messages_of(agents["x"])[2] == ("user", "Say a move.\n\nround 1")


def test_without_a_valid_action_the_environment_is_not_stepped():
    env = ScriptedEnv({"x": "?", "o": "?"}, ("x", {"x": outcome("won", 1.0, ends=True), "o": outcome(ends=True)}))
    rollouts, _ = run(env, {"x": ScriptedClient("z", "1"), "o": ScriptedClient("2")}, parser=strict)
    assert env.actions == [{"x": "1"}]
    assert transitions_of(rollouts["x"])[0] == (0, "?", "z", "Say a move.", -1.0, False, False)
    assert set(rollouts) == {"x"}  # o never acted


def test_termination_reaches_a_player_whose_answer_could_not_be_parsed():
    env = ScriptedEnv({"x": "?", "o": "?"}, ("xo", {"x": outcome("lost", -1.0, ends=True), "o": outcome("won", 1.0, ends=True)}))
    rollouts, _ = run(env, {"x": ScriptedClient("z"), "o": ScriptedClient("2")}, parser=strict)
    assert transitions_of(rollouts["x"]) == [(0, "?", "z", "Say a move.", -2.0, True, False)]


def test_a_step_with_a_later_outcome_is_not_lost():
    env = ScriptedEnv(
        {"x": "go"},
        ("x", {"o": outcome("x played")}),
        ("o", {"x": outcome("o played", 0.5)}),
        ("x", {"x": outcome("", 1.0, ends=True)}),
    )
    rollouts, _ = run(env, {"x": ScriptedClient("1", "2"), "o": ScriptedClient("3")}, parser=strict)
    assert transitions_of(rollouts["x"]) == [
        (
            0,
            "go",
            "1",
            "o played",
            0.75,
            False,
            False,
        ),  # 0.25 from the parser immediately, 0.5 from the environment one turn later
        (2, "o played", "2", None, 1.25, True, False),
    ]
    assert transitions_of(rollouts["o"]) == [(1, "x played", "3", None, 0.25, False, False)]


def test_a_reward_before_the_first_step_is_not_lost():
    env = ScriptedEnv(
        {"x": "?", "o": "?"}, ("x", {"x": outcome(), "o": outcome("", 0.5)}), ("o", {"o": outcome("", 1.0, ends=True)})
    )
    rollouts, _ = run(env, {"x": ScriptedClient("1"), "o": ScriptedClient("2")})
    assert rollouts["o"].total_reward == 1.5


def test_only_players_whose_steps_run_out_are_truncated():
    env = ScriptedEnv(
        {"x": "?", "o": "?"},
        ("xo", {"x": outcome("out", ends=True), "o": outcome("on")}),
        *[("o", {"o": outcome("on")})] * 5,
    )
    rollouts, agents = run(env, {"x": ScriptedClient("1"), "o": ScriptedClient("2")}, max_steps=2)
    assert [rollouts[k].meta["truncation_reason"] for k in "xo"] == [None, "max_steps"]
    last = rollouts["o"].steps[-1]
    assert (last.truncated, last.next_obs, last.info["truncation_reason"]) == (True, None, "max_steps")
    assert not rollouts["o"].steps[0].truncated
    assert messages_of(agents["o"])[-1] == ("user", "on")


def test_a_game_without_active_agents_is_not_truncated_by_max_steps():
    env = ScriptedEnv({"x": "?"}, ("x", {"x": outcome("fine", 1.0)}))
    rollouts, _ = run(env, {"x": ScriptedClient("1")})
    assert transitions_of(rollouts["x"]) == [(0, "?", "1", "fine", 1.0, False, False)]
    assert rollouts["x"].meta["episode_truncated"] is False


def test_a_parse_error_on_the_last_step_keeps_its_feedback():
    env = ScriptedEnv({"x": "?"}, ("x", {}))
    rollouts, _ = run(env, {"x": ScriptedClient("z")}, max_steps=1, parser=strict)
    assert (rollouts["x"].steps[-1].next_obs, rollouts["x"].steps[-1].truncated) == ("Say a move.", True)


class Suggesting(ScriptedEnv):
    suggested_sysprompt = "Play well."


def test_the_agents_system_prompt_overrides_the_environments():
    x, o = ScriptedClient("1"), ScriptedClient("2")
    agents = {"x": agent(x, ctx=FullDialog("Mine.")), "o": agent(o)}
    env = Suggesting({"x": "?", "o": "?"}, ("xo", {"x": outcome(ends=True), "o": outcome(ends=True)}))
    play(MultiAgentProtocol(agents).run(env=env, max_steps=1))
    assert [c.requests[0].messages[0]["content"] for c in (x, o)] == ["Mine.", "Play well."]


def test_reused_agents_start_with_an_empty_context():
    x = ScriptedClient("1")
    agents = {"x": agent(x), "o": agent(ScriptedClient("2"))}
    for _ in range(2):
        # o gets no first observation but is reset as well
        env = ScriptedEnv({"x": "?"}, ("x", {"x": outcome(), "o": outcome("x played")}), ("o", {"o": outcome(ends=True)}))
        play(MultiAgentProtocol(agents).run(env=env, max_steps=5))
    assert messages_of(agents["o"]) == [("user", "x played"), ("assistant", "2")]


class Waiting(ScriptedEnv):
    """All of its methods are coroutine functions."""

    async def reset(self, *, seed=None):
        await asyncio.sleep(0)
        return ScriptedEnv.reset(self, seed=seed)

    async def step(self, actions):
        await asyncio.sleep(0)
        return ScriptedEnv.step(self, actions)


class WaitingParts(ScriptedEnv):
    """Each agent's part of the result is a coroutine."""

    def step(self, actions):
        async def later(part):
            return part

        return {agent_id: later(part) for agent_id, part in ScriptedEnv.step(self, actions).items()}


@pytest.mark.parametrize("kind", [Waiting, WaitingParts])
def test_environments_may_be_asynchronous(kind):
    game = a_game()
    rollouts, _ = run(kind(game.first, *game.turns), {"x": ScriptedClient("1", "3"), "o": ScriptedClient("2")})
    assert [rollouts[k].total_reward for k in "xo"] == [1.0, -1.0]


def test_a_single_agent_environment_can_be_played():
    rollouts, _ = run(Counting(goal=2), {"agent_0": ScriptedClient("a", "b")})
    assert [s.next_obs for s in rollouts["agent_0"].steps] == ["step 1", None]
    assert rollouts["agent_0"].total_reward == 1.0


def test_the_error_of_unknown_agents_names_them():
    with pytest.raises(ConfigError, match=r"agents \['y'\] must be among \['o', 'x'\]"):
        run(a_game(), {"y": ScriptedClient("1")})
    with pytest.raises(ConfigError, match="agents is empty"):
        MultiAgentProtocol({})


def test_one_failure_cancels_the_other_calls_and_is_raised_unchanged():
    cancelled = []

    async def forever():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fails():
        raise ValueError("the model broke")

    env = ScriptedEnv({"x": "?", "o": "?"}, ("xo", {}))
    with pytest.raises(ValueError, match="the model broke"):
        run(env, {"x": ScriptedClient("1", delay=forever), "o": ScriptedClient("2", delay=fails)})
    assert cancelled == [True]


def test_a_slow_model_call_times_out():
    async def forever():
        await asyncio.Event().wait()

    protocol = MultiAgentProtocol({"x": agent(ScriptedClient("1", delay=forever))})
    with pytest.raises(TimeoutError):
        play(protocol.run(env=ScriptedEnv({"x": "?"}, ("x", {})), max_steps=1, timeout_s=0.02))


def endless(ids="xo"):
    return ScriptedEnv(dict.fromkeys(ids, "?"), *[(ids, {k: outcome() for k in ids})] * 4, ids=ids)


def test_every_agent_has_its_own_sampling_seed_on_every_turn_in_any_order():
    def seeds(order):
        clients = {k: ScriptedClient("1") for k in order}
        run(endless(), clients, max_steps=4)
        return {k: [r.seed for r in clients[k].requests] for k in order}

    first = seeds("xo")
    assert len({*first["x"], *first["o"]}) == 8
    assert first == seeds("ox")  # reproducible in any order
    assert first["x"] == [agent_seed(11, "x", turn) for turn in range(4)]
    assert agent_seed(None, "x", 1) is None
    members = {agent_seed(base, name, turn) for base in range(64) for name in "xo" for turn in range(10)}
    assert len(members) == 64 * 2 * 10
    assert all(0 <= seed < 2**31 for seed in members)


def test_tool_calls_of_a_player_are_steps_of_its_rollout():
    def look() -> str:
        return "1 is free"

    client = CallingClient(("look first", [call("look")]), "1", "2")
    reasoning = ReActAgent([look], client=client, model="m", ctx=FullDialog(), parser=verbatim)
    env = ScriptedEnv({"x": "go", "o": "?"}, *[("x", {"x": outcome("on")}), ("x", {"x": outcome("", 1.0, ends=True)})])
    (rollout,) = play(MultiAgentProtocol({"x": reasoning}).run(env=env, max_steps=5))
    assert [(s.index, s.prev_obs, s.action, s.next_obs, s.reward) for s in rollout.steps] == [
        (0, "go", "look first", "1 is free", 0.0),
        (1, "1 is free", "1", "on", 0.0),
        (2, "on", "2", None, 1.0),
    ]


class Nim(LudicEnv[str, str, str]):
    """Two players take turns to remove one or two sticks; whoever takes the last one wins. Both see
    everything."""

    agent_ids = ("x", "o")

    def __init__(self, sticks):
        self.sticks, self.turn, self.log = sticks, 0, []

    @property
    def active_agents(self):
        return [self.agent_ids[self.turn % 2]] if self.sticks > 0 else []

    def reset(self, *, seed=None):
        return {"x": (f"{self.sticks} sticks", {}), "o": (f"{self.sticks} sticks", {})}

    def step(self, actions):
        ((mover, action),) = actions.items()
        self.sticks -= int(action)
        self.turn += 1
        self.log.append(f"{mover} took {action}")
        done = self.sticks <= 0
        return {k: StepOutcome(self.log[-1], (1.0 if k == mover else -1.0) if done else 0.0, False, done) for k in self.agent_ids}


@given(
    sticks=st.integers(1, 9),
    moves=st.lists(st.sampled_from("12z"), min_size=2, max_size=12).filter(lambda m: set(m) != {"z"}),
    max_steps=st.integers(1, 14),
)
def test_both_players_receive_the_whole_game(sticks, moves, max_steps):
    env = Nim(sticks)
    parser = lambda text: ParseResult(None, 0.0, "1 or 2!") if text == "z" else ParseResult(text, 0.0, None)  # noqa: E731
    clients = {"x": ScriptedClient(*moves), "o": ScriptedClient(*moves[::-1])}
    rollouts, agents = run(env, clients, max_steps=max_steps, parser=parser)
    if env.sticks <= 0:
        assert sum(r.total_reward for r in rollouts.values()) in ((0.0,) if len(rollouts) == 2 else (1.0,))
        assert all(r.steps[-1].terminated for r in rollouts.values())
    else:
        assert all(r.meta["truncation_reason"] == "max_steps" for r in rollouts.values())
    assert sum(len(r.steps) for r in rollouts.values()) == sum(len(c.requests) for c in clients.values()) <= max_steps
    for agent_id, rollout in rollouts.items():
        assert all(before.next_obs == after.prev_obs for before, after in pairwise(rollout.steps))
        assert all(before.index < after.index for before, after in pairwise(rollout.steps))
        roles = [role for role, _ in messages_of(agents[agent_id])]
        assert roles == ["user" if i % 2 == 0 else "assistant" for i in range(len(roles))]
        seen = "\n\n".join(content for role, content in messages_of(agents[agent_id]) if role == "user")
        heard = env.log if env.sticks > 0 else env.log[:-1]
        assert [line for line in seen.split("\n\n") if "took" in line] == heard


def test_a_group_of_games_has_a_baseline_for_each_player():
    """Regression test: two rollouts per episode made a group of twice its size, and credit
    assignment raised an error."""
    client = LocalChatClient(tiny_model(max_position_embeddings=256), make_line_tokenizer())

    def make():
        return MultiAgentProtocol(
            {
                k: agent(
                    client,
                    parser=lambda text: ParseResult(str(1 + len(text) % 2), 0.0, None),
                    reject_incomplete_completions=False,
                )
                for k in "xo"
            }
        )

    engine = RolloutEngine(env_registry={"nim": lambda: Nim(3)}, protocol_registry={"two": make})
    base = RolloutRequest(env=EnvSpec("nim"), protocol=ProtocolSpec("two"), env_seed=1, sampling_seed=5, inference=FOR_RL)
    requests = GRPORequestStrategy(4).expand([base])
    batch = play(engine.generate_batch(requests, credit_assigner=GroupNormalizedReturn(4), max_steps=10))
    assert batch.meta["target_rollouts"] == 8
    returns = {(i.meta["agent_id"], i.meta["rollout_id"]): (i.meta["total_reward"], i.weight) for i in batch.items}
    for player in "xo":
        own = [value for (name, _), value in returns.items() if name == player]
        mean = sum(total for total, _ in own) / 4
        assert [weight for _, weight in own] == pytest.approx([total - mean for total, _ in own])
    assert all(item.actor_logps is not None for item in batch.items)
