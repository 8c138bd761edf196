"""Episodes in a shell: twenty tasks with their solutions and with wrong ones, sandboxes that are
killed, what the model sees, and what becomes of a bad reward."""

import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from agent_episodes import FETCHED, needs_bubblewrap
from hypothesis import given, strategies as st
from shell_tasks import SEVERAL_COMMANDS, TASKS, judge

from ludic.envs.harbor import choose_sandbox, read_task
from ludic.envs.terminal import (
    COMMANDS_INFO,
    TIMED_OUT_INFO,
    NoCommandError,
    TerminalEnv,
    read_rewards,
    read_tagged,
    run_script,
    shorten,
    write_task,
)
from ludic.errors import GradingError, RolloutError


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")


@pytest.fixture
def places(monkeypatch):
    """Where sandboxes have their files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def make(task):
    needs_bubblewrap()
    return choose_sandbox(task, "bubblewrap")


def own_task(folder, test=None, **given):
    made = write_task(folder / "own", **{"instruction": "Do it.", "test": "true", "files": {}, **given})
    if test is not None:
        (made / "tests" / "test.sh").write_text(test)
    return read_task(made)


@pytest.mark.integration
@pytest.mark.parametrize("given", TASKS, ids=lambda given: given.name)
async def test_the_solution_scores_1_and_nothing_and_wrong_ones_score_0(given, tmp_path):
    task = read_task(given.write(tmp_path))
    scripts = [None, "true", *given.wrong]
    assert await asyncio.gather(*(judge(make(task), task, script) for script in scripts)) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_there_are_twenty_tasks_of_which_ten_need_several_commands():
    assert len({task.name for task in TASKS}) == 20
    assert [len(task.commands) > 1 for task in TASKS] == [False] * 10 + [True] * 10


async def play(task, commands, **settings):
    """(the outcomes, the reward) of an episode with these commands."""
    env = TerminalEnv(task, make(task), **{"max_turns": 9, **settings})
    try:
        assert (await env.env_reset())[0] == task.instruction
        outcomes = []
        for command in [*(f"<bash>{command}</bash>" for command in commands), "Done."]:
            outcomes.append(await env.env_step(command))
            if outcomes[-1].terminated or outcomes[-1].truncated:
                return outcomes
    finally:
        await env.close()
    raise AssertionError("the episode did not end")


@pytest.mark.integration
@pytest.mark.parametrize("given", SEVERAL_COMMANDS, ids=lambda given: given.name)
async def test_several_commands_of_an_episode_solve_a_task(given, tmp_path, places):
    outcomes = await play(read_task(given.write(tmp_path)), given.commands)
    assert [outcome.reward for outcome in outcomes] == [0.0] * len(given.commands) + [1.0]
    assert outcomes[-1].terminated
    assert outcomes[-1].info == {COMMANDS_INFO: len(given.commands), TIMED_OUT_INFO: 0}
    assert not list(places.iterdir())


@pytest.mark.integration
@pytest.mark.parametrize("episodes", [40, pytest.param(500, marks=pytest.mark.slow)])
async def test_a_sandbox_that_is_killed_never_makes_a_wrong_verdict(episodes, tmp_path, places):
    """A random process of a random sandbox is killed again and again. Every second episode is
    played right, the others wrong; those that were not lost have the verdict of an
    undisturbed one."""
    draw, results, killed = random.Random(11), Counter(), 0
    given = [task for task in TASKS if len(task.commands) == 3]
    tasks = [read_task(task.write(tmp_path)) for task in given]

    async def kill_some():
        nonlocal killed
        while True:
            await asyncio.sleep(draw.uniform(0.01, 0.3))
            if found := sandbox_processes(places):
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(found), signal.SIGKILL)
                    killed += 1

    async def play_one(number):
        which = draw.randrange(len(tasks))
        expected = float(number % 2)
        commands = given[which].commands if expected else given[which].commands[:-1]
        try:
            outcomes = await play(tasks[which], commands)
        except (RolloutError, GradingError):
            results["lost"] += 1
        else:
            results["right" if outcomes[-1].reward == expected else "wrong"] += 1

    killer = asyncio.ensure_future(kill_some())
    for begin in range(0, episodes, 10):
        await asyncio.gather(*map(play_one, range(begin, min(begin + 10, episodes))))
    killer.cancel()
    print(f"{episodes} episodes, {killed} processes killed: {dict(results)}")
    assert results["wrong"] == 0
    assert results["right"] > 0
    assert results["lost"] > 0
    assert results.total() == episodes
    deadline = time.monotonic() + 20
    while sandbox_processes(places):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not list(places.iterdir())


def sandbox_processes(places):
    """The processes of sandboxes below the folder: bubblewrap, the relay, and the shell that tells
    how a command ended."""
    parents, found = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if b"bwrap" in (command := (entry / "cmdline").read_bytes()) and str(places).encode() in command:
                found.add(int(entry.name))
    inside = {pid for pid, parent in parents.items() if parent in found}
    return sorted(found | inside | {pid for pid, parent in parents.items() if parent in inside})


@pytest.mark.integration
async def test_what_an_agent_left_does_not_reach_the_verdict(tmp_path):
    """A reward of its own, tests of its own, processes that write later, locked folders."""
    task = own_task(tmp_path, test="[ -f /app/done ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt")
    cheats = [
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' >/logs/verifier/reward.json",
        "ln -s /app /logs/verifier; echo 1 >/app/reward.txt",
        "mkdir -p /logs/verifier/x; touch /logs/verifier/x/y; chmod 0 /logs/verifier/x; chmod 500 /logs",
        "(while true; do mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; done) & disown",
        "mkdir -p /tmp/tests; echo 'echo 1 >/logs/verifier/reward.txt' >/tmp/tests/test.sh; ln -s /tmp/tests /tests",
    ]
    for cheat in cheats:
        assert await judge(make(task), task, cheat) == 0.0, cheat
    assert await judge(make(task), task, "touch done") == 1.0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("true", r"own.*wrote no reward"),
        ("echo nan >/logs/verifier/reward.txt", r"nan.*must be finite"),
        ("echo high >/logs/verifier/reward.txt", r"cannot be read: could not convert"),
        ("head -c 70000 /dev/zero | tr '\\0' 1 >/logs/verifier/reward.txt", r"more than 64000 bytes"),
        ("echo 1 >/logs/verifier/reward.txt; kill -9 $$", r"test.sh .*own was killed"),
        ("sleep 60", r"deadline, verifier.timeout_sec \(2\)"),
    ],
)
async def test_a_bad_reward_is_an_error_and_not_0(test, said, tmp_path):
    folder = own_task(tmp_path, test=test).folder
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 2\n")
    task = read_task(folder)
    with pytest.raises(GradingError, match=said):
        await judge(make(task), task, "true")


@given(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9), max_size=4))
def test_the_numbers_of_reward_json_are_read(numbers):
    """With a `reward` in it, else with the one of reward.txt."""
    expected = {"reward": 0.5, **{name: float(value) for name, value in numbers.items()}}
    assert read_rewards(json.dumps({**numbers, "note": "x", "ok": True}), "0.5\n") == expected


@pytest.mark.parametrize(
    ("as_json", "as_text"),
    [(None, None), (None, ""), ("[1]", None), ("{", "1"), ('{"reward": NaN}', "1"), ('{"reward": true}', None)],
)
def test_other_content_has_no_reward(as_json, as_text):
    with pytest.raises(GradingError):
        read_rewards(as_json, as_text)


def test_a_command_is_in_tags_or_a_call_of_the_tool():
    assert read_tagged("Look. <bash>\nls -a\n</bash> And <bash>pwd</bash>") == "ls -a"
    assert read_tagged("<think><bash>rm x</bash></think>Solved.") is None
    call = {"name": "bash", "arguments": {"command": "ls"}}
    assert read_tagged(f"<tool_call>{json.dumps(call)}</tool_call>") == "ls"
    assert read_tagged(f"<tool_call>{json.dumps({**call, 'arguments': json.dumps(call['arguments'])})}</tool_call>") == "ls"
    for text in (
        "<bash>ls",
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "python", "arguments": {"command": "1"}}</tool_call>',
    ):
        with pytest.raises(NoCommandError):
            read_tagged(text)


@given(st.text(), st.integers(2, 50))
def test_an_output_is_cut_in_its_middle(text, most):
    cut = shorten(text, most)
    if len(text) <= most:
        assert cut == text
    else:
        assert cut.startswith(text[: most - most // 2])
        assert cut.endswith(text[-(most // 2) :])
        assert f"{len(text) - most} characters left out" in cut


@pytest.mark.integration
async def test_what_the_model_sees_of_its_commands(tmp_path, places):
    task = own_task(tmp_path, files={"a": "1\n"})
    outcomes = await play(
        task, ["cat a; cat b >&2; false", "seq 1000", "sleep 30", "true\0", "exit 3"], command_timeout_s=2, most_shown=20
    )
    shown = [outcome.obs for outcome in outcomes]
    assert shown[0].startswith("1\ncat: b: ")
    assert shown[1].startswith("1\n2\n3\n4\n5\n\n... ")
    assert shown[1].endswith("\n999\n1000")
    assert shown[2] == "The command was ended after 2 s, and its output is lost."
    assert shown[3].startswith("No command was run: ")
    assert shown[4] == "(exit status 3)"
    assert outcomes[-1].info == {COMMANDS_INFO: 5, TIMED_OUT_INFO: 1}


@pytest.mark.integration
async def test_the_last_turn_and_the_deadline_of_the_task_end_the_work(tmp_path):
    task = own_task(tmp_path, test="[ -f /app/done ]; echo $? >/logs/verifier/reward.txt")
    outcomes = await play(task, ["touch done", "echo never"], max_turns=1)
    assert [(outcome.reward, outcome.terminated) for outcome in outcomes] == [(0.0, True)]
    (task.folder / "task.toml").write_text("[agent]\ntimeout_sec = 1\n")
    outcomes = await play(read_task(task.folder), ["sleep 20", "touch done"])
    assert [(outcome.reward, outcome.truncated, outcome.terminated) for outcome in outcomes] == [(1.0, True, False)]
    with pytest.raises(RolloutError, match=r"call reset"):
        await TerminalEnv(task, make(task), max_turns=1).env_step("x")


@pytest.mark.integration
async def test_bubblewrap_has_the_files_of_the_dockerfile_and_keeps_what_is_written(tmp_path):
    task = own_task(tmp_path, files={"a b": "1", "sub/c": "2"})
    environment = task.environment
    (environment / "Dockerfile").write_text(
        "# comment\nFROM python:3.12 AS base\nWORKDIR /data\nWORKDIR in\nENV ONE=1 TWO='2 2'\nENV THREE three 3\n"
        'COPY files/sub \\\n  /opt/sub\ncopy "files/a b" files/sub/c ./\n'
    )
    sandbox = choose_sandbox(read_task(task.folder), "bubblewrap")()
    try:
        await sandbox.start()
        script = 'pwd; cat "a b" c /opt/sub/c; echo $ONE $TWO $THREE $HOME; echo kept >/tmp/x'
        text, _ = await run_script(sandbox, script, {}, timeout_s=30)
        assert text.splitlines()[:2] == ["/data/in", "1221 2 2 three 3 /root"]
        text, _ = await run_script(sandbox, "touch /etc/x /usr/x /x; rm /bin", {}, timeout_s=30)
        assert text.count("Read-only file system") == 4
        assert await sandbox.get("/tmp/x") == "kept\n"
        assert await sandbox.get("/tmp/y") is None
    finally:
        await sandbox.stop()
