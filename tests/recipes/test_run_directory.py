"""A run's folder says which command made it, and only that one goes on with it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludic.cli import app

NETWORK = ["network.hidden_size=16", "network.num_heads=2", "network.num_kv_heads=1", "network.intermediate_size=16"]
SHORTEST = {
    "train": ["warmup.steps=0", "steps=0", "evaluation.prompts=1", "evaluation.samples_per_prompt=1"],
    "sft": ["steps=1", "rows=10"],
    "train-rm": ["steps=0", "pairs=4", "task.args.num_heldout=4"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each command, by its name."""
    parent = tmp_path_factory.mktemp("runs")
    for command, settings in SHORTEST.items():
        result = CliRunner().invoke(app, [command, *settings, *NETWORK, "threads=1", f"output={parent}", f"name={command}"])
        assert result.exit_code == 0, result.output
    return parent


@pytest.mark.parametrize("command", SHORTEST)
@pytest.mark.parametrize("made_by", SHORTEST)
def test_a_folder_of_another_command_is_refused_with_the_command_that_made_it(folders: Path, made_by: str, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--resume", str(folders / made_by)])
    if command == made_by:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 1
    assert f"go on with `ludic {made_by} --resume {folders / made_by}`" in result.stderr


@pytest.mark.parametrize("command", SHORTEST)
def test_a_folder_without_a_run_is_refused(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--resume", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not the folder of a run" in result.stderr
