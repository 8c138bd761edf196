"""`ludic checkpoint export` verifies a checkpoint and writes it as one folder that transformers
opens."""

from pathlib import Path

import pytest
import torch
from training_samples import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.lora import save_merged
from ludic.training import LoraSettings, apply_lora
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager


def export(*arguments: object):
    return CliRunner().invoke(app, ["checkpoint", "export", *map(str, arguments)])


def make_run(folder: Path, model, steps=(2,)) -> Path:
    """A run with checkpoints and a tokenizer. Returns its last checkpoint."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text("{}\n")
    make_byte_tokenizer().save_pretrained(folder / "model")
    manager = CheckpointManager(CheckpointConfig(folder / "checkpoints"))
    return [manager.save(model, optimizer=None, step=step) for step in steps][-1]


def test_a_checkpoint_becomes_a_folder_with_weights_config_and_tokenizer(tmp_path: Path) -> None:
    model = tiny_model()
    make_run(tmp_path / "run", model)
    result = export(tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16")  # its only checkpoint
    assert result.exit_code == 0, result.output
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert opened.dtype == torch.bfloat16
    for mine, theirs in zip(model.bfloat16().parameters(), opened.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [100, 101]
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(("optimizer", "trainer_state"))]


def test_what_stands_in_the_way_is_never_replaced(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", tiny_model())
    (tmp_path / "out").mkdir()
    result = export(checkpoint, tmp_path / "out")
    assert result.exit_code != 0
    assert "exists already, and is not replaced" in result.output
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", tiny_model())
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = export(checkpoint, tmp_path / "out")
    assert result.exit_code != 0
    assert "the content of model.safetensors has changed" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--dtype", "int8"], "--dtype ('int8') must be one of"), (["--merge"], "has no adapters")],
)
def test_wrong_settings_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = export(make_run(tmp_path / "run", tiny_model()), tmp_path / "out", *arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_one_of_several_checkpoints_must_be_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_model(), steps=(2, 4))
    result = export(tmp_path / "run", tmp_path / "out")
    assert "has 2 checkpoints; name one" in result.output


def test_adapters_are_merged_into_the_base_of_the_run(tmp_path: Path) -> None:
    model = apply_lora(tiny_model(), LoraSettings(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    checkpoint = make_run(tmp_path / "run", model)
    tiny_model().save_pretrained(tmp_path / "run" / "base")
    assert export(checkpoint, tmp_path / "merged", "--merge").exit_code == 0
    save_merged(model, tmp_path / "expected")
    opened, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("merged", "expected"))
    for mine, theirs in zip(opened.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)
    assert export(checkpoint, tmp_path / "adapter").exit_code == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    result = export(checkpoint, tmp_path / "gone", "--merge", "--base", tmp_path / "missing")
    assert result.exit_code != 0
    assert not (tmp_path / "gone").exists()
