"""Episodes in a shell: a model solves a task by commands in a sandbox, and a script judges what it
left there."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from ludic.envs.env import SingleAgentEnv, check_step
from ludic.envs.harbor import HarborTask
from ludic.envs.workspaces.sandbox import Sandbox
from ludic.errors import GradingError, RolloutError
from ludic.types import Info, StepOutcome

SHELL_RULES = (
    "You solve a task by commands in a Linux shell. Write one command between <bash> and </bash>, and its output follows. "
    "Each command runs in a shell of its own in the same folder; files stay. When the task is solved, answer without a command."
)
COMMANDS_INFO, TIMED_OUT_INFO = "terminal/commands", "terminal/timed_out"
LONGEST_COMMAND = 100_000
"""Bytes; an argument of a program may have 128 kB."""
LARGEST_REWARD = 64_000
"""Bytes of a file with a reward."""
START_S = 1800.0
"""For a sandbox to start, in which an image may be fetched or built."""
_KILLED = 137
_NOT_EMPTIED = 98
_VERIFY = f"""chmod -R u+rwX /logs 2>/dev/null
rm -rf /logs/verifier && mkdir -p /logs/verifier || exit {_NOT_EMPTIED}
bash /tests/test.sh
status=$?
for kind in json txt; do
    file=/logs/verifier/reward.$kind
    [ -f $file ] && printf '\\n%s %s %s\\n' MARK $kind "$(head -c {LARGEST_REWARD + 1} $file | base64 | tr -d '\\n')"
done
exit $status"""
_SCRIPT = 'exec 2>&1; bash -c "$1" </dev/null; printf "\\n%s %d\\n" "$2" $?'


class NoCommandError(ValueError):
    """An answer that is meant to be a command, and is none. The message is for the model."""


def read_tagged(text: str) -> str | None:
    """The command in the first `<bash>` tags after the thoughts, or in a call of the tool `bash`.
    None if there is none, which ends the work. Raises NoCommandError for one that is malformed.

    >>> read_tagged('Look first. <bash>ls -a</bash>')
    'ls -a'
    >>> read_tagged('<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    'ls'
    """
    answer = text.rpartition("</think>")[2]
    if "<bash>" in answer:
        command, closed, _ = answer.partition("<bash>")[2].partition("</bash>")
        if not closed:
            raise NoCommandError("there is <bash> and no </bash>")
        return command.strip()
    if "<tool_call>" not in answer:
        return None
    called = answer.partition("<tool_call>")[2].partition("</tool_call>")[0]
    try:
        call = json.loads(called)
        arguments = json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"]
        if call["name"] == "bash" and isinstance(arguments["command"], str):
            return str(arguments["command"])
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise NoCommandError('a call is <tool_call>{"name": "bash", "arguments": {"command": "..."}}</tool_call>')


def read_dollar(text: str) -> str | None:
    """The command after a dollar sign, for small models."""
    return text[1:] if text.startswith("$") else None


class TerminalEnv(SingleAgentEnv):
    """One episode of a task, in a sandbox of its own, which starts with the first command, and
    which `close` deletes.

    An action is a command, and the observation its output. An action without a command ends the
    work, and so do the last of `max_turns` actions and the task's deadline; then all processes of
    the sandbox end, and `tests/test.sh` judges it. If the sandbox fails, the episode does
    (RolloutError), and if the script fails to write a reward, too (GradingError): neither scores.

    An agent of the user's own works in `open_sandbox()` instead, and then `judge` is called.
    """

    def __init__(
        self,
        task: HarborTask,
        make_sandbox: Callable[[], Sandbox],
        *,
        max_turns: int,
        read_command: Callable[[str], str | None] = read_tagged,
        command_timeout_s: float = 60.0,
        most_shown: int = 4000,
    ) -> None:
        """`most_shown`: characters of an output that the model sees, half of them its last."""
        super().__init__()
        self._task, self._make_sandbox, self._read_command = task, make_sandbox, read_command
        self._max_turns, self._command_timeout_s, self._most_shown = max_turns, command_timeout_s, most_shown
        self._sandbox: Sandbox | None = None
        self._has_begun = False
        self._obs, self._turns, self._timed_out = task.instruction, 0, 0
        self._deadline = math.inf

    async def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:  # type: ignore[override]
        await self.close()
        self._obs, self._turns, self._timed_out, self._has_begun = self._task.instruction, 0, 0, True
        return self._obs, {}

    async def open_sandbox(self) -> Sandbox:
        """The sandbox, which is started if it is not yet; then the task's deadline begins."""
        if self._sandbox is None:
            self._sandbox = self._make_sandbox()
            async with asyncio.timeout(START_S):
                await self._sandbox.start()
            self._deadline = monotonic() + self._task.agent_timeout_s
        return self._sandbox

    @property
    def seconds_left(self) -> float:
        """Until the task's deadline; without a sandbox, infinite."""
        return self._deadline - monotonic()

    async def env_step(self, action: str) -> StepOutcome:  # type: ignore[override]
        check_step(self._has_begun, "the episode has not begun, or has ended")
        self._turns += 1
        try:
            command = self._read_command(action)
            self._obs = "" if command is None else await self._run(command)
        except NoCommandError as error:
            command, self._obs = "", f"No command was run: {error}."
        if command is not None and self._turns < self._max_turns and self.seconds_left > 0:
            return StepOutcome(self._obs, 0.0, False, False, {})
        return await self.judge({COMMANDS_INFO: self._turns - (command is None), TIMED_OUT_INFO: self._timed_out})

    async def judge(self, info: Mapping[str, Any] = MappingProxyType({})) -> StepOutcome:
        """End the work, and judge it. The outcome has `info` and the verifier's other numbers."""
        sandbox, is_late = await self.open_sandbox(), self.seconds_left <= 0
        rewards = await verify(self._task, sandbox)
        await self.close()
        measured = {f"verifier/{name}": value for name, value in rewards.items() if name != "reward"}
        return StepOutcome(self._obs, rewards["reward"], is_late, not is_late, {**info, **measured})

    def env_current_obs(self) -> str:
        return self._obs

    async def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        self._deadline, self._has_begun = math.inf, False
        if sandbox is not None:
            await sandbox.stop()

    async def _run(self, command: str) -> str:
        """What the model sees of a command."""
        if "\0" in command or len(command.encode(errors="replace")) > LONGEST_COMMAND:
            raise NoCommandError(f"a command has no NUL, and at most {LONGEST_COMMAND} bytes")
        sandbox = await self.open_sandbox()
        left = min(self._command_timeout_s, self.seconds_left)
        try:
            text, status = await run_script(sandbox, command, {}, timeout_s=left)
        except TimeoutError:
            self._timed_out += 1
            return f"The command was ended after {max(0.0, left):.0f} s, and its output is lost."
        shown = shorten(text.rstrip("\n"), self._most_shown)
        return shown if status == 0 else f"{shown}\n(exit status {status})".lstrip("\n")


async def run_script(sandbox: Sandbox, script: str, variables: Mapping[str, str], *, timeout_s: float) -> tuple[str, int]:
    """Run a script of Bash: (its two streams as one text, its exit status). Raises TimeoutError
    past the deadline, and RolloutError if it was ended from outside: then its last line, which
    says that it has ended, is missing."""
    mark = secrets.token_hex(8)
    argv = ["/bin/sh", "-c", _SCRIPT, "sh", script.encode(errors="replace").decode(), mark]
    async with asyncio.timeout(timeout_s):
        ended = await sandbox.exec(argv, variables)
    found = re.search(rf"\n{mark} (\d+)\n\Z", ended.stdout)
    if found is None:
        said = ended.stderr.strip()[-500:]
        raise RolloutError(f"the sandbox ended before its command did, with status {ended.code}{said and f': {said}'}")
    return ended.stdout[: found.start()], int(found[1])


def shorten(text: str, most: int) -> str:
    """The text, without its middle if it has more than `most` characters.

    >>> shorten("abcdefgh", 4)
    'ab\\n... 4 characters left out ...\\ngh'
    """
    if len(text) <= most:
        return text
    head, tail = most - most // 2, most // 2
    return f"{text[:head]}\n... {len(text) - most} characters left out ...\n{text[len(text) - tail :]}"


async def verify(task: HarborTask, sandbox: Sandbox) -> dict[str, float]:
    """Run `tests/test.sh`, and return what it wrote: `reward`, and other numbers of `reward.json`.
    Its exit status does not count. Raises GradingError without a reward, past the deadline, and if
    the script was killed."""
    who, mark = f"tests/test.sh of the task {task.name}", secrets.token_hex(8)
    try:
        await sandbox.put(task.folder / "tests", "/tests")
        script = _VERIFY.replace("MARK", mark)
        text, status = await run_script(sandbox, script, task.verifier_env, timeout_s=task.verifier_timeout_s)
    except TimeoutError as error:
        raise GradingError(f"{who} reached its deadline, verifier.timeout_sec ({task.verifier_timeout_s:g})") from error
    if status == _NOT_EMPTIED:
        raise GradingError(f"/logs/verifier of the task {task.name} could not be emptied: {text[-500:].strip()}")
    if status == _KILLED:
        raise GradingError(f"{who} was killed: {text[-500:].strip()}")
    try:
        written = {kind: b64decode(code).decode(errors="replace") for kind, code in re.findall(rf"\n{mark} (\w+) (.*)\n", text)}
        return read_rewards(written.get("json"), written.get("txt"))
    except GradingError as error:
        raise GradingError(f"{who}: {error}; it wrote {text.partition(mark)[0][-500:].strip()!r}") from error


def read_rewards(as_json: str | None, as_text: str | None) -> dict[str, float]:
    """The numbers of `reward.json`, and the one of `reward.txt` as `reward` if that has none.
    Raises GradingError if there is none, or if it is not finite or too large."""
    for name, text in {"reward.json": as_json, "reward.txt": as_text}.items():
        if text is not None and len(text.encode()) > LARGEST_REWARD:
            raise GradingError(f"{name} has more than {LARGEST_REWARD} bytes")
    rewards: dict[str, float] = {}
    try:
        read: Any = {} if as_json is None else json.loads(as_json)
        rewards = {name: float(value) for name, value in read.items() if type(value) in (int, float)}
        if "reward" not in rewards and as_text is not None:
            rewards["reward"] = float(as_text)
    except (ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise GradingError(f"the reward cannot be read: {error}") from error
    if "reward" not in rewards:
        raise GradingError("it wrote no reward into /logs/verifier/reward.json or reward.txt")
    if not all(map(math.isfinite, rewards.values())):
        raise GradingError(f"{rewards} must be finite numbers")
    return rewards


async def solve(task: HarborTask, sandbox: Sandbox) -> dict[str, float]:
    """What `verify` returns after the task's own solution, in a sandbox that has started: the test
    of a task."""
    if not (task.folder / "solution" / "solve.sh").is_file():
        raise GradingError(f"the task {task.name} has no solution/solve.sh")
    await sandbox.put(task.folder / "solution", "/solution")
    script = "bash /solution/solve.sh; rm -rf /solution"
    await run_script(sandbox, script, task.solution_env, timeout_s=task.agent_timeout_s)
    return await verify(task, sandbox)


def write_task(folder: Path, *, instruction: str, test: str, files: Mapping[str, str], solution: str = "") -> Path:
    """Write a small task folder, whose commands run in `/app` with these files. Returns it.

    `test` is Bash whose exit status says whether the task is solved.
    """
    judge = f"if (\n{test}\n); then reward=1; else reward=0; fi\necho $reward >/logs/verifier/reward.txt\n"
    written = {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 600\n[verifier]\ntimeout_sec = 60\n',
        "instruction.md": instruction,
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY files /app\n",
        "tests/test.sh": judge,
        "solution/solve.sh": solution,
        **{f"environment/files/{name}": text for name, text in files.items()},
    }
    (folder / "environment" / "files").mkdir(parents=True)
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
