"""Commands as agents: what they are given, what they see in a sandbox, and that nothing of them
remains."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from agent_episodes import ASK, FETCHED, REACH, needs_bubblewrap, play, quoted
from real_containers import CGROUP, IMAGE, PROGRAMS, changed_environment, in_containers
from real_sandboxes import backend_or_skip

from ludic.envs.code_exec.containers import OWNER, this_process
from ludic.envs.workspaces import containers
from ludic.envs.workspaces.workspace import BubblewrapWorkspace, FolderWorkspace
from ludic.errors import ConfigError, RolloutError
from ludic.interaction.agent_command import AgentCommand, fill

EMPTY_IMAGE = ["--cgroup-parent", f"/{CGROUP}"]
"""Arguments with which the tests' image has links and folders alone."""


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")


SANDBOXES = [pytest.param("bubblewrap", marks=pytest.mark.integration), in_containers("docker"), in_containers("podman")]
CONTAINED = pytest.mark.parametrize("sandbox", SANDBOXES, indirect=True)


@pytest.fixture(scope="module", params=["none", *SANDBOXES])
def sandbox(request):
    """Each sandbox that this machine has; nothing is left of its containers."""
    if request.param == "none":
        yield "none"
        return
    with changed_environment(PATH=f"{PROGRAMS}{os.pathsep}{FETCHED}"), backend_or_skip(request.param) as listed:
        yield request.param
        assert listed() == []


def command(program, *arguments, sandbox="none", **settings):
    words = [python_of(sandbox), "-c", quoted(ASK + program), *arguments]
    return AgentCommand(words, sandbox=sandbox, **{**container(sandbox), **settings})


def python_of(sandbox):
    return sys.executable if sandbox == "none" else "/usr/bin/python3"


def container(sandbox):
    """The settings of a container of the tests' image, which has links into this machine's /usr."""
    arguments = ["--volume", "/usr:/usr:ro", *EMPTY_IMAGE]
    return {"image": IMAGE, "container_args": arguments} if sandbox in ("docker", "podman") else {}


async def test_a_command_calls_the_model_and_its_output_is_the_answer(sandbox, tmp_path):
    (tmp_path / "notes.txt").write_text("from files")
    program = """
assert open("notes.txt").read() == "from files"
assert open(sys.argv[2]).read() == "question" == sys.argv[1]
assert sys.argv[3:] == ["3", os.getcwd()], sys.argv
assert os.environ["OWN"] == "size 3"
print("noise", file=sys.stderr)
print(ask(sys.argv[1]))
"""
    agent = command(
        program,
        "{prompt}",
        "{prompt_file}",
        "{row.size}",
        "{workspace}",
        sandbox=sandbox,
        files=str(tmp_path),
        env={"OWN": "size {row.size}"},
    )
    rollouts = await play(agent, count=2)
    assert [(rollout.total_reward, rollout.meta["agent"]["output"]) for rollout in rollouts] == [(1.0, "yes")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize(
    "output", ["last_message", "file:answer.txt", "file:missing.txt", "file:../../secret", "file:/etc/passwd"]
)
async def test_the_output_may_be_the_last_message_or_a_file_of_the_folder(output):
    agent = command("open('answer.txt', 'w').write(ask('x') + ' in a file'); print('noise')", output=output)
    [rollout] = await play(agent)
    expected = {"last_message": "yes", "file:answer.txt": "yes in a file"}.get(output, "")
    assert rollout.meta["agent"]["output"] == expected


async def test_a_link_out_of_the_folder_is_not_read():
    agent = command("ask('x'); os.symlink('/etc/passwd', 'answer.txt')", output="file:answer.txt")
    [rollout] = await play(agent)
    assert rollout.meta["agent"]["output"] == ""


async def test_a_command_that_fails_is_scored_for_what_it_wrote(sandbox):
    [rollout] = await play(command("print(ask('x'), flush=True); sys.exit('gave up')", sandbox=sandbox))
    assert (rollout.meta["agent"]["status"], rollout.meta["agent"]["output"], rollout.total_reward) == ("failed", "yes", 1.0)
    assert "ended with status 1: gave up" in rollout.meta["agent"]["error"]
    with pytest.raises(RolloutError, match=r"no call .*ended with status 1"):
        await play(command("sys.exit('at once')", sandbox=sandbox))


async def test_all_processes_end_with_the_command_or_its_deadline(sandbox, places):
    mark = f"leftover{os.getpid()}{sandbox}"
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{mark}']"
    child = f"import subprocess; subprocess.Popen({sleeper}, start_new_session=True)"
    await play(command(f"ask('x'); {child}", sandbox=sandbox))
    [rollout] = await play(command(f"ask('x'); {child}; import time; time.sleep(600)", sandbox=sandbox), timeout_s=8)
    assert rollout.meta["agent"]["status"] == "timeout"
    deadline = time.monotonic() + 10
    while mark in subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not list(places.iterdir())


async def test_a_deep_and_a_locked_folder_are_removed(sandbox, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **given: made.append(real(**given)) or made[-1])
    program = """
ask("x")
os.mkdir("locked"); open("locked/file", "w").close(); os.chmod("locked", 0o555)
for _ in range(1500):
    os.mkdir("a"); os.chdir("a")
print("yes")
"""
    [rollout] = await play(command(program, sandbox=sandbox))
    assert rollout.total_reward == 1.0
    assert made
    assert not any(os.path.exists(path) for path in made)


real = tempfile.mkdtemp


@pytest.mark.integration
@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"], indirect=True)
async def test_a_process_of_an_agent_that_is_killed_costs_its_own_episode_alone(sandbox, places):
    """50 kills at random moments, of any process between this one and the agent."""
    mark, draw, killed = f"agent-{os.getpid()}-{sandbox}", random.Random(7), []

    def processes():
        shown = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout
        return [int(line.split()[0]) for line in shown.splitlines() if mark in line]

    async def kill_some():
        while len(killed) < 50:
            await asyncio.sleep(draw.uniform(0.02, 0.2))
            if found := processes():
                pid = draw.choice(found)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer, rollouts = asyncio.ensure_future(kill_some()), []
    while not killer.done():
        with suppress(RolloutError):  # all of these were killed
            agent = command("import time; ask('x'); time.sleep(0.3); print(ask('y'))", mark, sandbox=sandbox)
            rollouts += await play(agent, count=8, on_error="lose")
    rollouts += await play(agent, count=2, on_error="lose")
    assert len(rollouts) >= 2
    assert {(rollout.total_reward, len(rollout.steps), rollout.meta["agent"]["status"]) for rollout in rollouts} == {
        (1.0, 2, "ended")
    }
    deadline = time.monotonic() + 10
    while processes():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not list(places.iterdir())
    assert str(places) not in Path("/proc/net/unix").read_text()  # other tests have sockets too


@pytest.mark.integration
async def test_keys_and_secrets_are_no_arguments_of_a_process(monkeypatch):
    needs_bubblewrap()
    monkeypatch.setenv("LUDIC_TEST_SECRET", "hidden-secret")
    program = "ask('x'); import time; time.sleep(2); print(os.environ['LUDIC_TEST_SECRET'])"
    playing = asyncio.ensure_future(play(command(program, sandbox="bubblewrap", secrets=["LUDIC_TEST_SECRET"])))
    seen = ""
    while not playing.done():
        seen += subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout
        await asyncio.sleep(0.1)
    [rollout] = playing.result()
    assert rollout.meta["agent"]["output"] == "hidden-secret"
    assert "bwrap" in seen
    assert "hidden-secret" not in seen
    assert "sk-ludic-" not in seen


@pytest.mark.integration
async def test_a_sandbox_shows_mounted_folders_to_read_alone(tmp_path):
    needs_bubblewrap()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "own_library.py").write_text("VALUE = 'yes'")
        program = """
ask("x")
sys.path.insert(0, sys.argv[1])
import own_library
try:
    open(sys.argv[1] + "/x", "w")
except OSError:
    print(own_library.VALUE)
"""
        [rollout] = await play(command(program, folder, sandbox="bubblewrap", mounts=[folder]))
    assert rollout.total_reward == 1.0


@pytest.mark.integration
async def test_a_sandbox_has_no_way_out():
    needs_bubblewrap()
    program = (
        REACH
        + """
ask("x")
found = reach()
for path in ("/root", "/home", "/etc/passwd", "/work", "/tmp/../proc/1/root/root"):
    try:
        found[path] = bool(os.listdir(path) if path != "/etc/passwd" else open(path).read())
    except OSError:
        found[path] = False
found["env"] = sorted(os.environ)
for path in ("/usr/x", "/x", "/run/x"):
    try:
        open(path, "w").close()
        found[path] = True
    except OSError:
        found[path] = False
print(json.dumps(found))
"""
    )
    os.environ["LUDIC_TEST_SECRET"] = "hidden"
    try:
        [rollout] = await play(command(program, sandbox="bubblewrap"))
    finally:
        del os.environ["LUDIC_TEST_SECRET"]
    found = json.loads(rollout.meta["agent"]["output"])
    names = {"PATH", "HOME", "LANG", "PWD", "LUDIC_MODEL", "LC_CTYPE"}
    assert {each for each in found.pop("env") if not each.startswith(("OPENAI", "ANTHROPIC"))} <= names
    assert {name for name, value in found.items() if value} == {"own"}


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=pytest.mark.integration)], indirect=True)
async def test_processes_have_ended_when_the_work_of_a_late_command_is_verified(sandbox, monkeypatch):
    mark, left = f"late{os.getpid()}{sandbox}", []

    async def look(agent, session):
        for place in Path("/proc").glob("[0-9]*/cmdline"):  # at once: to start `ps` takes longer than they do
            with suppress(OSError):
                left.extend([mark] if mark in place.read_text() else [])

    monkeypatch.setattr(AgentCommand, "run_verify", look)
    sleepers = f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'], start_new_session=True)"
    program = f"import subprocess, time; ask('x'); [{sleepers} for _ in range(60)]; time.sleep(600)"
    await play(command(program, sandbox=sandbox, verify=["true"]), timeout_s=8)
    assert left == []


@pytest.mark.integration
async def test_a_fork_bomb_and_a_full_disk_end_with_the_episode():
    needs_bubblewrap()
    bomb = """
ask("x")
import subprocess
try:
    with open("big", "wb") as file:
        for _ in range(1200):
            file.write(bytes(1 << 20))
except OSError:
    print("file limit")
children = []
try:
    while True:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
except OSError:
    print("process limit")
print(ask("still answered"))
"""
    [rollout] = await play(command(bomb, sandbox="bubblewrap"), timeout_s=60)
    assert rollout.meta["agent"]["output"].split("\n") == ["file limit", "process limit", "yes"]


@CONTAINED
async def test_a_relay_that_may_not_run_is_named(sandbox):
    """As if TMPDIR was mounted noexec."""
    bubblewrap = sandbox == "bubblewrap"
    workspace = BubblewrapWorkspace() if bubblewrap else containers.ContainerWorkspace(sandbox, IMAGE, arguments=EMPTY_IMAGE)
    (workspace._run / "relay").chmod(0o644)
    try:
        await workspace.start(None, {})
        said = (await workspace.exec(["true"], {})).stderr
    except RolloutError as error:
        said = str(error)
    finally:
        await workspace.stop()
    assert re.search("/run/ludic/relay.*ermission denied", said), said


@CONTAINED
async def test_orphans_are_reaped(sandbox):
    program = """
import subprocess, time
print(ask("x"))
for _ in range(20):
    subprocess.run(["sh", "-c", "sleep 0.1 &"])
deadline = time.monotonic() + 20
while len([name for name in os.listdir("/proc") if name.isdigit()]) > 3:  # with the first process and the relay
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""
    [rollout] = await play(command(program, sandbox=sandbox))
    assert (rollout.meta["agent"]["status"], rollout.meta["agent"]["output"]) == ("ended", "yes")


async def test_work_is_verified_when_every_process_of_the_agent_has_ended(sandbox, tmp_path):
    (tmp_path / "check.py").write_text("""
import os, time
time.sleep(4)
print("noise")
print(0.5 if open("work").read() == "done" and not os.path.exists("late") and os.path.exists(__file__) else 0)
""")
    program = """
ask("x")
import glob, subprocess
assert not glob.glob("/run/ludic/tests*") and not glob.glob("../run/tests*"), "the agent sees the tests"
late = "import time; time.sleep(3); open('late', 'w').close()"
subprocess.Popen([sys.executable, "-c", late], start_new_session=True)
open("work", "w").write("done")
"""
    python = python_of(sandbox)
    agent = command(program, sandbox=sandbox, verify=[python, "{tests}/check.py"], tests=str(tmp_path))
    [rollout] = await play(agent)
    assert rollout.meta["agent"]["status"] == "ended", rollout.meta["agent"]["error"]
    assert rollout.steps[-1].info["verified"] == "noise\n0.5"


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        ("import sys; sys.exit('broken')", "wrote '' and ended with status 1: broken"),
        ("import os; print(1, flush=True); os.kill(os.getpid(), 9)", "wrote '1' and ended with status"),
        ("import time; time.sleep(600)", "TimeoutError"),
    ],
)
async def test_a_verification_that_fails_has_written_nothing_or_loses_the_episode(sandbox, verify, said, caplog):
    python = python_of(sandbox)
    agent = command("ask('x')", sandbox=sandbox, verify=[python, "-c", verify])
    [rollout] = await play(agent, timeout_s=5)
    assert rollout.steps[-1].info["verified"] == ""
    assert said in caplog.text
    if sandbox == "none" and "broken" in said:
        with pytest.raises(RolloutError, match=r"agent\.verify failed"):
            await play(agent, timeout_s=5, on_error="lose")


async def test_a_pipe_is_no_output_and_a_narrow_umask_does_no_harm(sandbox):
    before = os.umask(0o077)
    try:
        [rollout] = await play(command("ask('x'); os.mkfifo('pipe')", sandbox=sandbox, output="file:pipe"), timeout_s=30)
    finally:
        os.umask(before)
    assert (rollout.meta["agent"]["status"], rollout.meta["agent"]["output"]) == ("ended", "")


@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"], indirect=True)
async def test_a_cancelled_command_leaves_nothing(sandbox, places, tmp_path):
    """Cancelled at moments of its start, 40 times."""
    mark, draw = f"cancelled-{os.getpid()}-{sandbox}", random.Random(3)
    python = python_of(sandbox)
    (tmp_path / "files").mkdir()
    files, seconds = len(os.listdir("/proc/self/fd")), []
    for _ in range(40):
        workspace = FolderWorkspace() if sandbox == "none" else BubblewrapWorkspace()
        await workspace.start(tmp_path / "files", {"a": "b"})
        running = asyncio.ensure_future(workspace.exec([python, "-c", "import time; time.sleep(600)", mark], {}))
        await asyncio.sleep(draw.uniform(0, 0.08))
        running.cancel()
        begun = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await running
        await workspace.stop()
        seconds.append(time.monotonic() - begun)
    deadline = time.monotonic() + 10
    while mark in subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert max(seconds) < 20, seconds
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # of the event loop
    assert not list(places.iterdir())


@pytest.fixture
def container_sandbox(sandbox):
    if sandbox not in ("docker", "podman"):
        pytest.skip("about containers")
    return sandbox


@pytest.mark.integration
async def test_a_container_has_no_way_out_and_keeps_what_was_installed(container_sandbox):
    program = (
        REACH
        + """
ask("x")
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
found = reach() | {name: status[name] for name in ("CapEff", "CapBnd", "NoNewPrivs")}
found["env"] = sorted(name for name in os.environ if "SECRET" in name or "DOCKER" in name)
found["writes"] = os.access("/run/ludic", os.W_OK)
open("/tmp/installed", "w").write("1")
print(json.dumps(found))
"""
    )
    verify = ["/usr/bin/python3", "-c", "print(open('/tmp/installed').read())"]
    os.environ["LUDIC_TEST_SECRET"] = "hidden"
    try:
        arguments = [*container(container_sandbox)["container_args"], "--volume", "/anonymous"]
        [rollout] = await play(command(program, sandbox=container_sandbox, verify=verify, container_args=arguments))
    finally:
        del os.environ["LUDIC_TEST_SECRET"]
    assert rollout.meta["agent"]["status"] == "ended", rollout.meta["agent"]["error"]
    none = "0" * 16
    assert json.loads(rollout.meta["agent"]["output"]) == {
        "CapEff": none,
        "CapBnd": none,
        "NoNewPrivs": "1",
        "env": [],
        "writes": False,
        "network": False,
        "ssh": False,
        "own": True,
    }
    assert rollout.steps[-1].info["verified"] == "1"
    volumes = subprocess.run([container_sandbox, "volume", "ls", "--quiet"], capture_output=True, text=True, check=True)
    assert volumes.stdout == ""


@pytest.mark.integration
async def test_a_cancelled_start_of_a_container_leaves_nothing(container_sandbox):
    draw, arguments = random.Random(4), container(container_sandbox)["container_args"]
    listing = [container_sandbox, "ps", "--all", "--quiet"]
    for _ in range(8):
        workspace = containers.ContainerWorkspace(container_sandbox, IMAGE, arguments=arguments)
        starting = asyncio.ensure_future(workspace.start(None, {}))
        await asyncio.sleep(draw.uniform(0, 1))
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        await workspace.stop()
        assert subprocess.run(listing, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.integration
async def test_a_container_of_a_process_that_was_killed_goes_with_the_next_run(container_sandbox):
    machine, _, start = this_process().rsplit(" ", 2)
    labelled = [
        "--name",
        "left",
        "--label",
        f"{OWNER}={machine} {2**22 + 1} {start}",
        *container(container_sandbox)["container_args"],
    ]
    subprocess.run([container_sandbox, "create", *labelled, IMAGE, "true"], check=True, capture_output=True)
    containers._remover.cache_clear()
    await play(command("ask('x')", sandbox=container_sandbox))
    assert subprocess.run([container_sandbox, "inspect", "left"], capture_output=True, check=False).returncode != 0


@pytest.mark.integration
async def test_a_container_that_cannot_start_says_why(container_sandbox):
    with pytest.raises(RolloutError, match="pull` of no-such-image:1 failed"):
        await play(command("ask('x')", sandbox=container_sandbox, image="no-such-{row.kind}:1"))
    with pytest.raises(RolloutError, match="/usr/bin/python3 cannot be started: No such file"):
        await play(command("ask('x')", sandbox=container_sandbox, container_args=EMPTY_IMAGE))


@pytest.mark.integration
async def test_an_image_needs_no_python_and_no_c_library_of_its_own(container_sandbox):
    """The agent is a shell; all files of its container are shown here, but for two."""
    shell = os.path.realpath("/bin/bash")
    libraries = re.findall(r"/lib\S+", subprocess.run(["ldd", shell], capture_output=True, text=True, check=True).stdout)
    shown = {shell: "/usr/bin/bash", **{os.path.realpath(path): f"/usr{path.removeprefix('/usr')}" for path in libraries}}
    program = """
body='{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
exec 3<>/dev/tcp/127.0.0.1/8000
printf 'POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %s\r\ncontent-length: %s\r\n\r\n%s' \
    "$OPENAI_API_KEY" "${#body}" "$body" >&3
while read -r -u 3 line && [ "$line" != $'\r' ]; do [[ $line != content-length:* ]] || size=${line//[^0-9]/}; done
read -r -N "$size" -u 3 answer
[[ $answer != *'"content":"yes"'* ]] || echo yes
for program in python3 sh cat; do ! command -v $program; done
"""
    volumes = [part for source, target in shown.items() for part in ("--volume", f"{source}:{target}:ro")]
    agent = AgentCommand(
        ["bash", "-c", quoted(program)],
        sandbox=container_sandbox,
        image=IMAGE,
        container_args=[*EMPTY_IMAGE, *volumes],
        verify=["bash", "-c", "echo verified"],
    )
    [rollout] = await play(agent)
    assert (rollout.meta["agent"]["output"], rollout.steps[-1].info["verified"]) == ("yes", "verified"), rollout.meta["agent"]


@pytest.mark.parametrize(
    ("argv", "settings", "said"),
    [
        ([], {}, r"agent.command \(\[\]\) must be a list"),
        (["no-such-program"], {}, "is no program on PATH"),
        (["true", "{answer}"], {}, r"has \{answer\}"),
        (["true"], {"output": "stderr"}, "agent.output"),
        (["true"], {"files": "no/such/folder"}, "agent.files"),
        (["true"], {"secrets": ["NO_SUCH_VARIABLE"]}, "agent.secrets"),
        (["true"], {"sandbox": "docker"}, "belong together"),
        (["true"], {"image": "python:3.12"}, "belong together"),
        (["true"], {"image": "{nope}", "sandbox": "docker"}, r"agent.image has \{nope\}"),
        (["true"], {"verify": "true"}, r"agent.verify \('true'\) must be a list"),
        (["true"], {"tests": "no/such/folder"}, "agent.tests"),
        (["true"], {"mounts": ["relative"]}, "agent.mounts"),
        (["true"], {"mounts": ["/usr"]}, "agent.sandbox is none"),
        (["true", "{tests}"], {}, r"agent.command has \{tests\}"),
        (["true"], {"env": {"A": "{nope}"}}, r"agent.env.A has \{nope\}"),
    ],
)
def test_settings_that_cannot_be_are_refused(argv, settings, said):
    with pytest.raises(ConfigError, match=said):
        AgentCommand(argv, **{"sandbox": "none", **settings})


def test_without_bubblewrap_a_sandbox_has_to_be_turned_off(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"agent\.sandbox=none"):
        AgentCommand(["true"])


def test_placeholders_are_filled_in_and_braces_doubled():
    values = {"prompt": "{x}", "row.a": 3}
    assert fill("{prompt} {{y}} {row.a}", values) == "{x} {y} 3"
    with pytest.raises(ConfigError, match="no such column; it has a"):
        fill("{row.b}", values)
