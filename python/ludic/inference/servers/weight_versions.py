"""The weights that a server says it samples from."""

from __future__ import annotations

from ludic.errors import InferenceError

INITIAL_VERSION = "default"
LARGEST_VERSION = 2**53
"""The largest whole number that every reader of JSON keeps."""


def version_number(version: object) -> int | None:
    """A version that is a number, however it is written; None for any other. What vLLM serves
    before the first push is `default`: 0."""
    if version == INITIAL_VERSION:
        return 0
    try:
        return None if version is None or isinstance(version, bool) else int(str(version))
    except ValueError:
        return None


def served_version(version: object, url: str) -> int | None:
    """`version_number` of what a server says. Raises InferenceError for a number that no version
    can be."""
    number = version_number(version)
    if number is not None and not 0 <= number <= LARGEST_VERSION:
        raise InferenceError(f"{url} says that it serves version {str(version)[:40]}; versions are from 0 to {LARGEST_VERSION}")
    return number
