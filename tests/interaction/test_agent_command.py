"""Commands as agents: what they are given, what they see in a sandbox, and that nothing of them
remains."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler

from ludic.envs import DatasetQAEnv
from ludic.envs.code_exec.bubblewrap import is_bubblewrap_available
from ludic.errors import ConfigError, RolloutError
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction.agent_command import AgentCommand, fill
from ludic.interaction.agent_program import AgentUse
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.types import EnvSpec, ProtocolSpec, RolloutRequest

FETCHED = Path(__file__).parents[2] / "target" / "bubblewrap"
ASK = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"model": os.environ["LUDIC_MODEL"], "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked, timeout=20))["choices"][0]["message"]["content"]
"""
ROW = {"prompt": "question", "question": "question", "answer": "yes", "size": 3}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")


def sandboxes():
    """`none`, and bubblewrap where this machine has it."""
    return [
        "none",
        pytest.param("bubblewrap", marks=pytest.mark.integration),
    ]


def needs(sandbox):
    if sandbox == "bubblewrap" and not is_bubblewrap_available():
        pytest.skip("no bwrap: `make bubblewrap` fetches it")


def command(program, *arguments, sandbox="none", **settings):
    python = sys.executable if sandbox == "none" else "/usr/bin/python3"
    return AgentCommand(
        [python, "-c", (ASK + program).replace("{", "{{").replace("}", "}}"), *arguments], sandbox=sandbox, **settings
    )


async def play(agent, *, count=1, **settings):
    use = AgentUse(agent, **settings)
    sampler = ScriptedSampler(bpe_tokenizer(), lambda *_: "yes")
    engine = RolloutEngine(
        env_registry={"question": lambda: DatasetQAEnv(ROW)},
        protocol_registry={"agent": lambda: use.make_protocol(sampler, system_prompt=None)},
        max_retries=0,
    )
    inference = InferenceSpec(SamplingParams(1.0, 40), ReturnSpec.for_rl())
    requests = [
        RolloutRequest(EnvSpec("question"), ProtocolSpec("agent"), sampling_seed=i, inference=inference) for i in range(count)
    ]
    try:
        return await engine.generate_rollouts(requests, max_steps=1, for_training=True)
    finally:
        use.close()


@pytest.mark.parametrize("sandbox", sandboxes())
async def test_a_command_calls_the_model_and_its_output_is_the_answer(sandbox, tmp_path):
    needs(sandbox)
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


@pytest.mark.parametrize("sandbox", sandboxes())
async def test_a_command_that_fails_is_scored_for_what_it_wrote(sandbox):
    needs(sandbox)
    [rollout] = await play(command("print(ask('x'), flush=True); sys.exit('gave up')", sandbox=sandbox))
    assert (rollout.meta["agent"]["status"], rollout.meta["agent"]["output"], rollout.total_reward) == ("failed", "yes", 1.0)
    assert "ended with status 1: gave up" in rollout.meta["agent"]["error"]
    with pytest.raises(RolloutError, match=r"no call .*ended with status 1"):
        await play(command("sys.exit('at once')", sandbox=sandbox))


@pytest.mark.parametrize("sandbox", sandboxes())
async def test_all_processes_end_with_the_command_or_its_deadline(sandbox, tmp_path, monkeypatch):
    needs(sandbox)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if sandbox == "bubblewrap":  # the user of sandboxes has to reach it
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(0o711)
    mark = f"leftover{os.getpid()}{sandbox}"
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{mark}']"
    child = f"import subprocess; subprocess.Popen({sleeper}, start_new_session=True)"
    await play(command(f"ask('x'); {child}", sandbox=sandbox))
    [rollout] = await play(command(f"ask('x'); {child}; import time; time.sleep(600)", sandbox=sandbox), timeout_s=3)
    assert rollout.meta["agent"]["status"] == "timeout"
    deadline = time.monotonic() + 10
    while mark in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not list(tmp_path.glob("ludic-agent-*"))


@pytest.mark.parametrize("sandbox", sandboxes())
async def test_a_deep_and_a_locked_folder_are_removed(sandbox, tmp_path, monkeypatch):
    needs(sandbox)
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
async def test_keys_and_secrets_are_no_arguments_of_a_process(monkeypatch):
    needs("bubblewrap")
    monkeypatch.setenv("LUDIC_TEST_SECRET", "hidden-secret")
    program = "ask('x'); import time; time.sleep(2); print(os.environ['LUDIC_TEST_SECRET'])"
    playing = asyncio.ensure_future(play(command(program, sandbox="bubblewrap", secrets=["LUDIC_TEST_SECRET"])))
    seen = ""
    while not playing.done():
        seen += subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        await asyncio.sleep(0.1)
    [rollout] = playing.result()
    assert rollout.meta["agent"]["output"] == "hidden-secret"
    assert "bwrap" in seen
    assert "hidden-secret" not in seen
    assert "sk-ludic-" not in seen


@pytest.mark.integration
async def test_a_sandbox_shows_mounted_folders_to_read_alone(tmp_path):
    needs("bubblewrap")
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
    needs("bubblewrap")
    program = """
import socket
ask("x")
found = {}
for name, address in {"network": ("1.1.1.1", 53), "ssh": ("127.0.0.1", 22), "own": ("127.0.0.1", 8000)}.items():
    try:
        socket.create_connection(address, 1).close()
        found[name] = True
    except OSError:
        found[name] = False
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
    os.environ["LUDIC_TEST_SECRET"] = "hidden"
    try:
        [rollout] = await play(command(program, sandbox="bubblewrap"))
    finally:
        del os.environ["LUDIC_TEST_SECRET"]
    found = json.loads(rollout.meta["agent"]["output"])
    names = {"PATH", "HOME", "LANG", "PWD", "LUDIC_MODEL", "LC_CTYPE"}
    assert {each for each in found.pop("env") if not each.startswith(("OPENAI", "ANTHROPIC"))} <= names
    assert {name for name, value in found.items() if value} == {"own"}


@pytest.mark.integration
async def test_a_fork_bomb_and_a_full_disk_end_with_the_episode():
    needs("bubblewrap")
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
"""
    [rollout] = await play(command(bomb, sandbox="bubblewrap"), timeout_s=60)
    assert rollout.meta["agent"]["output"].split("\n") == ["file limit", "process limit"]


@pytest.mark.parametrize(
    ("argv", "settings", "said"),
    [
        ([], {}, r"agent.command \(\[\]\) must be a list"),
        (["no-such-program"], {}, "is no program on PATH"),
        (["true", "{answer}"], {}, r"has \{answer\}"),
        (["true"], {"output": "stderr"}, "agent.output"),
        (["true"], {"files": "no/such/folder"}, "agent.files"),
        (["true"], {"secrets": ["NO_SUCH_VARIABLE"]}, "agent.secrets"),
        (["true"], {"sandbox": "docker"}, "agent.sandbox"),
        (["true"], {"mounts": ["relative"]}, "agent.mounts"),
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
