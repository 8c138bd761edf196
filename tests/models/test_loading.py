"""Models and tokenizers by folder or name."""

import logging
from pathlib import Path

import pytest
from training_samples import tiny_model
from transformers import Qwen2Config

from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.loading import load_classifier, load_model, load_tokenizer


def test_a_tokenizer_can_be_in_a_folder_without_a_model(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("ab")["input_ids"] == [100, 101]
    assert loaded.chat_template == tokenizer.chat_template


def test_the_error_of_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer_config\.json .*no config\.json .*no adapter_config\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no config\.json .*no adapter_config\.json; .*folder"):
        load_model(str(tmp_path), "float32")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """Transformers would make one without words, to which every text is empty."""
    Qwen2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer; set tokenizer=PATH"):
        load_tokenizer(str(tmp_path))


def test_the_error_of_a_classifier_without_a_head_names_the_missing_weights(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    model, missing = load_classifier(str(tmp_path), "float32", description="model", num_labels=1)
    assert missing == {"score.weight"}
    assert model.config.num_labels == 1
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"judge could not be loaded .*scores"):
        load_classifier(str(tmp_path), "float32", description="the judge")


def test_a_classifier_of_a_language_model_is_loaded_without_a_table_of_its_weights(tmp_path):
    """transformers prints its LOAD REPORT on stderr; the caller of `load_classifier` gets the names
    and says what they mean. Other warnings stay."""
    from transformers import AutoModelForSequenceClassification

    tiny_model().save_pretrained(tmp_path)
    log, said = logging.getLogger("transformers.modeling_utils"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        _, missing = load_classifier(str(tmp_path), "float32", description="model", num_labels=1)
        assert missing == {"score.weight"}
        assert not [line for line in said if "LOAD REPORT" in line]
        AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
        assert [line for line in said if "LOAD REPORT" in line]
    finally:
        log.removeHandler(handler)
