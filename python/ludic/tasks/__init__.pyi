from ludic.tasks.code import Code as Code
from ludic.tasks.digits import Addition as Addition, AdditionEnv as AdditionEnv, DigitSort as DigitSort, Rising as Rising
from ludic.tasks.episodic import (
    Episode as Episode,
    EpisodicTask as EpisodicTask,
    Problem as Problem,
    Task as Task,
    Turn as Turn,
    as_episodic as as_episodic,
)
from ludic.tasks.preferences import DigitPreferences as DigitPreferences, Preference as Preference
from ludic.tasks.tictactoe import TicTacToe as TicTacToe
from ludic.tasks.tools import Tools as Tools
