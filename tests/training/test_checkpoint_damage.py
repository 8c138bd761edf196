"""Damage to a checkpoint is found, named, and left behind for the newest undamaged one."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import CheckpointError
from ludic.files.manifest import MANIFEST, write_manifest
from ludic.training import CheckpointConfig, CheckpointManager, Trainer, make_grpo


def make_manager(folder: Path, **options) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(folder, **{"max_to_keep": 5, **options}))


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and an optimizer that took one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, *steps: int, **options) -> CheckpointManager:
    checkpoints = make_manager(folder, **options)
    for step in steps:
        model, optimizer = trained(step)
        checkpoints.save(model, optimizer=optimizer, step=step, metadata={"seen": step})
    return checkpoints


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def change_byte(path: Path, position: int, by: int) -> bytes:
    """Add `by` to one byte. Returns the content before."""
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[position] = (damaged[position] + by) % 256
    path.write_bytes(damaged)
    return content


def test_one_changed_byte_in_any_file_is_found_1000_times_of_1000(tmp_path, caplog):
    checkpoints = save(tmp_path, 1, 2)
    newest = tmp_path / "step_000002"
    files = [*files_of(newest), tmp_path / "latest.json"]
    draw, found = random.Random(0), 0
    for number in range(1000):
        path = files[number % len(files)]
        content = change_byte(path, draw.randrange(path.stat().st_size), draw.randrange(1, 256))
        caplog.clear()
        chosen = checkpoints.find()
        found += path.name in caplog.text and chosen.name == ("step_000002" if path.name == "latest.json" else "step_000001")
        path.write_bytes(content)
    assert found == 1000
    assert checkpoints.find() == newest


@pytest.mark.parametrize("name", ["step_000002/manifest.json", "latest.json"])
def test_the_end_of_a_line_that_becomes_another_one_is_found(tmp_path, name, caplog):
    """Text is read with all of them as one."""
    checkpoints = save(tmp_path, 1, 2)
    path = tmp_path / name
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r", 1))
    checkpoints.find()
    assert path.name in caplog.text


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "optimizer.safetensors", "optimizer.json", "trainer_state.json", MANIFEST]
)
def test_a_file_that_is_missing_cut_short_or_another_checkpoints_is_found(tmp_path, name, caplog):
    checkpoints = save(tmp_path, 1, 2)
    older, newest = tmp_path / "step_000001" / name, tmp_path / "step_000002" / name
    whole = newest.read_bytes()

    def assert_goes_back(named: str) -> None:
        caplog.clear()
        assert checkpoints.find().name == "step_000001"
        assert named in caplog.text
        assert "going back" in caplog.text

    newest.unlink()
    assert_goes_back(f"{name} ")
    newest.write_bytes(whole[:-1])
    assert_goes_back(f"{name} ")
    if older.read_bytes() != whole:
        shutil.copy(older, newest)
        assert_goes_back("model.safetensors has changed" if name == MANIFEST else f"{name} has")


def test_a_checkpoint_under_the_name_of_another_step_is_found(tmp_path):
    checkpoints = save(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "step_000002")
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000002")
    assert checkpoints.find().name == "step_000001"
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1; the newest undamaged .*step_000001"):
        checkpoints.load(trained()[0], step=2)


def test_weights_that_somebody_adds_are_found_and_other_files_are_not_damage(tmp_path):
    checkpoints = save(tmp_path, 1)
    folder = tmp_path / "step_000001"
    (folder / "tokenizer.json").write_text("{}")
    assert checkpoints.find() == folder
    (folder / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors was added later"):
        checkpoints.find()


def test_damage_of_the_only_checkpoint_is_one_line_with_a_remedy(tmp_path):
    checkpoints = save(tmp_path, 1)
    change_byte(tmp_path / "step_000001" / "model.safetensors", -1, 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed.* Delete .*begin anew"):
        checkpoints.load(trained()[0])
    with pytest.raises(CheckpointError, match=r"is damaged.*undamaged one is none"):
        checkpoints.load(trained()[0], path=tmp_path / "step_000001")


def test_a_damaged_checkpoint_is_not_held_and_is_written_again(tmp_path):
    checkpoints = save(tmp_path, 1)
    change_byte(tmp_path / "step_000001" / "optimizer.json", 5, 1)
    again = make_manager(tmp_path)
    assert not again.holds(1)
    model, optimizer = trained()
    again.save(model, optimizer=optimizer, step=1)
    assert again.holds(1)
    assert checkpoints.find().name == "step_000001"


def test_quantised_weights_are_refused_and_another_precision_is_named(tmp_path, caplog):
    checkpoints = save(tmp_path, 1)
    model, _ = trained()
    checkpoints.load(model.to(torch.bfloat16))
    assert "4 tensors in" in caplog.text
    assert "converted from torch.float32 to the model's torch.bfloat16" in caplog.text
    quantised = {name: tensor.to(torch.int8) for name, tensor in trained()[0].state_dict().items()}
    folder = tmp_path / "step_000001"
    save_file(quantised, folder / "model.safetensors")
    write_manifest(folder, {"step": 1})
    with pytest.raises(CheckpointError, match=r"0\.bias in .* is torch\.int8, not torch\.float32"):
        checkpoints.load(trained()[0])


def test_checkpoints_of_an_older_version_are_read_with_a_warning(tmp_path, caplog):
    checkpoints = save(tmp_path, 1, 2)
    for folder in tmp_path.glob("step_*"):
        (folder / MANIFEST).unlink()
    (tmp_path / "latest.json").write_text(json.dumps({"last_checkpoint": "step_000002", "step": 2}))
    assert checkpoints.load(trained()[0])["seen"] == 2
    assert "an older version wrote it" in caplog.text


def test_a_manifest_of_a_newer_version_is_refused_with_the_remedy(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr("ludic.files.manifest.SCHEMA", 2)
        checkpoints = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has schema 2; .*reads up to 1"):
        checkpoints.find()


@pytest.mark.parametrize(
    "pointer", [{"last_checkpoint": "../elsewhere", "step": 1}, {"step": 1}, {"last_checkpoint": "step_000001", "step": 2}]
)
def test_a_pointer_that_names_no_checkpoint_of_its_folder_is_passed_over(tmp_path, pointer, caplog):
    checkpoints = save(tmp_path / "run", 1, 2)
    shutil.copytree(tmp_path / "run" / "step_000001", tmp_path / "elsewhere")
    (tmp_path / "run" / "latest.json").write_text(json.dumps(pointer))
    assert checkpoints.find().name == "step_000002"
    assert "latest.json is damaged" in caplog.text


@pytest.mark.parametrize("failing", range(8))
def test_a_process_killed_while_it_amends_a_checkpoint_leaves_it_valid(tmp_path, monkeypatch, failing):
    """`amend` renames five files: the next state, the manifest with both, the state, the manifest,
    latest.json. It is stopped before each of them, and after all."""
    checkpoints = save(tmp_path, 1, 2)
    rename, renames = os.replace, []

    def counted(source, target):
        renames.append(Path(target).name)
        if len(renames) == failing:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted)
        if 1 <= failing <= 5:
            with pytest.raises(KeyboardInterrupt):
                checkpoints.amend(2, {"evaluated_step": 2})
        else:
            checkpoints.amend(2, {"evaluated_step": 2})
            assert renames == [".trainer_state.json.unfinished", MANIFEST, "trainer_state.json", MANIFEST, "latest.json"]
    metadata = make_manager(tmp_path).load(trained()[0])
    assert metadata["seen"] == 2
    assert ("evaluated_step" in metadata) == (not 1 <= failing <= 3)


def test_a_disk_that_takes_no_more_at_300_points_leaves_a_verified_checkpoint(tmp_path):
    """The kernel stops each write at a size that the test draws: files are cut anywhere, by
    safetensors too."""
    checkpoints = save(tmp_path, 1, max_to_keep=2)
    largest = max(path.stat().st_size for path in (tmp_path / "step_000001").iterdir())
    model, optimizer = trained(2)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(300):
        resource.setrlimit(resource.RLIMIT_FSIZE, (number * largest // 300, hard))
        try:
            with pytest.raises(Exception, match=rf"\[Errno {errno.EFBIG}\]|os error {errno.EFBIG}"):
                checkpoints.save(model, optimizer=optimizer, step=2 + number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        again = make_manager(tmp_path)
        assert again.load(trained()[0])["step"] == 1


def test_weights_that_the_file_system_lost_are_found_when_they_are_written(tmp_path, monkeypatch):
    from ludic.models import state_files

    checkpoints = save(tmp_path, 1)
    write = state_files.write_model

    def lossy(model, folder):
        write(model, folder)
        os.truncate(folder / "model.safetensors", 100)

    monkeypatch.setattr(state_files, "write_model", lossy)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*not written whole .*the disk"):
        checkpoints.save(trained()[0], optimizer=None, step=2)
    assert checkpoints.find().name == "step_000001"


def test_pruning_keeps_verified_checkpoints_and_not_those_of_an_abandoned_or_damaged_future(tmp_path):
    checkpoints = save(tmp_path, 10, 20, max_to_keep=2)
    change_byte(tmp_path / "step_000020" / "model.safetensors", -1, 1)
    model, optimizer = trained(1)
    checkpoints.save(model, optimizer=optimizer, step=15)
    assert [folder.name for folder in sorted(tmp_path.glob("step_*"))] == ["step_000010", "step_000015"]
    assert checkpoints.find().name == "step_000015"


@pytest.mark.parametrize("renames", range(8))
def test_a_kill_while_a_checkpoint_replaces_itself_leaves_one(tmp_path, monkeypatch, renames):
    """The only checkpoint is saved again, and the process is killed after so many renames: of
    config.json, optimizer.json, the index, trainer_state.json, the manifest, the old folder, the
    new one."""
    save(tmp_path, 1, max_to_keep=1)
    rename, count = os.replace, 0

    def kill(source, target):
        nonlocal count
        count += 1
        if count > renames:
            raise KeyboardInterrupt  # as SIGKILL: no clean-up runs
        rename(source, target)

    model, optimizer = trained(5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            make_manager(tmp_path, max_to_keep=1).save(model, optimizer=optimizer, step=1, metadata={"seen": 2})
    again = make_manager(tmp_path, max_to_keep=1)
    assert again.load(trained()[0])["seen"] == (2 if renames == 7 else 1)
    again.save(model, optimizer=optimizer, step=1, metadata={"seen": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step_000001"]
    assert again.load(trained()[0])["seen"] == 3


def test_a_stale_pointer_does_not_lead_to_an_abandoned_future(tmp_path, caplog):
    checkpoints = save(tmp_path, 15, 20)
    save(tmp_path, 15)  # the run went back, and was killed before it wrote latest.json
    pointer = json.loads((tmp_path / "latest.json").read_text())
    (tmp_path / "latest.json").write_text(json.dumps({**pointer, "manifest": "0"}))
    assert checkpoints.find().name == "step_000015"
    assert re.search(r"latest\.json .*step_000015 was changed later", caplog.text)


def test_a_subclass_that_adds_to_what_it_saved_has_verified_checkpoints(tmp_path):
    class Noting(CheckpointManager):
        def save(self, *args, **options):
            folder = super().save(*args, **options)
            state = json.loads((folder / "trainer_state.json").read_text())
            (folder / "trainer_state.json").write_text(json.dumps({**state, "note": "mine"}))
            return folder

    trainer = Trainer(
        model=tiny_model(),
        algo=make_grpo(group_size=4),
        batch_source=ListSource(sorting_items(8)),
        cfg=cpu_config(),
        checkpointer=Noting(CheckpointConfig(tmp_path)),
    )
    trainer.save_checkpoint()
    assert make_manager(tmp_path).load(tiny_model(seed=1))["note"] == "mine"


def test_a_file_that_cannot_be_read_now_is_not_called_damaged(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1)
    monkeypatch.setattr(
        "ludic.files.manifest._describe", lambda path: (_ for _ in ()).throw(PermissionError(13, "no", str(path)))
    )
    with pytest.raises(PermissionError):
        checkpoints.find()


def test_a_model_in_a_verified_checkpoint_loads_with_from_pretrained(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model()
    folder = make_manager(tmp_path).save(model, optimizer=None, step=1)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_warning_names_what_is_skipped_once(tmp_path, caplog):
    checkpoints = save(tmp_path, 1, 2, 3)
    for step in (2, 3):
        change_byte(tmp_path / f"step_00000{step}" / "model.safetensors", -1, 1)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.find().name == "step_000001"
    [record] = [record for record in caplog.records if "going back" in record.message]
    assert record.message.count("is damaged") == 2
    assert record.message.endswith("going back to step_000001")
