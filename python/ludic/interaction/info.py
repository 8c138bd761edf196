"""Merges the info dictionaries of a step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger(__name__)

RESERVED_INFO_KEYS: frozenset[str] = frozenset()
_MISSING = object()


def merge_step_info(
    *,
    client_info: Mapping[str, Any],
    env_info: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    reserved_keys: Collection[str] = frozenset(),
) -> dict[str, Any]:
    """The client's info, overridden by the environment's, overridden by `extra`. Reserved keys are
    not overridden; a different value for one is logged as a warning."""
    merged = dict(client_info)
    reserved = RESERVED_INFO_KEYS | set(reserved_keys)
    for source in (env_info or {}, extra or {}):
        for key, value in source.items():
            if key in reserved and merged.get(key, _MISSING) not in (_MISSING, value):
                logger.warning("info key %r is reserved: kept %r, ignored %r", key, merged[key], value)
                continue
            merged[key] = value
    return merged
