"""A run's folder records its command, and only that command can continue it."""

from pathlib import Path

import pytest
from commands import NETWORK, ludic, refused

from ludic.runs.directory import RunDirectory

SHORTEST = {
    "train": ["warmup.steps=0", "steps=0", "evaluation.prompts=1", "evaluation.samples_per_prompt=1"],
    "sft": ["steps=0", "rows=10"],
    "train-rm": ["steps=0", "pairs=4", "task.args.num_heldout=4"],
    "dpo": ["steps=0", "pairs=4", "task.args.num_heldout=4", "warmup.steps=0", "answers=0"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each command, by name."""
    parent = tmp_path_factory.mktemp("runs")
    for command, settings in SHORTEST.items():
        ludic(command, *settings, *NETWORK, "threads=1", f"output={parent}", f"name={command}")
    return parent


@pytest.mark.parametrize("command", SHORTEST)
@pytest.mark.parametrize("made_by", SHORTEST)
def test_a_folder_of_another_command_is_refused_and_the_error_names_that_command(
    folders: Path, made_by: str, command: str
) -> None:
    given = ["--resume", str(folders / made_by)]
    if command == made_by:
        assert f"Written to {folders / made_by}" in ludic(command, *given)
    else:
        assert f"resume it with `ludic {made_by} --resume {folders / made_by}`" in refused(command, *given)


@pytest.mark.parametrize("command", SHORTEST)
def test_a_folder_without_a_run_is_refused(tmp_path: Path, command: str) -> None:
    assert "is not the folder of a run" in refused(command, "--resume", str(tmp_path))


def test_torn_lines_do_not_count_as_steps(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.metrics.write_text('{"step": 1, "phase": "sft", "a": 1}\n{"step": 2, "ph\n{"step": 2, "phase": "sft", "a": 2}\n7\n')
    assert [line["a"] for line in directory.read_metrics("sft")] == [1, 2]
