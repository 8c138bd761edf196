"""Adapters: where they are added, what is trained and saved, and that every reader of PEFT models
can read them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_architectures import make_architecture
from small_models import CAUSAL, causal_model, scoring_model
from torch import nn
from training_samples import assert_same_tensors, tiny_model, weights_of

from ludic.errors import CheckpointError, ConfigError
from ludic.models.heads import find_head
from ludic.models.lora import collect_adapter_weights, load_adapter, save_adapter, save_merged
from ludic.models.published import published_weights
from ludic.training import LoraSettings, apply_lora, find_target_modules

LLAMA_TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
TARGETS = {
    "Qwen2": LLAMA_TARGETS,
    "Llama": LLAMA_TARGETS,
    "Gemma": LLAMA_TARGETS,
    "Phi3": ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"],
    "Phi": ["dense", "fc1", "fc2", "k_proj", "q_proj", "v_proj"],
    "GPT2": ["c_attn", "c_fc", "c_proj"],
    "GPTNeoX": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
    "OPT": ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"],
    "Falcon": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
    "Bloom": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
}
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 3, 3, 4, 1]])


def perturb_trainable(model, seed=1):
    """The model after random changes of every trainable weight, as by a step."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- where adapters are added


@pytest.mark.parametrize("architecture", CAUSAL)
def test_every_projection_of_attention_and_feed_forward_gets_an_adapter(architecture):
    model = causal_model(architecture)
    assert find_target_modules(model) == TARGETS[architecture]
    blocks = sum(
        (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and any(part.isdigit() for part in name.split("."))
        for name, module in model.named_modules()
    )
    before = logits(model)
    adapted = apply_lora(model, LoraSettings(rank=2))
    assert sum(hasattr(module, "lora_A") for module in adapted.modules()) == blocks
    assert all("lora_" in name for name in trainable(adapted))
    assert torch.equal(logits(adapted.eval()), before)  # B is zero
    assert (logits(perturb_trainable(adapted)) - before).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["Qwen2", "GPT2", "GPTNeoX", "Phi3", "OPT"])
def test_published_weights_are_the_base_weights_with_merged_adapters(architecture):
    model = perturb_trainable(apply_lora(causal_model(architecture), LoraSettings(rank=2)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    published = published_weights(model)
    plain = causal_model(architecture, seed=1)
    assert set(published) == {name for name, _ in plain.named_parameters()}
    plain.load_state_dict(published, strict=False)
    plain.tie_weights()
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=1e-5)
    assert_same_tensors(model.state_dict(), before)


def test_the_error_of_a_model_with_unknown_names_lists_its_linear_layers():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"mixer": nn.Linear(4, 4), "glue": nn.Linear(4, 4)})])
            self.score = nn.Linear(4, 1)

    with pytest.raises(ConfigError, match=r"set target_modules \(linear: glue, mixer, score"):
        apply_lora(Strange())
    model = apply_lora(Strange(), LoraSettings(target_modules=["mixer"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(model) if "lora_" in name} == {"mixer"}


def test_projections_that_peft_refuses_in_a_state_space_model_get_no_adapter():
    model = make_architecture("falcon_h1")
    assert find_target_modules(model) == LLAMA_TARGETS
    assert logits(apply_lora(model)).isfinite().all()
    with pytest.raises(ConfigError, match=r"set target_modules \(linear: .*in_proj"):
        apply_lora(make_architecture("falcon_mamba"))


def test_wrapped_projections_of_images_get_no_adapter():
    names = trainable(apply_lora(make_architecture("gemma4")))
    assert names
    assert all(".language_model." in name for name in names)


@pytest.mark.parametrize(
    ("architecture", "name", "kind"),
    [
        ("phimoe", "router", "PhimoeTopKRouter"),
        ("llama4_text", "router", "Llama4Router"),
        ("deepseek_v4", "o_a_proj", "GroupedLinear"),
    ],
)
def test_layers_that_return_more_than_a_product_get_no_adapter(architecture, name, kind):
    from peft import LoraConfig

    model = make_architecture(architecture)
    for config in (LoraSettings(target_modules=["o_b_proj", "q_proj", name]), LoraConfig(target_modules=rf".*\.{name}")):
        with pytest.raises(ConfigError, match=rf"\.{name} of \w+ \(\w*{kind}\) can have no adapter"):
            apply_lora(model, config)
    for excluded in (None, ["k_proj"], r".*\.k_proj"):
        adapted = apply_lora(make_architecture(architecture), LoraConfig(target_modules="all-linear", exclude_modules=excluded))
        assert not any(f".{name}." in each or (excluded and ".k_proj." in each) for each in trainable(adapted))
        assert logits(adapted).isfinite().all()
    if name == "router":
        saved = apply_lora(model, LoraSettings(target_modules=["q_proj"], modules_to_save=[name]))
        assert any(f".{name}." in each for each in trainable(saved))


def test_invalid_settings_are_refused():
    for wrong in ({"rank": 0}, {"rank": 2.5}, {"alpha": 0.0}, {"dropout": 1.0}, {"target_modules": "q_proj"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LoraSettings(**wrong)
    with pytest.raises(ConfigError, match="has adapters already"):
        apply_lora(apply_lora(tiny_model()))


def test_the_scale_is_alpha_over_rank_and_two_by_default():
    def scale(**settings):
        model = apply_lora(tiny_model(), LoraSettings(target_modules=["q_proj"], **settings))
        return model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]

    assert scale(rank=4) == scale(rank=8) == 2.0
    assert scale(rank=4, alpha=2) == 0.5
    assert scale(rank=4, alpha=2, rank_stabilized=True) == 1.0  # 2 / sqrt(4)


def test_a_peft_config_is_completed_on_a_copy():
    from peft import LoraConfig

    config = LoraConfig(r=2)
    model = apply_lora(scoring_model("Qwen2"), config)
    assert (config.target_modules, config.modules_to_save, config.task_type) == (None, None, None)
    own = model.peft_config["default"]
    assert own.target_modules == set(LLAMA_TARGETS)
    assert "score" in own.modules_to_save
    given = apply_lora(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).peft_config["default"]
    assert given.target_modules == {"q_proj"}
    assert not given.modules_to_save


# --- the head


@pytest.mark.parametrize(
    ("architecture", "head"), [("Qwen2", "score"), ("GPT2", "score"), ("Bert", "classifier"), ("Roberta", "classifier")]
)
def test_the_head_of_a_scoring_model_is_trained_and_saved_completely(architecture, head, tmp_path):
    model = scoring_model(architecture)
    assert find_head(model) == head
    names = {name for name, _ in model.named_parameters() if name.startswith(head)}
    adapted = apply_lora(model, LoraSettings(rank=2))
    whole = {name for name in trainable(adapted) if "lora_" not in name}
    assert {name.replace(".modules_to_save.default.", ".").removeprefix("base_model.model.") for name in whole} == names
    save_adapter(perturb_trainable(adapted), tmp_path)
    assert {f"base_model.model.{name}" for name in names} <= set(load_file(tmp_path / "adapter_model.safetensors"))
    published = published_weights(adapted)
    assert set(published) == {name for name, _ in scoring_model(architecture).named_parameters()}
    plain = scoring_model(architecture, seed=1)
    plain.load_state_dict(published, strict=False)
    torch.testing.assert_close(logits(plain), logits(adapted), atol=1e-5, rtol=1e-5)


def test_head_and_pooler_layers_named_like_targets_get_no_adapter():
    model = apply_lora(scoring_model("Roberta"), LoraSettings(rank=2))
    assert not any(
        "classifier" in name or "pooler" in name for name, module in model.named_modules() if hasattr(module, "lora_A")
    )


def test_the_language_model_head_does_not_count_and_other_heads_are_found_in_order():
    assert find_head(causal_model("Llama")) is find_head(causal_model("OPT")) is None  # OPT has more positions than tokens here

    class Scorer(nn.Module):
        def __init__(self, *heads, rows=1):
            super().__init__()
            self.embed = nn.Embedding(50, 4)
            for head in heads:
                setattr(self, head, nn.Linear(4, rows))

    assert find_head(Scorer("v_head", "reward_head")) == "reward_head"
    assert find_head(Scorer("v_head", "lm_head")) == "lm_head"  # one row, so it is not the vocabulary projection
    assert find_head(Scorer("lm_head", rows=50)) is None
    assert find_head(Scorer("classifier", "score")) == "score"
    wrapped = nn.ModuleDict({"inner": Scorer("v_head")})
    assert find_head(wrapped) == "inner.v_head"


def test_the_head_is_found_behind_adapters():
    assert find_head(apply_lora(scoring_model("Qwen2"))) == "base_model.model.score"


# --- merging


def test_a_hundred_publications_leave_every_weight_bitwise_unchanged():
    model = perturb_trainable(apply_lora(causal_model("Qwen2"), LoraSettings(rank=2)).bfloat16())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = {name: tensor.clone() for name, tensor in published_weights(model).items()}
    for _ in range(100):
        last = published_weights(model)
    assert_same_tensors(model.state_dict(), before)
    assert_same_tensors(last, first)
    model.merge_adapter()  # what merging and unmerging in place would have done
    model.unmerge_adapter()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_merging_rounds_once():
    model = perturb_trainable(apply_lora(causal_model("Qwen2").bfloat16(), LoraSettings(rank=2)))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.dtype == torch.float32
    exact = (
        layer.base_layer.weight.double() + 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    merged = published_weights(model)["model.layers.0.self_attn.q_proj.weight"]
    assert merged.dtype == torch.bfloat16
    assert ((merged.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-9).all()  # at most half a unit in the last of 8 bits


def test_a_model_already_merged_by_peft_is_published_unchanged():
    model = perturb_trainable(apply_lora(causal_model("Qwen2"), LoraSettings(rank=2)))
    expected = published_weights(model)
    model.merge_adapter()
    assert_same_tensors(published_weights(model), expected, atol=1e-6)


def test_weight_decomposed_adapters_and_biases_are_merged_as_peft_does():
    from peft import LoraConfig

    for config in (LoraConfig(r=2, use_dora=True), LoraConfig(r=2, lora_bias=True), LoraConfig(r=2, use_rslora=True)):
        model = perturb_trainable(apply_lora(causal_model("GPTNeoX"), config))
        plain = causal_model("GPTNeoX", seed=1)
        plain.load_state_dict(published_weights(model), strict=False)
        torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=1e-4)


def test_the_error_of_an_adapter_that_cannot_be_merged_on_a_copy_names_it():
    from peft import IA3Config, get_peft_model

    model = get_peft_model(causal_model("Qwen2"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match=r"k_proj \(Linear\) cannot be merged"):
        published_weights(model)


# --- files


def assert_same_logits(read, model):
    """In float64: the last bits depend on where in memory the weights of a file lie."""
    torch.testing.assert_close(logits(read.double()), logits(model.double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ["Qwen2", "GPT2"])
def test_peft_and_transformers_read_the_adapters_of_a_causal_model(architecture, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    causal_model(architecture).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = perturb_trainable(apply_lora(base, LoraSettings(rank=2)))
    save_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", str(tmp_path / "base"))
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    read = PeftModel.from_pretrained(causal_model(architecture), tmp_path / "adapter").eval()
    assert_same_logits(read, model)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert_same_logits(read, model)
    assert_same_logits(load_adapter(causal_model(architecture), tmp_path / "adapter"), model)


@pytest.mark.parametrize("architecture", ["Qwen2", "Bert"])
def test_peft_and_transformers_read_the_adapters_and_the_head_of_a_reward_model(architecture, tmp_path):
    from peft import AutoPeftModelForSequenceClassification, PeftModel
    from transformers import AutoModelForSequenceClassification

    scoring_model(architecture).save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    model = perturb_trainable(apply_lora(base, LoraSettings(rank=2)))
    save_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    read = PeftModel.from_pretrained(scoring_model(architecture), tmp_path / "adapter").eval()
    assert_same_logits(read, model)
    read = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1).eval()
    assert_same_logits(read, model)
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1).eval()
    assert_same_logits(read, model)


def test_the_merged_model_on_disk_needs_no_peft_and_saving_changes_nothing_in_memory(tmp_path):
    from transformers import AutoModelForCausalLM

    model = perturb_trainable(apply_lora(tiny_model(), LoraSettings(rank=2)))
    before = weights_of(model)
    save_merged(model, tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    assert not any("lora" in name or "base" in name for name in load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model), atol=1e-5, rtol=1e-5)
    assert_same_tensors(weights_of(model), before)


def test_adapter_weights_equal_the_file(tmp_path):
    model = perturb_trainable(apply_lora(scoring_model("Qwen2"), LoraSettings(rank=2)))
    save_adapter(model, tmp_path)
    assert_same_tensors(collect_adapter_weights(model), load_file(tmp_path / "adapter_model.safetensors"))
    with pytest.raises(ConfigError, match="no adapters"):
        collect_adapter_weights(tiny_model())
    with pytest.raises(ConfigError, match="no adapters"):
        save_adapter(tiny_model(), tmp_path)


def test_saving_does_not_contact_the_hub(tmp_path, monkeypatch):
    import peft.utils.save_and_load

    def asked(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(peft.utils.save_and_load, "check_file_exists_on_hf_hub", asked)
    model = apply_lora(tiny_model(), LoraSettings(rank=2))
    model.peft_config["default"].base_model_name_or_path = "somebody/some-model"
    save_adapter(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_pickled_adapters_are_refused(tmp_path):
    save_adapter(apply_lora(tiny_model(), LoraSettings(rank=2)), tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(weights, tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no adapter_model.safetensors"):
        load_adapter(tiny_model(), tmp_path)


def test_adapters_of_another_config_are_refused_with_a_reason(tmp_path):
    from ludic.models.state_files import read_model

    save_adapter(apply_lora(tiny_model(), LoraSettings(rank=2)), tmp_path)
    other = apply_lora(tiny_model(), LoraSettings(rank=4))
    before = weights_of(other)
    with pytest.raises(CheckpointError, match="use the same LoRA config"):
        read_model(other, tmp_path)
    with pytest.raises(CheckpointError, match=r"unknown \["):
        read_model(apply_lora(tiny_model(), LoraSettings(rank=2, target_modules=["q_proj"])), tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "q_proj" in name}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \["):
        read_model(apply_lora(tiny_model(), LoraSettings(rank=2)), tmp_path)
    assert_same_tensors(weights_of(other), before)
