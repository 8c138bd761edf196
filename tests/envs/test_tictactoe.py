"""Tic-tac-toe: rules by hand, perfect play and opponents by property, the environment by whole
games."""

import random
from random import Random

import pytest
from hypothesis import given, strategies as st

from ludic.envs.tictactoe import (
    EMPTY,
    BoardText,
    MixedOpponent,
    MoveText,
    PerfectOpponent,
    RandomOpponent,
    TicTacToeEnv,
    cell_name,
    legal_moves,
    optimal_moves,
    play,
    read_cell,
    to_move,
    value,
    winner,
)
from ludic.errors import ConfigError, DataError, RolloutError

seeds = st.integers(0, 2**32)


def reachable() -> set[str]:
    found, frontier = {EMPTY}, [EMPTY]
    while frontier:
        board = frontier.pop()
        for cell in legal_moves(board):
            after = play(board, cell)
            if after not in found:
                found.add(after)
                frontier.append(after)
    return found


@st.composite
def positions(draw) -> str:
    """A position that is not over, reached by random moves."""
    board = EMPTY
    for _ in range(draw(st.integers(0, 8))):
        after = play(board, draw(st.sampled_from(legal_moves(board))))
        if not legal_moves(after):
            break
        board = after
    return board


class ScriptedOpponent:
    """Plays the given cells in order."""

    def __init__(self, *cells: str) -> None:
        self.cells = list(cells)

    def choose(self, board: str, rng: Random) -> int:
        cell = read_cell(self.cells.pop(0))
        assert cell is not None
        return cell


# ---- the rules
# ------------------------------------------------------------------------------------------


def test_the_game_has_5478_positions_of_which_958_are_ends() -> None:
    boards = reachable()
    assert len(boards) == 5478
    ends = [board for board in boards if not legal_moves(board)]
    # 626 that X wins, 316 that O wins, 16 draws.
    assert [sum(winner(board) == mark for board in ends) for mark in ("X", "O", None)] == [626, 316, 16]
    assert all(board.count("X") - board.count("O") in (0, 1) for board in boards)


@pytest.mark.parametrize(
    ("board", "won"),
    [
        ("XXX......", "X"),
        ("...OOO...", "O"),
        ("......XXX", "X"),
        ("X..X..X..", "X"),
        (".O..O..O.", "O"),
        ("..X..X..X", "X"),
        ("X...X...X", "X"),
        ("..O.O.O..", "O"),
        ("XX.......", None),
        ("XOXXOOOXX", None),
        (EMPTY, None),
    ],
)
def test_three_in_a_line_win(board: str, won: str | None) -> None:
    assert winner(board) == won


def test_the_sides_take_turns_and_a_won_game_takes_no_move() -> None:
    assert (to_move(EMPTY), to_move("X........"), to_move("X...O....")) == ("X", "O", "X")
    assert play(play(EMPTY, 0), 4) == "X...O...."
    assert legal_moves("XXXOO....") == ()
    for board, cell in (("X........", 0), ("XXXOO....", 5), (EMPTY, 9)):
        with pytest.raises(DataError, match=f"cell {cell} of {board} cannot be played"):
            play(board, cell)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("A1", 0),
        ("b2", 4),
        (" C3\n", 8),
        ("A3", 2),
        ("C1", 6),
        ("1", 0),
        ("9", 8),
        ("0", None),
        ("10", None),
        ("D1", None),
        ("", None),
    ],
)
def test_a_cell_can_be_named_by_coordinates_or_by_number(text: str, cell: int | None) -> None:
    assert read_cell(text) == cell


def test_names_of_cells_survive_a_round_trip() -> None:
    assert [read_cell(cell_name(cell)) for cell in range(9)] == list(range(9))


@given(text=st.text(max_size=6))
def test_any_text_parses_to_a_cell_or_to_none(text: str) -> None:
    assert read_cell(text) in (None, *range(9))


# ---- perfect play
# ------------------------------------------------------------------------------------------


def test_the_game_is_a_draw_after_every_first_move() -> None:
    assert value(EMPTY) == 0
    assert optimal_moves(EMPTY) == tuple(range(9))
    assert optimal_moves("X........") == (4,)  # the only good answer to a corner is the centre
    assert optimal_moves("....X....") == (0, 2, 6, 8)  # the only good answers to the centre are the corners


def test_perfect_play_wins_then_blocks_and_prefers_the_earlier_win() -> None:
    assert optimal_moves("XX.OO....") == (2,)  # X wins now and need not block O
    assert optimal_moves("XX..O....") == (2,)  # O blocks the row
    # X could also make two threats and win a move later, but it wins now.
    assert optimal_moves("XX.O....O") == (2,)


def test_perfect_play_delays_a_loss() -> None:
    assert value("XO.......") == 1  # an adjacent edge is a losing answer to a corner
    # A1 and B2 against A2: O loses in any case and blocks C3 first.
    assert (value("XO..X...."), optimal_moves("XO..X....")) == (-1, (8,))


@given(board=positions())
def test_the_value_of_a_position_is_that_of_its_best_move(board: str) -> None:
    """The definition as a plain search without memoisation or preference for early wins."""

    def plain(board: str) -> int:
        if winner(board):
            return -1
        return max((-plain(play(board, cell)) for cell in legal_moves(board)), default=0)

    if board.count(".") <= 6:
        assert value(board) == plain(board)
        best = [cell for cell in legal_moves(board) if -plain(play(board, cell)) == plain(board)]
        assert set(optimal_moves(board)) <= set(best)


@given(board=positions())
def test_perfect_play_takes_an_immediate_win(board: str) -> None:
    winning = tuple(cell for cell in legal_moves(board) if winner(play(board, cell)))
    if winning:
        assert optimal_moves(board) == winning


# ---- opponents
# ------------------------------------------------------------------------------------------


@given(board=positions(), seed=seeds)
def test_every_opponent_plays_a_legal_move(board: str, seed: int) -> None:
    for opponent in (RandomOpponent(), PerfectOpponent(), MixedOpponent(0.3)):
        assert opponent.choose(board, Random(seed)) in legal_moves(board)


@given(board=positions(), seed=seeds)
def test_a_mixed_opponent_with_share_zero_or_one_equals_its_component(board: str, seed: int) -> None:
    assert MixedOpponent(0.0).choose(board, Random(seed)) == RandomOpponent().choose(board, Random(seed))
    assert MixedOpponent(1.0).choose(board, Random(seed)) == PerfectOpponent().choose(board, Random(seed))


def test_a_mixed_opponent_plays_perfectly_with_its_probability() -> None:
    # Only one of the 8 answers to a corner is perfect, so it is played with probability .4 + .6 / 8
    # = .475. Standard error .0035.
    rng = Random(0)
    play_game = [MixedOpponent(0.4).choose("X........", rng) for _ in range(20_000)]
    assert play_game.count(4) / len(play_game) == pytest.approx(0.475, abs=0.015)


@given(seed=seeds, perfect_starts=st.booleans())
def test_perfect_play_never_loses(seed: int, perfect_starts: bool) -> None:
    rng, board = Random(seed), EMPTY
    mark = "X" if perfect_starts else "O"
    while legal_moves(board):
        player = PerfectOpponent() if to_move(board) == mark else RandomOpponent()
        board = play(board, player.choose(board, rng))
    assert winner(board) in (None, mark)


def test_perfect_play_never_loses_to_any_line_of_play() -> None:
    """Against every answer of the other side, not a sample of them."""

    def worst_value(board: str, mark: str) -> bool:
        if not legal_moves(board):
            return winner(board) in (None, mark)
        moves = optimal_moves(board) if to_move(board) == mark else legal_moves(board)
        return all(worst_value(play(board, cell), mark) for cell in moves)

    assert worst_value(EMPTY, "X")
    assert worst_value(EMPTY, "O")


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_zero_and_one_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"perfect \(.*\) .*at least 0 and at most 1"):
        MixedOpponent(share)


# ---- the environment
# ------------------------------------------------------------------------------------------


def play_game(env: TicTacToeEnv, *moves: str, seed: int | None = 0) -> list:
    env.env_reset(seed=seed)
    return [env.env_step(move) for move in moves]


def test_a_win_ends_the_game_with_reward_one() -> None:
    outcomes = play_game(TicTacToeEnv(opponent=ScriptedOpponent("B1", "B2")), "A1", "a2", "3")
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 1.0]
    assert [outcome.terminated for outcome in outcomes] == [False, False, True]
    last = outcomes[-1].info
    assert (last["result"], last["won"], last["drawn"], last["forced_draw"]) == ("win", True, False, False)
    assert (last["agent_move"], last["opponent_move"], last["illegal_move"]) == ("A3", None, False)
    assert last["board"] == "XXXOO...."


def test_a_loss_has_reward_zero() -> None:
    outcomes = play_game(TicTacToeEnv(opponent=ScriptedOpponent("B1", "B2", "B3")), "A1", "A2", "C3")
    assert (outcomes[-1].reward, outcomes[-1].terminated, outcomes[-1].info["result"]) == (0.0, True, "loss")
    assert outcomes[-1].info["opponent_move"] == "B3"
    assert outcomes[-1].info["gto_action"] == "A3"  # the missed win


def test_a_draw_without_a_missed_win_counts_as_forced_and_earns_more() -> None:
    # X takes the centre, O a corner, and both block every threat.
    outcomes = play_game(TicTacToeEnv(opponent=ScriptedOpponent("A1", "C2", "A3", "B1")), "B2", "A2", "C1", "B3", "C3")
    last = outcomes[-1]
    assert last.info["board"].count(".") == 0
    assert (last.info["result"], last.info["forced_draw"], last.info["drawn"], last.reward) == ("draw", True, True, 1.0)


def test_a_draw_after_a_missed_win_has_half_the_reward() -> None:
    # O answers A1 with the mistake A2, X makes two threats with C1, O overlooks B1, and X misses it
    # too.
    outcomes = play_game(TicTacToeEnv(opponent=ScriptedOpponent("A2", "A3", "C3", "B1")), "A1", "C1", "B3", "B2", "C2")
    last = outcomes[-1]
    assert (last.info["board"], last.info["result"]) == ("XOOOXXXXO", "draw")
    assert (last.info["forced_draw"], last.info["drawn"], last.reward) == (False, True, 0.5)


def test_an_illegal_move_ends_the_game_with_reward_minus_one() -> None:
    for move, said in (("B2", "B2 is taken"), ("D4", "'D4' names no cell"), ("", "'' names no cell")):
        outcomes = play_game(TicTacToeEnv(opponent=ScriptedOpponent("B2")), "A1", move)
        last = outcomes[-1]
        assert (last.reward, last.terminated, last.truncated) == (-1.0, True, False)
        assert (last.info["illegal_move"], last.info["result"], last.info["error"]) == (True, "illegal", said)
        assert said in last.obs
        assert last.info["board"] == "X...O...."  # no move was played


def test_the_opponent_can_move_first() -> None:
    env = TicTacToeEnv(agent_starts=False, opponent=ScriptedOpponent("B2", "A3", "C1"))
    obs, info = env.env_reset(seed=0)
    assert (info["mark"], info["opponent_move"], info["board"]) == ("O", "B2", "....X....")
    assert obs == "You are O.\nYour opponent played B2.\n  1 2 3\nA . . .\nB . X .\nC . . ."
    assert env.env_step("A1").obs == "Your opponent played A3.\n  1 2 3\nA O . X\nB . X .\nC . . ."
    lost = env.env_step("A2")
    assert (lost.info["result"], lost.info["board"]) == ("loss", "OOX.X.X..")


def test_the_observation_can_omit_the_opponents_move() -> None:
    env = TicTacToeEnv(opponent=ScriptedOpponent("B2"), show_opponent_move=False)
    env.env_reset(seed=0)
    assert env.env_step("A1").obs == "  1 2 3\nA X . .\nB . O .\nC . . ." == env.env_current_obs()
    assert "tic-tac-toe" in (env.suggested_sysprompt or "")


def test_in_moves_mode_each_turn_is_one_digit() -> None:
    env = TicTacToeEnv(opponent=ScriptedOpponent("B2", "C3"), text=MoveText(), system_prompt=None)
    assert env.env_reset(seed=0)[0] == "X:.>"
    assert [env.env_step(move).obs for move in ("1", "2")] == [":5>", ":9>"]
    env = TicTacToeEnv(agent_starts=False, opponent=ScriptedOpponent("C3"), text=MoveText(), system_prompt=None)
    assert env.env_reset(seed=0)[0] == "O:9>"
    assert env.suggested_sysprompt is None


def test_moves_before_reset_and_after_the_end_are_errors() -> None:
    env = TicTacToeEnv()
    with pytest.raises(RolloutError, match="call reset"):
        env.env_step("A1")
    env.env_reset(seed=0)
    env.env_step("nonsense")
    with pytest.raises(RolloutError, match="call reset"):
        env.env_step("A1")
    assert env.env_reset(seed=0)[1]["board"] == EMPTY


@given(seed=seeds, starts=st.booleans())
def test_a_game_follows_from_its_seed_and_uses_no_global_random_state(seed: int, starts: bool) -> None:
    def game() -> list[str]:
        env, mover = TicTacToeEnv(agent_starts=starts), Random(seed)
        boards = [env.env_reset(seed=seed)[1]["board"]]
        over = False
        while not over:
            outcome = env.env_step(cell_name(mover.choice(legal_moves(env.board))))
            boards.append(outcome.info["board"])
            over = outcome.terminated
        return boards

    state = random.getstate()
    assert game() == game()
    assert random.getstate() == state


def test_the_opponents_randomness_does_not_depend_on_earlier_moves() -> None:
    """Members of a group face the same randomness: after two different first moves that leave the
    same number of cells, the opponent draws the same numbers."""

    class Recorder:
        def __init__(self) -> None:
            self.drawn: list[float] = []

        def choose(self, board: str, rng: Random) -> int:
            self.drawn.append(rng.random())
            return legal_moves(board)[0]

    one, two = Recorder(), Recorder()
    play_game(TicTacToeEnv(opponent=one), "C3", "C2", seed=5)
    play_game(TicTacToeEnv(opponent=two), "B2", "B3", seed=5)
    assert one.drawn == two.drawn
    assert len(set(one.drawn)) == 2


@given(seed=seeds, starts=st.booleans(), opponent=st.sampled_from([RandomOpponent(), PerfectOpponent(), MixedOpponent(0.5)]))
def test_whole_games_follow_the_rules(seed: int, starts: bool, opponent) -> None:
    """Random agents: the game ends, exactly one result is true, and its reward is the documented
    one."""
    env, rng = TicTacToeEnv(agent_starts=starts, opponent=opponent, text=BoardText()), Random(seed)
    env.env_reset(seed=seed)
    steps = []
    while not steps or not steps[-1].terminated:
        steps.append(env.env_step(str(rng.choice(legal_moves(env.board)) + 1)))
    last = steps[-1].info
    assert len(steps) <= 5
    assert all(step.reward == 0.0 for step in steps[:-1])
    won = winner(last["board"])
    assert last["result"] == ("draw" if won is None else "win" if won == env.mark else "loss")
    assert steps[-1].reward == {"win": 1.0, "loss": 0.0, "draw": 1.0 if last["forced_draw"] else 0.5}[last["result"]]
    if isinstance(opponent, PerfectOpponent):
        assert last["result"] != "win"


def test_a_perfect_agent_forces_a_draw_against_perfect_play() -> None:
    for seed in range(30):
        env = TicTacToeEnv(agent_starts=bool(seed % 2), opponent=PerfectOpponent())
        env.env_reset(seed=seed)
        over = False
        while not over:
            outcome = env.env_step(cell_name(optimal_moves(env.board)[-1]))
            over = outcome.terminated
        assert (outcome.info["forced_draw"], outcome.reward) == (True, 1.0)
