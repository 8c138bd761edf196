"""Agents of the user's own in the sandbox of a terminal task, which judges what they left."""

import os
import tempfile
from pathlib import Path

import pytest
from agent_episodes import ASK, FETCHED, needs_bubblewrap, quoted
from chat_tokenizers import bpe_tokenizer
from scripted_sampler import ScriptedSampler
from shell_tasks import TASKS

from ludic.envs.harbor import choose_sandbox, read_task
from ludic.envs.terminal import TerminalEnv
from ludic.envs.workspaces.workspace import Ended
from ludic.errors import ConfigError, RolloutError
from ludic.inference import InferenceSpec, ReturnSpec, SamplingParams
from ludic.interaction.agent_command import AgentCommand
from ludic.interaction.agent_program import AgentUse
from ludic.recipes.build import build_episodic_task
from ludic.recipes.compose import compose

GIVEN = TASKS[0]
"""Copy a file; the model answers with the command."""


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{FETCHED}")
    needs_bubblewrap()
    return read_task(GIVEN.write(tmp_path))


async def play(task, agent, answer=GIVEN.commands[0], make=None, **settings):
    """The rollout of an agent whose model gives this answer."""
    use = AgentUse(agent, **settings)
    sampler = ScriptedSampler(bpe_tokenizer(), lambda *_: answer)
    env = TerminalEnv(task, make or choose_sandbox(task, "bubblewrap"), max_turns=1)
    try:
        protocol = use.make_protocol(sampler, system_prompt=None)
        inference = InferenceSpec(SamplingParams(1.0, 40), ReturnSpec.for_rl())
        [rollout] = await protocol.run(env=env, max_steps=1, sampling_seed=0, inference=inference)
        return rollout
    finally:
        await env.close()
        use.close()


async def work(session):
    """A function that runs what the model says in the task's sandbox."""
    answer = await session.client().chat.completions.create(model="", messages=session.messages)
    ended = await session.workspace.exec(["bash", "-c", answer.choices[0].message.content], {})
    return f"ended with {ended.code}"


RUN = quoted(f"{ASK}import subprocess\nprint(subprocess.run(ask(sys.argv[1]), shell=True).returncode)")
COMMAND = AgentCommand(["/usr/bin/python3", "-c", RUN, "{prompt}"], sandbox="task")


@pytest.mark.integration
@pytest.mark.parametrize("agent", [work, COMMAND], ids=["function", "command"])
@pytest.mark.parametrize(("answer", "reward"), [(GIVEN.commands[0], 1.0), ("true", 0.0)])
async def test_the_files_that_an_agent_leaves_in_the_sandbox_are_judged(task, agent, answer, reward):
    rollout = await play(task, agent, answer)
    [step] = rollout.steps
    assert (rollout.total_reward, step.action, step.terminated) == (reward, answer, True)
    assert rollout.meta["agent"]["output"] == ("ended with 0" if agent is work else "0")


@pytest.mark.integration
async def test_what_an_agent_says_is_no_command(task):
    async def say(session):
        await session.client().chat.completions.create(model="", messages=session.messages)
        return f"<bash>{GIVEN.commands[0]}</bash>"

    assert (await play(task, say)).total_reward == 0.0


@pytest.mark.integration
async def test_the_deadline_of_the_task_ends_an_agent_and_its_work_is_judged(task):
    object.__setattr__(task, "agent_timeout_s", 3.0)

    async def work_and_wait(session):
        await work(session)
        await session.workspace.exec(["sleep", "60"], {})

    rollout = await play(task, work_and_wait)
    assert (rollout.total_reward, rollout.steps[-1].truncated) == (1.0, True)
    assert rollout.meta["agent"]["status"] == "timeout"
    assert "the task's deadline" in rollout.meta["agent"]["error"]


@pytest.mark.integration
async def test_the_sandbox_of_an_agent_that_loses_its_episode_is_gone(task):
    async def fail(session):
        await work(session)
        raise ValueError("a fault")

    made, make = [], choose_sandbox(task, "bubblewrap")

    def kept():
        made.append(make())
        return made[0]

    with pytest.raises(RolloutError, match="a fault"):
        await play(task, fail, make=kept, on_error="lose")
    assert not made[0].socket.parent.exists()


@pytest.mark.integration
async def test_a_command_finds_its_programs_in_the_folders_that_are_mounted(task):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "solve.py").write_text(f"{ASK}import subprocess\nsubprocess.run(ask(sys.argv[1]), shell=True)")
        command = AgentCommand(["/usr/bin/python3", f"{folder}/solve.py", "{prompt}"], sandbox="task")
        make = choose_sandbox(task, "bubblewrap", mounts=[folder])
        assert (await play(task, command, make=make)).total_reward == 1.0


async def test_a_command_needs_a_sandbox_that_reaches_the_model(tmp_path):
    class Cloud:
        async def start(self): ...
        async def exec(self, argv, variables):
            return Ended(0, "", "")

        async def stop(self): ...

    with pytest.raises(ConfigError, match=r"agent\.function"):
        await play(read_task(GIVEN.write(tmp_path)), COMMAND, make=Cloud)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["agent.sandbox=docker"], r"agent.sandbox \(docker\).*leave it out"),
        (["agent.mounts=[/usr]"], r"agent.mounts.*task.args"),
        (["agent.verify=[check]"], r"agent.verify.*task.args"),
        (["agent.command=null", "agent.function=m:f", "agent.isolate=fork"], "agent.isolate=fork"),
    ],
)
def test_settings_of_a_sandbox_are_the_tasks(tmp_path, settings, message):
    GIVEN.write(tmp_path)
    given = [
        f"data={tmp_path}",
        "model=none",
        "task.args.sandbox=ludic.envs.workspaces.sandbox:BubblewrapRoot",
        "agent.command=[mini]",
        *settings,
    ]
    with pytest.raises(ConfigError, match=message):
        build_episodic_task(compose(given))


def test_a_task_without_sandboxes_has_none_for_an_agent():
    with pytest.raises(ConfigError, match=r"agent.sandbox \(task\).*harbor"):
        build_episodic_task(compose(["sort", "agent.command=[true]", "agent.sandbox=task"]))
