"""The documented path of `ludic.models.byte_tokenizer`."""

from ludic.models.byte_tokenizer import make_byte_tokenizer, make_line_tokenizer

__all__ = ["make_byte_tokenizer", "make_line_tokenizer"]
