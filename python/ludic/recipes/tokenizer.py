"""The documented path of `ludic.models.byte_tokenizer`."""

from ludic.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer, make_line_tokenizer

__all__ = ["EOS_ID", "PAD_ID", "VOCAB_SIZE", "make_byte_tokenizer", "make_line_tokenizer"]
