"""Models and tokenizers that a recipe names."""

from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.model import load_model, load_tokenizer


def test_a_tokenizer_may_lie_in_a_folder_without_a_model(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("ab")["input_ids"] == [100, 101]
    assert loaded.chat_template == tokenizer.chat_template


def test_a_folder_with_neither_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer_config\.json and no config\.json and no adapter_config\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no config\.json and no adapter_config\.json; give a folder"):
        load_model(str(tmp_path), "float32")
