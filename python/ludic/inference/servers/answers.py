"""Responses that several kinds of servers share: their models and weight versions."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

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
