"""Built-in tasks with a verifier: small enough to be learnt on a laptop's CPU in a minute or two."""

from ludic.envs.tasks.addition import Addition, AdditionEnv
from ludic.envs.tasks.base import Problem, Task
from ludic.envs.tasks.digit_sort import DigitSort

__all__ = ["Addition", "AdditionEnv", "DigitSort", "Problem", "Task"]
