"""Agents that are functions in forked processes: what they are given and see, how they end, and
that nothing of them remains."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from agent_episodes import FETCHED, ROW, needs_bubblewrap, play

from ludic.envs.code_exec.bubblewrap import as_nobody, can_be_read_by_others
from ludic.envs.workspaces import workspace as workspace_module
from ludic.envs.workspaces.fork_server import ForkServer
from ludic.envs.workspaces.workspace import BubblewrapWorkspace, FolderWorkspace
from ludic.errors import ConfigError, RolloutError
from ludic.interaction.agent_fork import AgentFork
from ludic.recipes.agent_section import AgentSection, build_agent
from ludic.recipes.compose import compose

BUBBLEWRAP = pytest.param("bubblewrap", marks=pytest.mark.integration)


@pytest.fixture(params=["none", BUBBLEWRAP])
def sandbox(request, monkeypatch):
    """Sandboxes, with an interpreter that the user of programs in sandboxes can read."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")
    if request.param == "bubblewrap":
        needs_bubblewrap()
        if as_nobody() and not can_be_read_by_others(Path(sys.base_prefix)):
            version = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True, check=True).stdout
            if version.split()[1].rpartition(".")[0] != sysconfig.get_python_version():
                pytest.skip("/usr/bin/python3 is another version than this one")
            own = [path for path in sys.path if not path.startswith(sys.base_prefix)]
            standard = f"/usr/lib/python{sysconfig.get_python_version()}"
            monkeypatch.setattr(sys, "path", [*own, sysconfig.get_path("purelib"), standard, f"{standard}/lib-dynload"])
            monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
            monkeypatch.setattr(sys, "prefix", "/usr")
            monkeypatch.setattr(sys, "base_prefix", "/usr")
    return request.param


def forked(name, sandbox, **settings):
    return AgentFork([f"forked_agents:{name}"], sandbox=sandbox, **settings)


async def test_each_episode_is_a_process_of_one_import_in_a_folder_of_its_own(sandbox, tmp_path, places):
    (tmp_path / "notes.txt").write_text("from files")
    agent = forked("where", sandbox, files=str(tmp_path), env={"OWN": "size {row.size}"})
    rollouts = await play(agent, count=4)
    found = [json.loads(rollout.meta["agent"]["output"]) for rollout in rollouts]
    assert {each["imported_by"] for each in found} == {found[0]["imported_by"]}
    assert os.getpid() not in {found[0]["imported_by"], *(each["pid"] for each in found)}
    assert found[0]["imported_by"] not in {each["pid"] for each in found}
    for each in found:
        assert (each["files"], each["row"], each["own"]) == ([".prompt", "notes.txt"], ROW, "size 3")
        assert each["messages"] == [{"role": "user", "content": "question"}]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert not list(places.iterdir())


@pytest.mark.parametrize("name", ["with_client", "last_message"])
async def test_the_answer_is_what_is_returned_or_the_last_message(name, sandbox):
    rollouts = await play(forked(name, sandbox), count=2)
    assert [rollout.total_reward for rollout in rollouts] == [1.0, 1.0]


ENDS = {
    "raises": "ValueError: gave up",
    "exits": "ended without an answer",
    "no JSON": "set is not JSON serializable",
    "is killed": "ended without an answer",
    "floods": "more than 67108864 bytes",
}


@pytest.mark.parametrize(("how", "error"), ENDS.items())
async def test_an_agent_that_ends_without_an_answer_has_failed(how, error, sandbox):
    [rollout] = await play(forked("ends", sandbox), row={**ROW, "kind": how})
    assert (rollout.meta["agent"]["status"], rollout.total_reward) == ("failed", 0.0)
    assert error in rollout.meta["agent"]["error"]


ANSWERS = {
    "closes its output": "yes",
    "returns twice": "yes" * 100_000,
    "long": "\ud800\n" * 1_000_000,
    "runs a program": "yes",
}


@pytest.mark.parametrize("how", ANSWERS)
async def test_the_answer_is_whole_and_of_the_function_alone(how, sandbox):
    [rollout] = await play(forked("ends", sandbox), row={**ROW, "kind": how})
    assert rollout.meta["agent"]["output"] == ANSWERS[how]


async def test_an_agent_must_return_text():
    with pytest.raises(RolloutError, match="returned int"):
        await play(forked("ends", "none"), row={**ROW, "kind": "wrong type"})


@pytest.mark.parametrize("how", ["leaves a process", "leaves a fork", "hangs"])
async def test_all_processes_end_with_the_answer_or_the_deadline(how, sandbox, places, tmp_path, monkeypatch):
    mark = f"marked_{os.getpid()}"
    (tmp_path / f"{mark}.py").write_text("from forked_agents import ends")
    monkeypatch.syspath_prepend(tmp_path)
    [rollout] = await play(AgentFork([f"{mark}:ends"], sandbox=sandbox), row={**ROW, "kind": how, "mark": mark}, timeout_s=8)
    assert rollout.meta["agent"]["status"] == ("timeout" if how == "hangs" else "ended")
    deadline = time.monotonic() + 10
    while {mark, f"{mark}:ends"} & set(shown_arguments()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not list(places.iterdir())


def shown_arguments():
    return subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout.split()


async def test_processes_have_ended_before_the_answer_is_read(sandbox, tmp_path, monkeypatch):
    mark = f"many_{os.getpid()}"
    (tmp_path / f"{mark}.py").write_text("from forked_agents import ends")
    monkeypatch.syspath_prepend(tmp_path)
    left = []

    def look(session):
        left.append(shown_arguments().count(f"{mark}:ends"))

    agent = AgentFork([f"{mark}:ends"], sandbox=sandbox, verify=["true"])
    monkeypatch.setattr(AgentFork, "run_verify", lambda _, session: asyncio.to_thread(look, session))
    await play(agent, row={**ROW, "kind": "leaves many"})
    assert left == [1]  # the server


@pytest.mark.parametrize("sandbox", [BUBBLEWRAP], indirect=True)
async def test_a_forked_process_has_the_rights_of_a_program_in_the_sandbox(sandbox, monkeypatch):
    monkeypatch.setenv("LUDIC_TEST_SECRET", "hidden")
    [rollout] = await play(forked("rights", sandbox))
    found = json.loads(rollout.meta["agent"]["output"])
    assert {each for each in found.pop("env") if not each.startswith(("OPENAI", "ANTHROPIC"))} == {
        "PATH",
        "HOME",
        "LANG",
        "LUDIC_MODEL",
    }
    status, none = found.pop("status"), "0" * 16
    assert set(status.pop("Uid").split()) == {"1000"}
    assert set(status.pop("Groups").split()) <= {"65534"}
    assert status == {"CapEff": none, "CapPrm": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2"}
    fds = [each for each in found.pop("fds") if each != "/dev/"]
    assert sorted(fds) == ["/tmp/", "/tmp/", "socke"]  # output, errors, the answer
    assert found.pop("processes") == 2
    assert found.pop("executable").startswith("/memfd:python")
    assert {name for name, value in found.items() if value} == {"own"}


@pytest.mark.parametrize("sandbox", [BUBBLEWRAP], indirect=True)
async def test_a_cancelled_start_of_a_sandbox_leaves_no_file(sandbox):
    server = ForkServer(["false"])
    workspace = BubblewrapWorkspace()
    await workspace.start(None, {})
    before = os.listdir("/proc/self/fd")
    task = asyncio.ensure_future(workspace.fork(server, {}, {}))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await workspace.stop()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


async def test_a_server_that_has_ended_is_no_wait(places, monkeypatch):
    monkeypatch.setattr(workspace_module, "STOP_S", 600.0)
    server = forked("where", "none")._server
    server.start()
    server._process.kill()
    server._process.wait()
    workspace = FolderWorkspace()
    async with asyncio.timeout(300):
        with pytest.raises(BrokenPipeError):
            await workspace.fork(server, {}, {})
    await workspace.stop()
    server.stop()


@pytest.mark.parametrize("code", ["import socket\nsocket.setdefaulttimeout(0.01)", "import os\nos.fork = fail"])
async def test_a_server_outlives_a_default_deadline_and_a_fork_that_fails(code, tmp_path, monkeypatch):
    """Its module is found although it is below the interpreter's prefix, and no file of the current
    directory hides a library's module."""
    mark = f"outlived_{os.getpid()}_{len(code)}"
    fail = "import os\ndef fail(real=os.fork):\n    os.fork = real\n    raise BlockingIOError(11, 'none left')\n"
    (tmp_path / f"{mark}.py").write_text(f"{fail}{code}\nfrom forked_agents import last_message")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "random.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    agent = AgentFork([f"{mark}:last_message"], sandbox="none")
    agent._server.start()
    process = agent._server._process
    if "fork" in code:
        workspace = FolderWorkspace()
        ended = await workspace.fork(agent._server, {}, {})
        await workspace.stop()
        assert (ended.code, ended.stderr) == (1, "[Errno 11] none left")
    await asyncio.sleep(0.1)
    monkeypatch.setattr(agent._server, "stop", lambda: None)
    [rollout] = await play(agent)
    assert (rollout.total_reward, agent._server._process, process.poll()) == (1.0, process, None)
    ForkServer.stop(agent._server)


async def test_a_server_that_was_killed_is_started_again():
    agent = forked("with_client", "none")
    agent._server.start()
    os.kill(agent._server._process.pid, signal.SIGKILL)
    agent._server._process.wait()
    [rollout] = await play(agent)
    assert rollout.total_reward == 1.0


async def test_nothing_remains_of_a_run_that_is_killed(tmp_path):
    program = f"""
import time
from ludic.interaction.agent_fork import AgentFork
agent = AgentFork(["killed_{os.getpid()}:solve"], sandbox="none")
agent._server.start()
print(flush=True)
time.sleep(600)
"""
    (tmp_path / f"killed_{os.getpid()}.py").write_text("def solve(session): pass")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as run:
        run.stdout.readline()
        assert f"killed_{os.getpid()}:solve" in shown_arguments()
        run.kill()
    deadline = time.monotonic() + 10
    while f"killed_{os.getpid()}:solve" in shown_arguments():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", ["no_such_module:solve", "forked_agents:no_such_function", "forked_agents:IMPORTED_BY"])
async def test_a_function_that_cannot_be_imported_is_named(name):
    with pytest.raises((ConfigError, RolloutError), match=f"agent.function \\({name}\\)"):
        await play(AgentFork([name], sandbox="none"))


async def test_a_row_that_is_no_json_is_refused():
    with pytest.raises(RolloutError, match="as JSON: Object of type set"):
        await play(forked("with_client", "none"), row={**ROW, "kind": {1}})


def test_the_settings_of_a_process_belong_to_a_forked_function():
    section = AgentSection(function="forked_agents:where", isolate="fork", sandbox="none", env={"A": "b"}, timeout_s=5.0)
    use = build_agent(section, context=None)
    assert (use.function.argv, use.function.env, use.timeout_s) == (["forked_agents:where"], {"A": "b"}, 5.0)
    with pytest.raises(ConfigError, match="only this one has solve"):
        build_agent(AgentSection(function="solve", isolate="fork"), context=None)
    for wrong in (
        ["agent.isolate=fork", "agent.image=x"],
        ["agent.sandbox=none"],
        ["agent.isolate=fork", "agent.output=last_message"],
    ):
        with pytest.raises(ConfigError, match=r"agent\..* needs agent\."):
            compose(["errand", *wrong])
