"""The jobs of `ludic slurm`: placement, command lines and script, without Slurm."""

import json
import os
import re
import shlex
import socket
import subprocess
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.inference.vllm.in_server.secret import HEADER, VARIABLE
from ludic.launch.slurm import Allocation, Server, SlurmSettings, batch_script, place, run, run_job, server_steps, training_step
from ludic.launch.slurm.run import SECRET, describe, find_status, is_healthy
from ludic.launch.slurm.settings import read_settings, write_settings

GOLDEN = Path(__file__).with_name("slurm_jobs_golden.txt")
TRAIN = ("-m", "ludic.cli", "train", "maths.yaml", "model=qwen")
SETTINGS = SlurmSettings(train=TRAIN, gpus_per_node=4, cpus_per_task=16, partition="gpu", setup=("module load cuda",))
CASES = [
    (name, replace(SETTINGS, nodes=nodes, serve=serve, data_parallel=dp, tensor_parallel=tp))
    for dp, tp in ((2, 1), (1, 2))
    for name, nodes, serve in (("local", 1, False), ("1 node", 1, True), ("2 nodes", 2, True), ("3 nodes", 3, True))
]


def plan(settings):
    allocation = Allocation([f"n{number + 1}" for number in range(settings.nodes)], settings.gpus_per_node)
    return place(settings, allocation)


def as_text():
    parts = []
    for name, settings in CASES:
        placement = plan(settings)
        steps = [*server_steps(settings, placement, "77"), training_step(settings, placement, "77")]
        title = f"=== {name}, dp {settings.data_parallel}, tp {settings.tensor_parallel}"
        parts += [title, *describe(placement), *map(shlex.join, steps), batch_script(settings, settings_file="logs/job.json")]
    return "\n".join(parts)


def test_scripts_and_placements_are_as_reviewed():
    """To accept a change: write `as_text()` to the file and read the difference."""
    assert as_text() == GOLDEN.read_text()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_bash_accepts_the_script(name, settings, tmp_path):
    (tmp_path / "job.sh").write_text(batch_script(settings, settings_file="a b.json"))
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True, timeout=30)


sizes = st.integers(1, 4)


@given(nodes=sizes, gpus=st.integers(0, 8), dp=sizes, tp=sizes)
def test_no_gpu_has_two_uses_and_none_is_idle_that_could_train(nodes, gpus, dp, tp):
    settings = replace(SETTINGS, nodes=nodes, gpus_per_node=gpus, data_parallel=dp, tensor_parallel=tp)
    each = max(0, gpus - (nodes == 1)) // tp
    serving_nodes = -(-dp // each) if each else nodes
    if serving_nodes > max(1, nodes - 1) or not each:
        room = each * max(1, nodes - 1)
        with pytest.raises(ConfigError, match=rf"data_parallel \({dp}\) .*at most {room}; .*room for {room} .*{tp} GPUs"):
            plan(settings)
        return
    placement = plan(settings)
    training = [(node, gpu) for node in placement.train_nodes for gpu in placement.train_gpus]
    serving = [(server.node, gpu) for server in placement.servers for gpu in server.gpus]
    assert len({*training, *serving}) == len(training) + len(serving)
    assert len(training) == (gpus - dp * tp if nodes == 1 else (nodes - serving_nodes) * gpus) > 0
    assert [len(server.gpus) for server in placement.servers] == [tp] * dp
    assert len({server.port for server in placement.servers}) == dp == len(set(placement.urls))


def test_servers_have_as_many_nodes_as_they_need():
    placement = plan(replace(SETTINGS, nodes=4, gpus_per_node=8, data_parallel=8, tensor_parallel=2))
    assert placement.train_nodes == ("n1", "n2")
    assert [(server.node, server.gpus[0]) for server in placement.servers] == [
        (n, gpu) for n in ("n3", "n4") for gpu in (0, 2, 4, 6)
    ]
    assert {server.host for server in placement.servers} == {"n3", "n4"}


def test_without_gpus_a_node_has_one_rank_and_one_rank_needs_no_agent():
    settings = replace(SETTINGS, gpus_per_node=0, serve=False)
    command = training_step(settings, plan(settings), "77")
    assert command[-len(TRAIN) :] == list(TRAIN)
    assert command[-len(TRAIN) - 1] == ".venv/bin/python"
    assert "CUDA_VISIBLE_DEVICES=" in command
    two = replace(settings, nodes=2)
    assert {"ludic.training.ranks.agent", "--nnodes=2", "--nproc-per-node=1"} <= set(training_step(two, plan(two), "77"))


def test_a_trainer_that_names_servers_is_not_told_others():
    told = "inference.url=[http://n2:29525]"
    settings = replace(SETTINGS, nodes=2)  # the server is on another node than the trainer
    assert training_step(settings, plan(settings), "77")[-2:] == [told, "inference.trainer_address=n1"]
    own = replace(settings, train=(*TRAIN, "inference.url=http://other:80"))
    assert told not in training_step(own, plan(own), "77")


def test_a_server_of_ones_own_gets_its_address_and_size():
    address, size = ["--host", "127.0.0.1", "--port", "29525"], ["--tensor-parallel-size", "1"]
    settings = replace(SETTINGS, server=("serve.py", "--quiet"))
    [command] = server_steps(settings, plan(settings), "77")
    assert command[command.index("serve.py") :] == ["serve.py", "--quiet", *address, "--", *size]
    served = replace(SETTINGS, server=("serve.py", "--", "--seed", "1"))
    [command] = server_steps(served, plan(served), "77")
    assert command[command.index("serve.py") :] == ["serve.py", *address, "--", "--seed", "1", *size]


def test_servers_need_a_model():
    settings = replace(SETTINGS, train=("-m", "ludic.cli", "train"))
    with pytest.raises(ConfigError, match="servers need a model"):
        server_steps(settings, plan(settings), "77")


def test_settings_are_read_as_they_were_written(tmp_path):
    (tmp_path / "job.json").write_text(write_settings(SETTINGS))
    read = read_settings(tmp_path / "job.json")
    assert write_settings(read) == write_settings(SETTINGS)
    assert batch_script(read, settings_file="x") == batch_script(SETTINGS, settings_file="x")
    (tmp_path / "job.json").write_text(json.dumps({"train": ["x"], "nods": 2}))
    with pytest.raises(ConfigError, match="must have the settings of a job"):
        read_settings(tmp_path / "job.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, r"nodes \(0\) .*at least 1"),
        ({"gpus_per_node": -1}, r"gpus_per_node \(-1\)"),
        ({"train": ()}, "train is empty"),
        ({"train": "train"}, "must be a list of texts"),
        ({"time": "soon"}, r"time \(soon\)"),
        ({"job_name": "a b"}, r"job_name \('a b'\)"),
        ({"partition": "gpu\n#SBATCH --wrap=x"}, "partition"),
        ({"logs": "my logs"}, r"logs \('my logs'\) must be one word"),
        ({"setup": ("a\nb",)}, "one line of the script"),
        ({"environment": {"A B": "1"}}, "cannot be written into a script"),
        ({"environment": {"HF_TOKEN": "hf_1"}}, "HF_TOKEN would be readable in the script"),
        ({"environment": {"LUDIC_QUEUE_URL": "redis://u:word@h/0"}}, "LUDIC_QUEUE_URL would be readable in the script"),
        ({"master_port": 29525}, r"master_port \(29525\) .*port of the servers"),
        ({"server_port": 80}, r"server_port \(80\) .*at least 1024 and at most 65535"),
        ({"health_timeout_s": 0}, "health_timeout_s"),
        ({"python": ""}, r"python \(''\) must be the path"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("export WANDB_API_KEY=hush", "WANDB_API_KEY"),
        ("export A=1 HF_TOKEN='hush'", "HF_TOKEN"),
        ("cd x; declare -x MY_SECRET=$'hush'", "MY_SECRET"),
        ('export HF_TOKEN="$HOME"hush', "HF_TOKEN"),
        ("export LUDIC_QUEUE_URL=redis://u:hush@h:6379/0", "a password in an address"),
    ],
)
def test_a_secret_in_a_line_of_setup_is_refused_and_not_shown(line, what):
    with pytest.raises(ConfigError, match=f"setup, line 2: {what} .*readable") as raised:
        replace(SETTINGS, setup=("module load cuda", line))
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        *("export TOKENIZERS_PARALLELISM=false", "export HF_TOKEN=$(cat ~/.token)", 'export HF_TOKEN="$MINE"', "unset HF_TOKEN"),
        *("export HF_TOKEN=", "fetch --token=x", "export R=redis://u:$WORD@h/0", "pip install git+https://h:8443/x@main"),
    ],
)
def test_a_line_of_setup_that_shows_no_secret_is_accepted(line):
    assert replace(SETTINGS, setup=(line,)).setup == (line,)


def test_only_paths_of_the_environment_are_exported_below_the_folder_of_submission():
    environment = {
        "A": "./var/a b",
        "B": "/abs",
        "C": "x'y",
        "JUDGE_MODEL": "Qwen/Qwen2.5-7B",
        "HF_HOME": "var/cache/huggingface",
        "HF_HUB": "org/var",
    }
    text = batch_script(replace(SETTINGS, environment=environment), settings_file="s")
    assert """export A="$PWD"/'var/a b'\nexport B=/abs\nexport C='x'"'"'y'\nexport JUDGE_MODEL=Qwen/Qwen2.5-7B\n""" in text
    assert """export HF_HOME="$PWD"/var/cache/huggingface\nexport HF_HUB=org/var\nmodule load cuda\nexec""" in text


@pytest.mark.parametrize(
    ("errors", "status", "found"),
    [
        ("", 0, 0),
        ("srun: error: n2: task 1: Exited with exit code 3\nsrun: error: n1: task 0: Terminated\n", 143, 3),
        ("srun: error: n1: task 0: Killed\nsrun: error: n2: task 1: Exited with exit code 1\n", 137, 137),
        ("srun: error: n2: tasks 1-2: Exited with exit code 75\n", 1, 75),
        ("srun: error: Unable to create step", 1, 1),
    ],
)
def test_the_status_is_that_of_the_first_rank_that_failed(errors, status, found):
    assert find_status(errors, status) == found


def test_a_server_is_healthy_when_it_says_so(monkeypatch):
    answers = [503, 200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answers.pop(0) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert [is_healthy("127.0.0.1", server.server_port) for _ in range(2)] == [False, True]
        server.shutdown()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert not is_healthy("127.0.0.1", free.getsockname()[1])


def test_the_secret_has_the_names_that_servers_and_clients_read():
    assert (SECRET, run.HEADER) == (VARIABLE, HEADER)


class Ended:
    """A server of the job that has ended with status 1, as one whose port is in use."""

    returncode = 1

    def poll(self):
        return self.returncode


class Running(Ended):
    returncode = None


@contextmanager
def listening(secret):
    """A server of another job: healthy, and with a secret of its own. Yields its place."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            is_known = self.path == "/health" or self.headers.get(HEADER) == secret
            self.send_response(200 if is_known else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield Server("n1", (0,), server.server_port, "127.0.0.1")
        server.shutdown()


def test_a_server_of_another_job_is_not_taken_for_one_of_this_job(monkeypatch, capsys):
    monkeypatch.setenv(SECRET, "ours")
    with listening("theirs") as where:
        fault = run._wait_for_health(SETTINGS, [(where, Ended())], Event())
        assert re.search(f"{where.url} ended with status 1, .*answers at {where.url}", fault)
        assert "refuses the secret of this job" in run._wait_for_health(SETTINGS, [(where, Running())], Event())
    assert "healthy" not in capsys.readouterr().out
    with listening("ours") as where:
        assert run._wait_for_health(SETTINGS, [(where, Running())], Event()) is None


def test_a_job_has_a_secret_of_its_own(monkeypatch):
    """The shell that submits jobs may have one, which all of them would share."""
    monkeypatch.setenv(SECRET, "that of the shell")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(run, "find_allocation", lambda *_: Allocation(["n1"], 4))
    monkeypatch.setattr(run.subprocess, "Popen", lambda *_, **__: pytest.fail("no process is needed"))
    seen = []
    monkeypatch.setattr(run, "_started", lambda commands: seen.append(os.environ[SECRET]) or nullcontext([Ended()]))
    monkeypatch.setattr(run, "_wait_for_health", lambda *_: "not healthy")
    assert [run_job(SETTINGS), run_job(SETTINGS)] == [1, 1]
    assert len({*seen, "that of the shell"}) == 3
    assert {len(secret) for secret in seen} == {64}


def test_the_trainer_is_asked_to_save_until_its_step_is_listed(monkeypatch):
    """The controller lists a step some time after its `srun` has begun, and before its processes
    have."""
    server = "77.0 1:00:00 server-0\n"
    listings, asked = [server, f"{server}77.1 0:04 train\n", f"{server}77.1 0:06 train\n"], []

    def ask(*command):
        asked.append(command)
        return listings.pop(0) if command[0] == "squeue" else ""

    clock = [0.0]
    monkeypatch.setattr(run, "_ask", ask)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    ending = run._Ending(120, "77", None)
    for clock[0] in (0.0, 0.25, *(run.ASK_AGAIN_S * again for again in range(1, 5))):
        ending.go_on("asked to stop")
    assert [command[0] for command in asked] == ["squeue", "squeue", "squeue", "scancel"]
    assert asked[-1] == ("scancel", "--ctld", "--signal=TERM", "77.1")


def test_jobs_on_one_machine_have_ports_of_their_own():
    def ports(job):
        made = replace(SETTINGS, ports_of_job=True).with_ports_of(str(job))
        return {made.master_port, made.group_port, *(server.port for server in plan(made).servers)}

    jobs = [ports(job) for job in range(4_000_500, 4_001_500)]
    assert len(set.union(*jobs)) == sum(map(len, jobs))
    assert 1024 < min(set.union(*jobs)) <= max(set.union(*jobs)) < 32768  # below those that Linux gives to clients
    assert SETTINGS.with_ports_of("77") == SETTINGS
