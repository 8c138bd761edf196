"""GGUF files become folders in Hugging Face layout with the same values, tokens and template."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from small_models import make_from_config
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.models.gguf import convert_gguf
from ludic.models.loading import load_model, load_tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
BYTES = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 173)] + [chr(c) for c in range(174, 256)]
BYTES += [chr(256 + n) for n in range(256 - len(BYTES))]  # GPT-2's letters of the bytes; Ġ is the space and Ċ the newline
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTES, "ĊĊ", "Ġt", "12"]
QUANTISED = GGMLQuantizationType.Q8_0
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(weight, heads):
    """The rows of a query or key in the order of llama.cpp, whose rotary halves are interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, *, pre="smollm", template=TEMPLATE, scaling=None, factor=None, parts=1, without=(), more=()):
    """A tiny Llama with quantised matrices, `without` some tensors and with `more`. Returns its
    weights as the file stores them."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    settings = {"vocab_size": len(TOKENS), "tie_word_embeddings": True, "max_position_embeddings": 128}
    model = make_from_config("Llama", "ForCausalLM", {**sizes, **settings}, seed=0)
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_license("mit")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(32)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    if factor is not None:
        writer.add_rope_scaling_factor(factor)
    writer.add_uint16("split.count", parts)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ċ Ċ", "Ġ t", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if template:
        writer.add_chat_template(template)
    stored = {}
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        layer = name.removeprefix("model.layers.0.").removesuffix(".weight")
        if layer in NAMES:
            key = f"blk.0.{NAMES[layer]}.weight"
        elif name in ("model.embed_tokens.weight", "model.norm.weight"):
            key = "token_embd.weight" if "embed" in name else "output_norm.weight"
        else:
            continue
        if key in without:
            continue
        if array.ndim == 1:
            writer.add_tensor(key, array)
            stored[name] = array
            continue
        heads = {"attn_q": 2, "attn_k": 1}.get(NAMES.get(layer, ""), 0)
        packed = quantize(permuted(array, heads) if heads else array, QUANTISED)
        writer.add_tensor(key, packed, raw_dtype=QUANTISED)
        stored[name] = dequantize(quantize(array, QUANTISED), QUANTISED)
    for key in more:
        writer.add_tensor(key, np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"without": ["blk.0.ffn_down.weight"]}, "some are missing"),
        ({"more": ["blk.0.attn_q.bias"]}, "some are dropped"),
        ({"more": ["rope_freqs.weight"]}, "some are dropped"),
        ({"scaling": RopeScalingType.YARN, "factor": 8.0}, "rotary positions .yarn, 8.0."),
        ({"factor": 8.0}, "rotary positions .linear, 8.0."),
        ({"parts": 2}, "one of 2 parts"),
    ],
)
def test_a_file_that_transformers_reads_in_part_is_refused(tmp_path, change, said):
    write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ConfigError, match=said):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_positions_that_are_scaled_by_one_are_not_scaled(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", scaling=RopeScalingType.LINEAR, factor=1.0)
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out").name == "Tiny"


def test_the_folder_has_the_values_that_the_file_stores(tmp_path):
    stored = write_gguf(tmp_path / "tiny.gguf")
    made = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert (made.name, made.licence, made.has_chat_template) == ("Tiny", "mit", True)
    assert made.stored_as == {"Q8_0": 8, "F32": 3}
    model = load_model(str(tmp_path / "out"), "float32")
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, value in stored.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    assert made.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not hasattr(model.config, "quantization_config")
    assert model.config.tie_word_embeddings


def test_the_tokenizer_has_the_rules_template_and_special_tokens_of_the_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    # Digits are alone, so that 12 is not merged, and the newlines before them are one token.
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12 t")["input_ids"]) == ["ĊĊ", "1", "2", "Ġt"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\n1<|im_end|>\n"


def test_the_rule_of_another_family_is_left_to_transformers(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre="gpt-2")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in ("\n\n12 t", "a  12", "café"):
        assert tokenizer(text)["input_ids"] == own(text)["input_ids"]


def test_the_command_says_what_it_wrote_and_notices_are_kept(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", template=None)
    (tmp_path / "LICENSE").write_text("as is")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    assert "Tiny" in done.output
    assert "8 Q8_0" in done.output
    assert "Licence: mit" in done.output
    assert "chat_template=FILE" in done.output
    assert (tmp_path / "out" / "LICENSE").read_text() == "as is"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("cut", [0, 3, 40, 4_000, -100])
def test_a_damaged_file_is_refused_and_nothing_is_written(tmp_path, cut):
    write_gguf(tmp_path / "whole.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"cut\.gguf .*no GGUF file, .*damaged"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"absent\.gguf is no file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"dtype \(int8\)"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match=r"dtype \(auto\)"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", "auto")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


def test_a_file_named_as_model_names_the_command(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"ludic convert .*tiny\.gguf FOLDER"):
        load_model(str(tmp_path / "tiny.gguf"), "float32")
