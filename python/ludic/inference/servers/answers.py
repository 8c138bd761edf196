"""What servers of several kinds answer alike: which models they have, and which weights."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

LONG_PARTS = ("logprobs", "token_ids", "prompt_token_ids")
"""Of an answer: an entry for each token."""


class ServedModel(Struct):
    """One of `GET /v1/models`."""

    id: str
    max_model_len: int | None = None
    """Tokens of prompt and answer together, where the server says it."""


class ModelList(Struct):
    """`GET /v1/models`."""

    data: list[ServedModel]


class WeightInfo(Struct):
    """`GET /weight_info`."""

    weight_version: str | int | None


def without_nulls(answer: Any) -> Any:
    """JSON without the keys whose value is null. `LONG_PARTS` are left as they are."""
    if isinstance(answer, list):
        return [without_nulls(element) for element in answer]
    if not isinstance(answer, dict):
        return answer
    return {key: value if key in LONG_PARTS else without_nulls(value) for key, value in answer.items() if value is not None}
