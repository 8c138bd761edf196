"""The byte tokenizer: every text round-trips, in memory and through a folder, and no text becomes a
special token."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ludic.models.byte_tokenizer import BYTE_OFFSET, EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_ids_are_bytes_plus_three(tokenizer: PreTrainedTokenizerFast) -> None:
    # '4' is byte 52 and '>' is byte 62; e with an acute accent is the two bytes 195 and 169.
    assert tokenizer.encode("4>é") == [55, 65, 198, 172]


def test_special_ids_and_size_are_as_documented(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID) == (0, 2)
    assert len(tokenizer) == VOCAB_SIZE == 259


def test_the_alphabet_equals_that_of_byte_level_tokenizers(tokenizer: PreTrainedTokenizerFast) -> None:
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokenizer.get_vocab())


@given(text=st.text())
def test_every_text_round_trips_byte_for_byte(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == [byte + BYTE_OFFSET for byte in text.encode()]
    assert tokenizer.decode(ids) == text


@given(text=st.text())
def test_a_saved_tokenizer_gives_the_same_ids(
    tokenizer: PreTrainedTokenizerFast, reloaded: PreTrainedTokenizerFast, text: str
) -> None:
    assert reloaded.encode(text) == tokenizer.encode(text)
    assert reloaded.decode(reloaded.encode(text)) == text


@pytest.mark.parametrize("which", ["tokenizer", "reloaded"])
def test_text_that_spells_a_special_token_stays_text(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(which)
    ids = tokenizer.encode("9<eos>9")
    assert EOS_ID not in ids
    assert tokenizer.decode(ids) == "9<eos>9"


def test_decoding_can_omit_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode([52, EOS_ID, PAD_ID], skip_special_tokens=True) == "1"
