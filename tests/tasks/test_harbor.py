"""Task folders as problems: the division, `ludic eval` and `ludic train` on them, a sandbox of
one's own, and the shell task that is built in."""

import json
import os
import shutil
import sys
import types
from collections import namedtuple
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
from agent_episodes import FETCHED, needs_bubblewrap
from playing import tiny_model
from shell_tasks import TASKS
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.envs.harbor import choose_sandbox, read_task
from ludic.envs.terminal import run_script, verify, write_task
from ludic.envs.workspaces.sandbox import BubblewrapRoot
from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_line_tokenizer
from ludic.tasks.harbor import Harbor
from ludic.tasks.terminal import LETTERS, Terminal

SMALL = ["threads=1", "rollout.prompts=1", "rollout.group_size=2", "rollout.max_new_tokens=8", "task.args.max_turns=2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")


@pytest.fixture
def tasks(tmp_path):
    for task in TASKS:
        task.write(tmp_path / "tasks")
    (tmp_path / "tasks" / "README.md").write_text("not a task")
    return tmp_path / "tasks"


@pytest.fixture
def policy(tmp_path):
    tokenizer = make_line_tokenizer()
    tokenizer.save_pretrained("policy")
    tiny_model(eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024).save_pretrained("policy")
    return "policy"


def run(*arguments, status=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def ids(problems):
    return [problem["id"] for problem in problems]


@pytest.mark.integration
def test_a_tenth_of_the_tasks_is_held_out_and_all_can_be_measured(tasks):
    needs_bubblewrap()
    task = Harbor(str(tasks), sandbox="bubblewrap")
    held, trained = ids(task.suites()["held out"]), ids(task.training)
    assert (len(held), len(trained)) == (2, 18)
    assert sorted(held + trained) == ids(task.suites()["all"]) == sorted(each.name for each in TASKS)
    assert ids(Harbor(str(tasks), sandbox="bubblewrap").training) == trained
    assert len(Harbor(str(tasks), sandbox="bubblewrap", num_heldout=5).training) == 15
    other = write_task(Path("other/own").absolute(), instruction="Do it.", test="true", files={}).parent
    task = Harbor(str(tasks), sandbox="bubblewrap", heldout_data=str(other), measures=["speed"])
    assert (ids(task.suites()["held out"]), len(task.training)) == (["own"], 20)
    assert "verifier/speed" in task.measures
    with pytest.raises(ConfigError, match=r"num_heldout \(21\).*20 tasks"):
        Harbor(str(tasks), sandbox="bubblewrap", num_heldout=21)


def test_a_folder_without_tasks_is_an_error():
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=r"data \(empty\) has no folder with a task.toml"):
        Harbor("empty")
    with pytest.raises(ConfigError, match=r"data \(None\) must be a folder of tasks"):
        Harbor()


@pytest.mark.integration
def test_keys_without_an_effect_are_told_once_for_all_tasks(tasks, caplog):
    needs_bubblewrap()
    for name in ("copy", "sum"):
        (tasks / name / "task.toml").write_text('[agent]\nuser = "x"\n')
    Harbor(str(tasks), sandbox="bubblewrap")
    assert [record.getMessage() for record in caplog.records] == ["keys of task.toml without an effect here: agent.user"]


@pytest.mark.integration
def test_a_folder_of_tasks_is_evaluated_and_trained(tasks, policy):
    needs_bubblewrap()
    run("eval", "data=tasks", f"model={policy}", *SMALL[:1], "task.args.max_turns=2", "max_tokens=8", "name=measured")
    summary = json.loads(Path("runs/measured/summary.json").read_text())
    assert (summary["task"], summary["suite"], summary["num_problems"]) == ("harbor", "all", 20)
    assert (summary["accuracy"]["value"], summary["num_failed_episodes"]) == (0.0, 0)
    run("train", "task.kind=harbor", "data=tasks", f"model={policy}", *SMALL, "steps=1", "evaluation.prompts=1", "name=trained")
    assert json.loads(Path("runs/trained/summary.json").read_text())["status"] == "finished"
    assert "no such setting" not in run("eval", "runs/trained", "name=again")
    assert json.loads(Path("runs/again/summary.json").read_text())["suite"] is None


def test_rewards_of_functions_are_for_rows(tasks):
    assert "task.kind=data" in run("eval", "data=tasks", "model=policy", "reward=number", status=2)


class StubFiles:
    def __init__(self, root):
        self._root = root

    async def write(self, path, data):
        folder = self._root.written / path.strip("/").replace("/", "-")
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(data)
        await self._root.put(folder, "/put")
        await self._root.exec(["/bin/mv", "/put/file", path], {})


class CommandExitException(Exception):
    def __init__(self, ended):
        super().__init__(ended.stderr)
        self.exit_code, self.stdout, self.stderr = ended


class StubSandbox:
    """The interface of `e2b.AsyncSandbox`, over bubblewrap."""

    made: ClassVar[list] = []

    @classmethod
    async def create(cls, template=None, *, timeout, envs, allow_internet_access):
        assert (template, timeout > 0, allow_internet_access) == (None, True, True)
        self = cls()
        self._root = BubblewrapRoot(folder="/app", env=envs, texts={"in": "a\nb\n"})
        self._root.written = Path("written").absolute()
        self._root.written.mkdir()
        await self._root.start()
        self.files, self.commands, self.is_alive = StubFiles(self._root), self, True
        cls.made.append(self)
        return self

    async def run(self, cmd, *, envs, cwd, timeout, user):
        assert cwd is None
        assert user in ("user", "root")
        if not self.is_alive:
            raise RuntimeError("the sandbox was not found")
        ended = await self._root.exec(
            ["/bin/bash", "-c", cmd.replace("/tests", "/tmp/tests")], envs
        )  # whose root cannot be written
        if ended.code:
            raise CommandExitException(ended)
        return namedtuple("Result", "exit_code stdout stderr")(*ended)

    async def kill(self):
        self.is_alive = False
        await self._root.stop()


@pytest.mark.integration
async def test_a_cloud_provider_is_a_class_of_a_hundred_lines(tasks, monkeypatch):
    """The example, against a stub of the provider's interface."""
    needs_bubblewrap()
    examples = Path(__file__).parents[2] / "examples"
    assert len((examples / "e2b_sandbox.py").read_text().splitlines()) <= 100
    monkeypatch.setitem(
        sys.modules, "e2b", types.SimpleNamespace(AsyncSandbox=StubSandbox, CommandExitException=CommandExitException)
    )
    monkeypatch.syspath_prepend(str(examples))
    task = read_task(tasks / "copy")
    sandbox = choose_sandbox(task, "e2b_sandbox:E2BSandbox")()
    try:
        await sandbox.start()
        assert (await sandbox.exec(["false"], {})).code == 1
        assert (await verify(task, sandbox))["reward"] == 0.0
        assert await run_script(sandbox, "echo $X; exit 4", {"X": "1 2"}, timeout_s=30) == ("1 2\n", 4)
        StubSandbox.made[-1].is_alive = False
        with pytest.raises(RuntimeError, match=r"not found"):
            await verify(task, sandbox)
    finally:
        await sandbox.stop()
    assert not StubSandbox.made[-1].is_alive


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(3))
async def test_the_shell_task_is_solved_by_reading_two_files(seed):
    needs_bubblewrap()
    task = Terminal()
    episode = task.draw(Random(seed))
    start, files = episode["question"], episode["files"]
    for letter, reward in {episode["answer"]: 1.0, next(each for each in LETTERS if each != episode["answer"]): 0.0}.items():
        env = task.make_env(episode)
        try:
            assert (await env.env_reset())[0] == start
            assert (await env.env_step(f"$cat {start}")).obs == files[start]
            assert (await env.env_step(f"$cat {files[start]}")).obs == episode["answer"]
            outcome = await env.env_step(f"$echo {letter}>out")
            assert (outcome.reward, outcome.terminated) == (reward, True)
        finally:
            await env.close()


@pytest.mark.integration
async def test_its_demonstrations_are_what_the_shell_shows():
    """The teacher's observations are the environment's."""
    needs_bubblewrap()
    task = Terminal(right=0.3, guess=0.2, wrong_file=0.3)
    rng, seen, kinds = Random(5), [], set()
    for turns in task.demonstrations(12, Random(5)):
        episode = task.draw(rng)
        rng = _after(task, episode, rng)
        env = task.make_env(episode)
        shown = (await env.env_reset())[0]
        for turn in turns:
            seen.append((turn.observation, shown))
            shown = (await env.env_step(turn.action)).obs
        await env.close()
        kinds.add(tuple(turn.action[:2] for turn in turns))
    assert all(given == shown for given, shown in seen)
    assert kinds == {("$c", "$c", "$e"), ("$c", "$e", "."), ("$e", ".")}


def _after(task, episode, rng):
    """The generator after the teacher's draws for this episode."""
    task._demonstrate(episode, rng)
    return rng


def test_the_shares_of_the_teacher(monkeypatch):
    monkeypatch.setattr("ludic.tasks.terminal._check_bubblewrap", lambda: None)
    task = Terminal()
    counts = {"right": 0, "guess": 0}
    rng, made = Random(1), 2000
    for _ in range(made):
        episode = task.draw(rng)
        actions = [turn.action for turn in task._demonstrate(episode, rng)]
        counts["guess"] += len(actions) == 2
        right = [f"$cat {episode['question']}", f"$cat {episode['files'][episode['question']]}", f"$echo {episode['answer']}>out"]
        counts["right"] += actions == right
    assert abs(counts["guess"] / made - 0.62) < 0.04  # four standard deviations: 4 * sqrt(.62 * .38 / 2000)
    assert abs(counts["right"] / made - 0.16) < 0.034
    with pytest.raises(ConfigError, match=r"sum \(1\.1\d*\)"):
        Terminal(right=0.5, guess=0.5)


def test_the_shell_task_needs_bubblewrap(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"task.kind=terminal needs bubblewrap \(`apt install bubblewrap`"):
        Terminal().demonstrations(1, Random(0))


@pytest.mark.integration
def test_tasks_are_tested_by_their_solutions(tasks):
    needs_bubblewrap()
    (tasks / "copy" / "tests" / "test.sh").write_text("echo 1 >/logs/verifier/reward.txt")
    (tasks / "count" / "solution" / "solve.sh").write_text("exit 3")
    (tasks / "sum" / "solution" / "solve.sh").unlink()
    told = run("agent", "try", "--solution", "data=tasks", "task.args.sandbox=bubblewrap", status=1)
    wrong = {"WRONG  copy: solution 1, nothing done 1", "WRONG  count: solution 0, nothing done 0"}
    wrong.add("WRONG  sum: GradingError: the task sum has no solution/solve.sh")
    assert {line for line in told.splitlines() if line.startswith("WRONG")} == wrong
    assert "17 of 20 tasks are right" in told
    for name in ("copy", "count", "sum"):
        shutil.rmtree(tasks / name)
    given = ["task.args.sandbox=bubblewrap", "--json"]
    told = run("agent", "try", "--solution", "data=tasks", *given)
    assert json.loads(told[told.index("{") :]).keys() == {task.name for task in TASKS[3:]}


def test_solutions_are_of_task_folders():
    assert "data=FOLDER" in run("agent", "try", "--solution", "sort", status=2)


@pytest.mark.integration
def test_a_function_works_in_the_sandboxes_of_tasks_before_and_in_a_run(tasks, policy, monkeypatch):
    """Measuring prompts starts no sandbox, so that many tasks cost nothing before a run."""
    needs_bubblewrap()
    started, start = [], BubblewrapRoot.start

    async def counted(sandbox, *arguments):
        started.append(sandbox)
        await start(sandbox, *arguments)

    monkeypatch.setattr(BubblewrapRoot, "start", counted)
    Path("my_agent.py").write_text(
        "async def solve(session):\n"
        "    answer = await session.client().chat.completions.create(model='', messages=session.messages)\n"
        "    await session.workspace.exec(['bash', '-c', 'cp in out'], {})\n"
        "    return answer.choices[0].message.content\n"
    )
    monkeypatch.syspath_prepend(os.getcwd())
    given = ["data=tasks", f"model={policy}", "agent=my_agent:solve", "task.args.sandbox=bubblewrap", *SMALL[:-1]]
    shown = run("agent", "try", *given)
    assert len(started) == 1
    assert "reward" in shown
    run("train", *given, "steps=1", "evaluation.prompts=1", "name=trained")
    assert json.loads(Path("runs/trained/summary.json").read_text())["status"] == "finished"
    run("eval", "data=tasks", f"model={policy}", *given[2:-3], "name=measured")
    assert json.loads(Path("runs/measured/summary.json").read_text())["accuracy"]["value"] == 1 / 20  # the task `copy`
