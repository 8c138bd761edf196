"""A small model that sees images, made in memory without download or training: a Qwen2-VL over
bytes, for the built-in task of pictures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ludic.errors import import_optional
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.images.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
PATCH, MERGE, TOWER_WIDTH = 4, 2, 32
MOST_PIXELS = 96 * 96


def make_image_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with the tokens of images, and a chat template that writes them. Text that
    spells one of its special tokens is read as the token: `PromptEncoder` refuses it."""
    tokenizer = make_byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_small_image_config(tokenizer: Any, **text: Any) -> Any:
    """The configuration of a Qwen2-VL over the tokens of `tokenizer`. `text`: of its language
    model, such as `hidden_size`. An image token stands for 8 x 8 pixels."""
    from transformers import AutoConfig

    image, video, start, end = tokenizer.convert_tokens_to_ids(list(TOKENS))
    dimensions = text["hidden_size"] // text["num_attention_heads"] // 2
    sections = [dimensions - 2 * (dimensions // 4), dimensions // 4, dimensions // 4]  # of time, height and width
    return AutoConfig.for_model(
        "qwen2_vl",
        text_config={**text, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}},
        vision_config={
            "depth": 1,
            "embed_dim": TOWER_WIDTH,
            "hidden_size": text["hidden_size"],
            "num_heads": 4,
            "patch_size": PATCH,
            "mlp_ratio": 2,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )


def draw_image_model(model: Any) -> Any:
    """The model. Its weights are drawn with the variance 1 / inputs, its embeddings with the
    deviation .05: with transformers' .02 it does not learn to see within hundreds of steps."""
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.05 if parameter is embedding else 1 / math.sqrt(parameter[0].numel()))
    return model


def make_small_processor(tokenizer: Any, config: Any) -> ImageProcessor:
    """The processor of `make_small_image_config`. Raises MissingExtraError without torchvision."""
    import_optional("torchvision", "images")
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    pixels = {"min_pixels": (PATCH * MERGE) ** 2, "max_pixels": MOST_PIXELS}
    images = Qwen2VLImageProcessor(**sizes, **pixels, image_mean=[0.95] * 3, image_std=[0.25] * 3)
    videos = Qwen2VLVideoProcessor(**sizes)
    processor = Qwen2VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    return ImageProcessor(processor, config)
