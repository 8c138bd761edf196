"""What is found out about a model on probe images."""

import gc
import logging
import weakref

import pytest
import torch
from tiny_vision import make_processor, make_tiny_vision
from transformers import AutoModelForSequenceClassification
from vision_sweep import SweptProcessor, make_swept_model

from ludic.errors import ConfigError
from ludic.images.store import ImageStore
from ludic.models.images.processor import ImageProcessor, attach_processor, find_processor
from ludic.models.images.rows import find_image_blocks
from ludic.models.images.support import LAYOUTS, check_images
from ludic.models.packed_attention import get_attention

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM-4V's processor


@pytest.mark.parametrize(
    ("name", "layouts", "several"),
    [
        ("qwen2_vl", LAYOUTS, True),
        ("qwen3_vl", LAYOUTS, True),
        ("glm4v", LAYOUTS, True),
        ("idefics3", LAYOUTS, True),
        ("mistral3", LAYOUTS, True),
        ("gemma3", LAYOUTS, True),
        ("llava_onevision", LAYOUTS, False),
        ("lfm2_vl", ("padded",), True),
        ("qwen3_5", ("padded",), True),
    ],
)
def test_the_exact_layouts_are_found_by_measurement(name, layouts, several, caplog):
    model, processor = make_tiny_vision(name)
    before, attention = set(processor.store.folder.rglob("*")), get_attention(model)
    with caplog.at_level(logging.INFO, "ludic"):
        found = check_images(model, processor)
    assert (found.layouts, found.several, processor.reads_several) == (layouts, several, several)
    assert (find_image_blocks(model) is not None) == (name == "gemma3")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("ludic")]
    assert len(lines) == len(LAYOUTS) - len(layouts) + (not several)
    assert all("\n" not in line for line in lines)
    assert set(processor.store.folder.rglob("*")) == before  # the run's store has no probes
    assert find_processor(model) is processor
    assert get_attention(model) == attention
    assert getattr(model.model, "rope_deltas", None) is None
    assert check_images(model, processor) is found


@pytest.mark.parametrize(
    ("name", "why"), [("paligemma", "PaliGemma.* in both directions"), ("mllama", "Mllama.* takes no .*mm_encoder_outputs")]
)
def test_models_that_cannot_be_trained_on_images_are_refused_in_a_line(name, why):
    model, processor = make_tiny_vision(name)
    with pytest.raises(ConfigError, match=why) as caught:
        check_images(model, processor)
    assert "\n" not in str(caught.value)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a pass that other ranks would not join"))
    with pytest.raises(ConfigError, match=why):
        check_images(model, processor)
    known = weakref.ref(model)
    del model, processor, caught
    gc.collect()
    assert known() is None


def test_a_processor_with_other_numbers_of_placeholders_is_refused():
    model, _ = make_tiny_vision("gemma3")
    made = make_processor("gemma3")
    other = ImageProcessor(type(made)(made.image_processor, made.tokenizer, image_seq_length=5), model.config, ImageStore())
    with pytest.raises(ConfigError, match=r"Gemma3Model makes .*\(3, 4, 64\) .*\[5, 5, 5\] placeholders"):
        check_images(model, other)


def test_features_that_differ_from_what_pixels_give_are_refused():
    model, processor = make_tiny_vision("llava")

    def brighten(module, args, keywords):
        pixels = keywords.get("pixel_values")
        return args, keywords if pixels is None else {**keywords, "pixel_values": 2 * pixels}

    model.register_forward_pre_hook(brighten, with_kwargs=True)
    with pytest.raises(ConfigError, match=r"Llava.* than pixels"):
        check_images(model, processor)


def test_a_new_projector_is_reported_and_hides_no_wrong_layout(caplog):
    for name, layouts in (("gemma3", LAYOUTS), ("lfm2_vl", ("padded",))):
        model, processor = make_tiny_vision(name)
        with torch.no_grad():
            for parameter in model.model.multi_modal_projector.parameters():
                parameter.zero_()
        caplog.clear()
        assert check_images(model, processor).layouts == layouts
        assert any("does not look at images" in message for message in caplog.messages)


def test_images_whose_tokens_see_each_other_in_windows_alone_are_found():
    """As in Gemma 4."""
    model = make_swept_model("gemma4")
    processor = ImageProcessor(SweptProcessor("gemma4", model), model.config, ImageStore())
    attach_processor(model, processor)
    assert check_images(model, processor).layouts == LAYOUTS
    assert find_image_blocks(model) == "tokens_ahead_in_windows"


def test_a_classifier_is_checked_by_what_its_head_reads():
    made, processor = make_tiny_vision("gemma3")
    made.config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(made.config).eval()
    attach_processor(model, processor)
    assert check_images(model, processor).layouts == LAYOUTS
    assert find_image_blocks(model) == "tokens_ahead"
