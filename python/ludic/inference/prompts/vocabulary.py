"""Compares the vocabularies of tokenizers."""

from __future__ import annotations

from typing import Any


def reads_same_ids(reader: Any, writer: Any) -> bool:
    """Whether every token id of `writer` is the same token in `reader`, so that ids can be passed
    from one model to the other without decoding. `reader` may have more tokens, and may split text
    differently."""
    if reader is None or writer is None:
        return False
    return reader is writer or bool(writer.get_vocab().items() <= reader.get_vocab().items())
