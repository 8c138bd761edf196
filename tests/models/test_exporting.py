"""Weights of a folder written as one Hugging Face folder: the same numbers, in one or several
files, in another dtype, with adapters merged."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training_samples import tiny_model
from transformers import AutoModelForCausalLM

from ludic.errors import ConfigError
from ludic.models import exporting
from ludic.models.exporting import export_adapter, export_merged, export_model
from ludic.models.loading import load_model
from ludic.models.lora import save_adapter, save_merged
from ludic.training import LoraSettings, apply_lora


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def open_folder(folder):
    """What transformers makes of the folder, with nothing missing."""
    model, facts = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    return model


def assert_same_weights(model, other):
    own, others = dict(model.named_parameters()), dict(other.named_parameters())
    assert own.keys() == others.keys()
    for name, value in own.items():
        assert value.dtype == others[name].dtype, name
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize(("stored", "dtype"), [("1GB", None), ("10KB", None), ("10KB", torch.bfloat16)])
def test_a_model_in_any_number_of_files_becomes_one(stored, dtype, tmp_path, out):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model", max_shard_size=stored)
    export_model(tmp_path / "model", out, dtype)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_same_weights(open_folder(out), model if dtype is None else model.to(dtype))


def test_a_large_model_is_split_and_read_in_parts(tmp_path, out, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(exporting, "FILE_BYTES", 12_000)
    monkeypatch.setattr(exporting, "READ_BYTES", 3_000)
    export_model(tmp_path / "model", out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.numel() * 4 for value in model.parameters())
    files = set(index["weight_map"].values())
    assert files == {path.name for path in out.glob("*.safetensors")}
    assert len(files) > 2
    assert_same_weights(open_folder(out), model)


def adapted_model(**settings):
    model = apply_lora(tiny_model(), LoraSettings(rank=2, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def change_config(adapter, **changes):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


@pytest.mark.parametrize("settings", [{}, {"rank_stabilized": True}, {"alpha": 7.0, "target_modules": ["q_proj"]}])
def test_merged_adapters_are_those_that_a_run_saves(settings, tmp_path, out):
    tiny_model().save_pretrained(tmp_path / "base")
    model = adapted_model(**settings)
    save_adapter(model, tmp_path / "adapter")
    save_merged(model, tmp_path / "merged")
    export_merged(tmp_path / "adapter", tmp_path / "base", out)
    merged, expected = open_folder(out), open_folder(tmp_path / "merged")
    for (name, value), other in zip(merged.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-7, msg=name)
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, tiny_model().model.layers[0].self_attn.q_proj.weight)


def test_merged_weights_in_half_precision_are_rounded_once(tmp_path, out):
    tiny_model().save_pretrained(tmp_path / "base")
    model = adapted_model()
    save_adapter(model, tmp_path / "adapter")
    save_merged(model, tmp_path / "merged")
    export_merged(tmp_path / "adapter", tmp_path / "base", out, torch.bfloat16)
    assert_same_weights(open_folder(out), open_folder(tmp_path / "merged").to(torch.bfloat16))


def test_adapters_alone_name_their_base(tmp_path, out):
    tiny_model().save_pretrained(tmp_path / "base")
    model = adapted_model()
    save_adapter(model, tmp_path / "adapter")
    export_adapter(tmp_path / "adapter", out, base=str(tmp_path / "base"))
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert_same_weights(load_model(str(out), "float32"), model.merge_and_unload())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"adapters \(use_dora\) than LoRA; merge with PEFT"),
        ({"bias": "all"}, r"than LoRA; merge with PEFT"),
        ({"task_type": "SEQ_CLS"}, r"adapts a classifier, whose head .* lacks"),
    ],
)
def test_adapters_that_cannot_be_merged_here_are_refused(changes, message, tmp_path, out):
    tiny_model().save_pretrained(tmp_path / "base")
    save_adapter(adapted_model(), tmp_path / "adapter")
    change_config(tmp_path / "adapter", **changes)
    with pytest.raises(ConfigError, match=message):
        export_merged(tmp_path / "adapter", tmp_path / "base", out)


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
def test_an_alpha_of_some_layers_is_that_which_peft_gives_them(tmp_path, out):
    """PEFT's patterns match whole parts of a name, of which the first counts."""
    patterns = {"j_proj": 64, "proj": 64, "0.self_attn.q_proj": 3, r"layers\.\d+\.self_attn\.(q|v)_proj": 5}
    tiny_model().save_pretrained(tmp_path / "base")
    save_adapter(adapted_model(target_modules=["q_proj", "v_proj", "k_proj"]), tmp_path / "adapter")
    change_config(tmp_path / "adapter", alpha_pattern=patterns)
    export_merged(tmp_path / "adapter", tmp_path / "base", out)
    expected = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter").merge_and_unload()
    for (name, value), other in zip(open_folder(out).named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_adapters_are_not_merged_into_quantised_weights(dtype, tmp_path, out):
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    save_adapter(adapted_model(target_modules=["q_proj"]), tmp_path / "adapter")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    export_merged(tmp_path / "adapter", base, out)  # another layer, which no adapter changes
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**weights, name: weights[name].to(dtype)}, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"adapts {name}, which .*base has quantised \({dtype}\); export without --merge"):
        export_merged(tmp_path / "adapter", base, tmp_path)


def test_a_weight_that_the_base_does_not_store_is_named(tmp_path, out):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    save_adapter(adapted_model(), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapts model\.layers\.1\..*weight, .*base does not store"):
        export_merged(tmp_path / "adapter", tmp_path / "base", out)


def test_a_module_that_is_no_model_of_transformers_is_refused(tmp_path, out):
    from ludic.models.state_files import write_model

    write_model(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(ConfigError, match="names no model_type of transformers"):
        export_model(tmp_path, out)
