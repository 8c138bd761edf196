"""A task of pictures: how many shapes are there, and of which colour?

A picture of 24 x 24 pixels has one to five equal shapes (squares, discs or crosses) of one colour
in nine cells, each shifted in its cell. The answer to three red discs is `3r`; reward 1 if both are
right. The teacher names the colour, and often miscounts by one, so that reinforcement has to learn
to count.

With `looks`, an episode shows the picture three times: its rows are covered, the model names one of
them three times, and sees the picture with that row uncovered too. The teacher often names a row
twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.errors import check_value
from ludic.tasks.digits import matches_exactly
from ludic.tasks.episodic import Episode, EpisodicTask, Problem, Turn
from ludic.types import Info, StepOutcome

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIZE, CELL, SHAPE = 24, 8, 6
"""Pixels of the side of a picture, of a cell and of a shape."""
COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 220), "y": (230, 210, 40)}
KINDS = ("square", "disc", "cross")
MOST = 5
ROWS, LOOK, COVER = "abc", "look: ", (150, 150, 150)
"""The names of the rows of cells, what is asked for one, and the colour of a covered row."""
QUESTION = "how many, which colour? "
_SPLIT_SEED = 30_000  # of the held-out pictures, which are the same in every run


def draw_picture(name: str) -> NDArray[np.uint8]:
    """The picture [24, 24, 3] of a name such as `r-disc-0.1.2-4.0.0`: red discs in the cells 0 and
    4, the first 1 pixel down and 2 to the right."""
    import numpy as np

    colour, kind, *places = name.split("-")
    y, x = np.mgrid[:SHAPE, :SHAPE] - (SHAPE - 1) / 2
    covered = {"square": y > -SHAPE, "disc": y**2 + x**2 <= 8, "cross": (abs(y) <= 1) | (abs(x) <= 1)}[kind]
    picture = np.full((SIZE, SIZE, 3), 245, dtype=np.uint8)
    for cell, down, right in (map(int, place.split(".")) for place in places):
        top, left = cell // 3 * CELL + down, cell % 3 * CELL + right
        picture[top : top + SHAPE, left : left + SHAPE][covered] = COLOURS[colour]
    return picture


def show_problem(problem: Mapping[str, Any]) -> list[Any]:
    """The picture and the question."""
    return [draw_picture(problem["id"]), problem["question"]]


class ShapesEnv(DatasetQAEnv):
    """One picture and one question. The info says which part of the answer is right."""

    def __init__(self, problem: Episode) -> None:
        super().__init__(dict(problem), prompt_builder=show_problem, verifier=matches_exactly)
        self._answer = str(problem["answer"])

    def env_step(self, action: str) -> StepOutcome:
        outcome = super().env_step(action)
        outcome.info["count_right"] = action[:1] == self._answer[:1]
        outcome.info["colour_right"] = action[1:2] == self._answer[1:2]
        return outcome


class LooksEnv(ShapesEnv):
    """Three looks at rows of the picture before the question."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Any, Info]:
        _, info = super().env_reset(seed=seed)
        self._looks = list[str]()
        return LOOK, info

    def env_step(self, action: str) -> StepOutcome:
        if len(self._looks) == len(ROWS):
            outcome = super().env_step(action)
            outcome.info["saw_all"] = set(ROWS) <= set(self._looks)
            return outcome
        self._looks.append(action[:1])
        picture, question = show_problem(self.sample)
        for number, row in enumerate(ROWS):
            if row not in self._looks:
                picture[number * CELL : (number + 1) * CELL] = COVER
        shown: Any = [picture, question if len(self._looks) == len(ROWS) else LOOK]
        return StepOutcome(obs=shown, reward=0.0, truncated=False, terminated=False, info={})


@dataclass(frozen=True)
class Shapes(EpisodicTask):
    """Pictures are held out by their content: a held-out picture is never trained on."""

    right: float = 0.25
    """Share of demonstrations whose count is right; the others are off by one."""
    num_heldout: int = 400
    looks: bool = False
    """Whether the model uncovers the picture row by row, in three turns before its answer."""

    def __post_init__(self) -> None:
        check_value("right", self.right, least=0, most=1)
        check_value("num_heldout", self.num_heldout, least=1, most=2_000)

    max_new_tokens = 3
    success_reward = 1.0
    reward_sees = "count and colour, which must both be right, and nothing else"

    @property
    def facts(self) -> Mapping[str, str]:
        facts = {"count_right": "the count is right", "colour_right": "the colour is right"}
        return {**facts, "saw_all": "all rows were looked at"} if self.looks else facts

    @property
    def max_turns(self) -> int:
        return len(ROWS) + 1 if self.looks else 1

    def draw(self, rng: Random) -> Problem:
        while True:
            problem = _any_problem(rng)
            if problem["id"] not in self._heldout:
                return problem

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        return {"held out": list(self._heldout.values())}

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        return [self._demonstrate(self.draw(rng), rng) for _ in range(count)]

    def make_env(self, episode: Episode) -> DatasetQAEnv:
        return LooksEnv(episode) if self.looks else ShapesEnv(episode)

    def _demonstrate(self, problem: Problem, rng: Random) -> list[Turn]:
        looks = [] if not self.looks else rng.sample(ROWS, 3) if rng.random() < self.right else rng.choices(ROWS, k=3)
        env, turns = self.make_env(problem), list[Turn]()
        observation, _ = env.env_reset()
        count, colour = int(problem["answer"][0]), problem["answer"][1]
        if rng.random() >= self.right:
            count = rng.choice([near for near in (count - 1, count + 1) if 1 <= near <= MOST])
        for action in [*looks, f"{count}{colour}"]:
            turns.append(Turn(observation, action))
            observation = env.env_step(action).obs
        return turns

    @cached_property
    def _heldout(self) -> dict[str, Problem]:
        rng, problems = Random(_SPLIT_SEED), dict[str, Problem]()
        while len(problems) < self.num_heldout:
            problem = _any_problem(rng)
            problems[problem["id"]] = problem
        return problems


def _any_problem(rng: Random) -> Problem:
    count, colour = rng.randint(1, MOST), rng.choice(list(COLOURS))
    cells = sorted(rng.sample(range(9), count))
    places = [f"{cell}.{rng.randrange(3)}.{rng.randrange(3)}" for cell in cells]
    name = "-".join([colour, rng.choice(KINDS), *places])
    return Problem(id=name, question=QUESTION, answer=f"{count}{colour}")
