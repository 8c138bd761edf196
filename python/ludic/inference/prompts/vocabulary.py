"""Whether token ids can pass from one model to another without being text in between."""

from __future__ import annotations

from typing import Any


def reads_same_ids(reader: Any, writer: Any) -> bool:
    """Whether every id of `writer`'s stands for the same token in `reader`, which may have more.
    How they cut text may differ."""
    if reader is None or writer is None:
        return False
    return reader is writer or bool(writer.get_vocab().items() <= reader.get_vocab().items())
