"""Text of a model, a data set or an error as a terminal may show it."""

from __future__ import annotations

import unicodedata


def escape_controls(text: str, *, keep: str = "\n") -> str:
    """The text with every character as an escape that is neither printable, nor a space, nor in
    `keep`: no text moves the cursor, changes colours or its direction. Example: the escape
    character becomes `\\x1b`."""
    return "".join(char if char in keep or _is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"
