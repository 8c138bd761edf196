"""`ludic slurm`: the plan that it prints, and the job that it submits."""

import logging
import os
import shlex

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.launch.slurm.settings import read_settings
from ludic.recipes.actors import check_actors
from ludic.recipes.compose import compose
from ludic.runs.directory import RunDirectory
from ludic.runs.resume import parse_changes

SERVED = ["sort", "model=here", "inference=vllm", "rollout.prompts=4"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def slurm(*arguments):
    result = CliRunner().invoke(app, ["slurm", *arguments])
    return result.exit_code, result.output


def test_the_task_infoseed_is_grpo_with_seeds():
    code, output = slurm("maxent", "info_seed.num_seeds=2", "--task", "infoseed", "--gpus-per-node", "0")
    assert code == 0
    assert "train maxent info_seed.num_seeds=2 algorithm=grpo" in output


def test_it_prints_the_script_and_the_commands_and_submits_nothing(tmp_path):
    code, output = slurm(*SERVED, "--nodes", "2", "--dp", "2", "--tp", "2", "--gpus-per-node", "4", "--task", "grpo")
    assert code == 0
    lines = output.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gres=gpu:4", "#SBATCH --job-name=sort-grpo"} <= set(lines)
    assert "# training: 4 ranks on each of node0, GPUs 0, 1, 2, 3" in lines
    assert "# server: http://node1:29526, GPUs 2, 3" in lines
    [train] = [line for line in lines if "--job-name=train" in line]
    assert shlex.split(train)[-11:] == [
        *("train", *SERVED, "algorithm=grpo", "inference.kind=vllm", "inference.python=null", "inference.server_args=[]"),
        *("inference.url=[http://node1:29525,http://node1:29526]", "inference.trainer_address=node0"),
    ]
    assert "serve here --logprobs-mode raw_logprobs --device auto --host node1 --port 29525 -- --tensor-parallel-size 2" in output
    assert "# A job has ports of its own, by its number, in place of these" in lines
    assert "in place of these" not in slurm(*SERVED, "--vllm-port", "29999")[1]
    assert list(tmp_path.iterdir()) == []


def test_the_batch_of_a_flat_file_is_that_of_the_jobs_ranks(tmp_path, caplog):
    """Before the job is placed its ranks are not known, and no batch is refused."""
    (tmp_path / "m.yaml").write_text(
        "{train_grpo_objective: true, force_custom_loop: true, model_name_or_path: here, dataset_name: rows, num_generations: 8,\n"
        "per_device_train_batch_size: 2, gradient_accumulation_steps: 1}\n"
    )
    code, output = slurm("m.yaml", "--nodes", "2", "--gpus-per-node", "8", "--accelerator", "zero3")
    assert (code, caplog.text.count("force_custom_loop has no effect")) == (0, 1), output
    assert "# a step: 4 problems x 8 answers" in output.splitlines()
    assert "train m.yaml sharding.kind=full" in output
    assert "a step: 2 problems x 8 answers" in slurm("m.yaml", "--gpus-per-node", "8")[1]
    code, output = slurm("m.yaml", "--gpus-per-node", "3")
    assert code != 0
    assert "is 6 answers, which num_generations (8) must divide" in " ".join(output.replace("│", " ").split())
    assert "must be one of ddp, fsdp, zero2, zero3" in " ".join(
        slurm("sort", "--accelerator", "tpu")[1].replace("│", " ").split()
    )


def test_the_variables_of_other_launchers_name_recipe_and_model(tmp_path, monkeypatch):
    (tmp_path / "m.yaml").write_text(
        "{train_grpo_objective: true, model_name_or_path: here, use_vllm: true, dataset_name: rows}\n"
    )
    monkeypatch.setenv("GRPO_RECIPE", "m.yaml")
    monkeypatch.setenv("VLLM_MODEL", "served")
    train, server = read_job("max_steps=3")
    assert train[train.index("train") :][:3] == ["train", "m.yaml", "max_steps=3"]
    assert server[server.index("serve") :][:2] == ["serve", "served"]
    assert "m.yaml" not in read_job("sort", "model=here", "inference=vllm")[0]
    shown = CliRunner().invoke(app, ["train", "max_steps=3", "--print-config"]).output
    assert "\nsteps: 3\n" in shown
    assert "\nmodel: here\n" in shown


def test_a_server_reads_its_limits_from_the_environment(monkeypatch):
    seen = []
    monkeypatch.setattr("ludic.cli.serve.serve_command", lambda settings, *rest, **more: seen.append(settings) or 0)
    monkeypatch.setenv("VLLM_MAX_LEN", "777")
    monkeypatch.setenv("VLLM_MEM_UTIL", "0.5")
    monkeypatch.setenv("MAXENT_GRPO_LOGLEVEL", "debug")
    logger = logging.getLogger("ludic")
    monkeypatch.setattr(logger, "level", logger.level)
    assert CliRunner().invoke(app, ["serve", "here"]).exit_code == 0
    assert (seen[0].max_model_len, seen[0].gpu_memory_utilization, logger.level) == (777, 0.5, logging.DEBUG)
    CliRunner().invoke(app, ["serve", "here", "--max-model-len", "5"])
    assert seen[1].max_model_len == 5


def test_a_submitted_job_has_its_settings_beside_its_script(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text('#!/bin/bash\necho "$@" >asked\necho "4711;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    code, output = slurm("sort", "--gpus-per-node", "0", "--setup", "module load x", "--submit")
    assert (code, output) == (0, "Submitted job 4711; logs are in var/artifacts/logs\n")
    [script] = (tmp_path / "var" / "artifacts" / "logs").glob("*.sh")
    assert (tmp_path / "asked").read_text().split() == ["--parsable", str(script.relative_to(tmp_path))]
    settings = read_settings(script.with_suffix(".json"))
    assert settings.ports_of_job
    assert (settings.serve, settings.train, settings.setup) == (False, ["-m", "ludic.cli", "train", "sort"], ["module load x"])
    assert {file.stat().st_mode & 0o777 for file in (script, script.with_suffix(".json"))} == {0o600}
    assert f"ludic.launch.slurm.job {script.with_suffix('.json').relative_to(tmp_path)}" in script.read_text()
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    code, output = slurm("sort", "--gpus-per-node", "0", "--submit")
    assert code != 0
    assert "sbatch refused var/artifacts/logs" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sort", "model=here", "--dp", "2"], "--dp and --tp need servers; set inference=vllm"),
        (
            [*SERVED, "inference.url=http://127.0.0.1:1", "--tp", "2"],
            "--dp and --tp need servers; set inference=vllm",
        ),
        (["sort", "inference=vllm"], "a server needs a model"),
        (
            [*SERVED, "--gpus-per-node", "1"],
            "data_parallel (1) must be at most 0; ",
        ),
        (["sort", "lr=3"], "there is no setting 'lr'"),
        (["sort", "place.actors=2"], "ludic slurm places the processes itself"),
        (["sort", "--task", "dpo"], "--task ('dpo') must be one of grpo, maxent,"),
        (["maxent", "--task", "infoseed"], "--task infoseed needs seeds; set info_seed.num_seeds=N"),
        ([*SERVED, "queue.url=x.sqlite", "queue.order=nonsense"], "queue.order (nonsense) must be one of exact, arrival"),
        (["sort", "queue.lease_s=5"], "queue.lease_s (5.0) needs place.actors or queue.url"),
        ([*SERVED, "--setup", "export WANDB_API_KEY=abc"], "setup, line 1: WANDB_API_KEY would be readable"),
        (["--resume", "none"], "none"),
        (["sort", "--time", "soon"], "time (soon) must be a time limit"),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(arguments, message):
    code, output = slurm(*arguments)
    assert code != 0
    assert message in " ".join(output.replace("│", " ").split())


def read_job(*arguments):
    """(train, server): the arguments of the trainer and of the server in the plan."""
    code, output = slurm(*arguments)
    assert code == 0, output
    commands = [shlex.split(line.removeprefix("# ")) for line in output.splitlines() if line.startswith("# srun")]
    return commands[-1], commands[0]


def test_a_password_is_written_nowhere(tmp_path):
    """`ludic train` refuses it too, since it writes settings."""
    for where in ("queue.url='redis://u:secretpw@h:6379/0'", "m.yaml"):
        (tmp_path / "m.yaml").write_text("model: here\nqueue: {url: 'redis://u:secretpw@h:6379/0'}\n")
        recipe = [where] if where == "m.yaml" else ["sort", "model=here", where]
        code, output = slurm(*recipe, "inference=vllm", "--submit")
        assert code != 0
        assert "must have no password" in " ".join(output.replace("│", " ").split())
        assert "secretpw" not in output
        assert [file.name for file in tmp_path.iterdir()] == ["m.yaml"]


def test_the_servers_of_a_job_have_the_settings_of_the_server_that_a_file_describes(tmp_path):
    (tmp_path / "m.yaml").write_text("model: here\ninference: {python: /vllm/python, server_args: [--seed, '3']}\n")
    train, server = read_job("m.yaml")
    assert server[server.index("serve") :][:6] == ["serve", "here", "--logprobs-mode", "raw_logprobs", "--python", "/vllm/python"]
    assert server[server.index("--") :] == ["--", "--seed", "3", "--tensor-parallel-size", "1"]
    recipe = compose(train[train.index("train", train.index("-m")) + 1 :])  # as the trainer reads it
    check_actors(recipe)
    assert (recipe.inference.python, recipe.inference.server_args) == (None, [])
    assert recipe.inference.url == ["http://127.0.0.1:29525"]


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        (["rollout.temperature=0.7"], "processed_logprobs"),
        (["rollout.temperature=0.7", "rollout.top_p=0.9"], "raw_logprobs"),
        (["rollout.temperature=1.0"], "raw_logprobs"),
    ],
)
def test_servers_return_the_log_probabilities_that_the_trainer_computes(settings, mode):
    _, server = read_job(*SERVED, *settings)
    assert server[server.index("--logprobs-mode") + 1] == mode


def test_a_run_is_resumed_with_the_servers_of_the_new_job(tmp_path):
    last = ["inference.kind=vllm", "inference.url=[http://old:1]", "inference.trainer_address=old"]
    RunDirectory.begin(compose(["sort", "model=here", "name=a", "steps=9", *last])).release()
    train, server = read_job("--resume", "runs/a", "steps=12")
    command = train[train.index("train", train.index("-m")) + 1 :]
    assert command == [
        *("--resume", "runs/a", "steps=12", "inference.python=null", "inference.server_args=[]"),
        *("inference.url=[http://127.0.0.1:29525]", "inference.trainer_address=127.0.0.1"),
    ]
    assert parse_changes(command[2:], "train").steps == 12
    assert server[server.index("serve") + 1] == "here"
    train, _ = read_job("--resume", "runs/a", "inference.url=http://mine:80")
    assert train[-3:] == ["--resume", "runs/a", "inference.url=http://mine:80"]
    for wrong in (["trainer.lr=1"], ["--task", "grpo"]):
        code, output = slurm("--resume", "runs/a", *wrong)
        assert code != 0
        assert "--resume accepts steps=N" in " ".join(output.replace("│", " ").split())
