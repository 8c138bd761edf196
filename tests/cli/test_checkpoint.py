"""`ludic checkpoint list` and `verify` look at all weights that a run can go back to."""

import json
from pathlib import Path

import pytest

from ludic.cli.checkpoint import checkpoint_command, find_checkpoints
from ludic.files.manifest import MANIFEST, write_manifest


def folder_with_weights(path: Path, **facts: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}\n")
    write_manifest(path, {"step": int(path.name.removeprefix("step_")) if path.name != "best" else 2, **facts})
    return path


def test_the_weights_of_the_best_evaluation_are_verified_too(tmp_path: Path) -> None:
    phase = tmp_path / "run" / "checkpoints" / "reinforce"
    folders = [folder_with_weights(phase / name) for name in ("best", "step_000002")]
    assert find_checkpoints(tmp_path / "run") == folders
    assert checkpoint_command(tmp_path / "run", verify=True, json_only=True) == 0
    (folders[0] / "config.json").write_text("[]\n")
    assert checkpoint_command(tmp_path / "run", verify=True, json_only=True) == 1


def test_a_shallow_checkpoint_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_with_weights(tmp_path / "step_000002")
    folder_with_weights(tmp_path / "step_000004", layout="shallow")
    assert checkpoint_command(tmp_path, verify=True, json_only=False) == 0
    full, shallow = capsys.readouterr().out.splitlines()
    assert "shallow  " not in full
    assert shallow.endswith("shallow  verified")
    assert checkpoint_command(tmp_path, verify=False, json_only=True) == 0
    assert [line["layout"] for line in json.loads(capsys.readouterr().out)] == ["full", "shallow"]
    (tmp_path / "step_000004" / MANIFEST).write_text("{")
    assert checkpoint_command(tmp_path, verify=True, json_only=False) == 1
