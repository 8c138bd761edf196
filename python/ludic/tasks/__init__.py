"""Built-in tasks with a verifier, small enough to learn on a laptop's CPU in a minute or two."""

from ludic.tasks.adapters import as_episodic
from ludic.tasks.addition import Addition, AdditionEnv
from ludic.tasks.base import Problem, Task
from ludic.tasks.digit_sort import DigitSort
from ludic.tasks.episodic import Episode, EpisodicTask, Turn
from ludic.tasks.preferences import DigitPreferences, Preference
from ludic.tasks.tictactoe import TicTacToe
from ludic.tasks.tools import Tools

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
