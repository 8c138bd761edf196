"""The files of a checkpoint, byte for byte: digests and layouts that earlier versions wrote and
that newer ones must keep writing and reading."""

import hashlib
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from training_samples import DrawingSource, ListSource, cpu_config, sorting_items

from ludic.models.byte_tokenizer import VOCAB_SIZE
from ludic.models.state_files import write_model, write_optimizer
from ludic.training import CheckpointConfig, Trainer, make_grpo

STATE_KEYS = ["step", "note", "algorithm", "scheduler_state_dict", "early_stopping", "last_eval", "evaluated_step", "rng_state"]
DIGESTS = {
    "config.json": "8ad59326594e0def",
    "model.safetensors": "28ebefedb44b0ea9",
    "optimizer.safetensors": "2ed7e4c5de6c56ac",
}
"""blake2b of 8 bytes."""


class TinyModel(nn.Module):
    """Two matrices with exact numbers, so that the files depend on neither initialisation nor
    arithmetic."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB_SIZE, 4), nn.Linear(4, VOCAB_SIZE)
        fill(self.parameters())

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.out(self.embed(input_ids)))


@torch.no_grad()
def fill(parameters, scale=0.125):
    for parameter in parameters:
        parameter.copy_((torch.arange(parameter.numel()) % 17 * scale).view_as(parameter))


def trainer_in(folder, *, source=None, resume_from=None, **config):
    return Trainer(
        model=TinyModel(),
        algo=make_grpo(group_size=4),
        batch_source=source or ListSource(sorting_items(8)),
        cfg=cpu_config(lr=0.25, **config),
        checkpoint_config=CheckpointConfig(folder),
        resume_from=resume_from,
    )


def set_optimizer_state(trainer):
    """The optimizer with the state of 3 steps, in exact numbers."""
    for number, parameter in enumerate(trainer.model.parameters()):
        moments = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        fill(moments.values(), scale=0.25 * (number + 1))
        trainer.optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return trainer


def digest(path):
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def test_the_files_of_a_checkpoint_equal_those_of_earlier_versions(tmp_path):
    trainer = set_optimizer_state(trainer_in(tmp_path))
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    folder = trainer.save_checkpoint(metadata={"note": "kept"})
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*DIGESTS, "optimizer.json", "trainer_state.json", "model.safetensors.index.json", "manifest.json"]
    )
    assert {name: digest(folder / name) for name in DIGESTS} == DIGESTS
    state = json.loads((folder / "trainer_state.json").read_text())
    assert list(state) == STATE_KEYS
    assert (folder / "trainer_state.json").read_text() == json.dumps(state, indent=2) + "\n"
    [group] = trainer.optimizer.state_dict()["param_groups"]
    stored = {"class": "AdamW", "values": {}, "param_groups": [group]}
    assert (folder / "optimizer.json").read_text() == json.dumps(stored, indent=2) + "\n"


def test_only_a_source_with_a_state_has_one_in_the_checkpoint(tmp_path):
    folder = trainer_in(tmp_path, source=DrawingSource()).save_checkpoint(metadata={"note": "kept"})
    state = json.loads((folder / "trainer_state.json").read_text())
    assert list(state) == [*STATE_KEYS, "batch_source"]
    assert state["batch_source"] == {"drawn": 0}


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_equals_what_the_plain_writers_write(tmp_path, optimizer):
    trainer = set_optimizer_state(trainer_in(tmp_path))
    trainer.checkpointer.cfg = CheckpointConfig(tmp_path, save_optimizer=optimizer)
    folder, plain = trainer.save_checkpoint(), tmp_path / "plain"
    plain.mkdir()
    write_model(trainer.model, plain)
    if optimizer:
        write_optimizer(trainer.optimizer, trainer.model, plain)
        weight_map = dict.fromkeys(sorted(trainer.model.state_dict()), "model.safetensors")
        index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n"
        (plain / "model.safetensors.index.json").write_text(index)
    not_plain = ("trainer_state.json", "manifest.json")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in not_plain} == {
        path.name: path.read_bytes() for path in plain.iterdir()
    }


def test_the_best_weights_file_has_only_the_model(tmp_path):
    trainer = trainer_in(tmp_path / "run")
    trainer.best_weights.keep(4)
    write_model(trainer.model, tmp_path)
    folder = tmp_path / "run" / "best"
    assert sorted(path.name for path in folder.iterdir()) == ["best.json", "config.json", "manifest.json", "model.safetensors"]
    assert (folder / "best.json").read_text() == '{\n  "step": 4\n}\n'
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_checkpoint_with_only_a_step_can_be_resumed(tmp_path):
    """As written by the first versions."""
    before, folder = set_optimizer_state(trainer_in(tmp_path / "before")), tmp_path / "old"
    folder.mkdir()
    write_model(before.model, folder)
    write_optimizer(before.optimizer, before.model, folder)
    (folder / "trainer_state.json").write_text('{"step": 5}')
    resumed = trainer_in(tmp_path / "after", resume_from=folder)
    assert resumed.current_step == 5
    loaded = resumed.optimizer.state_dict()["state"]
    for number, entries in before.optimizer.state_dict()["state"].items():
        assert all(torch.equal(loaded[number][name], value) for name, value in entries.items())
    resumed.train_step_sync()
    assert resumed.current_step == 6
