"""Versions of weights as servers report them."""

from __future__ import annotations

from ludic.errors import InferenceError

INITIAL_VERSION = "default"
LARGEST_VERSION = 2**53
"""The largest integer that every JSON parser keeps exact."""


def version_number(version: object) -> int | None:
    """The version as an int, also from a string; None if it is not a number. `default`, vLLM's name
    for the weights before the first push, is 0."""
    if version == INITIAL_VERSION:
        return 0
    try:
        return None if version is None or isinstance(version, bool) else int(str(version))
    except ValueError:
        return None


def is_at_least(version: object, least: int) -> bool:
    """Whether a server's version is one that was published, and no older than `least`."""
    number = version_number(version)
    return version != INITIAL_VERSION and number is not None and number >= least


def check_served_version(version: object, url: str) -> int | None:
    """`version_number` of a version that a server reports. Raises InferenceError for a number that
    cannot be a version."""
    number = version_number(version)
    if number is not None and not 0 <= number <= LARGEST_VERSION:
        raise InferenceError(f"{url} reports weight version {str(version)[:40]}; versions are from 0 to {LARGEST_VERSION}")
    return number
