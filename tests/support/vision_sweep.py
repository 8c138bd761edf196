"""Tiny random models of the image-text classes that transformers has, and arrays that their towers
read, in place of processors: whatever an image processor does, a model gets arrays of such forms.

The default config of a class is made small by the names of its settings; `CHANGES` has what that
leaves open.
"""

import inspect
import json
import zlib

import numpy as np
import torch
from tiny_vision import END, IMAGE, START, VIDEO, make_tokenizer

from ludic.models.images.features import find_tower_owner

SIZES = {
    64: "hidden_size embed_dim d_model n_embd vision_output_dim out_hidden_size projection_dim projector_hidden_size text_hidden_size "
    "projector_input_dim projector_output_dim word_embed_proj_dim num_position_embeddings",
    96: "intermediate_size ffn_dim intermediate_size_mlp encoder_ffn_dim decoder_ffn_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size",
    16: "head_dim kv_channels global_head_dim image_size window_size hidden_size_per_layer_input q_lora_rank kv_lora_rank v_head_dim",
    8: "sliding_window qk_rope_head_dim qk_nope_head_dim",
    4: "num_attention_heads num_heads n_heads attention_heads n_head encoder_attention_heads decoder_attention_heads patch_size "
    "num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_hidden_layers depth num_layers n_layers encoder_layers decoder_layers num_key_value_heads num_global_key_value_heads "
    "num_experts_per_tok moe_k",
    300: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
TOKENS = {
    **{f"image_token_{form}": IMAGE for form in ("id", "index")},
    **{f"video_token_{form}": VIDEO for form in ("id", "index")},
    "image_patch_id": IMAGE,
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_index", "boi_token_id"), START),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_index", "eoi_token_id"), END),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T, V = "text_config.", "vision_config."
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
M_ROPE = {f"{T}rope_parameters": ROPE}
DEEP = {f"{V}depth": 3, f"{V}deepstack_visual_indexes": [0, 1]}
PINS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
GEMMA_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
CHANGES = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"num_query_tokens": 4},
    "cohere_compass": {**DEEP, f"{T}rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "cosmos3_omni": DEEP,
    "ernie4_5_vl_moe": {f"{T}rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}, f"{T}moe_intermediate_size": [32, 16]},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {
        f"{T}per_layer_config": None,
        f"{T}use_bidirectional_attention": "vision",
        "vision_config": {**GEMMA_TOWER, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 16},
    },
    "glm46v": M_ROPE,
    "glm4v": M_ROPE,
    "glm4v_moe": {f"{T}rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    "glm_ocr": M_ROPE,
    "glmga": M_ROPE,
    "granite4_vision": {**PINS, "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "hunyuan_vl": {
        f"{T}head_dim": 16,
        f"{T}num_key_value_heads": 4,
        f"{V}num_key_value_heads": 4,
        f"{T}rope_parameters": {
            "rope_type": "xdrope",
            "rope_theta": 10000.0,
            "xdrope_section": [4, 2, 1, 1],
            "factor": 1.0,
            "alpha": 1000.0,
        },
    },
    "idefics3": {"scale_factor": 2},
    "lfm2_vl": {
        f"{V}num_patches": 64,
        f"{T}layer_types": ["conv", "full_attention"],
        f"{T}full_attn_idxs": [1],
        f"{T}block_multiple_of": 8,
    },
    "lighton_ocr": {f"{V}image_size": 32},
    "llama4": {f"{V}intermediate_size": 256},
    "llava_next": PINS,
    "llava_next_video": PINS,
    "llava_onevision": PINS,
    "mistral3": {f"{V}image_size": 32},
    "paddleocr_vl": M_ROPE,
    "qwen2_5_omni_thinker": {**M_ROPE, "vision_start_token_id": START},
    "qwen2_5_vl": {**M_ROPE, f"{V}fullatt_block_indexes": [1]},
    "qwen2_vl": M_ROPE,
    "qwen3_omni_moe_thinker": {**DEEP, "vision_start_token_id": START},
    "qwen3_vl": DEEP,
    "qwen3_vl_moe": DEEP,
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "smolvlm": {"scale_factor": 2},
    "step3p7": {f"{T}sliding_window": 8},
    "vipllava": {f"{V}num_hidden_layers": 3, "vision_feature_layers": [-1, -2, 1, 2, 0]},
}


def make_swept_model(name):
    """A random model of the class that transformers has for the model type `name`."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    kind = CONFIG_MAPPING[name]
    settings = _shrink(kind().to_dict())
    for path, value in CHANGES.get(name, {}).items():
        *owners, last = path.split(".")
        section = settings
        for owner in owners:
            section = section[owner]
        section[last] = value
    config = kind(**{key: value for key, value in settings.items() if key != "model_type"})
    torch.manual_seed(0)
    try:
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.05 if "patch_embed" in parameter_name else 0.15)
            elif "bias" in parameter_name and not parameter.any():
                parameter.normal_(0, 0.02)
    return model


def _shrink(settings):
    small = {name: value for name, value in settings.items() if name not in ("dtype", "architectures", "transformers_version")}
    for name, value in small.items():
        if isinstance(value, dict) and name.endswith("config"):
            small[name] = _shrink(value)
        elif name in TOKENS:
            small[name] = TOKENS[name]
        elif name in SMALL and isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
            small[name] = [SMALL[name]] * len(value)
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[name] = SMALL[name]
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list | tuple):
            kinds = list(dict.fromkeys(value))
            small[name] = (2 * kinds)[: max(2, len(kinds))]
        elif name == "rope_parameters" and "mrope_section" in json.dumps(value):
            small[name] = {**value, "mrope_section": [4, 2, 2]}
    if isinstance(small.get("layer_types"), list) and "num_hidden_layers" in small:
        small["num_hidden_layers"] = len(small["layer_types"])
    return small


class SweptProcessor:
    """Stands for a processor of transformers: it gives random arrays, the same for the same
    picture. A picture is 56 or 112 pixels wide."""

    image_token = "<image>"

    def __init__(self, name, model):
        self.tokenizer, self.image_processor, self._model = make_tokenizer(), object(), model
        owner = find_tower_owner(model)
        named = inspect.signature(owner.get_image_features).parameters if hasattr(owner, "get_image_features") else {}
        self._make, self._axis = ARRAYS.get(name, _grid if "image_grid_thw" in named else _square), int(name in TILED)
        self._read, self._named, self._counts = getattr(owner, "get_image_features", None), named, {}

    def __call__(self, images, text, return_tensors=None, return_text_replacement_offsets=False, **options):
        made = [self._process(np.asarray(image)) for image in images[0]]
        first, *rest = text[0].split(self.image_token)
        blocks = [f"<start>{self.image_token * count}<end>" for _, count in made]
        ids = torch.tensor([self.tokenizer(first + "".join(map("".join, zip(blocks, rest, strict=True))))["input_ids"]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        taken = inspect.signature(self._model.forward).parameters
        inputs |= {name: (ids == IMAGE).long() for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
        for name in made[0][0]:
            inputs[name] = torch.cat([arrays[name] for arrays, _ in made], self._axis)
        if return_text_replacement_offsets:
            inputs["text_replacement_offsets"] = [[{"replacement": block} for block in blocks]]
        return inputs

    @torch.no_grad()
    def _process(self, picture):
        key = zlib.crc32(picture.tobytes())
        arrays = self._make(self._model.config, picture.shape[1] == 112, torch.Generator().manual_seed(key))
        if key not in self._counts:
            output = self._read(**{name: arrays[name] for name in arrays if name in self._named}, return_dict=True)
            found = output.get("pooler_output")
            if found is None:
                layers = output.get("deepstack_features")
                found = layers[0][1] if layers else output["last_hidden_state"]
            found = found if isinstance(found, list | tuple) else [found]
            self._counts[key] = sum(each.numel() // each.shape[-1] for each in found)
        return arrays, self._counts[key]


def _read_first(config, *names, default=None):
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _grid(config, wide, draw):
    tower = config.vision_config
    size = _read_first(tower, "patch_size", "spatial_patch_size")
    values = (
        _read_first(tower, "in_channels", "num_channels", default=3)
        * _read_first(tower, "temporal_patch_size", default=1)
        * size**2
    )
    columns = 8 if wide else 4
    return {"pixel_values": torch.randn(4 * columns, values, generator=draw), "image_grid_thw": torch.tensor([[1, 4, columns]])}


def _patches(config, wide, draw):
    columns, size = 8 if wide else 4, config.vision_config.patch_size
    pixels = torch.randn(4 * columns, 3, size, size, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, columns]])}


def _square(config, wide, draw):
    size = _read_first(getattr(config, "vision_config", config), "image_size", default=16)
    size = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(1, 3, size, size, generator=draw)}


def _crops(config, wide, draw):
    size, crops = ((16, 32), 3) if wide else ((32, 32), 5)
    return {"pixel_values": torch.randn(1, crops, 3, 16, 16, generator=draw), "image_sizes": torch.tensor([size])}


def _whole(config, wide, draw):
    size = (16, 32) if wide else (32, 32)
    return {"pixel_values": torch.randn(1, 3, *size, generator=draw), "image_sizes": torch.tensor([size])}


def _tiles(config, wide, draw):
    tiles, size = 3 if wide else 2, config.vision_config.image_size
    shape = (1, tiles, size, size)
    return {
        "pixel_values": torch.randn(1, tiles, 3, size, size, generator=draw),
        "pixel_attention_mask": torch.ones(shape, dtype=torch.long),
    }


def _flexible(config, wide, draw):
    columns = 8 if wide else 4
    mask = (torch.arange(64) < 4 * columns).long()[None]
    shapes = torch.tensor([[4, columns]])
    return {"pixel_values": torch.randn(1, 64, 48, generator=draw), "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _placed(config, wide, draw):
    places = torch.stack(torch.meshgrid(torch.arange(12 if wide else 6), torch.arange(6), indexing="xy"), -1).reshape(1, -1, 2)
    places = torch.nn.functional.pad(places, (0, 0, 0, 72 - places.shape[1]), value=-1)
    return {"pixel_values": torch.rand(1, 72, 48, generator=draw), "image_position_ids": places}


def _merged(config, wide, draw):
    return {**_grid(config, wide, draw), "image_merge_sizes": torch.tensor([2])}


def _flat(config, wide, draw):
    return {"pixel_values": torch.randn(1, 12 if wide else 8, 3 * config.patch_size**2, generator=draw)}


ARRAYS = {
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), _crops),
    **dict.fromkeys(("mistral3", "lighton_ocr"), _whole),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), _tiles),
    "paddleocr_vl": _patches,
    "lfm2_vl": _flexible,
    "gemma4": _placed,
    "video_llama_3": _merged,
    "fuyu": _flat,
}
TILED = ("idefics2", "idefics3", "smolvlm")
"""Several images of a prompt are along dimension 1."""
