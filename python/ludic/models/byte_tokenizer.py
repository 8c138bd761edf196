"""A byte-level tokenizer for any text, made in memory without download or training.

`id = byte + 3`; 0 is padding, 1 starts a text (unused by the built-in tasks), 2 ends it; 259 ids in
all. It is an ordinary fast tokenizer of transformers, so that `save_pretrained`,
`AutoTokenizer.from_pretrained` and servers work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
BYTE_OFFSET = 3
VOCAB_SIZE = 256 + BYTE_OFFSET


NEWLINE_ID = ord("\n") + BYTE_OFFSET
LINE_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def make_line_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with the newline as its end token: each answer of a dialogue is a line.

    The chat template only adds that newline, so that each prompt begins with the tokens of the
    previous prompt and answer.
    """
    tokenizer = make_byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(NEWLINE_ID)
    tokenizer.chat_template = LINE_TEMPLATE
    return tokenizer


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer. Text that spells a special token, such as `<eos>`, is encoded as
    bytes, so that no text can end a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level tokenizers write a printable byte as it is, others as characters from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocab = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    vocab |= {chr(byte) if byte in printable else chr(next(others)): byte + BYTE_OFFSET for byte in range(256)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
