"""Responses that several kinds of servers share: their models and their weight versions."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ludic.errors import InferenceError

LONG_PARTS = ("logprobs", "token_ids", "prompt_token_ids")
"""Keys of a completion with an entry for each token."""


class ServedModel(Struct):
    """An entry of `GET /v1/models`."""

    id: str
    max_model_len: int | None = None
    """Prompt plus completion tokens, if the server reports it."""
    root: str | None = None
    """The folder or the name that the model was loaded from, if the server reports it."""


class ModelList(Struct):
    """Response of `GET /v1/models`."""

    data: list[ServedModel]


class WeightInfo(Struct):
    """Response of `GET /weight_info`."""

    weight_version: str | int | None


def drop_nulls(answer: Any) -> Any:
    """Drop the keys whose value is null. `LONG_PARTS` are not searched."""
    if isinstance(answer, list):
        return [drop_nulls(element) for element in answer]
    if not isinstance(answer, dict):
        return answer
    return {key: value if key in LONG_PARTS else drop_nulls(value) for key, value in answer.items() if value is not None}


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
