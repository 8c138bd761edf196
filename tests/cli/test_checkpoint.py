"""`ludic checkpoint list` and `verify` look at all weights that a run can go back to."""

from pathlib import Path

from ludic.cli.checkpoint import checkpoint_command, find_checkpoints
from ludic.files.manifest import write_manifest


def folder_with_weights(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}\n")
    write_manifest(path, {"step": 2})
    return path


def test_the_weights_of_the_best_evaluation_are_verified_too(tmp_path: Path) -> None:
    phase = tmp_path / "run" / "checkpoints" / "reinforce"
    folders = [folder_with_weights(phase / name) for name in ("best", "step_000002")]
    assert find_checkpoints(tmp_path / "run") == folders
    assert checkpoint_command(tmp_path / "run", verify=True, json_only=True) == 0
    (folders[0] / "config.json").write_text("[]\n")
    assert checkpoint_command(tmp_path / "run", verify=True, json_only=True) == 1
