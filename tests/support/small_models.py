"""Models of several architectures with a few thousand random parameters each."""

import torch

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
LLAMA = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.2}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.2, "pad_token_id": 0}
BERT = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.2}

CAUSAL = {
    "Qwen2": LLAMA,
    "Llama": LLAMA,
    "Gemma": {**LLAMA, "head_dim": 8},
    "Phi3": LLAMA,
    "Phi": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "GPT2": GPT2,
    "GPTNeoX": BERT,
    "OPT": {**SIZES, "ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 16, "init_std": 0.2},
    "Falcon": {**SIZES, "initializer_range": 0.2},
    "Bloom": {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.2, "pad_token_id": 0},
}
SCORING = {
    "Qwen3": {**LLAMA, "head_dim": 8},
    "Bert": BERT,
    "Roberta": BERT,
    "ModernBert": {**BERT, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "DebertaV2": BERT,
}
"""Architectures with a sequence classification head that `CAUSAL` does not list."""
EXPERTS = {**LLAMA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_mtp_layers": 0}
MIXTURES = {
    "Glm4Moe": {**EXPERTS, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "DeepseekV3": {**EXPERTS, **RANKS, "num_key_value_heads": 2, "n_group": 2, "topk_group": 1},
}
"""Mixtures of experts with a stored buffer: biases by which the second layer chooses experts."""


def mixture_model(architecture, *, seed=0, **changes):
    """A mixture whose biases are not those that it begins with."""
    model = make_from_config(architecture, "ForCausalLM", {**MIXTURES[architecture], **changes}, seed)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.5, 0.1, 0.7]))
    return model


def model_with_hidden_windows(size=12, *, vocab_size=259):
    """A Qwen2MoE whose layers attend to `size` tokens, of which only the mask of transformers
    knows."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    windows = {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 2}
    return make_from_config("Qwen2Moe", "ForCausalLM", {**LLAMA, **experts, **windows, "vocab_size": vocab_size}, 0)


def causal_model(architecture, *, seed=0, **changes):
    return make_from_config(architecture, "ForCausalLM", {**CAUSAL[architecture], **changes}, seed)


def scoring_model(architecture, *, seed=0, num_labels=1):
    """A sequence classification model; a reward model if it has one label."""
    settings = {**CAUSAL, **SCORING}[architecture]
    return make_from_config(architecture, "ForSequenceClassification", {**settings, "num_labels": num_labels}, seed)


def make_from_config(architecture, form, settings, seed):
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**settings)
    return getattr(transformers, f"AutoModel{form}").from_config(config).eval()
