"""TextArena games, for one player or several."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import SystemRandom
from typing import Any

from ludic.envs.adapters.episode import Episode, import_extra, to_json_types
from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, RolloutError
from ludic.types import Info, StepOutcome

Opponent = Callable[[str], str]
"""Observation of a player -> its move. Draws from `random` and `numpy.random` follow the episode's
seed."""
YOUR_TURN = "It is your turn."
EMPTY_MOVE = ""


class TextArenaEnv(LudicEnv[str, str, str]):
    """A TextArena game by its id (`TicTacToe-v0`), or a function that makes one. Agents are
    `player_0`, `player_1`, ...

    Players in `opponents` (player number -> function) are played by the environment and are not
    among its agents. With one agent left the environment is single-agent, and every outcome
    contains everything that happened until the agent's next turn.

    A player sees the messages since its last turn, without its own moves. `step` takes the move of
    the one active agent. It returns outcomes for that agent, for every other agent with news, and
    for all agents when the game is over. The rewards are the game's and come at the end. The game
    judges moves against its rules: usually a warning first, then the loss of the game. Text that
    makes the game raise counts as an empty move, with `info["game_error"]`; if that fails too, it
    is a RolloutError, never a reward.

    The end is always `terminated`, also at a turn limit of the game; `info["reason"]` says which it
    was. The game has its own random state: it follows the seed of `reset` and leaves the process's
    state alone.
    """

    def __init__(
        self,
        game: str | Callable[[], Any],
        *,
        num_players: int = 1,
        opponents: Mapping[int, Opponent] | None = None,
        **game_settings: Any,
    ) -> None:
        """`game_settings` are passed to `textarena.make`."""
        self._make = _maker(game, game_settings)
        self._num_players = num_players
        self._opponents = dict(opponents or {})
        self._agents = [player for player in range(num_players) if player not in self._opponents]
        if not self._agents or any(player not in range(num_players) for player in self._opponents):
            raise ConfigError(f"opponents ({sorted(self._opponents)}) must be among 0 to {num_players - 1}, and not all of them")
        self._episode = Episode(f"TextArenaEnv({game if isinstance(game, str) else 'custom game'})")
        self._seed = 0
        self._randomness = self._opponents_randomness = IsolatedRandomness(0)
        self._game: Any = None
        self._moves: list[str] = []
        self._num_told: dict[int, int] = {}
        self._shown: dict[int, str] = {}

    @property
    def agent_ids(self) -> list[str]:
        return [_agent_id(player) for player in self._agents]

    @property
    def active_agents(self) -> list[str]:
        """The one agent to move; empty outside an episode."""
        return [_agent_id(self._to_move)] if self._episode.running else []

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        """Start a new game; the observation of each agent before the first move of an agent."""
        self._episode.begin()
        self._seed = SystemRandom().randrange(2**31) if seed is None else seed
        self._opponents_randomness = IsolatedRandomness(self._seed)
        self._num_told = dict.fromkeys(range(self._num_players), 0)
        self._begin_game()
        self._play_opponents()
        if self._state.done:
            self._episode.end()
            raise RolloutError("the opponents ended the game before an agent could move; give them moves that the game allows")
        return {_agent_id(player): (self._news(player), {"player": player}) for player in self._agents}

    def step(self, actions: dict[str, str]) -> dict[str, StepOutcome]:
        """Raises RolloutError if the move of the active agent is missing, and if the game fails
        for any move."""
        self._episode.check_step()
        mover = self._to_move
        if _agent_id(mover) not in actions:
            raise RolloutError(f"it is the turn of {_agent_id(mover)}; step() was given moves of {sorted(actions)}")
        broken = self._rules_broken
        info = self._move(actions[_agent_id(mover)])
        if self._to_move == mover and self._rules_broken > broken:
            info["invalid_move"] = True
        self._play_opponents()
        if self._state.done:
            self._episode.end()
        outcomes = {}
        for player in self._agents:
            news = self._news(player)
            if player == mover or news or self._state.done:
                outcomes[_agent_id(player)] = self._outcome(player, news, info if player == mover else {})
        return outcomes

    def current_obs(self) -> dict[str, str]:
        """The last observation of each agent."""
        self._episode.check_begun()
        return {_agent_id(player): self._shown[player] for player in self._agents}

    def close(self) -> None:
        """Drop the game. Calls after the first do nothing."""
        self._episode.close()
        self._game = None

    @property
    def _state(self) -> Any:
        """The game's state, inside any wrappers."""
        return self._game.state

    @property
    def _to_move(self) -> int:
        return int(self._state.current_player_id)

    @property
    def _rules_broken(self) -> int:
        return int(getattr(self._state, "error_count", 0))

    def _begin_game(self) -> None:
        self._moves = []
        self._randomness = IsolatedRandomness(self._seed)
        with self._randomness.active():
            self._game = self._make()
            self._game.reset(num_players=self._num_players, seed=self._seed)

    def _move(self, action: str) -> Info:
        """Submit a move; returns `{"game_error": ...}` if an empty move replaced it."""
        try:
            self._submit(action)
            return {}
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            # The state before the failure, in a new game: the seed and the moves determine it.
            moves = self._moves
            self._begin_game()
            for move in moves:
                self._submit(move)
            for player, count in self._num_told.items():
                del self._state.observations[player][:count]
            self._submit(EMPTY_MOVE)
        except Exception as error:
            self._episode.end()
            raise RolloutError(f"the game failed with {problem} on the move {action[:80]!r}, and on an empty one") from error
        return {"game_error": problem}

    def _submit(self, action: str) -> None:
        with self._randomness.active():
            self._game.step(action)
        self._moves.append(action)

    def _play_opponents(self) -> None:
        while not self._state.done and self._to_move in self._opponents:
            player = self._to_move
            news = self._news(player) or YOUR_TURN
            with self._opponents_randomness.active():
                move = self._opponents[player](news)
            self._move(move)

    def _outcome(self, player: int, news: str, info: Info) -> StepOutcome:
        done = bool(self._state.done)
        if done:
            info = {**to_json_types(self._state.game_info.get(player, {})), **info}
            news = news or str(info.get("reason") or "")
        elif player == self._to_move:
            news = news or YOUR_TURN
        reward = float((self._state.rewards or {}).get(player, 0.0)) if done else 0.0
        return StepOutcome(obs=news, reward=reward, truncated=False, terminated=done, info={"player": player, **info})

    def _news(self, player: int) -> str:
        """What the player has not seen yet. It counts as seen afterwards."""
        messages = self._state.observations[player]
        self._state.observations[player] = []
        self._num_told[player] += len(messages)
        lines = []
        for sender, text, kind in messages:
            # Some games for one player report the player's move as a message of the game.
            is_own = sender == player or (sender < 0 and self._num_players == 1)
            if not (is_own and kind.name == "PLAYER_ACTION"):
                lines.append(self._line(sender, text))
        news = "\n".join(filter(None, lines))
        if news:
            self._shown[player] = news
        return news

    def _line(self, sender: int, text: str) -> str:
        text = str(text).strip()
        return text if sender < 0 else f"[{self._state.role_mapping.get(sender, f'Player {sender}')}] {text}"


def _maker(game: str | Callable[[], Any], settings: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that makes the game without the wrapper that repeats the whole history at every
    turn."""
    textarena = import_extra("textarena", "textarena")
    if not isinstance(game, str):
        if settings:
            raise ConfigError(f"settings ({sorted(settings)}) need the id of a game; set them in the function that makes one")
        return game
    registry = import_extra("textarena.envs.registration", "textarena").ENV_REGISTRY
    if game not in registry:
        raise ConfigError(f"TextArena has no game {game!r}; textarena.pprint_registry_detailed() prints the available ones")
    return lambda: textarena.make(game, **settings)


def _agent_id(player: int) -> str:
    return f"player_{player}"


class IsolatedRandomness:
    """The state of `random` and `numpy.random` of one environment.

    While it is `active`, the global generators continue from this state; afterwards their own state
    is restored. Environments that play at the same time therefore do not affect each other, nor
    the rest of the process.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed`: any integer; None for a random state."""
        import numpy as np

        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(None if seed is None else seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the state in. Do not `await` inside: other tasks would draw from it."""
        import numpy as np

        shared_python, shared_numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(shared_python)
            np.random.set_state(shared_numpy)
