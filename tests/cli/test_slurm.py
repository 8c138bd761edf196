"""`ludic slurm`: the plan that it prints, and the job that it submits."""

import os
import shlex

import pytest
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.launch.slurm.settings import read_settings

SERVED = ["sort", "model=here", "inference=vllm", "rollout.prompts=4"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def slurm(*arguments):
    result = CliRunner().invoke(app, ["slurm", *arguments])
    return result.exit_code, result.output


def test_it_prints_the_script_and_the_commands_and_submits_nothing(tmp_path):
    code, output = slurm(*SERVED, "--nodes", "2", "--dp", "2", "--tp", "2", "--gpus-per-node", "4", "--task", "grpo")
    assert code == 0
    lines = output.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gres=gpu:4", "#SBATCH --job-name=sort-grpo"} <= set(lines)
    assert "# training: 4 ranks on each of node0, GPUs 0, 1, 2, 3" in lines
    assert "# server: http://node1:29526, GPUs 2, 3" in lines
    [train] = [line for line in lines if "--job-name=train" in line]
    assert (
        shlex.split(train)[-7:]
        == [
            *("train", "sort", "model=here", "rollout.prompts=4", "algorithm=grpo"),
            *("inference.kind=vllm", "inference.url=[http://node1:29525,http://node1:29526]", "inference.trainer_address=node0"),
        ][-7:]
    )
    assert "serve here --device auto --host node1 --port 29525 -- --tensor-parallel-size 2" in output
    assert list(tmp_path.iterdir()) == []


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
    assert (settings.serve, settings.train, settings.setup) == (False, ["-m", "ludic.cli", "train", "sort"], ["module load x"])
    assert f"ludic.launch.slurm.job {script.with_suffix('.json').relative_to(tmp_path)}" in script.read_text()
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    code, output = slurm("sort", "--gpus-per-node", "0", "--submit")
    assert code != 0
    assert "sbatch refused var/artifacts/logs" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sort", "inference=vllm"], "a server needs a model that is on disk or on the hub"),
        ([*SERVED, "--gpus-per-node", "1"], "servers need 1 of the 1 GPUs of a node, and training needs at least one more"),
        (["sort", "lr=3"], "there is no setting 'lr'"),
        (["sort", "place.actors=2"], "ludic slurm places the processes itself"),
        (["sort", "--task", "dpo"], "--task (dpo) must be one of grpo, maxent, maxent-grpo"),
        (["sort", "--time", "soon"], "time (soon) must be a time limit of Slurm"),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(arguments, message):
    code, output = slurm(*arguments)
    assert code != 0
    assert message in " ".join(output.replace("│", " ").split())
