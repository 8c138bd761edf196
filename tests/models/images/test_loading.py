"""Models that see images, with their processors: loaded, saved, and trained on text alone."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small_models import causal_model
from tiny_vision import make_picture, make_tiny_vision, make_tokenizer
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, CLIPConfig, Qwen2Config, T5Config

from ludic.errors import CheckpointError, ConfigError
from ludic.models.exporting import export_model
from ludic.models.images.processor import attach_processor, find_processor, require_processor
from ludic.models.loading import choose_class, load_classifier, load_model, load_tokenizer
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.packed_attention import find_context
from ludic.models.saving import save_policy
from ludic.models.sharded_loading import load_skeleton
from ludic.models.state_files import read_model, write_model
from ludic.runs.base import TrainingRun
from ludic.runs.directory import Progress
from ludic.runs.model_card import explain_loading
from ludic.training.algorithm import forward_logits
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager


def save(name, folder):
    model, processor = make_tiny_vision(name)
    save_policy(model, processor.tokenizer, folder)
    return model, processor


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava", "idefics3", "internvl", "mistral3", "gemma3"])
def test_a_saved_model_is_loaded_with_its_tower_and_its_processor(name, tmp_path):
    model, processor = save(name, tmp_path / "model")
    loaded = load_model(str(tmp_path), "float32")  # the folder of a run
    assert type(loaded) is type(model)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    assert find_processor(loaded).fingerprint == processor.fingerprint
    assert type(AutoProcessor.from_pretrained(tmp_path / "model")) is type(processor.processor)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "idefics3", "internvl", "mistral3", "gemma3"])
def test_a_classifier_has_all_weights_of_the_model_and_a_new_head(name, tmp_path):
    model, processor = save(name, tmp_path / "model")
    made, missing = load_classifier(str(tmp_path), "float32", description="model", num_labels=1)
    assert missing == {"score.weight"}
    own = made.state_dict()
    assert all(torch.equal(own[key], value) for key, value in model.state_dict().items() if not key.startswith("lm_head"))
    save_policy(made, processor.tokenizer, tmp_path / "again")
    again, missing = load_classifier(str(tmp_path / "again"), "float32", description="model")
    assert not missing
    assert all(torch.equal(own[key], value) for key, value in again.state_dict().items())
    assert find_processor(again).fingerprint == processor.fingerprint
    skeleton = load_skeleton(str(tmp_path / "again"), "float32", scores=True)
    assert type(skeleton) is type(again)
    assert type(again).__name__ == type(model).__name__.replace("ForConditionalGeneration", "ForSequenceClassification")


def test_a_skeleton_and_a_checkpoint_have_the_processor(tmp_path):
    model, processor = save("qwen2_vl", tmp_path / "model")
    skeleton = load_skeleton(str(tmp_path / "model"), "float32")
    assert type(skeleton) is type(model)
    assert find_processor(skeleton).fingerprint == processor.fingerprint
    manager = CheckpointManager(CheckpointConfig(tmp_path / "steps"), tokenizer=processor.tokenizer, model=model)
    folder = manager.save(model, optimizer=None, step=1)
    loaded = load_model(str(folder), "float32")
    assert find_processor(loaded).fingerprint == processor.fingerprint
    with torch.no_grad():
        next(loaded.parameters()).zero_()
    read_model(loaded, folder)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_adapters_are_saved_with_the_processor_and_loaded_merged(tmp_path):
    model, processor = save("qwen2_vl", tmp_path / "base")
    adapted = apply_lora(model, LoraSettings(rank=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    save_policy(adapted, processor.tokenizer, tmp_path / "model", base=str(tmp_path / "base"))
    merged, of_adapter = (load_model(str(tmp_path / name), "float32") for name in ("model", "adapter"))
    assert find_processor(merged).fingerprint == find_processor(of_adapter).fingerprint == processor.fingerprint
    assert all(torch.allclose(value, of_adapter.state_dict()[key]) for key, value in merged.state_dict().items())


def test_an_export_has_the_weights_by_their_names(tmp_path):
    model, _ = make_tiny_vision("qwen2_vl")
    write_model(model, tmp_path)
    (tmp_path / "out").mkdir()
    export_model(tmp_path, tmp_path / "out", torch.bfloat16)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(tmp_path / "model.safetensors").keys()
    assert type(load_model(str(tmp_path / "out"), "auto")) is type(model)


def test_the_limits_of_pixels_reach_the_processor_and_its_files(tmp_path):
    model, processor = save("qwen2_vl", tmp_path)
    smaller = find_processor(load_model(str(tmp_path), "float32"))
    smaller.limit_pixels(max_pixels=256, min_pixels=128)
    digests = [each.store.add(make_picture(32, 32)) for each in (processor, smaller)]
    assert [each.process(digest).num_patches for each, digest in zip((processor, smaller), digests, strict=True)] == [64, 16]
    attach_processor(model, smaller)
    save_policy(model, processor.tokenizer, tmp_path / "again")
    assert find_processor(load_model(str(tmp_path / "again"), "float32")).fingerprint == smaller.fingerprint
    save("llava", tmp_path / "llava")
    with pytest.raises(ConfigError, match="CLIPImageProcessor has no max_pixels"):
        find_processor(load_model(str(tmp_path / "llava"), "float32")).limit_pixels(max_pixels=256, min_pixels=None)


def test_a_config_without_a_tower_is_a_causal_model_and_others_are_refused_in_a_line(tmp_path):
    assert choose_class(Qwen2Config()).__name__ == "AutoModelForCausalLM"
    for config in (T5Config(), CLIPConfig()):
        with pytest.raises(ConfigError, match=f"{config.model_type} is no architecture") as caught:
            choose_class(config)
        assert "\n" not in str(caught.value)
    make_tiny_vision("mllama")[0].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"with a head for scores .* mllama .*name another") as caught:
        load_classifier(str(tmp_path), "float32", description="model", num_labels=1)
    assert "\n" not in str(caught.value)


def test_without_a_processor_a_model_reads_text_alone_and_says_why(tmp_path):
    model, processor = make_tiny_vision("qwen2_vl")
    model.save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "float32")
    assert find_processor(loaded) is None
    with pytest.raises(ConfigError, match=r"Qwen2VLForConditionalGeneration cannot read them: .*has no processor_config.json"):
        require_processor(loaded)
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM cannot read them: .*tower"):
        require_processor(causal_model("Qwen2"))


def test_a_package_that_the_processor_needs_is_named(tmp_path):
    save("qwen2_vl", tmp_path)
    code = f"""
import importlib.metadata, importlib.util, sys
found, version = importlib.util.find_spec, importlib.metadata.version
def hide(name, *rest, inner):
    if name.split(".")[0] == "torchvision":
        raise importlib.metadata.PackageNotFoundError(name)
    return inner(name, *rest)
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "torchvision" else found(name, *rest)
importlib.metadata.version = lambda name: hide(name, inner=version)
sys.modules["torchvision"] = None
from ludic.models.loading import load_model, load_processor
model = load_model({str(tmp_path)!r}, "float32")
try:
    load_processor({str(tmp_path)!r}, model.config)
except ImportError as error:
    print(type(error).__name__, error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == ["MissingExtraError Qwen2VLVideoProcessor needs torchvision; pip install 'ludic-rl[images]'"]


def test_a_chat_template_of_an_older_processor_is_found(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").unlink()
    assert load_tokenizer(str(tmp_path)).chat_template is None


def test_a_run_goes_on_with_the_processor_that_it_began_with():
    model, processor = make_tiny_vision("qwen2_vl")
    written = []
    run = SimpleNamespace(
        parts=SimpleNamespace(model=model),
        progress=Progress(),
        directory=SimpleNamespace(write_progress=lambda progress: written.append(progress.images)),
    )
    TrainingRun._check_processor(run)
    TrainingRun._check_processor(run)
    assert written[-1] == {"processor": processor.fingerprint}
    attach_processor(model, make_tiny_vision("llava")[1])
    with pytest.raises(CheckpointError, match=f"began with the processor {processor.fingerprint}"):
        TrainingRun._check_processor(run)
    text = SimpleNamespace(parts=SimpleNamespace(model=causal_model("Qwen2")), progress=Progress(), directory=None)
    TrainingRun._check_processor(text)
    assert text.progress.images is None


def test_the_card_of_such_a_model_names_its_classes():
    text = explain_loading("sft", {}, base=None, is_adapter=False, sees_images=True)
    assert "AutoModelForImageTextToText" in text
    assert "processor = AutoProcessor" in text
    assert "AutoModelForCausalLM" in explain_loading("sft", {}, base=None, is_adapter=False)


def test_a_classifier_has_the_config_of_its_model_which_the_class_beside_it_may_not_have():
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config = AutoConfig.for_model("qwen2_5_omni_thinker")
    choose_class(config, scores=True)
    assert MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].config_class is type(config)
    with pytest.raises(ConfigError, match="head for scores is made of shieldgemma2"):
        choose_class(AutoConfig.for_model("shieldgemma2"), scores=True)


def test_the_card_of_a_reward_model_loads_it(tmp_path):
    _, processor = save("llava", tmp_path / "model")
    made, _ = load_classifier(str(tmp_path), "float32", description="model", num_labels=1)
    save_policy(made, processor.tokenizer, tmp_path / "scores")
    text = explain_loading("train-rm", {}, base=None, is_adapter=False, sees_images=True)
    code = text.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(tmp_path / "scores"))
    out = subprocess.run([sys.executable, "-c", f"{code}\nprint(type(model).__name__)"], capture_output=True, text=True)
    assert out.stdout.split() == ["LlavaForSequenceClassification"], out.stderr
    assert 'load_config("BASE")' in explain_loading("train-rm", {}, base=None, is_adapter=True, sees_images=True)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "llava"])
def test_text_alone_has_the_context_of_the_language_model_and_no_cache(name):
    model, processor = make_tiny_vision(name)
    assert find_context(model) == 1024
    calls = []
    model.register_forward_pre_hook(lambda module, args, keywords: calls.append(keywords), with_kwargs=True)
    ids = torch.tensor([processor.tokenizer("only text")["input_ids"]])
    logits = forward_logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert calls[0]["use_cache"] is False
    assert torch.allclose(logits, model(input_ids=ids).logits, atol=1e-6)


def test_a_tokenizer_is_loaded_from_a_folder_that_has_a_processor(tmp_path):
    _, processor = save("gemma3", tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == processor.tokenizer.get_vocab()
