"""Two agents on one board."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, strategies as st
from playing import ScriptedClient, verbatim

from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.envs.tictactoe import MoveText, TwoPlayerTicTacToeEnv, legal_moves, winner
from ludic.errors import ConfigError, RolloutError
from ludic.interaction import MultiAgentProtocol


def play_moves(env, *moves):
    """The outcomes of the last move."""
    outcomes = {}
    for move in moves:
        [mark] = env.active_agents
        outcomes = env.step({mark: str(move)})
    return outcomes


def test_each_player_sees_the_opponents_move_before_its_own():
    env = TwoPlayerTicTacToeEnv(text=MoveText())
    assert {mark: obs for mark, (obs, _) in env.reset(seed=0).items()} == {"X": "X:.>"}
    assert {mark: outcome.obs for mark, outcome in env.step({"X": "5"}).items()} == {"O": "O:5>"}
    assert {mark: outcome.obs for mark, outcome in env.step({"O": "1"}).items()} == {"X": ":1>"}
    assert env.active_agents == ["X"]


def test_the_loser_gets_its_outcome_although_the_winner_moved_last():
    env = TwoPlayerTicTacToeEnv()
    env.reset()
    outcomes = play_moves(env, "A1", "B1", "A2", "B2", "A3")  # X completes the first row
    assert {mark: (o.reward, o.terminated, o.info["result"]) for mark, o in outcomes.items()} == {
        "X": (1.0, True, "win"),
        "O": (0.0, True, "loss"),
    }
    assert env.active_agents == []
    with pytest.raises(RolloutError, match="the turn of nobody"):
        env.step({"O": "C1"})


def test_a_full_board_is_a_draw_for_both():
    env = TwoPlayerTicTacToeEnv(draw_reward=0.25)
    env.reset()
    outcomes = play_moves(env, 1, 5, 9, 2, 8, 7, 3, 6, 4)  # X O X / X O O / O X X has no line of three
    assert [(o.reward, o.info["drawn"], o.info["won"]) for o in outcomes.values()] == [(0.25, True, False)] * 2


@pytest.mark.parametrize("move", ["A1", "10", ""])
def test_an_illegal_move_costs_only_its_player(move):
    env = TwoPlayerTicTacToeEnv()
    env.reset()
    outcomes = play_moves(env, "A1", move)
    assert {mark: (o.reward, o.info["result"], o.info["illegal_move"]) for mark, o in outcomes.items()} == {
        "O": (-1.0, "illegal", True),
        "X": (0.5, "forfeit", False),
    }


def test_only_the_active_player_may_move():
    env = TwoPlayerTicTacToeEnv()
    env.reset()
    for actions in ({"O": "A1"}, {"X": "A1", "O": "A2"}, {}):
        with pytest.raises(RolloutError, match=r"the turn of \['X'\]"):
            env.step(actions)


def test_the_opening_follows_from_the_seed_and_says_who_moves_first():
    def opening(seed, moves):
        env = TwoPlayerTicTacToeEnv(text=MoveText(), random_moves=moves)
        return env.reset(seed=seed), env.board

    assert opening(3, 3) == opening(3, 3)
    assert len({opening(seed, 3)[1] for seed in range(20)}) > 10
    for moves in range(5):
        first, board = opening(7, moves)
        assert 9 - board.count(".") == moves
        assert list(first) == ["XO"[moves % 2]]
    with pytest.raises(ConfigError, match=r"random_moves \(5\)"):
        TwoPlayerTicTacToeEnv(random_moves=5)


@given(st.integers(0, 2**32), st.integers(0, 4))
def test_any_game_of_legal_moves_ends_with_the_result_on_the_board(seed, random_moves):
    rng, env, outcomes = Random(seed), TwoPlayerTicTacToeEnv(random_moves=random_moves), {}
    env.reset(seed=seed)
    while env.active_agents:
        outcomes = play_moves(env, rng.choice(legal_moves(env.board)) + 1)
    won = winner(env.board)
    assert {mark: o.info["result"] for mark, o in outcomes.items()} == {
        mark: "draw" if won is None else "win" if mark == won else "loss" for mark in "XO"
    }
    assert sum(outcome.reward for outcome in outcomes.values()) == 1.0


def test_one_policy_plays_both_sides_and_each_rollout_has_its_own_reward():
    """What a player misses while the other acts is in its next observation, and the end reaches
    both."""
    client = ScriptedClient("1", "4", "2", "5", "3")
    agents = {mark: Agent(client=client, model="m", ctx=FullDialog(), parser=verbatim) for mark in "XO"}
    env = TwoPlayerTicTacToeEnv(text=MoveText(), system_prompt=None)
    rollouts = asyncio.run(MultiAgentProtocol(agents).run(env=env, max_steps=9))
    by_mark = {rollout.meta["agent_id"]: rollout for rollout in rollouts}
    assert {mark: rollout.total_reward for mark, rollout in by_mark.items()} == {"X": 1.0, "O": 0.0}
    assert [step.action for step in by_mark["X"].steps] == ["1", "2", "3"]
    assert by_mark["O"].steps[-1].info["result"] == "loss"
    prompts = [[message["content"] for message in request.messages] for request in client.requests]
    assert prompts[2] == ["X:.>", "1", ":4>"]  # as against an opponent that the environment plays
    assert prompts[3] == ["O:1>", "4", ":2>"]
