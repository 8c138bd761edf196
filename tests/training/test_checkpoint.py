"""Checkpoints are written completely or not at all, have no pickled data, and restore exactly."""

import io
import json
import os
import pickletools
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from training_samples import ListSource, assert_same_tensors, cpu_config, sorting_items, tiny_model, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.errors import CheckpointError, ConfigError, LudicError
from ludic.files.checkpoints import INDEX
from ludic.files.manifest import MANIFEST
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.training import CheckpointConfig, CheckpointManager, Trainer, make_grpo


def train_randomly(model, seed=0, steps=2):
    """The model after a few AdamW steps on random gradients, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def make_manager(folder, **options):
    return CheckpointManager(CheckpointConfig(folder, **options))


def test_weights_and_optimizer_are_restored_exactly(tmp_path):
    model = tiny_model()
    optimizer = train_randomly(model)
    make_manager(tmp_path).save(model, optimizer=optimizer, step=3, metadata={"note": "kept"})
    other = tiny_model(seed=1)
    restored = train_randomly(other, seed=5, steps=1)
    metadata = make_manager(tmp_path).load(other, optimizer=restored)
    assert metadata == {"step": 3, "note": "kept"}
    assert_same_tensors(weights_of(other), weights_of(model))
    saved, loaded = optimizer.state_dict(), restored.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    for index, entries in saved["state"].items():
        assert_same_tensors(loaded["state"][index], entries)


def test_a_restored_optimizer_takes_the_same_next_step(tmp_path):
    model = tiny_model()
    optimizer = train_randomly(model)
    make_manager(tmp_path).save(model, optimizer=optimizer, step=1)
    other = tiny_model(seed=1)
    restored = torch.optim.AdamW(other.parameters(), lr=1.0)
    make_manager(tmp_path).load(other, optimizer=restored)
    for each, its_model in ((optimizer, model), (restored, other)):
        for parameter in its_model.parameters():
            parameter.grad = torch.ones_like(parameter)
        each.step()
    assert_same_tensors(weights_of(other), weights_of(model))


def test_a_checkpoint_folder_is_a_hugging_face_model(tmp_path):
    model = tiny_model()
    folder = make_manager(tmp_path).save(model, optimizer=None, step=12)
    assert folder.name == "step_000012"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_tensors(weights_of(loaded), weights_of(model))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_an_index_names_the_weights_beside_an_optimizer_and_not_its_state(tmp_path):
    """Loaders that read every safetensors file of a folder read those of the index alone."""
    model = tiny_model()
    folder = make_manager(tmp_path).save(model, optimizer=train_randomly(model), step=1)
    stored = load_file(folder / "model.safetensors")
    assert json.loads((folder / INDEX).read_text())["weight_map"] == dict.fromkeys(sorted(stored), "model.safetensors")
    assert_same_tensors(weights_of(AutoModelForCausalLM.from_pretrained(folder)), weights_of(model))
    other = tiny_model()
    make_manager(tmp_path).load(other, optimizer=train_randomly(other))
    assert_same_tensors(weights_of(other), weights_of(model))
    older = shutil.copytree(folder, tmp_path / "older" / "step_000001")
    for name in (INDEX, MANIFEST):
        (older / name).unlink()
    make_manager(tmp_path / "older").load(other)  # as earlier versions wrote it
    assert_same_tensors(weights_of(other), weights_of(model))


def test_each_checkpoint_has_the_tokenizer_which_is_made_once(tmp_path, monkeypatch):
    tokenizer = make_byte_tokenizer()
    manager = CheckpointManager(CheckpointConfig(tmp_path), tokenizer=tokenizer)
    model = tiny_model()
    first = manager.save(model, optimizer=None, step=1)
    monkeypatch.setattr(tokenizer, "save_pretrained", None)
    second = manager.save(model, optimizer=None, step=2)
    text = "3+4=<|im_end|>"
    for folder in (first, second):
        read = AutoTokenizer.from_pretrained(folder)
        assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert (read.eos_token_id, read.chat_template) == (tokenizer.eos_token_id, tokenizer.chat_template)
    flip_a_byte(second / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"the content of tokenizer\.json has changed"):
        manager.find(step=2)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_no_file_of_a_checkpoint_is_pickled(tmp_path):
    """Neither a zip archive, as written by torch.save, nor a stream that pickletools can parse."""
    model = tiny_model()
    trainer = Trainer(
        model=model,
        algo=make_grpo(group_size=4),
        batch_source=ListSource(sorting_items(8)),
        cfg=cpu_config(),
        checkpoint_config=CheckpointConfig(tmp_path, every_n_steps=1),
    )
    trainer.train_step_sync()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"model.safetensors", "optimizer.safetensors", "optimizer.json", "trainer_state.json", "latest.json"} <= names
    for path in files:
        assert path.suffix in (".json", ".safetensors"), path
        assert not zipfile.is_zipfile(path)
        with pytest.raises(ValueError):
            list(pickletools.genops(io.BytesIO(path.read_bytes())))


def test_pickled_weights_are_refused_with_a_reason(tmp_path):
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is pickled"):
        make_manager(tmp_path).load(tiny_model())


@pytest.mark.parametrize("point", ["model", "optimizer", "state", "rename"])
def test_a_crash_while_saving_leaves_the_previous_checkpoint_as_the_latest(tmp_path, monkeypatch, point):
    from ludic.models import state_files
    from ludic.training import checkpoint

    model = tiny_model()
    optimizer = train_randomly(model)
    make_manager(tmp_path).save(model, optimizer=optimizer, step=1)
    before = weights_of(model)
    train_randomly(model, seed=9)

    def crash(*_, **__):
        raise OSError("disk full")

    targets = {
        "model": (state_files, "write_model"),
        "optimizer": (state_files, "write_optimizer"),
        "state": (checkpoint, "write_json"),
    }
    with monkeypatch.context() as patch:
        if point == "rename":
            patch.setattr(os, "replace", crash)
        else:
            patch.setattr(*targets[point], crash)
        with pytest.raises(OSError, match="disk full"):
            make_manager(tmp_path).save(model, optimizer=optimizer, step=2)
    other = tiny_model(seed=1)
    assert make_manager(tmp_path).load(other)["step"] == 1
    assert_same_tensors(weights_of(other), before)
    make_manager(tmp_path).save(model, optimizer=optimizer, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step_000001", "step_000002"]


def test_after_a_crash_before_latest_json_a_whole_checkpoint_is_found(tmp_path):
    model = tiny_model()
    make_manager(tmp_path).save(model, optimizer=None, step=1)
    (tmp_path / "latest.json").write_text(json.dumps({"last_checkpoint": "step_000009", "step": 9}))
    assert make_manager(tmp_path).load(tiny_model())["step"] == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    model = tiny_model()
    make_manager(tmp_path).save(model, optimizer=None, step=1)
    train_randomly(model)
    make_manager(tmp_path).save(model, optimizer=None, step=1)
    other = tiny_model(seed=1)
    make_manager(tmp_path).load(other)
    assert_same_tensors(weights_of(other), weights_of(model))


def test_the_oldest_checkpoints_are_deleted(tmp_path):
    keeper = make_manager(tmp_path, max_to_keep=2)
    for step in (1, 2, 10):
        keeper.save(nn.Linear(2, 2), optimizer=None, step=step)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000010"]
    keeper = make_manager(tmp_path, max_to_keep=None)
    for step in (11, 12, 13):
        keeper.save(nn.Linear(2, 2), optimizer=None, step=step)
    assert len(list(tmp_path.glob("step_*"))) == 5


def test_a_run_that_resumed_from_an_earlier_step_keeps_the_checkpoint_it_just_wrote(tmp_path):
    """Resumed from step 1, it writes step 2 while step 10 of the abandoned run is still on disk."""
    keeper = make_manager(tmp_path, max_to_keep=1)
    keeper.save(nn.Linear(2, 2), optimizer=None, step=10)
    keeper.save(nn.Linear(2, 2), optimizer=None, step=2)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000002"]
    assert keeper.load(nn.Linear(2, 2))["step"] == 2


def test_path_step_latest_and_newest_take_precedence_in_this_order(tmp_path):
    keeper = make_manager(tmp_path, max_to_keep=5)
    for step in (1, 2, 3):
        keeper.save(nn.Linear(2, 2), optimizer=None, step=step)
    (tmp_path / "latest.json").write_text(json.dumps({"last_checkpoint": "step_000002", "step": 2}))
    model = nn.Linear(2, 2)
    assert keeper.load(model, path=tmp_path / "step_000001", step=3)["step"] == 1
    assert keeper.load(model, step=3)["step"] == 3
    assert keeper.load(model)["step"] == 2
    (tmp_path / "latest.json").unlink()
    assert keeper.load(model)["step"] == 3


def test_a_missing_checkpoint_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        make_manager(tmp_path).load(nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        make_manager(tmp_path).load(nn.Linear(2, 2), step=4)
    (tmp_path / "step_000001").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        make_manager(tmp_path).load(nn.Linear(2, 2))


def test_missing_metadata_counts_as_step_zero(tmp_path):
    folder = make_manager(tmp_path).save(nn.Linear(2, 2), optimizer=None, step=7)
    (folder / "trainer_state.json").unlink()
    (folder / "manifest.json").unlink()
    (tmp_path / "latest.json").unlink()
    assert make_manager(tmp_path).load(nn.Linear(2, 2)) == {"step": 0}


def test_a_plain_module_is_saved_with_its_class_and_tied_weights_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.outer.weight = self.inner.weight

    model = Tied()
    folder = make_manager(tmp_path).save(model, optimizer=None, step=1)
    assert json.loads((folder / "config.json").read_text()) == {"model_class": "Tied"}
    assert list(load_file(folder / "model.safetensors")) == ["inner.weight"]
    other = Tied()
    make_manager(tmp_path).load(other)
    assert torch.equal(other.outer.weight, model.inner.weight)


def test_sharded_weights_are_read_through_their_index(tmp_path):
    model = tiny_model()
    folder = tmp_path / "step_000001"
    model.save_pretrained(folder, max_shard_size="8KB")
    assert (folder / "model.safetensors.index.json").exists()
    other = tiny_model(seed=1)
    make_manager(tmp_path).load(other)
    assert_same_tensors(weights_of(other), weights_of(model))


def index_of(folder, content):
    folder.mkdir()
    save_file({"weight": torch.zeros(2, 2)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_an_index_without_weight_map_is_a_value_error(tmp_path):
    index_of(tmp_path / "step_000001", {})
    with pytest.raises(ValueError, match="weight_map"):
        make_manager(tmp_path).load(nn.Linear(2, 2))


def test_a_weight_missing_from_its_shard_is_a_key_error(tmp_path):
    index_of(tmp_path / "step_000001", {"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}})
    with pytest.raises(KeyError, match="bias"):
        make_manager(tmp_path).load(nn.Linear(2, 2))


def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path):
    index_of(tmp_path / "step_000001", {"weight_map": {"weight": "../step_000001/a.safetensors"}})
    with pytest.raises(CheckpointError, match="not in the folder"):
        make_manager(tmp_path).load(nn.Linear(2, 2))


def test_weights_of_another_model_are_refused_with_their_names(tmp_path):
    make_manager(tmp_path).save(nn.Linear(2, 2), optimizer=None, step=1)
    with pytest.raises(CheckpointError, match=r"missing .*'2\.bias'"):
        make_manager(tmp_path).load(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    make_manager(tmp_path).save(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step=1)
    with pytest.raises(CheckpointError, match="is of SGD, the optimizer is AdamW"):
        make_manager(tmp_path).load(model, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match=r"groups of \[2\]"):
        make_manager(tmp_path).load(model, optimizer=torch.optim.SGD([model.weight], lr=0.1))


def test_state_that_is_not_plain_data_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"trainer_state\.json must hold plain JSON"):
        make_manager(tmp_path).save(nn.Linear(2, 2), optimizer=None, step=1, metadata={"queue": object()})


def test_invalid_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="every_n_steps"):
        CheckpointConfig(tmp_path, every_n_steps=-1)
    with pytest.raises(ValueError, match="max_to_keep"):
        CheckpointConfig(tmp_path, max_to_keep=0)


def test_should_save_is_every_n_steps(tmp_path):
    assert [step for step in range(1, 7) if make_manager(tmp_path, every_n_steps=3).should_save(step)] == [3, 6]
    assert not make_manager(tmp_path).should_save(3)


def test_the_optimizer_can_be_left_out(tmp_path):
    model = tiny_model()
    folder = make_manager(tmp_path, save_optimizer=False).save(model, optimizer=train_randomly(model), step=1)
    assert not list(folder.glob("optimizer*"))


def test_save_checkpoint_without_a_checkpointer_is_an_error():
    trainer = Trainer(
        model=tiny_model(), algo=make_grpo(group_size=4), batch_source=ListSource(sorting_items(4)), cfg=cpu_config()
    )
    with pytest.raises(RuntimeError, match="no checkpointer") as caught:
        trainer.save_checkpoint()
    assert isinstance(caught.value, LudicError)


def test_only_adapters_are_saved_and_they_are_restored(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(seed):
        torch.manual_seed(seed)
        return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))

    model, other = adapted(1), adapted(2)
    folder = make_manager(tmp_path).save(model, optimizer=None, step=1)
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    make_manager(tmp_path).load(other)
    assert_same_tensors(weights_of(other), weights_of(model))
    with pytest.raises(CheckpointError, match="holds an adapter"):
        make_manager(tmp_path).load(tiny_model())


def test_bfloat16_weights_are_restored_exactly(tmp_path):
    model = tiny_model().bfloat16()
    optimizer = train_randomly(model)
    make_manager(tmp_path).save(model, optimizer=optimizer, step=1)
    other = tiny_model(seed=1).bfloat16()
    restored = torch.optim.AdamW(other.parameters())
    make_manager(tmp_path).load(other, optimizer=restored)
    assert_same_tensors(weights_of(other), weights_of(model))
    for index, entries in optimizer.state_dict()["state"].items():
        assert_same_tensors(restored.state_dict()["state"][index], entries)


def test_only_the_last_checkpoint_can_be_amended(tmp_path):
    model = tiny_model()
    CheckpointManager(CheckpointConfig(tmp_path)).save(model, optimizer=None, step=4, metadata={"kept": 1})
    make_manager = CheckpointManager(CheckpointConfig(tmp_path, max_to_keep=5))
    make_manager.amend(4, {"of": "another run"})
    make_manager.save(model, optimizer=None, step=5, metadata={"kept": 1, "found": None})
    make_manager.amend(4, {"found": 2})
    make_manager.amend(5, {"found": 2})
    states = [json.loads((tmp_path / f"step_00000{step}" / "trainer_state.json").read_text()) for step in (4, 5)]
    assert states == [{"step": 4, "kept": 1}, {"step": 5, "kept": 1, "found": 2}]


def test_a_trainer_saves_and_loads_through_overridden_methods(tmp_path):
    calls = []

    class RecordingManager(CheckpointManager):
        def save(self, model, *, step, **options):
            calls.append(("save", step))
            return super().save(model, step=step, **options)

        def load(self, model, **options):
            calls.append("load")
            return super().load(model, **options)

    def trainer(**options):
        model, source = tiny_model(), ListSource(sorting_items(4))
        checkpointer = RecordingManager(CheckpointConfig(tmp_path, every_n_steps=1))
        return Trainer(
            model=model, algo=make_grpo(group_size=4), batch_source=source, cfg=cpu_config(), checkpointer=checkpointer, **options
        )

    trainer().train_sync(1)
    resumed = trainer(resume_from=1)
    assert calls == [("save", 1), "load"]
    assert resumed.current_step == 1


def test_a_backend_that_cannot_save_is_refused_before_the_first_step(tmp_path):
    class Bare:
        def forward_backward(self, batch, *, totals=None): ...
        def optim_step(self, *, lr_factor=1.0): ...

    with pytest.raises(ConfigError, match=r"backend \(Bare\) has no save, load"):
        Trainer(
            model=None,
            backend=Bare(),
            algo=make_grpo(group_size=4),
            batch_source=ListSource(sorting_items(4)),
            cfg=cpu_config(),
            checkpoint_config=CheckpointConfig(tmp_path, every_n_steps=1),
        )


def test_a_subclass_of_the_trainer_can_set_its_model():
    model = tiny_model()
    trainer = Trainer(model=model, algo=make_grpo(group_size=4), batch_source=ListSource(sorting_items(4)), cfg=cpu_config())
    trainer.model = other = tiny_model(seed=1)
    assert trainer.model is other


def test_a_shallow_checkpoint_is_resumed_exactly_and_has_no_tokenizer(tmp_path):
    model = tiny_model()
    options = {"optimizer": train_randomly(model), "step": 1}
    full = CheckpointManager(CheckpointConfig(tmp_path / "full"), tokenizer=make_byte_tokenizer()).save(model, **options)
    manager = CheckpointManager(CheckpointConfig(tmp_path / "shallow", layout="shallow"), tokenizer=make_byte_tokenizer())
    shallow = manager.save(model, **options)
    added = {path.name for path in full.iterdir()} - {path.name for path in shallow.iterdir()}
    assert added == {path.name for path in full.glob("*token*")} | {path.name for path in full.glob("*.jinja")}
    other = tiny_model(1)
    assert manager.load(other, optimizer=torch.optim.AdamW(other.parameters()))["step"] == 1
    assert_same_tensors(weights_of(other), weights_of(model))


@pytest.mark.parametrize("layout", ["full", "shallow"])
def test_static_files_are_added_where_a_checkpoint_lacks_them(tmp_path, layout):
    source = tmp_path / "source"
    make_byte_tokenizer().save_pretrained(source)
    (source / "config.json").write_text("{}")
    (source / "generation_config.json").write_text('{"_from_model_config": true, "max_length": 7}')
    (source / "model.safetensors").write_bytes(b"not copied")
    model = tiny_model()
    plain = make_manager(tmp_path / "plain").save(model, optimizer=None, step=1)
    manager = make_manager(tmp_path / "static", layout=layout, static_files=source)
    folder = manager.save(model, optimizer=None, step=1)
    for name in ("config.json", "generation_config.json", "model.safetensors"):  # the model's own
        assert (folder / name).read_bytes() == (plain / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == [100, 101]
    assert manager.find(step=1) == folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no config and no tokenizer"):
        make_manager(tmp_path / "static", static_files=tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"layout \(deep\) .*full, shallow"):
        make_manager(tmp_path / "static", layout="deep")
