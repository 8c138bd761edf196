"""All image-text classes of transformers: which are exact in which layout, and why others are not.
`pytest -m slow` runs it."""

import pytest
from tiny_vision import make_picture
from vision_sweep import SweptProcessor, make_swept_model

from ludic.errors import ConfigError
from ludic.images.store import ImageStore
from ludic.models.images.features import encode_images, set_trained_parts
from ludic.models.images.processor import ImageProcessor, attach_processor
from ludic.models.images.support import LAYOUTS, check_images

pytestmark = pytest.mark.slow
EXACT = [
    "aria",
    "aya_vision",
    "cohere2_vision",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "deepseek_vl",
    "ernie4_5_vl_moe",
    "exaone4_5",
    "fuyu",
    "gemma3",
    "gemma4",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glmga",
    "granite4_vision",
    "hunyuan_vl",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "janus",
    "lighton_ocr",
    "llama4",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "minimax_m3_vl",
    "mistral3",
    "paddleocr_vl",
    "qianfan_ocr",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
    "shieldgemma2",
    "smolvlm",
    "step3p7",
    "video_llama_3",
    "vipllava",
]
WITHOUT_TREES = ["got_ocr2", "pp_chart2table"]
"""Their attention is eager alone."""
PADDED = ["lfm2_vl", "lfm3_vl", "qwen3_5", "qwen3_5_moe"]
"""Convolutions and linear attention run on from one sequence of a row into the next."""
REFUSED = {
    "paligemma": "both directions",
    "blip-2": "pixel_values",
    **dict.fromkeys(("florence2", "mllama"), "mm_encoder_outputs"),
    **dict.fromkeys(("idefics", "kosmos-2", "mistral4", "pix2struct", "pp_formulanet"), "no token of images"),
}
NOT_MADE = {
    "without mm_encoder_outputs": "blip evolla git kosmos-2.5 pi0 udop vision-encoder-decoder",
    "need timm": "fast_vlm gemma3n perception_lm",
    "encoder and decoder": "t5gemma2",
    "generates in blocks": "diffusion_gemma",
    "features depend on the prompt, or on a video": "instructblip instructblipvideo",
    "features for tokens that are no placeholders": "ovis2",
    "images are concatenated along their width": "minicpm_ocr minicpmv4_6 minicpmv4_7",
    "features must be three-dimensional": "video_llava",
    "no tiny config was found": """
        chameleon deepseek_ocr2 deepseek_vl_hybrid dots3_note emu3 gemma4_unified glm5_next granite_docling inkling2 inkling_mm_model
        kimi_k25 mistral_large4 molmo2 muse_glimmer muse_spark nemotron_h_omni qwen4_exp unlimited_ocr""",
}


def check(name):
    model = make_swept_model(name)
    processor = ImageProcessor(SweptProcessor(name, model), model.config, ImageStore())
    attach_processor(model, processor)
    return check_images(model, processor)


@pytest.mark.parametrize("name", EXACT)
def test_all_layouts_are_exact(name):
    assert check(name).layouts == LAYOUTS


@pytest.mark.parametrize("name", [*EXACT, *WITHOUT_TREES, *PADDED])
def test_the_tower_is_frozen_and_the_language_model_is_not(name):
    model = make_swept_model(name)
    processor = ImageProcessor(SweptProcessor(name, model), model.config, ImageStore())
    image = processor.process(processor.store.add(make_picture(56, 56)))
    set_trained_parts(model, "frozen")
    assert not any(tensor.requires_grad for tensor in encode_images(model, [image])[0].tensors)
    assert all(parameter.requires_grad for parameter in model.get_input_embeddings().parameters())
    set_trained_parts(model, "trained")
    assert any(tensor.requires_grad for tensor in encode_images(model, [image])[0].tensors)


@pytest.mark.parametrize("name", WITHOUT_TREES)
def test_eager_attention_computes_no_trees(name):
    assert check(name).layouts == ("padded", "padding_free")


@pytest.mark.parametrize("name", PADDED)
def test_padded_rows_alone_are_exact(name):
    assert check(name).layouts == ("padded",)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_trained_on_images_says_why(name):
    with pytest.raises(ConfigError, match=REFUSED[name]) as caught:
        check(name)
    assert "\n" not in str(caught.value)


def test_every_class_is_in_one_list():
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    listed = [*EXACT, *WITHOUT_TREES, *PADDED, *REFUSED, *" ".join(NOT_MADE.values()).split()]
    assert sorted(listed) == sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
