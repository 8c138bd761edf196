"""Tasks in Harbor's format as problems: a model solves each by commands in a sandbox, and the
task's own script judges it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from ludic.data.sources import list_task_folders
from ludic.envs.harbor import HarborTask, choose_sandbox, hash_folder, read_task
from ludic.envs.terminal import COMMANDS_INFO, SHELL_RULES, TIMED_OUT_INFO, TerminalEnv, solve, verify
from ludic.errors import ConfigError, check_value
from ludic.tasks.episodic import Episode, EpisodicTask, Problem, ProblemList

logger = logging.getLogger(__name__)

MEASURES = {COMMANDS_INFO: "commands of an episode", TIMED_OUT_INFO: "commands that were ended at their deadline"}


class Harbor(ProblemList, EpisodicTask):
    """The task folders of `data`. A tenth of them, at least one, is held out."""

    max_turns = 20
    max_new_tokens = 512
    success_reward = 1.0
    system_prompt = SHELL_RULES
    reward_sees = "what the task's tests/test.sh wrote about the files of the sandbox"

    def __init__(
        self,
        data: Any = None,
        *,
        num_heldout: int | None = None,
        heldout_data: str | None = None,
        sandbox: str = "auto",
        network: bool = False,
        secrets: Sequence[str] = (),
        mounts: Sequence[str] = (),
        measures: Sequence[str] = (),
        max_turns: int = max_turns,
        max_new_tokens: int = max_new_tokens,
        command_timeout_s: float = 60.0,
        most_shown: int = 4000,
    ) -> None:
        """`heldout_data`: a folder of tasks that are held out, instead of a part of `data`.

        `sandbox`: see `ludic.envs.harbor.choose_sandbox`. `network`: containers have a network, if
        the task allows it. `secrets`: variables of this process that tasks may have. `mounts`:
        folders that sandboxes show at the same path, to read alone, such as an agent and its
        interpreter. `measures`: other numbers of `reward.json` to log. `most_shown`: characters of
        an output.
        """
        if not isinstance(data, str):
            raise ConfigError(f"data ({data!r}) must be a folder of tasks, each with a task.toml; give data=FOLDER")
        check_value("max_turns", max_turns, whole=True, least=1)
        check_value("command_timeout_s", command_timeout_s, above=0)
        check_value("most_shown", most_shown, whole=True, least=2)
        self.max_turns, self.max_new_tokens = max_turns, max_new_tokens
        self._settings = {"max_turns": max_turns, "command_timeout_s": command_timeout_s, "most_shown": most_shown}
        self._secrets, self._told = tuple(secrets), set[str]()
        self._measures = {**MEASURES, **{f"verifier/{name}": f"{name}, of the verifier" for name in measures}}
        tasks = self._read(data)
        self._tasks = tasks | ({} if heldout_data is None else self._read(heldout_data))
        if self._told:
            logger.warning("keys of task.toml without an effect here: %s", ", ".join(sorted(self._told)))
        self._makers = {name: choose_sandbox(task, sandbox, network=network, mounts=mounts) for name, task in self._tasks.items()}
        names = Random("held out").sample(sorted(tasks), len(tasks))
        if heldout_data is None:
            count = max(1, len(names) // 10) if num_heldout is None else num_heldout
            check_value("num_heldout", count, f"there are {len(names)} tasks", whole=True, least=1, most=len(names))
            held, names = names[:count], names[count:] or names
        else:
            held = sorted(set(self._tasks) - set(tasks))
        self.training = [self._problem(name) for name in names]
        self._held = [self._problem(name) for name in held]
        self.digest = hashlib.sha256("".join(hash_folder(task.folder) for task in self._tasks.values()).encode()).hexdigest()[:16]

    @property
    def measures(self) -> Mapping[str, str]:
        return self._measures

    def make_env(self, episode: Episode) -> TerminalEnv:
        name = str(episode["id"])
        return TerminalEnv(self._tasks[name], self._makers[name], **self._settings)  # type: ignore[arg-type]

    async def try_solution(self, name: str) -> tuple[float, float]:
        """The rewards of a task if nothing is done, and of its own solution. Right is 0 and 1.
        Raises GradingError or RolloutError without a reward."""
        rewards = []
        for judge in (verify, solve):
            env = self.make_env({"id": name})
            try:
                rewards.append((await judge(self._tasks[name], await env.open_sandbox()))["reward"])
            finally:
                await env.close()
        return rewards[0], rewards[1]

    def suites(self) -> Mapping[str, Sequence[Episode]]:
        """The tasks held out, and all."""
        return {"held out": self._held, "all": [self._problem(name) for name in sorted(self._tasks)]}

    def _problem(self, name: str) -> Problem:
        return {"id": name, "question": self._tasks[name].instruction, "answer": ""}

    def _read(self, data: str) -> dict[str, HarborTask]:
        folders = list_task_folders(data)
        if not folders:
            raise ConfigError(f"data ({data}) has no folder with a task.toml; give a folder of tasks")
        return {folder.name: read_task(Path(folder).resolve(), secrets=self._secrets, told=self._told) for folder in folders}
