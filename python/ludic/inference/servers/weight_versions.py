"""The weights that a server says it samples from."""

from __future__ import annotations

INITIAL_VERSION = "default"


def version_number(version: object) -> int | None:
    """A version that is a number, however it is written; None for any other. What vLLM serves before the first push is `default`: 0."""
    if version == INITIAL_VERSION:
        return 0
    try:
        return None if version is None or isinstance(version, bool) else int(str(version))
    except ValueError:
        return None
