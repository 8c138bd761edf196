"""What a run finds in its folder of checkpoints when it starts."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_samples import tiny_model

from ludic.errors import CheckpointError
from ludic.files import manifest
from ludic.runs.base import find_latest_checkpoint
from ludic.training import CheckpointConfig, checkpoint
from ludic.training.checkpoint import CheckpointManager


@pytest.mark.parametrize("leftover", [".unfinished_going_step_000001", ".unfinished_step_000002"])
def test_folders_that_a_killed_run_left_unfinished_are_deleted(tmp_path: Path, leftover: str) -> None:
    CheckpointManager(CheckpointConfig(tmp_path)).save(tiny_model(), optimizer=None, step=1)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / leftover).mkdir()
    (tmp_path / leftover / "config.json").write_text("{}")
    assert find_latest_checkpoint(CheckpointManager(CheckpointConfig(tmp_path))) == str(tmp_path / "step_000001")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("killed_at", ["rename of the new state", "rename of the manifest"])
def test_files_that_a_killed_run_left_unfinished_are_deleted(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def replace(self: Path, target: Path) -> None:
        raise Killed

    def replace_manifest(source: Path, target: Path) -> None:
        if Path(target).name == "manifest.json":
            raise Killed
        rename(source, target)

    manager = CheckpointManager(CheckpointConfig(tmp_path))
    manager.save(tiny_model(), optimizer=None, step=1, metadata={"seen": 1})
    before = sorted(tmp_path.rglob("*"))
    rename = os.replace
    with monkeypatch.context() as patch:
        if killed_at == "rename of the new state":
            patch.setattr(Path, "replace", replace)
        else:
            patch.setattr(os, "replace", replace_manifest)
        with pytest.raises(Killed):
            manager.amend(1, {"seen": 2})
    assert sorted(tmp_path.rglob("*")) != before
    assert find_latest_checkpoint(CheckpointManager(CheckpointConfig(tmp_path))) == str(tmp_path / "step_000001")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_resumed_run_reads_its_checkpoint_once_to_verify_it_unless_it_was_changed(tmp_path: Path, monkeypatch):
    CheckpointManager(CheckpointConfig(tmp_path)).save(tiny_model(), optimizer=None, step=1)
    folder, read = tmp_path / "step_000001", []
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    hour_later = SimpleNamespace(time_ns=lambda: time.time_ns() + 3600 * 10**9)
    verify = checkpoint.find_checkpoint_faults
    monkeypatch.setattr(checkpoint, "find_checkpoint_faults", lambda path: read.append(path) or verify(path))
    manager = CheckpointManager(CheckpointConfig(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "time", hour_later)
        found = find_latest_checkpoint(manager)
        assert manager.locate(str(found)) == folder
        assert manager.holds(1)
    assert read == [folder]
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            manager.locate(str(found))
    content[-1] ^= 1
    weights.write_bytes(content)  # just now: the next change may have the same time
    for _ in range(2):
        assert manager.locate(str(found)) == folder
    assert read == [folder] * 5
