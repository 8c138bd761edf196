"""examples/reward_model: the script is `ludic train-rm`, and the job script runs it with existing
flags."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.recipes.epochs_schema import compose_rm

FOLDER = Path(__file__).parents[2] / "examples" / "reward_model"
SCRIPT, JOB = FOLDER / "train_rm_bradley_terry.py", FOLDER / "train_rm_isambard.slurm"
NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=300, check=True)


def test_the_documented_command_of_the_script_resolves() -> None:
    said = ast.get_docstring(ast.parse(SCRIPT.read_text()))
    [shown] = re.findall(r"train_rm_bradley_terry\.py \\\n(.*?)\n\n", str(said), re.DOTALL)
    recipe = compose_rm(shlex.split(shown.replace("\\\n", " ")))
    assert (recipe.model, recipe.data, recipe.lora.rank) == ("Qwen/Qwen2.5-0.5B", "stanfordnlp/SHP", 8)
    assert (recipe.trainer.eval_every_n_steps, recipe.trainer.early_stopping_patience) == (100, 5)


def test_the_job_passes_on_its_flags_with_those_of_the_user_last(tmp_path: Path) -> None:
    environment = {"SRUN": "", "PYTHON": "echo", "OUTPUT_DIR": "out", "STEPS": "7"}
    shown = run(["bash", str(JOB), "--limit", "40", "seed=3"], tmp_path, **environment).stdout
    recipe = compose_rm(shlex.split(shown)[1:])
    assert (recipe.steps, recipe.limit, recipe.seed, recipe.name) == (7, 40, 3, "out")
    assert shlex.split(run(["bash", str(JOB)], tmp_path, RESUME="1", **environment).stdout)[1:] == ["--resume", "out"]


def test_the_job_requests_its_resources_from_slurm() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", JOB.read_text(), re.MULTILINE))
    assert asked.keys() >= {"nodes", "gpus", "time", "signal", "output"}
    assert asked["signal"].startswith("TERM@")  # on this signal a run saves its state


@pytest.mark.integration
def test_the_script_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "2", "--batch-size", "4", "--output-dir", "mine", "pairs=20", *NETWORK]
    run([*command, "task.args.num_heldout=10"], tmp_path)
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["steps"] == 2
