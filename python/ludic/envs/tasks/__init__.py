"""Built-in tasks with a verifier: small enough to be learnt on a laptop's CPU in a minute or two."""

from ludic.envs.tasks.addition import Addition, AdditionEnv
from ludic.envs.tasks.base import Problem, Task
from ludic.envs.tasks.digit_sort import DigitSort
from ludic.envs.tasks.episodic import Episode, EpisodicTask, Turn, as_episodic
from ludic.envs.tasks.preferences import DigitPreferences, Preference
from ludic.envs.tasks.tictactoe import TicTacToe
from ludic.envs.tasks.tools import Tools

__all__ = [
    "Addition",
    "AdditionEnv",
    "DigitPreferences",
    "DigitSort",
    "Episode",
    "EpisodicTask",
    "Preference",
    "Problem",
    "Task",
    "TicTacToe",
    "Tools",
    "Turn",
    "as_episodic",
]
