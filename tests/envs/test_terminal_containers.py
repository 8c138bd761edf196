"""Tasks in real containers: a Dockerfile is built, a solution scores, what was killed is lost."""

import asyncio
import random
import shutil
import subprocess
from contextlib import suppress

import pytest
from real_containers import PROGRAMS, changed_environment, copied_root, import_image, in_containers
from real_sandboxes import backend_or_skip
from shell_tasks import SEVERAL_COMMANDS, TASKS, judge

from ludic.envs.harbor import choose_sandbox, read_task
from ludic.envs.terminal import TerminalEnv
from ludic.errors import GradingError, RolloutError

IMAGE = "docker.io/library/ubuntu:24.04"
"""The image of `write_task`. Here it has the programs that the tasks use, from this machine."""
USED = ["bash", "sh", "env", "cat", "cp", "mv", "rm", "ln", "ls", "mkdir", "touch", "chmod", "find", "readlink", "base64"]
USED += ["head", "tail", "tr", "wc", "cut", "sort", "uniq", "join", "grep", "sed", "awk", "tar", "gzip"]


@pytest.fixture(scope="module", params=[in_containers("docker"), in_containers("podman")])
def program(request):
    """Docker or Podman with the image; nothing is left of its containers."""
    with changed_environment(PATH=PROGRAMS), backend_or_skip(request.param) as listed:
        import_image(request.param, copied_root(USED), IMAGE)
        yield request.param
        assert listed() == []


@pytest.mark.parametrize("name", [TASKS[0].name, *(pytest.param(task.name, marks=pytest.mark.slow) for task in TASKS[1:])])
async def test_the_solution_scores_1_and_nothing_and_wrong_ones_score_0(program, name, tmp_path):
    given = next(task for task in TASKS if task.name == name)
    task = read_task(given.write(tmp_path))
    assert [await judge(choose_sandbox(task, program), task, script) for script in (None, "true", *given.wrong)] == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


async def test_a_dockerfile_is_built_with_what_it_runs_and_says(program, tmp_path):
    """`RUN`, `ENV` and `WORKDIR` count, a reward of the agent's own does not, and neither does a
    process that writes one later."""
    folder = TASKS[0].write(tmp_path)
    (folder / "environment" / "Dockerfile").write_text(
        f"FROM {IMAGE}\nRUN mkdir -p /logs/verifier && echo built >/made\nENV WORD=told\nWORKDIR /work\n"
    )
    (folder / "tests" / "test.sh").write_text(
        '[ "$(cat /made) $WORD $(cat answer) $PWD" = "built told yes /work" ] && echo 1 >/logs/verifier/reward.txt && exit\n'
        "echo 0 >/logs/verifier/reward.txt\n"
    )
    task = read_task(folder)
    assert await judge(choose_sandbox(task, program), task, "echo yes >answer") == 1.0
    cheat = "echo 1 >/logs/verifier/reward.txt; (while :; do echo 1 >/logs/verifier/reward.txt; done) >/dev/null 2>&1 &\n"
    assert await judge(choose_sandbox(task, program), task, cheat) == 0.0


@pytest.mark.parametrize("episodes", [8, pytest.param(60, marks=pytest.mark.slow)])
async def test_a_container_that_is_killed_never_makes_a_wrong_verdict(program, episodes, tmp_path):
    """Every second episode is played right, the others leave out the last command."""
    draw, given = random.Random(5), SEVERAL_COMMANDS[0]
    task, made, results = read_task(given.write(tmp_path)), [], {"lost": 0, "right": 0}
    choose = choose_sandbox(task, program)

    def make():
        made.append(choose())
        return made[-1]

    async def kill_some():
        while True:
            await asyncio.sleep(draw.uniform(0.2, 2.0))
            if made:
                argv = [shutil.which(program), "kill", draw.choice(made[-2:])._name]
                await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=60, check=False)

    async def play(number):
        env, commands = TerminalEnv(task, make, max_turns=9), given.commands if number % 2 else given.commands[:-1]
        try:
            await env.env_reset()
            for command in [*(f"<bash>{command}</bash>" for command in commands), "Done."]:
                outcome = await env.env_step(command)
        except (RolloutError, GradingError):
            results["lost"] += 1
        else:
            assert outcome.reward == number % 2
            results["right"] += 1
        finally:
            await env.close()

    killer = asyncio.ensure_future(kill_some())
    for begin in range(0, episodes, 2):
        await asyncio.gather(play(begin), play(begin + 1))
    killer.cancel()
    with suppress(asyncio.CancelledError):
        await killer
    print(f"{program}: {episodes} episodes: {results}")
    assert results["lost"] > 0
    assert results["right"] > 0
