"""A small random model of nearly every causal architecture of transformers, with windows of 8
tokens where it has windows."""

import dataclasses

import torch

FIELDS = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_sequence_length"), 256),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "dim_ff", "d_inner"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "type_vocab_size", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
}
"""The value of a field of any config that has it."""
SAME_HEADS = {"num_key_value_heads": 4}
MIXED = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
INDEXER = {**SAME_HEADS, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}  # of few heads all scores are often 0: ties
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
IMAGES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 8,
}
WINDOWED = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
GEMMA4 = {**TEXT, **WINDOWED}
QWEN3_5 = {**TEXT, **MIXED, **LINEAR}
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
QWEN3_5_IMAGES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 6.0, 9.0],
}
DOTS3_IMAGES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "mlp_layer_types": ["dense"],
    "adapter_in_dim": 16,
    "adapter_out_dim": 32,
}
DOTS3_SOUND = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "downsample_hidden_size": 8,
    "feature_size": 16,
    "adapter_input_size": 16,
    "adapter_out_dim": 32,
}
BYTES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
QWEN4_EXP = {
    **QWEN3_5,
    **EXPERTS,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
OTHER_FIELDS = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "dots3_note_text", "glm4_moe_lite"), SAME_HEADS),
    **dict.fromkeys(("minicpm3", "youtu"), SAME_HEADS),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXER),
    **{name: {**MIXED, **LINEAR} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "bailing_hybrid": {**MIXED, **SAME_HEADS},
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm3", "lfm2_moe")},
    **{name: {"rotary_dim": 8} for name in ("codegen", "gptj")},
    "blt": {
        "encoder_config": {**BYTES, "hidden_size_global": 64},
        "decoder_config": {**BYTES, "hidden_size_global": 64},
        "global_config": {**BYTES, "hidden_size": 64, "num_hidden_layers": 2},
        "patcher_config": BYTES,
        "encoder_hash_byte_group_vocab": 64,
        "local_attention_window_len": 8,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {**ROPE, "mrope_section": [2, 1, 1]}, "full_attention": None},
    },
    "dbrx": {
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_top_k": 2},
    },
    "dots3_note": {
        "text_config": {
            **{field: value for field, value in FIELDS.items() if field != "sliding_window"},
            **SAME_HEADS,
            "head_dim": 16,
            "shared_experts_intermediate_size": 16,
            **INDEXER,
        },
        "vision_config": DOTS3_IMAGES,
        "audio_config": DOTS3_SOUND,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "emu3": {
        "text_config": {**TEXT, "pad_token_id": 0},
        "vq_config": {
            "base_channels": 32,
            "embed_dim": 4,
            "z_channels": 4,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
        },
    },
    "fuyu": {"text_config": {**TEXT, "model_type": "persimmon"}, "hidden_size": 32},
    "gemma3": {"text_config": TEXT, "vision_config": IMAGES, "mm_tokens_per_image": 4},
    "gemma3n_text": {**WINDOWED, **BY_LAYER, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4": {
        "text_config": {**GEMMA4, **BY_LAYER, "global_head_dim": 8},
        "vision_config": IMAGES,
        "audio_config": None,
    },
    "gemma4_text": {**BY_LAYER, "num_kv_shared_layers": 0, "global_head_dim": 8, "num_global_key_value_heads": 2},
    "gemma4_unified": {"text_config": GEMMA4, "audio_config": None},
    "git": {"vision_config": IMAGES},
    "got_ocr2": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
            "output_channels": 8,
            "mlp_dim": 16,
            "global_attn_indexes": [0],
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {**MIXED, **SAME_HEADS, "linear_head_dim": 8, "linear_num_heads": 4},
    "llama": {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2},
        "vision_config": {
            **IMAGES,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "longcat_flash": {
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "moe_topk": 2,
        **SAME_HEADS,
    },
    "mamba2": {"head_dim": 8, "num_heads": 8, "state_size": 8, "n_groups": 1},
    "mllama": {
        "text_config": {
            **{field: value for field, value in TEXT.items() if field != "head_dim"},
            "cross_attention_layers": [1],
            "rope_parameters": ROPE,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision_config": {},
    },
    "moss_transcribe_diarize": {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "audio_config": {**IMAGES, "num_mel_bins": 8},
    },
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    "phi4_multimodal": {
        "vision_config": {**IMAGES, "num_hidden_layers": 2, "crop_size": 16},
        "audio_config": {
            "hidden_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
            "depthwise_separable_out_channel": 16,
        },
        "rope_parameters": LONGROPE,
    },
    "phimoe": {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.5}},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3_5": {"text_config": QWEN3_5, "vision_config": QWEN3_5_IMAGES},
    "qwen3_5_moe": {"text_config": {**QWEN3_5, **EXPERTS}, "vision_config": QWEN3_5_IMAGES},
    "qwen4_exp": {"text_config": QWEN4_EXP, "vision_config": QWEN3_5_IMAGES},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "attention_window_size": 8,
        "lru_width": 32,
    },
    "reformer": {  # lengths of samples in training are multiples of its chunks
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 1,
        "lsh_attn_chunk_length": 1,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "roc_bert": {
        "shape_vocab_size": 64,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "xlm": {"emb_dim": 32, "n_heads": 4, "n_words": 64, "n_langs": 1, "causal": True},
    "xlstm": {"hidden_size": 32, "num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What an architecture needs besides `FIELDS`."""
LARGEST = 5_000_000
"""Parameters: what is not named above would else have its full size."""


def make_architecture(name, **changes):
    """The model, without dropout. Raises for an architecture that cannot be made small so."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    known = {each.name for each in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    fields = {field: value for field, value in FIELDS.items() if field in known}
    fields |= {each: 0.0 for each in known if "jitter" in each}
    fields |= {each: 0.0 for each in known if "drop" in each and type(getattr(kind, each, None)) in (float, int)}
    config = kind(**{**fields, **OTHER_FIELDS.get(name, {}), **changes})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{name} has {size} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 or not parameter.isfinite().all():  # some begin with memory as it was
                parameter.normal_(0, 0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for field, value in list(vars(module).items()):
            if "drop" in field and isinstance(value, float):
                setattr(module, field, 0.0)
    return model.eval()
