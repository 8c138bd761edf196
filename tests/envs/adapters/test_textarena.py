"""TextArena's games: who sees what, who gets which reward, and where randomness comes from."""

import random

import numpy as np
import pytest
import textarena

from ludic.envs.adapters import TextArenaEnv
from ludic.errors import ConfigError, RolloutError


def play(env, *moves, seed=0):
    env.reset(seed=seed)
    return [env.step({env.active_agents[0]: move}) for move in moves]


def test_the_loser_sees_the_last_move_and_gets_the_loss():
    last = play(TextArenaEnv("TicTacToe-v0", num_players=2), "[0]", "[3]", "[1]", "[4]", "[2]")[-1]
    assert {name: (outcome.reward, outcome.terminated) for name, outcome in last.items()} == {
        "player_0": (1.0, True),
        "player_1": (-1.0, True),
    }
    assert "[Player 0] [2]\nPlayer 0 placed their symbol (O) in cell 2." in last["player_1"].obs
    assert last["player_1"].info["reason"] == "Player 0 has won!"


def test_a_player_sees_everything_once_and_never_its_own_move():
    env = TextArenaEnv("TicTacToe-v0", num_players=2)
    steps = play(env, "[0]", "[3]", "[1]")
    told = [outcomes["player_0"].obs for outcomes in steps]
    assert ["Player 0 placed" in obs for obs in told] == [True, False, True]
    assert ["Player 1 placed" in obs for obs in told] == [False, True, False]
    assert not any("[Player 0]" in obs or "Your goal" in obs for obs in told)
    assert env.current_obs()["player_0"] == told[-1]


def test_the_active_agent_follows_the_game():
    env = TextArenaEnv("TicTacToe-v0", num_players=2)
    assert env.active_agents == []
    env.reset(seed=0)
    assert env.active_agents == ["player_0"]
    env.step({"player_0": "[0]"})
    assert env.active_agents == ["player_1"]
    with pytest.raises(RolloutError, match=r"player_1; step\(\) .*moves of \['player_0'\]"):
        env.step({"player_0": "[1]"})
    env.step({"player_1": "junk", "player_0": "[1]"})  # a move out of turn never reaches the game
    assert env.active_agents == ["player_1"]


def test_the_game_judges_moves_against_its_rules():
    warned, lost = play(TextArenaEnv("TicTacToe-v0", num_players=2), "junk", "[9]")
    assert warned["player_0"].info == {"player": 0, "invalid_move": True}
    assert "attempted an invalid move" in warned["player_0"].obs
    assert "invalid move" not in warned["player_1"].obs
    assert not warned["player_0"].terminated
    assert (lost["player_0"].reward, lost["player_1"].reward) == (-1.0, 1.0)
    assert lost["player_0"].info["invalid_move"] is True


def test_the_games_own_turn_limit_is_a_termination():
    env = TextArenaEnv("GuessTheNumber-v0", max_turns=2)
    outcome = play(env, "[1]", "[2]", "[3]", seed=5)[-1]["player_0"]  # the number is 20
    assert (outcome.terminated, outcome.truncated) == (True, False)
    assert outcome.reward == pytest.approx(1 - (20 - 3) / 19)
    assert outcome.info["reason"].startswith("The turn limit has been reached.")
    assert outcome.obs == "The target number is higher."


def test_a_function_can_play_the_other_side():
    shown = []

    def second(text):
        shown.append(text)
        return f"[{2 + len(shown)}]"

    env = TextArenaEnv("TicTacToe-v0", num_players=2, opponents={1: second})
    assert env.agent_ids == ["player_0"]
    first, last = play(env, "[0]", "[1]")
    assert shown[0].startswith("You are Player 1 in Tic Tac Toe.")
    assert "You are Player" not in shown[1]
    assert first.keys() == {"player_0"}
    assert "Player 0 placed" in first["player_0"].obs
    assert "Player 1 placed their symbol (X) in cell 3." in first["player_0"].obs
    assert not last["player_0"].terminated
    assert env.step({"player_0": "[2]"})["player_0"].reward == 1.0
    assert len(shown) == 2


def test_an_opponents_random_draws_follow_the_seed():
    def anywhere(text):
        return f"[{random.randrange(9)}{np.random.randint(1, 2) * 0 or ''}]"

    env = TextArenaEnv("TicTacToe-v0", num_players=2, opponents={0: anywhere})
    first = {seed: env.reset(seed=seed) for seed in range(8)}
    assert {seed: env.reset(seed=seed) for seed in reversed(range(8))} == first
    assert len({str(seen) for seen in first.values()}) > 3


def test_games_use_no_global_and_no_shared_random_state():
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    alone = [play(TextArenaEnv("Bandit-v0"), "[red]", "[red]", "[blue]", seed=seed) for seed in (3, 4)]
    random.seed(1)
    np.random.seed(1)
    envs = [TextArenaEnv("Bandit-v0") for _ in range(2)]
    for env, seed in zip(envs, (3, 4), strict=True):
        env.reset(seed=seed)
    together = [[env.step({"player_0": move}) for env in envs] for move in ("[red]", "[red]", "[blue]")]
    assert [list(steps) for steps in zip(*together, strict=True)] == alone
    assert (random.random(), np.random.random()) == expected


def test_episodes_without_a_seed_differ():
    env = TextArenaEnv("GuessTheNumber-v0")
    hints = set()
    for _ in range(40):
        env.reset()
        hints.add(env.step({"player_0": "[10]"})["player_0"].obs)
    assert len(hints) > 1


class Fragile(textarena.Env):
    """Draws a card per turn. Crashes on the move `crash` after it has drawn; if `broken`, crashes
    on every move."""

    broken = False

    def reset(self, num_players, seed=None):
        self.state = textarena.TwoPlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: f"p{player_id}")

    def step(self, action):
        self.state.add_observation(f"card {random.randrange(10**6)}", textarena.ObservationType.GAME_MESSAGE)
        if action == "crash" or self.broken:
            raise ZeroDivisionError("deep inside")
        if not action:
            self.state.set_invalid_move(reason="empty")
        return self.state.step()


def test_a_move_that_crashes_the_game_becomes_an_empty_move_in_a_restored_game():
    def moves(*texts):
        env = TextArenaEnv(Fragile, num_players=2)
        return play(env, *texts, seed=9)

    fell, after = moves("a", "b", "crash", "c")[2:]
    assert fell["player_0"].info == {"player": 0, "game_error": "ZeroDivisionError: deep inside", "invalid_move": True}
    assert "attempted an invalid move. Reason: empty" in fell["player_0"].obs
    expected_fell, expected_after = moves("a", "b", "", "c")[2:]
    assert fell["player_0"].obs == expected_fell["player_0"].obs  # the restored game draws the same cards again
    assert fell["player_1"] == expected_fell["player_1"]
    assert after == expected_after


def test_a_game_that_crashes_on_every_move_raises_and_is_over():
    env = TextArenaEnv(Fragile, num_players=2)
    env.reset(seed=0)
    env._game.broken = True
    Fragile.broken = True
    try:
        with pytest.raises(RolloutError, match=r"ZeroDivisionError: deep inside .*'a', .*empty one"):
            env.step({"player_0": "a"})
    finally:
        Fragile.broken = False
    with pytest.raises(RolloutError, match="has ended its episode"):
        env.step({"player_0": "a"})
    assert env.reset(seed=0)["player_0"][0] == "p0"


@pytest.mark.parametrize("opponents", [{2: str}, {0: str, 1: str}, {-1: str}])
def test_opponents_must_be_players_and_leave_one_for_the_agent(opponents):
    with pytest.raises(ConfigError, match=r"opponents \(.*\) must be among 0 to 1"):
        TextArenaEnv("TicTacToe-v0", num_players=2, opponents=opponents)


def test_opponents_that_end_the_game_at_once_are_an_error():
    env = TextArenaEnv("TicTacToe-v0", num_players=2, opponents={0: lambda text: "junk"})
    with pytest.raises(RolloutError, match="before an agent could move"):
        env.reset(seed=0)


def test_the_error_of_an_unknown_game_names_it_immediately():
    with pytest.raises(ConfigError, match="TextArena has no game 'TicTacTow-v0'"):
        TextArenaEnv("TicTacTow-v0")
    with pytest.raises(ConfigError, match=r"settings \(\['size'\]\) need the id of a game"):
        TextArenaEnv(Fragile, size=3)
