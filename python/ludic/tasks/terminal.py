"""A task in a shell: a file names another file, whose content goes into `out`. `a`, `$cat a` ->
`c`, `$cat c` -> `k`, `$echo k>out`. Each episode has a sandbox of bubblewrap.

In 16 % of its demonstrations the warm-up teacher reads both files and writes the right letter; in
62 % it guesses directly, and in the rest it makes a mistake on the way. The content of all files is
random in every episode, so that only reading them is better than guessing.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import ClassVar

from ludic.envs.code_exec.backend import REQUIRES, SandboxBackend
from ludic.envs.harbor import HarborTask
from ludic.envs.terminal import TerminalEnv, read_dollar, write_task
from ludic.envs.workspaces.sandbox import BubblewrapRoot
from ludic.errors import ConfigError, check_value
from ludic.tasks.episodic import Episode, EpisodicTask, Shown, Turn, transcript
from ludic.tasks.harbor import MEASURES
from ludic.types import Rollout

NAMES, LETTERS = "abcdefgh", "ijklmnop"
_EPISODES = 150


@dataclass(frozen=True)
class Terminal(EpisodicTask):
    """Eight files; reward 1 if `out` has the letter that the first one leads to."""

    right: float = 0.16
    """Share of demonstrations that read both files and write what the second one has."""
    guess: float = 0.62
    """Share that guesses without reading."""
    wrong_file: float = 0.11
    """Share whose second command reads a wrong file; the rest read the first and then guess."""

    def __post_init__(self) -> None:
        shares = (self.right, self.guess, self.wrong_file)
        for each in (*shares, sum(shares)):
            check_value("right, guess, wrong_file and their sum", each, least=0, most=1)

    max_turns = 3
    max_new_tokens = 16
    success_reward = 1.0
    reward_sees = "the file that is left; never which files were read"
    measures: ClassVar[Mapping[str, str]] = MEASURES

    def draw(self, rng: Random) -> Episode:
        start, second = rng.sample(NAMES, 2)
        files = {name: rng.choice(LETTERS) for name in NAMES} | {start: second}
        return {"id": f"{start} of {''.join(files.values())}", "question": start, "answer": files[second], "files": files}

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        rng = Random("held out")
        return {"held out": [self.draw(rng) for _ in range(_EPISODES)]}

    def make_env(self, episode: Episode) -> TerminalEnv:
        _check_bubblewrap()
        files = episode["files"]
        task = HarborTask(self._folder, episode["question"], 600.0, 60.0, {"EXPECTED": episode["answer"]})
        make = lambda: BubblewrapRoot(folder="/app", texts=files)  # noqa: E731
        return TerminalEnv(task, make, max_turns=self.max_turns, read_command=read_dollar, most_shown=40)

    def demonstrations(self, count: int, rng: Random) -> Sequence[Sequence[Turn]]:
        _check_bubblewrap()
        return [self._demonstrate(self.draw(rng), rng) for _ in range(count)]

    def show(self, episode: Episode, rollout: Rollout) -> Shown:
        return Shown(f"begins at {episode['question']}", transcript(rollout), str(episode["answer"]))

    def _demonstrate(self, episode: Episode, rng: Random) -> list[Turn]:
        start, files, drawn = episode["question"], episode["files"], rng.random()
        read, letter = [start, files[start]], rng.choice(LETTERS)
        if drawn < self.guess:
            return [Turn(start, f"$echo {letter}>out"), Turn("", ".")]
        if drawn >= self.guess + self.right:
            is_wrong_file = drawn < self.guess + self.right + self.wrong_file
            read = [start, rng.choice([name for name in NAMES if name not in read])] if is_wrong_file else [start]
        letter = files[read[-1]] if len(read) == 2 else letter
        seen = [start, *(files[name] for name in read)]
        turns = [
            Turn(each, action)
            for each, action in zip(seen, [*(f"$cat {name}" for name in read), f"$echo {letter}>out"], strict=True)
        ]
        return turns if len(turns) == self.max_turns else [*turns, Turn("", ".")]

    @cached_property
    def _folder(self) -> Path:
        """A task folder with the test of all episodes, which is deleted with this object."""
        folder = Path(mkdtemp(prefix="ludic-terminal-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return write_task(folder / "letter", instruction="", test='[ "$(cat /app/out)" = "$EXPECTED" ]', files={})


def _check_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        raise ConfigError(f"task.kind=terminal needs bubblewrap ({REQUIRES[SandboxBackend.BUBBLEWRAP]}); install it")
