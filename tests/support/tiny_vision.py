"""Tiny random models that see images, with processors made from parts: nothing is downloaded.

The byte tokenizer has the tokens of `EXTRA` after its own; a picture of 16 x 16 pixels is one tile
of the models with tiles.
"""

import numpy as np
import torch

from ludic.images.store import ImageStore
from ludic.models.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, make_byte_tokenizer
from ludic.models.images.processor import ImageProcessor, attach_processor
from ludic.models.loading import choose_class

EXTRA = ("<image>", "<video>", "<start>", "<end>", "<fake_token_around_image>", "<global-img>", "<break>", "<soft>")
FIRST = 259
IMAGE, VIDEO, START, END, FAKE, GLOBAL, BREAK, SOFT = range(FIRST, FIRST + len(EXTRA))
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
VOCABULARY = FIRST + len(EXTRA) + len(ROWS)
CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}MARKER{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
CLIP = {**TOWER, "model_type": "clip_vision_model", "image_size": 16, "projection_dim": 32}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "image_size": 16}
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
WIDE = {**QWEN_TOWER, "out_hidden_size": 64, "intermediate_size": 48}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
PINS = [[16, 32], [32, 16], [32, 32]]


def _rope(**changes):
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, **changes}}


INTERLEAVED = _rope(mrope_section=[4, 2, 2], mrope_interleaved=True)
LINEAR = {
    **_rope(mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25),
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 16}
GEMMA = {
    "vision_config": SIGLIP,
    "mm_tokens_per_image": 4,
    "image_token_index": SOFT,
    "boi_token_index": START,
    "eoi_token_index": END,
}
CONFIGS = {
    "qwen2_vl": {
        "text_config": {**TEXT, **_rope()},
        "vision_config": {**QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **_rope()},
        "vision_config": {**WIDE, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **INTERLEAVED},
        "vision_config": {**WIDE, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **QWEN_IDS,
    },
    "qwen3_5": {"text_config": {**TEXT, **LINEAR}, "vision_config": {**WIDE, "num_position_embeddings": 64}, **QWEN_IDS},
    "glm4v": {
        "text_config": {**TEXT, **_rope(partial_rotary_factor=1.0)},
        "vision_config": {**WIDE, "image_size": 32, "in_channels": 3},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_start_token_id": FAKE,
        "video_end_token_id": GLOBAL,
    },
    "llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": IMAGE},
    "llava_next": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": CLIP,
        "image_token_index": IMAGE,
        "image_grid_pinpoints": PINS,
    },
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "image_grid_pinpoints": PINS,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
    },
    "smolvlm": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "image_size": 16},
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "image_size": 16},
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 32},
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "gemma3": {"text_config": {**TEXT, **WINDOWS, "sliding_window": 8}, **GEMMA},
    "gemma3_wide": {"text_config": {**TEXT, **WINDOWS, "sliding_window": 512}, **GEMMA},
    "lfm2_vl": {
        "text_config": {
            **TEXT,
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "block_multiple_of": 8,
            "full_attn_idxs": [1],
        },
        "vision_config": {**TOWER, "model_type": "siglip2_vision_model", "num_patches": 64},
        "image_token_id": IMAGE,
        "downsample_factor": 2,
    },
    "paligemma": {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": {**SIGLIP, "projection_dim": 64},
        "image_token_index": IMAGE,
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "mllama": {
        "text_config": {**TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1]},
        "vision_config": {
            **{name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size")},
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 16,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        "image_token_index": IMAGE,
    },
}
EXACT = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "llava_next", "llava_onevision", "smolvlm", "idefics3", "internvl", "mistral3",
)  # fmt: skip
"""The models that are exact in every layout."""
BLOCKS = ("gemma3", "gemma3_wide")
"""The models in which the tokens of an image see each other."""
PADDED = ("qwen3_5", "lfm2_vl")
"""The models that are exact in padded rows alone."""


def make_tiny_vision(name, seed=0, scores=False):
    """(model, its `ImageProcessor`, which is attached). `name` is in `CONFIGS`; with `scores` the
    model has one score. The images are in a store of its own."""
    from transformers import AutoConfig

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.removesuffix("_wide"), **CONFIGS[name])
    if scores:
        config.num_labels, config.get_text_config().pad_token_id = 1, PAD_ID
    model = choose_class(config, scores=scores).from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.05 if "patch_embed" in parameter_name else 0.15)
            elif "bias" in parameter_name and not parameter.any():
                parameter.normal_(0, 0.02)
    processor = ImageProcessor(make_processor(name), config, ImageStore())
    attach_processor(model, processor)
    return model, processor


def make_tiny_qwen2_vl(seed=0):
    return make_tiny_vision("qwen2_vl", seed)


def make_picture(width, height, seed=0):
    """A picture of random pixels, as an array."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_tokenizer(marker="<image>", **attributes):
    """The byte tokenizer with `EXTRA`, and a chat template that writes `marker` for an image."""
    tokenizer = make_byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.add_tokens([*EXTRA, *ROWS], special_tokens=True)
    tokenizer.chat_template = CHAT.replace("MARKER", marker)
    tokenizer._set_model_specific_special_tokens(attributes)  # which are saved with it
    return tokenizer


def make_processor(name):
    """The processor of transformers for the model with that name."""
    import transformers as t

    def qwen(processor, video):
        image = t.Qwen2VLImageProcessor(
            patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 32 * 32}
        )
        return processor(image_processor=image, tokenizer=tokenizer, video_processor=video(patch_size=4))

    clip = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    square = {"height": 16, "width": 16}
    tokenizer = make_tokenizer(image_token="<image>", video_token="<video>")
    if name == "qwen2_vl":
        return qwen(t.Qwen2VLProcessor, t.Qwen2VLVideoProcessor)
    if name == "qwen2_5_vl":
        return qwen(t.Qwen2_5_VLProcessor, t.Qwen2VLVideoProcessor)
    if name in ("qwen3_vl", "qwen3_5"):
        tokenizer = make_tokenizer(
            image_token="<image>", video_token="<video>", vision_start_token="<start>", vision_end_token="<end>"
        )
        return qwen(t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor)
    if name == "glm4v":
        image = t.Glm4vImageProcessor(
            patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 32 * 32 * 2}
        )
        return t.Glm4vProcessor(image_processor=image, tokenizer=tokenizer, video_processor=t.Glm4vVideoProcessor(patch_size=4))
    if name == "llava":
        return t.LlavaProcessor(
            image_processor=t.CLIPImageProcessor(**clip),
            tokenizer=tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if name == "llava_next":
        return t.LlavaNextProcessor(
            image_processor=t.LlavaNextImageProcessor(image_grid_pinpoints=PINS, **clip),
            tokenizer=tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if name == "llava_onevision":
        return t.LlavaOnevisionProcessor(
            image_processor=t.LlavaOnevisionImageProcessor(image_grid_pinpoints=PINS, size=square),
            tokenizer=tokenizer,
            video_processor=t.LlavaOnevisionVideoProcessor(),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_9",
        )
    if name in ("smolvlm", "idefics3"):
        tiles = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
        tokenizer = make_tokenizer(
            image_token="<image>", fake_image_token="<fake_token_around_image>", global_image_token="<global-img>"
        )
        kind = t.SmolVLMImageProcessor if name == "smolvlm" else t.Idefics3ImageProcessor
        return t.Idefics3Processor(image_processor=kind(**tiles), tokenizer=tokenizer, image_seq_len=4)
    if name == "internvl":
        tokenizer = make_tokenizer(
            context_image_token="<image>", start_image_token="<start>", end_image_token="<end>", video_token="<video>"
        )
        return t.InternVLProcessor(
            image_processor=t.GotOcr2ImageProcessor(size=square, crop_to_patches=True, max_patches=4),
            tokenizer=tokenizer,
            video_processor=t.InternVLVideoProcessor(),
            image_seq_length=4,
        )
    if name == "mistral3":
        return t.PixtralProcessor(
            image_processor=t.PixtralImageProcessor(patch_size={"height": 4, "width": 4}, size={"longest_edge": 32}),
            tokenizer=tokenizer,
            patch_size=4,
            spatial_merge_size=2,
            image_token="<image>",
            image_break_token="<break>",
            image_end_token="<end>",
        )
    if name.startswith("gemma3"):
        tokenizer = make_tokenizer("<start>", image_token="<soft>", boi_token="<start>", eoi_token="<end>")
        return t.Gemma3Processor(image_processor=t.Gemma3ImageProcessor(size=square), tokenizer=tokenizer, image_seq_length=4)
    if name == "lfm2_vl":
        image = t.Lfm2VlImageProcessor(
            downsample_factor=2,
            encoder_patch_size=4,
            min_image_tokens=4,
            max_image_tokens=16,
            max_num_patches=64,
            do_image_splitting=False,
        )
        tokenizer = make_tokenizer(
            image_token="<image>", image_start_token="<start>", image_end_token="<end>", image_thumbnail="<global-img>"
        )
        return t.Lfm2VlProcessor(image_processor=image, tokenizer=tokenizer)
    if name == "paligemma":
        return t.PaliGemmaProcessor(image_processor=t.SiglipImageProcessor(size=square, image_seq_length=16), tokenizer=tokenizer)
    if name == "mllama":
        return t.MllamaProcessor(image_processor=t.MllamaImageProcessor(size=square, max_image_tiles=2), tokenizer=tokenizer)
    raise KeyError(name)
