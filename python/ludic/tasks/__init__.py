"""Tasks: problems with their environment, demonstrations and held-out sets. The built-in ones are
learnt on a laptop's CPU in a minute or two; `data_task` is made from your data and rewards."""

from ludic.tasks.adapters import as_episodic
from ludic.tasks.code import Code
from ludic.tasks.digits import Addition, AdditionEnv, DigitSort, Rising
from ludic.tasks.episodic import Episode, EpisodicTask, Problem, Task, Turn
from ludic.tasks.preferences import DigitPreferences, Preference
from ludic.tasks.tictactoe import TicTacToe
from ludic.tasks.tools import Tools

__all__ = [
    "Addition",
    "AdditionEnv",
    "Code",
    "DigitPreferences",
    "DigitSort",
    "Episode",
    "EpisodicTask",
    "Preference",
    "Problem",
    "Rising",
    "Task",
    "TicTacToe",
    "Tools",
    "Turn",
    "as_episodic",
]
